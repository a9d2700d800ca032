"""Schedules: the learning rate factor as a pure function of `Progress`.

Schedules depend on the completed *fraction* of training, not on the number of steps, so one schedule
works for every global batch: a batch sixteen times as large takes a sixteenth of the steps and warms up
over the same number of samples. Each helper returns a plain `functools.partial`, which is picklable and
has no state to restore.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from anybatch.errors import InputError

if TYPE_CHECKING:
    from anybatch.task import Progress, Schedule


def warmup_cosine(warmup: float = 0.1, floor: float = 0.0) -> Schedule:
    """Linear warmup from 0 to 1 in the fraction `warmup` of training, then cosine decay to `floor`.

    The decay follows Loshchilov and Hutter (2017), "SGDR", equation 5, without restarts; the warmup
    follows Goyal et al. (2017), section 2.2. Raises `InputError` if `warmup` or `floor` is
    not between 0 and 1.
    """
    _check(warmup, floor)
    return partial(_factor, warmup=warmup, floor=floor, shape=_cosine)


def warmup_linear(warmup: float = 0.1, floor: float = 0.0) -> Schedule:
    """Linear warmup from 0 to 1 in the fraction `warmup` of training, then linear decay to `floor`.

    Raises `InputError` if `warmup` or `floor` is not between 0 and 1.
    """
    _check(warmup, floor)
    return partial(_factor, warmup=warmup, floor=floor, shape=_linear)


def warmup_constant(warmup: float = 0.1) -> Schedule:
    """Linear warmup from 0 to 1 in the fraction `warmup` of training, then constant at 1.

    Raises `InputError` if `warmup` is not between 0 and 1.
    """
    return warmup_linear(warmup, floor=1.0)


def scaled_lr(lr: float, batch: int, reference: int, most: float, power: float = 0.5) -> float:
    """Scales the learning rate `lr` from the global batch `reference` to the global batch `batch`:
    `lr * (batch / reference) ** power`, at most `most`, or `lr` if that is larger.

    For Adam, `power` is 0.5 (Malladi, Lyu, Panigrahi and Arora (2022), "On the SDEs and scaling rules
    for adaptive gradient algorithms"); only the learning rate is scaled, and the betas are unchanged.
    For SGD, `power` is 1 (Goyal et al. (2017), section 2.1).
    """
    return min(lr * (batch / reference) ** power, max(lr, most))


def _check(warmup: float, floor: float) -> None:
    for name, value in (("warmup", warmup), ("floor", floor)):
        if not 0 <= value <= 1:
            raise InputError(
                f"the schedule's {name} is {value!r}, but it is a fraction: give 0 to 1."
            )


def _factor(
    progress: Progress, warmup: float, floor: float, shape: Callable[[float], float]
) -> float:
    # The completed fraction at the *middle* of the step that is about to run. At its start, the first
    # step would have a learning rate of zero, and with a very large batch a run may have only 20 steps.
    half_step = 0.5 / progress.total_steps if progress.total_steps else 0.0
    done = min(1.0, progress.fraction + half_step)
    if done < warmup:
        return done / warmup
    return floor + (1 - floor) * shape((done - warmup) / (1 - warmup) if warmup < 1 else 1.0)


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))


def _linear(done: float) -> float:
    return 1 - done

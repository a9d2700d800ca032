"""Schedules: the factor for the learning rate as a pure function of `Progress`.

They go by the *fraction* of training that is done, not by a count of steps, so one schedule serves
every global batch: a batch sixteen times as large makes a sixteenth of the steps, and warms up over
the same samples. Each helper returns a plain `functools.partial`, which can be sent to a worker
process and costs nothing to restore, since there is no state in it.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from anybatch.errors import InputError

if TYPE_CHECKING:
    from anybatch.task import Progress, Schedule


def warmup_cosine(warmup: float = 0.1, floor: float = 0.0) -> Schedule:
    """Linear from 0 to 1 over the first `warmup` of training, then half a cosine down to `floor`.

    The decay is that of Loshchilov and Hutter (2017), "SGDR", equation 5, without restarts; the
    warm-up that of Goyal et al. (2017), section 2.2. Raises `InputError` if `warmup` or `floor` is
    not between 0 and 1.
    """
    _check(warmup, floor)
    return partial(_cosine, warmup=warmup, floor=floor)


def warmup_linear(warmup: float = 0.1, floor: float = 0.0) -> Schedule:
    """Linear from 0 to 1 over the first `warmup` of training, then linear down to `floor`.

    Raises `InputError` if `warmup` or `floor` is not between 0 and 1.
    """
    _check(warmup, floor)
    return partial(_linear, warmup=warmup, floor=floor)


def warmup_constant(warmup: float = 0.1) -> Schedule:
    """Linear from 0 to 1 over the first `warmup` of training, then 1.

    Raises `InputError` if `warmup` is not between 0 and 1.
    """
    return warmup_linear(warmup, floor=1.0)


def scaled_lr(lr: float, batch: int, reference: int, most: float, power: float = 0.5) -> float:
    """The learning rate at a global `batch`, where it is `lr` at the `reference`: it grows with that
    power of the batch, up to `most`, or `lr` if that is larger.

    For Adam the power is 0.5 (Malladi, Lyu, Panigrahi and Arora (2022), "On the SDEs and scaling rules
    for adaptive gradient algorithms"), and of that rule the learning rate alone is taken: the betas
    stay. For SGD it is 1 (Goyal et al. (2017), section 2.1).
    """
    return min(lr * (batch / reference) ** power, max(lr, most))


def _check(warmup: float, floor: float) -> None:
    for name, value in (("warmup", warmup), ("floor", floor)):
        if not 0 <= value <= 1:
            raise InputError(
                f"the schedule's {name} is {value!r}, but it is a fraction: give 0 to 1."
            )


def _cosine(progress: Progress, warmup: float, floor: float) -> float:
    done = _middle(progress)
    if done < warmup:
        return done / warmup
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * _part(done, warmup)))


def _linear(progress: Progress, warmup: float, floor: float) -> float:
    done = _middle(progress)
    if done < warmup:
        return done / warmup
    return floor + (1 - floor) * (1 - _part(done, warmup))


def _middle(progress: Progress) -> float:
    """The fraction done in the *middle* of the step that is about to run, 0 to 1.

    At its start, the first step would run at a rate of zero: one step in a thousand does not miss
    it, but at a very large batch a whole training may be twenty steps.
    """
    half_step = 0.5 / progress.total_steps if progress.total_steps else 0.0
    return min(1.0, progress.fraction + half_step)


def _part(done: float, warmup: float) -> float:
    """How far `done` is on the way from `warmup` to 1."""
    return (done - warmup) / (1 - warmup) if warmup < 1 else 1.0

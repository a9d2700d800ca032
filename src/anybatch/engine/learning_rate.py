"""Learning rate: set for each step by the task's schedule or by a torch scheduler.

A schedule is a function of training progress, counted over all ranks, so the rate does not depend on
the number of ranks. It is set right before the update, from committed progress only: a step that is
redone calls the schedule again and gets the same result.

A scheduler may hold arbitrary objects, so it is not saved with a run. Its state is restored by
replaying what produced it, which takes microseconds: the number of steps or, for a scheduler driven by
measured values, those values.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from anybatch.errors import InputError
from anybatch.events import step_number
from anybatch.task import Progress, Schedule


class LearningRate:
    """Sets the learning rate of each parameter group, by the task's schedule or by a torch scheduler.

    Args:
        follows: whether the rates follow the batch; see `Ramp.learning_rate`.
        evaluates: whether there will be evaluations, which a `ReduceLROnPlateau` requires.

    Attributes:
        evaluated: losses with which a `ReduceLROnPlateau` has been stepped.

    Raises `InputError` if `scheduler` returns an unsupported value.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Schedule | None = None,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        interval: Literal["epoch", "step"] | None = None,
        evaluates: bool = False,
        follows: bool = False,
    ) -> None:
        self._groups = optimizer.param_groups
        self._schedule = schedule
        self._base = [_rate_of(group) for group in self._groups]
        self._follows = follows
        if (schedule is not None or follows) and any(map(math.isnan, self._base)):
            what = "schedule" if schedule is not None else "ramp of the global batch"
            raise InputError(
                f"the {what} multiplies the learning rate, and {type(optimizer).__name__} has none"
                " (lr=None: it chooses its own): give it one, or do without."
            )
        self._interval = interval
        self._scheduler = None
        if scheduler is not None:
            self._scheduler = _checked_scheduler(scheduler(optimizer), interval, evaluates)
        self.evaluated: list[float] = []

    @property
    def current(self) -> float:
        return _rate_of(self._groups[0])

    def before_update(self, progress: Progress, follows: float = 1.0) -> None:
        """Set the rates of the next update, multiplied by `follows`; see `Ramp.learning_rate`."""
        if self._schedule is None and not self._follows:
            return
        factor = follows
        if self._schedule is not None:
            factor *= _checked_factor(_asked(self._schedule, progress), progress)
        for group, base in zip(self._groups, self._base, strict=True):
            rate = group["lr"]
            if isinstance(rate, torch.Tensor):
                rate.fill_(base * factor)
            else:
                group["lr"] = base * factor

    def after_update(self, num_epochs: int) -> None:
        """Step a torch scheduler. `num_epochs`: number of epochs that ended with the update."""
        if self._scheduler is None or isinstance(self._scheduler, ReduceLROnPlateau):
            return
        for _ in range(num_epochs if self._interval == "epoch" else 1):
            self._scheduler.step()

    def after_evaluation(self, loss: float) -> None:
        """Step a scheduler that is driven by the held-out `loss`."""
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(loss)
            self.evaluated.append(loss)

    def skip(self, steps: int, epochs: int, evaluated: Sequence[float] = ()) -> None:
        """Advance as if `steps` steps had been taken, with which `epochs` epochs ended, and evaluations
        had given the losses `evaluated`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the optimizer takes no steps meanwhile
            for _ in range(steps if self._interval == "step" else 0):
                self.after_update(0)
            if self._interval == "epoch":
                self.after_update(epochs)
        for loss in evaluated:
            self.after_evaluation(loss)


def _rate_of(group: Mapping[str, Any]) -> float:
    """Returns the learning rate of a parameter group; NaN if the optimizer chooses its own."""
    rate = group.get("lr")
    return math.nan if rate is None else float(rate)


def _asked(schedule: Schedule, progress: Progress) -> object:
    try:
        return schedule(progress)
    except TypeError as error:  # usually a function that expects the optimizer
        raise InputError(
            f"the schedule raised TypeError: {error}. It is called with an anybatch.Progress and"
            " returns the factor for the learning rate; a function that makes a torch scheduler of the"
            " optimizer is given to the task as scheduler=..."
        ) from error


def _checked_factor(factor: object, progress: Progress) -> float:
    if isinstance(factor, torch.Tensor) and factor.numel() == 1:
        factor = float(factor)
    if not isinstance(factor, int | float) or not math.isfinite(factor):
        raise InputError(
            f"the schedule returned {factor!r} for step {step_number(progress.step)} (progress.step is"
            f" {progress.step}): return a finite number, by which the learning rate is multiplied."
        )
    return float(factor)


def _checked_scheduler(scheduler: object, interval: str | None, evaluates: bool) -> LRScheduler:
    if not isinstance(scheduler, LRScheduler):
        raise InputError(
            f"the scheduler function returned a value of type {type(scheduler).__name__}: return a"
            " torch.optim.lr_scheduler.LRScheduler made from the optimizer it was given."
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        if not evaluates:
            raise InputError(
                "the scheduler function returned a ReduceLROnPlateau, which goes by the loss of"
                " evaluations, and the task has no held-out data: give it valid=..., or a scheduler"
                " that goes by steps."
            )
        if scheduler.mode != "min":
            raise InputError(
                f"the scheduler function returned a ReduceLROnPlateau with mode={scheduler.mode!r}, but"
                " it goes by the loss of evaluations, which is the lower the better: give mode='min'."
            )
    elif interval is None:
        raise InputError(
            f"the scheduler function returned a {type(scheduler).__name__}, which counts the calls of"
            " its step(): say whether that is once per epoch (scheduler_interval='epoch', as in torch's"
            " own examples) or once per global step (scheduler_interval='step', as in transformers')."
        )
    return scheduler

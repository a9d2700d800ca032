"""The learning rate of a step, by the task's schedule or by a torch scheduler.

A schedule is a function of what has been trained, counted over all ranks, so the rate does not depend
on their number. It is set right before the update, from committed progress alone: a step that is redone
asks again and gets the same answer.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from anybatch.errors import InputError
from anybatch.task import Progress, Schedule


class LearningRate:
    """The learning rate of each group, by the task's schedule or by a torch scheduler."""

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Schedule | None = None,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    ) -> None:
        self._groups = optimizer.param_groups
        self._schedule = schedule
        self._base = [float(group["lr"]) for group in self._groups if "lr" in group]
        self._scheduler = _checked_scheduler(scheduler(optimizer)) if scheduler else None

    @property
    def current(self) -> float:
        """The rate of the first group."""
        return float(self._groups[0].get("lr", float("nan")))

    def before_update(self, progress: Progress) -> None:
        """Set the rates of the coming update."""
        if self._schedule is None:
            return
        factor = _checked_factor(self._schedule(progress), progress)
        for group, base in zip(self._groups, self._base, strict=True):
            rate = group["lr"]
            if isinstance(rate, torch.Tensor):
                rate.fill_(base * factor)
            else:
                group["lr"] = base * factor

    def after_update(self) -> None:
        """Let a torch scheduler take its step."""
        if self._scheduler is not None:
            self._scheduler.step()

    def skip(self, steps: int) -> None:
        """Go on as after so many steps. A scheduler, which may hold any objects, is not saved: taking
        its steps again costs microseconds each."""
        if self._scheduler is None:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the optimizer takes none meanwhile
            for _ in range(steps):
                self._scheduler.step()


def _checked_factor(factor: object, progress: Progress) -> float:
    if isinstance(factor, torch.Tensor) and factor.numel() == 1:
        factor = float(factor)
    if not isinstance(factor, int | float) or not math.isfinite(factor):
        raise InputError(
            f"the schedule returned {factor!r} for step {progress.step}: return a finite number, by"
            " which the learning rate is multiplied."
        )
    return float(factor)


def _checked_scheduler(scheduler: object) -> LRScheduler:
    if not isinstance(scheduler, LRScheduler):
        raise InputError(
            f"the scheduler function returned a value of type {type(scheduler).__name__}: return a"
            " torch.optim.lr_scheduler.LRScheduler made from the optimizer it was given."
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise InputError(
            "the scheduler function returned a ReduceLROnPlateau, which wants a measured value at"
            " each step: give a scheduler that goes by steps, or the task schedule=..."
        )
    return scheduler

"""Batches: the part of evaluation or prediction data that one rank runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from anybatch.data import (
    evaluation_batches,
    is_map_style,
    lengths_of,
    on_device,
    steps_of,
)
from anybatch.data.evaluation import MOST_WITHOUT_LENGTH
from anybatch.engine import Pulse, Skips
from anybatch.parallel import Group
from anybatch.task import Task


class Batches:
    """Batches of held-out samples, or of samples to predict, on the device.

    Args:
        task: defines how samples are collated and loaded.
        longest: length of the longest sample, if samples differ in length.
        group: the ranks.
        device: device of this rank.
        pulse: notified of each batch.
        grain: size of all batches of a reproducible run, whose results then do not depend on ranks or
            plan.

    Raises `InputError` if the task's lengths of the held-out samples are invalid.
    """

    def __init__(
        self,
        task: Task,
        longest: int | None,
        group: Group,
        device: torch.device,
        pulse: Pulse,
        grain: int | None = None,
    ) -> None:
        self._task = task
        self._grain = grain
        self._longest = longest or 1
        self._group = group
        self._device = device
        self._pulse = pulse
        # Lengths given by index apply to the training data only.
        known = callable(task.lengths) and task.valid is not None and is_map_style(task.valid)
        self._lengths = lengths_of(task.lengths, task.valid, "held-out") if known else None
        self._endless = max(MOST_WITHOUT_LENGTH, steps_of(task).total_samples or 0)

    def of(
        self,
        data: Any,
        size: int,
        first: int = 0,
        *,
        alone: bool = False,
        skips: Skips | None = None,
    ) -> Iterator[tuple[Any, int]]:
        """This rank's part of `data` from sample `first` on, as (batch, number of samples).

        Args:
            data: a dataset.
            size: maximum number of samples in a batch; if samples differ in length, maximum number of
                the longest ones.
            first: sample to begin with.
            alone: whether this rank takes all of `data`.
            skips: provides the held-out samples that are left out.
        """
        task, group, grain = self._task, self._group, self._grain
        size = grain or size
        is_long = data is task.valid and grain is None
        batches = evaluation_batches(
            data,
            task.collate,
            size,
            first=first,
            rank=0 if alone else group.rank,
            shares=(1.0,) if alone else group.shares,
            seed=task.seed,
            num_workers=task.num_workers,
            pin_memory=self._device.type == "cuda",
            lockstep=group.lockstep and not alone,
            gaps=skips.held_out if skips else (),
            lengths=self._lengths if is_long else None,
            most=size * self._longest,
            endless=self._endless if data is task.valid else None,
            unit=grain or 1,
        )
        for batch, num_samples in on_device(batches, self._device):
            self._pulse.beat()
            yield batch, num_samples

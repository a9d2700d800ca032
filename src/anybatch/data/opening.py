"""A task's training data, opened: how its steps are made up, and the loader that gives them."""

from __future__ import annotations

from contextlib import nullcontext

from anybatch.data.lengths import lengths_of
from anybatch.data.loader import Loader, is_map_style, num_samples_of
from anybatch.data.schedule import Steps
from anybatch.data.stream import StreamLoader
from anybatch.data.workers import Beside
from anybatch.task import Task


def steps_of(task: Task) -> Steps:
    """How the training of `task` is laid out. Raises `InputError` if no step can be made of it."""
    return Steps(
        num_samples=num_samples_of(task.train),
        global_batch=task.global_batch,
        last=task.last,
        epochs=task.epochs,
        steps=task.steps,
        samples=task.samples,
    )


def open_training(
    task: Task, pin_memory: bool, by_length: bool = True, beside: Beside = nullcontext
) -> tuple[Steps, Loader | StreamLoader]:
    """The steps and the loader of `task`.

    Args:
        task: its data, order, length and workers.
        pin_memory: make batches ready for asynchronous copies to a CUDA device.
        by_length: put the samples of a global batch in order of length, if lengths are given.
        beside: stands around the start and the end of worker processes.

    Raises `InputError` if no step can be made of the data.
    """
    find_all = task.bad_data == "skip"
    steps = steps_of(task)
    if not is_map_style(task.train):
        stream = StreamLoader(
            task.train, steps, collate=task.collate, seed=task.seed, find_all=find_all
        )
        return steps, stream
    loader = Loader(
        task.train,
        steps,
        collate=task.collate,
        seed=task.seed,
        shuffle=task.shuffle,
        num_workers=task.num_workers,
        pin_memory=pin_memory,
        find_all=find_all,
        lengths=lengths_of(task.lengths, task.train, "training"),
        by_length=by_length,
        beside=beside,
    )
    return steps, loader

"""A task's training data, opened: how its steps are made up, and the loader that gives them."""

from __future__ import annotations

from anybatch.data.loader import Loader, is_map_style, num_samples_of
from anybatch.data.schedule import Steps
from anybatch.data.stream import StreamLoader
from anybatch.task import Task


def open_training(task: Task, pin_memory: bool) -> tuple[Steps, Loader | StreamLoader]:
    """The steps and the loader of `task`.

    Args:
        task: its data, order, length and workers.
        pin_memory: make batches ready for asynchronous copies to a CUDA device.

    Raises `InputError` if no step can be made of the data.
    """
    find_all = task.bad_data == "skip"
    steps = Steps(
        num_samples=num_samples_of(task.train),
        global_batch=task.global_batch,
        last=task.last,
        epochs=task.epochs,
        steps=task.steps,
        samples=task.samples,
    )
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
    )
    return steps, loader

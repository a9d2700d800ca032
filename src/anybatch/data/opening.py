"""Opens a task's training data: lays out its steps and creates the loader."""

from __future__ import annotations

import hashlib

from torch import Tensor

from anybatch.batch_rule import Ramp, as_text, largest_target
from anybatch.data.lengths import lengths_of
from anybatch.data.loader import Loader
from anybatch.data.order import permutation
from anybatch.data.schedule import Steps
from anybatch.data.stream import StreamLoader
from anybatch.task import Task, is_map_style, lengths_for, num_samples_of


def steps_of(task: Task) -> Steps:
    """Returns the steps of the training of `task`. Raises `InputError` if no step can be formed."""
    num_samples, lengths = num_samples_of(task.train), tokens_in(task)
    return Steps(
        num_samples=num_samples,
        global_batch=task.global_batch,
        last=task.last,
        epochs=task.epochs,
        steps=task.steps,
        samples=task.samples,
        lengths=None
        if lengths is None
        else lambda epoch: lengths[
            permutation(task.seed, epoch, len(lengths), task.shuffle)
        ].numpy(),
    )


def tokens_in(task: Task) -> Tensor | None:
    """Returns the number of tokens that each training sample contributes to the global batch of `task`:
    int64, shape `[num_samples]`; None if the global batch is in samples, or the lengths are not
    known."""
    return lengths_of(lengths_for(task), task.train, "training")


def largest_batch(task: Task) -> int:
    """Returns the number of samples in the largest global batch of `task`, for which plans are made."""
    batch = task.global_batch
    return batch if isinstance(batch, int) else steps_of(task).most_samples


def mean_batch(task: Task) -> int:
    """Returns the mean number of samples in a global batch of `task`, for a ramp in its largest one: a
    target in tokens is divided by the mean length."""
    lengths, target = tokens_in(task), largest_target(task.global_batch)
    return target if lengths is None else max(1, round(target / lengths.double().mean().item()))


def identity_of_batch(task: Task) -> int | str:
    """Returns what must be equal in two tasks for their steps to be formed alike, apart from their
    data, its order and `last`."""
    batch = task.global_batch
    if isinstance(batch, int):
        return batch
    lengths, text = tokens_in(task), as_text(batch)
    if isinstance(batch, Ramp):  # it follows the fraction of training that is done
        whole = {"epochs": task.epochs, "steps": task.steps, "samples": task.samples}
        text += "".join(f" with {name}={n}" for name, n in whole.items() if n is not None)
    if lengths is None:
        return text
    digest = hashlib.sha256(lengths.numpy().tobytes()).hexdigest()[:12]
    return f"{text} of the lengths {digest}"


def open_training(
    task: Task, pin_memory: bool, by_length: bool = True
) -> tuple[Steps, Loader | StreamLoader]:
    """Returns the steps and the loader of `task`.

    Args:
        task: provides the data, its order, the length of training and the workers.
        pin_memory: prepare batches for asynchronous copies to a CUDA device.
        by_length: sort the samples of a global batch by length, if lengths are given.

    Raises `InputError` if no step can be formed from the data.
    """
    steps = steps_of(task)
    if not is_map_style(task.train):
        stream = StreamLoader(task.train, steps, collate=task.collate, seed=task.seed)
        return steps, stream
    loader = Loader(
        task.train,
        steps,
        collate=task.collate,
        seed=task.seed,
        shuffle=task.shuffle,
        num_workers=task.num_workers,
        pin_memory=pin_memory,
        lengths=lengths_of(task.lengths, task.train, "training"),
        by_length=by_length,
    )
    return steps, loader

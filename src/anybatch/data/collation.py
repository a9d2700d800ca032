"""Collates a list of samples into a batch with the user's function or torch's. Errors name the
samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from anybatch.data.batch_copies import apart
from anybatch.data.failure import (
    Bad,
    BadSamples,
    Place,
    described,
    format_samples,
    refused_shared_memory,
    shape_of,
)
from anybatch.data.generators import Borrowed, seed_by
from anybatch.data.order import mix
from anybatch.errors import DataError
from anybatch.oom import is_memory_error

Collate = Callable[[list[Any]], Any]
Name = tuple[int, int]  # epoch, index of the sample

_COLLATION = 1  # separates the seeds of collation from those of samples


def batch_of(collate: Collate, samples: list[Any]) -> Any:
    """Collates `samples` into a batch. A batch of one sample does not share memory with that sample."""
    batch = collate(samples)
    return apart(batch, samples[0]) if len(samples) == 1 else batch


def collated(
    collate: Collate, samples: list[Any], names: Sequence[Name], seed: int, dataset: Any
) -> Any:
    """Collates `samples`, identified by `names`, into a batch. Seeds the default generators, which the
    caller has borrowed, from the first name, so that a restart draws the same numbers.

    Raises `BadSamples` if some samples cannot be collated even alone, otherwise `DataError` with the
    samples and how they differ. Memory errors are re-raised unchanged.
    """
    seed_by(mix(seed, *names[0], _COLLATION))
    try:
        with Borrowed() as generators:
            batch = batch_of(collate, samples)
            if generators.drawn():
                _warn(collate)
            return batch
    except Exception as error:
        if is_memory_error(error):
            raise
        if refusal := refused_shared_memory(error):  # in a worker process
            raise refusal from error
        bad = _bad_alone(collate, samples, names, seed)
        if bad:
            raise BadSamples(
                f"{format_samples([bad[0].place.name])} of {type(dataset).__name__} cannot be put into"
                f" a batch, not even alone: {_name(collate)} raised {bad[0].reason}; mend the sample,"
                " or give the task a collate function that can take it.",
                bad,
            ) from error
        shapes = [shape_of(sample) for sample in samples]
        other = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None)
        if other is None:
            differ = f"each is {shapes[0]}"
        else:
            differ = (
                f"sample {names[0][1]} is {shapes[0]} but sample {names[other][1]} is"
                f" {shapes[other]}"
            )
        raise DataError(
            f"{format_samples(names)} of {type(dataset).__name__} cannot be put into one batch:"
            f" {differ}; {_name(collate)} raised {described(error)}; give the task collate=..., a"
            " function from a list of samples to a batch, that pads or stacks them."
        ) from error


def _bad_alone(collate: Collate, samples: list[Any], names: Sequence[Name], seed: int) -> list[Bad]:
    bad = []
    for position, (sample, name) in enumerate(zip(samples, names, strict=True)):
        seed_by(mix(seed, *name, _COLLATION))
        try:
            collate([sample])
        except Exception as error:
            if is_memory_error(error):
                raise
            bad.append(Bad(Place(position, *name), described(error)))
    return bad


def _warn(collate: Collate) -> None:
    warnings.warn(  # shown once: the text is the same every time
        f"the collate function {_name(collate)} draws random numbers, so what it draws depends on"
        " the micro-batch: draw in the data set instead, where every sample has a seed of its own,"
        " and the result is the same under every plan.",
        stacklevel=2,
    )


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)

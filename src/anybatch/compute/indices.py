"""Indices: an id that an embedding has no row for, named.

torch says `index out of range in self` of it, and neither which id nor which embedding. Both are known
where it is raised. On an accelerator an assertion ends the process, and nothing can be told.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from anybatch.errors import DataError


@contextmanager
def naming_ids(model: nn.Module) -> Iterator[None]:
    """Around a forward pass. Raises `DataError` in place of the `IndexError` of an embedding."""
    try:
        yield
    except IndexError as error:
        wrong = _wrong(error, model)
        if wrong is not None:
            raise wrong from error
        raise


def _wrong(error: IndexError, model: nn.Module) -> DataError | None:
    """What was asked of which embedding; None if the error is another's."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code is nn.Embedding.forward.__code__:
            return _told(frame.f_locals["self"], frame.f_locals["input"], model)
        trace = trace.tb_next
    return None


def _told(embedding: nn.Embedding, ids: Tensor, model: nn.Module) -> DataError | None:
    rows = embedding.weight.size(0)
    places = ((ids < 0) | (ids >= rows)).nonzero()
    if not len(places):
        return None
    place = places[0].tolist()
    wrong = int(ids[tuple(place)])
    name = next((name for name, module in model.named_modules() if module is embedding), "")
    return DataError(
        f"the embedding {name!r} has {rows} rows, 0 to {rows - 1}, and was given {wrong} at {place} of"
        " a micro-batch: a tokenizer with more words than the model needs a larger embedding, and a"
        " sequence no more tokens than there are positions.",
        row=place[0] if len(place) > 1 else None,
    )

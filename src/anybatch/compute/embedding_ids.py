"""Errors for out-of-range embedding ids that name the id, its position and the embedding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from anybatch.errors import DataError


@contextmanager
def naming_ids(model: nn.Module) -> Iterator[None]:
    """Context manager for a forward pass of `model`. Raises `DataError` in place of the `IndexError` of
    an embedding (on the CPU), which names neither the id nor the embedding."""
    try:
        yield
    except IndexError as error:
        trace = error.__traceback__
        while trace is not None:
            frame = trace.tb_frame
            if frame.f_code is nn.Embedding.forward.__code__:
                wrong = _wrong_id(frame.f_locals["self"], frame.f_locals["input"], model)
                if wrong is not None:
                    raise wrong from error
            trace = trace.tb_next
        raise


def _wrong_id(embedding: nn.Embedding, ids: Tensor, model: nn.Module) -> DataError | None:
    rows = embedding.weight.size(0)
    places = ((ids < 0) | (ids >= rows)).nonzero()
    if not len(places):
        return None
    place = places[0].tolist()
    name = next((name for name, module in model.named_modules() if module is embedding), "")
    return DataError(
        f"the embedding {name!r} has {rows} rows, 0 to {rows - 1}, and was given"
        f" {int(ids[tuple(place)])} at {place} of a micro-batch: a tokenizer with more words than the"
        " model needs a larger embedding (of transformers: model.resize_token_embeddings), and a"
        " sequence no more tokens than there are positions.",
        row=place[0] if len(place) > 1 else None,
    )

"""Rows: tensors with one row for each sample, of all ranks, on every rank.

What a loss compares over the whole global batch is exchanged in the middle of a step, where a rank may
have failed, or fail for want of room for what the others have. So every rank says first what it has,
and then whether it has room for all; if one says no, nothing follows, and all go on to the vote:

    rank 0    (12 rows, float32 [128])    room    rows
    rank 1    (no rows)                   room    rows
    rank 2    failed                                        everybody: `PassAbandoned`
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from anybatch.compute.joint import Kinds, kinds_of, told_kinds
from anybatch.errors import InputError
from anybatch.parallel.collectives import overwrite
from anybatch.parallel.group import Group
from anybatch.parallel.norms import PassAbandoned
from anybatch.parallel.vote import calling

_WHEN = "while encodings of samples were put together"


_Has = tuple[int, Kinds]
"""How many rows a rank has, and of what kinds; it knows no kinds without samples."""


def all_rows(
    group: Group, mine: Sequence[Tensor] | None, device: torch.device
) -> tuple[Sequence[Tensor], int]:
    """The tensors with the rows of all ranks in their order, and at which row those of this one begin.
    All ranks call it, once in an attempt at a step.

    Args:
        group: the ranks.
        mine: tensors with equally many rows in dim 0; none of them, of a rank without samples; None, of
            one that failed.
        device: of this rank.

    Raises:
        PassAbandoned: another rank failed.
        InputError: ranks have rows of different shapes.
        PeerLost: a rank is gone.
        MemoryError: there is no room here (on CUDA `torch.OutOfMemoryError`).
    """
    if group.size == 1:
        return mine or (), 0
    num_rows = len(mine[0]) if mine else 0
    everyone = group.exchange(None if mine is None else (num_rows, kinds_of(mine)))
    there = [one for one in everyone if one is not None]
    if len(there) < group.size:
        raise PassAbandoned
    kinds = _common(there)
    starts = [0, *accumulate(rows for rows, _ in there)]
    whole: list[Tensor] = []
    wrong: Exception | None = None
    try:
        whole = [
            torch.empty(starts[-1], *shape, dtype=dtype, device=device) for shape, dtype in kinds
        ]
    except Exception as error:
        wrong = error
    there_is_room = group.exchange(wrong is None)
    if wrong is not None:
        raise wrong
    if not all(there_is_room):
        raise PassAbandoned
    with torch.no_grad():
        _fill(group, mine or (), whole, starts)
    return whole, starts[group.rank]


def _common(everyone: Sequence[_Has]) -> Kinds:
    """The kinds of rows that all ranks have which have any. Raises `InputError` on all ranks alike."""
    known = [(rank, kinds) for rank, (_, kinds) in enumerate(everyone) if kinds]
    (first, kinds), *others = known
    for rank, other in others:
        if other != kinds:
            raise InputError(
                f"rank {first} and rank {rank} encode samples in different shapes"
                f" ({told_kinds(kinds)} and {told_kinds(other)}), which cannot be compared: let encode"
                " return tensors of one shape per sample (padded, say) and one dtype."
            )
    return kinds


def _fill(
    group: Group, mine: Sequence[Tensor], whole: Sequence[Tensor], starts: Sequence[int]
) -> None:
    """Bring the rows of every rank to their places in `whole`."""
    for i, tensor in enumerate(whole):
        for rank in range(group.size):
            part = tensor[starts[rank] : starts[rank + 1]]
            if rank == group.rank and mine:
                part.copy_(mine[i])
            with calling(_WHEN):
                overwrite(part, rank)

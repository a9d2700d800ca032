"""Rows: gathers tensors with one row per sample from all ranks, on every rank.

A loss that compares samples of the whole global batch needs an exchange in the middle of a step, when a
rank may have failed, or may lack the memory for the rows of the others. So every rank first announces
its rows, and then whether it has memory for all rows; if one rank has failed or has no memory, no rows
are sent, and all ranks proceed to the vote:

    rank 0    (12 rows, float32 [128])    room    rows
    rank 1    (no rows)                   room    rows
    rank 2    failed                                        all ranks: `PassAbandoned`
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from anybatch.compute.joint import Kinds, format_kinds, kinds_of
from anybatch.errors import InputError
from anybatch.parallel.collectives import overwrite
from anybatch.parallel.group import Group
from anybatch.parallel.norms import PassAbandoned
from anybatch.parallel.vote import calling

_WHEN = "while encodings of samples were put together"


_Has = tuple[int, Kinds]
"""The number of rows of a rank, and their kinds; a rank without samples does not know the kinds."""


def all_rows(
    group: Group, mine: Sequence[Tensor] | None, device: torch.device
) -> tuple[Sequence[Tensor], int]:
    """The tensors with the rows of all ranks, in rank order, and the index of this rank's first row.
    All ranks call it, once in an attempt at a step.

    Args:
        group: the ranks.
        mine: tensors with the same number of rows in dim 0; empty on a rank without samples; None on a
            rank that failed.
        device: device of this rank.

    Raises:
        PassAbandoned: another rank failed.
        InputError: ranks have rows of different shapes.
        PeerLost: a rank is gone.
        MemoryError: this rank has not enough memory (on CUDA `torch.OutOfMemoryError`).
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
    """The kinds of rows of all ranks that have samples; empty if none has. Raises `InputError` on all
    ranks if they differ between ranks."""
    known = [(rank, kinds) for rank, (_, kinds) in enumerate(everyone) if kinds]
    if not known:
        return ()
    (first, kinds), *others = known
    for rank, other in others:
        if other != kinds:
            raise InputError(
                f"rank {first} and rank {rank} encode samples in different shapes"
                f" ({format_kinds(kinds)} and {format_kinds(other)}), which cannot be compared: let"
                " encode return tensors of one shape per sample (padded, say) and one dtype."
            )
    return kinds


def _fill(
    group: Group, mine: Sequence[Tensor], whole: Sequence[Tensor], starts: Sequence[int]
) -> None:
    """Broadcast the rows of every rank into their places in `whole`."""
    for i, tensor in enumerate(whole):
        for rank in range(group.size):
            part = tensor[starts[rank] : starts[rank + 1]]
            if rank == group.rank and mine:
                part.copy_(mine[i])
            with calling(_WHEN):
                overwrite(part, rank)

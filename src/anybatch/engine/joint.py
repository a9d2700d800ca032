"""Joint: passes of a step whose loss compares all samples of the global batch (see `compute.joint`).

    rank 0    encode 1  encode 2  encode 3 | all      | compare | pass 1  pass 2  pass 3 | vote
    rank 1    encode 1  encode 2           | samples' | compare | pass 1  pass 2         | vote
    rank 2    pass 1, forward              | rows     | compare | pass 1, backward       | vote

A rank that fails before the rows are exchanged reports it in that exchange, once; a rank that fails
later reports it in the vote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import chain
from typing import Any, TypeAlias, final

import torch

from anybatch.compute.joint import (
    Ask,
    Comparison,
    Rows,
    nobody,
    tensors_in,
    with_tensors,
)
from anybatch.engine.context import PassContext
from anybatch.engine.source import MicroBatch, Source
from anybatch.parallel import Group, PassAbandoned
from anybatch.parallel.rows import all_rows
from anybatch.plans import Choice

Naming: TypeAlias = "Callable[[int], AbstractContextManager[None]]"
"""Maps a micro-batch number to a context manager that names its samples in errors."""


@final
class JointPasses:
    """Runs the passes of steps with a joint loss."""

    def __init__(self, context: PassContext) -> None:
        self._replica, self._group, self._device = context.replica, context.group, context.device
        self._randomness, self._limit = context.randomness, context.limit
        self._buffers = context.buffers
        self._has_met = True

    def begin(self) -> None:
        self._has_met = not self._replica.is_joint

    def fail(self) -> None:
        """Report a failure of this rank, or of another rank inside a pass, to all ranks that may still
        wait for the rows of this one. Raises `PeerLost` if a rank is gone."""
        if not self._has_met:
            self._group.leave()
            with suppress(PassAbandoned):
                self._all_rows(None)

    def of(
        self, index: int, source: Source, choice: Choice, naming: Naming
    ) -> Iterator[tuple[MicroBatch, Ask | None]]:
        """Yields the micro-batches of step `index`, each with the callable that returns its share of
        the comparison; see `Replica.accumulate`.

        Raises the errors of `Replica.encode`, `Replica.compare` and `all_rows`.
        """
        given = source.micro_batches(choice, keep=True)
        first = next(given, None)
        if first is None:  # tell the other ranks that this one has no samples
            self._all_rows(())
            return
        if not is_encoded_first(first, source, self._group):
            yield first, self._by_itself(first)
            return
        rows = Rows(source.own_samples)
        micros = chain((first,), given)
        del first
        for number, micro in enumerate(micros):
            if micro.grain is not None:
                self._randomness.begin_grain(index, micro.grain)
            self._randomness.begin_pass(index, number)
            with naming(number), self._limit.watched(("encoding", choice.kind), micro.batch):
                encoded = self._replica.encode(micro.batch, micro.num_samples, micro.ghosts)
                rows.add(encoded, micro.num_samples)
                del encoded
            del micro
            self._replica.phase = "loading"
        self._group.between_phases(self._replica)
        comparison, start = self._compare(rows.taken())
        self._buffers.put_back()
        for number, micro in enumerate(source.once_more()):
            self._randomness.begin_pass(index, number)
            if micro.num_samples:
                share = comparison.share(start, start + micro.num_samples)
                start += micro.num_samples
                yield micro, lambda _, share=share: share
            else:  # runs only because other ranks run a pass
                yield micro, nobody
            del micro

    def _by_itself(self, micro: MicroBatch) -> Ask | None:
        """Returns the callable that provides the share of this rank's only pass, whose graph is kept
        until the rows of the other ranks arrive; None for a single rank."""
        if self._group.size == 1:
            return None

        def ask(encoded: Any) -> Any:
            comparison, start = self._compare(encoded)
            return comparison.share(start, start + micro.num_samples)

        return ask

    def _compare(self, mine: Any) -> tuple[Comparison, int]:
        """Compare the samples of all ranks, where `mine` holds the encodings of this rank. Returns the
        comparison and the position at which this rank's samples begin."""
        rows, start = self._all_rows(tensors_in(mine))
        encoded, num_samples = with_tensors(mine, rows), len(rows[0])
        del mine, rows  # with several ranks, `encoded` contains this rank's rows too
        return self._replica.compare(encoded, num_samples), start

    def _all_rows(self, mine: Sequence[torch.Tensor] | None) -> tuple[Sequence[torch.Tensor], int]:
        self._has_met = True
        return all_rows(self._group, mine, self._device)


def is_encoded_first(micro: MicroBatch, source: Source, group: Group) -> bool:
    """Returns whether a pass of a joint loss is encoded separately first: if it is not the only pass of
    its rank, or if ranks synchronize inside passes and would otherwise deadlock."""
    return group.lockstep or source.own_samples > micro.num_samples

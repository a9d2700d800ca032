"""Family: traces of one task under one choice at any micro-batch, computed from a few real traces.

A planner requests many micro-batches, and a trace takes seconds. The operations are the same for
each of them, and the size of nearly every tensor is linear in the number of samples. So the first
traces are real. Once a trace equals the prediction from the two before it, block for block, the
others are computed by arithmetic, and are replayed through the allocator like a trace. If that
never happens (a loss that compares all pairs of samples, a model that branches on the batch size),
every size is traced. A single sample is always traced, since its dim of size one avoids copies that
other sizes need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from anybatch.estimate.trace import Block, Operation, Timeline

_ROUNDING_BYTES = 16


@dataclass(frozen=True, slots=True)
class Part:
    """A module of the model: its class, and the number of elements in parameters that first occur
    in it."""

    type_name: str
    num_parameters: int


@dataclass(frozen=True)
class Traced:
    """A traced step, after an update that creates the optimizer state.

    Attributes:
        timeline: timeline of the whole trace.
        commit_bytes: bytes that the first update and a later update add at their peaks.
        begin, end: moments at which the step begins, and at which its update is done.
        first: last moment before the micro-batches of the step, if samples are encoded before the
            first.
        num_micro_batches: number of micro-batches in the traced step.
        modules: modules of the model by name, in order of definition.
        bucketed: bytes of gradients in buckets, by the module that owns them.
        shapes, calls: see `Tracer`. In a step computed by arithmetic, `shapes` comes from another
            step.
    """

    timeline: Timeline
    commit_bytes: tuple[int, int]
    begin: int
    end: int
    num_micro_batches: int
    modules: dict[str, Part]
    shapes: dict[str, tuple[int, ...]]
    calls: dict[str, int]
    bucketed: dict[str, int] = field(default_factory=dict)
    first: int | None = None


class Family:
    """Traces by number of samples; see the module."""

    def __init__(self, trace: Callable[[int], Traced]) -> None:
        self._trace = trace
        self._traced: dict[int, Traced] = {}
        self._basis: tuple[int, int] | None = None

    def at(self, num_samples: int) -> Traced:
        """Return the trace for `num_samples` samples. Raises whatever tracing raises."""
        known = self._traced.get(num_samples)
        if known is not None:
            return known
        if self._basis is not None and num_samples > 1:
            return self._by_arithmetic(num_samples, *self._basis)
        made = self._trace(num_samples)
        if len(self._traced) >= 2:
            first, second = list(self._traced)[-2:]
            if self._foretells(first, second, num_samples, made):
                self._basis = first, second
        self._traced[num_samples] = made
        return made

    def _foretells(self, first: int, second: int, number: int, made: Traced) -> bool:
        one, two, three = (t.timeline for t in (self._traced[first], self._traced[second], made))
        if not _are_alike(one, two) or not _are_alike(one, three):
            return False
        computed = self._by_arithmetic(number, first, second)
        return all(
            abs(a.num_bytes - b.num_bytes) <= _ROUNDING_BYTES
            for a, b in zip(computed.timeline.blocks, three.blocks, strict=True)
        )

    def _by_arithmetic(self, number: int, first: int, second: int) -> Traced:
        low, high = self._traced[first], self._traced[second]
        part = (number - first) / (second - first)

        def between(a: float, b: float) -> int:
            return max(0, round(a + (b - a) * part))

        one, two = low.timeline, high.timeline
        blocks = [
            Block(between(a.num_bytes, b.num_bytes), a.born, a.phase, a.died, *_kinds_of(a))
            for a, b in zip(one.blocks, two.blocks, strict=True)
        ]
        moments = one.scratch.keys() | two.scratch.keys()
        scratch = {i: between(one.scratch.get(i, 0), two.scratch.get(i, 0)) for i in moments}
        timeline = replace(one, blocks=blocks, scratch=scratch)
        return replace(low, timeline=timeline)


def _kinds_of(block: Block) -> tuple[str, str, int]:
    return block.kind, block.module, block.item_bytes


def _are_alike(one: Timeline, other: Timeline) -> bool:
    """Return whether both have the same operations, and blocks with the same lifetimes."""
    return (
        len(one.blocks) == len(other.blocks)
        and _names(one.operations) == _names(other.operations)
        and all(
            a.born == b.born and a.died == b.died
            for a, b in zip(one.blocks, other.blocks, strict=True)
        )
    )


def _names(operations: list[Operation]) -> list[str]:
    return [operation.name for operation in operations]

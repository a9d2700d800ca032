"""Family: the traces of one task under one choice, at every micro-batch, from a few of them.

A planner asks for many micro-batches, and a trace takes seconds. The operations are the same at each
of them, and nearly every tensor grows in a straight line with the number of samples. So the first
traces are made for real. Once one of them is what the two before it foretell, block for block, the
others follow by arithmetic, and are replayed through the allocator like a trace. Where that never
happens (a loss that compares all pairs of samples, a model that branches on the size of its batch),
every size is traced; a single sample always is, since its dim of one spares copies that others need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from anybatch.estimate.trace import Block, Operation, Timeline

_ROUNDING_BYTES = 16


@dataclass(frozen=True, slots=True)
class Part:
    """A module of the model: its class, and the numbers in parameters that are first met in it."""

    type_name: str
    num_parameters: int


@dataclass(frozen=True)
class Traced:
    """A step as it was traced, after an update that makes the optimizer's state.

    Attributes:
        timeline: all of it.
        commit_bytes: what the first update and a later one add at their peaks.
        begin, end: the moments at which the step begins, and at which its update is done.
        first: the last moment before its micro-batches, if it encodes samples before the first.
        num_micro_batches: of the step as traced.
        modules: of the model, by name, in order of definition.
        bucketed: bytes of gradients in buckets, by the module whose they are.
        shapes, calls: see `Tracer`; of a step that followed by arithmetic, `shapes` is that of another.
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
    """See the module. Members are asked for by their number of samples."""

    def __init__(self, trace: Callable[[int], Traced]) -> None:
        self._trace = trace
        self._traced: dict[int, Traced] = {}
        self._basis: tuple[int, int] | None = None

    @property
    def num_traces(self) -> int:
        """How many members were traced for real."""
        return len(self._traced)

    def at(self, num_samples: int) -> Traced:
        """The member of so many samples. Raises whatever tracing raises."""
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
        told = self._by_arithmetic(number, first, second)
        return all(
            abs(a.num_bytes - b.num_bytes) <= _ROUNDING_BYTES
            for a, b in zip(told.timeline.blocks, three.blocks, strict=True)
        )

    def _by_arithmetic(self, number: int, first: int, second: int) -> Traced:
        low, high = self._traced[first], self._traced[second]
        part = (number - first) / (second - first)

        def between(a: float, b: float) -> int:
            return max(0, round(a + (b - a) * part))

        one, two = low.timeline, high.timeline
        blocks = [
            Block(between(a.num_bytes, b.num_bytes), a.born, a.phase, a.died, *_told(a))
            for a, b in zip(one.blocks, two.blocks, strict=True)
        ]
        moments = one.scratch.keys() | two.scratch.keys()
        scratch = {i: between(one.scratch.get(i, 0), two.scratch.get(i, 0)) for i in moments}
        timeline = replace(one, blocks=blocks, scratch=scratch)
        return replace(low, timeline=timeline)


def _told(block: Block) -> tuple[str, str, int]:
    return block.kind, block.module, block.item_bytes


def _are_alike(one: Timeline, other: Timeline) -> bool:
    """Whether the same operations made blocks of the same lives."""
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

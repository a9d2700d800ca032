"""Ledger: where each byte of a step goes, by layer, by kind, and over time.

`footprint` answers how much; a ledger answers what it is, and whose. It is plain data, made from the
same trace: a table can be printed from it, a curve drawn, and `to_dict` gives JSON.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from anybatch.estimate.allocator import Taken
from anybatch.estimate.eager import eagerly
from anybatch.estimate.family import Traced
from anybatch.estimate.footprint import beside_training, footprint, trace_step
from anybatch.estimate.head import head_of
from anybatch.estimate.peak import (
    KINDS,
    LOSS,
    OVERHEAD,
    Kinds,
    allocator_of,
    method_on,
    not_counted_on,
    peak_at,
)
from anybatch.estimate.sharding import GATHERED, STATE, Division
from anybatch.estimate.subject import Subject
from anybatch.estimate.trace import CASTS, SCRATCH, Block, alive
from anybatch.estimate.workspaces import with_workspaces
from anybatch.machine import Device
from anybatch.plans import Choice
from anybatch.units import format_bytes

_MOST_HELD = 400
_MOST_MOMENTS = 2000

_KEPT = ("activations", CASTS, LOSS)
_PASSES = ("forward", "loss", "backward")
_OF_NO_LAYER = {LOSS: "the loss", "gradients": "all layers, in buckets", "temporary": "the update"}


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """One module that has parameters, buffers or activations of its own: those of its children are not
    in it, so that a column adds up to the whole model.

    Attributes:
        name: as `named_modules` has it; `"."` is the model itself.
        type_name: the module's class.
        depth: modules around it; 0 for the model itself.
        output_shape: of the first tensor that its last forward returned, the micro-batch included;
            None if it returned none, or was not run.
        num_calls: times that forward ran it in one micro-batch, runs of recompute not counted.
        num_parameters: numbers, a tensor shared by several modules counted with the first.
        parameter_bytes, buffer_bytes: what holds them, float32 copies of half-precision weights
            included.
        gradient_bytes: gradients at their most.
        optimizer_bytes: state of the optimizer for its parameters.
        activation_bytes: made by its own operations and alive when forward ends: what backward needs,
            and the results that the loss reads.
    """

    name: str
    type_name: str
    depth: int
    output_shape: tuple[int, ...] | None
    num_calls: int
    num_parameters: int
    parameter_bytes: int
    buffer_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of its bytes."""
        return (
            self.parameter_bytes
            + self.buffer_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
        )


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes of one kind that one module holds when most is in use.

    Attributes:
        kind: one of `KINDS`.
        module: whose, as `named_modules` has it, or in words (the loss, the update, the model itself);
            `""` where it belongs to none.
        num_bytes: in all.
        num_blocks: tensors (storages).
    """

    kind: str
    module: str
    num_bytes: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Moment:
    """One operation of the step, and what is in memory while it runs.

    Attributes:
        number: of the operation, from 0 in the step that is shown.
        num_bytes: taken by the process or device, the allocator's holes and constants included.
        by_kind: bytes in use, by kind; what `num_bytes` has beyond them the allocator holds for nobody.
        phase: `"input"`, `"forward"`, `"loss"`, `"backward"` or `"update"`.
        module: whose operation, as `Holding` has it.
        operation: its name, as torch has it.
    """

    number: int
    num_bytes: int
    by_kind: dict[str, int]
    phase: str
    module: str
    operation: str

    @property
    def used_bytes(self) -> int:
        """Bytes in use."""
        return sum(self.by_kind.values())


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where each byte of a step goes, on one rank.

    Attributes:
        micro_batch: samples per forward pass.
        layers: every module with bytes of its own, in order of definition.
        modules: the class of every module, by name, in order of definition.
        totals: the most bytes at any time by each account: see `estimate.peak`.
        peak: the moment at which most is in use. More may be reserved at a later one.
        by_kind: bytes at that moment, by kind, in the order of `KINDS`. With what the allocator holds
            beyond them at its most, which is a kind too, they add up to `num_bytes`.
        held: the largest holdings then, largest first: at most 400.
        curve: the moments of one step, in order. Where a step has more than 2000 operations, each
            stretch of it is shown by those with the most and the fewest bytes in use.
        loss_in_chunks: the peak with the loss in chunks; None where it is so, or would not help.
        method: how it was found, in words.
        not_counted: what is on the device beside it, in sentences.
    """

    micro_batch: int
    layers: tuple[LayerBytes, ...]
    modules: dict[str, str]
    totals: dict[str, int]
    peak: Moment
    by_kind: dict[str, int]
    held: tuple[Holding, ...]
    curve: tuple[Moment, ...]
    loss_in_chunks: int | None
    method: str
    not_counted: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """The predicted peak, as the budget counts it."""
        return self.totals["total"]

    @property
    def num_parameters(self) -> int:
        """Numbers in all parameters."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def activation_bytes(self) -> int:
        """Bytes of all layers that are alive when forward ends."""
        return sum(layer.activation_bytes for layer in self.layers)

    def __repr__(self) -> str:
        return (
            f"<Ledger: micro-batch {self.micro_batch:,}, {len(self.layers):,} layers,"
            f" {self.num_parameters:,} parameters, predicted peak {format_bytes(self.num_bytes)}>"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts and numbers, for JSON."""
        return asdict(self)


@eagerly()
def ledger(subject: Subject, choice: Choice, device: Device) -> Ledger:
    """Trace a step of `subject` under `choice` on `device` and account for its bytes.

    Raises whatever the model or loss raises on fake tensors.
    """
    traced = with_workspaces(trace_step(subject, choice, device), device)
    taken = allocator_of(device).replay(traced.timeline)
    beside = beside_training(subject, choice, device)
    account = _Account(traced, taken, beside, subject.division)
    peak = peak_at(traced, taken, beside, device)
    in_chunks = _in_chunks(subject, choice, device)
    if subject.division is not None:
        peak = peak.divided(subject.division)
    return Ledger(
        micro_batch=choice.micro_batch,
        layers=account.layers(),
        modules={name: module.type_name for name, module in traced.modules.items()},
        totals=peak.totals,
        peak=account.moment(taken.moment),
        by_kind=peak.by_kind,
        held=account.held(taken.moment),
        curve=account.curve(),
        loss_in_chunks=in_chunks if in_chunks and in_chunks < peak.num_bytes else None,
        method=method_on(subject.as_traced(device)),
        not_counted=not_counted_on(device, subject.speaks),
    )


def _in_chunks(subject: Subject, choice: Choice, device: Device) -> int | None:
    """The peak with the loss in chunks; None where it cannot be taken so."""
    if choice.chunked_head or subject.division is not None:
        return None
    head = head_of(subject, choice, device)
    if head is None:
        return None
    chunked = choice.model_copy(update={"chunked_head": head.name})
    return footprint(subject, chunked, device).peak.num_bytes


class _Account:
    """The bytes of one trace, replayed, for each way to look at them.

    Args:
        traced, taken: the trace, and what the allocator made of it.
        beside: bytes by kind that are there all the time.
        division: of the model over ranks, or None: then the bytes are those of one of them.
    """

    def __init__(
        self, traced: Traced, taken: Taken, beside: dict[str, int], division: Division | None
    ) -> None:
        self._traced = traced
        self._timeline = traced.timeline
        self._taken = taken
        self._division = division
        self._kinds = Kinds(traced)
        self._constant = sum(beside.values())
        self._phases = self._named_phases()
        self._in_use = self._by_kind()
        for kind, size in beside.items():
            if kind != OVERHEAD:
                before = self._in_use.get(kind, [0] * len(taken.curve))
                self._in_use[kind] = [size + more for more in before]

    # ---------------------------------------------------------------------------------- by layer

    def layers(self) -> tuple[LayerBytes, ...]:
        """Every module with bytes of its own."""
        traced = self._traced
        done = self._end_of_forward()
        rows: dict[str, Counter[str]] = {name: Counter() for name in traced.modules}
        for name, size in traced.bucketed.items():
            if name in rows:
                rows[name]["gradients"] += size
        for block in self._timeline.blocks:
            row = rows.get(block.module)
            if row is None:
                continue
            kind = self._kinds.of(block)
            if kind in ("parameters", "buffers", "optimizer state"):
                # What holds the same numbers anew (a state that is replaced) does not count again.
                if block.died is None or block.died >= traced.end:
                    row[kind] += block.num_bytes
            elif kind == "gradients":
                if block.born >= traced.begin:
                    row[kind] += block.num_bytes
            elif kind in _KEPT and _is_kept(block, done):
                row["activations"] += block.num_bytes
        return tuple(
            LayerBytes(
                name=name,
                type_name=module.type_name,
                depth=0 if name == "." else name.count(".") + 1,
                output_shape=traced.shapes.get(name),
                num_calls=traced.calls.get(name, 0) // traced.num_micro_batches,
                num_parameters=module.num_parameters,
                parameter_bytes=self._part(rows[name]["parameters"]),
                buffer_bytes=rows[name]["buffers"],
                gradient_bytes=self._part(rows[name]["gradients"]),
                optimizer_bytes=self._part(rows[name]["optimizer state"]),
                activation_bytes=rows[name]["activations"],
            )
            for name, module in traced.modules.items()
            if rows[name] or module.num_parameters
        )

    def _end_of_forward(self) -> int:
        """The moment at which forward of the first micro-batch of the step ends."""
        operations = self._timeline.operations
        begin = self._traced.begin if self._traced.first is None else self._traced.first + 1
        for moment in range(begin, len(operations) + 1):
            if operations[moment - 1].backward:
                return moment - 1
        return self._traced.begin

    def _part(self, num_bytes: int) -> int:
        """What one rank has of the state of a layer."""
        return num_bytes if self._division is None else -(-num_bytes // self._division.ranks)

    # ------------------------------------------------------------------------------- at a moment

    def held(self, moment: int) -> tuple[Holding, ...]:
        """The largest holdings at `moment`."""
        sizes: Counter[tuple[str, str]] = Counter()
        counts: Counter[tuple[str, str]] = Counter()
        for block in alive(self._timeline, moment):
            kind = self._kinds.of(block)
            key = kind, self._whose(kind, block)
            sizes[key] += self._part(block.num_bytes) if kind in STATE else block.num_bytes
            counts[key] += 1
        return tuple(
            Holding(kind=key[0], module=key[1], num_bytes=size, num_blocks=counts[key])
            for key, size in sizes.most_common(_MOST_HELD)
            if size
        )

    def moment(self, i: int) -> Moment:
        """The operation at moment `i`."""
        operations = self._timeline.operations
        is_one = 0 < i <= len(operations)
        num_bytes = self._taken.curve[i] + self._constant
        by_kind = {kind: sizes[i] for kind, sizes in self._in_use.items() if sizes[i]}
        phase = self._phases[i - 1] if is_one else ""
        if self._division is not None:
            num_bytes, by_kind = self._division.divided(num_bytes, by_kind)
            if phase not in _PASSES:
                num_bytes -= by_kind.pop(GATHERED)
        return Moment(
            number=max(0, i - self._traced.begin),
            num_bytes=num_bytes,
            by_kind={kind: by_kind[kind] for kind in KINDS if by_kind.get(kind)},
            phase=phase,
            module=self._whose_operation(i) if is_one else "",
            operation=operations[i - 1].name if is_one else "",
        )

    def _whose(self, kind: str, block: Block) -> str:
        of_loss = kind == LOSS and block.module == "."
        in_bucket = kind == "gradients" and self._traced.bucketed
        if of_loss or in_bucket or (not block.module and kind in _OF_NO_LAYER):
            return _OF_NO_LAYER[kind]
        return self._name(block.module)

    def _whose_operation(self, i: int) -> str:
        if self._kinds.is_loss(i):
            return _OF_NO_LAYER[LOSS]
        return self._name(self._timeline.operations[i - 1].module)

    def _name(self, module: str) -> str:
        """Also of what the model computes outside its layers."""
        return f"{self._traced.modules['.'].type_name} itself" if module == "." else module

    # --------------------------------------------------------------------------------- over time

    def curve(self) -> tuple[Moment, ...]:
        """The moments of one step."""
        begin, last = self._traced.begin, self._timeline.num_moments
        in_use = [sum(sizes) for sizes in zip(*self._in_use.values(), strict=True)]
        return tuple(map(self.moment, _telling(in_use, begin, last)))

    def _by_kind(self) -> dict[str, list[int]]:
        """Bytes in use at each moment."""
        length = len(self._taken.curve)
        changes: dict[str, list[int]] = {}
        for block in self._timeline.blocks:
            if block.num_bytes:
                kind = self._kinds.of(block)
                change = changes.setdefault(kind, [0] * (length + 2))
                change[block.born] += block.num_bytes
                if block.died is not None:
                    change[block.died + 1] -= block.num_bytes
        found = {kind: list(accumulate(change))[:length] for kind, change in changes.items()}
        if scratch := self._timeline.scratch:
            found[SCRATCH] = [scratch.get(i, 0) for i in range(length)]
        return found

    def _named_phases(self) -> list[str]:
        """The phase of each operation. What comes before the first layer of a pass is no loss yet."""
        phases: list[str] = []
        has_run = False
        for moment, operation in enumerate(self._timeline.operations, 1):
            if operation.phase != "compute" or operation.backward:
                has_run = False
                phases.append("backward" if operation.backward else operation.phase)
            else:
                is_loss = self._kinds.is_loss(moment)
                has_run |= not is_loss
                phases.append("loss" if is_loss and has_run else "forward")
        return phases


def _is_kept(block: Block, done: int) -> bool:
    """Whether it is alive when forward is `done`. What dies at its last operation was of use to nothing
    after it."""
    return block.born <= done and (block.died is None or block.died > done)


def _telling(sizes: Sequence[int], first: int, last: int) -> list[int]:
    """The moments from `first` to `last` that show the course of `sizes`: at most so many."""
    moments = range(first, last + 1)
    if len(moments) <= _MOST_MOMENTS:
        return list(moments)
    width = -(-2 * len(moments) // _MOST_MOMENTS)
    stretches = (moments[i : i + width] for i in range(0, len(moments), width))
    ends = (
        {max(part, key=sizes.__getitem__), min(part, key=sizes.__getitem__)} for part in stretches
    )
    return [moment for pair in ends for moment in sorted(pair)]

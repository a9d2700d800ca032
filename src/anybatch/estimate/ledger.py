"""Ledger: the memory of a step, by layer, by kind, and over time.

`footprint` computes how much memory a step takes; a ledger shows what it consists of, and which
layer it belongs to. It is plain data from the same trace: it can be printed as a table, plotted as
a curve, and converted for JSON by `to_dict`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from anybatch.estimate.eager import eagerly
from anybatch.estimate.family import Traced
from anybatch.estimate.footprint import constant_bytes, trace_step
from anybatch.estimate.peak import (
    KINDS,
    LOSS,
    OVERHEAD,
    Kinds,
    Replayed,
    method_on,
    not_counted_on,
    replayed,
)
from anybatch.estimate.sharding import GATHERED, Division
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
    """Memory of one module with parameters, buffers or activations of its own. Children are not
    included, so a column adds up to the whole model.

    Attributes:
        name: name in `named_modules`; `"."` is the model itself.
        type_name: the module's class.
        depth: number of enclosing modules; 0 for the model itself.
        output_shape: shape of the first tensor that its last forward returned, including the
            micro-batch; None if it returned no tensor, or did not run.
        num_calls: number of forward calls in one micro-batch, excluding recompute.
        num_parameters: number of parameter elements. A tensor shared by several modules counts for
            the first.
        parameter_bytes, buffer_bytes: memory of parameters and of buffers, including float32 copies
            of half-precision weights.
        gradient_bytes: maximum memory of gradients.
        optimizer_bytes: optimizer state of its parameters.
        activation_bytes: tensors created by its own operations that are alive when forward ends:
            those that backward needs, and the results that the loss reads.
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
        """Total bytes of the module."""
        return (
            self.parameter_bytes
            + self.buffer_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
        )


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes of one kind that one module holds at the moment when most memory is in use.

    Attributes:
        kind: one of `KINDS`.
        module: name in `named_modules`, or a description (the loss, the update, the model itself);
            `""` if the bytes belong to no module.
        num_bytes: total bytes.
        num_blocks: number of tensors (storages).
    """

    kind: str
    module: str
    num_bytes: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Moment:
    """One operation of the step, and the memory taken while it runs.

    Attributes:
        number: number of the operation, counted from 0 in the step that is shown.
        num_bytes: bytes taken by the process or device, including the allocator's holes and
            constants.
        by_kind: bytes in use, by kind. The rest of `num_bytes` is held by the allocator, but
            unused.
        phase: `"input"`, `"forward"`, `"loss"`, `"backward"` or `"update"`.
        module: module of the operation, named as in `Holding`.
        operation: name of the operation in PyTorch.
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
    """Memory of a step on one rank, with an account of each byte.

    Attributes:
        micro_batch: samples per forward pass.
        layers: modules with memory of their own, in order of definition.
        modules: class of every module by name, in order of definition.
        totals: maximum bytes by account: see `estimate.peak`.
        peak: moment at which most memory is in use. More may be reserved at a later moment.
        by_kind: bytes at that moment by kind, in the order of `KINDS`. The memory that the
            allocator holds beyond them at its peak is also a kind, so the bytes add up to
            `num_bytes`.
        held: largest holdings at that moment, largest first, at most 400.
        curve: moments of one step, in order. If a step has more than 2000 operations, each section
            of it is represented by the moments with the most and the fewest bytes in use.
        method: description of how the ledger was determined.
        not_counted: other memory on the device that is not included, in sentences.
    """

    micro_batch: int
    layers: tuple[LayerBytes, ...]
    modules: dict[str, str]
    totals: dict[str, int]
    peak: Moment
    by_kind: dict[str, int]
    held: tuple[Holding, ...]
    curve: tuple[Moment, ...]
    method: str
    not_counted: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Predicted peak, as counted against the budget."""
        return self.totals["total"]

    @property
    def num_parameters(self) -> int:
        """Number of elements in all parameters."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def activation_bytes(self) -> int:
        """Activation bytes of all layers that are alive when forward ends."""
        return sum(layer.activation_bytes for layer in self.layers)

    def __repr__(self) -> str:
        return (
            f"<Ledger: micro-batch {self.micro_batch:,}, {len(self.layers):,} layers,"
            f" {self.num_parameters:,} parameters, predicted peak {format_bytes(self.num_bytes)}>"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, dicts and numbers, for JSON."""
        return asdict(self)


@eagerly()
def ledger(subject: Subject, choice: Choice, device: Device) -> Ledger:
    """Trace a step of `subject` under `choice` on `device` and account for its bytes.

    Raises whatever the model or loss raises on fake tensors.
    """
    traced = with_workspaces(trace_step(subject, choice, device), device)
    part = replayed(traced, device, subject.division)
    constant = constant_bytes(subject, choice, device)
    account = _Account(traced, part, constant, subject.division)
    peak = part.peak(constant, device)
    moment = part.taken.moment
    return Ledger(
        micro_batch=choice.micro_batch,
        layers=account.layers(),
        modules={name: module.type_name for name, module in traced.modules.items()},
        totals=peak.totals,
        peak=account.moment(moment),
        by_kind=peak.by_kind,
        held=account.held(moment),
        curve=account.curve(),
        method=method_on(subject.as_traced(device)),
        not_counted=not_counted_on(device, subject.speaks),
    )


class _Account:
    """Memory of one replayed trace, in several views.

    Args:
        traced, part: the trace, and its replay by the allocator.
        constant: bytes by kind that stay allocated.
        division: division of the model over ranks, or None. If given, the bytes are those of one
            rank.
    """

    def __init__(
        self, traced: Traced, part: Replayed, constant: dict[str, int], division: Division | None
    ) -> None:
        self._traced = traced
        self._timeline = traced.timeline
        self._part = part
        self._curve = part.taken.curve
        self._division = division
        self._kinds = Kinds(traced)
        self._constant = sum(constant.values())
        self._phases = self._named_phases()
        self._in_use = self._by_kind()
        for kind, size in constant.items():
            if kind != OVERHEAD:
                before = self._in_use.get(kind, [0] * len(self._curve))
                self._in_use[kind] = [size + more for more in before]

    # ---------------------------------------------------------------------------------- by layer

    def layers(self) -> tuple[LayerBytes, ...]:
        """Return every module with memory of its own."""
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
                # A tensor that is replaced (optimizer state, for example) is not counted twice.
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
                parameter_bytes=self._of_rank(rows[name]["parameters"]),
                buffer_bytes=rows[name]["buffers"],
                gradient_bytes=self._of_rank(rows[name]["gradients"]),
                optimizer_bytes=self._of_rank(rows[name]["optimizer state"]),
                activation_bytes=rows[name]["activations"],
            )
            for name, module in traced.modules.items()
            if rows[name] or module.num_parameters
        )

    def _end_of_forward(self) -> int:
        """Return the moment at which forward of the step's first micro-batch ends."""
        operations = self._timeline.operations
        begin = self._traced.begin if self._traced.first is None else self._traced.first + 1
        for moment in range(begin, len(operations) + 1):
            if operations[moment - 1].backward:
                return moment - 1
        return self._traced.begin

    def _of_rank(self, num_bytes: int) -> int:
        """Return the bytes that one rank has of the state of a layer."""
        return num_bytes if self._division is None else self._division.part(num_bytes)

    # ------------------------------------------------------------------------------- at a moment

    def held(self, moment: int) -> tuple[Holding, ...]:
        """Return the largest holdings at `moment`."""
        sizes: Counter[tuple[str, str]] = Counter()
        counts: Counter[tuple[str, str]] = Counter()
        for block in alive(self._timeline, moment):
            kind = self._kinds.of(block)
            key = kind, self._whose(kind, block)
            size = block.num_bytes if self._division is None else self._division.bytes_of(block)
            sizes[key] += size
            counts[key] += 1
        return tuple(
            Holding(kind=key[0], module=key[1], num_bytes=size, num_blocks=counts[key])
            for key, size in sizes.most_common(_MOST_HELD)
            if size
        )

    def moment(self, i: int) -> Moment:
        """Return the operation at moment `i`."""
        operations = self._timeline.operations
        is_one = 0 < i <= len(operations)
        by_kind = {kind: sizes[i] for kind, sizes in self._in_use.items()}
        phase = self._phases[i - 1] if is_one else ""
        is_gathered = phase in _PASSES
        state = {k: size for k, size in self._part.state.items() if is_gathered or k != GATHERED}
        by_kind |= state
        num_bytes = self._curve[i] + self._constant + sum(state.values())
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
        """Return the name of `module`, or a description for operations of the model outside of its
        layers."""
        return f"{self._traced.modules['.'].type_name} itself" if module == "." else module

    # --------------------------------------------------------------------------------- over time

    def curve(self) -> tuple[Moment, ...]:
        """Return the moments of one step."""
        begin, last = self._traced.begin, self._timeline.num_moments
        in_use = [sum(sizes) for sizes in zip(*self._in_use.values(), strict=True)]
        return tuple(map(self.moment, _telling(in_use, begin, last)))

    def _by_kind(self) -> dict[str, list[int]]:
        """Return the bytes in use at each moment, by kind."""
        length = len(self._curve)
        timeline = self._part.traced.timeline
        changes: dict[str, list[int]] = {}
        for block in timeline.blocks:
            if block.num_bytes:
                kind = self._kinds.of(block)
                change = changes.setdefault(kind, [0] * (length + 2))
                change[block.born] += block.num_bytes
                if block.died is not None:
                    change[block.died + 1] -= block.num_bytes
        found = {kind: list(accumulate(change))[:length] for kind, change in changes.items()}
        if scratch := timeline.scratch:
            found[SCRATCH] = [scratch.get(i, 0) for i in range(length)]
        return found

    def _named_phases(self) -> list[str]:
        """Return the phase of each operation. Operations before the first layer of a pass are not
        part of the loss. Those after backward, such as detaching the loss, count as part of it."""
        phases: list[str] = []
        has_run = False
        done = 0  # number of operations up to the last one of backward
        for moment, operation in enumerate(self._timeline.operations, 1):
            if operation.phase != "compute" or operation.backward:
                if done and not operation.backward and not has_run:
                    phases[done:] = ["backward"] * (len(phases) - done)
                has_run = False
                phases.append("backward" if operation.backward else operation.phase)
                done = len(phases) if operation.backward else 0
            else:
                is_loss = self._kinds.is_loss(moment)
                has_run |= not is_loss
                phases.append("loss" if is_loss and has_run else "forward")
        return phases


def _is_kept(block: Block, done: int) -> bool:
    """Return whether `block` is alive when forward is `done`. A block that dies at the last
    operation of forward is not used afterwards."""
    return block.born <= done and (block.died is None or block.died > done)


def _telling(sizes: Sequence[int], first: int, last: int) -> list[int]:
    """Return at most `_MOST_MOMENTS` moments from `first` to `last` that show the course of
    `sizes`."""
    moments = range(first, last + 1)
    if len(moments) <= _MOST_MOMENTS:
        return list(moments)
    width = -(-2 * len(moments) // _MOST_MOMENTS)
    stretches = (moments[i : i + width] for i in range(0, len(moments), width))
    ends = (
        {max(part, key=sizes.__getitem__), min(part, key=sizes.__getitem__)} for part in stretches
    )
    return [moment for pair in ends for moment in sorted(pair)]

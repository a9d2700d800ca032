"""Ledger: where each byte of a step goes, by layer, by kind, and over time.

`footprint` answers how much; a ledger answers what it is, and whose. It is plain data, made from the
same trace: a table can be printed from it, a curve drawn, and `to_dict` gives JSON.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from anybatch.estimate.allocator import Taken
from anybatch.estimate.family import Traced
from anybatch.estimate.footprint import (
    allocator_of,
    beside_training,
    in_pieces,
    kind_of,
    kinds_at,
    method_on,
    trace_step,
)
from anybatch.estimate.subject import Subject
from anybatch.estimate.trace import Block, Operation, Timeline, alive
from anybatch.machine import Device
from anybatch.plans import Choice

_MOST_HELD = 40
_MOST_MOMENTS = 2000

KINDS: tuple[str, ...] = (
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "loss and logits",
    "input batch",
    "buffers",
    "temporary",
    "kernels' scratch",
    "allocator's rounding and holes",
    "libraries",
    "device context",
)
"""Every kind of bytes, in the order in which a table shows them.

`activations`: made in forward inside the model, and kept. `loss and logits`: what the model returns
and what the loss function makes of it. `temporary`: made in backward or in the update, and gone after
it. `kernels' scratch`: taken and given back inside one operation. `libraries`: generated code and
workspaces that stay with the process (CPU). `device context`: the same on a CUDA device."""


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
    """Bytes of one kind that one module holds at the peak.

    Attributes:
        kind: one of `KINDS`.
        module: whose; `""` where it belongs to none (the batch, the loss, the update).
        num_bytes: in all.
        num_blocks: tensors (storages).
    """

    kind: str
    module: str
    num_bytes: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Moment:
    """One operation of the step, and what is taken while it runs.

    Attributes:
        number: of the operation, from 0 in the step that is shown.
        num_bytes: taken by the process or device, the allocator's holes and constants included.
        live_bytes: in tensors that are alive.
        phase: `"input"`, `"forward"`, `"loss"`, `"backward"` or `"update"`.
        module: whose operation; `""` for none.
        operation: its name, as torch has it.
    """

    number: int
    num_bytes: int
    live_bytes: int
    phase: str
    module: str
    operation: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where each byte of a step goes.

    Attributes:
        micro_batch: samples per forward pass.
        layers: every module with bytes of its own, in order of definition.
        peak: the moment at which most is taken.
        by_kind: bytes at the peak, by kind, in the order of `KINDS`; they add up to
            `peak.num_bytes`.
        held: the largest holdings at the peak, largest first: at most 40.
        curve: the moments of one step, in order. Where a step has more than 2000 operations, each
            stretch of it is shown by the operation of its highest bytes.
        method: how it was found, in words.
    """

    micro_batch: int
    layers: tuple[LayerBytes, ...]
    peak: Moment
    by_kind: dict[str, int]
    held: tuple[Holding, ...]
    curve: tuple[Moment, ...]
    method: str

    @property
    def num_parameters(self) -> int:
        """Numbers in all parameters."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def activation_bytes(self) -> int:
        """Bytes of all layers that are alive when forward ends."""
        return sum(layer.activation_bytes for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts and numbers, for JSON."""
        return asdict(self)


def ledger(subject: Subject, choice: Choice, device: Device) -> Ledger:
    """Trace a step of `subject` under `choice` on `device` and account for its bytes.

    Raises whatever the model or loss raises on fake tensors.
    """
    traced = in_pieces(trace_step(subject, choice, device), subject, choice, device)
    taken = allocator_of(device).replay(traced.timeline)
    beside = beside_training(subject, choice, traced, device)
    constant = sum(beside.values())
    curve = _curve(traced, taken, constant)
    sizes = kinds_at(traced.timeline, beside, taken)
    return Ledger(
        micro_batch=choice.micro_batch,
        layers=_layers(traced),
        peak=_moment(traced, taken, taken.moment, constant, _live(traced.timeline)),
        by_kind={kind: sizes[kind] for kind in KINDS if kind in sizes},
        held=_held(traced.timeline, taken.moment),
        curve=_thinned(curve),
        method=method_on(device),
    )


def _layers(traced: Traced) -> tuple[LayerBytes, ...]:
    timeline = traced.timeline
    done = _end_of_forward(traced)
    rows: dict[str, Counter[str]] = {name: Counter() for name in traced.modules}
    for block in timeline.blocks:
        row = rows.get(block.module)
        if row is None:
            continue
        kind = kind_of(block, timeline)
        if kind in ("parameters", "buffers", "optimizer state"):
            # What holds the same numbers anew (a state that is replaced) does not count again.
            if block.died is None or block.died >= traced.end:
                row[kind] += block.num_bytes
        elif kind == "gradients":
            if block.born >= traced.begin:
                row[kind] += block.num_bytes
        elif kind in ("activations", "loss and logits") and _alive(block, done):
            row["activations"] += block.num_bytes
    return tuple(
        LayerBytes(
            name=name,
            type_name=module.type_name,
            depth=0 if name == "." else name.count(".") + 1,
            output_shape=traced.shapes.get(name),
            num_calls=traced.calls.get(name, 0) // traced.num_micro_batches,
            num_parameters=module.num_parameters,
            parameter_bytes=rows[name]["parameters"],
            buffer_bytes=rows[name]["buffers"],
            gradient_bytes=rows[name]["gradients"],
            optimizer_bytes=rows[name]["optimizer state"],
            activation_bytes=rows[name]["activations"],
        )
        for name, module in traced.modules.items()
        if rows[name] or module.num_parameters
    )


def _end_of_forward(traced: Traced) -> int:
    """The moment at which forward of the first micro-batch of the step ends."""
    operations = traced.timeline.operations
    for moment in range(traced.begin, len(operations) + 1):
        if operations[moment - 1].backward:
            return moment - 1
    return traced.begin


def _alive(block: Block, moment: int) -> bool:
    # What dies at the last operation of forward was of use to nothing after it.
    return block.born <= moment and (block.died is None or block.died > moment)


def _live(timeline: Timeline) -> list[int]:
    """Bytes alive in tensors at each moment."""
    changes = [0] * (timeline.num_moments + 3)
    for block in timeline.blocks:
        changes[block.born] += block.num_bytes
        if block.died is not None:
            changes[block.died + 1] -= block.num_bytes
    return list(accumulate(changes))


def _curve(traced: Traced, taken: Taken, constant: int) -> list[Moment]:
    live = _live(traced.timeline)
    last = traced.timeline.num_moments
    return [_moment(traced, taken, i, constant, live) for i in range(traced.begin, last + 1)]


def _moment(traced: Traced, taken: Taken, i: int, constant: int, live: list[int]) -> Moment:
    operations = traced.timeline.operations
    operation = operations[i - 1] if 0 < i <= len(operations) else None
    return Moment(
        number=max(0, i - traced.begin),
        num_bytes=taken.curve[i] + constant,
        live_bytes=live[i],
        phase=_phase(operation) if operation else "",
        module=operation.module if operation else "",
        operation=operation.name if operation else "",
    )


def _phase(operation: Operation) -> str:
    if operation.phase != "compute":
        return operation.phase
    if operation.backward:
        return "backward"
    return "forward" if operation.module else "loss"


def _held(timeline: Timeline, moment: int) -> tuple[Holding, ...]:
    sizes: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for block in alive(timeline, moment):
        key = kind_of(block, timeline), block.module
        sizes[key] += block.num_bytes
        counts[key] += 1
    return tuple(
        Holding(kind=key[0], module=key[1], num_bytes=size, num_blocks=counts[key])
        for key, size in sizes.most_common(_MOST_HELD)
        if size
    )


def _thinned(curve: list[Moment]) -> tuple[Moment, ...]:
    """At most so many moments: of each stretch the highest."""
    width = -(-len(curve) // _MOST_MOMENTS) or 1
    stretches = (curve[i : i + width] for i in range(0, len(curve), width))
    return tuple(max(part, key=lambda moment: moment.num_bytes) for part in stretches)

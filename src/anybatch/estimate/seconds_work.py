"""Work: the operations of a step, each with its floating-point operations and its bytes.

Recorded in traces of their own, on the stage of the traces for memory. Operations of forward are
attributed to the block in which they ran, and the memory that autograd saves for each block is
counted: the cost of computing a block twice, and the memory that this frees.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from anybatch.compute.along_sequence import PRODUCTS, is_sequence, treats_alike
from anybatch.compute.joint import Share, nobody
from anybatch.compute.low_bit_optimizers import is_compiled, parts_of
from anybatch.compute.optimizer_update import can_part, fuses_divided
from anybatch.estimate.repeats import (
    NotRegular,
    Repeat,
    counted_again,
    named_again,
    repeats_of,
    shortened,
)
from anybatch.estimate.stage import cut_of, stage_with_leanest_update
from anybatch.estimate.subject import Subject
from anybatch.estimate.trace import Timeline
from anybatch.machine import Device
from anybatch.plans import Choice, Recompute, Update

_GATHERS = frozenset((
    "embedding", "embedding_dense_backward", "index", "index_put", "index_select", "gather", "scatter",
    "scatter_add", "index_add", "_unsafe_index_put", "index_put_", "_index_put_impl_", "take",
))  # fmt: skip
"""Operations that touch only as many rows of a table as they return."""

_FREE = frozenset((
    "device", "detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias",
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
))  # fmt: skip
"""Operations that touch no bytes."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation at one micro-batch.

    Attributes:
        name: its name in PyTorch.
        dtype: dtype of its largest tensor, which determines its arithmetic.
        flops: floating-point operations of a product (of matrices, a convolution, attention); 0
            where only bytes count.
        num_bytes: bytes read and written.
        phase: `"forward"`, `"backward"` or `"update"`.
        block: number of the block of the model in whose forward it ran, or -1.
        num_tensors: number of results; a `foreach` operation has many.
    """

    name: str
    dtype: torch.dtype
    flops: float
    num_bytes: float
    phase: str
    block: int = -1
    num_tensors: int = 1


def operation_of(
    func: Any, args: tuple[Any, ...], kwargs: Any, result: Any, phase: str, block: int = -1
) -> Operation | None:
    """Return the operation of a call of the aten overload `func` on fake tensors, or None if it
    touches no bytes."""
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    tensors = [*inputs, *outputs]
    name = func._overloadpacket.__name__
    if not tensors or name in _FREE:
        return None
    largest = max(tensors, key=lambda t: t.numel() if t.is_floating_point() else -1)
    if name in _GATHERS:
        moved = 2 * sum(map(bytes_of, outputs))
        moved += sum(bytes_of(t) for t in inputs if not t.is_floating_point())
    else:
        moved = sum(map(bytes_of, tensors))
    return Operation(
        name=name,
        dtype=largest.dtype,
        flops=_flops(func, name, args, kwargs, result),
        num_bytes=float(moved),
        phase=phase,
        block=block,
        num_tensors=max(1, len(outputs), len(inputs) if "_foreach_" in name else 0),
    )


def _flops(func: Any, name: str, args: tuple[Any, ...], kwargs: Any, result: Any) -> float:
    is_backward = "backward" in name
    if "scaled_dot_product" in name:
        # Two products in forward, five in backward, which recomputes the weights.
        query, key = args[1:3] if is_backward else args[:2]
        return float((10 if is_backward else 4) * query.numel() * key.size(-2))
    in_place = getattr(torch.ops.aten, name.removesuffix("_"), None)
    counter = flop_registry.get(func._overloadpacket) or flop_registry.get(in_place)
    if counter is not None:
        return float(counter(*args, **(kwargs or {}), out_val=result))
    if name.startswith("mkldnn_rnn_layer"):  # each step multiplies by both weights; backward, twice
        inputs, weight, recurrent = args[:3]
        both = weight.numel() + recurrent.numel()
        return (4.0 if is_backward else 2.0) * inputs.size(0) * inputs.size(1) * both
    if name == "_grouped_mm":  # each row or column is multiplied by one group's matrix
        left, right = args[0], args[1]
        rows = left[0] if left.dim() > right.dim() else left
        return 2.0 * rows.numel() * right.size(-1)
    return 0.0


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of the elements of `tensor`."""
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True, slots=True)
class Work:
    """One micro-batch and one update, as operations in order.

    Attributes:
        micro_batch: number of samples.
        operations: operations of one micro-batch that adds to gradients, and of the update.
        kept_bytes: for each block of the subject, bytes of storages created in it and saved for
            backward.
        parameter_bytes: bytes of the trained parameters, which ranks exchange.
        saved_bytes: bytes that forward saves for backward, tensor by tensor. These would be moved
            to host memory, except for small tensors.
        state_bytes: bytes of the optimizer state that has the shapes of parameters.
        tree_levels: number of times that a tree of checkpoints recomputes each layer of the longest
            chain.
        tileable: names of MLPs that can run in tiles along the sequence, none inside another.
        tiled_part: fraction of the arithmetic in blocks that these MLPs perform.
        scores_part: fraction of the arithmetic in blocks that is attention whose scores are
            materialized.
    """

    micro_batch: int
    operations: tuple[Operation, ...]
    kept_bytes: tuple[float, ...]
    parameter_bytes: int
    saved_bytes: float
    state_bytes: int
    tree_levels: int
    tileable: tuple[str, ...]
    tiled_part: float
    scores_part: float


class Counting:
    """Counts the work of `subject` on `device` in the precision of `choice`, at several
    micro-batches, on a stage that later traces of memory use too.

    Attributes:
        update: how the update is run: in the way that takes the least memory.
        fuses_divided: whether the fused update accepts parameters that are sharded over ranks.
        can_part: whether the update can process some parameters at a time.
        comparison: operations of a joint loss over all samples of a global batch, and of its
            gradient; known after `at`.
        compares_parameters: whether a joint loss uses parameters of the model itself; known after
            `at`.

    Raises whatever the model or its optimizer raises on fake tensors.
    """

    def __init__(self, subject: Subject, choice: Choice, device: Device) -> None:
        self._subject = subject
        self._choice = choice
        self._device = device
        self.comparison: list[Operation] = []
        self.compares_parameters: bool = False
        self._update: list[Operation] = []
        self._first: Work | None = None
        self._set_up()

    def _set_up(self) -> None:
        self._stage = stage = stage_with_leanest_update(self._subject, self._choice, self._device)
        self._replica = replica = stage.replica
        self.update: Update = stage.update
        self.fuses_divided: bool = fuses_divided(replica.optimizer)
        self.can_part: bool = can_part(replica.optimizer)

    def at(self, micro_batch: int) -> Work:
        """Return the work of one micro-batch of that size. If a module keeps what its first pass
        creates, the work of a later pass may be less than that of the first; a new `Counting` shows
        the first. Raises whatever the model or loss raises."""
        runs = self._subject.runs
        if self._first is None:
            self._first = self._counted_first(micro_batch)
            return self._first
        try:
            return self._counted(micro_batch, repeats_of(runs.found, Recompute()))
        except NotRegular:
            runs.found = []
            return self._counted(micro_batch, [])

    def _counted_first(self, micro_batch: int) -> Work:
        if repeats := self._stage.repeats_to_verify():
            try:
                found = self._counted(micro_batch, repeats)
            except Exception:  # whatever the user's code raises without some of its blocks
                pass
            else:
                if self._subject.runs.found:
                    return found
            # Anew: a first pass may change each block that it runs, e.g. register a hook in it.
            self._set_up()
        return self._counted(micro_batch, [])

    def _counted(self, micro_batch: int, repeats: Sequence[Repeat]) -> Work:
        """Count without the blocks that `repeats` leave out, and add them. Raises `NotRegular`."""
        subject, stage, replica = self._subject, self._stage, self._replica
        watch, first = Watch(), self._first
        with stage.recorded(watch) as timeline:
            watch.timeline, start = timeline, timeline.num_moments
            stage.make_gradients()
            (batch,) = stage.batches(micro_batch, 1)
            blocks = _Blocks(replica.model, subject.blocks, watch)
            mlps = _Mlps(replica.model, subject.mlps, watch)
            encoded: list[Any] = []
            watch.phase = "forward"
            with shortened(replica.model, repeats, Recompute()), blocks, mlps:
                ask = partial(self._blank, watch, encoded) if replica.is_joint else None
                replica.accumulate(batch, micro_batch, cut_of(subject, micro_batch), ask)
            del batch
            passes, until = watch.operations, timeline.num_moments
            if first is None:
                watch.phase = ""
                if repeats:
                    stage.make_all_gradients()
                self._update = watch.operations = []
                watch.phase = "update"
                stage.run_update()
                self._count_compiled()
                if encoded and subject.compared:
                    self.comparison = watch.operations = []
                    watch.phase = "forward"
                    self.compares_parameters = bool(stage.compared(encoded[0]).direct)
            watch.phase = ""
            encoded.clear()
            replica.drop()
        if repeats:
            again = counted_again(timeline, start, repeats)
            passes = list(_with_copies(passes, watch.moments, again, subject.blocks))
            blocks.count_again(repeats, subject.blocks)
            mlps.count_again(repeats)
        if first is not None:
            return replace(
                first,
                micro_batch=micro_batch,
                operations=(*passes, *self._update),
                kept_bytes=blocks.kept_bytes(),
                saved_bytes=blocks.saved_bytes,
            )
        stage.verify_repeats(micro_batch, timeline, until, repeats)
        chains = [replica.model.get_submodule(_path(name)) for name in subject.chains]
        return Work(
            micro_batch,
            (*passes, *self._update),
            blocks.kept_bytes(),
            sum(p.numel() * p.element_size() for p in replica.parameters),
            blocks.saved_bytes,
            sum(
                value.nbytes
                for param, state in replica.optimizer.state.items()
                for value in state.values()
                if isinstance(value, Tensor) and value.shape == param.shape
            ),
            tree_levels=math.ceil(math.log2(max(2, *map(_length, chains), 1))),
            tileable=mlps.tileable(),
            tiled_part=mlps.part(passes),
            scores_part=watch.scores_part(passes),
        )

    def _blank(self, watch: Watch, seen: list[Any], encoded: Any) -> Share:
        """Return a placeholder for the share of a comparison, which is the same for every
        micro-batch, and add the encodings to `seen`."""
        seen.append(encoded)
        phase, watch.phase = watch.phase, ""
        share = nobody(encoded)
        watch.phase = phase
        return share

    def _count_compiled(self) -> None:
        """Count the update of a compiled optimizer, which is one operation per parameter."""
        optimizer = self._replica.optimizer
        if is_compiled(optimizer):
            # The gradient is read; parameter and states are read and written.
            self._update += [
                Operation(
                    name="update",
                    dtype=param.dtype,
                    flops=0.0,
                    num_bytes=3.0 * param.nbytes + 2.0 * sum(map(_state_bytes, state.values())),
                    phase="update",
                )
                for param, state in optimizer.state.items()
            ]


def _with_copies(
    operations: Sequence[Operation],
    moments: Sequence[int],
    again: Callable[[int], Sequence[str]],
    names: Sequence[str],
) -> Iterator[Operation]:
    """Yield `operations`, recorded at `moments`, with those of the blocks that were left out."""
    numbers = {name: number for number, name in enumerate(names)}
    for operation, moment in zip(operations, moments, strict=False):
        yield operation
        for name in again(moment):
            is_inside = operation.block >= 0
            yield replace(operation, block=numbers[name]) if is_inside else operation


def _state_bytes(value: object) -> int:
    return sum(part.nbytes for part in parts_of(value).values()) if isinstance(value, Tensor) else 0


def _path(name: str) -> str:
    return "" if name == "." else name


def _length(module: nn.Module) -> int:
    return sum(1 for _ in module.children())


class Watch:
    """Records the operations of a trace in `phase`, if that is not empty."""

    def __init__(self) -> None:
        self.phase: str = ""
        self.block: int = -1
        self.mlps: list[str] = []  # currently running
        self.unlike: set[str] = set()  # MLPs that do not treat positions alike
        self.widest: dict[str, int] = {}  # MLP -> elements of its largest product
        self._has_scores: bool = False
        self.timeline: Timeline = Timeline()  # of the trace
        self.operations: list[Operation] = []
        self.moments: list[int] = []

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        """See `trace.Recorder`."""
        if self.mlps:
            self._look_into(func, args, result)
        if self.phase and not func.is_view:
            self._record(func, args, kwargs, result)

    def _look_into(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        size = result.numel() if func in PRODUCTS else 0
        for name in self.mlps:
            self.widest[name] = max(self.widest.get(name, 0), size)
        if not treats_alike(func, args):
            self.unlike.update(self.mlps)

    def scores_part(self, operations: Sequence[Operation]) -> float:
        """Return the fraction of the arithmetic in blocks, among `operations`, that is attention, if
        its scores are materialized; else 0."""
        if not self._has_scores:
            return 0.0
        inside = [o for o in operations if o.block >= 0]
        products = sum(o.flops for o in inside if o.name in ("bmm", "baddbmm"))
        return products / sum(o.flops for o in inside)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        block = self.block if self.phase == "forward" else -1
        if block >= 0 and func is torch.ops.aten.bmm.default:
            scores, values = args
            self._has_scores |= scores.numel() > max(values.numel(), result.numel())
        operation = operation_of(func, args, kwargs, result, self.phase, block)
        if operation is not None:
            self.operations.append(operation)
            self.moments.append(self.timeline.num_moments)


class _Mlps:
    """Detects which of the modules `names` treat the positions of a sequence alike and are wider
    inside than at their output, and counts their arithmetic."""

    def __init__(self, model: nn.Module, names: Sequence[str], watch: Watch) -> None:
        self._modules = {name: model.get_submodule(name) for name in names}
        self._watch = watch
        self._done: dict[str, float] = {}  # floating-point operations by module
        self._begun: list[int] = []  # operations before each running MLP
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> None:
        for name, module in self._modules.items():
            enter, leave = partial(self._enter, name), partial(self._leave, name)
            self._handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave, with_kwargs=True, always_call=True),
            ]

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def count_again(self, repeats: Sequence[Repeat]) -> None:
        """Count the MLPs of a block for those that were left out in its place."""
        for name, other in named_again([*self._done], repeats):
            self._done[other] = self._done[name]
            if name in self._watch.unlike:
                self._watch.unlike.add(other)

    def tileable(self) -> tuple[str, ...]:
        """Return the names of the MLPs that can run in tiles, without those inside another one."""
        found: list[str] = []
        for name in self._modules:
            inside = any(name.startswith(f"{outer}.") for outer in found)
            if not inside and name in self._done and name not in self._watch.unlike:
                found.append(name)
        return tuple(found)

    def part(self, operations: Sequence[Operation]) -> float:
        """Return the fraction of the arithmetic in blocks, among `operations`, that the tileable
        MLPs perform."""
        whole = sum(o.flops for o in operations if o.block >= 0)
        return sum(self._done[name] for name in self.tileable()) / whole if whole else 0.0

    def _enter(self, name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._watch.mlps.append(name)
        self._begun.append(len(self._watch.operations))
        if not is_sequence(args, kwargs):
            self._watch.unlike.add(name)

    def _leave(self, name: str, _module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        self._watch.mlps.pop()
        inside = self._watch.operations[self._begun.pop() :]
        self._done[name] = self._done.get(name, 0.0) + sum(o.flops for o in inside)
        (given, *_) = (*args, None)
        alike = isinstance(result, Tensor) and isinstance(given, Tensor)
        if not alike or result.shape[:-1] != given.shape[:-1]:
            self._watch.unlike.add(name)
        elif self._watch.widest.get(name, 0) < 2 * result.numel():
            self._watch.unlike.add(name)  # there is little to free


class _Blocks:
    """Tracks the block in which forward is, the start of backward, and the tensors saved for it."""

    def __init__(self, model: nn.Module, names: Sequence[str], watch: Watch) -> None:
        self._watch = watch
        self._blocks = [model.get_submodule(_path(name)) for name in names]
        self._made: dict[int, int] = {}  # storage -> the block that made it
        self._held: list[Any] = []  # keeps storages alive, so that their ids are not reused
        self._kept: dict[int, dict[int, int]] = {i: {} for i in range(len(names))}
        self._constants = {id(t.untyped_storage()) for t in (*model.parameters(), *model.buffers())}
        self._saved: Counter[int] = Counter()  # bytes by block
        self.saved_bytes: float = 0.0
        self._hooks = saved_tensors_hooks(self._save, self._take)
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> None:
        for number, block in enumerate(self._blocks):
            self._handles += [
                block.register_forward_pre_hook(self._enter(number), with_kwargs=True),
                block.register_forward_hook(self._leave, always_call=True),
            ]
        self._hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        for handle in self._handles:
            handle.remove()
        self._held.clear()

    def count_again(self, repeats: Sequence[Repeat], names: Sequence[str]) -> None:
        """Count the bytes of a block for those that were left out in its place."""
        numbers = {name: number for number, name in enumerate(names)}
        for repeat in repeats:
            one = numbers[repeat.kept[1]]
            self.saved_bytes += self._saved[one] * len(repeat.left_out)
            self._kept |= {numbers[name]: self._kept[one] for name in repeat.left_out}

    def kept_bytes(self) -> tuple[float, ...]:
        """Return the bytes that each block saves, in order."""
        return tuple(float(sum(kept.values())) for kept in self._kept.values())

    def _enter(self, number: int) -> Any:
        def enter(_block: nn.Module, args: Any, kwargs: Any) -> None:
            self._watch.block = number
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    storage = leaf.untyped_storage()
                    self._made.setdefault(id(storage), -1)
                    self._held.append(storage)

        return enter

    def _leave(self, _block: nn.Module, _args: Any, _output: Any) -> None:
        self._watch.block = -1

    def _save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key, block = id(storage), self._watch.block
        if key not in self._constants:
            self.saved_bytes += tensor.nbytes
            self._saved[block] += tensor.nbytes
        if block >= 0 and key not in self._constants:
            self._held.append(storage)
            if self._made.setdefault(key, block) == block:
                self._kept[block][key] = storage.nbytes()
        return tensor

    def _take(self, tensor: Tensor) -> Tensor:
        self._watch.phase = "backward"  # the first saved tensor is unpacked
        self._watch.block = -1
        return tensor

"""Work: the operations of a step, each with its floating-point operations and its bytes.

A second trace, lighter than the one for memory. Operations of forward are attributed to the block
in which they ran, and the memory that autograd saves for each block is counted: the cost of
computing a block twice, and the memory that this frees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from anybatch.compute import Replica
from anybatch.compute.along_sequence import PRODUCTS, is_sequence, treats_alike
from anybatch.compute.joint import Share, nobody, rows_like
from anybatch.compute.low_bit_optimizers import is_compiled, parts_of, uncompiled
from anybatch.compute.optimizer_update import can_part, fuses_divided, leanest_update
from anybatch.estimate.cuda import laid_over
from anybatch.estimate.fake_op_cache import READ, FakeOpCache, fake_mode
from anybatch.estimate.layout import layout_on
from anybatch.estimate.stage import cut_of, fake_device
from anybatch.estimate.subject import Subject
from anybatch.estimate.trace import has_parts
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


def work_of(subject: Subject, choice: Choice, device: Device) -> Work:
    """Trace one micro-batch of `choice` without recompute, and the update after it.

    Raises whatever the model or loss raises on fake tensors.
    """
    return Counting(subject, choice, device).at(choice.micro_batch)


class Counting:
    """Counts the work of `subject` on `device` in the precision of `choice`, at several
    micro-batches. The model is built once, and the update is traced once.

    Attributes:
        target: device of the tensors: the CPU if the traced device is absent.
        update: how the update is run: in the way that takes the least memory.
        compares_parameters: whether a joint loss uses parameters of the model itself; known after
            `comparison`.

    Raises whatever the model or its optimizer raises on fake tensors.
    """

    def __init__(self, subject: Subject, choice: Choice, device: Device) -> None:
        self.compares_parameters: bool = False
        self.target: torch.device = fake_device(device)
        self._subject = subject
        self._fake = fake_mode()
        self._watch = Watch(self._fake, subject.op_cache)
        self._update: list[Operation] = []
        self._encoded: Any = None  # encodings of the last pass, for a joint loss
        plain = choice.model_copy(update={"recompute": Recompute(), "chunked_head": ""})
        layout = layout_on(device, subject)
        self._device = device
        with self._fake, self._watch, laid_over(device):
            with self.target:
                self._model = model = subject.build_model()
            self._replica = Replica(
                model,
                lambda: subject.make_optimizer(model),
                subject.loss,
                plain,
                self.target,
                subject.whole,
                loss_scaling=False,
                kernels=layout,
            )
            self.update: Update = leanest_update(self._replica.optimizer, model, device.kind)
            self.fuses_divided: bool = fuses_divided(self._replica.optimizer)
            self._replica.updater.take(self.update)
            self._make_gradients()
            self._apply()  # creates the optimizer state

    def at(self, micro_batch: int) -> Work:
        """Return the work of one micro-batch of that size. If a module keeps what its first pass
        creates, the work of a later pass may be less than that of the first; a new `Counting` shows
        the first. Raises whatever the model or loss raises."""
        subject, watch, replica = self._subject, self._watch, self._replica
        watch.begin_anew()
        with self._fake, watch, laid_over(self._device):
            self._make_gradients()
            batch = subject.batch(micro_batch, self.target)
            blocks = _Blocks(self._model, subject.blocks, watch)
            mlps = _Mlps(self._model, subject.mlps, watch)
            watch.begin("forward")
            with blocks, mlps:
                ask = self._blank if replica.is_joint else None
                replica.accumulate(batch, micro_batch, cut_of(subject, micro_batch), ask)
            del batch
            passes = watch.operations
            if not self._update:
                watch.operations = self._update
                watch.begin("update")
                self._apply()
            watch.phase = ""
            replica.drop()
        chains = [self._model.get_submodule(_path(name)) for name in subject.chains]
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

    def comparison(self) -> list[Operation]:
        """Return the operations of a joint loss over all samples of a global batch, and of its
        gradient. Call after `at`. Raises whatever the loss raises."""
        number, watch = self._subject.compared, self._watch
        assert self._encoded is not None
        watch.begin_anew()
        with self._fake, watch, laid_over(self._device):
            rows = rows_like(self._encoded, number)
            watch.begin("forward")
            found = self._replica.compare(rows, number)
            watch.phase = ""
        self.compares_parameters = bool(found.direct)
        return watch.operations

    def _blank(self, encoded: Any) -> Share:
        """Return a placeholder for the share of a comparison, which is the same for every
        micro-batch."""
        self._encoded = encoded
        phase, self._watch.phase = self._watch.phase, ""
        share = nobody(encoded)
        self._watch.phase = phase
        return share

    def _make_gradients(self) -> None:
        for param in self._replica.parameters:
            param.grad = torch.empty_like(param)

    @property
    def can_part(self) -> bool:
        """Whether the update can process some parameters at a time."""
        return can_part(self._replica.optimizer)

    def _apply(self) -> None:
        replica, watch = self._replica, self._watch
        replica.finish(2.0, self._subject.clip_norm)
        if not is_compiled(replica.optimizer):
            replica.apply()
            return
        phase, watch.phase = watch.phase, ""  # compiled, one operation per parameter
        with uncompiled(replica.optimizer):
            replica.apply()
        if phase:
            # The gradient is read; parameter and states are read and written.
            watch.operations += [
                Operation(
                    name="update",
                    dtype=param.dtype,
                    flops=0.0,
                    num_bytes=3.0 * param.nbytes + 2.0 * sum(map(_state_bytes, state.values())),
                    phase=phase,
                )
                for param, state in replica.optimizer.state.items()
            ]


def _state_bytes(value: object) -> int:
    return sum(part.nbytes for part in parts_of(value).values()) if isinstance(value, Tensor) else 0


def _path(name: str) -> str:
    return "" if name == "." else name


def _length(module: nn.Module) -> int:
    return sum(1 for _ in module.children())


class Watch(TorchDispatchMode):
    """Records operations on fake tensors."""

    def __init__(self, fake: FakeTensorMode, op_cache: FakeOpCache) -> None:
        super().__init__()
        self._fake = fake
        self._op_cache = op_cache
        self.begin_anew()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and skipping takes time in every operation

    def begin_anew(self) -> None:
        """Discard what was recorded."""
        self.phase: str = ""
        self.block: int = -1
        self.mlps: list[str] = []  # currently running
        self.unlike: set[str] = set()  # MLPs that do not treat positions alike
        self.widest: dict[str, int] = {}  # MLP -> elements of its largest product
        self._has_scores: bool = False
        self.operations: list[Operation] = []

    def begin(self, phase: str) -> None:
        """Attribute the following operations to `phase`."""
        self.phase = phase

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation on fake tensors and record it."""
        if has_parts(types):
            return NotImplemented  # its operations on each part are dispatched here next
        if func is READ:
            return self._op_cache.number(args[0])
        kwargs = kwargs or {}
        result = self._op_cache.run(self._fake, func, args, kwargs)
        if self.mlps:
            self._look_into(func, args, result)
        if self.phase and not func.is_view:
            self._record(func, args, kwargs, result)
        return result

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
        if block >= 0 and key not in self._constants:
            self._held.append(storage)
            if self._made.setdefault(key, block) == block:
                self._kept[block][key] = storage.nbytes()
        return tensor

    def _take(self, tensor: Tensor) -> Tensor:
        self._watch.phase = "backward"  # the first saved tensor is unpacked
        self._watch.block = -1
        return tensor

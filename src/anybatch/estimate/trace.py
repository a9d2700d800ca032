"""Trace: what a piece of torch code would allocate, free and compute, found without running it.

The code runs on fake tensors (shapes, dtypes and devices, no memory), and every operation passes by
here. A storage is alive from the operation that made it until the last tensor on it is gone, exactly
as in the real run, so the timeline of live bytes is that of the real run, before the allocator's
rounding. Operations are counted too: floating-point operations and bytes moved, for a first estimate
of time.

Whose an operation is, is seen in forward by the module that runs. In backward torch knows the node of
the graph, and the node's number leads back to the operation that made it.

Reading a value has no answer on fake tensors. A loss or an optimizer that asks for one is told 1, so
code that only counts or logs goes on; code that branches on data takes one branch. Where shapes depend
on numbers, these are followed: see `data_dependent_shapes`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from anybatch.estimate.fake_op_cache import DEVICE_OF, READ, FakeOpCache, fake_mode
from anybatch.estimate.kernels import Kernels

_aten: Any = torch.ops.aten
_autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
_node: Callable[[], Any] = torch._C._current_autograd_node
_NoFunctions: Any = torch._C.DisableTorchFunction
_CAST: Any = _aten._to_copy.default
_HALF = (torch.bfloat16, torch.float16)

CASTS = "weights in half precision"
"""The kind of autocast's copies of weights."""


SCRATCH = "kernels' scratch"
"""The kind of what is taken and given back inside one operation."""

COPIED = "input"
"""The phase in which batches come to the device."""


@dataclass(slots=True)
class Block:
    """One storage: `num_bytes` alive from moment `born` to moment `died`, both included (None: to the
    end).

    Attributes:
        phase: of the trace, when it was born.
        kind: what it was said to hold; empty: nothing was said.
        module: name of the module whose operation made it, or that it is a parameter of.
        item_bytes: of one number in the tensor that came with it.
    """

    num_bytes: int
    born: int
    phase: str
    died: int | None = None
    kind: str = ""
    module: str = ""
    item_bytes: int = 1


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation, at the moment of its place in `Timeline.operations`, counted from 1.

    Attributes:
        name: as torch has it.
        phase: of the trace.
        backward: whether it is part of a backward pass.
        module: whose it is; empty: that of no module.
    """

    name: str
    phase: str
    backward: bool
    module: str


@dataclass
class Timeline:
    """Everything that a trace saw. Moments are numbered by operation.

    Attributes:
        released: the moment after which an allocator that keeps what nobody uses is made to give it
            back.
    """

    blocks: list[Block] = field(default_factory=list)
    scratch: dict[int, int] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    num_moments: int = 0
    released: int | None = None


class _Life(weakref.ref):
    """A storage that is alive, its block, and its number."""

    __slots__ = ("block", "key")
    block: Block
    key: int


class Tracer(TorchDispatchMode):
    """Records operations on fake tensors into a `Timeline`. Use `tracing`. Bytes are those of tensors
    on devices of the type `home`.

    Attributes:
        timeline: what was recorded.
        phase: name of what is being traced, as the caller says.
        shapes: of the first tensor that each module returned last.
        calls: forward passes of each module, those of recompute not counted.
        disturbed: whether something was freed that was said to stay; see `begin_anew`.
    """

    def __init__(
        self, kernels: Kernels, fake: FakeTensorMode, op_cache: FakeOpCache, home: str = "cpu"
    ) -> None:
        super().__init__()
        self._home = home
        self._fake = fake
        self._op_cache = op_cache
        self.timeline: Timeline = Timeline()
        self.phase: str = "setup"
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.calls: dict[str, int] = {}
        self._kernels = kernels
        self._known: dict[int, _Life] = {}  # by the number of the storage
        self._made: dict[Any, Operation] = {}  # one object for all that are equal
        self._names: dict[nn.Module, str] = {}
        self._running: list[str] = []
        self._made_by: dict[int, str] = {}  # number of a node in the graph -> module
        self._settled: frozenset[int] = frozenset()
        self._in_kernel = False
        self.disturbed: bool = False

    def begin_anew(self, timeline: Timeline, settled: Iterable[Block]) -> None:
        """Record into `timeline` from now on, as if nothing but what it follows on had been traced.
        Whether any of the blocks `settled` is freed will be told by `disturbed`."""
        self.timeline = timeline
        self.shapes, self.calls = {}, {}
        self._made_by.clear()
        self._settled = frozenset(map(id, settled))
        self.disturbed = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and being skipped takes time at every operation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation on fake tensors and record it."""
        if func is DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if has_parts(types):
            return NotImplemented  # what it does to each of them passes by here next
        if func is READ:
            return self._op_cache.number(args[0])
        result = self._op_cache.run(self._fake, func, args, kwargs)
        if self._in_kernel or func is DEVICE_OF:
            return result
        with _NoFunctions():  # what is asked of tensors here concerns no mode around
            module = self._count(func, args, result)
            for leaf in (result,) if type(result) is FakeTensor else _tensors_of(result):
                self.see(leaf, module=module)
            if func is _CAST and result.dtype in _HALF and self.phase == "compute":
                self._name_cast(args[0], result)
            if found := self._kernels.workspace(func, args, result):
                tensor, num_bytes = found
                self.block_of(tensor).num_bytes = num_bytes
        return result

    def see(self, tensor: Tensor, kind: str = "", module: str = "") -> None:
        """Take in the storage of `tensor`, if it is new. `kind` and `module` say what it holds, and
        whose."""
        storage = tensor.untyped_storage()
        life = self._known.get(id(storage))
        if life is not None:
            block = life.block
        else:
            size = storage.nbytes() if self._is_at_home(tensor) else 0
            block = Block(size, self.timeline.num_moments, self.phase, module=module)
            block.item_bytes = tensor.element_size()
            life = _Life(storage, self._free)
            life.block, life.key = block, id(storage)
            self._known[life.key] = life
            self.timeline.blocks.append(block)
        if kind:
            block.kind = kind
            block.module = module or block.module

    @contextmanager
    def as_kernel(self, name: str, scratch_bytes: int) -> Iterator[None]:
        """Take the operations inside for one kernel, which stores nothing in between but takes
        `scratch_bytes`. What it makes and leaves is to be shown to `see`."""
        timeline = self.timeline
        timeline.num_moments += 1
        timeline.operations.append(Operation(name, self.phase, False, ""))
        now = timeline.num_moments
        timeline.blocks.append(Block(scratch_bytes, now, self.phase, now))
        self._in_kernel = True
        try:
            yield
        finally:
            self._in_kernel = False

    def block_of(self, tensor: Tensor) -> Block:
        """The storage of `tensor`, which was seen."""
        return self._known[id(tensor.untyped_storage())].block

    def watch(self, model: nn.Module) -> None:
        """Know the modules of `model` by name from now on."""
        self._names = {module: name or "." for name, module in model.named_modules()}

    def enter(self, module: nn.Module, _args: Any) -> None:
        """A module begins to run."""
        self._running.append(self._names.get(module, ""))

    def leave(self, module: nn.Module, _args: Any, result: Any) -> None:
        """A module has run, or was left by an exception."""
        name = self._running.pop() if self._running else ""
        if not name or _node() is not None:
            return
        self.calls[name] = self.calls.get(name, 0) + 1
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if leaves:
            self.shapes[name] = tuple(leaves[0].shape)
        if name == "." and self.phase == "compute":
            for leaf in leaves:
                self._mark_result(leaf)

    def _mark_result(self, tensor: Tensor) -> None:
        life = self._known.get(id(tensor.untyped_storage()))
        if life is not None and not life.block.kind and life.block.phase == "compute":
            life.block.kind = "loss and logits"

    def _name_cast(self, weight: Tensor, copied: Tensor) -> None:
        """In forward nobody but autocast makes copies of weights."""
        life = self._known.get(id(weight.untyped_storage()))
        if life is not None and life.block.kind == "parameters":
            self.block_of(copied).kind = CASTS

    def _is_at_home(self, tensor: Tensor) -> bool:
        """Whether `tensor` is in the memory that is traced, and not in that of a host."""
        return type(tensor) is not FakeTensor or tensor.fake_device.type == self._home

    def _free(self, life: _Life) -> None:
        del self._known[life.key]
        block = life.block
        block.died = self.timeline.num_moments
        if id(block) in self._settled:
            self.disturbed = True

    def _count(self, func: Any, args: tuple[Any, ...], result: Any) -> str:
        timeline = self.timeline
        timeline.num_moments += 1
        node = _node()
        module = self._whose(node)
        key = id(func), self.phase, node is not None, module
        operation = self._made.get(key)
        if operation is None:
            operation = self._made[key] = Operation(str(func), self.phase, node is not None, module)
        timeline.operations.append(operation)
        if func.is_view:
            return module
        now = timeline.num_moments
        for size in self._kernels.copies(func, args):
            timeline.blocks.append(Block(size, now, self.phase, now, SCRATCH, module))
        if extra := self._kernels.scratch(func, args, result):
            timeline.scratch[now] = extra
        return module

    def _whose(self, node: Any) -> str:
        if node is None:
            name = self._running[-1] if self._running else ""
        elif self._running:
            name = self._running[-1]  # recompute: forward inside backward
        else:
            return self._made_by.get(node._sequence_nr(), "")
        self._made_by[_autograd._get_sequence_nr() - 1] = name
        return name


@contextmanager
def tracing(kernels: Kernels) -> Iterator[tuple[Tracer, FakeTensorMode]]:
    """Trace what runs inside, on fake tensors."""
    fake = fake_mode()
    tracer = Tracer(kernels, fake, FakeOpCache())
    with recording(tracer, fake):
        yield tracer, fake


@contextmanager
def recording(tracer: Tracer, fake: FakeTensorMode) -> Iterator[None]:
    """Let `tracer` see what runs inside, on the tensors of `fake`."""
    entering = register_module_forward_pre_hook(tracer.enter)
    leaving = register_module_forward_hook(tracer.leave, always_call=True)
    try:
        with fake, tracer:
            yield
    finally:
        entering.remove()
        leaving.remove()


def alive(timeline: Timeline, moment: int) -> list[Block]:
    """The blocks alive at `moment`: while its operation ran, its arguments and results included."""
    return [
        block
        for block in timeline.blocks
        if block.born <= moment and (block.died is None or block.died >= moment)
    ]


def has_parts(types: Iterable[type]) -> bool:
    """Whether one of `types`, of the arguments of an operation, is a tensor that consists of others."""
    for made in types:  # noqa: SIM110 - a loop, since it is asked for every operation
        if made is not FakeTensor and is_traceable_wrapper_subclass_type(made):
            return True
    return False


def _tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments or results of an operation: lists and tuples nest, nothing else."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors_of(part)

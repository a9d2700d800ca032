"""Trace: what PyTorch code would allocate, free and compute, determined without running it.

The code runs on fake tensors (shapes, dtypes and devices, no memory), and the tracer sees every
operation. A storage is alive from the operation that creates it until the last tensor on it is
freed, exactly as in the real run, so the timeline of live bytes is that of the real run, before the
allocator's rounding. Floating-point operations and bytes moved, for an estimate of time, are
counted by a recorder of such a trace: see `seconds_work`.

In forward, an operation belongs to the module that runs. In backward, PyTorch provides the node of
the graph, and its sequence number leads to the module whose operation created it.

Fake tensors have no values to read. A loss or an optimizer that reads one gets 1, so code that only
counts or logs continues, and code that branches on data takes one branch. If shapes depend on
values, these are tracked: see `data_dependent_shapes`.
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

Recorder = Callable[[Any, tuple[Any, ...], Any, Any], None]
"""Called with an operation, its positional and named arguments, and its result."""

CASTS = "weights in half precision"
"""Kind of the copies of weights that autocast creates."""


SCRATCH = "kernels' scratch"
"""Kind of memory that is allocated and freed within one operation."""

COPIED = "input"
"""Phase in which batches are copied to the device."""


@dataclass(slots=True)
class Block:
    """One storage: `num_bytes` that are alive from moment `born` to moment `died`, both included
    (None: to the end).

    Attributes:
        phase: phase of the trace at moment `born`.
        kind: kind of the content; empty if it is not known.
        module: name of the module whose operation created it, or whose parameter it is.
        item_bytes: element size of the tensor with which it was first seen.
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
    """One operation. Its moment is its position in `Timeline.operations`, counted from 1.

    Attributes:
        name: its name in PyTorch.
        phase: phase of the trace.
        backward: whether it is part of a backward pass.
        module: module that it belongs to; empty if there is none.
    """

    name: str
    phase: str
    backward: bool
    module: str


@dataclass
class Timeline:
    """Everything that a trace recorded. Moments are numbered by operation.

    Attributes:
        released: moment after which a caching allocator is made to release unused memory.
    """

    blocks: list[Block] = field(default_factory=list)
    scratch: dict[int, int] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    num_moments: int = 0
    released: int | None = None


class _Life(weakref.ref):
    """Weak reference to a live storage, with its block and its id."""

    __slots__ = ("block", "key")
    block: Block
    key: int


class Tracer(TorchDispatchMode):
    """Records operations on fake tensors into a `Timeline`. Use `tracing`. Only tensors on devices
    of the type `home` count.

    Attributes:
        timeline: what was recorded.
        phase: name of what is being traced, set by the caller.
        shapes: shape of the first tensor in the last result of each module.
        calls: number of forward passes of each module, excluding recompute.
        disturbed: whether a settled block was freed; see `begin_anew`.
        recorder: called with each operation outside of kernels, its arguments and its result.
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
        self._known: dict[int, _Life] = {}  # by id of the storage
        self._made: dict[Any, Operation] = {}  # one object for all that are equal
        self._names: dict[nn.Module, str] = {}
        self._running: list[str] = []
        self._made_by: dict[int, str] = {}  # sequence number of a node in the graph -> module
        self._settled: frozenset[int] = frozenset()
        self._in_kernel = False
        self.disturbed: bool = False
        self.recorder: Recorder | None = None

    def begin_anew(self, timeline: Timeline, settled: Iterable[Block]) -> None:
        """Record into `timeline` from now on, as if only what precedes it had been traced.
        `disturbed` is set if any of the blocks `settled` is freed."""
        self.timeline = timeline
        self.shapes, self.calls = {}, {}
        self._made_by.clear()
        self._settled = frozenset(map(id, settled))
        self.disturbed = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and skipping takes time in every operation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation on fake tensors and record it."""
        if func is DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if has_parts(types):
            return NotImplemented  # its operations on each part are dispatched here next
        if func is READ:
            return self._op_cache.number(args[0])
        result = self._op_cache.run(self._fake, func, args, kwargs)
        if self._in_kernel or func is DEVICE_OF:
            return result
        with _NoFunctions():  # queries of tensors here must not reach the surrounding modes
            module = self._count(func, args)
            for leaf in (result,) if type(result) is FakeTensor else _tensors_of(result):
                self.see(leaf, module=module)
            if func is _CAST and result.dtype in _HALF and self.phase == "compute":
                self._name_cast(args[0], result)
            if found := self._kernels.workspace(func, args, result):
                tensor, num_bytes = found
                self.block_of(tensor).num_bytes = num_bytes
            if self.recorder is not None:
                self.recorder(func, args, kwargs or {}, result)
        return result

    def see(self, tensor: Tensor, kind: str = "", module: str = "") -> None:
        """Register the storage of `tensor` if it is new. `kind` and `module` set its content and
        its owner."""
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
        """Treat the operations inside as one kernel, which stores nothing in between but takes
        `scratch_bytes`. Tensors that it creates and that stay must be passed to `see`."""
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
        """Return the block of the storage of `tensor`, which must have been seen."""
        return self._known[id(tensor.untyped_storage())].block

    def watch(self, model: nn.Module) -> None:
        """Register the modules of `model` by name."""
        self._names = {module: name or "." for name, module in model.named_modules()}

    def enter(self, module: nn.Module, _args: Any) -> None:
        """Forward pre-hook: a module begins to run."""
        self._running.append(self._names.get(module, ""))

    def leave(self, module: nn.Module, _args: Any, result: Any) -> None:
        """Forward hook: a module has run, or was left by an exception."""
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
        """Mark `copied` as autocast's copy of `weight`. In forward, only autocast copies weights."""
        life = self._known.get(id(weight.untyped_storage()))
        if life is not None and life.block.kind == "parameters":
            self.block_of(copied).kind = CASTS

    def _is_at_home(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is in the traced memory, as opposed to that of a host."""
        return type(tensor) is not FakeTensor or tensor.fake_device.type == self._home

    def _free(self, life: _Life) -> None:
        del self._known[life.key]
        block = life.block
        block.died = self.timeline.num_moments
        if id(block) in self._settled:
            self.disturbed = True

    def _count(self, func: Any, args: tuple[Any, ...]) -> str:
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
        if extra := self._kernels.scratch(func, args):
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
    """Trace the code inside, on fake tensors."""
    fake = fake_mode()
    tracer = Tracer(kernels, fake, FakeOpCache())
    with recording(tracer, fake):
        yield tracer, fake


@contextmanager
def recording(tracer: Tracer, fake: FakeTensorMode) -> Iterator[None]:
    """Let `tracer` record the code inside, on the tensors of `fake`."""
    entering = register_module_forward_pre_hook(tracer.enter)
    leaving = register_module_forward_hook(tracer.leave, always_call=True)
    try:
        with fake, tracer:
            yield
    finally:
        entering.remove()
        leaving.remove()


def alive(timeline: Timeline, moment: int) -> list[Block]:
    """Return the blocks alive at `moment`, while its operation runs, including its arguments and
    results."""
    return [
        block
        for block in timeline.blocks
        if block.born <= moment and (block.died is None or block.died >= moment)
    ]


def has_parts(types: Iterable[type]) -> bool:
    """Return whether one of `types`, the argument types of an operation, is a tensor made of other
    tensors."""
    for made in types:  # noqa: SIM110 - a loop, since it is asked for every operation
        if made is not FakeTensor and is_traceable_wrapper_subclass_type(made):
            return True
    return False


def _tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results of an operation, which may nest lists and tuples
    only."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors_of(part)

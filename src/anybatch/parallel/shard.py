"""Shard: parameters, gradients and optimizer state divided over the ranks, on torch's FSDP2.

Each rank keeps a part of every parameter. The weights of a block are gathered right before the block
runs and dropped after it; its gradient is added up over the ranks as soon as backward has passed the
block, each rank keeping its own part. So a rank holds whole weights of a block or two at a time.

    rank 0   gather 1 | run 1 | gather 2 | run 2 | ...     backward: | run 2 | add up 2 | run 1 | ...
    rank 1   gather 1 | run 1 | gather 2 | run 2 | ...               | run 2 | add up 2 | run 1 | ...

What is different from `Replicate`, and what is done about it here:

- Ranks meet inside passes, so all must run equally many (`lockstep`). A rank with fewer micro-batches
  repeats one of its own with a backward seed of zero: what is finite times zero adds nothing.
- A rank that fails inside a pass leaves the others waiting in it: see `abortable_group.py`.
- Ranks must add up the same gradients, though a parameter may be used on some of them only: zeros stand
  for the missing ones, and the vote tells which parameters no rank has used at all.
- Every micro-batch is added up at once. Adding up once per step would save communication, and would
  keep whole gradients on every rank: what sharding is to avoid. It can be had (`reduce="last pass"`).

Groups of ranks, those of a machine, say, may divide a model each, and replicate each other: the parts
of the gradients are added up across groups once per step, after the last pass, whatever happened in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from anybatch.compute import Replica, find_blocks
from anybatch.compute.blocks import match_blocks
from anybatch.compute.buckets import BUCKET_BYTES, check_divisible
from anybatch.compute.precision import FORMATS, NORMS
from anybatch.errors import InputError, PeerFailed, PeerLost
from anybatch.parallel.abortable_group import DEADLINE, AbortableGroup
from anybatch.parallel.buffers import Buffers
from anybatch.parallel.earlier_fsdp import add_zeros_for_unused, forget_pass
from anybatch.parallel.group import Agreed, Wish
from anybatch.parallel.vote import DistributedGroup, calling, exchange
from anybatch.parallel.whole import fill, reshard
from anybatch.plans import Precision


@final
class Shard(DistributedGroup):
    """The ranks of torch.distributed's default group, each with a part of the model.

    Args:
        shares: by rank.
        device: of this rank.
        precision: that of the plan. With half-precision weights what is kept in parts are the float32
            masters; weights are gathered in half precision, those of norms in float32.
        blocks: names of the modules that are gathered at a time, as in `plans.Recompute`; by default
            what `find_blocks` finds.
        over: ranks that divide one model among them, those of a machine, say; by default all.
        reduce: when gradients are added up: after every pass, or after the last one.
        to_host: parts of parameters, gradients and optimizer state stay in host memory (CUDA only).
        deadline: how long a rank waits for another inside a pass.

    Raises `InputError` if ranks and groups do not go together, or an option is not for this device.
    """

    lockstep: bool = True

    def __init__(
        self,
        shares: Sequence[float],
        device: torch.device,
        precision: Precision = "fp32",
        *,
        blocks: Sequence[str] = (),
        over: int | None = None,
        reduce: Literal["every pass", "last pass"] = "every pass",
        to_host: bool = False,
        deadline: timedelta = DEADLINE,
    ) -> None:
        super().__init__(shares, device)
        self._precision: Precision = precision
        self._patterns = tuple(blocks)
        self._parts = over or self.size
        _check_options(self.size, self._parts, device, precision, to_host)
        self._to_host = to_host
        # Half-precision gradients are added up in float32 only where they are added up at once.
        self._at_last = reduce == "last pass" and not FORMATS[precision].masters
        groups = [range(i, i + self._parts) for i in range(0, self.size, self._parts)]
        if len(groups) == 1:
            self._mesh = init_device_mesh(device.type, (self.size,), mesh_dim_names=("shard",))
            self._across: dist.ProcessGroup | None = None
        else:
            both = init_device_mesh(
                device.type, (len(groups), self._parts), mesh_dim_names=("replicate", "shard")
            )
            self._mesh, self._across = both["shard"], both.get_group("replicate")
        self._wire = AbortableGroup(groups, deadline, device)
        self._modules: list[FSDPModule] = []
        self._root: nn.Module | None = None
        self._trained: dict[str, nn.Parameter] = {}  # the parts, by name
        self._gathered: dict[str, Tensor] = {}  # the whole parameters that autograd knows
        self._used: set[str] = set()
        self._failed = False
        self._has_run = False  # a pass has begun: before that FSDP has nothing that could be reset

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """The model that `make` builds, divided, with the values of rank 0.

        The ranks of a group build one after the other, so that their machine never holds more than one
        whole model. The others' values are not used: rank 0 builds last, and sends them.

        Raises the error of `make` on the rank where it fails, and `PeerFailed` on the others.
        """
        model: nn.Module | None = None
        whole: dict[str, Tensor] = {}
        for turn in reversed(range(self._parts)):
            wrong: Exception | None = None
            if self.rank % self._parts == turn:
                try:
                    model = make()
                    whole = self._divide(model)
                except Exception as error:
                    wrong = error
            told = exchange(f"{type(wrong).__name__}: {wrong}" if wrong else "")
            if wrong is not None:
                raise wrong
            for rank, error in enumerate(told):
                if error:
                    raise PeerFailed(f"rank {rank} could not build its model: {error}")
        assert model is not None
        self._send(model, whole)
        return model

    def prepare(self, model: nn.Module) -> None:
        """See `Group`. `model` is there on every rank already; where memory is short, `build`.

        Raises `InputError` if it has parameters that cannot be divided.
        """
        self._send(model, self._divide(model))

    def adopt(self, replica: Replica) -> None:
        self._buffers = Buffers(replica.model, self._device, self.size)

    def begin(self) -> None:
        self._used.clear()
        self._failed = False
        if self._at_last:
            self._add_up(False)

    def between_phases(self, replica: Replica) -> None:
        """See `Group`: what the root gathered is let go of, or the model would show whole parameters
        that no gradient reaches."""
        reshard(replica.model)

    def leave(self) -> None:
        self._wire.cut()

    def last_pass(self, measured: bool = False) -> AbstractContextManager[None]:
        return self._adding_up() if self._at_last else nullcontext()

    def sum_norm(self, replica: Replica, last: bool) -> Tensor | None:
        """See `Group`: what a rank holds is its part of sums over all of them."""
        return None

    def gather(self, failed: bool) -> None:
        """See `Group`. Within a group gradients were added up in the passes."""
        self._failed = failed
        if failed:
            self._wire.cut()
        if self._buffers is not None:
            with calling("while buffers were agreed upon"):
                self._buffers.gather()
        if self._across is not None:
            with calling("while gradients were added up across groups"):
                for bucket in self._buckets():
                    self._sum_across(bucket, self._across)

    def agree(
        self, totals: Tensor | None, note: float = 0.0, wish: Wish = Wish.NOTHING
    ) -> Agreed | None:
        used = [name in self._used for name in self._trained]
        flags = (self._failed, *used)
        agreed, (failures, *counts) = self._vote.hold(totals, note, flags, wish=wish)
        if agreed is None:
            broken = self._wire.broken
            with calling("in the vote at the end of a step"):
                self._start_over()
            if not failures:  # nobody knows why, so it would happen again
                raise PeerLost(broken or "another rank gave up waiting in the middle of a pass.")
            return None
        for param, count in zip(self._trained.values(), counts, strict=True):
            if not count:
                param.grad = None  # zeros, which the optimizer would take for a gradient
        return agreed

    def settle(self, replica: Replica) -> float:
        """See `Group`: after a pass without gradient the model would show whole parameters."""
        if self._has_run:
            reshard(replica.model)
        return 0.0

    def close(self) -> None:
        """See `Group`. The model stays divided."""
        self._wire.close()

    def _divide(self, model: nn.Module) -> dict[str, Tensor]:
        """Divide `model`. Returns the whole parameters, which only rank 0 keeps."""
        check_divisible(model)
        half = FORMATS[self._precision]
        for param in model.parameters():
            if half.weights is not None and not half.masters and param.is_floating_point():
                param.data = param.data.to(half.weights)
            param.data = param.data.contiguous()
        whole = {n: p.detach() for n, p in model.named_parameters()} if self.rank == 0 else {}
        offload = CPUOffloadPolicy() if self._to_host else OffloadPolicy()
        plain = MixedPrecisionPolicy()
        policy = plain
        if half.masters:
            policy = MixedPrecisionPolicy(half.weights, torch.float32, cast_forward_inputs=False)
        shard = partial(fully_shard, mesh=self._mesh, offload_policy=offload)
        if half.masters and (norms := _norms(model)):
            # One group of all norms, small enough to stay gathered.
            shard(norms, mp_policy=plain, reshard_after_forward=False)
        for block in self._blocks(model):
            shard(block, mp_policy=policy)
        shard(model, mp_policy=policy)
        self._take_charge(model)
        return whole

    def _blocks(self, model: nn.Module) -> list[nn.Module]:
        """Modules to gather one at a time. One that shares a parameter with the rest of the model is
        left to the root: the shared one must be gathered with both."""
        named = match_blocks(model, self._patterns or find_blocks(model))
        if not named:  # a plain sequence of layers
            named = dict(model.named_children()) if isinstance(model, nn.Sequential) else {}
        found = []
        for block in dict.fromkeys(named.values()):
            inside = set(block.modules())
            own = set(block.parameters())
            rest = (m for m in model.modules() if m not in inside)
            shared = any(p in own for m in rest for p in m.parameters(recurse=False))
            if own and block is not model and not shared:
                found.append(block)
        return found

    def _take_charge(self, model: nn.Module) -> None:
        self._root = model
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        names = {id(p): n for n, p in model.named_parameters()}
        runs = _Runs({id(m): n or "." for n, m in model.named_modules()})
        self._modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        for module in self._modules:
            # Sums, not means: the engine divides by the weight of the global batch.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            self._wire.connect(module)
            if self._device.type == "cpu":
                # Gathering ahead hides no time here, and would take memory for one block more.
                module.set_modules_to_backward_prefetch([module])
            assert isinstance(module, nn.Module)
            module.register_forward_pre_hook(runs)
            module.register_forward_pre_hook(_Notes(module, names, self._gathered, self._used))
            module.register_forward_hook(_own_memory, prepend=True)
        model.register_forward_pre_hook(self._begins_to_run, prepend=True)
        model.register_forward_pre_hook(runs.begin, prepend=True)
        add_zeros_for_unused(model)

    def _begins_to_run(self, *_: object) -> None:
        self._has_run = True

    @torch.no_grad()
    def _send(self, model: nn.Module, whole: dict[str, Tensor]) -> None:
        """The parts of all ranks from the values of rank 0."""
        with calling("while the weights were sent"):
            for name, param in model.named_parameters():
                fill(param, whole.pop(name, None))
            for buffer in model.buffers():
                fill(buffer, buffer if self.rank == 0 else None)

    def _start_over(self) -> None:
        """After a failure on any rank: nothing of the pass that was cut off is left."""
        self._wire.lay()
        for param in self._gathered.values():
            param.grad = None  # FSDP's own reset leaves what an unfinished backward put there
        if self._root is not None and self._has_run:
            forget_pass(self._root)

    def _add_up(self, at_once: bool) -> None:
        assert isinstance(self._root, FSDPModule)
        self._root.set_requires_gradient_sync(at_once)

    @contextmanager
    def _adding_up(self) -> Iterator[None]:
        self._add_up(True)
        try:
            yield
        finally:
            self._add_up(False)

    def _buckets(self) -> Iterator[list[nn.Parameter]]:
        """The parts, in lists of one dtype whose gradients cross the network together."""
        bucket: list[nn.Parameter] = []
        filled = 0
        for param in self._trained.values():
            bucket_is_full = filled >= BUCKET_BYTES
            if bucket and (bucket_is_full or bucket[0].dtype != param.dtype):
                yield bucket
                bucket, filled = [], 0
            bucket.append(param)
            filled += _local(param).nbytes
        if bucket:
            yield bucket

    @torch.no_grad()
    def _sum_across(self, params: list[nn.Parameter], group: dist.ProcessGroup) -> None:
        """A rank that failed has no gradients, and sends zeros: nobody waits for it."""
        grads = [
            _local(torch.zeros_like(p) if p.grad is None else p.grad).to(self._device)
            for p in params
        ]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=group)
        for param, part in zip(params, flat.split([g.numel() for g in grads]), strict=True):
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            _local(param.grad).copy_(part.view_as(_local(param)))


@final
class _Notes:
    """Before a forward pass of a module: gets to know the whole parameters that it has just gathered,
    and notes from then on which of them a backward pass has reached."""

    def __init__(
        self, module: nn.Module, names: dict[int, str], gathered: dict[str, Tensor], used: set[str]
    ) -> None:
        self._names = {
            place: names[id(param)]
            for place, param in module.named_parameters()
            if param.requires_grad
        }
        self._gathered = gathered
        self._used = used
        self._known = False

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._known:
            return
        self._known = True
        for place, param in module.named_parameters():
            name = self._names.get(place)
            if name is not None and name not in self._gathered and not isinstance(param, DTensor):
                self._gathered[name] = param
                param.register_post_accumulate_grad_hook(partial(self._note, name))

    def _note(self, name: str, _param: Tensor) -> None:
        self._used.add(name)


@final
class _Runs:
    """Counts the runs of each module with a gradient, and refuses what FSDP cannot add up: a module
    that runs several times in a pass, and again in backward by the script's own reentrant checkpoint.
    FSDP takes the nested backward of such a checkpoint for the end of the whole.

    Raises `InputError` when it is called for such a run.
    """

    def __init__(self, names: dict[int, str]) -> None:
        self._names = names
        self._count: dict[int, int] = {}

    def begin(self, *_: object) -> None:
        """A pass begins, unless the root itself is run again in backward."""
        if torch._C._current_graph_task_id() == -1:
            self._count.clear()

    def __call__(self, module: nn.Module, args: Any) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        # Other checkpoints take what is saved in their second run by such hooks.
        top: Any = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
        others = top(True) is not None
        if not torch.is_grad_enabled() or (in_backward and others):
            return
        count = self._count[id(module)] = self._count.get(id(module), 0) + 1
        if in_backward and count > 1:
            raise InputError(
                f"parallel is 'shard', and {self._names[id(module)]!r} runs several times in one pass,"
                " within torch.utils.checkpoint(..., use_reentrant=True), which gives wrong gradients"
                " there: make use_reentrant False, or parallel 'replicate'."
            )


def _own_memory(_module: nn.Module, _args: Any, output: Any) -> Any:
    """What a module returns, no longer as a view. FSDP gathers weights for backward by a hook on it,
    which gets lost when a view is worked on in place: an in-place ReLU after a linear layer."""
    return tree_map_only(
        Tensor, lambda t: t.clone() if t.requires_grad and t._is_view() else t, output
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _norms(model: nn.Module) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if isinstance(module, NORMS) and any(True for _ in module.parameters(recurse=False))
    ]


def _check_options(
    size: int, parts: int, device: torch.device, precision: Precision, to_host: bool
) -> None:
    if size % parts:
        raise InputError(
            f"{size} ranks cannot be divided into groups of {parts}: shard over a number that divides"
            " theirs, or over all of them."
        )
    if to_host and device.type != "cuda":
        raise InputError(
            f"the parts of a sharded model cannot be moved to host memory from {device.type}, where"
            " they are in it already: leave that out."
        )
    if precision == "fp8":
        raise InputError("a sharded model cannot be trained in fp8 yet: use bf16 or bf16-weights.")

"""Shard: parameters, gradients and optimizer state sharded over the ranks, based on torch's FSDP2.

Each rank keeps a shard of every parameter. The weights of a block are gathered right before the block
runs and freed after it; its gradient is reduced over the ranks as soon as backward has passed the
block, and each rank keeps its own shard. So a rank holds the full weights of only one or two blocks at
a time.

    rank 0   gather 1 | run 1 | gather 2 | run 2 | ...     backward: | run 2 | add up 2 | run 1 | ...
    rank 1   gather 1 | run 1 | gather 2 | run 2 | ...               | run 2 | add up 2 | run 1 | ...

Differences from `Replicate`, and how they are handled here:

- Ranks communicate inside passes, so all must run the same number of passes (`lockstep`). A rank with
  fewer micro-batches repeats one of its own with a backward seed of zero: finite values times zero add
  nothing.
- A rank that fails inside a pass leaves the others waiting in it: see `abortable_group.py`.
- Ranks must reduce the same gradients, although a parameter may be used on some of them only: missing
  gradients are replaced by zeros, and the vote determines which parameters no rank has used.
- Gradients are reduced after every micro-batch. Reducing once per step would save communication, but
  would keep full gradients on every rank, which sharding is meant to avoid. It is available as
  `reduce="last pass"`.

Groups of ranks, for example those of a machine, can each shard one model, and replicate each other:
gradient shards are summed across groups once per step, after the last pass, whatever happened in it.
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
from torch.utils._pytree import tree_map_only

from anybatch.compute import Replica, find_blocks
from anybatch.compute.blocks import match_blocks
from anybatch.compute.buckets import BUCKET_BYTES, check_divisible
from anybatch.compute.dtensor import is_dtensor, local_part
from anybatch.compute.precision import FORMATS, NORMS
from anybatch.errors import InputError, PeerLost
from anybatch.parallel.abortable_group import DEADLINE, AbortableGroup
from anybatch.parallel.buffers import Buffers
from anybatch.parallel.earlier_fsdp import add_zeros_for_unused, forget_pass
from anybatch.parallel.failures import together
from anybatch.parallel.group import Agreed, Wish
from anybatch.parallel.vote import DistributedGroup, calling
from anybatch.parallel.whole import fill, reshard
from anybatch.plans import Precision


@final
class Shard(DistributedGroup):
    """The ranks of torch.distributed's default group, each with a shard of the model.

    Args:
        shares: parts of the global batch by rank.
        device: device of this rank.
        precision: precision of the plan. If it has float32 master weights, the shards are the master
            weights; weights are gathered in half precision, those of norms in float32.
        over: number of ranks that shard one model, for example those of a machine; by default all.
        reduce: when gradients are reduced: after every pass, or after the last one.
        to_host: whether the shards of parameters, gradients and optimizer state are kept in host memory
            (CUDA only).
        deadline: how long a rank waits for another inside a pass.

    Raises `InputError` for fp8.
    """

    lockstep: bool = True

    def __init__(
        self,
        shares: Sequence[float],
        device: torch.device,
        precision: Precision = "fp32",
        *,
        over: int | None = None,
        reduce: Literal["every pass", "last pass"] = "every pass",
        to_host: bool = False,
        deadline: timedelta = DEADLINE,
    ) -> None:
        super().__init__(shares, device)
        self._precision: Precision = precision
        self._parts = over or self.size
        if precision == "fp8":
            raise InputError(
                "a sharded model cannot be trained in fp8 yet: use bf16 or bf16-weights."
            )
        self._to_host = to_host
        # Half-precision gradients are reduced in float32 only if they are reduced after every pass.
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
        self._trained: dict[str, nn.Parameter] = {}  # the shards, by name
        self._gathered: dict[str, Tensor] = {}  # the full parameters that autograd uses
        self._used: set[str] = set()
        self._failed = False
        self._has_run = False  # whether a pass has begun; before that FSDP has no state to reset

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Build the model with `make`, and shard it, with the values of rank 0.

        The ranks of a group build one after the other, so that their machine never holds more than one
        full model. The values of the other ranks are not used: rank 0 builds last, and sends its own.

        Raises the error of `make` on the rank where it fails, and `PeerFailed` on the others.
        """
        built: tuple[nn.Module, dict[str, Tensor]] | None = None

        def build_in(turn: int) -> None:
            nonlocal built
            if self.rank % self._parts == turn:
                model = make()
                built = model, self._divide(model)

        for turn in reversed(range(self._parts)):
            together(self, partial(build_in, turn))
        assert built is not None
        self._send(*built)
        return built[0]

    def prepare(self, model: nn.Module) -> None:
        """See `Group`. `model` already exists on every rank; `build` needs less memory.

        Raises `InputError` if it has parameters that cannot be sharded.
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
        """See `Group`. Frees the weights that the root has gathered; otherwise the model would expose
        full parameters that receive no gradient."""
        reshard(replica.model)

    def leave(self) -> None:
        self._wire.cut()

    def last_pass(self, measured: bool = False) -> AbstractContextManager[None]:
        return self._adding_up() if self._at_last else nullcontext()

    def gather(self, failed: bool) -> None:
        """See `Group`. Within a group, gradients have already been reduced in the passes."""
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
            if not failures:  # the cause is unknown, so it would happen again
                raise PeerLost(broken or "another rank gave up waiting in the middle of a pass.")
            return None
        for param, count in zip(self._trained.values(), counts, strict=True):
            if not count:
                param.grad = None  # zeros, which the optimizer would treat as a gradient
        return agreed

    def settle(self, replica: Replica) -> float:
        """See `Group`. Reshards the model, which would expose full parameters after a pass without
        gradient."""
        if self._has_run:
            reshard(replica.model)
        return 0.0

    def close(self) -> None:
        """See `Group`. The model stays sharded."""
        self._wire.close()

    def _divide(self, model: nn.Module) -> dict[str, Tensor]:
        """Shard `model`. Returns the full parameters on rank 0, and nothing on the other ranks."""
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
            # All norms form one group, which is small enough to stay gathered.
            shard(norms, mp_policy=plain, reshard_after_forward=False)
        for block in self._blocks(model):
            shard(block, mp_policy=policy)
        shard(model, mp_policy=policy)
        self._take_charge(model)
        return whole

    def _blocks(self, model: nn.Module) -> list[nn.Module]:
        """Modules to gather one at a time. A module that shares a parameter with the rest of the model
        is left to the root, since the parameter must be gathered for both."""
        named = match_blocks(model, find_blocks(model))
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
                # Prefetching saves no time here, and would need memory for one more block.
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
        """Fill the shards of all ranks with the values of rank 0."""
        with calling("while the weights were sent"):
            for name, param in model.named_parameters():
                fill(param, whole.pop(name, None))
            for buffer in model.buffers():
                fill(buffer, buffer if self.rank == 0 else None)

    def _start_over(self) -> None:
        """Discard the state of the interrupted pass after a failure on any rank."""
        self._wire.lay()
        for param in self._gathered.values():
            param.grad = None  # FSDP's reset keeps the gradients of an unfinished backward pass
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
        """The shards, in lists of one dtype whose gradients are sent together."""
        bucket: list[nn.Parameter] = []
        filled = 0
        for param in self._trained.values():
            bucket_is_full = filled >= BUCKET_BYTES
            if bucket and (bucket_is_full or bucket[0].dtype != param.dtype):
                yield bucket
                bucket, filled = [], 0
            bucket.append(param)
            filled += local_part(param).nbytes
        if bucket:
            yield bucket

    @torch.no_grad()
    def _sum_across(self, params: list[nn.Parameter], group: dist.ProcessGroup) -> None:
        """Sum the gradients of `params` across groups. A rank that failed has no gradients and sends
        zeros, so no rank waits for it."""
        grads = [
            local_part(torch.zeros_like(p) if p.grad is None else p.grad).to(self._device)
            for p in params
        ]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=group)
        for param, part in zip(params, flat.split([g.numel() for g in grads]), strict=True):
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            local_part(param.grad).copy_(part.view_as(local_part(param)))


@final
class _Notes:
    """Forward pre-hook of a module. Collects the full parameters that the module has just gathered, and
    from then on records which of them a backward pass has reached."""

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
            if name is not None and name not in self._gathered and not is_dtensor(param):
                self._gathered[name] = param
                param.register_post_accumulate_grad_hook(partial(self._note, name))

    def _note(self, name: str, _param: Tensor) -> None:
        self._used.add(name)


@final
class _Runs:
    """Counts the runs of each module with a gradient, and rejects a case that FSDP reduces incorrectly:
    a module that runs several times in a pass, and again in backward in a reentrant checkpoint of the
    script. FSDP treats the nested backward of such a checkpoint as the end of the whole backward pass.

    Raises `InputError` when called for such a run.
    """

    def __init__(self, names: dict[int, str]) -> None:
        self._names = names
        self._count: dict[int, int] = {}

    def begin(self, *_: object) -> None:
        """Begin a pass, unless the root itself is run again in backward."""
        if torch._C._current_graph_task_id() == -1:
            self._count.clear()

    def __call__(self, module: nn.Module, args: Any) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        # Non-reentrant checkpoints collect the tensors saved in their second run with such hooks.
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
    """Forward hook that replaces views in the output by copies. FSDP gathers weights for backward in a
    hook on the output, which is lost when a view is modified in place, as by an in-place ReLU after a
    linear layer."""
    return tree_map_only(
        Tensor, lambda t: t.clone() if t.requires_grad and t._is_view() else t, output
    )


def _norms(model: nn.Module) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if isinstance(module, NORMS) and any(True for _ in module.parameters(recurse=False))
    ]

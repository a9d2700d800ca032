"""Ddp: torch's DistributedDataParallel carries the gradients, for models and hooks that need it.

`Replicate` does the same with less, and keeps every promise; what DDP has beside it are communication
hooks, PowerSGD among them. Two things are done here so that a step stays a transaction.

**The loss is wrapped, not the model.** DDP's module is a shell whose forward pass is the loss function
on a micro-batch. So the model keeps its names, its attributes and its hooks, and a loss may call it
twice. Only the last pass of a step goes through the shell; the others add to the gradients, which is
what `no_sync` is for.

**No parameter is missing.** The reducer waits for every parameter once per backward pass, and a rank
that has none to offer (no samples in this step, a branch not taken, out of memory before or in the
middle of backward) would leave the others waiting. In the last pass every parameter also hangs on the
loss by a node that gives it no gradient:

    loss of the last pass --- model ------------- parameters that were used
                         \\__ `_Nothing` ______ all parameters: reached, and given nothing

so each is reached exactly once, DDP need not walk the graph for unused ones, and a rank that failed
completes what it began by running such nodes alone. Then the ranks vote.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from anybatch.compute import Replica
from anybatch.compute.buckets import check_dense
from anybatch.errors import PeerLost
from anybatch.oom import is_memory_error
from anybatch.parallel.buffers import BuffersOverGroup, Held
from anybatch.parallel.group import Agreed, Group, Wish
from anybatch.parallel.vote import Vote, calling, exchange, same_weights
from anybatch.plans import Exchange
from anybatch.task import Loss, LossFunction

T = TypeVar("T")

_FIRST_COMPRESSED = 2
"""PowerSGD begins in the third step: DDP lays its buckets anew after the first."""


@final
class Ddp(Group):
    """The ranks of torch.distributed's default group, their gradients added up by DDP.

    Args:
        shares: by rank.
        device: of this rank.
        exchange: what crosses the network.
    """

    def __init__(self, shares: Sequence[float], device: torch.device, exchange: Exchange) -> None:
        self.rank: int = dist.get_rank()
        self.shares: Sequence[float] = tuple(shares)
        self.overlaps = True
        self._device = device
        self._exchange = exchange
        self._vote = Vote(device)
        self._buffers: BuffersOverGroup | None = None
        self._replica: Replica | None = None
        self._loss: LossFunction | None = None
        self._ddp: DistributedDataParallel | None = None
        self._power: Any = None
        self._parameters: list[nn.Parameter] = []
        self._handles: list[Any] = []
        self._nodes: list[Any] = []
        self._used: list[bool] = []
        self._reached: list[bool] = []
        self._synchronising = False  # whether the pass that runs is this rank's last
        self._armed = False  # whether DDP waits for gradients
        self._done = False  # whether it got them all
        self._lost: BaseException | None = None

    def prepare(self, model: nn.Module) -> None:
        """See `Group`: those of rank 0."""
        same_weights(model)

    def adopt(self, replica: Replica) -> None:
        """See `Group`. Raises `InputError` if a module makes sparse gradients."""
        check_dense(replica.model)
        self._replica = replica
        self._buffers = BuffersOverGroup(replica.model, self._device)
        self._parameters = [p for p in replica.model.parameters() if p.requires_grad]
        replica.replace_loss(self._in_place_of)
        self._wrap()
        self.begin()

    def begin(self) -> None:
        """See `Group`."""
        self._used = [False] * len(self._parameters)
        self._reached = [False] * len(self._parameters)
        self._synchronising = self._armed = self._done = False

    def staged(self, held: Held) -> None:
        """See `Group`."""
        if self._buffers is not None:
            self._buffers.staged(held)

    @contextlib.contextmanager
    def _last_pass(self) -> Iterator[None]:
        self._synchronising = True
        try:
            yield
            self._done = True
        except RuntimeError as error:
            if self._lost is None:
                raise
            raise self._peer_lost() from error
        finally:
            self._synchronising = False

    def last_pass(self, measured: bool = False) -> AbstractContextManager[None]:
        """See `Group`."""
        return self._last_pass()

    def sum_norm(self, replica: Replica, last: bool) -> Tensor | None:
        """See `Group`: None after the last pass, in which DDP adds up over the ranks, and for PowerSGD,
        which makes something else of the sums."""
        return None if last or self._exchange.compress == "powersgd" else replica.sum_norm()

    def gather(self, failed: bool) -> None:
        """See `Group`: DDP has done it, or is given what it waits for."""
        if self._lost is not None:
            raise self._peer_lost()
        if not self._done:
            self._complete()
        if self._buffers is not None:
            with calling("while buffers were gathered"):
                self._buffers.gather()

    def _complete(self) -> None:
        """Give DDP what it waits for on this rank."""
        assert self._ddp is not None
        try:
            with calling("while gradients were added up"):
                if not self._armed:
                    self._reached = [False] * len(self._parameters)
                    self._ddp(None).backward()
                    self._done = True
                elif missing := [
                    p
                    for p, reached in zip(self._parameters, self._reached, strict=True)
                    if not reached
                ]:
                    _nothing(torch.zeros((), device=self._device), missing).backward()
                    self._done = True
                # Else all was given before the pass failed, and DDP was not told that it is over.
        except PeerLost:
            if self._lost is None:
                raise
            raise self._peer_lost() from self._lost

    def agree(
        self, totals: Tensor | None, note: float = 0.0, wish: Wish = Wish.NOTHING
    ) -> Agreed | None:
        """See `Group`."""
        in_step, self._synchronising = self._armed, False
        unused = in_step and not all(self._used)
        stuck = in_step and not self._done
        flags = (unused, stuck)
        agreed, (num_unused, num_stuck) = self._vote.hold(totals, note, flags, wish=wish)
        self._armed = False
        if agreed is None:
            if in_step:
                self._start_anew(wrap=num_stuck > 0)
            return None
        if num_unused:
            for param, used in zip(self._parameters, self._vote.any_of(self._used), strict=True):
                if not used:  # a plain loop leaves it without a gradient too
                    param.grad = None
        return agreed

    def committed(self, replica: Replica) -> None:
        """See `Group`: the buffers."""
        if self._buffers is not None:
            with calling("while buffers were put together"):
                self._buffers.settle()

    def exchange(self, value: T) -> list[T]:
        """See `Group`."""
        return exchange(value)

    def close(self) -> None:
        """DDP's hooks are gone."""
        self._unwrap()
        self._replica = None

    # ------------------------------------------------------------------------------------- the shell

    def _in_place_of(self, loss: LossFunction) -> LossFunction:
        self._loss = loss
        return self._run

    def _run(self, model: nn.Module, batch: Any) -> Any:
        """In place of the loss function."""
        assert self._loss is not None
        if self._synchronising:
            assert self._ddp is not None
            return self._ddp(batch)
        return self._loss(model, batch)

    def _forward(self, batch: Any) -> Any:
        """The forward pass of the shell. DDP waits for gradients from its end on."""
        returned: Any = None
        if self._synchronising:
            assert self._loss is not None
            assert self._replica is not None
            returned = self._loss(self._replica.model, batch)
        result = _with_nothing(returned, self._parameters, self._device)
        self._armed = True
        return result

    def _wrap(self) -> None:
        assert self._replica is not None
        with calling("while DistributedDataParallel was set up"):
            self._ddp = DistributedDataParallel(
                _Shell(self._parameters, self._forward),
                init_sync=False,
                gradient_as_bucket_view=True,
            )
        self._start_anew(wrap=False)
        self._ddp.register_comm_hook(None, self._hook())
        for i, param in enumerate(self._parameters):
            # After DDP's own hook on the same node: it has seen the parameter when this is called.
            node = torch.autograd.graph.get_gradient_edge(param).node
            self._nodes.append(node)
            self._handles.append(node.register_hook(self._mark(i)))

    def _unwrap(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()
        if self._ddp is not None:
            # Its hooks live as long as the reducer, and a traceback may hold the shell.
            del self._ddp.reducer, self._ddp.logger
        self._ddp = None

    def _start_anew(self, wrap: bool) -> None:
        """After a failure, on all ranks alike: PowerSGD forgets what it carries over from step to step,
        which came from gradients that were dropped. `wrap`: DDP is waiting on some rank."""
        if wrap:
            self._unwrap()
            self._wrap()
        elif self._exchange.compress == "powersgd":
            self._power = powerSGD_hook.PowerSGDState(
                None,
                matrix_approximation_rank=self._exchange.powersgd_rank,
                start_powerSGD_iter=_FIRST_COMPRESSED,
            )

    def _mark(self, i: int) -> Callable[..., None]:
        def mark(_: Any, gradients: Sequence[Tensor | None]) -> None:
            self._reached[i] = True
            if gradients[0] is not None:
                self._used[i] = True

        return mark

    # ---------------------------------------------------------------------------------------- the hook

    def _hook(self) -> Callable[..., Any]:
        """How a bucket crosses: torch's hooks make means over the ranks, and sums are wanted."""
        compress = self._exchange.compress

        def hook(_: Any, bucket: Any) -> Any:
            if compress is None:
                work = dist.all_reduce(bucket.buffer(), async_op=True)
                future, factor = cast(Any, work).get_future(), 1
            elif compress == "powersgd":
                future, factor = powerSGD_hook.powerSGD_hook(self._power, bucket), self.size
            elif compress == "bf16":
                future, factor = (
                    default_hooks.bf16_compress_hook(cast(Any, None), bucket),
                    self.size,
                )
            else:
                future, factor = (
                    default_hooks.fp16_compress_hook(cast(Any, None), bucket),
                    self.size,
                )
            future = future.then(lambda done: self._read(done, factor))
            if compress == "powersgd" and self._device.type == "cpu":
                # Its second exchange starts when the first is over, which on gloo is at another time
                # on every rank: with several buckets under way they would be mistaken for each other.
                future.wait()
            return future

        # DDP compares annotations with classes; those of a module like this one are strings.
        hook.__annotations__.clear()
        return hook

    def _read(self, done: Any, factor: int) -> Tensor:
        try:
            value = done.value()
        except RuntimeError as error:
            if not is_memory_error(error):
                self._lost = error
            raise
        tensor = value[0] if isinstance(value, list) else value
        return tensor if factor == 1 else tensor.mul_(factor)

    def _peer_lost(self) -> PeerLost:
        reason = str(self._lost).splitlines()[0]
        return PeerLost(
            "a rank did not answer while gradients were added up: it has ended or hangs; its own output"
            " says why.",
            reason,
        )


class _Shell(nn.Module):
    """What DDP wraps: parameters, and a forward pass that is somebody else's. It has no buffers, so DDP
    sends none around."""

    def __init__(self, parameters: Sequence[nn.Parameter], forward: Callable[[Any], Any]) -> None:
        super().__init__()
        self.trained = nn.ParameterList(parameters)
        self._forward = forward

    def forward(self, batch: Any) -> Any:
        return self._forward(batch)


class _Nothing(torch.autograd.Function):
    """Zero, which depends on all its arguments and gives none of them a gradient."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return torch.zeros_like(like)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None,) * (1 + ctx.count)


def _nothing(like: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    return cast(Tensor, _Nothing.apply(like.detach(), *parameters))


def _with_nothing(returned: Any, parameters: Sequence[Tensor], device: torch.device) -> Any:
    """What the loss function returned, with every parameter hanging on it. What is no loss is left for
    others to complain about."""
    if returned is None:
        return _nothing(torch.zeros((), device=device), parameters)
    if isinstance(returned, Tensor):
        return returned + _nothing(returned, parameters) if _is_loss(returned) else returned
    if isinstance(returned, Loss):
        if not _is_loss(returned.sum):
            return returned
        return dataclasses.replace(returned, sum=returned.sum + _nothing(returned.sum, parameters))
    if isinstance(returned, tuple) and returned and _is_loss(returned[0]):
        return (returned[0] + _nothing(returned[0], parameters), *returned[1:])
    return returned


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad

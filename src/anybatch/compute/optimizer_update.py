"""Updates: runs the optimizer's step so that it needs little temporary memory.

    for-loop    temporaries as large as the largest parameter     torch's default on CPU
    foreach     temporaries as large as all parameters            torch's default on CUDA
    in parts    foreach, on a limited number of bytes of parameters at a time
    fused       no temporaries: one kernel reads and writes everything

States in host memory are copied to the device for one part of the parameters at a time, and back after
its update. Parts require an optimizer that treats every parameter independently; the result is then
identical to the bit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks

from anybatch.compute.dtensor import is_dtensor
from anybatch.compute.low_bit_optimizers import state_kinds, unhooked_step
from anybatch.errors import InputError
from anybatch.plans import StatesOn, Update

PART_BYTES = 64 << 20
"""Size of the parameters in one part: enough to keep a device busy, but small compared to a model."""

_BY_PARAMETER: tuple[type[Optimizer], ...] = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adamax, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD),
)
"""Optimizers that treat every parameter independently. Subclasses are excluded: they may not."""

_FUSED: dict[type[Optimizer], tuple[str, ...]] = {
    torch.optim.Adam: ("cpu", "cuda"),
    torch.optim.AdamW: ("cpu", "cuda"),
    torch.optim.SGD: ("cpu", "cuda"),
    torch.optim.Adagrad: ("cpu",),
}
"""Optimizers that have a fused kernel, and the device types that it supports."""


_FUSED_WRONG_IN_HALF = (torch.optim.SGD,)
"""Fused optimizers whose CPU kernel leaves half-precision parameters unchanged, except for the last few
values of each (torch 2.11 to 2.13)."""

_FUSED_DIVIDED = torch.optim.Adam, torch.optim.AdamW
"""Fused optimizers whose kernel torch runs on parameters that are sharded over ranks."""


def fuses_divided(optimizer: Optimizer) -> bool:
    """Whether the fused kernel of `optimizer` accepts parameters that are sharded over ranks."""
    return type(optimizer) in _FUSED_DIVIDED


def can_part(optimizer: Optimizer) -> bool:
    """Whether the parameters of `optimizer` may be updated in parts."""
    return type(optimizer) in _BY_PARAMETER


def leanest_update(optimizer: Optimizer, model: nn.Module, kind: str) -> Update:
    """The mathematically equivalent update that needs the least memory on a device of type `kind` if
    the task leaves the choice open, else `"as given"`."""
    groups = optimizer.param_groups
    if not can_part(optimizer) or any(_divided(group["params"]) for group in groups):
        return "as given"
    is_open = all(group["foreach"] is None and not group.get("fused") for group in groups)
    is_open = is_open and not any(_trains_nothing(optimizer, group, kind) for group in groups)
    if is_open and all(_can_fuse(optimizer, group, kind) for group in groups) and _is_dense(model):
        return "fused"
    size = sum(param.nbytes for group in groups for param in group["params"])
    return "in parts" if kind == "cuda" and size > PART_BYTES else "as given"


@final
class Updater:
    """Runs the step of `optimizer` in the way selected by `take`, until `close`. It is passed to
    `GradScaler` in place of the optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before: list[dict[str, Any]] = []  # original options of the groups
        self._update: Update = "as given"
        self.states_on: StatesOn = "device"
        self._homes: dict[tuple[Tensor, str], Tensor] = {}  # in host memory

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def take(self, update: Update, states_on: StatesOn = "device") -> None:
        """Select how updates are run from now on.

        Raises `InputError` if the optimizer does not support it.
        """
        name = type(self._optimizer).__name__
        moves = states_on == "host" and not self._is_divided
        if (update == "in parts" or moves) and not can_part(self._optimizer):
            asked = "optimizer_states is 'host'" if moves else "update is 'in parts'"
            raise InputError(
                f"{asked}, and the optimizer {name} may look at all parameters at once: leave that out"
                " of the plan, or take an optimizer of torch.optim, such as AdamW."
            )
        self._restore_options()
        if update == "fused":
            self._fuse()
        self._check_trains()
        self._update = update
        self.keep_states(states_on)

    def keep_states(self, where: StatesOn) -> None:
        """Move the states to `where`. The states of a sharded model stay with its shards. Allocation
        errors are propagated, and the states then stay where they were."""
        if where != self.states_on and not self._is_divided:
            parameters = [p for group in self.param_groups for p in group["params"]]
            if where == "host":
                self._send(parameters)
                _await_host(parameters)
            else:
                self._fetch(parameters)
            self.states_on = where

    @property
    def _is_divided(self) -> bool:
        return any(_divided(group["params"]) for group in self.param_groups)

    def reserve(self) -> None:
        """Allocate host memory for states that will be stored there, while a failure is harmless.
        Allocation errors are propagated."""
        if self.states_on != "host":
            return
        for group in self.param_groups:
            kinds = state_kinds(self._optimizer, group)
            for param in group["params"]:
                for key in kinds if param.requires_grad else ():
                    if (param, key) not in self._homes:
                        self._homes[param, key] = _on_host(param)

    @torch.no_grad()
    def step(self) -> None:
        """Run the update. Hooks on the optimizer's step run once, regardless of the number of parts."""
        try:
            self._run_step()
        except Exception as error:
            name = type(self._optimizer).__name__
            error.add_note(f"raised in the update: step() of {name} is called without a closure")
            raise

    def _run_step(self) -> None:
        if self._update != "in parts" and self.states_on == "device":
            self._optimizer.step()
            return
        after: OrderedDict[int, Any] = self._optimizer._optimizer_step_post_hooks  # pyright: ignore[reportAssignmentType]
        seen: dict[Tensor, Tensor | None] = {}  # gradients for post-step hooks
        is_seen = bool(after) or bool(_global_optimizer_post_hooks)

        def in_parts(_optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            gradients = {p: p.grad for group in self.param_groups for p in group["params"]}
            if is_seen:
                seen.update(gradients)
            self._step_in_parts(gradients, partial(unhooked_step, *args, **kwargs))

        def give_back(*_: Any) -> None:
            for param, gradient in seen.items():
                param.grad = gradient

        # `in_parts` is the last pre-step hook, so the step itself finds no gradients. `give_back` is
        # the first post-step hook.
        handles = [
            self._optimizer.register_step_pre_hook(in_parts),
            self._optimizer.register_step_post_hook(give_back),
        ]
        after.move_to_end(handles[1].id, last=False)
        try:
            self._optimizer.step()
        finally:
            for handle in handles:
                handle.remove()

    def _step_in_parts(
        self, gradients: dict[Tensor, Tensor | None], step: Callable[[], object]
    ) -> None:
        """Run `step` on one part of the `gradients` at a time, and release them."""
        parameters = list(gradients)
        for param in parameters:
            param.grad = None
        whole = [(group, group["params"]) for group in self.param_groups]
        group_of = {param: group for group, params in whole for param in params}
        try:
            for part in _parts(parameters):
                # A step visits all parameters of a group, which adds up over many parts.
                for group, _ in whole:
                    group["params"] = []
                for param in part:
                    param.grad = gradients.pop(param)
                    group_of[param]["params"].append(param)
                if self.states_on == "host":
                    self._fetch(part)
                step()
                if self.states_on == "host":
                    self._send(part)
                for param in part:
                    param.grad = None
        finally:
            for group, params in whole:
                group["params"] = params
        if self.states_on == "host":
            _await_host(parameters)

    def close(self) -> None:
        """Restore the options of the optimizer. States in host memory stay there, since the device may
        not have room for them."""
        self._restore_options()
        self._homes.clear()

    def _fetch(self, parameters: Sequence[Tensor]) -> None:
        moving = list(self._moving(parameters))
        # Allocate memory for all of them first: if that fails, nothing has moved.
        rooms = [torch.empty_like(value, device=param.device) for param, _, value in moving]
        for (param, key, value), room in zip(moving, rooms, strict=True):
            self._homes[param, key] = value
            self._optimizer.state[param][key] = room.copy_(value, non_blocking=True)

    def _send(self, parameters: Sequence[Tensor]) -> None:
        moving = list(self._moving(parameters))
        homes = [self._homes.get((param, key)) for param, key, _ in moving]
        rooms = [
            _on_host(value) if home is None else home
            for (_, _, value), home in zip(moving, homes, strict=True)
        ]
        for (param, key, value), room in zip(moving, rooms, strict=True):
            self._optimizer.state[param][key] = room.copy_(value, non_blocking=True)

    def _moving(self, parameters: Sequence[Tensor]) -> Iterator[tuple[Tensor, str, Tensor]]:
        for param in parameters:
            for key, value in list(self._optimizer.state.get(param, {}).items()):
                if isinstance(value, Tensor) and value.shape == param.shape and key != "step":
                    yield param, key, value

    def _fuse(self) -> None:
        kind = next(p.device.type for group in self.param_groups for p in group["params"])
        if not all(_can_fuse(self._optimizer, group, kind) for group in self.param_groups):
            raise InputError(
                "update is 'fused', and torch has no such kernel for the optimizer"
                f" {type(self._optimizer).__name__} with its options on this device: make it 'as"
                " given', or plan anew if the optimizer is another one than that of the plan (a run"
                " that is resumed has the plan of its beginning)."
            )
        self._before = [dict(group) for group in self.param_groups]
        for group in self.param_groups:
            group["fused"], group["foreach"] = True, False
        self._place_steps()

    def _check_trains(self) -> None:
        """Raises `InputError` for a fused kernel, selected by the plan or the user, that would not
        update the parameters."""
        for group in self.param_groups:
            kind = group["params"][0].device.type if group["params"] else ""
            is_real = not any(isinstance(param, FakeTensor) for param in group["params"])
            if group.get("fused") and is_real and _trains_nothing(self._optimizer, group, kind):
                raise InputError(
                    f"the optimizer {type(self._optimizer).__name__} is to be fused for half-precision"
                    " parameters on a CPU, where torch's kernel leaves most of their values as they"
                    " are: leave fused out (in a plan, make update 'as given')."
                )

    def _restore_options(self) -> None:
        for group, before in zip(self.param_groups, self._before, strict=False):
            group.update({name: before[name] for name in ("fused", "foreach")})
        if self._before:
            self._before = []
            self._place_steps()

    def _place_steps(self) -> None:
        """Move step counts to the device for fused or capturable kernels, to the host for others."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self._optimizer.state.get(param, {})
                if isinstance(state.get("step"), Tensor):
                    on_device = group["fused"] or group.get("capturable")
                    state["step"] = state["step"].to(param.device if on_device else "cpu")


def _can_fuse(optimizer: Optimizer, group: dict[str, Any], kind: str) -> bool:
    return (
        kind in _FUSED.get(type(optimizer), ())
        and (fuses_divided(optimizer) or not _divided(group["params"]))
        # With momentum, torch's kernel does not support parameters that get their first gradient later
        # than others.
        and not group.get("momentum")
        and not isinstance(group["lr"], Tensor)
        and not group["differentiable"]
        and all(param.is_floating_point() for param in group["params"])
    )


def _trains_nothing(optimizer: Optimizer, group: dict[str, Any], kind: str) -> bool:
    is_half = any(param.dtype.itemsize == 2 for param in group["params"])
    return kind == "cpu" and is_half and isinstance(optimizer, _FUSED_WRONG_IN_HALF)


def _divided(parameters: Sequence[Tensor]) -> bool:
    return any(is_dtensor(param) for param in parameters)


def _is_dense(model: nn.Module) -> bool:
    """Whether no module produces sparse gradients, which fused kernels do not support."""
    return not any(getattr(module, "sparse", False) is True for module in model.modules())


def _parts(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Split `parameters`, in order, into parts of at most `PART_BYTES` or of a single parameter."""
    part: list[Tensor] = []
    size = 0
    for param in parameters:
        if part and size + param.nbytes > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(param)
        size += param.nbytes
    if part:
        yield part


def _await_host(parameters: Sequence[Tensor]) -> None:
    """Wait until pending copies from the devices of `parameters` are complete, so that the states can
    be read on the host."""
    for device in {param.device for param in parameters}:
        if device.type == "cuda":  # not necessarily the current device
            torch.cuda.current_stream(device).synchronize()


def _on_host(tensor: Tensor) -> Tensor:
    """Allocate host memory for `tensor`, pinned for CUDA tensors so that copies are asynchronous."""
    return torch.empty_like(
        tensor, device="cpu", pin_memory=tensor.device.type == "cuda", requires_grad=False
    )

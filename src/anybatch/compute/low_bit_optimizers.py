"""Support for optimizers with states in 8 or 4 bits, as implemented by torchao.

These optimizers differ from others in two ways. First, a state is a tensor subclass that holds several
tensors: codes, a scale for each block, a table. Code that counts or saves bytes has to take it apart.
Second, the update is compiled for each shape of parameter when it first meets the shape. This takes
seconds and may fail (for example, without a compiler), within an update, where nothing may fail. So the
update is rehearsed before the first step, on temporary parameters of the same shapes.

    real run     rehearse: one update of zeros per shape, compiled    then steps
    fake run     one operation at a time; the compiled update does not store the intermediate results
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from anybatch.compute import multi_optimizer
from anybatch.compute.dtensor import is_dtensor
from anybatch.errors import InputError
from anybatch.process.log_filter import silenced

_MANY_BLOCKS = 4096
"""torchao does not quantize states with fewer values than this."""


def is_compiled(optimizer: Optimizer) -> bool:
    """Whether the update is compiled for each shape, and each state consists of several tensors."""
    kinds = (made for part in multi_optimizer.parts_of(optimizer) for made in type(part).__mro__)
    return any(made.__module__.startswith("torchao.optim") for made in kinds)


def parts_of(value: Tensor) -> dict[str, Tensor]:
    """The plain tensors that `value` consists of, by name. A plain tensor is returned under an empty
    name. A DTensor counts as plain."""
    if is_dtensor(value) or not is_traceable_wrapper_subclass(value):
        return {"": value}
    names, _ = value.__tensor_flatten__()
    return {
        f"{name}.{inner}" if inner else name: tensor
        for name in names
        for inner, tensor in parts_of(getattr(value, name)).items()
    }


def check_whole(optimizer: Optimizer) -> None:
    """Raises `InputError` if the states of `optimizer` cannot be sharded over ranks."""
    if is_compiled(optimizer):
        raise InputError(
            f"the optimizer is {type(optimizer).__name__}, whose states share a scale among the values"
            " of a block, and parallel is 'shard', where blocks would end in other places on another"
            " number of ranks: make parallel 'replicate', or take an optimizer of torch.optim."
        )


def rehearse(optimizer: Optimizer) -> None:
    """Compile the update for every parameter, if the optimizer compiles its update. Parameters and
    states are unchanged. The memory needed is that of an update of the largest parameter.

    Raises `InputError` if the update cannot be compiled on this machine.
    """
    if not is_compiled(optimizer):
        return
    done: set[Any] = set()
    for group in optimizer.param_groups:
        options = repr({name: value for name, value in group.items() if name != "params"})
        for param in group["params"]:
            kind = param.shape, param.stride(), param.dtype, param.device, options
            if param.requires_grad and kind not in done:
                done.add(kind)
                fresh_state(optimizer, param)
    gc.collect()  # the compiler leaves its graphs in reference cycles


def fresh_state(optimizer: Optimizer, param: nn.Parameter) -> dict[str, Any]:
    """Return the state that `optimizer` keeps for a parameter like `param` after one update of zeros.

    Raises `InputError` if the update cannot be compiled on this machine.
    """
    group = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
    optimizer = multi_optimizer.part_with(optimizer, group)
    twin = nn.Parameter(torch.zeros_like(param))
    twin.grad = torch.zeros_like(param)
    other = _like(optimizer, {**group, "params": [twin]})
    try:
        with _compiled_here():
            unhooked_step(other)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"the optimizer is {type(optimizer).__name__}, whose update is compiled, and that failed"
            f" ({type(error).__name__}: {reason}): install a C++ compiler (g++, say), or take an"
            " optimizer of torch.optim."
        ) from error
    return other.state[twin]


def unhooked_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    """Run the step of `optimizer` without hooks, including those registered for all optimizers."""
    step: Any = type(optimizer).step
    plain = step.__wrapped__ if getattr(step, "hooked", False) else step
    plain(optimizer, *args, **kwargs)


def state_kinds(optimizer: Optimizer, group: Mapping[str, Any]) -> list[str]:
    """Names of the states that `optimizer` keeps for a parameter of `group` and that have the shape of
    the parameter. They are determined from existing states, or from an update of a small parameter."""
    for param in group["params"]:
        state = optimizer.state.get(param)  # some optimizers create their states in the constructor
        if state and param.dim():  # a scalar parameter has the shape of a step count
            return _kinds(state, param)
    # On the device of the group: options such as `capturable` are rejected on others.
    twin = nn.Parameter(torch.zeros(2, 2, device=group["params"][0].device))
    twin.grad = torch.zeros_like(twin)
    other = _like(multi_optimizer.part_with(optimizer, group), {**group, "params": [twin]})
    unhooked_step(other)
    return _kinds(other.state[twin], twin)


def _kinds(state: Mapping[str, Any], param: Tensor) -> list[str]:
    return [
        name
        for name, value in state.items()
        if isinstance(value, Tensor) and value.shape == param.shape
    ]


@contextmanager
def uncompiled(optimizer: Optimizer) -> Iterator[None]:
    """Context manager that disables compilation, which is not possible for fake tensors."""
    if not is_compiled(optimizer):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        with _disable_current_modes():
            for part in filter(is_compiled, multi_optimizer.parts_of(optimizer)):
                _fill_tables(part)
        yield


def _fill_tables(optimizer: Optimizer) -> None:
    """Compute on real tensors what the optimizer's module computes once and caches: on fake tensors it
    would cache invalid values, which the real run would use too."""
    size = getattr(optimizer, "block_size", 1)
    twin = nn.Parameter(torch.zeros(_MANY_BLOCKS * (size if isinstance(size, int) else 1)))
    twin.grad = torch.zeros_like(twin)
    options = optimizer.param_groups[0]
    real = {name: torch.tensor(1e-3) for name, v in options.items() if isinstance(v, Tensor)}
    unhooked_step(_like(optimizer, {**options, **real, "params": [twin]}))


def _like(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """An optimizer like `optimizer` for one group, without state and hooks. It is created without
    calling the constructor, whose arguments are unknown."""
    other: Optimizer = object.__new__(type(optimizer))
    others: Mapping[str, Any] = {
        "param_groups": [group],
        "state": defaultdict(dict),
        "_optimizer_step_pre_hooks": OrderedDict(),
        "_optimizer_step_post_hooks": OrderedDict(),
    }
    other.__dict__.update({**vars(optimizer), **others})
    return other


@contextmanager
def _compiled_here() -> Iterator[None]:
    """Context manager that compiles in this process: worker processes would outlive the compilation."""
    from torch._inductor import config

    # The warnings of torch's compiler are not actionable, such as that of a missing GPU compiler.
    with (
        config.patch(compile_threads=1),
        silenced(["torch.utils.cpp_extension"], logging.WARNING),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield

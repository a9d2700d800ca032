"""Optimizers with states in 8 or 4 bits: what is particular about torchao's.

Two things about them. A state is one tensor to whoever looks, and several inside: codes, a scale for
each block, a table. What counts and saves bytes has to take it apart. And the update is compiled, anew
for each shape of parameter, when it first meets it: seconds each, in which anything may fail (no
compiler, say), in the one place where nothing may. So it is rehearsed before the first step, on
parameters of the same shapes that nobody needs.

    real run     rehearse: one update of zeros per shape, compiled    then steps
    fake run     operation by operation; what passes between them the compiled update never stores
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
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from anybatch.compute import multi_optimizer
from anybatch.errors import InputError
from anybatch.process.log_filter import silenced

_MANY_BLOCKS = 4096
"""torchao leaves states of fewer values than this as they are."""


def is_compiled(optimizer: Optimizer) -> bool:
    """Whether its update is compiled for each shape, and its states are several tensors in one."""
    kinds = (made for part in multi_optimizer.parts_of(optimizer) for made in type(part).__mro__)
    return any(made.__module__.startswith("torchao.optim") for made in kinds)


def parts_of(value: Tensor) -> dict[str, Tensor]:
    """The plain tensors that `value` consists of, by name; of a plain one itself, under no name. What
    is divided over ranks counts as plain."""
    if isinstance(value, DTensor) or not is_traceable_wrapper_subclass(value):
        return {"": value}
    names, _ = value.__tensor_flatten__()
    return {
        f"{name}.{inner}" if inner else name: tensor
        for name in names
        for inner, tensor in parts_of(getattr(value, name)).items()
    }


def check_whole(optimizer: Optimizer) -> None:
    """Raises `InputError` if its states cannot be divided over ranks."""
    if is_compiled(optimizer):
        raise InputError(
            f"the optimizer is {type(optimizer).__name__}, whose states share a scale among the values"
            " of a block, and parallel is 'shard', where blocks would end in other places on another"
            " number of ranks: make parallel 'replicate', or take an optimizer of torch.optim."
        )


def rehearse(optimizer: Optimizer) -> None:
    """Compile the update for every parameter, if it is one that is compiled. Parameters and states
    stay as they are; of memory it takes an update of the largest one.

    Raises `InputError` if it cannot be compiled here.
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
    gc.collect()  # a compiler leaves its graphs behind, in circles


def fresh_state(optimizer: Optimizer, param: nn.Parameter) -> dict[str, Any]:
    """What `optimizer` remembers of a parameter like `param` after one update of zeros.

    Raises `InputError` if the update cannot be compiled here.
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
    """The step of `optimizer` without hooks, those for all optimizers left out too."""
    step: Any = type(optimizer).step
    plain = step.__wrapped__ if getattr(step, "hooked", False) else step
    plain(optimizer, *args, **kwargs)


def state_kinds(optimizer: Optimizer, group: Mapping[str, Any]) -> list[str]:
    """Names of the states that `optimizer` keeps of a parameter of `group`, in its shape, as far as
    those that are there show, or an update of a small one."""
    for param in group["params"]:
        state = optimizer.state.get(param)  # some optimizers make theirs when they are made
        if state and param.dim():  # a count of steps has no dims either
            return _kinds(state, param)
    # Where its like are: options such as `capturable` are refused elsewhere.
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
    """Around an update on fake tensors, which cannot be compiled."""
    if not is_compiled(optimizer):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        with _disable_current_modes():
            for part in filter(is_compiled, multi_optimizer.parts_of(optimizer)):
                _fill_tables(part)
        yield


def _fill_tables(optimizer: Optimizer) -> None:
    """Compute on real tensors what the optimizer's module computes once and keeps: on fake ones it
    would keep nonsense, for the real run too."""
    size = getattr(optimizer, "block_size", 1)
    twin = nn.Parameter(torch.zeros(_MANY_BLOCKS * (size if isinstance(size, int) else 1)))
    twin.grad = torch.zeros_like(twin)
    options = optimizer.param_groups[0]
    real = {name: torch.tensor(1e-3) for name, v in options.items() if isinstance(v, Tensor)}
    unhooked_step(_like(optimizer, {**options, **real, "params": [twin]}))


def _like(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """An optimizer like `optimizer` for one group, without state and hooks. It is not made by its
    class, whose arguments nobody knows."""
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
    """Compile in this process, where processes to do it in would outlive the compilation."""
    from torch._inductor import config

    # What torch's compiler warns of, nobody could mend, as of a compiler for GPUs where there is none.
    with (
        config.patch(compile_threads=1),
        silenced(["torch.utils.cpp_extension"], logging.WARNING),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield

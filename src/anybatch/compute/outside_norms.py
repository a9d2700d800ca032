"""BatchNorm that a loss runs beside the model, such as the discriminator's in a generator's step.

Ghost batches are cut in the model, and its buffers are put back when a step is redone. Neither is done
for a module that the loss has from elsewhere, so it is told of, once a step is cut.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm

from anybatch.compute.ghost_norm import looks_across_samples
from anybatch.compute.loss_reduction_check import warn_of
from anybatch.task import JointLoss, LossFunction

_DEPTH = 4  # from a loss to a module: by the functions it calls, the objects and collections it has
_MANY = 1000  # entries of a collection, which then holds data


class NormsOutside:
    """Watches passes for BatchNorm in training mode that `function` has and `model` has not, and warns
    of it in the second pass of a step. Passes that are traced without numbers say nothing.

    Only norms that can be reached from the function are watched, each by a hook of its own: one for all
    modules would let whatever is compiled be compiled anew.
    """

    def __init__(self, model: nn.Module, function: LossFunction) -> None:
        self._model = model
        self._function = function
        self._watched: dict[_BatchNorm, str] | None = None
        self._found: list[_BatchNorm] = []
        self._passes = 0

    def begin_step(self) -> None:
        """The next pass is the first one of its step."""
        self._passes = 0

    def are_there(self) -> bool:
        """Whether the loss may run such a norm, so that passes over other samples differ."""
        return any(looks_across_samples(norm, norm.training) for norm in self._norms())

    def _norms(self) -> dict[_BatchNorm, str]:
        if self._watched is None:
            self._watched = _norms_of(self._function, self._model)
        return self._watched

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around the forward of a pass."""
        if not self._norms():
            yield
            return
        self._passes += 1
        if self._found:
            if self._passes > 1:
                self._warn(self._found[0], self._norms()[self._found[0]])
                self._found, self._watched = [], {}
            yield
            return
        with ExitStack() as hooks:
            for norm in self._norms():
                hooks.enter_context(norm.register_forward_pre_hook(self._look))
            yield

    def _look(self, norm: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(norm, _BatchNorm)
        is_traced = any(isinstance(arg, FakeTensor) for arg in args)
        if looks_across_samples(norm, norm.training) and not is_traced:
            self._found.append(norm)

    def _warn(self, norm: _BatchNorm, name: str) -> None:
        warn_of(
            self._function,
            f"runs {name!r} ({type(norm).__name__}), which is in training mode and no part of the"
            " model: it normalises over each micro-batch, so the result depends on how the step is cut,"
            " and its running statistics are not put back when a step is done again. Make it a part of"
            " the model, put it into evaluation mode, or give a micro_batch as large as the batch.",
        )


def _norms_of(function: Any, model: nn.Module) -> dict[_BatchNorm, str]:
    """BatchNorm that can be reached from `function` and is not in `model`, with names to tell it by."""
    own = set(model.modules())
    found: dict[_BatchNorm, str] = {}
    for name, module in _modules_of(function, "", _DEPTH, set()):
        for inner, norm in module.named_modules(prefix=name):
            if isinstance(norm, _BatchNorm) and norm not in own:
                found.setdefault(norm, inner)
    return found


def _modules_of(
    value: Any, name: str, depth: int, seen: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    """The modules that `value` is or has, with the name of each."""
    if id(value) in seen or depth < 0:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield name, value
        return
    for key, part in _parts_of(value).items():
        yield from _modules_of(part, key, depth - 1, seen)


def _parts_of(value: Any) -> Mapping[str, Any]:
    """What a function names, what an object has, and what a collection holds."""
    if isinstance(value, types.FunctionType):
        if str(value.__module__).partition(".")[0] == "torch":  # it may be None
            return {}
        try:
            named = inspect.getclosurevars(value)
        except ValueError:  # a variable that has no value yet
            return {}
        return {**named.globals, **named.nonlocals}
    if isinstance(value, types.MethodType):
        return {"self": value.__self__, "function": value.__func__}
    if isinstance(value, functools.partial):
        return {"function": value.func, "arguments": [*value.args, *value.keywords.values()]}
    if isinstance(value, JointLoss):
        return {"encode": value.encode, "compare": value.compare}
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {str(key): part for key, part in pairs} if len(value) <= _MANY else {}
    is_plain = isinstance(value, type | types.ModuleType) or not hasattr(value, "__dict__")
    return {} if is_plain else vars(value)

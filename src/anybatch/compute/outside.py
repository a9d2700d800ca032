"""BatchNorm that a loss runs beside the model, such as the discriminator's in a generator's step.

Ghost batches are cut in the model, and its buffers are put back when a step is redone. Neither is done
for a module that the loss has from elsewhere, so it is told of, once a step is cut.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from anybatch.compute.averages import warn_of
from anybatch.compute.ghost import looks_across_samples
from anybatch.task import LossFunction


class NormsOutside:
    """Watches the first pass for BatchNorm in training mode that is not in `model`, and warns of it in
    the second pass of a step. Passes that are traced without numbers say nothing."""

    def __init__(self, model: nn.Module, function: LossFunction) -> None:
        self._model = model
        self._function = function
        self._found: dict[_BatchNorm, None] | None = None
        self._passes = 0

    def begin_step(self) -> None:
        """The next pass is the first one of its step."""
        self._passes = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around the forward of a pass."""
        self._passes += 1
        if self._found is not None:
            if self._found and self._passes > 1:
                self._warn(next(iter(self._found)))
                self._found = {}
            yield
            return
        own, thread = set(self._model.modules()), threading.get_ident()
        found: dict[_BatchNorm, None] = {}
        traced = False

        def look(module: nn.Module, args: tuple[Any, ...]) -> None:
            nonlocal traced
            traced = traced or any(isinstance(arg, FakeTensor) for arg in args)
            if isinstance(module, _BatchNorm) and module not in own:
                # The hook is one for all threads, which may be ranks with models of their own.
                is_mine = threading.get_ident() == thread
                if is_mine and looks_across_samples(module, module.training):
                    found[module] = None

        with register_module_forward_pre_hook(look):
            yield
        if not traced:
            self._found = found

    def _warn(self, norm: _BatchNorm) -> None:
        place = _place_in(self._function, norm)
        named = f"{place!r} ({type(norm).__name__})" if place else f"a {type(norm).__name__}"
        warn_of(
            self._function,
            f"runs {named}, which is in training mode and no part of the model: it normalises over each"
            " micro-batch, so the result depends on how the step is cut, and its running statistics are"
            " not put back when a step is done again. Make it a part of the model, put it into"
            " evaluation mode, or give a micro_batch as large as the batch.",
        )


def _place_in(function: Any, norm: nn.Module) -> str:
    """The name by which `function` has `norm`, as far as it shows."""
    with suppress(TypeError, ValueError):
        variables = inspect.getclosurevars(function)
        for name, value in {**variables.globals, **variables.nonlocals}.items():
            if isinstance(value, nn.Module):
                for inner, module in value.named_modules(prefix=name):
                    if module is norm:
                        return inner
    return ""

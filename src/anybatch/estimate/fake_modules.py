"""Support for modules on fake tensors: conversion, initialization, fused layers and copies.

`model.half()`, `model.to(...)` and similar: PyTorch converts a fake parameter by swapping it with
its converted copy, and refuses to swap a tensor that has weak references. FakeTensorMode keeps weak
references to parameters that it initialized, so every model function that ends in `.double()` would
fail (observed with torch 2.11 and 2.13: "Couldn't swap Linear.weight"). Here converted parameters
replace the old ones instead; a parameter shared by several modules stays shared. A model function
may also convert real tensors (weights from a file, a module that it returns each time): these
become fake for the trace and are restored afterwards.

`nn.init.trunc_normal_` draws again until all values are within its bounds, but fake tensors have no
values to check (torch 2.13: "DataDependentOutputException").

The fused layers of `nn.TransformerEncoder` in evaluation pack the samples into a nested tensor by
their padding mask, with sizes that a fake mask does not provide (torch 2.13: "NestedTensorImpl
doesn't support sizes"). They are replaced by the same arithmetic, operation by operation.

When modules are copied (`nn.TransformerEncoder` creates its layers this way), PyTorch reads
addresses, which fake tensors do not have, and warns about it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

T = TypeVar("T", bound=Tensor)

Place = tuple[nn.Module, bool, str]
"""Location of a tensor in a module: the module, whether the tensor is a parameter or a buffer, and
its name."""


@contextmanager
def converting_fake_modules() -> Iterator[dict[Place, Tensor]]:
    """Context manager in which modules with fake parameters can be converted, initialized and
    copied.

    Yields the real tensors that have been converted so far. They are put back at the end of the
    block, so a model that contained them must not be used after it.
    """
    original = nn.Module._apply
    draw = nn.init._no_grad_trunc_normal_
    converted: dict[nn.Parameter, nn.Parameter] = {}
    real: dict[Place, Tensor] = {}
    depth = 0

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        nonlocal depth
        if not is_faking() and not _has_fake(self):  # in another thread, for example
            return original(self, fn, recurse)
        depth += 1
        try:
            if recurse:
                for child in self.children():
                    child._apply(fn)  # RNNs extend this method
            for name, param in self._parameters.items():
                if param is not None:
                    if param not in converted:
                        with torch.no_grad():
                            new = fn(param)
                        same = new is param
                        converted[param] = param if same else nn.Parameter(new, param.requires_grad)
                    self._parameters[name] = replaced((self, True, name), param, converted[param])
            for name, buffer in self._buffers.items():
                if buffer is not None:
                    self._buffers[name] = replaced((self, False, name), buffer, fn(buffer))
        finally:
            depth -= 1
            if depth == 0:
                converted.clear()
        return self

    def replaced(place: Place, old: Tensor, new: T) -> T:
        if new is not old and not isinstance(old, FakeTensor):
            real.setdefault(place, old)
        return new

    def truncated(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else draw(tensor, *args, **kwargs)

    nn.Module._apply = apply
    nn.init._no_grad_trunc_normal_ = truncated
    try:
        with without_addresses():
            yield real
    finally:
        nn.Module._apply = original
        nn.init._no_grad_trunc_normal_ = draw
        _put_back(real)


def _put_back(real: Mapping[Place, Tensor]) -> None:
    for (module, is_parameter, name), tensor in real.items():
        kept: dict[str, Any] = module._parameters if is_parameter else module._buffers
        if name in kept:
            kept[name] = tensor
    with _disable_current_modes():
        for module in {module for module, _, _ in real}:
            if type(module)._apply is not nn.Module._apply:
                module._apply(lambda tensor: tensor)  # RNNs rebuild their list of weights


def is_faking() -> bool:
    """Return whether this thread computes on fake tensors."""
    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())


def _has_fake(module: nn.Module) -> bool:
    own = chain(module._parameters.values(), module._buffers.values())
    return any(isinstance(tensor, FakeTensor) for tensor in own)


@contextmanager
def without_addresses() -> Iterator[None]:
    """Context manager without PyTorch's warnings about reading the address of a fake tensor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


@contextmanager
def without_fused_layers() -> Iterator[None]:
    """Context manager in which encoders in evaluation compute operation by operation."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)

"""`model.half()`, `model.to(...)` and the like, for modules on fake tensors.

torch converts a fake parameter by swapping it with its converted copy, and refuses to swap a tensor
that has weak references. FakeTensorMode keeps some to the parameters that it has initialised, so every
model function that ends in `.double()` would fail (seen with torch 2.11 and 2.13: "Couldn't swap
Linear.weight"). Here converted parameters take the place of the old ones instead; a parameter that
several modules share stays shared. A model function may also convert what is real (weights from a file,
a module that it hands out each time): that becomes fake for the trace, and afterwards is as it was.

And `nn.init.trunc_normal_`, which draws again until all values lie between its bounds: fake ones have
no values to look at (torch 2.13: "DataDependentOutputException").

And the fused layers of `nn.TransformerEncoder` in evaluation, which pack the samples by a mask of their
padding into a nested tensor, of sizes that no fake mask tells (torch 2.13: "NestedTensorImpl doesn't
support sizes"). The same arithmetic, operation by operation, stands for them.

And copies of modules (`nn.TransformerEncoder` makes its layers so), in which torch looks at addresses
that fake tensors do not have, and warns of it.
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
"""Where a module keeps a tensor: whether as a parameter or as a buffer, and its name."""


@contextmanager
def converting_fake_modules() -> Iterator[dict[Place, Tensor]]:
    """Within the block modules whose parameters are fake can be converted, initialised and copied.

    Yields the real tensors that were converted so far: they are put back at the end of the block, which
    a model that has them in it must not outlive.
    """
    original = nn.Module._apply
    draw = nn.init._no_grad_trunc_normal_
    converted: dict[nn.Parameter, nn.Parameter] = {}
    real: dict[Place, Tensor] = {}
    depth = 0

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        nonlocal depth
        if not _is_faking() and not _has_fake(self):  # of another thread, say
            return original(self, fn, recurse)
        depth += 1
        try:
            if recurse:
                for child in self.children():
                    child._apply(fn)  # RNNs add to it
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
                module._apply(lambda tensor: tensor)  # RNNs list their weights once more


def _is_faking() -> bool:
    """Whether this thread computes on fake tensors."""
    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())


def _has_fake(module: nn.Module) -> bool:
    own = chain(module._parameters.values(), module._buffers.values())
    return any(isinstance(tensor, FakeTensor) for tensor in own)


@contextmanager
def without_addresses() -> Iterator[None]:
    """Within the block torch does not warn of fake tensors that are asked for their address."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


@contextmanager
def without_fused_layers() -> Iterator[None]:
    """Within the block encoders in evaluation compute operation by operation."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)

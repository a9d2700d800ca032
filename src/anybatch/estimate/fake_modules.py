"""`model.half()`, `model.to(...)` and the like, for modules on fake tensors.

torch converts a fake parameter by swapping it with its converted copy, and refuses to swap a tensor
that has weak references. FakeTensorMode keeps some to the parameters that it has initialised, so every
model function that ends in `.double()` would fail (seen with torch 2.11 and 2.13: "Couldn't swap
Linear.weight"). Here converted parameters take the place of the old ones instead; a parameter that
several modules share stays shared.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


@contextmanager
def converting_fake_modules() -> Iterator[None]:
    """Within the block modules whose parameters are fake can be converted, initialised and copied."""
    original = nn.Module._apply
    draw = nn.init._no_grad_trunc_normal_
    converted: dict[nn.Parameter, nn.Parameter] = {}
    depth = 0

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        nonlocal depth
        depth += 1
        try:
            if recurse:
                for child in self.children():
                    child._apply(fn)  # RNNs add to it
            for name, param in self._parameters.items():
                if param is not None:
                    if param not in converted:
                        with torch.no_grad():
                            converted[param] = nn.Parameter(fn(param), param.requires_grad)
                    self._parameters[name] = converted[param]
            for name, buffer in self._buffers.items():
                if buffer is not None:
                    self._buffers[name] = fn(buffer)
        finally:
            depth -= 1
            if depth == 0:
                converted.clear()
        return self

    def truncated(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else draw(tensor, *args, **kwargs)

    nn.Module._apply = apply
    nn.init._no_grad_trunc_normal_ = truncated
    try:
        with without_addresses():
            yield
    finally:
        nn.Module._apply = original
        nn.init._no_grad_trunc_normal_ = draw


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

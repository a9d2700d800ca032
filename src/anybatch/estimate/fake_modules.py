"""`model.half()`, `model.to(...)` and the like, for modules on fake tensors.

torch converts a fake parameter by swapping it with its converted copy, and refuses to swap a tensor
that has weak references. FakeTensorMode keeps some to the parameters that it has initialised, so every
model function that ends in `.double()` would fail (seen with torch 2.11 and 2.13: "Couldn't swap
Linear.weight"). Here converted parameters take the place of the old ones instead; a parameter that
several modules share stays shared.

And `nn.init.trunc_normal_`, which draws again until all values lie between its bounds: fake ones have
no values to look at (torch 2.13: "DataDependentOutputException").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


@contextmanager
def converting_fake_modules() -> Iterator[None]:
    """Within the block modules whose parameters are fake can be converted, and initialised."""
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
        yield
    finally:
        nn.Module._apply = original
        nn.init._no_grad_trunc_normal_ = draw

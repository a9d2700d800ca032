"""Saves and restores frozen parameters that forward writes to.

A momentum encoder or a teacher tracks the trained weights inside forward, in parameters without a
gradient. Undoing a pass has to restore them. Frozen parameters are not all copied in advance, since a
frozen base model may take most of the memory. Instead, the first pass is watched, and each parameter is
copied just before it is written to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@final
class ParameterWrites:
    """Copies of the frozen parameters that forward writes to; see the module docstring.

    Attributes:
        is_known: whether it is known which parameters these are, so that no pass is watched.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.is_known: bool = False
        self._saved: dict[nn.Parameter, Tensor] = {}

    def save(self) -> None:
        self._saved = {param: param.detach().clone() for param in self._saved}

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the values from the last `save`, or from before the first pass."""
        for param, before in self._saved.items():
            param.data.copy_(before)  # .data keeps the version, which a graph may have saved

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context manager around a forward pass. The first pass copies parameters that it writes to."""
        if self.is_known or detect_fake_mode() is not None:
            yield
            return
        frozen = _frozen(self._model)
        with _CopyOnWrite(frozen, self._saved) if frozen else nullcontext():
            yield
        self.is_known = True


class _CopyOnWrite(TorchDispatchMode):
    """Copies a parameter in `params` (keyed by storage) to `saved` before an operation writes to it."""

    def __init__(
        self, params: Mapping[int, nn.Parameter], saved: dict[nn.Parameter, Tensor]
    ) -> None:
        super().__init__()
        self._params = params
        self._saved = saved

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func._schema.is_mutable:
            for tensor in written_tensors(func, args, options):
                self._keep(tensor)
        return func(*args, **options)

    def _keep(self, tensor: Tensor) -> None:
        param = self._params.get(_storage(tensor))
        if param is not None and param not in self._saved:
            self._saved[param] = param.detach().clone()


def written_tensors(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation of torch writes to, among its arguments."""
    formals = func._schema.arguments
    given = dict(zip((formal.name for formal in formals), args, strict=False)) | {**kwargs}
    written = [given.get(f.name) for f in formals if f.alias_info and f.alias_info.is_write]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]


def _frozen(model: nn.Module) -> dict[int, nn.Parameter]:
    return {
        _storage(param): param
        for param in model.parameters()
        if not param.requires_grad and type(param) is nn.Parameter
    }


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0

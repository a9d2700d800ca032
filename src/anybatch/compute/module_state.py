"""Module state: what modules keep besides parameters and buffers, as at one moment.

A forward pass may advance a generator of random numbers, or a counter that is a plain attribute. A pass
that is run again for the same samples (recompute, a step that is done again) has to find them as the
first one did.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import nn

from anybatch.side_effects import GENERATORS, rewinding

_MOST_BYTES = 64 << 10
"""Of a tensor that is an attribute."""

_MISSING: Any = object()

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has. A pass replaces none of them: parameters, buffers and hooks are in
containers that stay."""

_PLAIN = frozenset((bool, int, float, str, tuple, type(None)))
_Tensor: Any = torch._C.TensorBase  # which is quicker to ask for than torch.Tensor


@final
class ModuleState:
    """Attributes of `modules`, and the generators among them and `others`.

    Tensors of the graph of a pass (a hidden state, an auxiliary loss) are left out, since holding them
    would keep that graph; and large ones, which may be activations.
    """

    def __init__(self, modules: Iterable[nn.Module], others: Iterable[Any] = ()) -> None:
        self._held = [(module, _states(module)) for module in modules]
        own = [one for _, had in self._held for one in had.values() if type(one) not in _PLAIN]
        found = {id(one): one for one in (*others, *own) if isinstance(one, GENERATORS)}
        self._generators = list(found.values())
        self._back = [rewinding(one) for one in self._generators]

    def drop_unchanged(self) -> None:
        """Let go of the attributes of modules in which they have not changed."""
        self._held = [(module, then) for module, then in self._held if _differs(module, then)]

    def now(self) -> ModuleState:
        """The same, as it is now."""
        return ModuleState([module for module, _ in self._held], self._generators)

    def changed(self, model: nn.Module) -> list[str]:
        """Names of the attributes, as `model` has them, that are others now."""
        names = {module: f"{name}." if name else "" for name, module in model.named_modules()}
        return [
            names[module] + name
            for module, then in self._held
            for name in {**then, **_states(module)}
            if vars(module).get(name, _MISSING) is not then.get(name, _MISSING)
        ]

    def put_back(self) -> None:
        """Make all of it as it was."""
        for module, then in self._held:
            attributes = vars(module)
            for name in _states(module).keys() - then.keys():
                del attributes[name]
            for name, value in then.items():
                if attributes.get(name, _MISSING) is not value:
                    attributes[name] = value
        for back in self._back:
            back()


def _states(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _OF_TORCH
        and (type(value) in _PLAIN or not isinstance(value, _Tensor) or _is_small(value))
    }


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is None and tensor.numel() * tensor.itemsize <= _MOST_BYTES


def _differs(module: nn.Module, then: dict[str, Any]) -> bool:
    now = _states(module)
    return now.keys() != then.keys() or any(now[name] is not then[name] for name in now)

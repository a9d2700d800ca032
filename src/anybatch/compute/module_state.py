"""Module state: snapshots of what modules keep besides parameters and buffers.

A forward pass may advance a random number generator or a counter that is a plain attribute, or append
to a list. A pass that is run again for the same samples (recompute, a repeated step) has to start from
the same state as the first one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, final

import torch
from torch import nn

from anybatch.side_effects import GENERATORS, refilling, rewinding

_MOST_BYTES = 64 << 10
"""Maximum size of a tensor attribute that is included in a snapshot."""

_MOST_ELEMENTS = 10_000
"""Maximum number of elements of a container that is included in a snapshot."""

_MISSING: Any = object()

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has. A pass does not replace any of them: parameters, buffers and hooks
are in containers that stay the same objects."""

_CONTAINERS = list, set, deque, dict
_PLAIN = frozenset((bool, int, float, str, tuple, type(None)))
_Tensor: Any = torch._C.TensorBase  # isinstance is faster than with torch.Tensor


@final
class ModuleState:
    """Snapshot of the attributes of `modules`, and of the generators and the elements of the containers
    among these attributes and `others`.

    Tensors that belong to the graph of a pass (a hidden state, an auxiliary loss) are left out, since
    holding them would keep the graph alive. Large tensors are left out too, since they may be
    activations, and so are containers that hold such tensors.
    """

    def __init__(self, modules: Iterable[nn.Module], others: Iterable[Any] = ()) -> None:
        self._held = [(module, _states(module)) for module in modules]
        own = [one for _, had in self._held for one in had.values() if type(one) not in _PLAIN]
        found = {id(one): one for one in (*others, *own)}
        generators = [one for one in found.values() if isinstance(one, GENERATORS)]
        containers = [one for one in found.values() if _is_container(one)]
        self._others = [*generators, *containers]
        self._back = [*map(rewinding, generators), *map(refilling, containers)]

    def drop_unchanged(self) -> None:
        """Release the attributes of modules in which none has changed."""
        self._held = [(module, then) for module, then in self._held if _differs(module, then)]

    def now(self) -> ModuleState:
        """Return a snapshot of the same modules, generators and containers in their current state."""
        return ModuleState([module for module, _ in self._held], self._others)

    def changed(self, model: nn.Module) -> list[str]:
        """Names, within `model`, of the attributes that were added, removed or replaced since."""
        names = {module: f"{name}." if name else "" for name, module in model.named_modules()}
        return [
            names[module] + name
            for module, then in self._held
            for name in {**then, **_states(module)}
            if vars(module).get(name, _MISSING) is not then.get(name, _MISSING)
        ]

    def put_back(self) -> None:
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


def _is_container(value: Any) -> bool:
    """Whether `value` is a container whose elements a snapshot may hold."""
    if not isinstance(value, _CONTAINERS) or len(value) > _MOST_ELEMENTS:
        return False
    held = dict.values(value) if isinstance(value, dict) else value
    return all(not isinstance(one, _Tensor) or _is_small(one) for one in held)


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is None and tensor.numel() * tensor.itemsize <= _MOST_BYTES


def _differs(module: nn.Module, then: dict[str, Any]) -> bool:
    now = _states(module)
    return now.keys() != then.keys() or any(now[name] is not then[name] for name in now)

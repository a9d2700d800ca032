"""Several optimizers as one: Muon for the matrices of a model, say, and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer

from anybatch.errors import InputError


def as_one(optimizer: Any) -> Any:
    """`optimizer`; of a list or tuple of optimizers, one that stands for all of them.

    Raises `InputError` if a parameter is in two of them.
    """
    if not isinstance(optimizer, list | tuple) or not optimizer:
        return optimizer
    if not all(isinstance(part, Optimizer) for part in optimizer):
        return optimizer  # whoever takes it tells what it is
    return optimizer[0] if len(optimizer) == 1 else Several(optimizer)


def parts_of(optimizer: Optimizer) -> Sequence[Optimizer]:
    """The optimizers that `optimizer` stands for; itself, if it is an ordinary one."""
    return optimizer.parts if isinstance(optimizer, Several) else (optimizer,)


def part_with(optimizer: Optimizer, group: Mapping[str, Any]) -> Optimizer:
    """That of the optimizers which has `group`, one of the `param_groups` of `optimizer`."""
    return next(
        part
        for part in parts_of(optimizer)
        if part is optimizer or any(own is group for own in part.param_groups)
    )


@final
class Several(Optimizer):
    """Optimizers with parameters of their own, updated together.

    Groups and states are those of the parts, so that a scheduler may go on working on its own.

    Attributes:
        parts: the optimizers, in the order in which they update.

    Raises `InputError` if a parameter is in two of them.
    """

    parts: tuple[Optimizer, ...]

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        owner: dict[Tensor, Optimizer] = {}
        for part in parts:
            for param in (p for group in part.param_groups for p in group["params"]):
                if owner.setdefault(param, part) is not part:
                    raise InputError(
                        f"a parameter of shape {tuple(param.shape)} is in two optimizers,"
                        f" {type(owner[param]).__name__} and {type(part).__name__}: give each"
                        " parameter to one."
                    )
        # What an optimizer is made of beside groups and states: hooks, and what it is profiled by.
        super().__setstate__({"parts": tuple(parts), "defaults": {}})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the parts, in their order."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Those of the parts."""
        return _States(self.parts)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters of every part."""
        for part in self.parts:
            part.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises `InputError`: nobody knows for which of the parts."""
        names = " or ".join(type(part).__name__ for part in self.parts)
        raise InputError(f"a group of parameters is for {names}: add it to that optimizer itself.")

    def __getstate__(self) -> dict[str, Any]:
        """The parts."""
        return {"parts": self.parts, "defaults": self.defaults}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy its parts; of `load_state_dict` what is for each of them."""
        if "parts" in state:
            super().__setstate__(state)
            return
        groups, states = iter(state["param_groups"]), state["state"]
        for part in self.parts:
            own = [next(groups) for _ in part.param_groups]
            params = [param for group in own for param in group["params"]]
            part.__setstate__(
                {
                    "param_groups": own,
                    "state": type(states)(
                        states.default_factory, {p: states[p] for p in params if p in states}
                    ),
                }
            )


@final
class _States(MutableMapping[Tensor, Any]):
    """The states of several optimizers, by parameter; like those of one, they come to be when they are
    asked for."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._parts = parts

    def __getitem__(self, param: Tensor) -> Any:
        return self._owner(param)[param]

    def __setitem__(self, param: Tensor, value: Any) -> None:
        self._owner(param)[param] = value

    def __delitem__(self, param: Tensor) -> None:
        del self._owner(param)[param]

    def __contains__(self, param: object) -> bool:
        return any(param in part.state for part in self._parts)

    def __iter__(self) -> Iterator[Tensor]:
        return (param for part in self._parts for param in part.state)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)

    def get(self, param: Tensor, default: Any = None) -> Any:
        """See `dict`: nothing comes to be."""
        return next((part.state[param] for part in self._parts if param in part.state), default)

    def _owner(self, param: Tensor) -> Any:
        for part in self._parts:
            if param in part.state:
                return part.state
        for part in self._parts:
            if any(p is param for group in part.param_groups for p in group["params"]):
                return part.state
        raise KeyError(param)

"""Several optimizers used as one, such as Muon for the matrices of a model and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer

from anybatch.errors import InputError


def as_one(optimizer: Any) -> Any:
    """Combine a list or tuple of optimizers into one. Anything else is returned unchanged.

    Raises `InputError` if a parameter is in two of them.
    """
    if not isinstance(optimizer, list | tuple) or not optimizer:
        return optimizer
    if not all(isinstance(part, Optimizer) for part in optimizer):
        return optimizer  # the caller reports the invalid type
    return optimizer[0] if len(optimizer) == 1 else Several(optimizer)


def parts_of(optimizer: Optimizer) -> Sequence[Optimizer]:
    """The optimizers that `optimizer` combines, or `optimizer` itself if it is an ordinary one."""
    return optimizer.parts if isinstance(optimizer, Several) else (optimizer,)


def part_with(optimizer: Optimizer, group: Mapping[str, Any]) -> Optimizer:
    """The part of `optimizer` that owns `group`, one of its `param_groups`."""
    return next(
        part
        for part in parts_of(optimizer)
        if part is optimizer or any(own is group for own in part.param_groups)
    )


@final
class Several(Optimizer):
    """Several optimizers with disjoint parameters, updated together.

    Groups and states are those of the parts, so a scheduler attached to one of the parts keeps working.

    Attributes:
        parts: the optimizers, in the order in which they update.

    Raises `InputError` if a parameter is in two of them, or one of them is given twice.
    """

    parts: tuple[Optimizer, ...]

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        owner: dict[Tensor, Optimizer] = {}
        for number, part in enumerate(parts):
            if any(part is other for other in parts[:number]):
                raise InputError(
                    f"the same {type(part).__name__} is given twice, so each step would update twice:"
                    " give it once."
                )
            for param in (p for group in part.param_groups for p in group["params"]):
                if owner.setdefault(param, part) is not part:
                    raise InputError(
                        f"a parameter of shape {tuple(param.shape)} is in two optimizers,"
                        f" {type(owner[param]).__name__} and {type(part).__name__}: give each"
                        " parameter to one."
                    )
        # Sets up what an optimizer has besides groups and states: hooks and profiling.
        super().__setstate__({"parts": tuple(parts), "defaults": {}})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return _States(self.parts)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises `InputError`: it is unknown which part the group belongs to."""
        names = " or ".join(type(part).__name__ for part in self.parts)
        raise InputError(f"a group of parameters is for {names}: add it to that optimizer itself.")

    def __getstate__(self) -> dict[str, Any]:
        return {"parts": self.parts, "defaults": self.defaults}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the parts of a copy, or distribute a state from `load_state_dict` to the parts."""
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
    """The states of several optimizers, by parameter. As in a single optimizer, accessing a missing
    state creates it."""

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
        """Like `dict.get`: does not create a missing state."""
        return next((part.state[param] for part in self._parts if param in part.state), default)

    def _owner(self, param: Tensor) -> Any:
        for part in self._parts:
            if param in part.state:
                return part.state
        for part in self._parts:
            if any(p is param for group in part.param_groups for p in group["params"]):
                return part.state
        raise KeyError(param)

"""Replaces the `forward` of single modules, which is how a plan modifies a model.

The module stays the same object: its name, parameters and `state_dict` keys are untouched, so nothing
has to be unwrapped when weights are saved. Copies and pickles of the module contain its original state.

Several plans may be active on one model, such as those of two `Step`s. Their replacements are stacked,
and each can be removed, regardless of those added after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Forward = Callable[..., Any]


def replace_forward(module: nn.Module, make: Callable[[Forward], Forward]) -> Callable[[], None]:
    """Replace the current `forward` of `module` with `make(forward)`, until the returned function is
    called. If a replacement below it is removed before that, `make` is called again with the new
    `forward` below it."""
    stack = vars(module).get(_KEY)
    if not isinstance(stack, _Forwards):
        stack = _Forwards(module)
    return stack.add(make)


_KEY = "__getstate__"  # copy and pickle look this up on the instance first


class _Forwards:
    """The stack of replacements of one module's `forward`, from the lowest to the active one. It is
    stored on the module itself, as `__getstate__`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own = {name: value for name, value in vars(module).items() if name == "forward"}
        self._makers: list[_Maker] = []
        self._made: list[Forward] = []
        vars(module)[_KEY] = self

    def add(self, make: Callable[[Forward], Forward]) -> Callable[[], None]:
        maker = _Maker(make)
        self._makers.append(maker)
        try:
            self._make_from(len(self._made))
        except BaseException:
            self._remove(maker)
            raise
        return lambda: self._remove(maker)

    def __call__(self) -> Any:
        """Return the state of the module as if nothing had been replaced."""
        state: Any = type(self._module).__getstate__(self._module)
        if isinstance(state, tuple):  # a class with slots
            return self._plain(state[0]), *state[1:]
        return self._plain(state)

    def _plain(self, state: Any) -> Any:
        if not isinstance(state, dict) or state.get(_KEY) is not self:
            return state
        ours = (_KEY, "forward")
        return {name: value for name, value in state.items() if name not in ours} | self._own

    def _remove(self, maker: _Maker) -> None:
        if maker in self._makers:
            place = self._makers.index(maker)
            del self._makers[place]
            self._make_from(place)

    def _make_from(self, place: int) -> None:
        """Rebuild the replacements from index `place` on, on top of those below."""
        del self._made[place:]
        own = vars(self._module)
        own.pop("forward", None)
        own.update(self._own)
        if not self._makers:
            own.pop(_KEY, None)
            return
        below: Forward = self._made[-1] if self._made else self._module.forward
        for maker in self._makers[place:]:
            below = maker.make(below)
            self._made.append(below)
        own["forward"] = below


class _Maker:
    """One replacement. It is compared by identity, so two with an equal function are distinct."""

    def __init__(self, make: Callable[[Forward], Forward]) -> None:
        self.make: Callable[[Forward], Forward] = make

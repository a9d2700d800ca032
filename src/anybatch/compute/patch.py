"""Replacing the `forward` of one module: the one way in which a plan reaches into a model.

The module stays itself: its name, parameters and `state_dict` keys are untouched, so nothing has to be
unwrapped when weights are saved. A copy of it, and what is pickled of it, is the module as it was
before.

Several plans may be at work on one model, as those of two `Step`s are. Their replacements lie one upon
the other, and each can be taken away, whatever came after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Forward = Callable[..., Any]


def replace_forward(module: nn.Module, make: Callable[[Forward], Forward]) -> Callable[[], None]:
    """Let `module` run what `make` makes of the `forward` that it runs now, until the function returned
    is called. If one below is taken away before, `make` is called again, with what is there then."""
    stack = vars(module).get(_KEY)
    if not isinstance(stack, _Forwards):
        stack = _Forwards(module)
    return stack.add(make)


_KEY = "__getstate__"  # where copy and pickle ask a module for its state, of the instance first


class _Forwards:
    """The replacements of one module's `forward`, from the lowest to the one that runs. It lies in the
    module itself, in the place of `__getstate__`."""

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
        """The state of the module, as if nothing had been replaced."""
        state: Any = type(self._module).__getstate__(self._module)
        if isinstance(state, tuple):  # of a class with slots
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
        """Make those from number `place` on anew, from what is below."""
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
    """One replacement, told from another one with an equal function."""

    def __init__(self, make: Callable[[Forward], Forward]) -> None:
        self.make: Callable[[Forward], Forward] = make

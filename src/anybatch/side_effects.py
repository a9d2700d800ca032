"""Side effects: what users' functions keep between calls, put back after passes that do not count.

A loss is called once for each micro-batch of a run, and may keep something from one call to the next: a
counter, a running mean, a history, another model with gradients and statistics of its own. Passes that
are traced, compared or timed call it, too. A model can be copied for them; what a function has in its
closure cannot. So it is noted before them, and put back after them.

What can be reached is followed from the functions on: closures, defaults, arguments of partials,
objects of methods, attributes and slots, elements of containers, and the globals that their code names.
Threads, files and what is beside a lock are left alone, and so is the code of libraries. Iterators
cannot be wound back.
"""

from __future__ import annotations

import functools
import queue
import random
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import is_
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_MOST_OBJECTS = 20_000
"""Reached in all; the nearest ones come first."""

_MANY = 1_000
"""Elements up to which those of a container are looked into."""

_LONG = 10_000
"""Elements from which on only what is added to a container at its end is taken away again."""

_MOST_BYTES = 8 << 20
"""Of tensors and arrays whose values are copied, the smallest first. Trained parameters are not: a loss
adds to their gradients and writes nothing else there."""

_ATOMS = frozenset(
    (
        *(int, float, complex, bool, str, bytes, type(None), range, slice),
        *(torch.dtype, torch.device, torch.layout, torch.Size, CodeType, ModuleType),
        BuiltinFunctionType,
    )
)
_LIBRARIES = frozenset(("anybatch", "torch", "numpy"))
_OF_USERS = frozenset(("anybatch.task", "anybatch.metrics"))
"""Where values live that hold functions of users; all else in anybatch runs them."""

_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event)
_SHARED = (*_LOCKS, threading.Semaphore, threading.Thread, threading.local, queue.Queue)
_SHARED_HOMES = frozenset(
    (
        *("_io", "_thread", "_weakref", "asyncio", "concurrent", "contextvars", "io", "logging"),
        *("multiprocessing", "queue", "selectors", "socket", "subprocess", "threading", "weakref"),
    )
)
_OF_MODULES = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}
"""Hooks and flags of any module: told by its dict, and not looked into."""

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""Sources of random numbers that have a state."""

_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"

_MISSING: Any = object()


def state_of(generator: Any) -> Any:
    """The state that one of `GENERATORS` is in."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def rewinding(generator: Any) -> Callable[[], object]:
    """A function that brings one of `GENERATORS` to the state that it is in now."""
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return partial(setattr, bits, "state", bits.state)
    return partial(generator.set_state, generator.get_state())


def generators_in(*functions: object) -> list[Any]:
    """The generators that can be reached from `functions`."""
    return _Notes(functions, aside=False, but=(), copies=False).generators


def code_of(model: nn.Module) -> list[object]:
    """What passes of `model` run that is none of its own state: the classes of its modules, and the
    hooks on them."""
    found: dict[int, object] = {}
    for module in model.modules():
        hooks = (getattr(module, name, None) or {} for name in _HOOKS)
        for one in (type(module), *(hook for each in hooks for hook in each.values())):
            found[id(one)] = one
    return list(found.values())


@contextmanager
def untouched(
    *functions: object, aside: bool = False, but: Iterable[object] = ()
) -> Iterator[None]:
    """What can be reached from `functions` is after the block as before it, also after an error.

    Args:
        functions: of the user, or what holds such.
        aside: gradients are set aside meanwhile. Passes over real samples would add to them in place;
            fake ones cannot.
        but: what others see to: neither it nor what only it leads to is touched.
    """
    notes = _Notes(functions, aside, but)
    try:
        yield
    finally:
        notes.put_back()


class _Notes:
    """What was found, as ways to put it back."""

    def __init__(
        self,
        functions: Iterable[object],
        aside: bool,
        but: Iterable[object],
        copies: bool = True,
    ) -> None:
        self.generators: list[Any] = []
        self._back: list[Callable[[], object]] = []
        # The most frequent ones by themselves: many small objects wake the garbage collector.
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._leaves: list[tuple[Tensor, Tensor | None, bool]] = []
        self._seen: dict[int, object] = {id(one): one for one in but}  # held: ids stay theirs
        self._next: deque[Any] = deque(functions)
        self._values: list[Tensor | np.ndarray[Any, Any]] = []
        most = len(self._seen) + _MOST_OBJECTS
        while self._next and len(self._seen) < most:
            one = self._next.popleft()
            if type(one) not in _ATOMS and id(one) not in self._seen:
                self._seen[id(one)] = one
                self._look_at(one, type(one))
        if copies:
            self._copy_values()
        if aside:
            for one, _, _ in self._leaves:
                one.grad = None

    def put_back(self) -> None:
        """Make all that was noted as it was."""
        with torch.no_grad():
            for back in self._back:
                back()
            for now, before in self._dicts:
                _reset_dict(now, before)
            for one, gradient, requires_grad in self._leaves:
                _reset_leaf(one, gradient, requires_grad)

    def _look_at(self, one: Any, kind: type) -> None:
        if issubclass(kind, Tensor):
            self._tensor(one)
        elif issubclass(kind, np.ndarray):
            if one.flags.writeable and not one.dtype.hasobject:
                self._values.append(one)
        elif issubclass(kind, FunctionType):
            self._function(one)
        elif issubclass(kind, MethodType):
            self._next += one.__self__, one.__func__
        elif issubclass(kind, CellType):
            self._cell(one)
        elif issubclass(kind, partial):
            self._next += one.func, *one.args, *one.keywords.values()
            self._attributes(one, kind)
        elif issubclass(kind, staticmethod | classmethod):
            self._next.append(one.__func__)
        elif issubclass(kind, property):
            self._next += one.fget, one.fset
        elif kind is functools._lru_cache_wrapper:
            self._back.append(partial(_forget, one, one.cache_info().misses))
            self._next.append(one.__wrapped__)
        elif issubclass(kind, type):
            self._class(one)
        elif issubclass(kind, GENERATORS):
            self.generators.append(one)
            self._back.append(rewinding(one))
        else:
            self._container(one, kind)
            self._attributes(one, kind)

    # ------------------------------------------------------------------------------------ functions

    def _function(self, one: FunctionType) -> None:
        self._next += one.__closure__ or ()
        self._next += one.__defaults__ or ()
        self._dict(one.__kwdefaults__ or {})
        self._dict(one.__dict__)
        if not _is_of_library(str(one.__globals__.get("__name__"))):
            self._names(one.__globals__, frozenset(_named(one.__code__)))

    def _names(self, space: dict[str, Any], named: Iterable[str]) -> None:
        """What code has by these names: in its own module, and in those of the user that it names."""
        spaces, found = [space], {id(space)}
        for space in spaces:
            before = {name: space.get(name, _MISSING) for name in named}
            self._back.append(partial(_rebind, space, before))
            for value in before.values():
                if type(value) is not ModuleType:
                    self._next.append(value)
                elif id(vars(value)) not in found and not _is_of_library(value.__name__):
                    found.add(id(vars(value)))
                    spaces.append(vars(value))

    def _cell(self, cell: CellType) -> None:
        before = _content(cell)
        self._back.append(partial(_refill, cell, before))
        self._next.append(before)

    def _class(self, one: type) -> None:
        if _is_of_library(str(one.__module__)):
            return
        before = {name: value for name, value in vars(one).items() if not _is_special(name)}
        self._back.append(partial(_reset_class, one, before))
        self._next += before.values()
        self._next += one.__bases__

    # -------------------------------------------------------------------------------------- objects

    def _attributes(self, one: Any, kind: type) -> None:
        home = str(kind.__module__)
        is_module = issubclass(kind, nn.Module)
        if home.partition(".")[0] in _SHARED_HOMES or issubclass(kind, _SHARED):
            return
        if home.startswith("anybatch.") and home not in _OF_USERS:
            return
        held = _dict_of(one)
        if not is_module and any(issubclass(type(value), _SHARED) for value in held.values()):
            return
        self._next.append(kind)
        self._dict(held, but=_OF_MODULES if is_module else ())
        for slot in _slots_of(kind):
            before = _in_slot(slot, one)
            self._back.append(partial(_refill_slot, slot, one, before))
            self._next.append(before)

    def _dict(self, one: dict[Any, Any], but: Iterable[str] = ()) -> None:
        if len(one) > _LONG:
            self._back.append(partial(_shorten_dict, one, len(one)))
            return
        before = dict(one.items()) if isinstance(one, OrderedDict) else dict.copy(one)
        self._dicts.append((one, before))
        if len(before) <= _MANY:
            self._next += (value for name, value in before.items() if name not in but)

    def _container(self, one: Any, kind: type) -> None:
        if issubclass(kind, dict):
            self._dict(one)
        elif issubclass(kind, tuple | frozenset):
            if len(one) <= _MANY:
                self._next += one
        elif issubclass(kind, list) and len(one) > _LONG:
            self._back.append(partial(_shorten_list, one, len(one)))
        elif issubclass(kind, list | set | deque):
            before = tuple(one)
            self._back.append(partial(_reset_elements, one, before))
            if len(before) <= _MANY:
                self._next += before

    # -------------------------------------------------------------------------------------- tensors

    def _tensor(self, one: Tensor) -> None:
        if one.is_leaf:
            self._leaves.append((one, one.grad, one.requires_grad))
        if held := _dict_of(one):
            self._dict(held)
        frozen = type(one) is nn.Parameter and not one.requires_grad  # a teacher's, perhaps
        is_plain = (type(one) is Tensor or frozen) and one.layout is torch.strided
        if is_plain and not (one.is_meta or one.is_inference()):
            self._values.append(one)

    def _copy_values(self) -> None:
        room = _MOST_BYTES
        for one in sorted(self._values, key=lambda value: value.nbytes):
            room -= one.nbytes
            if room < 0:
                return
            if isinstance(one, Tensor):
                if torch._debug_has_internal_overlap(one) != 1:  # one that is expanded is a view
                    # On the host: a device may be full. Whether a tensor was written to is not
                    # asked: some kernels write without changing its version.
                    self._back.append(partial(_copy_into, one, one.detach().cpu().clone()))
            else:
                self._back.append(partial(np.copyto, one, one.copy()))


# ---------------------------------------------------------------------------------- putting it back


def _refill(cell: CellType, before: Any) -> None:
    if before is _MISSING:
        if _content(cell) is not _MISSING:
            del cell.cell_contents
    else:
        cell.cell_contents = before


def _rebind(names: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in before.items():
        if value is _MISSING:
            names.pop(name, None)
        elif names.get(name, _MISSING) is not value:
            names[name] = value


def _reset_class(one: type, before: dict[str, Any]) -> None:
    now = {name: value for name, value in vars(one).items() if not _is_special(name)}
    for name in now.keys() - before.keys():
        type.__delattr__(one, name)
    for name, value in before.items():
        if now.get(name, _MISSING) is not value:
            type.__setattr__(one, name, value)


def _refill_slot(slot: MemberDescriptorType, one: Any, before: Any) -> None:
    now = _in_slot(slot, one)
    if before is _MISSING and now is not _MISSING:
        slot.__delete__(one)
    elif now is not before:
        slot.__set__(one, before)


def _reset_dict(one: dict[Any, Any], before: dict[Any, Any]) -> None:
    same = len(one) == len(before) and all(map(is_, one.values(), before.values()))
    if same and all(map(is_, one, before)):
        return
    own: Any = OrderedDict if isinstance(one, OrderedDict) else dict
    own.clear(one)
    own.update(one, before)


def _reset_elements(one: Any, before: tuple[Any, ...]) -> None:
    if len(one) == len(before) and all(map(is_, one, before)):
        return
    if isinstance(one, list):
        list.__setitem__(one, slice(None), before)
    elif isinstance(one, set):
        set.clear(one)
        set.update(one, before)
    else:
        deque.clear(one)
        deque.extend(one, before)


def _shorten_list(one: list[Any], length: int) -> None:
    list.__delitem__(one, slice(length, None))


def _shorten_dict(one: dict[Any, Any], length: int) -> None:
    while len(one) > length:
        dict.popitem(one)


def _reset_leaf(one: Tensor, gradient: Tensor | None, requires_grad: bool) -> None:
    if one.grad is not gradient:
        one.grad = gradient
    if one.requires_grad != requires_grad:
        one.requires_grad_(requires_grad)


def _copy_into(one: Tensor, before: Tensor) -> None:
    if one.shape == before.shape:
        one.data.copy_(before)  # through .data: a graph may have saved this version


def _forget(cached: Any, misses: int) -> None:
    """What was cached on the way may be fake; to compute it again harms nobody."""
    if cached.cache_info().misses != misses:
        cached.cache_clear()


# ----------------------------------------------------------------------------------- looking at it


def _named(code: CodeType) -> Iterator[str]:
    """The names of globals, and of attributes, in `code` and in the functions that it makes."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _named(constant)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return _MISSING


def _dict_of(one: Any) -> dict[str, Any]:
    try:
        return object.__getattribute__(one, "__dict__")
    except AttributeError:
        return {}


def _slots_of(kind: type) -> Iterator[MemberDescriptorType]:
    for base in kind.__mro__:
        if "__slots__" in vars(base):
            yield from (one for one in vars(base).values() if type(one) is MemberDescriptorType)


def _in_slot(slot: MemberDescriptorType, one: Any) -> Any:
    try:
        return slot.__get__(one)
    except AttributeError:  # nothing is in it yet
        return _MISSING


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


@functools.cache
def _is_of_library(module: str) -> bool:
    """Whether the module of that name was installed, with Python or after it."""
    if module == "__main__":
        return False
    top = module.partition(".")[0]
    if top in _LIBRARIES or top in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)

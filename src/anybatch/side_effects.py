"""Side effects: saves the state that user functions keep between calls, and restores it after passes
that do not count.

A loss may keep state from one call to the next (a counter, a running mean, another model). Passes that
are traced, compared or timed call it too, so its state is recorded before them and restored after them.

State is found by following references from the functions: closures, defaults, arguments of partials,
objects of bound methods, attributes and slots, elements of containers, and the globals that their code
names. Threads, files, objects that hold a lock, and library code are left alone. Iterators cannot be
rewound.
"""

from __future__ import annotations

import functools
import queue
import random
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from operator import is_
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_MOST_OBJECTS = 20_000
"""Maximum number of objects visited, nearest first."""

_MANY = 1_000
"""Maximum number of elements of a container that is searched."""

_MOST_BYTES = 8 << 20
"""Maximum total size of tensors and arrays whose values are copied, smallest first. Trained parameters
are not copied: a loss adds to their gradients but does not write to their values."""

_ATOMS = frozenset(
    (
        *(int, float, complex, bool, str, bytes, type(None), range, slice),
        *(torch.dtype, torch.device, torch.layout, torch.Size, CodeType, ModuleType),
        BuiltinFunctionType,
    )
)
_LIBRARIES = frozenset(("anybatch", "torch", "numpy"))
_OF_USERS = frozenset(("anybatch.task", "anybatch.metrics"))
"""Modules whose objects hold user functions; the rest of anybatch only runs them."""

_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event)
_SHARED = (*_LOCKS, threading.Semaphore, threading.Thread, threading.local, queue.Queue)
_SHARED_HOMES = frozenset(
    (
        *("_io", "_thread", "_weakref", "asyncio", "concurrent", "contextvars", "io", "logging"),
        *("multiprocessing", "queue", "selectors", "socket", "subprocess", "threading", "weakref"),
    )
)
_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of any module."""

_OF_MODULES = _OF_TORCH - {"_parameters", "_buffers", "_modules"}
"""Hooks and flags of any module: restored with the module's dict, but not searched."""

_CONTAINERS = tuple, frozenset, list, set, deque, dict

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""Types of random number generators."""

_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"

_MISSING: Any = object()


def state_of(generator: Any) -> Any:
    """The current state of `generator`, an instance of one of `GENERATORS`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def rewinding(generator: Any) -> Callable[[], object]:
    """A function that resets `generator`, an instance of one of `GENERATORS`, to its current state."""
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return partial(setattr, bits, "state", bits.state)
    return partial(generator.set_state, generator.get_state())


def refilling(container: Any) -> Callable[[], object]:
    """A function that gives `container`, a list, set, deque or dict, its current elements back."""
    if isinstance(container, dict):
        return partial(_reset_dict, container, dict(container.items()))
    return partial(_reset_elements, container, tuple(container))


def generators_in(*functions: object) -> list[Any]:
    """The random number generators that are reachable from `functions`."""
    return instances_in(GENERATORS, *functions)


def instances_in(kinds: type | tuple[type, ...], *functions: object) -> list[Any]:
    """The objects of one of `kinds` that are reachable from `functions`."""
    seen = _Notes(functions, aside=False, but=(), copies=False).seen
    return [one for one in seen.values() if issubclass(type(one), kinds)]


def used_by(model: nn.Module) -> list[object]:
    """What passes of `model` use that is neither a module nor a parameter or buffer: the classes of its
    modules, the hooks on them, and the values in their attributes that may be changed in place
    (containers, tensors, objects of the user's classes)."""
    found: dict[int, object] = {}
    for module in model.modules():
        hooks = (getattr(module, name, None) or {} for name in _HOOKS)
        kept = (value for name, value in vars(module).items() if name not in _OF_TORCH)
        held = (value for value in kept if type(value) not in _ATOMS and not _is_foreign(value))
        for one in (type(module), *(hook for each in hooks for hook in each.values()), *held):
            found[id(one)] = one
    return list(found.values())


def _is_foreign(value: Any) -> bool:
    """Whether `value` is an object of a library, other than a container or a tensor."""
    is_plain = isinstance(value, (*_CONTAINERS, Tensor, np.ndarray))
    return not is_plain and _is_of_library(str(type(value).__module__))


@contextmanager
def untouched(
    *functions: object, aside: bool = False, but: Iterable[object] = ()
) -> Iterator[None]:
    """Context manager that restores on exit the state reachable from `functions`, also after an error.

    Args:
        functions: user functions, or objects that hold them.
        aside: set gradients to None inside the block. Passes over real samples would add to them in
            place; passes over fake tensors cannot.
        but: objects that are handled elsewhere: they, and objects reachable only through them, are not
            touched.
    """
    notes = _Notes(functions, aside, but)
    try:
        yield
    finally:
        notes.put_back()


class _Notes:
    """The recorded state, as functions that restore it. `seen`: the objects that were visited."""

    def __init__(
        self,
        functions: Iterable[object],
        aside: bool,
        but: Iterable[object],
        copies: bool = True,
    ) -> None:
        self._back: list[Callable[[], object]] = []
        self._leaves: list[Tensor] = []
        self.seen: dict[int, object] = {id(one): one for one in but}  # references keep ids unique
        self._next: deque[Any] = deque(functions)
        self._values: list[Tensor | np.ndarray[Any, Any]] = []
        most = len(self.seen) + _MOST_OBJECTS
        while self._next and len(self.seen) < most:
            one = self._next.popleft()
            if type(one) not in _ATOMS and id(one) not in self.seen:
                self.seen[id(one)] = one
                self._look_at(one, type(one))
        if copies:
            self._copy_values()
        if aside:
            for one in self._leaves:
                one.grad = None

    def put_back(self) -> None:
        """Restore everything that was recorded."""
        with torch.no_grad():
            for back in self._back:
                back()

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
            self._dict(_dict_of(one))
        elif issubclass(kind, staticmethod | classmethod):
            self._next.append(one.__func__)
        elif issubclass(kind, property):
            self._next += one.fget, one.fset
        elif kind is functools._lru_cache_wrapper:
            self._back.append(partial(_forget, one, one.cache_info().misses))
            self._next.append(one.__wrapped__)
        elif issubclass(kind, type):
            if not _is_of_library(str(one.__module__)):
                self._names(partial(type.__setattr__, one), vars(one), None)
                self._next += one.__bases__
        elif issubclass(kind, GENERATORS):
            self._back.append(rewinding(one))
        else:
            self._container(one, kind)
            self._attributes(one, kind)

    def _function(self, one: FunctionType) -> None:
        self._next += one.__closure__ or ()
        self._next += one.__defaults__ or ()
        self._dict(one.__kwdefaults__ or {})
        self._dict(one.__dict__)
        if _is_of_library(str(one.__globals__.get("__name__"))):
            return
        # In its own module, and in the user's modules that it names.
        named, spaces = frozenset(names_in(one.__code__)), [one.__globals__]
        for name in named:
            value = one.__globals__.get(name)
            if type(value) is ModuleType and not _is_of_library(value.__name__):
                spaces.append(vars(value))
        for space in spaces:
            self._names(space.__setitem__, space, named)

    def _names(
        self, set: Callable[[str, Any], None], space: Mapping[str, Any], names: Iterable[str] | None
    ) -> None:
        """Record the values of `names` in a module, or of all but the special names of a class."""
        if names is None:
            names = [name for name in space if not (name.startswith("__") and name.endswith("__"))]
        before = {name: space.get(name, _MISSING) for name in names}
        self._back.append(partial(_rebind, set, space, before))
        self._next += (value for value in before.values() if type(value) is not ModuleType)

    def _cell(self, cell: CellType) -> None:
        try:
            before = cell.cell_contents
        except ValueError:  # the cell is empty
            before = _MISSING
        self._back.append(partial(_refill, cell, before))
        self._next.append(before)

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
        state = object.__getstate__(one)
        if isinstance(state, tuple):  # the second element holds the slots
            self._back.append(partial(_refill_slots, one, state[1]))
            self._next += state[1].values()

    def _dict(self, one: dict[Any, Any], but: Iterable[str] = ()) -> None:
        before = dict(one.items()) if isinstance(one, OrderedDict) else dict.copy(one)
        self._back.append(partial(_reset_dict, one, before))
        if len(before) <= _MANY:
            self._next += (value for name, value in before.items() if name not in but)

    def _container(self, one: Any, kind: type) -> None:
        if issubclass(kind, dict):
            self._dict(one)
        elif issubclass(kind, tuple | frozenset | list | set | deque):
            before = tuple(one)
            if issubclass(kind, list | set | deque):
                self._back.append(refilling(one))
            if len(before) <= _MANY:
                self._next += before

    def _tensor(self, one: Tensor) -> None:
        if one.is_leaf:
            self._leaves.append(one)
            self._back.append(partial(_reset_leaf, one, one.grad, one.requires_grad))
        self._dict(_dict_of(one))
        frozen = type(one) is nn.Parameter and not one.requires_grad  # such as a teacher
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
                if torch._debug_has_internal_overlap(one) != 1:  # an expanded tensor is a view
                    # On the host, since the device may be full. The version counter cannot show
                    # whether a tensor was written to: some kernels write without changing it.
                    self._back.append(partial(_copy_into, one, one.detach().cpu().clone()))
            else:
                self._back.append(partial(np.copyto, one, one.copy()))


# ---------------------------------------------------------------------------------------- restoring


def _refill(cell: CellType, before: Any) -> None:
    if before is not _MISSING:
        cell.cell_contents = before
        return
    with suppress(ValueError):  # the cell is still empty
        del cell.cell_contents


def _rebind(set: Callable[[str, Any], None], space: Any, before: Mapping[str, Any]) -> None:
    for name, value in before.items():
        if value is _MISSING:
            space.pop(name, None)  # of a module: names of a class all existed
        elif space.get(name, _MISSING) is not value:
            set(name, value)


def _refill_slots(one: Any, before: Mapping[str, Any]) -> None:
    state = object.__getstate__(one)
    for name in state[1].keys() - before.keys() if isinstance(state, tuple) else ():
        object.__delattr__(one, name)
    for name, value in before.items():
        object.__setattr__(one, name, value)


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


def _reset_leaf(one: Tensor, gradient: Tensor | None, requires_grad: bool) -> None:
    if one.grad is not gradient:
        one.grad = gradient
    if one.requires_grad != requires_grad:
        one.requires_grad_(requires_grad)


def _copy_into(one: Tensor, before: Tensor) -> None:
    if one.shape == before.shape:
        one.data.copy_(before)  # through .data: a graph may have saved this version


def _forget(cached: Any, misses: int) -> None:
    """Clear the cache of `cached` if entries were added: they may be fake, and computing them again is
    harmless."""
    if cached.cache_info().misses != misses:
        cached.cache_clear()


# --------------------------------------------------------------------------------------- searching


def names_in(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes in `code` and in the functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def _dict_of(one: Any) -> dict[str, Any]:
    try:
        return object.__getattribute__(one, "__dict__")
    except AttributeError:
        return {}


@functools.cache
def _is_of_library(module: str) -> bool:
    if module == "__main__":
        return False
    top = module.partition(".")[0]
    if top in _LIBRARIES or top in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)

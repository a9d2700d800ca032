"""Recall: the results of operations on fake tensors, known from the shapes that they are given.

What an operation on fake tensors returns depends on the shapes, strides and dtypes of its arguments and
on nothing else. torch works it out anew for most operations, or keeps it under keys that take as long
to make. A model of many equal blocks, traced a dozen times, asks the same again and again. So results
are kept here, as little as it takes to make them again: which argument comes back, or which geometry a
new tensor has, on a storage of its own or on that of the only argument.

Whatever is not that plain (results that share a storage, arguments that are resized, tensors that carry
a value) is left to torch every time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils._python_dispatch import TorchDispatchMode

_PLAIN = frozenset(
    (
        int,
        float,
        bool,
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    )
)
_DEVICE_OF: Any = torch.ops.prim.device.default
_FUSED = frozenset(
    getattr(torch.ops.aten, f"_fused_{name}_") for name in ("adam", "adamw", "sgd", "adagrad")
)
"""Updates in place that make nothing; not all of them run on fake tensors."""
_NoFunctions: Any = torch._C.DisableTorchFunction

Geometry = tuple[torch.Size, tuple[int, ...], int, torch.dtype, torch.device]
"""Shape, strides, offset, dtype and device."""


@dataclass(frozen=True, slots=True)
class _Result:
    """One result: argument number `given` itself, or a new tensor, on the storage of the only argument
    if it is a `view`."""

    given: int = -1
    geometry: Geometry | None = None
    view: bool = False


@dataclass(frozen=True, slots=True)
class _Answer:
    """What an operation returns: results in a container, or one without, or None."""

    results: tuple[_Result, ...]
    container: type | None


class Recalling(TorchDispatchMode):
    """Where nothing but a model is made: operations by `recall`, on tensors of `fake`."""

    def __init__(self, fake: FakeTensorMode, recall: Recall) -> None:
        super().__init__()
        self._fake = fake
        self._recall = recall

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation on fake tensors."""
        return self._recall.run(self._fake, func, args, kwargs)


class Recall:
    """See the module. One object serves any number of traces."""

    def __init__(self) -> None:
        self._known: dict[Any, _Answer | None] = {}

    def run(self, fake: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """What `func` returns on tensors of `fake`, which is the mode that runs it. Raises whatever it
        raises."""
        if func is _DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if getattr(func, "_overloadpacket", None) in _FUSED:
            return None
        kwargs = kwargs or {}
        given: list[FakeTensor] = []
        with _NoFunctions():  # what is asked of tensors here concerns no mode around
            asked = _key(func, args, kwargs, given)
            answer = self._known.get(asked)
            if answer is not None:
                return _made(fake, answer, given)
        if asked is None or asked in self._known:
            return func(*args, **kwargs)
        before = [_geometry(tensor) for tensor in given]
        result = func(*args, **kwargs)
        self._known[asked] = _answer(result, given, before)
        return result


def _key(func: Any, args: tuple[Any, ...], kwargs: Any, given: list[FakeTensor]) -> Any:
    """All that the result depends on, or None if that is not plain. Tensors are added to `given`."""
    if type(func) is not OpOverload:
        return None
    key: list[Any] = [func, torch.get_default_dtype()]
    if not _read(args, key, given) or (kwargs and not _read(_flat(kwargs), key, given)):
        return None
    if len(given) > 1:
        key.append(len(set(map(id, given))))
    return tuple(key)


def _flat(kwargs: dict[str, Any]) -> list[Any]:
    return [part for pair in kwargs.items() for part in pair]


def _read(values: Iterable[Any], key: list[Any], given: list[FakeTensor]) -> bool:
    """Add `values` to `key`, and their tensors to `given`; False if they are not plain enough."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided:
                return False
            if value.dtype.is_complex:  # may be conjugated, which is not in the key
                return False
            key.append(_geometry(value))
            given.append(value)
        elif kind in _PLAIN:
            key.append(kind)  # 1, 1.0 and True are equal
            key.append(value)
        elif kind is list or kind is tuple:
            key.append(len(value))
            if not _read(value, key, given):
                return False
        else:
            return False
    return True


def _geometry(tensor: FakeTensor) -> Geometry:
    return (
        tensor.shape,
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.fake_device,
    )


def _answer(result: Any, given: Sequence[FakeTensor], before: list[Geometry]) -> _Answer | None:
    """How to make `result` again, or None if that is not plain."""
    if before != [_geometry(tensor) for tensor in given]:
        return None
    if result is None:
        return _Answer((), None)
    if type(result) is FakeTensor:
        parts, container = [result], None
    elif type(result) in (list, tuple):
        parts, container = list(result), type(result)
    else:
        return None
    theirs = {tensor.untyped_storage()._cdata for tensor in given}
    new: set[int] = set()
    found: list[_Result] = []
    for part in parts:
        one = _plain(part, given, theirs, new)
        if one is None:
            return None
        found.append(one)
    return _Answer(tuple(found), container)


def _plain(
    part: Any, given: Sequence[FakeTensor], theirs: set[int], new: set[int]
) -> _Result | None:
    if type(part) is not FakeTensor or part.constant is not None or part.dtype.is_complex:
        return None
    if part.layout is not torch.strided:
        return None
    for number, tensor in enumerate(given):
        if part is tensor:
            return _Result(number)
    storage = part.untyped_storage()
    if storage._cdata in theirs:
        return _Result(-1, _geometry(part), view=True) if len(given) == 1 else None
    if storage._cdata in new or storage.nbytes() != _spanned(part):
        return None
    new.add(storage._cdata)
    return _Result(-1, _geometry(part))


def _spanned(tensor: Tensor) -> int:
    """Bytes of the storage that a new tensor of this geometry gets; -1: not at its beginning."""
    if tensor.storage_offset():
        return -1
    if not tensor.numel():
        return 0
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def _made(fake: FakeTensorMode, answer: _Answer, given: Sequence[FakeTensor]) -> Any:
    results = answer.results
    if answer.container is None:
        if not results:
            return None
        one = results[0]
        if one.geometry is None:
            return given[one.given]
        return _tensor(fake, one, given)
    return answer.container(
        given[one.given] if one.geometry is None else _tensor(fake, one, given) for one in results
    )


def _tensor(fake: FakeTensorMode, one: _Result, given: Sequence[FakeTensor]) -> FakeTensor:
    assert one.geometry is not None
    shape, strides, offset, dtype, device = one.geometry
    storage = given[0].untyped_storage() if one.view else None
    with in_kernel_invocation_manager(fake):
        elem = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        if storage is not None:
            elem.set_(storage, offset, shape, strides)
    return FakeTensor(fake, elem, device)

"""Cache of the results of operations on fake tensors.

The result of an operation on fake tensors depends only on the shapes, strides and dtypes of its
arguments. PyTorch's own cache builds keys that take about as long as the operation, so
`FakeOpCache` replaces it: a model of many equal blocks is planned in half the time (docs/log.md).
An entry describes how to create the result again: which argument is returned, or the geometry of a
new tensor, with a new storage or with the storage of the only argument.

Results that share a storage, arguments that are resized and tensors that carry a value are not
cached. Shapes that depend on values are handled in `data_dependent_shapes`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from anybatch.estimate.data_dependent_shapes import NotFollowed, Values, chooses

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
DEVICE_OF: Any = torch.ops.prim.device.default
"""Queries the device of a tensor and computes nothing. This is the most frequent operation."""
READ: Any = torch.ops.aten._local_scalar_dense.default
"""Reads the value of a tensor with one element: see `FakeOpCache.number`."""

_FUSED = frozenset(
    getattr(torch.ops.aten, f"_fused_{name}_") for name in ("adam", "adamw", "sgd", "adagrad")
)
"""In-place updates without results; not all of them run on fake tensors."""
_RNN_MODE, _LSTM = 14, 2
"""Position of the mode among the arguments of oneDNN's recurrent layers, and the mode of the LSTM."""

_LOG = logging.getLogger("torch._subclasses.fake_tensor")

_META = torch.device("meta")
_NoFunctions: Any = torch._C.DisableTorchFunction
_NoModes: Any = torch._C._DisableTorchDispatch
_protect: Any = torch._C._set_throw_on_mutable_data_ptr

Geometry = tuple[torch.Size, tuple[int, ...], int, torch.dtype, torch.device]
"""Shape, strides, offset, dtype and device. The offset of a view in a `_Result` is relative to that
of the argument whose storage it uses."""


@dataclass(frozen=True, slots=True)
class _Result:
    """One result: the argument with index `given`, or a new tensor, which uses the storage of the
    only argument if it is a `view`."""

    given: int = -1
    geometry: Geometry | None = None
    view: bool = False


@dataclass(frozen=True, slots=True)
class _Answer:
    """Return value of an operation: several results in a container, or a single one; each may be
    None."""

    results: tuple[_Result | None, ...]
    container: type | None


def fake_mode() -> FakeTensorMode:
    """Return a mode without PyTorch's own cache, which `FakeOpCache` replaces. Real tensors are
    converted to fake ones."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


class CachedOps(TorchDispatchMode):
    """Runs operations on tensors of `fake` through `op_cache`, without recording them. Reading a
    value raises unless `may_read` is set, so that no model is built from placeholder values."""

    def __init__(self, fake: FakeTensorMode, op_cache: FakeOpCache, may_read: bool = False) -> None:
        super().__init__()
        self._fake = fake
        self._op_cache = op_cache
        self._may_read = may_read

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation on fake tensors."""
        if func is READ and self._may_read:
            return self._op_cache.number(args[0])
        return self._op_cache.run(self._fake, func, args, kwargs)


class FakeOpCache:
    """Results of operations on fake tensors; see the module. One object serves any number of
    traces.

    Attributes:
        values: tracked values, once `follow` has been called.
    """

    def __init__(self) -> None:
        self.values: Values | None = None
        self._has_chosen = False
        self._known: dict[Any, _Answer | None] = {}
        self._states: dict[tuple[int, torch.device], dict[str, Any]] = {}

    def run(self, fake: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return the result of `func` on tensors of `fake`, which is the mode that runs it. Raises
        whatever `func` raises."""
        if func is DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if self.values is not None and type(func) is OpOverload:
            return self.values.run(partial(self._run, fake), func, args, kwargs or {})
        return self._run(fake, func, args, kwargs or {})

    def follow(self) -> None:
        """Track values from now on."""
        self.values = Values()

    def number(self, tensor: Tensor) -> Any:
        """Return the value read from `tensor`: the actual value if it is known, otherwise 1.

        Raises `NotFollowed` if the value may be known once values are tracked.
        """
        if self.values is not None and (known := self.values.of(tensor)) is not None:
            with _NoModes():
                return known.item()
        if tensor.is_floating_point():
            return 1.0
        if self.values is None and self._has_chosen:
            raise NotFollowed
        return tensor.dtype == torch.bool or 1

    def _run(self, fake: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        given: list[FakeTensor] = []
        with _NoFunctions():  # queries of tensors here must not reach the surrounding modes
            asked = _key(func, args, kwargs, given)
            answer = self._known.get(asked)
            if answer is not None:
                return self._made(fake, answer, given)
        if getattr(func, "_overloadpacket", None) in _FUSED:
            return None
        if asked is None or asked in self._known:
            return _quietly(func, args, kwargs)
        if (rule := _RULES.get(func)) is not None and not kwargs:
            with _NoFunctions():
                answer = rule(*args)
                if answer is not None:
                    self._known[asked] = answer
                    return self._made(fake, answer, given)
        self._has_chosen = self._has_chosen or chooses(func)
        before = [_geometry(tensor) for tensor in given]
        result = _quietly(func, args, kwargs)
        self._known[asked] = _answer(result, given, before)
        return result

    def _made(self, fake: FakeTensorMode, answer: _Answer, given: Sequence[FakeTensor]) -> Any:
        if answer.container is None:
            return self._one(fake, answer.results[0], given)
        return answer.container(self._one(fake, one, given) for one in answer.results)

    def _one(self, fake: FakeTensorMode, one: _Result | None, given: Sequence[FakeTensor]) -> Any:
        if one is None:
            return None
        return given[one.given] if one.geometry is None else self._tensor(fake, one, given)

    def _tensor(
        self, fake: FakeTensorMode, one: _Result, given: Sequence[FakeTensor]
    ) -> FakeTensor:
        """Return a new fake tensor, built without the constructor of its class, which takes four
        times as long."""
        assert one.geometry is not None
        shape, strides, offset, dtype, device = one.geometry
        with _NoModes():
            elem = torch.empty_strided(shape, strides, dtype=dtype, device=_META)
            if one.view:
                base = given[0]
                offset += int(base.storage_offset())
                elem.set_(base.untyped_storage(), offset, shape, strides)
            state = self._states.get((id(fake), device))
            if state is None:
                made = FakeTensor(fake, elem, device)
                self._states[id(fake), device] = dict(made.__dict__)  # keeps `fake` and so its id
                return made
            made: Any = Tensor._make_subclass(
                FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=device
            )
        _protect(made)
        made.__dict__.update(state)
        return made


def _quietly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` with PyTorch's log disabled: it logs the traceback of an error in a kernel, which
    is also raised, and reported in a sentence."""
    before, _LOG.disabled = _LOG.disabled, True
    try:
        return func(*args, **kwargs)
    finally:
        _LOG.disabled = before


def _key(func: Any, args: tuple[Any, ...], kwargs: Any, given: list[FakeTensor]) -> Any:
    """Return everything that the result depends on, or None if it is not plain. Tensors are added
    to `given`. Where a tensor begins in its storage matters for views only, so that slices of one
    batch (ghost batches) share an entry."""
    if type(func) is not OpOverload:
        return None
    # Identified by id, since PyTorch never frees operations, and hashing them takes long.
    key: list[Any] = [id(func), torch.get_default_dtype()]
    if not _read(args, key, given) or (kwargs and not _read(_flat(kwargs), key, given)):
        return None
    if func.is_view:
        key += [int(tensor.storage_offset()) for tensor in given]
    if len(given) > 1:
        key.append(len(set(map(id, given))))
    return tuple(key)


def _flat(kwargs: dict[str, Any]) -> list[Any]:
    return [part for pair in kwargs.items() for part in pair]


def _read(values: Iterable[Any], key: list[Any], given: list[FakeTensor]) -> bool:
    """Append `values` to `key` and their tensors to `given`. Returns False if a value is not plain."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided:
                return False
            if value.dtype.is_complex:  # may be conjugated, which is not in the key
                return False
            key += (value.shape, value.stride(), value.dtype, value.fake_device)
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
    """Return how to create `result` again, or None if it is not plain."""
    if before != [_geometry(tensor) for tensor in given]:
        return None
    if result is None or type(result) is FakeTensor:
        parts, container = [result], None
    elif type(result) in (list, tuple):
        parts, container = list(result), type(result)
    else:
        return None
    arguments = _Arguments(given)
    found: list[_Result | None] = []
    for part in parts:
        one = None if part is None else _plain(part, arguments)
        if one is None and part is not None:
            return None
        found.append(one)
    return _Answer(tuple(found), container)


class _Arguments:
    """Tensors given to an operation, and the storages of its results so far."""

    def __init__(self, given: Sequence[FakeTensor]) -> None:
        self.numbers: dict[int, int] = {id(tensor): i for i, tensor in enumerate(given)}
        self.storages: set[int] = {tensor.untyped_storage()._cdata for tensor in given}
        self.only: FakeTensor | None = given[0] if len(self.numbers) == 1 else None
        self.new: set[int] = set()


def _plain(part: Any, given: _Arguments) -> _Result | None:
    if type(part) is not FakeTensor or part.constant is not None or part.dtype.is_complex:
        return None
    if part.layout is not torch.strided:
        return None
    if (number := given.numbers.get(id(part))) is not None:
        return _Result(number)
    storage = part.untyped_storage()
    if storage._cdata in given.storages:
        if given.only is None:
            return None
        shape, strides, offset, dtype, device = _geometry(part)
        offset -= int(given.only.storage_offset())
        return _Result(-1, (shape, strides, offset, dtype, device), view=True)
    if storage._cdata in given.new or storage.nbytes() != _spanned(part):
        return None
    given.new.add(storage._cdata)
    return _Result(-1, _geometry(part))


def _lstm_backward(*args: Any) -> _Answer | None:
    """Gradients of the inputs, of both weights and biases, and of both states."""
    if args[_RNN_MODE] != _LSTM:
        return None
    inputs, recurrent, hidden, bias, _, *states = args[:7]
    given = inputs, recurrent, hidden, bias, bias, *states
    return _Answer(tuple(_new(tensor.shape, tensor) for tensor in given), tuple)


def _new(shape: Sequence[int], like: FakeTensor, dtype: torch.dtype = torch.float32) -> _Result:
    """Return a contiguous tensor on the device of `like`."""
    return _Result(-1, (torch.Size(shape), _contiguous(shape), 0, dtype, like.fake_device))


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a new contiguous tensor."""
    return tuple(accumulate(reversed((*shape[1:], 1)), mul))[::-1]


def _grouped_product(
    left: FakeTensor, right: FakeTensor, offsets: FakeTensor | None = None, *_rest: Any
) -> _Answer | None:
    """Products of groups of rows with one matrix per group, or sums of the outer products of each
    group. Rows begin at multiples of 16 bytes. On fake tensors PyTorch accepts only bfloat16, and
    does not align rows (torch 2.13)."""
    if left.dtype != right.dtype:
        return None
    if left.dim() == right.dim() == 2:
        if offsets is None:
            return None
        shape = offsets.size(0), left.size(0), right.size(1)
    elif left.dim() == 2:
        shape = left.size(0), right.size(-1)
    else:
        rows = left.shape[:2] if right.dim() == 3 else left.shape[1:2]
        shape = *rows, right.size(-1)
    per_row = 16 // left.element_size()
    width = -(-shape[-1] // per_row) * per_row
    strides = _contiguous((*shape[:-1], width))
    geometry = torch.Size(shape), strides, 0, left.dtype, left.fake_device
    return _Answer((_Result(-1, geometry),), None)


def _batch_norm(
    value: FakeTensor, weight: Any, _bias: Any, _mean: Any, _variance: Any, training: bool, *_: Any
) -> _Answer | None:
    """The normalized values, the mean, and the inverse of the standard deviation."""
    if not training or not _is_dense(value):
        return None
    saved = _new((value.size(1),), value, value.dtype)
    return _Answer((_like(value), saved, saved), tuple)


def _batch_norm_backward(
    gradient: FakeTensor, value: FakeTensor, weight: FakeTensor | None, *rest: Any
) -> _Answer | None:
    """Gradients of the input, the weight and the bias."""
    alike = gradient.stride() == value.stride() and gradient.dtype == value.dtype
    if weight is None or not alike or not _is_dense(value) or not all(rest[-1]):
        return None
    per_channel = _new(weight.shape, weight, weight.dtype)
    return _Answer((_like(value), per_channel, per_channel), tuple)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether `tensor` is contiguous, or its elements neither overlap nor leave gaps and no
    dim of size one leaves its stride open."""
    if tensor.stride() == _contiguous(tensor.shape):
        return True
    return 1 not in tensor.shape and torch.ops.aten.is_non_overlapping_and_dense(tensor)


def _like(tensor: FakeTensor) -> _Result:
    return _Result(-1, (tensor.shape, tensor.stride(), 0, tensor.dtype, tensor.fake_device))


_RULES: dict[Any, Callable[..., _Answer | None]] = {
    torch.ops.aten.native_batch_norm.default: _batch_norm,
    torch.ops.aten.native_batch_norm_backward.default: _batch_norm_backward,
    torch.ops.aten._grouped_mm.default: _grouped_product,
    torch.ops.aten.mkldnn_rnn_layer_backward.default: _lstm_backward,
}
"""Grouped products, which PyTorch rejects on fake tensors of some dtypes; the LSTM's backward, in
which the biases share one gradient on fake tensors, but not on real ones; and BatchNorm, which
PyTorch decomposes into Python functions that take 10 ms on fake tensors."""


def _spanned(tensor: Tensor) -> int:
    """Return the storage size in bytes of a new tensor with this geometry, or -1 if the tensor does
    not begin at the start of its storage."""
    if tensor.storage_offset():
        return -1
    if not tensor.numel():
        return 0
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()

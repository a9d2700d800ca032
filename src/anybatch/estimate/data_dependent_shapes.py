"""Data-dependent shapes: the values on which shapes depend, tracked in a trace of fake tensors.

A mixture of experts sends each token to some experts, and the number of tokens of an expert depends
on data: `nonzero` has no result on fake tensors. Such a trace is repeated with these values, which
are few integers and booleans. Each operation on tensors whose values are known is also computed for
real, on tensors in host memory, so views, in-place changes and counts are consistent.

Two kinds of values are unknown, and are assumed:

    a choice  (`topk`, `argmax`, `sort`, ... of floating-point values): each is equally frequent
    a mask    computed from unknown values: it selects everything

`notices` lists these assumptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)

_aten: Any = torch.ops.aten
_NoModes: Any = torch._C._DisableTorchDispatch
_CPU = torch.device("cpu")

_MOST = 1 << 25
"""Maximum number of elements that are tracked in one operation, so that tracking takes no more
memory than training."""

_NAME = "anybatch_value"

_Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class NotFollowed(Exception):
    """A trace reads a value that would be known if values were tracked."""


UNKNOWN = (NotFollowed, DynamicOutputShapeException, DataDependentOutputException)
"""Exceptions of a trace that may succeed if it tracks values."""


def _chosen_dim(position: int, default: int | None) -> Callable[[Any, Any], int | None]:
    def dim(args: Any, kwargs: Any) -> int | None:
        if len(args) > position:
            return args[position]
        return kwargs.get("dim", default)

    return dim


# Operations that choose by floating-point values: how to find their dim, and the index of the result.
_CHOICES: dict[Any, tuple[Callable[[Any, Any], int | None], int | None]] = {
    _aten.topk.default: (_chosen_dim(2, -1), 1),
    _aten.argmax.default: (_chosen_dim(1, None), None),
    _aten.argmin.default: (_chosen_dim(1, None), None),
    _aten.max.dim: (_chosen_dim(1, None), 1),
    _aten.min.dim: (_chosen_dim(1, None), 1),
    _aten.sort.default: (_chosen_dim(1, -1), 1),
    _aten.sort.stable: (lambda _args, kwargs: kwargs.get("dim", -1), 1),
    _aten.argsort.default: (_chosen_dim(1, -1), None),
    _aten.multinomial.default: (lambda _args, _kwargs: -1, None),
}


def chooses(func: Any) -> bool:
    """Return whether `func` computes indices, on which shapes may depend, from floating-point
    values."""
    return func in _CHOICES


class Values:
    """Values tracked in traces; see the module. One object serves any number of traces."""

    def __init__(self) -> None:
        self._assumed: dict[str, None] = {}
        self._spoilt: dict[int, Any] = {}  # storages whose values are no longer known

    @property
    def notices(self) -> tuple[str, ...]:
        """The assumptions that were made, as sentences."""
        return tuple(self._assumed)

    def run(self, run: _Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func` on fake tensors by calling `run`, and attach the values of the result if they
        are known. Raises whatever `run` raises."""
        if torch.Tag.dynamic_output_shape in func.tags:
            made = self._of_any_size(run, func, args, kwargs)
            if made is not None:
                return made
        if func is _aten.index.Tensor:
            args = (args[0], self._positions(run, args[1]))
        result = run(func, args, kwargs)
        if func in _CHOICES and self.of(args[0]) is None:
            self._choose(func, args, kwargs, result)
        else:
            self._follow(func, args, kwargs, result)
        return result

    def of(self, tensor: Any) -> Tensor | None:
        """Return the values of `tensor` in host memory, or None if they are not known."""
        if type(tensor) is not FakeTensor:
            return tensor if isinstance(tensor, Tensor) and not tensor.is_floating_point() else None
        value = tensor.__dict__.get(_NAME)
        if value is None:
            return tensor.constant
        return None if value.untyped_storage()._cdata in self._spoilt else value

    # ---------------------------------------------------------------------------------- known values

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Compute the values of `result` if those of all arguments are known."""
        given = list(_tensors((args, kwargs)))
        made = list(_tensors(result))
        is_known = bool(made) and all(self.of(tensor) is not None for tensor in given)
        if not given:  # a factory function: only values that shapes may depend on
            is_known = is_known and not any(t.is_floating_point() or t.is_complex() for t in made)
        if func is _aten.new_empty.default:  # creates batches: uninitialized values affect no shape
            is_known = False
        if torch.Tag.nondeterministic_seeded in func.tags or sum(t.numel() for t in made) > _MOST:
            is_known = False
        found = self._computed(func, args, kwargs) if is_known else None
        if found is None:
            self._forget(func, args)
            return
        for tensor, value in zip(made, _tensors(found), strict=True):
            tensor.__dict__[_NAME] = value

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run `func` on the values themselves. Returns None if that fails, which can happen after
        an assumed choice that the model could not make."""
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if "device" in kwargs:
            kwargs["device"] = _CPU
        try:
            with _NoModes():
                return func(*self._numbers(args), **self._numbers(kwargs))
        except (RuntimeError, IndexError, ValueError, TypeError):
            return None

    def _numbers(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.of(value)
        if isinstance(value, dict):
            return {name: self._numbers(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._numbers(part) for part in value)
        return _CPU if isinstance(value, torch.device) else value

    def _forget(self, func: Any, args: tuple[Any, ...]) -> None:
        """Mark tensors that are overwritten with unknown values, and their views, as unknown."""
        if not func._schema.is_mutable:
            return
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(value):
                    known = self.of(tensor)
                    if known is not None:
                        storage = known.untyped_storage()
                        self._spoilt[storage._cdata] = storage

    # ----------------------------------------------------------------------------------- assumptions

    def _choose(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Assume that each choice is made equally often, and never twice in the same row."""
        find_dim, place = _CHOICES[func]
        chosen = result if place is None else result[place]
        dim, number = find_dim(args, kwargs), args[0].numel()
        if dim is not None and args[0].dim():
            number = args[0].size(dim)
        if chosen.numel() > _MOST or not number:
            return
        self._assumed[
            "Where the model chooses by its data (the experts of a token, say), the estimate takes each"
            " choice to be made equally often."
        ] = None
        with _NoModes():
            if dim is None or chosen.dim() < args[0].dim():  # one choice per row
                value = torch.arange(chosen.numel()).remainder(number).view(chosen.shape)
            else:
                last = chosen.movedim(dim, -1).shape
                # A full order starts elsewhere in each row; a partial one continues in the next.
                rows, per_row = chosen.numel() // max(1, last[-1]), last[-1]
                step = 1 if per_row == number else per_row
                starts = torch.arange(rows).mul(step).unsqueeze(1)
                value = (
                    (starts + torch.arange(per_row)).remainder(number).view(last).movedim(-1, dim)
                )
        chosen.__dict__[_NAME] = value

    def _of_any_size(self, run: _Run, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a function whose output size depends on data, or None if nothing is
        known about it."""
        given = list(_tensors((args, kwargs)))
        if given and all(self.of(tensor) is not None for tensor in given):
            found = self._computed(func, args, kwargs)
            if found is not None:
                fakes = [_like(run, value, _home(given[0])) for value in _tensors(found)]
                for fake, value in zip(fakes, _tensors(found), strict=True):
                    fake.__dict__[_NAME] = value
                return fakes[0] if isinstance(found, Tensor) else type(found)(fakes)
        if func is _aten.nonzero.default:
            self._assume_everything()
            shape = (args[0].numel(), args[0].dim())
            return run(
                _aten.empty_strided.default,
                (list(shape), [1, max(1, shape[0])]),
                {"dtype": torch.int64, "device": _home(args[0])},
            )
        if func is _aten.masked_select.default:
            with _NoModes():
                shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            mask = self.of(args[1])
            if mask is None:
                self._assume_everything()
                count = shape.numel()
            else:
                with _NoModes():
                    count = int(mask.expand(shape).sum())
            options = {"dtype": args[0].dtype, "device": _home(args[0])}
            return run(_aten.empty.memory_format, ([count],), options)
        return None

    def _assume_everything(self) -> None:
        self._assumed[
            "Where the model picks elements by a mask that is data, the estimate takes it to pick all"
            " of them, which is the most."
        ] = None

    def _positions(self, run: _Run, indices: Iterable[Any]) -> list[Any]:
        """Return `indices` with each mask replaced by the positions that it selects."""
        found: list[Any] = []
        for index in indices:
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                picked = self.run(run, _aten.nonzero.default, (index,), {})
                found += [
                    self.run(run, _aten.select.int, (picked, 1, dim), {})
                    for dim in range(index.dim())
                ]
            else:
                found.append(index)
        return found


def _like(run: _Run, value: Tensor, device: torch.device) -> Any:
    """Return a fake tensor with the geometry of `value`."""
    options = {"dtype": value.dtype, "device": device}
    return run(_aten.empty_strided.default, (list(value.shape), list(value.stride())), options)


def _home(tensor: Tensor) -> torch.device:
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def _tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in the arguments or results of an operation."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)

"""Cuts a collated batch into micro-batches, for any nesting that the collate function returns.

Tensors and arrays are cut along dim 0, as views. Mappings, named tuples and dataclasses are structures:
they are cut part by part and rebuilt with the same type. None, strings, numbers, 0-dim tensors,
functions and other objects belong to the whole batch and are passed through.

A list or tuple can be interpreted in two ways: as a *structure*, whose members are parts of every
sample (`[x, y]`, as `default_collate` returns it), or as *samples*, where each member is one sample
(`[target, target, ...]` in detection, strings, sequences of unequal length). The rule:

- members of different kinds (dtype and number of dims count for tensors): a structure;
- tensors of one kind: a structure if their first sizes agree, otherwise samples;
- mappings: samples;
- tuples of one kind in a list: samples (the result of a collate function that returns its list); other
  lists or tuples: a structure;
- strings, numbers, 0-dim tensors and other objects: samples.

Sparse and nested tensors and a `PackedSequence` are cut in the same way, but into copies.

Members that are None are ignored. If the usual interpretation contradicts the rest of the batch and the
other one does not, the other one is used: in `(images, targets)`, a tuple of N images `[3, H, W]` next
to N dicts is a list of N samples, not a structure of batch size 3. This holds for 3 images too, where
both interpretations give the same size, since a structure never comes with a list of dicts.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from anybatch.errors import DataError

Part = tuple[str, Any]  # the expression that accesses it in its parent, and the value

_KIND_MEMBERS = 8  # enough to distinguish a pair from a sequence; token lists are long

REMEDY = (
    "every part must have the samples on dim 0, or as the members of a list; what does not belong"
    " to single samples goes into a 0-dim tensor, a number or an object; of other batches (graphs, time"
    " first) Step is told by count_samples and slice_batch"
)


def batch_size(batch: Any) -> int:
    """Returns the number of samples in `batch`.

    Raises `DataError` if its parts disagree, with the size of each part, or if no part has samples.
    """
    if isinstance(batch, Tensor) and batch.dim():
        return num_rows(batch)
    sizes = _sizes(batch)
    if sizes:
        return min(sizes, key=lambda size: sizes[size])
    found = list(_leaves(batch, "batch"))
    if not found:
        raise DataError(
            f"the batch, a value of type {type(batch).__name__}, holds no tensor, array or list,"
            f" so it has no samples: return tensors from collate; {REMEDY}."
        )
    listing = ", ".join(f"{path} has {size}" for path, size in found)
    raise DataError(f"the parts of the batch disagree on its size: {listing}; {REMEDY}.")


def samples_left(batch: Any, num_given: int) -> int:
    """Returns the number of samples in a batch collated from `num_given` samples: fewer if the collate
    function has dropped some, as far as the batch shows."""
    with suppress(DataError):
        if num_given not in _sizes(batch):  # with another interpretation of a list, say
            return min(batch_size(batch), num_given)
    return num_given


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """Returns samples `start` to `stop` of `batch`, with the same structure; tensors and arrays are
    views.

    Raises `DataError` as `batch_size` does.
    """
    size = batch_size(batch)
    return _sliced(batch, size, has_records(batch, size), start, stop)


def may_be_parts(batch: Any) -> bool:
    """Returns whether `batch` is a list or tuple of two or three tensors with unequal numbers of rows,
    which are taken as samples: they may be parts of unequal size, which cannot be cut."""
    is_short = _is_sequence(batch) and 2 <= len(batch) <= 3
    return is_short and isinstance(batch[0], Tensor) and _readings(batch) == (True,)


def may_be_samples(batch: Any) -> bool:
    """Returns whether `batch` is a list or tuple of tensors of one shape, which is taken as a
    structure, and whose members look like samples: images, or more than there are rows."""
    members = [one for one in batch if one is not None] if _is_sequence(batch) else []
    if len(members) < 2 or _readings(members) != (False, True):
        return False
    if not isinstance(members[0], Tensor) or members[0].is_nested:
        return False
    shape = members[0].shape
    is_image = len(shape) == 3 and shape[0] in (1, 3)
    is_many = len(shape) > 1 and len(members) > shape[0]
    return (is_image or is_many) and all(one.shape == shape for one in members)


def shows_samples(batch: Any) -> bool:
    """Returns whether every part of `batch` consists of samples, and none belongs to the batch as a
    whole."""
    parts = parts_of(batch)
    if parts is None:
        return _has_samples(batch)
    return _has_samples(batch) and all(
        shows_samples(value) or isinstance(value, str) for _, value in parts
    )


def differs(one: Any, other: Any) -> bool:
    """Returns whether batches of the same samples have different values in tensors of the same shape
    (unequal shapes may result from padding). Parts that belong to no single sample are ignored."""
    parts, others = parts_of(one), parts_of(other)
    if parts is None or others is None:
        are_tensors = isinstance(one, Tensor) and isinstance(other, Tensor) and one.dim() > 0
        if not are_tensors or one.shape != other.shape or one.layout is not torch.strided:
            return False
        return not torch.allclose(one, other, equal_nan=True)
    return any(differs(a, b) for (_, a), (_, b) in zip(parts, others, strict=False))


def doubled(batch: Any) -> Any:
    """Returns a copy of `batch` with all of its samples repeated once, with the same structure.

    Raises `DataError` as `batch_size` does.
    """
    size = batch_size(batch)

    def twice(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            padded, lengths = pad_packed_sequence(leaf)
            both = torch.cat([padded, padded], 1), torch.cat([lengths, lengths])
            return pack_padded_sequence(*both, enforce_sorted=False)
        if not isinstance(leaf, Tensor):
            return np.concatenate([leaf, leaf])
        if leaf.is_nested:
            return torch.nested.as_nested_tensor([*leaf.unbind()] * 2, layout=leaf.layout)
        return torch.cat([leaf, leaf])

    return _mapped(batch, size, has_records(batch, size), twice, lambda some: [*some, *some])


class NoSizes(Exception):
    """Raised if a batch of another size cannot be made from a batch: the number of its samples is
    unclear, or a part is of a kind that cannot be created empty."""


def resized(batch: Any, num_samples: int) -> Any:
    """Returns `batch` with `num_samples` samples, for planning, where only shapes matter: tensors are
    new and uninitialized, samples in lists are repeated.

    Raises `NoSizes` if this is not possible.
    """
    try:
        size = batch_size(batch)
    except DataError as error:
        raise NoSizes(str(error)) from error

    def empty(leaf: Any) -> Any:
        is_odd = isinstance(leaf, Tensor) and (leaf.layout is not torch.strided or leaf.is_nested)
        if is_odd or isinstance(leaf, PackedSequence):
            raise NoSizes(f"a {type(leaf).__name__} of another size cannot be made of one")
        shape = (num_samples, *leaf.shape[1:])
        if len(leaf) != size:
            return leaf
        return leaf.new_empty(shape) if isinstance(leaf, Tensor) else np.empty(shape, leaf.dtype)

    def repeated(some: Sequence[Any]) -> Iterator[Any]:
        return (some[i % size] for i in range(num_samples))

    return _mapped(batch, size, has_records(batch, size), empty, repeated)


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Splits `batch` into consecutive pieces of `sizes`, as views; a single piece is the batch itself.

    Raises `DataError` if the sizes do not add up to the batch size, or as `batch_size` does.
    """
    total = sum(sizes)
    if total not in _sizes(batch):
        raise DataError(
            f"the batch has {batch_size(batch)} samples, which cannot be cut into pieces of"
            f" {list(sizes)[:8]}, {total} in all."
        )
    if len(sizes) == 1:
        return [batch]
    stops, among_records = accumulate(sizes), has_records(batch, total)
    return [
        _sliced(batch, total, among_records, stop - n, stop)
        for n, stop in zip(sizes, stops, strict=True)
    ]


def _sliced(batch: Any, size: int, among_records: bool, start: int, stop: int) -> Any:
    offsets: dict[int, Tensor] = {}

    def rows(leaf: Any) -> Any:
        return _rows(leaf, start, stop, offsets)

    return _mapped(batch, size, among_records, rows, lambda some: some[start:stop])


def to_device(batch: Any, device: torch.device | str, non_blocking: bool = False) -> Any:
    """Moves the tensors of `batch` to `device`; returns the batch itself if nothing has to move.

    Arrays are not moved. Other objects are moved by their own `to(device)`, if they have it.
    """
    target = torch.device(device)

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(target, non_blocking=non_blocking)
        to = getattr(leaf, "to", None)
        return to(target) if callable(to) and not isinstance(leaf, type) else leaf

    return map_leaves(batch, move)


def map_leaves(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Applies `function` to every leaf of `batch`; returns the batch itself if no leaf changes."""
    parts = parts_of(batch)
    if parts is None:
        return function(batch)
    mapped = [map_leaves(value, function) for _, value in parts]
    if all(new is old for new, (_, old) in zip(mapped, parts, strict=True)):
        return batch
    return rebuilt(batch, mapped)


def parts_of(node: Any) -> list[Part] | None:
    """Returns the parts of a container, each with the index that accesses it; None for a leaf."""
    kind = type(node)
    if kind is list or kind is tuple:  # the usual case, without the slow checks below
        return [(f"[{i}]", value) for i, value in enumerate(node)]
    if kind is Tensor or isinstance(node, Tensor | PackedSequence):
        return None
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", value) for key, value in node.items()]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return [(f".{name}", value) for name, value in zip(_fields(node), node, strict=True)]
    if isinstance(node, list | tuple):
        return [(f"[{i}]", value) for i, value in enumerate(node)]
    names = names_of_fields(node)
    return None if names is None else [(f".{name}", getattr(node, name)) for name in names]


def names_of_fields(node: Any) -> list[str] | None:
    """Returns the names of the fields of a dataclass instance that are set; None for other objects."""
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        return None
    return [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]


def _fields(node: Any) -> tuple[str, ...]:
    return node._fields  # of a named tuple


def rebuilt(node: Any, values: list[Any]) -> Any:
    """Returns a container like `node` that holds `values`, in the order of `parts_of`. Constructors of
    the user's classes are not run again: they may take other arguments, or change what they are given.
    Other attributes are kept."""
    if isinstance(node, Mapping):
        new = dict(zip(node, values, strict=True))
        if type(node) is dict:
            return new
        if not isinstance(node, MutableMapping):
            return type(node)(new)  # type: ignore[call-arg]
        clone = copy.copy(node)
        for key, value in new.items():  # not by `update`, which transformers' ModelOutput refuses
            clone[key] = value
        return clone
    if isinstance(node, tuple):
        return _rebuilt_tuple(node, values)
    if type(node) is list:
        return values
    clone = copy.copy(node)
    if isinstance(node, list):
        clone[:] = values
        return clone
    for name, value in zip(names_of_fields(node) or (), values, strict=True):
        object.__setattr__(clone, name, value)  # it may be frozen
    return clone


def _rebuilt_tuple(node: tuple[Any, ...], values: list[Any]) -> Any:
    if type(node) is tuple:
        return tuple(values)
    try:
        clone = tuple.__new__(type(node), values)
    except TypeError:  # a tuple that is not written in Python, such as torch.Size
        return type(node)(values)
    if hasattr(node, "__dict__"):
        clone.__dict__.update(node.__dict__)
    return clone


# ---------------------------------------------------------------------------------- batch sizes
#
# A node may have several possible sizes, each with a cost: the number of lists in it that would have
# to be interpreted against the rule. The sizes of a structure are those that all its parts allow, with
# the costs added up; the size of the batch is the cheapest one. An empty dict means "no samples" only
# for a leaf: a structure whose parts disagree has no size either, and `_leaves` distinguishes the two.


def _sizes(node: Any) -> dict[int, int]:
    if isinstance(node, Tensor | np.ndarray | PackedSequence):
        return {num_rows(node): 0} if _has_samples(node) else {}
    parts = parts_of(node)
    if not parts:
        return {}
    if not _is_sequence(node):
        return _common(value for _, value in parts)
    sizes: dict[int, int] = {}
    for cost, as_samples in enumerate(_readings(node)):
        found = {len(node): 0} if as_samples else _common(node)
        cost *= 2 if _are_records(node) else 1  # dicts are the least likely to form a structure
        for size, inner in found.items():
            sizes.setdefault(size, cost + inner)
    return sizes


def _common(values: Any) -> dict[int, int]:
    """Returns the sizes that all values with samples allow."""
    common: dict[int, int] | None = None
    for value in values:
        sizes = _sizes(value)
        if not sizes and not _has_samples(value):
            continue
        if common is None:
            common = sizes
        else:
            common = {n: cost + sizes[n] for n, cost in common.items() if n in sizes}
    return common or {}


def num_rows(leaf: Any) -> int:
    """Returns the number of samples in a tensor or array that has samples, or in a `PackedSequence`."""
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    return int(leaf.size(0)) if isinstance(leaf, Tensor) else len(leaf)


def _rows(leaf: Any, start: int, stop: int, offsets: dict[int, Tensor]) -> Any:
    """Returns samples `start` to `stop` of a tensor or array that has samples, or of a
    `PackedSequence`. `offsets`: see `_nested_rows`."""
    if isinstance(leaf, PackedSequence):
        return _packed_rows(leaf, start, stop)
    if not isinstance(leaf, Tensor):
        return leaf[start:stop]
    if leaf.is_nested:
        return _nested_rows(leaf, start, stop, offsets)
    if leaf.layout is torch.strided:
        return leaf[start:stop]
    return _sparse_rows(leaf, start, stop)


def _packed_rows(leaf: PackedSequence, start: int, stop: int) -> PackedSequence:
    """Returns sequences `start` to `stop`, without padding all of them."""
    if leaf.unsorted_indices is None:
        places = torch.arange(start, stop)
    else:
        places = leaf.unsorted_indices[start:stop].cpu()
    order = places.argsort()  # by length, the longest first
    is_there = places[order] < leaf.batch_sizes[:, None]  # (steps, sequences)
    begins = leaf.batch_sizes.cumsum(0) - leaf.batch_sizes
    elements = (begins[:, None] + places[order])[is_there].to(leaf.data.device)
    sizes = is_there.sum(1)
    home = None if leaf.sorted_indices is None else leaf.sorted_indices.device
    return PackedSequence(
        leaf.data[elements], sizes[sizes > 0], None if home is None else order.to(home)
    )


def _nested_rows(leaf: Any, start: int, stop: int, offsets: dict[int, Tensor]) -> Tensor:
    """Returns rows `start` to `stop` of a nested tensor. `offsets` are those of the same rows of other
    parts of the batch, by the id of their own, since only tensors that share offsets can be added."""
    if leaf.layout is not torch.jagged or leaf._ragged_idx != 1 or leaf.lengths() is not None:
        rows = list(leaf.unbind()[start:stop])
        return torch.nested.as_nested_tensor(rows, layout=leaf.layout)
    own = leaf.offsets()
    begin, end = int(own[start]), int(own[stop])
    shared = offsets.setdefault(id(own), own[start : stop + 1] - begin)
    return torch.nested.nested_tensor_from_jagged(leaf.values()[begin:end], shared)


def _sparse_rows(leaf: Tensor, start: int, stop: int) -> Tensor:
    """Returns rows `start` to `stop` of a sparse tensor. Where the elements are in the order of their
    rows (CSR, coalesced COO), this takes no pass over all of them."""
    size = (stop - start, *leaf.shape[1:])
    if leaf.layout is torch.sparse_csr and leaf.ndim == 2:
        offsets = leaf.crow_indices()[start : stop + 1]
        here = slice(int(offsets[0]), int(offsets[-1]))
        columns, values = leaf.col_indices()[here], leaf.values()[here]
        return torch.sparse_csr_tensor(
            offsets - offsets[0], columns, values, size, check_invariants=False
        )
    if leaf.layout is not torch.sparse_coo or not leaf.is_coalesced():
        some = leaf.to_sparse_coo().narrow_copy(0, start, stop - start)
        return some if leaf.layout is torch.sparse_coo else some.to_sparse(layout=leaf.layout)
    indices = leaf.indices()
    ends = torch.tensor([start, stop], device=indices.device)
    here = slice(*torch.searchsorted(indices[0].contiguous(), ends).tolist())
    rows = indices[:, here].clone()
    rows[0] -= start
    return torch.sparse_coo_tensor(
        rows, leaf.values()[here], size, check_invariants=False, is_coalesced=True
    )


def _has_samples(node: Any) -> bool:
    if isinstance(node, PackedSequence):
        return True
    if isinstance(node, Tensor | np.ndarray):
        return node.ndim > 0
    parts = parts_of(node)
    if not parts:
        return False
    return _is_sequence(node) or any(_has_samples(value) for _, value in parts)


def _is_sequence(node: Any) -> bool:
    return isinstance(node, list | tuple) and not hasattr(node, "_fields")


def _readings(node: Sequence[Any]) -> tuple[bool, ...]:
    """Returns the possible interpretations of a list or tuple, the usual one first: True for samples,
    False for a structure."""
    members = [member for member in node if member is not None]
    kinds = {_kind(member) for member in members}
    if len(kinds) != 1:
        return (False,) if members else (True,)
    first = members[0]
    if isinstance(first, Tensor | np.ndarray) and first.ndim:
        same = len({num_rows(member) for member in members}) == 1
        return (False, True) if same else (True,)
    if isinstance(first, Mapping):
        return (True, False)
    if _is_sequence(first):
        samples = isinstance(first, tuple) and isinstance(node, list) and len(node) > 1
        return (True, False) if samples else (False, True)
    return (True, False) if parts_of(first) else (True,)


def _kind(value: Any) -> Any:
    """Returns what the samples of a data set have in common: type, dtype and number of dims, kinds of
    the members."""
    if isinstance(value, Tensor | np.ndarray):
        return type(value), value.dtype, value.ndim
    if isinstance(value, bool | int | float | str | bytes | np.generic):
        return "scalar"
    if _is_sequence(value):
        kinds = tuple(_kind(member) for member in value[:_KIND_MEMBERS])
        # A sequence of one kind may have any length, since samples differ in length.
        return type(value), kinds[0] if len(set(kinds)) == 1 else kinds
    return type(value)


def _are_records(node: Any) -> bool:
    members = [member for member in node if member is not None] if _is_sequence(node) else []
    return bool(members) and all(isinstance(member, Mapping) for member in members)


def has_records(batch: Any, size: int) -> bool:
    """Returns whether `batch` contains a list of `size` mappings, so that its lists are lists of
    samples."""
    if _are_records(batch):
        return len(batch) == size
    if _is_sequence(batch) and not any(parts_of(member) for member in batch):
        return False  # a list of tokens, say, which may be long
    return any(has_records(value, size) for _, value in parts_of(batch) or ())


def _mapped(
    node: Any,
    size: int,
    among_records: bool,
    rows: Callable[[Any], Any],
    samples: Callable[[Sequence[Any]], Iterable[Any]],
) -> Any:
    """Returns `node`, part of a batch of `size` samples, with `rows` applied to tensors and arrays, and
    `samples` to lists of samples."""
    if not _has_samples(node):
        return node
    if isinstance(node, Tensor | np.ndarray | PackedSequence):
        return rows(node)
    if is_samples(node, size, among_records):
        return type(node)(samples(node))
    values = [
        _mapped(value, size, among_records, rows, samples) for _, value in parts_of(node) or ()
    ]
    return rebuilt(node, values)


def is_samples(node: Any, size: int, among_records: bool = False) -> bool:
    """Returns whether `node` is a list or tuple of `size` samples, in a batch of that size.
    `among_records`: whether the batch has a list of mappings, see `has_records`."""
    if among_records and _is_sequence(node) and 0 < len(node) == size:
        are_tensors = isinstance(node[0], Tensor | np.ndarray)
        if are_tensors and len({_kind(one) for one in node}) == 1:
            return True
    for as_samples in _readings(node) if _is_sequence(node) else ():
        if size in ({len(node)} if as_samples else _common(node)):
            return as_samples
    return False


def _leaves(node: Any, path: str) -> Iterator[tuple[str, int]]:
    """Yields every part that has samples, as its path and its size."""
    if isinstance(node, Tensor | np.ndarray | PackedSequence):
        if _has_samples(node):
            yield path, num_rows(node)
    elif _is_sequence(node) and len(node) and _readings(node)[0]:
        yield path, len(node)
    else:
        for index, value in parts_of(node) or ():
            yield from _leaves(value, path + index)

"""One operation of a step: whose speed it has, its floating-point operations and its bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

Family = Literal["matmul", "convolution", "attention", "memory"]
"""Kinds of operations by what limits them: arithmetic of one kind, or memory."""

PRODUCTS: tuple[Family, ...] = ("matmul", "convolution", "attention")

HEAD_DIM = 64
"""Width of the heads for which the rates of attention are given."""

_KEYS_AT_ONCE = {"cpu": 512}
"""Keys that a kernel of attention takes at a time, by the kind of device; 128 elsewhere. Where later
tokens are masked, it passes over those keys that are masked for all queries at hand."""

_FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot"), "matmul"),
    **dict.fromkeys(("addmm_", "baddbmm_", "addmv_"), "matmul"),
    "_grouped_mm": "matmul",
    **dict.fromkeys(("convolution", "convolution_backward"), "convolution"),
    **dict.fromkeys(("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"), "matmul"),
}
_GATHERS = frozenset((
    "embedding", "embedding_dense_backward", "index", "index_put", "index_select", "gather", "scatter",
    "scatter_add", "index_add", "_unsafe_index_put", "index_put_", "_index_put_impl_", "take",
))  # fmt: skip
"""Operations that touch as many rows of a table as they return, not all of it."""

_FREE = frozenset((
    "device", "detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias",
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
))  # fmt: skip
"""Operations that touch no bytes."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation at one micro-batch.

    Attributes:
        name: as torch has it.
        family: whose speed it has.
        dtype: of its largest tensor, which says what arithmetic it is.
        flops: floating-point operations; 0 where only bytes count.
        num_bytes: read and written.
        narrow: smallest dim of a product; of attention, the length of the square sequences with heads
            of `HEAD_DIM` that would take as much arithmetic; 0 for other operations.
        num_products: that it is: a backward of a convolution may be two in one, a recurrent layer is
            one for each step of its sequence.
        num_tensors: results; a `foreach` operation has many.
        phase: `"forward"`, `"backward"` or `"update"`.
        block: number of the block of the model in whose forward it ran, or -1.
    """

    name: str
    family: Family
    dtype: torch.dtype
    flops: float
    num_bytes: float
    narrow: float
    num_products: int
    num_tensors: int
    phase: str
    block: int


def operation_of(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Any,
    result: Any,
    phase: str,
    block: int,
    kind: str,
) -> Operation | None:
    """What calling the aten overload `func` is on a `kind` of device, or None if it touches no bytes.

    Args:
        func: an overload.
        args, kwargs, result: on fake tensors.
        phase, block: where; see `Operation`.
    """
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    tensors = [*inputs, *outputs]
    if not tensors:
        return None
    name = func._overloadpacket.__name__
    if name in _FREE:
        return None
    largest = max(tensors, key=lambda t: t.numel() if t.is_floating_point() else -1)
    moved = _gathered(inputs, outputs) if name in _GATHERS else sum(map(bytes_of, tensors))
    return Operation(
        name=name,
        family=family_of(name),
        dtype=largest.dtype,
        flops=_flops(func, name, args, kwargs, result, kind),
        num_bytes=float(moved),
        narrow=_narrow(name, args, inputs),
        num_products=_num_products(name, args),
        num_tensors=max(1, len(outputs), len(inputs) if "_foreach_" in name else 0),
        phase=phase,
        block=block,
    )


def family_of(name: str) -> Family:
    """The family of the operation `name`, an aten operation without its overload."""
    plain = name.removeprefix("_foreach_")
    if plain in _FAMILIES:
        return _FAMILIES[plain]
    if "scaled_dot_product" in plain:
        return "attention"
    return "memory"


def _num_products(name: str, args: tuple[Any, ...]) -> int:
    if name == "convolution_backward":
        return sum(args[10][:2])
    if name.startswith("mkldnn_rnn_layer"):
        return int(args[0].size(0)) * (2 if "backward" in name else 1)
    return 1


def _narrow(name: str, args: tuple[Any, ...], inputs: Sequence[Tensor]) -> float:
    """`Operation.narrow`."""
    if family_of(name) == "attention":
        query, key = _query_and_key(name, args)
        return math.sqrt(query.size(-2) * key.size(-2) * query.size(-1) / HEAD_DIM)
    if name.startswith("convolution"):
        weight = next((t for t in reversed(inputs) if t.dim() >= 3), None)
        return float(min(len(weight), weight[0].numel())) if weight is not None else 0.0
    if family_of(name) not in PRODUCTS:
        return 0.0
    sides = [side for t in inputs if t.dim() >= 2 for side in t.shape[-2:]]
    return float(min(sides, default=1))


def _query_and_key(name: str, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    return (args[1], args[2]) if "backward" in name else (args[0], args[1])


def _attention_flops(func: Any, name: str, args: tuple[Any, ...], kwargs: Any, kind: str) -> float:
    """Two products in forward, five in backward, which computes the weights anew; of the keys that the
    kernel does not pass over."""
    query, key = _query_and_key(name, args)
    num_keys = key.size(-2)
    pairs = query.numel() // query.size(-1) * num_keys
    place = next(i for i, a in enumerate(func._schema.arguments) if a.name == "is_causal")
    if kwargs.get("is_causal", args[place] if place < len(args) else False):
        blocks = -(-num_keys // _KEYS_AT_ONCE.get(kind, 128))
        pairs *= (blocks + 1) / (2 * blocks)
    return float((10 if "backward" in name else 4) * pairs * query.size(-1))


def _flops(
    func: Any, name: str, args: tuple[Any, ...], kwargs: Any, result: Any, kind: str
) -> float:
    if family_of(name) == "attention":
        return _attention_flops(func, name, args, kwargs or {}, kind)
    packet = func._overloadpacket
    in_place = getattr(torch.ops.aten, name.removesuffix("_"), None)
    counter = flop_registry.get(packet) or flop_registry.get(in_place)
    if counter is not None:
        return float(counter(*args, **kwargs, out_val=result))
    if name.startswith("mkldnn_rnn_layer"):  # each step multiplies by both weights; backward, twice
        inputs, weight, recurrent = args[:3]
        both = weight.numel() + recurrent.numel()
        return (4.0 if "backward" in name else 2.0) * inputs.size(0) * inputs.size(1) * both
    if name == "_grouped_mm":  # each row, or each column, meets the matrix of one group
        left, right = args[0], args[1]
        rows = left[0] if left.dim() > right.dim() else left
        return 2.0 * rows.numel() * right.size(-1)
    return 0.0


def _gathered(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    """Bytes of an operation that reads as many rows of a table as it returns, not all of it."""
    result = sum(map(bytes_of, outputs))
    return 2.0 * result + sum(bytes_of(t) for t in inputs if not t.is_floating_point())


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

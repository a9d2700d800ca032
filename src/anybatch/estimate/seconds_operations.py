"""One operation of a step: whose speed it has, its floating-point operations and its bytes."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

Memory = Literal["plain", "special", "random", "norm", "batch_norm", "gather", "pool", "reduction"]
"""Operations that are limited by memory, each kind at a rate of its own."""

Product = Literal["matmul", "convolution", "attention"]
"""Operations that are limited by arithmetic or by memory."""

Family = Product | Memory
"""Operations whose speed is of one kind."""

PRODUCTS: tuple[Product, ...] = get_args(Product)

HEAD_DIM = 64
"""Of the attention that calibration measures."""

_KEYS_AT_ONCE = {"cpu": 512}
"""Keys that a kernel of attention takes at a time, by the kind of device; 128 elsewhere. Where later
tokens are masked, it passes over those keys that are masked for all queries at hand."""

_FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot"), "matmul"),
    **dict.fromkeys(("addmm_", "baddbmm_", "addmv_"), "matmul"),
    "_grouped_mm": "matmul",
    **dict.fromkeys(("convolution", "convolution_backward"), "convolution"),
    # By the same library on a CPU.
    **dict.fromkeys(("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"), "convolution"),
    **dict.fromkeys(("bernoulli", "bernoulli_", "native_dropout", "rand_like"), "random"),
    **dict.fromkeys(("normal_", "uniform_", "random_", "randn_like", "exponential_"), "random"),
    **dict.fromkeys(("embedding", "embedding_dense_backward", "index", "index_put"), "gather"),
    **dict.fromkeys(("index_select", "gather", "scatter", "scatter_add", "index_add"), "gather"),
    **dict.fromkeys(("_unsafe_index_put", "index_put_", "_index_put_impl_", "take"), "gather"),
    **dict.fromkeys(("sum", "mean", "linalg_vector_norm", "amax", "argmax", "any"), "reduction"),
    **dict.fromkeys(("max", "min", "all", "var", "std", "cumsum", "sort", "topk"), "reduction"),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm"), "batch_norm"),
    # Their backward reads and writes in order.
    **dict.fromkeys(("native_batch_norm_backward", "max_pool2d_with_indices_backward"), "plain"),
}
EMPTY = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
"""Operations that make storages and leave them as they are."""

_FREE = {"device", "detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias"} | EMPTY
"""Operations that touch no bytes."""

_SPECIAL = (
    "gelu", "silu", "tanh", "sigmoid", "softmax", "exp", "expm1", "log", "log1p", "erf", "pow",
    "softplus", "mish", "sin", "cos", "logsumexp", "elu", "hardswish", "rsqrt", "sqrt",
)  # fmt: skip
_NORMS = ("batch_norm", "layer_norm", "group_norm", "rms_norm")
_POOLS = ("pool", "upsample", "grid_sampler", "im2col", "col2im")

_DRAWN_BYTES = 4
"""Of a number that is drawn: as calibration counts it."""

_SEVERAL = {"_safe_softmax": (10.0, 2.25)}
"""Of operations that are made of several: how much longer they take than by the bytes of arguments and
results, and how much more they make than results. Here the softmax, a comparison of each number, of
whole rows, which is slow, and a choice."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation at one micro-batch.

    Attributes:
        name: as torch has it.
        family: whose speed it has.
        dtype: of its largest tensor, which says what arithmetic it is.
        flops: floating-point operations; 0 where only bytes count.
        num_bytes: read and written.
        far_bytes: of these, in tensors that the operations just before have not touched: a cache has
            them only if all that a micro-batch touches fits into it.
        fresh_bytes: written to storage that it made itself.
        narrow: smallest dim of a product: a tall or flat one is slower than a cube of the same work. Of
            attention, the length of the square sequences with heads of `HEAD_DIM` that would take as
            much arithmetic.
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
    far_bytes: float
    fresh_bytes: float
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
    near: Container[int] = (),
    untouched: Container[int] = (),
) -> Operation | None:
    """What calling the aten overload `func` is on a `kind` of device, or None if it touches no bytes.

    Args:
        func: an overload.
        args, kwargs, result: on fake tensors.
        phase, block: where; see `Operation`.
        near: storages that operations just before have touched; see `storage_of`.
        untouched: storages that were made and not touched yet.
    """
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    tensors = [*inputs, *outputs]
    if not tensors:
        return None
    name = func._overloadpacket.__name__
    if name in _FREE:
        return None
    given = {key for t in inputs if (key := storage_of(t)) not in untouched}
    fresh = sum(bytes_of(t) for t in outputs if storage_of(t) not in given)
    largest = max(tensors, key=lambda t: t.numel() if t.is_floating_point() else -1)
    family = family_of(name)
    far = sum(bytes_of(t) for t in inputs if (key := storage_of(t)) in given and key not in near)
    moved = sum(map(bytes_of, tensors))
    if family == "gather":
        moved = _gathered(inputs, outputs)
    elif family == "random":  # takes as long per number in half precision
        moved = sum(_DRAWN_BYTES * t.numel() for t in tensors)
    times, making = _SEVERAL.get(name, (1.0, 1.0))
    return Operation(
        name=name,
        family=family,
        dtype=largest.dtype,
        flops=_flops(func, name, args, kwargs, result, kind),
        num_bytes=times * moved,
        far_bytes=min(far, moved),
        fresh_bytes=making * fresh,
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
    if any(part in plain for part in _NORMS):
        return "norm"
    if any(part in plain for part in _POOLS):
        return "pool"
    if any(word in _SPECIAL for word in plain.strip("_").split("_")):
        return "special"
    return "plain"


def _num_products(name: str, args: tuple[Any, ...]) -> int:
    if name == "convolution_backward":
        return sum(args[10][:2])
    if name.startswith("mkldnn_rnn_layer"):
        return int(args[0].size(0)) * (2 if "backward" in name else 1)
    return 1


def _narrow(name: str, args: tuple[Any, ...], inputs: Sequence[Tensor]) -> float:
    """`Operation.narrow`: the smallest of the three dims of a product, as a matrix product; 0 for an
    operation that is none."""
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


def storage_of(tensor: Tensor) -> int:
    """What tells the storage of `tensor` from others, as long as it lives."""
    return tensor.untyped_storage()._cdata


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

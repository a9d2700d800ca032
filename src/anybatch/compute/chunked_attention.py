"""Chunked attention: computes the scores of attention for a few queries at a time.

Attention that is written as matrix products and a softmax materializes a score for each pair of
positions. torch's fused kernels for `scaled_dot_product_attention` do not, but the kernel "math" does,
which serves whatever those do not support (on a CPU: dropout). Inside a block, a plan can defer the
scores:

    q [2, 8, 4096, 64] @ k.mT            ->  Scores [2, 8, 4096, 4096]     nothing is computed
    * scale, + mask, softmax, dropout    ->  Scores                        recorded
    Scores @ v                           ->  in chunks of queries, each of them checkpointed

Backward then holds the scores of one chunk. Rows of scores are independent of each other, so the result
is that of the code as written, up to the order in which gradients of keys and values are summed.
Dropout draws in a different order.

An operation without a rule computes the scores as a whole and continues with a plain tensor. Code that
uses its scores in another way is therefore correct but saves no memory, which a trace shows. Code that
writes to its scores in place is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from types import FunctionType
from typing import Any, final
from weakref import ReferenceType, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint

from anybatch.compute.chunked_loss import METADATA, has_lasting_effect
from anybatch.errors import InputError

NUM_CHUNKS = 8


class NotChunkable(InputError):
    """Raised for a block whose attention does not run in chunks of queries."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the plan computes attention in chunks of queries, and a block {why}: set"
            " recompute.chunked_attention to false, or plan with recompute='all'."
        )


@final
class ChunkedAttention:
    """The `forward` of a block in which attention runs in chunks of queries."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._run(*args, **kwargs)
        made: list[ReferenceType[Scores]] = []
        token = _MADE.set(made)
        try:
            with _Deferring():
                result = self._run(*args, **kwargs)
        finally:
            _MADE.reset(token)
        for reference in made:
            if (scores := reference()) is not None:
                scores.pinned = scores.computed()  # the block returns them, or keeps them
        return tree_map_only(Scores, _pinned, result)


_MADE: ContextVar[list[ReferenceType[Scores]] | None] = ContextVar("made", default=None)
"""Scores that were deferred in the current run of a block."""


class _Deferring(TorchFunctionMode):
    """Defers products of queries and keys, and runs `scaled_dot_product_attention` in chunks."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if Scores in types:  # before the modes around this one, which know other tensors only
            return Scores.__torch_function__(func, types, args, kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return _MULTI_HEAD(*args, **kwargs)
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        scores = _first_product(func, args, kwargs)
        return func(*args, **kwargs) if scores is None else scores


_MULTI_HEAD = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda _: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
"""`multi_head_attention_forward` without its call of the mode, so that the mode sees the functions that
it calls."""


# ------------------------------------------------------------------------------------------- chunks


def _in_chunks(
    run: Callable[..., Tensor], tensors: list[Tensor], num_rows: int, draws: bool
) -> Tensor:
    """Compute `run(start, end, *tensors)` for all rows in chunks, each of them checkpointed, and
    concatenate the results along dim -2.

    Tensors must be arguments: between the runs of a block that is recomputed, its tensors are freed,
    except for those in a closure.

    Args:
        draws: whether random numbers are drawn.
    """
    size = -(-num_rows // NUM_CHUNKS)
    chunks: list[Tensor] = [
        checkpoint(
            *(run, start, min(start + size, num_rows), *tensors),
            use_reentrant=False,
            preserve_rng_state=draws,
        )
        for start in range(0, num_rows, size)
    ]
    return torch.cat(chunks, -2)


def _narrowed(tensor: Tensor, num_rows: int, start: int, end: int) -> Tensor:
    """The rows of a tensor that is broadcast against scores, or of queries."""
    if tensor.dim() < 2 or tensor.size(-2) != num_rows:
        return tensor
    return tensor.narrow(-2, start, end - start)


def _is_large(num_rows: int, columns: int, width: int) -> bool:
    """Whether scores have more elements than the queries and the keys, of this width."""
    return width < min(num_rows, columns) and num_rows >= NUM_CHUNKS


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """`scaled_dot_product_attention` in chunks of queries."""
    run = partial(F.scaled_dot_product_attention, dropout_p=dropout_p, **options)
    num_rows = query.size(-2)
    if not _is_large(num_rows, key.size(-2), query.size(-1)):
        return run(query, key, value, attn_mask, is_causal=is_causal)

    def rows(
        start: int, end: int, queries: Tensor, keys: Tensor, values: Tensor, *masks: Tensor
    ) -> Tensor:
        mask = _narrowed(masks[0], num_rows, start, end) if masks else None
        if is_causal:  # keys after the last query of the chunk have no weight
            keys, values = keys[..., :end, :], values[..., :end, :]
            mask = torch.ones(end - start, keys.size(-2), dtype=torch.bool, device=keys.device)
            mask = mask.tril(start)
        return run(queries.narrow(-2, start, end - start), keys, values, mask)

    tensors = [tensor for tensor in (query, key, value, attn_mask) if tensor is not None]
    return _in_chunks(rows, tensors, num_rows, dropout_p > 0)


# ------------------------------------------------------------------------------------------- scores


@final
class _Call:
    """A recorded call of `func`, in the autocast state in which it was recorded. It computes rows of
    scores from those of its arguments, and does not hold its tensors.

    Args:
        num_rows: arguments with this size in dim -2 are narrowed to the rows; None: no argument is.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any, num_rows: int | None) -> None:
        leaves, self._form = tree_flatten((args, kwargs))
        self._func = func
        self._num_rows = num_rows
        self._scores = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Scores)]
        self._tensors = [
            i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in self._scores
        ]
        device = leaves[(self._scores + self._tensors)[0]].device.type
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._autocast = partial(
            torch.autocast,
            device,
            torch.get_autocast_dtype(device),
            torch.is_autocast_enabled(device),
        )

    def __call__(
        self, rows: Tensor | None, start: int, end: int, tensors: Iterator[Tensor]
    ) -> Tensor:
        """Return the rows from `start` to `end`, from those of the previous call. `tensors`: yields the
        tensors that the call was recorded with."""
        leaves: list[Any] = list(self._leaves)
        for i in self._scores:
            leaves[i] = rows
        for i in self._tensors:
            tensor = next(tensors)
            if self._num_rows is not None:
                tensor = _narrowed(tensor, self._num_rows, start, end)
            leaves[i] = tensor
        args, kwargs = tree_unflatten(leaves, self._form)
        with self._autocast():
            return self._func(*args, **kwargs)


def _run_calls(calls: tuple[_Call, ...], start: int, end: int, *tensors: Tensor) -> Any:
    rows, left = None, iter(tensors)
    for call in calls:
        rows = call(rows, start, end, left)
    return rows


class Scores(Tensor):
    """Scores that have not been computed; see the module.

    Attributes:
        calls: compute some of the rows, one after the other.
        held: the tensors that the calls need, in order, and their versions when they were given.
        row: the first row, computed without gradients, of shape [..., 1, columns]; without dropout.
        draws: whether the calls draw random numbers.
        pinned: the computed scores, once the block has ended that deferred them.
    """

    calls: tuple[_Call, ...]
    held: list[tuple[Tensor, int]]
    row: Tensor
    draws: bool
    pinned: Tensor | None
    _is_used: bool

    @staticmethod
    def __new__(
        cls: type[Scores],
        calls: tuple[_Call, ...],
        held: list[tuple[Tensor, int]],
        num_rows: int,
        row: Tensor,
        draws: bool,
    ) -> Scores:
        """Create a tensor with the shape, dtype and device that the computed scores would have."""
        made = Tensor._make_wrapper_subclass(
            cls, (*row.shape[:-2], num_rows, row.size(-1)), dtype=row.dtype, device=row.device
        )
        made.calls, made.held, made.row, made.draws = calls, held, row, draws
        made.pinned, made._is_used = None, False
        if (all_made := _MADE.get()) is not None:
            all_made.append(ref(made))
        return made

    def tensors(self) -> list[Tensor]:
        """Return the tensors from which the scores are computed now.

        Raises `NotChunkable` if that would bypass gradients, draw random numbers again, or use a tensor
        that has changed.
        """
        if not torch.is_grad_enabled():
            raise NotChunkable("uses its scores where gradients are disabled")
        if self.draws and self._is_used:
            raise NotChunkable("uses its scores again after their dropout")
        if any(tensor._version != version for tensor, version in self.held):
            raise NotChunkable("changes in place what its scores are computed from")
        self._is_used = True
        return [tensor for tensor, _ in self.held]

    def computed(self) -> Tensor:
        """Return all scores as a plain tensor in the graph."""
        return _run_calls(self.calls, 0, self.size(-2), *self.tensors())

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Part of the protocol of wrapper subclasses, by which a trace recognizes them."""
        return [], None

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Raise `NotChunkable`: the operation arrives below autograd."""
        raise NotChunkable(f"passes its scores to {func} past torch's functions")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record `func` if there is a rule for it, else compute the scores first."""
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = tree_map_only(Scores, _pinned, (args, kwargs))
        if not any(isinstance(leaf, Scores) for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if has_lasting_effect(func, kwargs):
            raise NotChunkable("writes to its scores in place")
        if torch.is_grad_enabled():
            found = _recorded(func, args, kwargs)
            if found is not None:
                return found
        args, kwargs = tree_map_only(Scores, Scores.computed, (args, kwargs))
        return func(*args, **kwargs)


def _pinned(scores: Scores) -> Tensor:
    return scores if scores.pinned is None else scores.pinned


# ------------------------------------------------------------------------------------ recorded calls


def _call(func: Any, args: Any, kwargs: Any, num_rows: int) -> Scores | None:
    """Record a call of a function that treats rows independently. None if its result does not have the
    rows of its arguments."""
    leaves = tree_leaves((args, kwargs))
    scores = next((leaf for leaf in leaves if isinstance(leaf, Scores)), None)
    new = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Scores)]
    call = _Call(func, args, kwargs, num_rows)
    with torch.no_grad():
        row = call(None if scores is None else scores.row, 0, 1, iter(new))
    if row.dim() < 2 or row.size(-2) != 1:
        return None
    held = [(tensor, tensor._version) for tensor in new]
    if scores is None:
        return Scores((call,), held, num_rows, row, False)
    return Scores((*scores.calls, call), scores.held + held, num_rows, row, scores.draws)


def _first_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scores | None:
    """The product of queries and keys as deferred scores, or None if it is none."""
    if func is torch.einsum:
        product = _as_product(*args)
        if product is None or product[2]:
            return None
        func, args = torch.matmul, product[:2]
    if func not in _PRODUCTS:
        return None
    factors = args[1:3] if func in _WITH_SUMMAND else args[:2]
    if len(factors) < 2 or not all(_may_be_factor(factor) for factor in factors):
        return None
    query, key = factors
    if not _is_large(query.size(-2), key.size(-1), query.size(-1)):
        return None
    return _call(func, args, kwargs, query.size(-2))


def _may_be_factor(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 2 and not isinstance(value, nn.Parameter)


def _recorded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The result of a function of scores, or None if it needs all of them."""
    scores = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Scores)]
    if any(one is not scores[0] for one in scores):
        return None
    if func in _BY_ELEMENT:
        return _call(func, args, kwargs, scores[0].size(-2))
    rule = _RULES.get(func)
    leads = func is torch.einsum or (len(args) > 0 and args[0] is scores[0])
    return rule(func, *args, **kwargs) if rule and leads and len(scores) == 1 else None


def _second_product(func: Any, scores: Scores, *args: Any, **kwargs: Any) -> Tensor | None:
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor) or args[0].dim() < 2:
        return None
    calls = *scores.calls, _Call(func, (scores, *args), {}, None)
    tensors = [*scores.tensors(), *args]
    return _in_chunks(partial(_run_calls, calls), tensors, scores.size(-2), scores.draws)


def _softmax(func: Any, scores: Scores, *args: Any, **kwargs: Any) -> Tensor | None:
    dim = args[0] if args else kwargs.get("dim")
    if dim not in (-1, scores.dim() - 1):
        return None
    return _call(func, (scores, *args), kwargs, scores.size(-2))


def _mean(func: Any, scores: Scores, *args: Any, **kwargs: Any) -> Tensor | None:
    dim = args[0] if args else kwargs.get("dim")
    if not isinstance(dim, int) or dim % scores.dim() >= scores.dim() - 2:
        return None
    return _call(func, (scores, *args), kwargs, scores.size(-2))


def _dropout(
    func: Any, scores: Scores, p: float = 0.5, training: bool = True, *args: Any, **kwargs: Any
) -> Tensor | None:
    if any(args):
        raise NotChunkable("writes to its scores in place")
    if not kwargs.pop("train", training) or p == 0:
        return scores
    calls = *scores.calls, _Call(F.dropout, (scores, p), {}, None)
    return Scores(calls, scores.held, scores.size(-2), scores.row, True)


def _reshape(func: Any, scores: Scores, *shape: Any, **kwargs: Any) -> Tensor | None:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    if kwargs or tuple(sizes[-2:]) != tuple(scores.shape[-2:]):
        return None
    leading = tuple(sizes[:-2])

    def reshaped(rows: Tensor) -> Tensor:
        return rows.reshape(*leading, *rows.shape[-2:])

    return _call(reshaped, (scores,), {}, scores.size(-2))


def _same(func: Any, scores: Scores, *args: Any, **kwargs: Any) -> Tensor | None:
    return None if args or kwargs else scores


def _einsum(func: Any, *args: Any) -> Tensor | None:
    product = _as_product(*args)
    if product is None or not isinstance(product[0], Scores):
        return None
    result = torch.matmul(*product[:2])
    return torch.einsum(product[2], result) if product[2] else result


def _as_product(equation: Any, *operands: Any) -> tuple[Any, Any, str] | None:
    """The factors of the batched matrix product that an einsum computes, and the equation that permutes
    the product, if it has to be. None if it is another computation. For example, "bqhd,bkhd->bhqk" is
    "bhqd" @ "bhdk", and "bhqk,bkhd->bqhd" is "bhqk" @ "bhkd", permuted by "bhqd->bqhd"."""
    if len(operands) != 2 or not isinstance(equation, str) or "->" not in equation:
        return None
    inputs, _, result = equation.replace(" ", "").partition("->")
    first, _, second = inputs.partition(",")
    batch = "".join(c for c in result if c in first and c in second)
    row = "".join(c for c in result if c not in second)
    column = "".join(c for c in result if c not in first)
    inner = "".join(c for c in first if c not in result)
    wanted = f"{batch}{row}{inner}", f"{batch}{inner}{column}"
    as_given = [sorted(first), sorted(second)] == [sorted(letters) for letters in wanted]
    if not (as_given and len(row) == len(column) == len(inner) == 1) or "." in equation:
        return None
    left, right = (
        tensor if given == letters else torch.einsum(f"{given}->{letters}", tensor)
        for tensor, given, letters in zip(operands, (first, second), wanted, strict=True)
    )
    product = f"{batch}{row}{column}"
    return left, right, "" if product == result else f"{product}->{result}"


def _functions(*names: str) -> frozenset[Any]:
    """The functions of these names in `torch`, of tensors, and in `torch.nn.functional`."""
    found = (getattr(place, name, None) for place in (torch, Tensor, F) for name in names)
    return frozenset(func for func in found if func is not None)


_WITH_SUMMAND = _functions("baddbmm")
_PRODUCTS = _functions("matmul", "bmm", "baddbmm", "__matmul__")

_RULES: dict[Any, Callable[..., Tensor | None]] = (
    dict.fromkeys(_functions("matmul", "bmm", "__matmul__"), _second_product)
    | dict.fromkeys(_functions("softmax"), _softmax)
    | dict.fromkeys(_functions("mean"), _mean)
    | dict.fromkeys(_functions("dropout"), _dropout)
    | dict.fromkeys(_functions("view", "reshape"), _reshape)
    | dict.fromkeys(_functions("contiguous"), _same)
    | {torch.einsum: _einsum}
)
"""`(func, scores, *args, **kwargs)` as a call of the function with scores -> its result, or None."""

_BY_ELEMENT = _functions(
    "add", "sub", "mul", "div", "true_divide", "neg", "where", "masked_fill", "maximum", "minimum",
    "clamp", "clamp_min", "clamp_max", "tanh", "sigmoid", "exp", "relu", "nan_to_num",
    "to", "type", "type_as", "float", "double", "half", "bfloat16",
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__neg__",
)  # fmt: skip

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
uses its scores in another way is therefore correct but saves no memory, which a trace shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, final
from weakref import ReferenceType, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.checkpoint import checkpoint

from anybatch.compute.chunked_loss import METADATA
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
                scores.pin()  # the block returns them, or keeps them in an attribute
        return tree_map_only(Scores, Scores.computed, result)


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
        scores = _first_product(func, args, kwargs) if func in _PRODUCTS else None
        return func(*args, **kwargs) if scores is None else scores


_MULTI_HEAD = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda _: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
"""`multi_head_attention_forward` without its call of the mode, so that the mode sees the functions that
it calls."""


# ------------------------------------------------------------------------------------------- chunks


@final
class _Slot:
    """Stands for a tensor in a recorded computation, which must not keep it alive: between the runs of
    a block that is recomputed, its tensors are freed."""


Held = dict[_Slot, Tensor]

Rows = Callable[[int, int, Held], Tensor]
"""Computes the rows from the first number up to the second, of shape [..., rows, columns]."""


def _in_chunks(compute: Rows, held: Held, num_rows: int, draws: bool, dim: int = -2) -> Tensor:
    """Compute all rows in chunks, each of them checkpointed, and concatenate them along `dim`.

    Args:
        draws: whether random numbers are drawn.
    """
    slots = tuple(held)

    def run(start: int, end: int, *tensors: Tensor) -> Tensor:
        return compute(start, end, dict(zip(slots, tensors, strict=True)))

    size = -(-num_rows // NUM_CHUNKS)
    chunks: list[Tensor] = [
        checkpoint(
            *(run, start, min(start + size, num_rows), *held.values()),
            use_reentrant=False,
            preserve_rng_state=draws,
        )
        for start in range(0, num_rows, size)
    ]
    return torch.cat(chunks, dim)


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
    held = {_Slot(): tensor for tensor in (query, key, value, attn_mask) if tensor is not None}

    def rows(start: int, end: int, held: Held) -> Tensor:
        queries, keys, values, *masks = held.values()
        mask = _narrowed(masks[0], num_rows, start, end) if masks else None
        if is_causal:  # keys after the last query of the chunk have no weight
            keys, values = keys[..., :end, :], values[..., :end, :]
            mask = torch.ones(end - start, keys.size(-2), dtype=torch.bool, device=keys.device)
            mask = mask.tril(start)
        return run(queries.narrow(-2, start, end - start), keys, values, mask)

    return _in_chunks(rows, held, num_rows, dropout_p > 0)


# ------------------------------------------------------------------------------------------- scores


class Scores(Tensor):
    """Scores that have not been computed; see the module.

    Attributes:
        rows: computes some of the rows.
        held: the tensors that `rows` needs, and their versions when they were given.
        row: the first row, computed without gradients, of shape [..., 1, columns]; without dropout.
        draws: whether `rows` draws random numbers.
        shares: whether other scores are a view of these, or these of others.
        pinned: the computed scores, once the block has ended that deferred them.
    """

    rows: Rows
    held: dict[_Slot, tuple[Tensor, int]]
    row: Tensor
    draws: bool
    shares: bool
    pinned: Tensor | None
    _is_used: bool

    @staticmethod
    def __new__(
        cls: type[Scores],
        rows: Rows,
        held: dict[_Slot, tuple[Tensor, int]],
        num_rows: int,
        row: Tensor,
        draws: bool,
    ) -> Scores:
        """Create a tensor with the shape, dtype and device that the computed scores would have."""
        made = Tensor._make_wrapper_subclass(
            cls, (*row.shape[:-2], num_rows, row.size(-1)), dtype=row.dtype, device=row.device
        )
        made.rows, made.held, made.row, made.draws = rows, held, row, draws
        made.shares, made.pinned, made._is_used = False, None, False
        if (all_made := _MADE.get()) is not None:
            all_made.append(ref(made))
        return made

    def tensors(self) -> Held:
        """Return the tensors from which the scores are computed now.

        Raises `NotChunkable` if that would bypass gradients, draw random numbers again, or use a tensor
        that has changed.
        """
        if not torch.is_grad_enabled():
            raise NotChunkable("uses its scores where gradients are disabled")
        if self.draws and self._is_used:
            raise NotChunkable("uses its scores again after their dropout")
        if any(tensor._version != version for tensor, version in self.held.values()):
            raise NotChunkable("changes in place what its scores are computed from")
        self._is_used = True
        return {slot: tensor for slot, (tensor, _) in self.held.items()}

    def computed(self) -> Tensor:
        """Return all scores as a plain tensor in the graph."""
        if self.pinned is not None:
            return self.pinned
        return self.rows(0, self.size(-2), self.tensors())

    def pin(self) -> None:
        """Compute the scores, and keep them: after its block they can be used in any way."""
        self.pinned = self.computed()

    def replace(self, other: Scores) -> None:
        """Continue as `other`, which an operation in place computes from these."""
        if self.shares or other.shape != self.shape:
            raise NotChunkable("writes in place to a view of its scores, or to what a view is of")
        self.row, self.held = other.row.to(self.dtype), other.held
        self.draws |= other.draws
        self.rows = (
            other.rows if other.dtype == self.dtype else partial(_cast, other.rows, self.dtype)
        )

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
        if torch.is_grad_enabled():
            found = _recorded(func, args, kwargs)
            if found is not None:
                return found
        args, kwargs = tree_map_only(Scores, Scores.computed, (args, kwargs))
        return func(*args, **kwargs)


def _pinned(scores: Scores) -> Tensor:
    return scores if scores.pinned is None else scores.pinned


def _cast(rows: Rows, dtype: torch.dtype, start: int, end: int, held: Held) -> Tensor:
    return rows(start, end, held).to(dtype)


# ------------------------------------------------------------------------------------ recorded calls


@dataclass(frozen=True, slots=True)
class _Part:
    """An argument of a recorded call: rows of scores, or of a tensor, or the whole tensor."""

    rows: Rows


@dataclass(frozen=True, slots=True)
class _Whole:
    """An argument with values for all rows, whatever its shape."""

    tensor: Tensor


def _call(func: Any, args: Any, kwargs: Any, num_rows: int) -> Scores | None:
    """Record a call of a function that treats rows independently, with the state of autocast. None if
    its result does not have the rows of its arguments."""
    held: dict[_Slot, tuple[Tensor, int]] = {}

    def first(leaf: Any) -> Any:
        if isinstance(leaf, Scores):
            return leaf.row
        if isinstance(leaf, _Whole):
            return leaf.tensor
        return _narrowed(leaf, num_rows, 0, 1) if isinstance(leaf, Tensor) else leaf

    def part(leaf: Any) -> Any:
        if isinstance(leaf, Scores):
            held.update(leaf.held)
            return _Part(leaf.rows)
        if not isinstance(leaf, Tensor | _Whole):
            return leaf
        slot = _Slot()
        if isinstance(leaf, _Whole):
            held[slot] = leaf.tensor, leaf.tensor._version
            return _Part(lambda start, end, held: held[slot])
        held[slot] = leaf, leaf._version
        return _Part(lambda start, end, held: _narrowed(held[slot], num_rows, start, end))

    leaves = tree_leaves((args, kwargs))
    device = next(leaf.device.type for leaf in leaves if isinstance(leaf, Tensor))
    autocast = partial(
        torch.autocast,
        device,
        torch.get_autocast_dtype(device),
        torch.is_autocast_enabled(device),
    )
    with torch.no_grad():
        given, options = tree_map(first, (args, kwargs))
        row = func(*given, **options)
    if row.dim() < 2 or row.size(-2) != 1:
        return None
    parts = tree_map(part, (args, kwargs))

    def rows(start: int, end: int, held: Held) -> Tensor:
        with autocast():
            given, options = tree_map_only(_Part, lambda p: p.rows(start, end, held), parts)
            return func(*given, **options)

    return Scores(
        rows, held, num_rows, row, any(leaf.draws for leaf in leaves if isinstance(leaf, Scores))
    )


def _first_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scores | None:
    """The product of queries and keys as deferred scores, or None if it is none."""
    if func is torch.einsum:
        return _first_einsum(*args)
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
    first, num_rows = scores[0], scores[0].size(-2)
    leads = len(args) > 0 and first is args[0]
    rule = _RULES.get(func)
    if rule is not None:
        return rule(func, *args, **kwargs) if leads and len(scores) == 1 else None
    if func is torch.einsum:
        return _second_einsum(*args) if len(scores) == 1 else None
    if any(one.size(-2) != num_rows for one in scores):
        return None
    if func in _BY_ELEMENT:
        return _call(func, args, kwargs, num_rows)
    if func in _IN_PLACE and leads:
        changed = _call(_IN_PLACE[func], args, kwargs, num_rows)
        if changed is None:
            raise NotChunkable("writes to its scores in place")
        first.replace(changed)
        return first
    return None


def _second_product(func: Any, scores: Scores, *args: Any, **kwargs: Any) -> Tensor | None:
    (value, *more) = (*args, None)
    if kwargs or more != [None] or not isinstance(value, Tensor) or value.dim() < 2:
        return None
    rows, slot = scores.rows, _Slot()
    return _in_chunks(
        lambda start, end, held: func(rows(start, end, held), held[slot]),
        scores.tensors() | {slot: value},
        scores.size(-2),
        scores.draws,
    )


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
    func: Any,
    scores: Scores,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    if not kwargs.pop("train", training) or p == 0:
        return scores
    rows = scores.rows

    def dropped_rows(start: int, end: int, held: Held) -> Tensor:
        return F.dropout(rows(start, end, held), p)

    dropped = Scores(dropped_rows, scores.held, scores.size(-2), scores.row, True)
    if inplace:
        scores.replace(dropped)
    return scores if inplace else dropped


def _reshape(func: Any, scores: Scores, *shape: Any, **kwargs: Any) -> Tensor | None:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    if kwargs or tuple(sizes[-2:]) != tuple(scores.shape[-2:]):
        return None
    leading, columns = sizes[:-2], sizes[-1]
    rows = scores.rows
    found = Scores(
        lambda start, end, held: rows(start, end, held).reshape(*leading, end - start, columns),
        scores.held,
        scores.size(-2),
        scores.row.reshape(*leading, 1, columns),
        scores.draws,
    )
    found.shares = scores.shares = True
    return found


def _same(func: Any, scores: Scores, *args: Any, **kwargs: Any) -> Tensor | None:
    return None if args or kwargs else scores


def _first_einsum(equation: Any, *operands: Any) -> Scores | None:
    """As "bqhd,bkhd->bhqk": rows and columns of the result are each a dim of one factor."""
    found = _letters(equation, operands)
    if found is None or not all(_may_be_factor(operand) for operand in operands):
        return None
    result = found[2]
    row, column = result[-2:] if len(result) > 2 else "  "
    places = [i for i in (0, 1) if row in found[i] and column not in found[i]]
    if len(places) != 1 or column not in found[1 - places[0]] or row in found[1 - places[0]]:
        return None
    letters, others = found[places[0]], found[1 - places[0]]
    query, key = operands[places[0]], operands[1 - places[0]]
    num_rows, columns = query.size(letters.index(row)), key.size(others.index(column))
    width = math.prod(
        query.size(letters.index(c)) for c in letters if c in others and c not in result
    )
    if not _is_large(num_rows, columns, width):
        return None
    moved = letters.replace(row, "")
    moved = f"{moved[:-1]}{row}{moved[-1]}"
    return _call(
        partial(torch.einsum, f"{moved},{others}->{result}"),
        (query.movedim(letters.index(row), -2), _Whole(key)),
        {},
        num_rows,
    )


def _second_einsum(equation: Any, *operands: Any) -> Tensor | None:
    """As "bhqk,bkhd->bqhd": rows of the scores are a dim of the result, and their columns are not."""
    found = _letters(equation, operands)
    if found is None:
        return None
    place = 0 if isinstance(operands[0], Scores) else 1
    scores, letters, others, result = operands[place], found[place], found[1 - place], found[2]
    row, column = letters[-2:]
    if row not in result or row in others or column in result or column not in others:
        return None
    rows, slot = scores.rows, _Slot()

    def compute(start: int, end: int, held: Held) -> Tensor:
        return torch.einsum(f"{letters},{others}->{result}", rows(start, end, held), held[slot])

    return _in_chunks(
        compute,
        scores.tensors() | {slot: operands[1 - place]},
        scores.size(-2),
        scores.draws,
        result.index(row),
    )


def _letters(equation: object, operands: tuple[Any, ...]) -> tuple[str, str, str] | None:
    """The dims of both factors and of the result. None if the equation is of another form."""
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation:
        return None
    given, arrow, result = equation.replace(" ", "").partition("->")
    first, _, second = given.partition(",")
    return (first, second, result) if arrow and len(result) > 2 else None


def _functions(*names: str) -> dict[Any, str]:
    """The functions of these names in `torch`, of tensors, and in `torch.nn.functional`."""
    found = ((getattr(place, name, None), name) for place in (torch, Tensor, F) for name in names)
    return {func: name for func, name in found if func is not None}


_WITH_SUMMAND = frozenset(_functions("baddbmm"))
_PRODUCTS = frozenset(_functions("matmul", "bmm", "baddbmm", "__matmul__", "einsum"))

_RULES: dict[Any, Callable[..., Tensor | None]] = (
    dict.fromkeys(_functions("matmul", "bmm", "__matmul__"), _second_product)
    | dict.fromkeys(_functions("softmax"), _softmax)
    | dict.fromkeys(_functions("mean"), _mean)
    | dict.fromkeys(_functions("dropout"), _dropout)
    | dict.fromkeys(_functions("view", "reshape"), _reshape)
    | dict.fromkeys(_functions("contiguous"), _same)
)
"""`(func, scores, *args, **kwargs)` as a call of the function with scores -> its result, or None."""

_BY_ELEMENT = frozenset(
    _functions(
        "add", "sub", "mul", "div", "true_divide", "neg", "where", "masked_fill", "maximum", "minimum",
        "clamp", "clamp_min", "clamp_max", "tanh", "sigmoid", "exp", "relu", "nan_to_num",
        "to", "type", "type_as", "float", "double", "half", "bfloat16",
        "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__neg__",
    )
)  # fmt: skip

_IN_PLACE: dict[Any, Any] = {
    **{func: getattr(Tensor, name[:-1]) for func, name in _functions(
        "add_", "sub_", "mul_", "div_", "masked_fill_", "clamp_", "tanh_",
    ).items()},
    Tensor.__iadd__: Tensor.add,
    Tensor.__isub__: Tensor.sub,
    Tensor.__imul__: Tensor.mul,
    Tensor.__itruediv__: Tensor.div,
}  # fmt: skip
"""Operations in place, by element, and what computes the same out of place."""

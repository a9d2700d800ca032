"""Chunked loss: avoids materializing the logits of a head, without changes to the user's code.

If the plan enables it, the matrix product of a head (an `nn.Linear`) is deferred. The head returns
`Logits`, a tensor with the shape, dtype and graph position of the product that was not computed:

    hidden [8, 128, 256]  -- head -->  Logits [8, 128, 40000]      nothing is computed
                                       .float().flatten(0, 1)      of hidden: [1024, 256]
                                       F.cross_entropy(_, y)       in chunks; see `lm_loss`

Operations that a loss function applies to logits before their cross-entropy are applied to the hidden
states instead, and the cross-entropy is computed in chunks. Any other operation computes the product
and continues with a plain tensor. The product is computed again each time, since a cached tensor would
be missing where a checkpoint runs the same code again. Code that uses its logits in another way is
therefore correct but saves no memory, which a trace shows. An operation with a lasting effect on the
logits (an in-place write, a hook) is refused, and the planner leaves such a head as it is.

If gradients are disabled inside a pass that has them enabled, as in the forward of an autograd
function, logits are computed: deferred logits would bypass the backward of that function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from math import prod
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from anybatch.compute.blocks import modules_of
from anybatch.compute.lm_loss import PLAIN_LOGITS, chunked_cross_entropy, in_compute_dtype
from anybatch.compute.patch import replace_forward
from anybatch.errors import InputError

_LEAST: ContextVar[int] = ContextVar("least", default=PLAIN_LOGITS)
"""Up to this number, logits are computed as usual; see `PLAIN_LOGITS`."""

_NOTED: ContextVar[list[tuple[int, ...]] | None] = ContextVar("noted", default=None)


def can_be_chunked(head: nn.Module | None) -> bool:
    """Whether the product of `head` can be deferred: the head multiplies by its weight, adds its bias,
    and has no backward hooks."""
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return False
    return not (head._backward_hooks or head._backward_pre_hooks)


def install(model: nn.Module, name: str) -> tuple[ChunkedHead, Callable[[], None]]:
    """Replace the forward of the module `name` of `model` so that its product is deferred while
    `active`. Returns the new forward, and a function that undoes the replacement.

    Raises `InputError` if the product cannot be deferred.
    """
    head = modules_of(model).get(name)
    if not isinstance(head, nn.Linear) or not can_be_chunked(head):
        is_what = (
            "no module of the model" if head is None else f"of the class {type(head).__name__}"
        )
        raise InputError(
            f"chunked_head is {name!r}, which is {is_what}: name the nn.Linear that makes the logits"
            " (without backward hooks), or leave it empty. Where the model multiplies by an"
            " embedding's weight in its own code, compute its loss by anybatch.lm_loss."
        )
    layer = ChunkedHead(head)
    return layer, replace_forward(head, layer.over)


@contextmanager
def active(head: ChunkedHead | None) -> Iterator[None]:
    """Context manager that defers the logits of `head`, if it is not None."""
    if head is None:
        yield
    else:
        with head.active():
            yield


@contextmanager
def however_few() -> Iterator[None]:
    """Context manager that defers logits regardless of their number, for a proof on a small sample."""
    token = _LEAST.set(0)
    try:
        yield
    finally:
        _LEAST.reset(token)


@final
class ChunkedHead:
    """The `forward` of a linear layer whose product can be deferred."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self._run: Callable[[Tensor], Tensor] = layer.forward
        self._active: tuple[bool, ...] = ()  # whether the enclosing pass has gradients

    def __call__(self, hidden: Tensor) -> Tensor:
        found = self._left_out(hidden, *self._active) if self._active else None
        return self._run(hidden) if found is None else found

    def over(self, run: Callable[[Tensor], Tensor]) -> ChunkedHead:
        """Set `run` as the forward for products that are not deferred, and return self."""
        self._run = run
        return self

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context manager that defers the product. Outside, the head computes as usual."""
        before, self._active = self._active, (torch.is_grad_enabled(),)
        try:
            yield
        finally:
            self._active = before

    def _left_out(self, hidden: Tensor, with_grad: bool) -> Tensor | None:
        """Return the deferred product, or None if it has to be computed."""
        weight, bias = self._layer.weight, self._layer.bias
        if hidden.dim() < 2 or torch.compiler.is_compiling():
            return None
        if torch.is_grad_enabled() != with_grad:
            return None
        if hidden.numel() // max(1, weight.size(1)) * weight.size(0) <= _LEAST.get():
            return None
        kind, own = hidden.device.type, weight
        if torch.is_autocast_enabled(kind) and weight.dtype != torch.float64:
            hidden, weight, bias = in_compute_dtype(hidden, weight, bias)
        return logits_of(Product(hidden, weight, bias, own._version, own, with_grad))


@contextmanager
def noting() -> Iterator[list[tuple[int, ...]]]:
    """Context manager that records the shapes of deferred logits that are computed after all."""
    noted: list[tuple[int, ...]] = []
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


@dataclass(frozen=True)
class Product:
    """A deferred product: logits that have not been computed.

    Attributes:
        hidden: `[..., H]`, in the dtype of the product, like `weight` `[V, H]` and `bias` `[V]`.
        version: version counter of `own`, the parameter, when the head ran.
        with_grad: whether gradients were enabled.
        dtype: the dtype that the logits were converted to, if any.
        classes_second: whether the layout is `[B, V, T]`, as `cross_entropy` takes it; else the
            vocabulary is the last dim.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    version: int
    own: Tensor
    with_grad: bool
    dtype: torch.dtype | None = None
    classes_second: bool = False

    @property
    def words(self) -> int:
        return self.weight.size(0)

    @property
    def shape(self) -> tuple[int, ...]:
        leading = tuple(self.hidden.shape[:-1])
        return (
            (leading[0], self.words, leading[1]) if self.classes_second else (*leading, self.words)
        )

    def whole(self) -> Tensor:
        """Compute the logits. Raises `RuntimeError` if the weights have changed since the head ran."""
        if (noted := _NOTED.get()) is not None:
            noted.append(self.shape)
        if self.own._version != self.version:
            raise RuntimeError(
                "logits that were kept from a pass are asked for after the weights have changed: with"
                " the loss in chunks they are not computed before. Use them, or a .clone(), in the loss"
                " function."
            )
        with torch.autocast(self.hidden.device.type, enabled=False):
            logits = F.linear(self.hidden, self.weight, self.bias)
        logits = logits if self.dtype is None else logits.to(self.dtype)
        return logits.transpose(1, 2) if self.classes_second else logits


class _AsComputed(torch.autograd.Function):
    """Inserts `Logits` into the graph in place of the product, for operations that bypass
    `__torch_function__`: the incoming gradient is that of the logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, product: Product
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.classes_second = product.classes_second
        return Logits(product)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        gradient = gradients[0].transpose(1, 2) if ctx.classes_second else gradients[0]
        rows = gradient.to(weight.dtype).flatten(0, -2)
        to_hidden, to_weight, to_bias, _ = ctx.needs_input_grad
        return (
            (rows @ weight).view_as(hidden) if to_hidden else None,
            rows.t() @ hidden.flatten(0, -2) if to_weight else None,
            rows.sum(0) if to_bias else None,
            None,
        )


def logits_of(product: Product) -> Tensor:
    found = _AsComputed.apply(product.hidden, product.weight, product.bias, product)
    assert isinstance(found, Logits)
    found.product = product  # the one with the graph of the caller
    return found


class Logits(Tensor):
    """A tensor of logits that have not been computed; see the module.

    Attributes:
        product: the deferred product.
    """

    product: Product

    @staticmethod
    def __new__(cls: type[Logits], product: Product) -> Logits:
        """Create a tensor with the shape and dtype that the computed logits would have."""
        hidden = product.hidden
        made = Tensor._make_wrapper_subclass(
            cls,
            product.shape,
            dtype=product.dtype or hidden.dtype,
            device=hidden.device,
            requires_grad=False,
        )
        made.product = product
        return made

    def computed(self) -> Tensor:
        return self.product.whole()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Part of the protocol of wrapper subclasses, by which a trace knows them; see the trace."""
        return [], None

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute the logits for an operation that arrives below autograd."""
        with torch.no_grad():
            args, kwargs = tree_map_only(Logits, Logits.computed, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Keep the logits deferred if there is a rule for `func`, else compute them first."""
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if has_lasting_effect(func, kwargs):
            raise InputError(
                "the plan computes the loss in chunks, and the logits are written to in place, or a"
                f" hook is put on them ({func.__name__}): do so out of place, or leave chunked_head"
                " empty."
            )
        rule = _RULES.get(func)
        first = args[0] if args else None
        # Where gradients are disabled, as in an autograd function, the result would have none.
        if (
            rule
            and isinstance(first, Logits)
            and torch.is_grad_enabled() == first.product.with_grad
        ):
            with torch._C.DisableTorchFunctionSubclass():
                found = rule(first, *args[1:], **kwargs)
            if found is not None:
                return found
        args, kwargs = tree_map_only(Logits, Logits.computed, (args, kwargs))
        return func(*args, **kwargs)


def has_lasting_effect(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether `func` has a lasting effect on its arguments, such as an in-place write or a hook."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return func == _DATA or name in _WRITES or name == "__set__"
    named = bool(kwargs.get("inplace")) or kwargs.get("out") is not None
    return named or name.endswith("_") or name in ("register_hook", "retain_grad")


_DATA: Any = getattr(Tensor, "data").__get__  # noqa: B009 - the getter, not a value
_WRITES = {"__setitem__", "__ior__", "__iand__", "__ixor__", "__ilshift__", "__irshift__"} | {
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow")
}

METADATA: frozenset[Any] = frozenset(
    {
        getattr(Tensor, name).__get__
        for name in (
            "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf",
            "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_meta", "is_nested", "itemsize",
            "_version", "retains_grad", "output_nr", "_base", "_backward_hooks",
        )
    }
    | {
        Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.get_device,
        Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.__len__,
        Tensor.__hash__, Tensor.is_contiguous, Tensor.stride, Tensor.untyped_storage, Tensor._is_view,
        torch.is_floating_point, torch.is_complex, torch.numel,
    }
)  # fmt: skip
"""Functions that do not read values."""


# -------------------------------------------------------- operations applied to hidden states instead

Rule = Callable[..., Tensor | None]
"""`(logits, *args, **kwargs)` as the function -> its result, or None if values are needed."""


def _same(logits: Logits, *args: Any, **kwargs: Any) -> Tensor | None:
    return logits if not kwargs and not args else None


def _reshape(logits: Logits, *shape: Any, **kwargs: Any) -> Tensor | None:
    product = logits.product
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    if product.classes_second or kwargs or not sizes or not all(type(s) is int for s in sizes):
        return None
    *leading, words = sizes
    tokens = product.hidden.shape[:-1].numel()
    known = prod(size for size in leading if size >= 0)
    if words == -1:
        words = product.words if known == tokens else 0
    fits = known == tokens or (-1 in leading and known and tokens % known == 0)
    if words != product.words or not fits:
        return None
    return _with(product, hidden=product.hidden.reshape(*leading, product.hidden.size(-1)))


def _flatten(logits: Logits, start_dim: int = 0, end_dim: int = -1) -> Tensor | None:
    product, dims = logits.product, logits.product.hidden.dim()
    if product.classes_second or end_dim % dims >= dims - 1:
        return None
    return _with(product, hidden=product.hidden.flatten(start_dim, end_dim % dims))


def _index(logits: Logits, index: Any) -> Tensor | None:
    """Select some of the tokens, with all of the vocabulary."""
    product = logits.product
    parts = index if isinstance(index, tuple) else (index,)
    if product.classes_second or not _leaves_words(parts, product.hidden.dim()):
        return None
    return _with(product, hidden=product.hidden[index])


def _leaves_words(parts: tuple[Any, ...], dims: int) -> bool:
    taken = 0
    for part in parts:
        if part is None or part is Ellipsis:
            continue
        if isinstance(part, Tensor):
            taken += part.dim() if part.dtype in (torch.bool, torch.uint8) else 1
        elif isinstance(part, slice) or type(part) is int:
            taken += 1
        else:
            return False
    last = parts[-1] if parts else None
    ends_whole = isinstance(last, slice) and last == slice(None)
    if Ellipsis in [part for part in parts if not isinstance(part, Tensor)]:
        return ends_whole
    return taken < dims or (taken == dims and ends_whole)


def _convert(logits: Logits, *args: Any, **kwargs: Any) -> Tensor | None:
    """Convert to a wider dtype. The sums of the loss are computed in such a dtype in any case."""
    product = logits.product
    values = [*args, *kwargs.values()]
    if len(values) != 1 or not set(kwargs) <= {"dtype"}:
        return None
    if values[0] == logits.dtype or values[0] == logits.device:
        return logits
    wide = torch.float64 if product.hidden.dtype == torch.float64 else torch.float32
    return _with(product, dtype=wide) if values[0] is wide else None


def _float(logits: Logits, **kwargs: Any) -> Tensor | None:
    return None if kwargs else _convert(logits, torch.float32)


def _transpose(logits: Logits, one: int, other: int) -> Tensor | None:
    dims = logits.dim()
    if dims != 3 or {one % dims, other % dims} != {1, 2}:
        return None
    return _with(logits.product, classes_second=not logits.product.classes_second)


def _permute(logits: Logits, *dims: Any) -> Tensor | None:
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], tuple | list) else dims
    if logits.dim() != 3 or [dim % 3 for dim in order] != [0, 2, 1]:
        return None
    return _transpose(logits, 1, 2)


def _turn(logits: Logits, *_type: Any) -> Tensor | None:
    return _transpose(logits, 1, 2)


def _cross_entropy(
    logits: Logits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Any = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    product, hidden = logits.product, logits.product.hidden
    if weight is not None or size_average is not None or reduce is not None:
        return None
    plain = isinstance(target, Tensor) and not isinstance(target, Logits)
    in_rows = hidden.dim() == 2 or (hidden.dim() == 3 and product.classes_second)
    if not plain or not in_rows or reduction not in ("sum", "mean", "none"):
        return None
    if target.dtype != torch.int64 or target.shape != hidden.shape[:-1]:
        return None
    found = chunked_cross_entropy(
        hidden.flatten(0, -2),
        product.weight,
        product.bias,
        target.reshape(-1),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    if not torch.is_autocast_enabled(hidden.device.type):  # autocast computes losses in float32
        found = found.to(logits.dtype)
    return found.view(target.shape) if reduction == "none" else found


def _with(product: Product, **changes: Any) -> Tensor:
    return logits_of(replace(product, **changes))


_RULES: dict[Any, Rule] = {
    Tensor.contiguous: _same,
    Tensor.view: _reshape,
    Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.__getitem__: _index,
    Tensor.float: _float,
    Tensor.to: _convert,
    Tensor.type: _convert,
    Tensor.transpose: _transpose,
    Tensor.swapaxes: _transpose,
    Tensor.swapdims: _transpose,
    torch.transpose: _transpose,
    Tensor.permute: _permute,
    torch.permute: _permute,
    getattr(Tensor, "mT").__get__: _turn,  # noqa: B009 - the getter, not a value
    F.cross_entropy: _cross_entropy,
}

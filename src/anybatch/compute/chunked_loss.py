"""Chunked loss: the logits of a head are never all there, in code that knows nothing of it.

While a plan says so, the product of a head is left out, and what it returns are `Logits`:

    hidden [8, 128, 256]  -- head -->  Logits [8, 128, 40000]      nothing is computed
                                       .float().flatten(0, 1)      of hidden: [1024, 256]
                                       F.cross_entropy(_, y)       in chunks; see `lm_loss`

A head is an `nn.Linear`, or an `nn.Embedding` by whose weight the model multiplies (`hidden @
embed.weight.T`, `F.linear(hidden, embed.weight)`). While a loss is computed its forward is another, or
what its attribute `weight` gives. What that gains shows in a trace, which runs the same code: code that
does something else with its logits is right, and gains nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from anybatch.compute.blocks import modules_of
from anybatch.compute.lm_loss import PLAIN_LOGITS, in_compute_dtype
from anybatch.compute.logits import Product, StandIn, logits_of
from anybatch.compute.patch import replace_forward
from anybatch.errors import InputError

_LEAST: ContextVar[int] = ContextVar("least", default=PLAIN_LOGITS)
"""Up to so many logits are computed as ever; see `PLAIN_LOGITS`."""


class ChunkedHead(ABC):
    """A head whose product can be left out."""

    @contextmanager
    @abstractmethod
    def active(self) -> Iterator[None]:
        """Leave it out inside. Outside, the head computes as ever."""
        yield


def can_be_chunked(head: nn.Module | None) -> bool:
    """Whether the product of `head` can be left out: it multiplies by its weight, adds its bias, and
    nobody waits for its gradients."""
    if isinstance(head, nn.Embedding):
        return isinstance(head._parameters.get("weight"), nn.Parameter)
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return False
    return not (head._backward_hooks or head._backward_pre_hooks)


def install(model: nn.Module, name: str) -> tuple[ChunkedHead, Callable[[], None]]:
    """Let the product of the module `name` of `model` be left out where that is active; the function
    that is returned undoes it.

    Raises `InputError` if it cannot.
    """
    head = modules_of(model).get(name)
    if not can_be_chunked(head):
        is_what = (
            "no module of the model" if head is None else f"of the class {type(head).__name__}"
        )
        raise InputError(
            f"chunked_head is {name!r}, which is {is_what}: name the nn.Linear that makes the logits"
            " (without backward hooks), or the nn.Embedding whose weight does, or leave it empty."
        )
    if isinstance(head, nn.Linear):
        layer = _Layer(head)
        return layer, replace_forward(head, layer.over)
    assert isinstance(head, nn.Embedding)
    return _Weight(model, head.weight), lambda: None


@contextmanager
def active(head: ChunkedHead | None) -> Iterator[None]:
    """Leave the logits of `head` out inside, if there is one."""
    if head is None:
        yield
    else:
        with head.active():
            yield


@contextmanager
def however_few() -> Iterator[None]:
    """Inside, logits are left out however few they are: for a proof on a small sample."""
    token = _LEAST.set(0)
    try:
        yield
    finally:
        _LEAST.reset(token)


def _left_out(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, with_grad: bool
) -> Tensor | None:
    """The product, not computed; None if it is to be. `with_grad`: whether gradients are on in the pass
    (see `logits`)."""
    if hidden.dim() < 2 or torch.compiler.is_compiling() or torch.is_grad_enabled() != with_grad:
        return None
    if hidden.numel() // max(1, weight.size(1)) * weight.size(0) <= _LEAST.get():
        return None
    kind, own = hidden.device.type, weight
    if torch.is_autocast_enabled(kind) and weight.dtype != torch.float64:
        hidden, weight, bias = in_compute_dtype(hidden, weight, bias)
    return logits_of(Product(hidden, weight, bias, own._version, own, with_grad))


class _Layer(ChunkedHead):
    """The `forward` of a linear layer."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self._run: Callable[[Tensor], Tensor] = layer.forward
        self._active: tuple[bool, ...] = ()  # of the pass around: whether gradients are on

    def __call__(self, hidden: Tensor) -> Tensor:
        found = None
        if self._active:
            found = _left_out(hidden, self._layer.weight, self._layer.bias, *self._active)
        return self._run(hidden) if found is None else found

    def over(self, run: Callable[[Tensor], Tensor]) -> _Layer:
        """This one, with `run` where the product is not left out."""
        self._run = run
        return self

    @contextmanager
    def active(self) -> Iterator[None]:
        """See `ChunkedHead`."""
        before, self._active = self._active, (torch.is_grad_enabled(),)
        try:
            yield
        finally:
            self._active = before


class _Weight(ChunkedHead):
    """A weight that a model multiplies by in its own code. While active, the attributes of modules that
    give it give a tensor that stands for it."""

    def __init__(self, model: nn.Module, weight: Tensor) -> None:
        self._weight = weight
        self._places = [
            (module, name)
            for module in model.modules()
            for name, param in module._parameters.items()
            if param is weight
        ]

    @contextmanager
    def active(self) -> Iterator[None]:
        """See `ChunkedHead`."""
        stands = _Standing.apply(self._weight)
        stands.with_grad = torch.is_grad_enabled()
        for module, name in self._places:  # found before what `_parameters` holds
            vars(module)[name] = stands
        try:
            yield
        finally:
            for module, name in self._places:
                vars(module).pop(name, None)


class _Standing(torch.autograd.Function):
    """A weight, in a place of the graph from which its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, is_turned: bool = False) -> Tensor:
        ctx.is_turned = is_turned
        return HeadWeight(weight, is_turned)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].t() if ctx.is_turned else gradients[0], None


class HeadWeight(StandIn):
    """Stands for a weight `[V, H]`, or for it turned. To multiply by it makes logits that are left out;
    everything else is done to the weight itself."""

    weight: Tensor
    is_turned: bool
    with_grad: bool

    @staticmethod
    def __new__(cls: type[HeadWeight], weight: Tensor, is_turned: bool = False) -> HeadWeight:
        """Of its shape."""
        made = Tensor._make_wrapper_subclass(
            cls,
            weight.shape[::-1] if is_turned else weight.shape,
            dtype=weight.dtype,
            device=weight.device,
            requires_grad=False,
        )
        made.weight, made.is_turned = weight, is_turned
        return made

    def turned(self) -> Tensor:
        """The other way round."""
        found = _Standing.apply(self.weight, not self.is_turned)
        found.with_grad = self.with_grad
        return found

    def computed(self) -> Tensor:
        """The weight, in the graph."""
        return self.weight.t() if self.is_turned else self.weight

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Multiply, turn, or go on with the weight."""
        kwargs = kwargs or {}
        found = None
        if func in _TURNS and isinstance(args[0], HeadWeight) and not kwargs:
            if {dim % 2 for dim in args[1:]} in (set(), {0, 1}):
                return args[0].turned()
        elif func is F.linear and _is_standing(args, 1, is_turned=False) and len(args) == 2:
            if set(kwargs) <= {"bias"}:
                found = _left_out(args[0], args[1].weight, kwargs.get("bias"), args[1].with_grad)
        elif func in _PRODUCTS and _is_standing(args, 1, is_turned=True) and not kwargs:
            found = _left_out(args[0], args[1].weight, None, args[1].with_grad)
        if found is not None:
            return found
        args, kwargs = tree_map_only(HeadWeight, HeadWeight.computed, (args, kwargs))
        return func(*args, **kwargs)


def _is_standing(args: tuple[Any, ...], place: int, is_turned: bool) -> bool:
    """Whether the argument at `place` stands for a weight, turned or not, and the first is plain."""
    standing = args[place] if len(args) > place else None
    return (
        isinstance(standing, HeadWeight)
        and standing.is_turned == is_turned
        and isinstance(args[0], Tensor)
        and not isinstance(args[0], HeadWeight)
    )


_TURNS: frozenset[Any] = frozenset(
    {getattr(Tensor, name).__get__ for name in ("T", "mT")}
    | {Tensor.t, torch.t, Tensor.transpose, torch.transpose, Tensor.swapaxes, Tensor.swapdims}
)
_PRODUCTS: frozenset[Any] = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__})

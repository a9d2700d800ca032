"""Joint losses: a loss over all samples of the global batch, computed in passes over micro-batches.

A contrastive loss L compares every sample with every other, so it is not a sum over micro-batches. But
it depends on the samples only through their encodings z, which are small, and the chain rule requires
no more than that (Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited
Setup"):

    encode      every micro-batch without gradient                         z = f(x)
    compare     all encodings at once, those of all ranks                  L(z), g = dL/dz
    once more   every micro-batch, with gradient                           f backward from its rows of g

The gradients of the last passes add up to the gradient of L, provided that f computes the same both
times: the random state is the same, and norms use ghost batches. If a rank has a single pass, the graph
of the first pass is kept. Gradients of parameters that L uses directly (a temperature) are split among
the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from anybatch.compute.loss import explained_as, read_loss, widened
from anybatch.data.batch_slices import map_leaves, parts_of
from anybatch.errors import LossError
from anybatch.task import JointLoss, Loss, LossFunction

_REMEDY = "return tensors with one row for each sample in dim 0, or any nesting of such"

USES_PARAMETERS = (
    "compare uses a parameter of the model itself, of which each rank has a part only (parallel"
    " 'shard'): let the model's forward, and encode, hand it on with the rows, as"
    " scale.expand(len(rows)), say"
)

Kinds: TypeAlias = "tuple[tuple[tuple[int, ...], torch.dtype], ...]"
"""Shape and dtype of one sample's row, for each tensor."""

Ask: TypeAlias = "Callable[[Any], Share]"
"""Maps the detached encodings of a pass to its share of the comparison."""


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """The share of a comparison that belongs to one pass.

    Attributes:
        loss: the pass's part of the sum, weight and metrics.
        gradients: gradient of the sum with respect to each tensor of the pass's encodings; None if the
            sum does not depend on that tensor.
        direct: parameters that the comparison uses directly, with the pass's part of their gradients.
    """

    loss: Loss
    gradients: Sequence[Tensor | None]
    direct: Sequence[tuple[Tensor, Tensor]]

    def of(self, encoded: Any) -> Loss:
        """Return the loss of the pass; its backward continues from the gradients of the comparison.

        Raises `LossError` if nothing in the pass has a gradient.
        """
        pairs = [
            (leaf, gradient)
            for leaf, gradient in zip(tensors_in(encoded), self.gradients, strict=True)
            if gradient is not None and leaf.requires_grad
        ]
        pairs += self.direct
        if not pairs:
            raise LossError(
                "the loss does not depend on any parameter that requires a gradient: look for"
                " .detach(), .item() or torch.no_grad() in encode, or for layers that are all frozen."
            )
        tensors, gradients = zip(*pairs, strict=True)
        total = _Handed.apply(self.loss.sum, gradients, *tensors)
        return Loss(total, self.loss.weight, self.loss.metrics)


class _Handed(torch.autograd.Function):
    """A scalar whose gradient with respect to each tensor is already known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> Any:
        """Return the known gradients, multiplied by the gradient of the scalar."""
        (factor,) = grad_outputs
        given = zip(ctx.gradients, ctx.dtypes, strict=True)
        return None, None, *((gradient * factor).to(dtype) for gradient, dtype in given)


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """A joint loss over all samples, and its gradient.

    Attributes:
        loss: the loss, detached.
        num_samples: number of samples that the loss covers.
        gradients, direct: as in `Share`, for all samples.
    """

    loss: Loss
    num_samples: int
    gradients: Sequence[Tensor | None]
    direct: Sequence[tuple[Tensor, Tensor]]

    def share(self, start: int, stop: int) -> Share:
        """Return the share of the pass that has the samples from `start` to `stop`."""

        def part(value: Any) -> Any:
            return value * (stop - start) / self.num_samples

        loss = self.loss
        metrics = {
            name: tuple(map(part, value)) if isinstance(value, tuple) else part(value)
            for name, value in loss.metrics.items()
        }
        return Share(
            Loss(part(loss.sum), part(loss.weight), metrics),
            [None if gradient is None else gradient[start:stop] for gradient in self.gradients],
            [(param, part(gradient)) for param, gradient in self.direct],
        )


def nobody(encoded: Any) -> Share:
    """An `Ask` that returns a share without a comparison, used to time passes."""
    leaves = tensors_in(encoded)
    gradients = [torch.ones_like(one) if one.is_floating_point() else None for one in leaves]
    return Share(Loss(leaves[0].new_zeros((), dtype=torch.float32), len(leaves[0])), gradients, ())


class Joint:
    """Makes a joint loss the loss function of a pass, which gets its share from an `Ask`."""

    def __init__(self, loss: JointLoss) -> None:
        self._loss = loss
        self._asked: tuple[Ask, int] | None = None

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Return the loss of a pass, or that of all samples outside of `asking`."""
        if self._asked is None:
            return self._loss(model, batch)
        ask, num_samples = self._asked
        encoded = self.encode(model, batch, num_samples)
        return ask(map_leaves(encoded, detached)).of(encoded)

    @contextmanager
    def asking(self, ask: Ask | None, num_samples: int) -> Iterator[None]:
        """Context manager for a pass of `num_samples` samples; `ask`: None if there are no others."""
        self._asked = None if ask is None else (ask, num_samples)
        try:
            yield
        finally:
            self._asked = None

    def encode(self, model: nn.Module, batch: Any, num_samples: int) -> Any:
        """Encode a batch of `num_samples` samples; 0: of any number of samples, none of which counts.
        Raises `LossError` if the encodings do not have one row per sample."""
        encoded = self._loss.encode(model, batch)
        map_leaves(encoded, lambda leaf: _check_rows(leaf, num_samples))
        if not tensors_in(encoded):
            raise LossError(f"encode returned no tensor: {_REMEDY}.")
        return encoded

    def compare(
        self,
        model: nn.Module,
        encoded: Any,
        num_samples: int,
        parameters: Sequence[Tensor],
        seed: Callable[[Tensor], Tensor],
    ) -> Comparison:
        """Compute the loss of all samples and its gradient.

        Args:
            model: passed to the user's `compare`.
            encoded: encodings of all samples, detached.
            num_samples: the number of all samples.
            parameters: parameters that the comparison may use directly.
            seed: returns the factor of the sum's gradient in backward (scalar tensor); the resulting
                gradients are divided by it.

        Raises `LossError` if the user's `compare` does not return a loss.
        """
        with torch.enable_grad():
            encoded = map_leaves(encoded, _as_leaf)
            returned = _weighed(self._loss.compare(model, encoded))
            loss = read_loss(returned, lambda: num_samples)
        leaves = tensors_in(encoded)
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        total = widened(loss.sum)
        factor = seed(total)
        with _without_hooks(parameters):
            found = torch.autograd.grad(total, [*asked, *parameters], factor, allow_unused=True)
        found = [None if one is None else _divided(one, factor) for one in found]
        own, direct = iter(found[: len(asked)]), found[len(asked) :]
        return Comparison(
            Loss(total.detach(), loss.weight, map_leaves(loss.metrics, detached)),
            num_samples,
            [next(own) if leaf.requires_grad else None for leaf in leaves],
            [(p, one) for p, one in zip(parameters, direct, strict=True) if one is not None],
        )

    def evaluate(self, model: nn.Module, encoded: Any, num_samples: int) -> Loss:
        """Return the loss of all samples, without gradient. Raises as `compare` does."""
        returned = self._loss.compare(model, encoded)
        return read_loss(returned, lambda: num_samples, training=False)


def naming_divided() -> AbstractContextManager[None]:
    """Context manager for a comparison: replaces torch's error on mixed DTensors by a `LossError`."""
    return explained_as("mixed torch.Tensor and DTensor", f"{USES_PARAMETERS}.")


def encodings_of(loss: JointLoss) -> LossFunction:
    """Return a loss function that is finite, with a finite gradient, if the encodings of a batch are.
    It is used to check single samples, for which a joint loss is not defined."""

    def total(model: nn.Module, batch: Any) -> Loss:
        leaves = (one for one in tensors_in(loss.encode(model, batch)) if one.is_floating_point())
        sums = [one.sum(dtype=torch.float64) for one in leaves]
        return Loss(torch.stack(sums).sum(), 1)

    return total


def tensors_in(encoded: Any) -> list[Tensor]:
    parts = parts_of(encoded)
    if parts is None:
        return [encoded] if isinstance(encoded, Tensor) else []
    return [tensor for _, part in parts for tensor in tensors_in(part)]


def with_tensors(encoded: Any, tensors: Sequence[Tensor]) -> Any:
    """Return a structure like `encoded` that contains `tensors`, in order."""
    left = iter(tensors)
    return map_leaves(encoded, lambda leaf: next(left) if isinstance(leaf, Tensor) else leaf)


def rows_like(encoded: Any, num_samples: int) -> Any:
    """Return uninitialized encodings of `num_samples` samples, with rows like those of `encoded`."""
    tensors = tensors_in(encoded)
    return with_tensors(encoded, [one.new_empty((num_samples, *one.shape[1:])) for one in tensors])


class Rows:
    """Collects encodings of `num_samples` samples as they are computed. Memory for all of them is
    allocated at the first one, so that no pieces remain among the allocations of other passes."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._whole: Any = None
        self._filled = 0

    def add(self, encoded: Any, num_samples: int) -> None:
        """Append encodings, unless `num_samples` is 0 (see `Joint.encode`). Raises `LossError` if their
        row shapes or dtypes differ from those of earlier ones."""
        if self._whole is None:
            self._whole = rows_like(encoded, self._num_samples)
        if not num_samples:
            return
        tensors, places = tensors_in(encoded), tensors_in(self._whole)
        before, now = kinds_of(places), kinds_of(tensors)
        if now != before:
            raise LossError(
                f"encode returned ({format_kinds(before)}) and ({format_kinds(now)}) for two"
                " micro-batches of a step, which cannot be compared: let it return the same tensors, of"
                " one shape per sample (padded, say) and one dtype."
            )
        begin, self._filled = self._filled, self._filled + len(tensors[0])
        for place, tensor in zip(places, tensors, strict=True):
            place[begin : self._filled].copy_(tensor)

    def taken(self) -> Any:
        """Return all rows as one encoding, and drop the reference to it."""
        whole, self._whole = self._whole, None
        return whole


def kinds_of(tensors: Sequence[Tensor]) -> Kinds:
    """Return the shape and dtype of one row of each tensor."""
    return tuple((tuple(one.shape[1:]), one.dtype) for one in tensors)


def format_kinds(kinds: Kinds) -> str:
    return ", ".join(f"{list(shape)} {str(d).removeprefix('torch.')}" for shape, d in kinds)


def _check_rows(leaf: Any, num_samples: int) -> Any:
    if leaf is None:
        return leaf
    if not isinstance(leaf, Tensor):
        raise LossError(f"encode returned a value of type {type(leaf).__name__}: {_REMEDY}.")
    if not leaf.dim() or len(leaf) != (num_samples or len(leaf)):
        raise LossError(
            f"encode returned a tensor of the shape {tuple(leaf.shape)} for {num_samples} samples:"
            f" {_REMEDY}."
        )
    return leaf


def _weighed(returned: Any) -> Any:
    """Detach the weight in what a loss function returned. A weight that is computed from encodings
    (sample weights, for example) would seem to have a gradient, since all encodings require one."""
    if isinstance(returned, Loss):
        return replace(returned, weight=detached(returned.weight))
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned[0], detached(returned[1])
    return returned


def detached(leaf: Any) -> Any:
    """Return `leaf` without its graph if it is a tensor, else unchanged."""
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _as_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.is_floating_point())


def _divided(gradient: Tensor, factor: Tensor) -> Tensor:
    """Divide in float32 or wider: the scale kept the gradient in the range of half precision."""
    return widened(gradient) / factor


@contextmanager
def _without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Context manager that disables gradient hooks: they run only when a pass adds a gradient."""
    hooks = [(p._backward_hooks, dict(p._backward_hooks)) for p in parameters if p._backward_hooks]
    for registered, _ in hooks:
        registered.clear()
    try:
        yield
    finally:
        for registered, before in hooks:
            registered.update(before)

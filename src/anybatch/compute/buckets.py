"""Gradient buckets: gradients in flat storage, so that ranks can sum them in few, large pieces.

`param.grad` of every parameter that backward has reached is a view into a bucket; autograd accumulates
into it in place. Buckets are filled from the last parameter to the first, the order in which backward
computes gradients, so the first bucket is complete and can be communicated while backward still
computes the others:

    backward   | layer 4 | layer 3 | layer 2 | layer 1 |
    bucket 0   | ........ complete: its sum over the ranks begins
    bucket 1             | .................. complete

Gradients are not zeroed between steps: the first gradient of a step overwrites that of the previous
step, and only gradients that no pass has reached are zeroed before communication. A parameter that no
pass of the step used must not be updated (momentum and weight decay would change it), although its
gradient in the bucket is zeros rather than None. `used` records which parameters were used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, final

import torch
from torch import Tensor, nn

from anybatch.errors import InputError

FIRST_BYTES, BUCKET_BYTES, CPU_BUCKET_BYTES = 1 << 20, 25 << 20, 4 << 20
"""The first bucket is small so that communication starts early; 1 and 25 MiB worked well for
DistributedDataParallel (Li et al. 2020, "PyTorch Distributed", section 5.3). With gloo, smaller buckets
are faster, since several buckets in flight use both directions of the network link
(benchmarks/communication)."""

_PIECE_BYTES = 4 << 20

_ALIGNED = 64  # bytes: an alignment that suits vector instructions and multi-tensor kernels


@final
class Buckets:
    """The gradients of `parameters`, as views into flat tensors. After `close`, autograd allocates
    gradients itself.

    Args:
        parameters: the parameters that the optimizer updates.
        leaves: for each parameter that is a master copy, the parameter that autograd differentiates.

    Attributes:
        flats: the buckets, in the order in which they become complete; 1-D, one dtype each.
        views: each parameter's gradient as a view into its bucket, in the parameter's shape.
        used: for each parameter, whether a backward pass has reached it since `drop`.
        norms: 2-norms of the first buckets, as far as `measure` has computed them since `drop`.
        own_norms: 2-norms of pieces that together cover all gradients, computed before buckets are
            handed over, if `giving` is called with `measured`; else empty.
        late: whether a gradient was accumulated after its bucket had been handed over. This happens
            with reentrant checkpoints, where one backward pass reaches a parameter more than once.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        leaves: Mapping[nn.Parameter, nn.Parameter] | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self.flats: list[Tensor] = []
        self.views: list[Tensor] = [torch.empty(0)] * len(self._parameters)
        self.used: list[bool] = [False] * len(self._parameters)
        self.norms: list[Tensor] = []
        self.own_norms: list[Tensor] = []
        self.late: bool = False
        self._bucket_of: list[int] = [0] * len(self._parameters)
        self._sizes: list[int] = []  # parameters per bucket
        self._give: Callable[[int], None] | None = None
        self._missing: list[int] = []
        self._given = 0
        self._lay_out()
        self._handles: list[Any] = []
        for i, param in enumerate(self._parameters):
            leaf = (leaves or {}).get(param, param)
            if leaf is not param:  # its gradient is accumulated into that of the master
                self._handles.append(leaf.register_hook(self._before(i)))
            self._handles.append(leaf.register_post_accumulate_grad_hook(self._hook(i)))
        self.drop()

    def drop(self) -> None:
        """Set all gradients to None, and mark all parameters as unused."""
        for param in self._parameters:
            param.grad = None
        self.used = [False] * len(self._parameters)
        self.norms.clear()
        self.own_norms.clear()
        self.late = False

    def complete(self) -> None:
        """Zero the gradients that no pass has written, before communication. Allocates no memory."""
        if not all(self.used):
            left = [view for view, used in zip(self.views, self.used, strict=True) if not used]
            torch._foreach_zero_(left)

    def measure(self, number: int) -> None:
        """Compute the norm of bucket `number`, which now holds sums over all ranks. To be called for
        the buckets in order: the computation overlaps with the communication of later buckets."""
        if number == len(self.norms) and self.flats[number].itemsize >= 4:
            self.norms.append(torch.linalg.vector_norm(self.flats[number]))

    @contextmanager
    def giving(self, give: Callable[[int], None], measured: bool = False) -> Iterator[None]:
        """Context manager for the last backward pass of a step: calls `give(number)` for each bucket as
        it becomes complete, in order. `measured`: it is the only pass, and `own_norms` are computed."""

        def measure(number: int) -> None:
            self.own_norms.append(norm_of([self.flats[number]], wide=True))
            give(number)

        self._give = measure if measured else give
        self._missing, self._given = list(self._sizes), 0
        try:
            yield
        finally:
            self._give = None
        if measured and (rest := self._written_since(self._given)):
            self.own_norms.append(norm_of(rest, wide=True))

    def _written_since(self, bucket: int) -> list[Tensor]:
        """Return the gradients that passes have reached, from `bucket` on."""
        places = zip(self.views, self.used, self._bucket_of, strict=True)
        return [view for view, used, number in places if used and number >= bucket]

    def attach(self) -> None:
        """Set the gradient of every parameter to its view into the buckets."""
        self.drop_unused([True] * len(self._parameters))

    def drop_unused(self, used: Sequence[bool]) -> None:
        """Set the gradient of each parameter to its view if `used`, else to None, so that the optimizer
        skips the parameter, as in a plain loop."""
        for param, view, kept in zip(self._parameters, self.views, used, strict=True):
            param.grad = view if kept else None

    def close(self) -> None:
        """Remove the hooks, and set all gradients to None."""
        for handle in self._handles:
            handle.remove()
        for param in self._parameters:
            param.grad = None

    def _lay_out(self) -> None:
        room: dict[tuple[torch.dtype, torch.device], tuple[int, int]] = {}  # bucket, elements in it
        lengths: list[int] = []
        kinds: list[tuple[torch.dtype, torch.device]] = []
        offsets = [0] * len(self._parameters)
        for i in reversed(range(len(self._parameters))):
            param = self._parameters[i]
            kind = param.dtype, param.device
            number, filled = room.get(kind, (-1, 0))
            later = CPU_BUCKET_BYTES if param.device.type == "cpu" else BUCKET_BYTES
            most = FIRST_BYTES if number == 0 else later
            if number < 0 or filled * param.itemsize >= most:
                number, filled = len(lengths), 0
                lengths.append(0)
                kinds.append(kind)
                self._sizes.append(0)
            self._bucket_of[i], offsets[i] = number, filled
            self._sizes[number] += 1
            step = max(1, _ALIGNED // param.itemsize)
            filled += -(-param.numel() // step) * step
            lengths[number] = filled
            room[kind] = number, filled
        self.flats = [
            torch.zeros(length, dtype=dtype, device=device)
            for length, (dtype, device) in zip(lengths, kinds, strict=True)
        ]
        for i, param in enumerate(self._parameters):
            flat = self.flats[self._bucket_of[i]]
            # With the strides of the parameter (channels-last, for example), as autograd allocates it.
            dense = torch.empty_like(param, device="meta").stride()
            self.views[i] = flat.as_strided(param.shape, dense, offsets[i])

    def _hook(self, i: int) -> Callable[[Tensor], None]:
        param, view = self._parameters[i], self.views[i]

        def ready(_: Tensor) -> None:
            if param.grad is not view:
                self._take(param, view)
            self.used[i] = True
            if self._give is None:
                return
            bucket = self._bucket_of[i]
            if bucket < self._given or self._missing[bucket] == 0:
                self.late = True
                return
            self._missing[bucket] -= 1
            # Strictly in order: all ranks must sum the same bucket at the same time.
            while self._given < len(self._missing) and self._missing[self._given] == 0:
                self._given += 1
                self._give(self._given - 1)

        return ready

    def _before(self, i: int) -> Callable[[Tensor], None]:
        param, view = self._parameters[i], self.views[i]

        def fresh(_: Tensor) -> None:
            if param.grad is None:
                param.grad = view.zero_()

        return fresh

    @staticmethod
    @torch.no_grad()
    def _take(param: nn.Parameter, view: Tensor) -> None:
        made = param.grad
        if made is None:  # a hook of the user has removed it
            view.zero_()
        else:
            view.copy_(made.to_dense() if made.is_sparse else made)
        param.grad = view


@torch.no_grad()
def norm_of(values: list[Tensor], wide: bool = False) -> Tensor:
    """2-norm of all `values` together. If `wide`, it is computed in float32 or wider, since the norm of
    half-precision sums may overflow their dtype. torch's `get_total_norm` first groups tensors by
    device and dtype, which takes longer than the norm in a small model."""
    kind = None
    if wide and any(value.itemsize < 4 for value in values):
        kind = reduce(torch.promote_types, {value.dtype for value in values}, torch.float32)
    norms = torch._foreach_norm(values, dtype=kind)
    return torch.linalg.vector_norm(torch.stack(norms))


def piece_of(flat: Tensor, num_ranks: int) -> int:
    """Number of elements of a bucket that each rank sums at a time, where ranks compute the sums
    themselves. It is limited because elements that wait to be summed take memory."""
    return max(1, min(_PIECE_BYTES // flat.itemsize, -(-len(flat) // num_ranks)))


def check_dense(model: nn.Module) -> None:
    """Raises `InputError` if a module of `model` produces sparse gradients, which cannot be stored in a
    bucket."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise InputError(
                f"the embedding {name!r} makes sparse gradients, which cannot be added up over several"
                " ranks: build it with sparse=False, or train on one device."
            )


def check_divisible(model: nn.Module) -> None:
    """Raises `InputError` if the parameters of `model`, which may be fake, cannot be sharded."""
    check_dense(model)
    for name, param in model.named_parameters():
        if param.dim() == 0:
            raise InputError(
                f"the parameter {name!r} is a single number without a dim, which cannot be divided over"
                " ranks: give it the shape (1,), or replicate the model."
            )
    dtypes = _dtypes(model.parameters())
    if len(dtypes) > 1:
        raise InputError(
            f"the model has trainable parameters in {' and '.join(dtypes)}, and those of a sharded one"
            " must be in one dtype: build it in one, and choose how it computes by the precision."
        )


def _dtypes(params: Iterable[nn.Parameter]) -> list[str]:
    return sorted({str(p.dtype).removeprefix("torch.") for p in params if p.requires_grad})

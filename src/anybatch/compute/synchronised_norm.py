"""BatchNorm over a ghost batch that is distributed over several ranks.

The statistics are computed over all rows, so the result is that of one rank with the whole ghost batch
(Ioffe & Szegedy 2015, "Batch Normalization", algorithm 1). torch's own `SyncBatchNorm` runs on CUDA
only, and blocks the other ranks if one fails or has no rows. Here the arithmetic is separate from the
communication between ranks, which is an `Exchange`.

    forward    count, mean, M2 of this rank's rows  -> every rank's, merged (Chan et al. 1983)
    backward   sums of dy and of dy * xhat          -> every rank's, added

Sums are exchanged in float64 and merged in rank order, so the result is identical to the bit on all
ranks.

Shapes: input [N, C, ...], where N is the number of rows of this rank; statistics [C]; R ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from anybatch.errors import InputError


class Exchange(Protocol):
    """Communication between ranks for the norms of one model."""

    def begin_pass(self) -> None:
        """Called at the start of each forward pass. Every rank counts the same passes, including those
        in which it has no rows."""
        ...

    def meet(self, place: int, count: int, mine: Tensor) -> tuple[Sequence[int], Tensor]:
        """Send `mine` to all ranks and receive theirs.

        Args:
            place: index of the norm and direction, the same on all ranks.
            count: number of values per channel that `mine` was computed from.
            mine: float64, 1-D, of equal length on all ranks.

        Returns:
            The counts of all ranks, and their tensors, shape [R, len(mine)], ordered by rank; zeros for
            a rank that has no rows in this pass.
        """
        ...


class LocalExchange:
    """An `Exchange` for passes that a rank runs alone, such as in a rehearsal: it does not communicate,
    and acts as if `num_ranks` ranks had the rows of this one."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    def begin_pass(self) -> None:
        """See `Exchange`."""

    def meet(self, place: int, count: int, mine: Tensor) -> tuple[Sequence[int], Tensor]:
        """See `Exchange`."""
        del place
        return [count] * self._num_ranks, mine.expand(self._num_ranks, -1)


class OverRanks(TorchFunctionMode):
    """Function mode in which `batch_norm` in training mode normalizes over all ranks.

    The norm's own `forward` runs, including everything that it does around `batch_norm`: counting
    batches, choosing the momentum, applying an activation.

    Args:
        place: index of the norm in the model.
    """

    def __init__(self, name: str, place: int, exchange: Exchange) -> None:
        super().__init__()
        self._name = name
        self._place = place
        self._exchange = exchange
        self._met = False

    def run(self, forward: Callable[[Tensor], Tensor], piece: Tensor) -> Tensor:
        """Run `forward` on `piece`, this rank's rows of the ghost batch.

        Raises `InputError` if `forward` does not call `batch_norm`, or if the ghost batch has a single
        value per channel.
        """
        self._met = False
        with self:
            result = forward(piece)
        if not self._met:
            raise InputError(
                f"BatchNorm {self._name!r} computes its statistics in a way of its own, not by"
                " torch.nn.functional.batch_norm, so it cannot be synchronised over ranks: use a ghost"
                " batch that one rank can hold."
            )
        return result

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`, or the normalization over all ranks in place of `batch_norm`."""
        given = kwargs or {}
        if func is not F.batch_norm:
            return func(*args, **given)
        call = _SIGNATURE.bind(*args, **given)
        call.apply_defaults()
        if not call.arguments["training"]:
            return func(*args, **given)
        self._met = True
        return self._normalise(**call.arguments)

    def _normalise(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        momentum: float,
        eps: float,
        training: bool,
    ) -> Tensor:
        del training  # always True
        # Half inputs are normalized with float32 statistics and parameters, as in torch's kernels.
        kind = torch.float64 if input.dtype == torch.float64 else torch.float32
        count = input.numel() // input.size(1)
        with torch.no_grad():
            counts, theirs = self._exchange.meet(
                2 * self._place, count, _moments(input.detach(), count, kind)
            )
            total = sum(counts)
            if total < 2:
                raise SingleValue(self._name)
            mean, squares = _merged(counts, theirs)
            _advance(running_mean, mean, momentum)
            _advance(running_var, squares / (total - 1), momentum)
        return _Normalise.apply(
            input,
            None if weight is None else weight.to(kind),
            None if bias is None else bias.to(kind),
            mean.to(kind),
            (squares / total).to(kind),
            eps,
            total,
            2 * self._place + 1,
            self._exchange,
        )


class SingleValue(InputError):
    """Raised for a ghost batch with a single value per channel. `norm` is the name of the layer."""

    def __init__(self, norm: str) -> None:
        super().__init__(
            f"BatchNorm {norm!r} is given a single value per channel, which has no variance to"
            " normalise by: train with a global batch and a ghost batch of at least 2, and no step of a"
            " single sample, or use a norm that looks at one sample only, such as GroupNorm."
        )
        self.norm: str = norm


class _Normalise(torch.autograd.Function):
    """Computes (input - mean) / sqrt(variance + eps) * weight + bias, with the gradient through mean
    and variance, which are statistics of `total` values on all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        total: int,
        place: int,
        exchange: Exchange,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.eps, ctx.total, ctx.place, ctx.exchange = eps, total, place, exchange
        return F.batch_norm(input, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names
        ctx: Any, dy: Tensor
    ) -> tuple[Tensor | None, ...]:
        input, weight, mean, variance = ctx.saved_tensors
        # With fixed statistics, torch's kernel returns the two sums over this rank's rows, which are
        # also this rank's share of the gradients of weight and bias.
        one = torch.ones_like(mean) if weight is None else weight
        count = input.numel() // input.size(1)
        dy_xhat = dy_sum = torch.zeros_like(mean)
        if count:  # the kernel crashes on an empty input
            unused = mean.new_empty(0)  # batch statistics: the CUDA kernel does not accept None
            _, dy_xhat, dy_sum = torch.ops.aten.native_batch_norm_backward(
                dy, input, one, mean, variance, unused, unused, False, ctx.eps, [False, True, True]
            )
        dx = None
        if ctx.needs_input_grad[0]:
            mine = torch.cat([dy_sum, dy_xhat]).double()
            _, theirs = ctx.exchange.meet(ctx.place, count, mine)
            means = theirs[0].clone()
            for one_rank in theirs[1:]:
                means += one_rank
            dy_mean, dy_xhat_mean = (means / ctx.total).to(mean.dtype).chunk(2)
            # dx = (dy - mean(dy) - xhat * mean(dy * xhat)) * scale, in two kernels and with no memory
            # besides dx itself: the part that is affine in xhat is a batch_norm too.
            scale = one * torch.rsqrt(variance + ctx.eps)
            dx = F.batch_norm(
                input, mean, variance, -scale * dy_xhat_mean, -scale * dy_mean, eps=ctx.eps
            )
            dx.addcmul_(dy, scale.view(-1, *[1] * (input.dim() - 2)))
        return (
            dx,
            dy_xhat if ctx.needs_input_grad[1] else None,
            dy_sum if ctx.needs_input_grad[2] else None,
            *[None] * 6,
        )


_SIGNATURE = inspect.signature(F.batch_norm)


def _moments(input: Tensor, count: int, kind: torch.dtype) -> Tensor:
    """Mean and M2 (sum of squared deviations) of each channel, float64, shape [2 * C]."""
    if count == 0:
        return torch.zeros(2 * input.size(1), dtype=torch.float64, device=input.device)
    # Cast to `kind`: on CPU, the kernel returns half-precision statistics for half-precision input.
    mean, variance = torch.ops.aten.batch_norm_update_stats(input.to(kind), None, None, 0.0)
    return torch.cat([mean.double(), variance.double() * count])


def _merged(counts: Sequence[int], moments: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and M2 over all ranks, from the moments of each rank, shape [R, 2 * C].

    Squared deviations from the mean are summed, never squares of the values: these would cancel if the
    mean is large (Chan, Golub & LeVeque 1983).
    """
    total = sum(counts)
    means, squares = moments.chunk(2, dim=1)
    mean = torch.zeros_like(means[0])
    for count, of_rank in zip(counts, means, strict=True):
        mean += of_rank * (count / total)
    merged = torch.zeros_like(mean)
    for count, of_rank, around_it in zip(counts, means, squares, strict=True):
        merged += around_it + (of_rank - mean) ** 2 * count
    return mean, merged


def _advance(running: Tensor | None, value: Tensor, momentum: float) -> None:
    """Update a running statistic in place, with a single rounding to the dtype of the buffer."""
    if running is not None:
        running.copy_(running.double() * (1 - momentum) + value * momentum)

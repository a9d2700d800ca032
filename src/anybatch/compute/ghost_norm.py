"""BatchNorm over ghost batches: statistics over a number of samples that the task defines.

BatchNorm computes statistics over the samples of a forward pass, so with plain accumulation its result
depends on the micro-batch size, that is, on the plan. Here the global batch is split into ghost batches
of the task's size (Hoffer et al. 2017, "Train longer, generalize better", section 4), each normalized
separately, and running statistics are updated once per ghost batch in the order of the samples. A
micro-batch always consists of whole ghost batches, so every plan computes the same result.

A ghost batch that does not fit on one rank is divided over the ranks, one ghost batch per pass, and its
norms are synchronized (`synchronised_norm.py`). This is decided by the plan: the result is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from anybatch.compute.modes import trained_parts
from anybatch.compute.patch import replace_forward
from anybatch.compute.synchronised_norm import Exchange, LocalExchange, OverRanks, SingleValue
from anybatch.errors import InputError, some

DEFAULT_GHOST_BATCH = 32


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers of `model` by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, _BatchNorm)}


def is_spectral_norm(module: nn.Module) -> bool:
    """Whether `module` is, or has as a hook, a spectral norm, which iterates in each training pass."""
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, _SpectralNorm) or any(isinstance(h, SpectralNorm) for h in hooks)


def cut_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return those of `batch_norms` that use ghost batches when `model` is trained. A layer that the
    user put into evaluation mode (in a frozen part) normalizes by its running statistics, regardless of
    the cut."""
    trained = trained_parts(model)
    return {n: m for n, m in batch_norms(model).items() if looks_across_samples(m, m in trained)}


def looks_across_samples(norm: _BatchNorm, training: bool) -> bool:
    """Whether `norm`, in the given mode, normalizes by statistics of the current pass."""
    return training or norm.running_mean is None or norm.running_var is None


def depends_on_cut(model: nn.Module, drawn: bool = True) -> tuple[str, ...]:
    """Return one sentence for each property of `model` that depends on the cut into micro-batches under
    every plan.

    Such modules update running statistics once per pass, over the samples of that pass, or draw random
    numbers, which are keyed by step and rank. Only known modules of torch, modules that look like
    norms, and modules with a dropout rate are detected. If not `drawn`, random numbers are left out.
    """
    found: dict[str, list[str]] = {}
    drawing = trained_parts(model) if drawn else set()
    for name, module in model.named_modules():
        if (why := _why_it_depends(module, module in drawing)) is not None:
            found.setdefault(why, []).append(name)
    return tuple(
        why.format(names=some(names), s="s" if len(names) == 1 else "")
        for why, names in found.items()
    )


def counting_buffers(model: nn.Module) -> dict[str, tuple[Tensor | None, int]]:
    """Return the buffers and frozen parameters of `model` by name, with their version counters, except
    those of modules that `depends_on_cut` or ghost batches handle."""
    return {
        f"{prefix}.{name}" if prefix else name: (buffer, 0 if buffer is None else buffer._version)
        for prefix, module in model.named_modules()
        if not isinstance(module, _BatchNorm) and _why_it_depends(module, trains=False) is None
        for name, buffer in (*module._buffers.items(), *_frozen_in(module))
    }


def _frozen_in(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Direct parameters of `module` that do not require a gradient, as in a momentum encoder."""
    params = module._parameters.items()
    return [(name, p) for name, p in params if p is not None and not p.requires_grad]


def written_since(model: nn.Module, before: dict[str, tuple[Tensor | None, int]]) -> list[str]:
    """Return the names of `counting_buffers` that were written to or replaced since `before`."""
    now = counting_buffers(model)
    return [
        name
        for name, (buffer, version) in now.items()
        if name in before and (before[name][0] is not buffer or before[name][1] != version)
    ]


def depends_on_writes(names: Sequence[str]) -> tuple[str, ...]:
    """Describe that passes write to the buffers and frozen parameters `names`; empty without names."""
    return (_WRITTEN.format(names=some(names)),) if names else ()


class GhostBatches:
    """The split of the current micro-batch into ghost batches, shared by the norms of one model.

    Outside `cut` the norms are plain: what a user computes between two steps is not split.

    Attributes:
        sizes: samples per ghost batch of this rank's pass, in order; empty outside a pass.
        exchange: communication with the other ranks, if each pass holds this rank's part of one ghost
            batch; None if each ghost batch is on one rank.
    """

    def __init__(self, model: nn.Module, exchange: Exchange | None = None) -> None:
        self.sizes: Sequence[int] = ()
        self.exchange: Exchange | None = exchange
        self._undos = [
            replace_forward(norm, partial(_GhostForward, norm, name, place, self))
            for place, (name, norm) in enumerate(batch_norms(model).items())
        ]

    def cut(self, sizes: Sequence[int]) -> AbstractContextManager[None]:
        """Context manager for forward and backward of a micro-batch with `sizes` samples per ghost
        batch, in order. With an exchange, every rank enters it for every pass of the step, with an
        empty block if it has no samples."""
        return self._cut(sizes) if self._undos else nullcontext()

    @contextmanager
    def _cut(self, sizes: Sequence[int]) -> Iterator[None]:
        if self.exchange is not None:
            self.exchange.begin_pass()
        self.sizes = sizes
        try:
            yield
        finally:
            self.sizes = ()

    @contextmanager
    def alone(self, num_ranks: int) -> Iterator[None]:
        """Context manager for passes that this rank runs alone: nothing is exchanged, and norms act as
        if all of `num_ranks` ranks had the rows of this one."""
        exchange = self.exchange
        self.exchange = None if exchange is None else LocalExchange(num_ranks)
        try:
            yield
        finally:
            self.exchange = exchange

    def undo(self) -> None:
        """Restore the original `forward` of every norm."""
        for undo in self._undos:
            undo()


class _GhostForward:
    """The `forward` of one BatchNorm layer, which calls `whole` for each ghost batch. If `whole` is
    that of another `GhostBatches`, only one of them splits at a time."""

    def __init__(
        self,
        norm: _BatchNorm,
        name: str,
        place: int,
        ghosts: GhostBatches,
        whole: Callable[[Tensor], Tensor],
    ) -> None:
        self._whole: Callable[[Tensor], Tensor] = whole
        if getattr(whole, "__func__", None) is nn.SyncBatchNorm.forward:
            # It would communicate with all ranks without the plan, and rejects CPU tensors.
            self._whole = MethodType(_BatchNorm.forward, norm)
        self._norm = norm
        self._name = name
        self._place = place
        self._ghosts = ghosts

    def __call__(self, input: Tensor) -> Tensor:
        norm = self._norm
        if not looks_across_samples(norm, norm.training):
            return self._whole(input)
        sizes = self._rows(input)
        if len(sizes) == 1:
            return self._one(input)
        return torch.cat([self._one(piece) for piece in input.split(sizes)])

    def _one(self, piece: Tensor) -> Tensor:
        exchange = self._ghosts.exchange
        if exchange is not None and self._ghosts.sizes:
            return OverRanks(self._name, self._place, exchange).run(self._whole, piece)
        if piece.numel() == piece.size(1):
            raise SingleValue(self._name)
        return self._whole(piece)

    def _rows(self, input: Tensor) -> list[int]:
        """Return the number of rows of `input` per ghost batch: one row per sample, or several (tokens
        flattened into the first dim)."""
        sizes = self._ghosts.sizes
        samples = sum(sizes)
        if not samples:
            return [input.size(0)]
        if input.size(0) % samples:
            raise InputError(
                f"BatchNorm {self._name!r} is given {input.size(0)} rows for a micro-batch of"
                f" {samples} samples, so they cannot be told apart into ghost batches: keep the"
                " samples in the first dim, in order."
            )
        rows = input.size(0) // samples
        return [size * rows for size in sizes]


_ADVANCES = (
    "{names} keep{s} statistics that advance once per pass (running statistics, the power iteration of"
    " a spectral norm), so the result may depend on the micro-batch and the number of ranks: anybatch"
    " verify shows whether it does."
)
_FREQUENT = (
    "Embedding {names} divide{s} gradients by how often an id comes up in a pass (scale_grad_by_freq),"
    " so the update depends on the micro-batch and the number of ranks: leave it out."
)
_WRITTEN = (
    "Every pass writes to {names}: what is kept there (a queue, a codebook, a running mean, a momentum"
    " encoder) advances once per pass and rank, so the result depends on the micro-batch and the number"
    " of ranks where the model computes with it. anybatch verify shows by how much; one pass per step"
    " on one rank is what a plain loop does."
)
_RANDOM = (
    "The model draws random numbers (in {names}): another plan, or another number of ranks, draws"
    " others. No draw is better than another, but results of two plans then differ by chance."
)
_RATES = ("dropout", "dropout_p", "dropout_prob", "attention_dropout")
"""Attributes in which modules store the dropout rate that they pass to a function."""


def _draws(module: nn.Module) -> bool:
    """Whether `module` draws random numbers in training, judging by its attributes."""
    rates = [getattr(module, name, None) for name in _RATES]
    if isinstance(module, _DropoutNd):
        rates.append(module.p)
    return isinstance(module, nn.RReLU) or any(
        isinstance(rate, float) and rate > 0 for rate in rates
    )


def _why_it_depends(module: nn.Module, trains: bool) -> str | None:
    if trains and _draws(module):
        return _RANDOM
    if isinstance(module, _BatchNorm):
        return None
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return _FREQUENT if module.scale_grad_by_freq else None
    if isinstance(module, _InstanceNorm):
        tracks = module.running_mean is not None or module.running_var is not None
        return _ADVANCES if tracks else None
    if is_spectral_norm(module):
        return _ADVANCES
    running = any(name.startswith("running_") for name, _ in module.named_buffers(recurse=False))
    # Without a momentum they are constants, as in FrozenBatchNorm2d; writes are detected separately.
    moves = running and hasattr(module, "momentum")
    return _ADVANCES if moves or isinstance(module, _NormBase) else None

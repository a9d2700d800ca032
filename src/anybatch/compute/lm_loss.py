"""lm_loss: cross-entropy over a large vocabulary, without materializing the logits.

Each chunk of logits is reduced to its part of the loss and of the gradients, and its memory is reused:

    by tokens        some tokens times the whole vocabulary. The gradients are computed in forward, from
                     the same chunk (3 products), and the weight's gradient is a sum over chunks.
    by vocabulary    all tokens times some words. Forward saves one number per token, backward computes
                     the logits once more (4 products). Each row of the weight's gradient is computed
                     at once.

A sum over chunks is only as accurate as its dtype, so float32 and float64 use chunks of tokens, and
half precision chunks of the vocabulary: no float32 copy of the weight's gradient is needed, and the
loss scale of float16 is applied before values are rounded.

torch's `functional.linear_cross_entropy` (2.13) has no smoothing, z-loss or weights, and a trace on
fake tensors cannot look into it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from anybatch.compute.dtensor import is_dtensor
from anybatch.errors import DataError, InputError, listed
from anybatch.task import Loss

Backend: TypeAlias = Literal["auto", "plain", "tokens", "vocabulary"]

PLAIN_LOGITS = 1 << 20
"""Up to this number of logits, `auto` selects `plain`: chunks would save less than 12 MiB (three times
the logits in float32), and the plain loss is faster (benchmarks/vocabulary/README.md)."""

_CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}
"""Size of the logits of a chunk, in float32: large enough for efficient products, small enough for the
caches of a CPU; on CUDA, large enough that kernels take longer than their launches (docs/log.md)."""
_LEAST_TOKENS = {"cpu": 256, "cuda": 1024}
"""Minimum tokens per chunk: every chunk reads the weight and adds to its gradient."""
_LEAST_WORDS = 128
_LOG2_E = math.log2(math.e)
_STANDS_FOR: ContextVar[str | None] = ContextVar("stands_for", default=None)

_FEW: ContextVar[bool] = ContextVar("few", default=False)

_HALF = (torch.bfloat16, torch.float16)
_autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
_keeps_graph: Callable[[], bool] = getattr(
    _autograd, "_get_current_graph_task_keep_graph", lambda: True
)


def lm_loss(
    hidden: Tensor,
    head: nn.Module | Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    weights: Tensor | None = None,
    chunk: int | None = None,
    backend: Backend = "auto",
) -> Loss:
    """Compute cross-entropy between the logits `hidden @ weight.T + bias` and `targets`.

    Large logits are computed in chunks and never stored as a whole; see `backend`. Returns a `Loss`:
    the sum over all tokens that are not ignored, and their number. It is exact under gradient
    accumulation, however unequal micro-batches are.

    Inputs are cast to the autocast dtype, or without autocast to the dtype of the weight; softmax and
    sums are computed in float32 (float64 if the weight is float64). Gradients are computed for
    `hidden`, weight and bias. They can be differentiated again with `backend="plain"`, but not in
    chunks.

    Args:
        hidden: input of the head, `[..., tokens, hidden]`.
        head: an `nn.Linear`, a tied `nn.Embedding`, or the weight itself, `[vocabulary, hidden]`.
        targets: word ids, int64, `[..., tokens]`: one for each vector of `hidden`.
        bias: `[vocabulary]`. Omit it for a linear layer that has a bias.
        ignore_index: target value of tokens that are ignored.
        label_smoothing: share of each target that is spread evenly over all words, 0 to 1.
        z_loss: factor of the squared log of the softmax denominator. This term is added for each token
            and keeps the denominator near one (Chowdhery et al. 2022, "PaLM", section 5).
        softcap: if given, logits are replaced by `softcap * tanh(logits / softcap)`, as in Gemma 2.
        weights: weight of each token, `[..., tokens]`, non-negative. The weight of the loss is then
            their sum over the tokens that are not ignored.
        chunk: tokens per chunk, or words per chunk with `vocabulary`; chosen by size if None.
        backend: `plain` (all logits at once), `tokens` or `vocabulary`. `auto` selects `plain` up to
            `PLAIN_LOGITS` logits, above that `tokens`, or `vocabulary` in half precision.

    Raises:
        DataError: a target is outside of the vocabulary. On an accelerator, where the check would block
            the step, the loss is NaN instead; a step rejects it, and `wrong_target` names the target.
        InputError: shapes do not match, or the head defines another forward.
    """
    weight, bias = _weight_of(head, bias)
    _check_shapes(hidden, weight, bias, targets, weights)
    options = _Options(label_smoothing, z_loss, softcap)
    words = weight.size(0)
    hidden, weight, bias = in_compute_dtype(hidden.flatten(0, -2), weight, bias)
    aims = _aims(targets, words, ignore_index, weights, weight.dtype)
    job = _Job(hidden, weight, bias, aims, options)
    return aims.loss(_sum_of(job, _chosen(backend, job), chunk))


def loss_of_logits(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Loss:
    """Compute the loss of `lm_loss` from existing logits `[..., tokens, vocabulary]`. Arguments and
    errors are those of `lm_loss`."""
    options = _Options(label_smoothing, z_loss, None)
    _check_targets(targets, logits.shape[:-1])
    aims = _aims(targets, logits.size(-1), ignore_index, None, logits.dtype)
    with torch.autocast(logits.device.type, enabled=False):
        return aims.loss(_of_logits(logits.flatten(0, -2), aims, options))


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    reduction: Literal["sum", "mean", "none"],
) -> Tensor:
    """Compute `functional.cross_entropy(linear(hidden, weight, bias), targets)` in chunks; the result
    is in the dtype of the sums. `hidden` `[N, H]`, `weight` and `bias` are in the dtype of the product;
    `targets` has the shape `[N]`.

    Raises `DataError` and `InputError` as `lm_loss` does.
    """
    options = _Options(label_smoothing, 0.0, None)
    aims = _aims(targets, weight.size(0), ignore_index, None, weight.dtype)
    job = _Job(hidden, weight, bias, aims, options)
    if reduction != "none":
        loss = aims.loss(_sum_of(job, job.in_chunks, None))
        return loss.sum if reduction == "sum" else loss.sum / loss.weight
    with torch.autocast(hidden.device.type, enabled=False):
        losses = _each_by_vocabulary(job, job.words_per_chunk())
    return losses if aims.poison is None else losses * aims.poison


def wrong_target() -> str | None:
    """Describe the first target on an accelerator that was outside of its vocabulary and could not be
    reported at once, or return None. Synchronizes with the device, and clears the record."""
    for device, seen in list(_SEEN.items()):
        del _SEEN[device]
        found, place, value, words = seen.tolist()
        if found:
            return _wrong_sentence(f"number {place} of its micro-batch", value, words)
    return None


def tokens_per_chunk(words: int, itemsize: int, device: str) -> int:
    """Default number of tokens per chunk, by tokens, for a vocabulary of `words` words and logits of
    `itemsize` bytes on `device` (its type)."""
    return max(_chunk_bytes(device) // (words * itemsize), _LEAST_TOKENS.get(device, 1024))


@contextmanager
def standing_for(device: str) -> Iterator[None]:
    """Context manager for a trace: chunk sizes are those of the device type `device`, which the tensors
    represent."""
    token = _STANDS_FOR.set(device)
    try:
        yield
    finally:
        _STANDS_FOR.reset(token)


@contextmanager
def few_chunks() -> Iterator[None]:
    """Context manager for a memory trace: runs only the first and last chunks, since all are alike."""
    token = _FEW.set(True)
    try:
        yield
    finally:
        _FEW.reset(token)


def words_per_chunk(tokens: int, device: str) -> int:
    """Default number of words per chunk, by vocabulary, for `tokens` tokens on `device` (its type)."""
    return max(_chunk_bytes(device) // (tokens * 4), _LEAST_WORDS)


def _chunk_bytes(device: str) -> int:
    return _CHUNK_BYTES.get(device, _CHUNK_BYTES["cuda"])


@dataclass(frozen=True, slots=True)
class _Options:
    """Extensions of plain cross-entropy. Raises `InputError` for invalid values."""

    smoothing: float
    z_loss: float
    softcap: float | None

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing <= 1:
            raise InputError(f"label_smoothing is {self.smoothing}: it is a share, from 0 to 1.")
        if not 0 <= self.z_loss < float("inf"):
            raise InputError(f"z_loss is {self.z_loss}: give a factor that is not below zero.")
        if self.softcap is not None and not 0 < self.softcap < float("inf"):
            raise InputError(f"softcap is {self.softcap}: give a bound above zero, or None.")


@dataclass(frozen=True, slots=True)
class _Aims:
    """Targets and weights of N tokens.

    Attributes:
        words: target ids `[N]`, 0 for tokens that do not count.
        counted: whether each token counts, `[N]`.
        scale: token weights `[N]`, 0 for tokens that do not count, in the dtype of the sums.
        total: sum of the token weights.
        weighed: whether token weights were given.
        poison: None, or a factor of the loss that is NaN if a target is wrong.
    """

    words: Tensor
    counted: Tensor
    scale: Tensor
    total: Tensor
    weighed: bool
    poison: Tensor | None

    def loss(self, value: Tensor) -> Loss:
        return Loss(value if self.poison is None else value * self.poison, self.total)


def _aims(
    targets: Tensor, words: int, ignore_index: int, weights: Tensor | None, dtype: torch.dtype
) -> _Aims:
    shape, targets = targets.shape, targets.reshape(-1)
    counted = targets != ignore_index
    wrong = counted & ((targets < 0) | (targets >= words))
    poison = _look(wrong, targets, shape, words)
    counted = counted & ~wrong
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    if weights is None:
        scale, total = counted.to(precise), counted.sum()
    else:
        scale = torch.where(counted, weights.reshape(-1).to(precise), 0.0)
        total = scale.sum()
    return _Aims(targets.where(counted, 0), counted, scale, total, weights is not None, poison)


@dataclass(frozen=True, slots=True)
class _Job:
    """One loss to compute: hidden `[N, H]`, weight `[V, H]` and bias in the dtype of the products."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    aims: _Aims
    options: _Options

    @property
    def is_half(self) -> bool:
        return self.weight.dtype in _HALF

    @property
    def in_chunks(self) -> Backend:
        """The chunked backend that suits the dtype of the weight."""
        return "vocabulary" if self.is_half else "tokens"

    def precise(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return hidden, weight and bias in the dtype of the sums."""
        to = self.aims.scale.dtype
        bias = None if self.bias is None else self.bias.to(to)
        return self.hidden.to(to), self.weight.to(to), bias

    @property
    def device(self) -> str:
        """The device type that the job runs on, or that it represents in a trace."""
        return _STANDS_FOR.get() or self.weight.device.type

    def tokens_per_chunk(self) -> int:
        """Return the default chunk size by tokens, for logits in the dtype of the sums."""
        return tokens_per_chunk(self.weight.size(0), self.aims.scale.element_size(), self.device)

    def words_per_chunk(self) -> int:
        return words_per_chunk(self.hidden.size(0), self.device)


def _chosen(backend: Backend, job: _Job) -> Backend:
    """Return the backend to run, with `auto` resolved. Raises `InputError` for an unknown one."""
    if backend not in _BACKENDS and backend != "auto":
        raise InputError(f"backend is {backend!r}: choose 'auto', {listed(_BACKENDS)}.")
    if backend == "auto":
        small = job.hidden.size(0) * job.weight.size(0) <= PLAIN_LOGITS
        return "plain" if small else job.in_chunks
    return backend


def _sum_of(job: _Job, backend: Backend, chunk: int | None) -> Tensor:
    if chunk is not None and chunk < 1:
        raise InputError(f"chunk is {chunk}: give at least 1 token (or word), or None.")
    if not job.hidden.size(0):
        return (job.hidden.sum() + job.weight[:1].sum() * 0).to(job.aims.scale.dtype)
    with torch.autocast(job.hidden.device.type, enabled=False):
        return _BACKENDS[backend](job, chunk)


# ------------------------------------------------------------------------------------- backends


def _plain(job: _Job, _chunk: int | None) -> Tensor:
    logits = F.linear(job.hidden, job.weight, job.bias)
    return _of_logits(logits, job.aims, job.options)


def _of_logits(logits: Tensor, aims: _Aims, options: _Options) -> Tensor:
    logits = logits.to(aims.scale.dtype)
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    together = not aims.weighed and not options.z_loss
    losses = F.cross_entropy(
        logits,
        aims.words.where(aims.counted, -100),
        reduction="sum" if together else "none",
        label_smoothing=options.smoothing,
    )
    if together:
        return losses
    if options.z_loss:
        losses = losses + options.z_loss * torch.logsumexp(logits, 1).square()
    return torch.where(aims.counted, losses * aims.scale, 0.0).sum()


def _by_tokens(job: _Job, chunk: int | None) -> Tensor:
    """Compute in float32 (or float64) for any precision: the weight's gradient is a sum over chunks."""
    size = min(chunk or job.tokens_per_chunk(), job.hidden.size(0))
    apply: Callable[..., Tensor] = _ByTokens.apply
    return apply(*job.precise(), job.aims, job.options, size, torch.is_grad_enabled())


def _by_vocabulary(job: _Job, chunk: int | None) -> Tensor:
    if chunk is None:
        chunk = job.words_per_chunk()
    return _each_by_vocabulary(job, chunk).sum()


def _each_by_vocabulary(job: _Job, chunk: int) -> Tensor:
    apply: Callable[..., Tensor] = _ByVocabulary.apply
    size = min(chunk, job.weight.size(0))
    return apply(job.hidden, job.weight, job.bias, job.aims, job.options, size)


_BACKENDS: dict[str, Callable[[_Job, int | None], Tensor]] = {
    "plain": _plain,
    "tokens": _by_tokens,
    "vocabulary": _by_vocabulary,
}


class _ByTokens(torch.autograd.Function):
    """The loss by tokens. One buffer `[chunk, V]` holds logits, softmax and logit gradients in turn."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        aims: _Aims,
        options: _Options,
        chunk: int,
        with_gradient: bool,
    ) -> Tensor:
        wanted = [with_gradient and needed for needed in ctx.needs_input_grad[:3]]
        to_hidden = torch.empty_like(hidden) if wanted[0] else None
        to_weight = torch.zeros_like(weight) if wanted[1] else None
        to_bias = torch.zeros_like(bias) if wanted[2] and bias is not None else None
        targets, scale = aims.words, aims.scale
        losses = torch.empty_like(scale)
        buffer = hidden.new_empty(chunk, weight.size(0))
        for start in _starts(hidden.size(0), chunk):
            part = slice(start, start + chunk)
            vectors = hidden[part]
            logits = buffer[: vectors.size(0)]
            if bias is None:
                torch.mm(vectors, weight.t(), out=logits)
            else:
                torch.addmm(bias, vectors, weight.t(), out=logits)
            losses[part] = _to_gradient(logits, targets[part], scale[part], options, any(wanted))
            if to_hidden is not None:
                torch.mm(logits, weight, out=to_hidden[part])
            if to_weight is not None:
                to_weight.addmm_(logits.t(), vectors)
            if to_bias is not None:
                to_bias.add_(logits.sum(0))
        ctx.save_for_backward(to_hidden, to_weight, to_bias)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _check_once()
        # In place if this is the last use: the weight's gradient is the largest tensor here.
        scaled = torch.mul if _keeps_graph() else Tensor.mul_
        parts = [None if p is None else scaled(p, gradients[0]) for p in ctx.saved_tensors]
        return (*parts, None, None, None, None)


def _check_once() -> None:
    if torch.is_grad_enabled():  # only with create_graph
        raise InputError(
            "the gradient of lm_loss in chunks cannot be differentiated again (create_graph=True): use"
            " backend='plain'."
        )


def _to_gradient(
    logits: Tensor, targets: Tensor, scale: Tensor, options: _Options, wanted: bool
) -> Tensor:
    """Return the losses `[n]` of a chunk of tokens; if `wanted`, `logits` becomes its gradient."""
    scale, targets = scale[:, None], targets[:, None]
    slope = _cap(logits, options.softcap, wanted)
    at_target = logits.gather(1, targets)
    mean = logits.mean(1, keepdim=True) if options.smoothing else None
    highest = logits.amax(1, keepdim=True)
    total = _exp(logits.sub_(highest)).sum(1, keepdim=True)
    normaliser = total.log().add_(highest)
    losses = _losses(normaliser, at_target, mean, scale, options)
    if wanted:
        logits.mul_(_rise(normaliser, scale, options) / total)
        _fall(logits, targets, scale, options, logits.size(1))
        if slope is not None:
            logits.mul_(slope)
    return losses


def _exp(x: Tensor) -> Tensor:
    """Compute `exp(x)` in place. On a CPU it is computed as a power of two: MKL's exponential, which
    torch calls, takes twenty times as long where results are too small for a normal number, as those of
    unlikely words are."""
    if (_STANDS_FOR.get() or x.device.type) == "cpu":
        return x.mul_(_LOG2_E).exp2_()
    return x.exp_()


class _ByVocabulary(torch.autograd.Function):
    """The losses of the tokens `[N]`, by vocabulary. Between forward and backward only the softmax
    denominators are saved, besides the inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        aims: _Aims,
        options: _Options,
        chunk: int,
    ) -> Tensor:
        targets, scale, words = aims.words, aims.scale, weight.size(0)
        column, precise = (hidden.size(0), 1), scale.dtype
        highest = hidden.new_full(column, -torch.inf, dtype=precise)
        total = hidden.new_zeros(column, dtype=precise)
        at_target = hidden.new_zeros(column, dtype=precise)
        mean = hidden.new_zeros(column, dtype=precise) if options.smoothing else None
        for start in _starts(words, chunk):
            logits = _logits(hidden, weight, bias, slice(start, start + chunk), precise)
            _cap(logits, options.softcap, wanted=False)
            within, place = _within(targets[:, None], start, logits.size(1))
            at_target += torch.where(within, logits.gather(1, place), 0.0)
            if mean is not None:
                mean += logits.sum(1, keepdim=True) / words
            higher = torch.maximum(highest, logits.amax(1, keepdim=True))
            total.mul_(_exp(highest - higher))
            total += _exp(logits.sub_(higher)).sum(1, keepdim=True)
            highest = higher
            del logits  # before the next ones are allocated
        normaliser = total.log().add_(highest)
        ctx.save_for_backward(hidden, weight, bias, targets, scale, normaliser)
        ctx.options, ctx.chunk = options, chunk
        return _losses(normaliser, at_target, mean, scale[:, None], options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _check_once()
        hidden, weight, bias, targets, scale, normaliser = ctx.saved_tensors
        options, words, precise = ctx.options, weight.size(0), scale.dtype
        wanted = ctx.needs_input_grad
        to_hidden = torch.zeros_like(hidden, dtype=precise) if wanted[0] else None
        to_weight = torch.empty_like(weight) if wanted[1] else None
        to_bias = torch.empty_like(bias) if wanted[2] else None
        scale = (scale * gradients[0])[:, None]
        rise = _rise(normaliser, scale, options)
        for start in _starts(words, ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = _logits(hidden, weight, bias, part, precise)
            slope = _cap(logits, options.softcap, wanted=True)
            _exp(logits.sub_(normaliser)).mul_(rise)
            within, place = _within(targets[:, None], start, logits.size(1))
            _fall(logits, place, torch.where(within, scale, 0.0), options, words, spread=scale)
            if slope is not None:
                logits.mul_(slope)
            if to_bias is not None:
                to_bias[part] = logits.sum(0)
            rounded = logits.to(weight.dtype)
            del logits, slope
            if to_weight is not None:
                torch.mm(rounded.t(), hidden, out=to_weight[part])
            if to_hidden is not None:
                _add_product(to_hidden, rounded, weight[part])
            del rounded
        if to_hidden is not None:
            to_hidden = to_hidden.to(hidden.dtype)
        return to_hidden, to_weight, to_bias, None, None, None


def _starts(size: int, chunk: int) -> Sequence[int]:
    """Return the start of each chunk of `size`; see also `few_chunks`."""
    starts = range(0, size, chunk)
    return [*starts[:2], starts[-1]] if _FEW.get() and len(starts) > 3 else starts


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, part: slice, dtype: torch.dtype
) -> Tensor:
    return F.linear(hidden, weight[part], None if bias is None else bias[part]).to(dtype)


def _within(targets: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Return which targets are among the `size` words from `start` on, and their positions there."""
    place = targets - start
    return (place >= 0) & (place < size), place.clamp(0, size - 1)


def _cap(logits: Tensor, softcap: float | None, wanted: bool) -> Tensor | None:
    """Apply the softcap to the logits in place, and return its derivative if `wanted`."""
    if softcap is None:
        return None
    logits.div_(softcap).tanh_()
    slope = 1 - logits.square() if wanted else None
    logits.mul_(softcap)
    return slope


def _losses(
    normaliser: Tensor,
    at_target: Tensor,
    mean: Tensor | None,
    scale: Tensor,
    options: _Options,
) -> Tensor:
    """Return the loss of each token `[n]`: cross-entropy with the smoothed target, plus the z-loss."""
    losses = normaliser - (1 - options.smoothing) * at_target
    if mean is not None:
        losses = losses - options.smoothing * mean
    if options.z_loss:
        losses = losses + options.z_loss * normaliser.square()
    return torch.where(scale == 0, 0.0, losses * scale).squeeze(1)


def _rise(normaliser: Tensor, scale: Tensor, options: _Options) -> Tensor:
    """Return the gradient of each token's loss with respect to the log of its softmax denominator."""
    return scale * (1 + 2 * options.z_loss * normaliser) if options.z_loss else scale


def _fall(
    gradient: Tensor,
    places: Tensor,
    scale: Tensor,
    options: _Options,
    words: int,
    spread: Tensor | None = None,
) -> None:
    """Subtract the smoothed targets from the gradient of the logits, in place. `spread`: scale of the
    uniform part, if it differs from that of the targets."""
    # No element is accumulated twice, so results are bitwise reproducible on every device.
    rows = torch.arange(len(gradient), device=gradient.device)[:, None]
    gradient[rows, places] -= (1 - options.smoothing) * scale
    if options.smoothing:
        gradient.sub_((scale if spread is None else spread) * (options.smoothing / words))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.device.type == "cpu":
        total.add_(left @ right)
    else:  # in halves: the product is the largest tensor besides the chunk of logits
        middle = len(left) // 2
        for part in (slice(middle), slice(middle, None)):
            total[part].add_(left[part] @ right)


# --------------------------------------------------------------------------------------- inputs


def _weight_of(head: nn.Module | Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a head. Raises `InputError` if it does more than apply them."""
    if isinstance(head, Tensor):
        weight = head
    elif not is_plain_head(head):
        raise InputError(
            f"the head is a {type(head).__name__}, whose forward may do more than multiply by a weight:"
            " give a nn.Linear or nn.Embedding, or the weight itself if the logits are"
            " hidden @ weight.T."
        )
    else:
        weight = head.weight
        own = getattr(head, "bias", None)
        if own is not None and bias is not None:
            raise InputError("the head has a bias, and another one is given: leave bias= out.")
        bias = own if bias is None else bias
    assert isinstance(weight, Tensor)
    if is_dtensor(weight):
        raise InputError(
            "the head's weight is divided over ranks, and whole only while the model's forward runs:"
            " compute the loss inside it (anybatch.causal_lm_loss does), or choose a plan that"
            " replicates."
        )
    return weight, bias


def is_plain_head(head: object) -> bool:
    """Whether a module only multiplies by its weight and adds its bias."""
    forward = getattr(type(head), "forward", None)
    if forward in (nn.Linear.forward, nn.Embedding.forward):
        return True
    return isinstance(head, nn.Linear) and type(head).__module__.startswith("torchao.float8")


def _check_shapes(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor | None
) -> None:
    if weight.dim() != 2 or hidden.dim() < 2 or hidden.size(-1) != weight.size(1):
        raise InputError(
            f"hidden has the shape {tuple(hidden.shape)} and the head's weight {tuple(weight.shape)}:"
            " give [..., tokens, hidden] and [vocabulary, hidden] with the same hidden."
        )
    if not hidden.is_floating_point() or not weight.is_floating_point():
        raise InputError(
            f"hidden has the dtype {hidden.dtype} and the head's weight {weight.dtype}: give floating"
            " numbers."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(
            f"bias has the shape {tuple(bias.shape)}: give one number for each of the"
            f" {weight.size(0)} words of the head."
        )
    _check_targets(targets, hidden.shape[:-1])
    if weights is not None and weights.shape != targets.shape:
        raise InputError(
            f"weights have the shape {tuple(weights.shape)} and targets {tuple(targets.shape)}: give"
            " one weight for each target."
        )
    if weights is not None and weights.requires_grad:
        raise InputError("weights require a gradient, and the loss has none for them: detach them.")


def _check_targets(targets: Tensor, shape: torch.Size) -> None:
    if targets.shape != shape:
        raise InputError(
            f"targets have the shape {tuple(targets.shape)}, and there are tokens {tuple(shape)}: give"
            " one target for each."
        )
    if targets.dtype != torch.int64:
        raise InputError(f"targets have the dtype {targets.dtype}: give ids, as torch.int64.")


def in_compute_dtype(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast to the autocast dtype, or without autocast to the dtype of the weight."""
    dtype, device = weight.dtype, hidden.device.type
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


_SEEN: dict[torch.device, Tensor] = {}
"""The first wrong target on each accelerator: found, position, value, size of the vocabulary."""


def _look(wrong: Tensor, targets: Tensor, shape: torch.Size, words: int) -> Tensor | None:
    """Raises `DataError` if a target is outside of the vocabulary. On an accelerator, where the host
    cannot read values without synchronizing, returns a factor of the loss: NaN if a target is wrong."""
    if isinstance(targets, FakeTensor) or torch.compiler.is_compiling() or not len(targets):
        return None
    if targets.device.type == "cpu":
        if wrong.any():
            flat = int(wrong.nonzero()[0])
            place = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape))
            where = place[0] if len(place) == 1 else place
            row = place[0] if len(place) > 1 else None  # else all tokens are in one sequence
            raise DataError(_wrong_sentence(f"at {where}", int(targets[flat]), words), row)
        return None
    return _note_wrong(wrong, targets, words)


def _note_wrong(wrong: Tensor, targets: Tensor, words: int) -> Tensor:
    """Record the first wrong target on its device, and return the factor of the loss. Nothing here
    synchronizes with the device, as indexing by a value on it would."""
    places = torch.arange(len(wrong), device=wrong.device)
    place = torch.where(wrong, places, len(wrong) - 1).min().view(1)
    found, target = wrong.index_select(0, place), targets.index_select(0, place)
    now = torch.cat([found.long(), place, target, torch.full_like(place, words)])
    before = _SEEN.get(targets.device)
    _SEEN[targets.device] = now if before is None else torch.where(before[0] > 0, before, now)
    return torch.where(found, torch.nan, 1.0).view(())


def _wrong_sentence(where: str, value: int, words: int) -> str:
    return (
        f"the target {where} is {value}, and the head has {words} words, 0 to {words - 1}: a"
        " tokenizer with more words than the model needs a larger head, and a target that counts"
        " nothing is ignore_index."
    )

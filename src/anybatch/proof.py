"""Proof: that a plan computes the gradient of the whole batch, on the user's own task.

A sample of the data is run two ways through the same model and loss: in one piece, and in the pieces
and with the recompute of a plan. In float64, where rounding is out of the way, the two gradients agree
to about 1e-15 if the task is exact, and differ by percents if something in it looks across a
micro-batch. Then the causes are tried one at a time: what is taken away when the difference goes
is what made it.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from anybatch.compute import Replica, batch_norms
from anybatch.compute.calm import calm
from anybatch.data import (
    Piece,
    Request,
    batch_size,
    evaluation_batches,
    ghosts,
    is_map_style,
    map_leaves,
    micro_batches,
    open_fetch,
    permutation,
    slice_batch,
)
from anybatch.errors import InputError
from anybatch.estimate import identify
from anybatch.plans import Choice, Plan, Recompute
from anybatch.task import Loss, LossFunction, Task, check_task, parameters_in

DEFAULT_SAMPLES = 96

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative deviation that rounding explains, by the dtype the proof could be run in."""

_ALIKE_IN_FLOAT32 = 1e-5  # relative: of a loss
_IGNORED = -100  # the label that counts nothing, as in torch

_BLOCKS = 8  # of which a loss is asked for its value

_PIECES = 3  # enough that pieces differ in size and in what they hold


@dataclass(frozen=True)
class Verdict:
    """What a proof found.

    Attributes:
        exact: the pieces compute the gradient of the whole, up to rounding.
        deviation: 2-norm of the difference over 2-norm of the gradient of the whole.
        tolerance: deviation up to which rounding explains it.
        groups: the same by group of parameters: the parts of the model that hold them.
        causes: sentences, one for each cause found.
        notes: sentences on what belongs to the task and is exact.
        num_samples, pieces: what was run, and how it was cut.
        dtype: in which it was run.
    """

    exact: bool
    deviation: float
    tolerance: float
    groups: Mapping[str, float]
    causes: tuple[str, ...]
    notes: tuple[str, ...]
    num_samples: int
    pieces: tuple[int, ...]
    dtype: str


def verify(task: Task, plan: Plan, *, samples: int | None = None) -> Verdict:
    """Run a sample of the training data of `task` in one piece and in the pieces of `plan`.

    Args:
        task: what is trained. Its model is copied, not changed.
        plan: how; its micro-batch is made smaller where the sample would fit in one.
        samples: how many to run; None: 96, or fewer if there are fewer.

    Raises:
        InputError: the sample is too small to be cut, or the task cannot be run.
    """
    return _Proof(task, plan, samples).run()


class _Proof:
    def __init__(self, task: Task, plan: Plan, samples: int | None) -> None:
        check_task(task)
        self._task = task
        self._ghost = plan.task.ghost_batch
        self._recompute = plan.choice.recompute
        wanted = DEFAULT_SAMPLES if samples is None else samples
        if wanted < 2:
            raise InputError(f"samples is {wanted}: a proof cuts the sample, so give at least 2.")
        self._model = copy.deepcopy(task.build_model()).cpu()
        self._order = torch.empty(0, dtype=torch.int64)  # of the sample, in map-style data
        self._fetch: Callable[[Request], object] | None = None
        plan.check_fits(identify(task, self._model))
        self._batch = self._sample(wanted)
        self._num = batch_size(self._batch)
        unit = min(self._ghost or 1, self._num)
        size = max(unit, min(plan.choice.micro_batch, self._num // _PIECES) // unit * unit)
        self._pieces = [
            len(part) for part in micro_batches(range(self._num), size, self._ghost, self._num)
        ]
        self._dtype = self._widest()

    def run(self) -> Verdict:
        """See `verify`."""
        tolerance = TOLERANCES[self._dtype]
        whole = self._gradient([self._num])
        # Another seed: with the same one, a single dropout layer might draw what it drew for the whole.
        parts = self._gradient(self._pieces, self._recompute, seed=1)
        deviation = _deviation(parts, whole)
        exact = deviation <= tolerance
        return Verdict(
            exact=exact,
            deviation=deviation,
            tolerance=tolerance,
            groups=self._by_group(parts, whole),
            causes=() if exact else tuple(self._causes(tolerance)),
            notes=tuple(self._notes(whole)),
            num_samples=self._num,
            pieces=tuple(self._pieces),
            dtype=str(self._dtype).removeprefix("torch."),
        )

    def _causes(self, tolerance: float) -> Iterator[str]:
        """Whatever, taken away, takes the deviation away or most of it."""
        found = False
        if self._draws_random_numbers():
            found = True
            without = self._deviation_when(())
            yield (
                "The model draws random numbers in training (dropout, say), and draws them anew for"
                " each micro-batch. Each draw is as good as another, so this is no error; it cannot"
                " be compared, though."
                + (
                    f" Without dropout the pieces agree (deviation {without:.1e})."
                    if without <= tolerance
                    else ""
                )
            )
        names = [name for name, m in self._model.named_modules() if _looks_across(m)]
        if names and self._deviation_when(names) < self._deviation_when(()) / 10:
            found = True
            yield (
                f"{_some(names)} look{'s' if len(names) == 1 else ''} across the samples of a pass, so"
                " the result depends on the micro-batch: use anybatch's ghost batches (plain"
                " torch BatchNorm), GroupNorm or LayerNorm."
            )
        if self._is_mean_over_tokens(tolerance, names):
            found = True
            yield (
                "The loss is a mean over tokens (labels other than -100), of which pieces have unequal"
                " numbers, so means of pieces do not make up the mean of the whole: weigh by tokens, as"
                " anybatch.model_loss (or causal_lm_loss) does for a model of transformers, or return"
                " anybatch.Loss(sum, weight) with the sum over the tokens and their number."
            )
        elif fault := self._fault_of_loss(tolerance, names):
            found = True
            yield fault
        if not found and self._fault_is_of_padding(tolerance):
            found = True
            yield (
                "What collate makes of a sample depends on the others beside it, and the result on"
                " that: padding that the model or the loss does not mask, most likely. Mask it in"
                " attention, in means over positions and in the loss."
            )
        if not found:
            yield (
                "The cause is not among the known ones (random numbers, norms across the batch, a"
                " mean of means): look for a loss or a layer that mixes samples of one pass, such as"
                " contrastive losses or statistics over dim 0."
            )

    def _notes(self, whole: Sequence[Tensor]) -> Iterator[str]:
        if self._ghost and batch_norms(self._model):
            plain = self._gradient([self._num], ghosts_kept=False)
            yield (
                f"BatchNorm normalises over ghost batches of {self._ghost} samples. That belongs to"
                f" the task: every plan computes the same, and normalising over all {self._num}"
                f" samples at once would be {_deviation(whole, plain):.1%} away."
            )

    def _draws_random_numbers(self) -> bool:
        first = self._gradient([self._num], seed=1)
        return _deviation(first, self._gradient([self._num], seed=2)) > 1e-12

    def _deviation_when(self, calmed: Sequence[str], loss: LossFunction | None = None) -> float:
        """The deviation without dropout, with some modules in evaluation mode or another loss."""
        whole = self._gradient([self._num], calmed=calmed, no_dropout=True, loss=loss)
        parts = self._gradient(self._pieces, calmed=calmed, no_dropout=True, loss=loss)
        return _deviation(parts, whole)

    def _fault_of_loss(self, tolerance: float, names: Sequence[str]) -> str | None:
        """What is wrong with how a loss that returns plain numbers averages, if it is that: told by its
        values for a few blocks, for pairs of neighbours, and for the whole.

        A mean over w_b counted elements in block b has, for two blocks, a value between theirs that
        shows w_b's ratio; from the ratios follows the value of the whole. A loss that mixes samples
        does not obey this.
        """
        for most in (_BLOCKS, _BLOCKS // 2, 2):
            count = min(most, self._num)
            ends = [self._num * i // count for i in range(count + 1)]
            sizes = [b - a for a, b in pairwise(ends)]
            values = self._losses(sizes, names)
            if values and all(value.isfinite() for value in values):
                break  # no block is without anything that counts
        one = self._losses([self._num], names)
        if one is None or values is None:
            return None
        whole, blocks = float(one[0]), [float(value) for value in values]
        # Many models compute the loss in float32 whatever they are in.
        coarse = one[0].dtype != torch.float64
        alike = max(10 * tolerance, _ALIKE_IN_FLOAT32 if coarse else 0.0)

        def is_whole(value: float) -> bool:
            return abs(value - whole) <= alike * max(abs(whole), 1e-12)

        if is_whole(sum(blocks)):
            return (
                "The loss is a sum over the samples, returned where a mean is expected: return"
                " anybatch.Loss(sum, weight) with that sum and the number of samples, or the mean."
            )
        if is_whole(_mean_of(blocks, sizes)):
            return None
        weights = [1.0]
        for b, pair in enumerate(self._pairs(sizes, names)):
            rest = blocks[b + 1] - pair
            ratio = (pair - blocks[b]) / rest if rest else -1.0
            if not ratio > 0:
                return None
            weights.append(weights[-1] * ratio)
        if not is_whole(_mean_of(blocks, weights)):
            return None
        return (
            "The loss is a mean over something else than the samples (non-ignored tokens,"
            " positive pairs), so means of pieces do not make up the mean of the whole: return"
            " anybatch.Loss(sum, weight) with the sum and the number of what is counted."
        )

    def _is_mean_over_tokens(self, tolerance: float, names: Sequence[str]) -> bool:
        """Whether pieces agree with the whole if each weighs as many as it has labels: all of them, or
        those that are predicted from the token before."""
        if self._losses([self._num], names) is None or _labels_of(self._batch) is None:
            return False
        ways = (partial(_by_labels, self._task.loss, first) for first in (0, 1))
        return any(self._deviation_when(names, loss=way) <= tolerance for way in ways)

    def _fault_is_of_padding(self, tolerance: float) -> bool:
        """Whether pieces that are cut from the whole batch agree with it, unlike those that are
        collated by themselves."""
        fetch, self._fetch = self._fetch, None
        try:
            return fetch is not None and self._deviation_when(()) <= tolerance
        finally:
            self._fetch = fetch

    def _pairs(self, sizes: Sequence[int], names: Sequence[str]) -> list[float]:
        """What the loss returns for each block with the next one."""
        found: dict[int, float] = {}
        for first in (0, 1):  # pairs that begin at even blocks, then at odd ones
            cut = [*sizes[:first]]
            starts = range(first, len(sizes), 2)
            cut += [sum(sizes[b : b + 2]) for b in starts]
            losses = (self._losses(cut, names) or [])[first:]
            found.update((b, float(value)) for b, value in zip(starts, losses, strict=True))
        return [found[b] for b in range(len(sizes) - 1)]

    def _losses(self, sizes: Sequence[int], calmed: Sequence[str]) -> list[Tensor] | None:
        """What the loss function returns for pieces, where it returns plain means; else None."""
        model = copy.deepcopy(self._model).to(self._dtype)
        losses: list[Tensor] = []
        with calm(model, calmed, no_dropout=True), torch.no_grad():
            for piece in self._cut(sizes):
                returned = self._task.loss(model, piece)
                if not isinstance(returned, Tensor):
                    return None
                losses.append(returned)
        return losses

    def _gradient(
        self,
        sizes: Sequence[int],
        recompute: Recompute | None = None,
        *,
        calmed: Sequence[str] = (),
        no_dropout: bool = False,
        loss: LossFunction | None = None,
        ghosts_kept: bool = True,
        seed: int = 0,
    ) -> list[Tensor]:
        """The gradient of the mean loss over the sample, cut into `sizes`."""
        task, model = self._task, copy.deepcopy(self._model).to(self._dtype)
        replica = Replica(
            model,
            lambda: task.optimizer(task.parameters_of(model)),
            loss or task.loss,
            Choice(micro_batch=1, evaluation_batch=1, recompute=recompute or Recompute()),
            torch.device("cpu"),
            self._num,
        )
        with torch.random.fork_rng(devices=[]), calm(model, calmed, no_dropout):
            torch.manual_seed(seed)
            weight = 0.0
            for size, piece in zip(sizes, self._cut(sizes), strict=True):
                cut = ghosts(size, self._ghost) if self._ghost and ghosts_kept else ()
                weight += float(replica.accumulate(piece, size, cut).weight)
            replica.finish(weight or 1.0, None)
        gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for p in parameters_in(replica.optimizer.param_groups)
        ]
        replica.close()
        return gradients

    def _cut(self, sizes: Sequence[int]) -> Iterator[object]:
        start = 0
        for size in sizes:
            yield map_leaves(self._piece(start, start + size), self._cast)
            start += size

    def _piece(self, start: int, stop: int) -> object:
        """Those samples as training would have them: collated by themselves, where that is possible."""
        if self._fetch is None or stop - start == self._num:
            return slice_batch(self._batch, start, stop)
        return self._fetch([Piece(0, self._order[start:stop])])

    def _cast(self, leaf: object) -> object:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf.to(self._dtype)
        return leaf

    def _widest(self) -> torch.dtype:
        """float64, or float32 for a task that insists on it."""
        self._dtype = torch.float64
        try:
            self._gradient([self._num])
        except RuntimeError:  # a dtype written into the model or the loss
            return torch.float32
        return torch.float64

    def _sample(self, wanted: int) -> object:
        """The first samples of the first epoch, as one batch."""
        task = self._task
        data = task.train
        if is_map_style(data):
            self._order = permutation(task.seed, 0, len(data), task.shuffle)[:wanted]
            if len(self._order) > 1:
                self._fetch = open_fetch(data, task.collate, task.seed)
                return self._fetch([Piece(0, self._order)])
        for batch, num_samples in evaluation_batches(data, task.collate, wanted, seed=task.seed):
            if num_samples >= 2:
                return batch
        raise InputError(
            f"the training data of task {task.name!r} has a single sample, which cannot be cut:"
            " there is nothing to prove."
        )

    def _by_group(self, parts: Sequence[Tensor], whole: Sequence[Tensor]) -> dict[str, float]:
        """Deviation by the part of the model that holds a parameter: its block, or its first name."""
        model = copy.deepcopy(self._model)
        wanted = list(parameters_in(self._task.parameters_of(model)))
        names = {id(p): name for name, p in model.named_parameters()}
        members: dict[str, list[int]] = defaultdict(list)
        for i, param in enumerate(wanted):
            members[_group_of(names.get(id(param), "?"))].append(i)
        return {
            group: _deviation([parts[i] for i in ids], [whole[i] for i in ids])
            for group, ids in members.items()
        }


def _labels_of(batch: object) -> Tensor | None:
    """`labels` of tokens, `[batch, tokens]`, if there are any."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return labels if isinstance(labels, Tensor) and labels.dim() == 2 else None


def _by_labels(loss: LossFunction, first: int, model: nn.Module, batch: object) -> Loss:
    """What `loss` returns, as the mean over the labels from number `first` on that count."""
    labels = _labels_of(batch)
    count = 0 if labels is None else int((labels[:, first:] != _IGNORED).sum())
    if not count:  # a mean over nothing is not a number
        return Loss(torch.stack([param.sum() * 0 for param in model.parameters()]).sum(), 0)
    mean = loss(model, batch)
    assert isinstance(mean, Tensor)
    return Loss(mean * count, count)


def _mean_of(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)


def _group_of(name: str) -> str:
    """`h.3.attn.weight` to `h.3`, `head.weight` to `head`."""
    pieces = name.split(".")[:-1] or [name]
    depth = 2 if len(pieces) > 1 and pieces[1].isdigit() else 1
    return ".".join(pieces[:depth])


def _deviation(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """2-norm of the difference, relative to the 2-norm of `other`."""
    difference = sum(
        float((a - b).double().square().sum()) for a, b in zip(one, other, strict=True)
    )
    size = sum(float(b.double().square().sum()) for b in other)
    return (difference / size) ** 0.5 if size else float(difference > 0)


def _looks_across(module: nn.Module) -> bool:
    """A norm with running statistics, torch's or (by its buffers) anybody's."""
    return hasattr(module, "running_mean") and next(module.children(), None) is None


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"

"""Runs one model on one sample, in one piece or in several."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anybatch.compute import Replica, chunked_loss
from anybatch.compute.building import carry_hooks, copy_of, optimizer_for
from anybatch.compute.float64 import InDoubles
from anybatch.compute.frozen_randomness import calm
from anybatch.compute.ghost_norm import counting_buffers, written_since
from anybatch.compute.joint import Ask, Rows
from anybatch.compute.loss import read_loss
from anybatch.compute.loss_check import Parts, Sums, sums_of
from anybatch.compute.module_state import ModuleState
from anybatch.data import copied, ghosts
from anybatch.plans import Choice, Recompute
from anybatch.proof.sample import Sample, in_precision
from anybatch.side_effects import generators_in, state_of, untouched
from anybatch.task import Loss, LossFunction, Task, parameters_in


@dataclass(frozen=True)
class Runs:
    """Runs of one model for a proof. A run leaves no state behind.

    Attributes:
        task: the task to train.
        model: the model, which is copied for each run.
        sample: the data.
        pieces: sizes of the pieces.
        ghost: size of BatchNorm's ghost batches, or None.
        dtype: dtype of the computation.
    """

    task: Task
    model: nn.Module
    sample: Sample
    pieces: tuple[int, ...]
    ghost: int | None
    dtype: torch.dtype

    @property
    def whole(self) -> tuple[int]:
        """The size of the sample, as one piece."""
        return (self.sample.size,)

    def gradient(
        self,
        sizes: Sequence[int],
        choice: Choice | None = None,
        *,
        calmed: Sequence[str] = (),
        still: bool = False,
        loss: LossFunction | None = None,
        ghosts_kept: bool = True,
        seed: int = 0,
    ) -> list[Tensor]:
        """Compute the gradient of the mean loss over the sample, split into `sizes`, with the recompute
        and chunked head of `choice`; see `calm` for `calmed` and `still`."""
        task, model = self.task, self._own_model()
        replica = Replica(
            model,
            lambda: optimizer_for(task, model),
            loss or task.loss,
            Choice(
                micro_batch=1,
                evaluation_batch=1,
                recompute=choice.recompute if choice else Recompute(),
                chunked_head=choice.chunked_head if choice else "",
            ),
            torch.device("cpu"),
            self.sample.size,
        )
        few = chunked_loss.however_few()
        with self._pieces(sizes, seed) as pieces, self._calm(model, calmed, still), few:
            weight = 0.0
            cuts = [
                ghosts(size, self.ghost) if self.ghost and ghosts_kept else () for size in sizes
            ]
            asks = _asks(replica, pieces, sizes, cuts)
            for size, piece, cut, ask in zip(sizes, pieces, cuts, asks, strict=True):
                weight += float(replica.accumulate(piece, size, cut, ask).weight)
            replica.finish(weight or 1.0, None)
        gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for p in parameters_in(replica.optimizer.param_groups)
        ]
        replica.close()
        return gradients

    def returned(self, sizes: Sequence[int], calmed: Sequence[str]) -> list[Any]:
        """Return what the loss function returns for each piece, with random draws held fixed."""
        model = self._own_model()
        with self._pieces(sizes) as pieces, self._calm(model, calmed), torch.no_grad():
            return [self.task.loss(model, piece) for piece in pieces]

    def parts(self, calmed: Sequence[str], close: float) -> tuple[Parts, Sums]:
        """Return the loss of the sample in one piece and in two unequal ones, and the loss of the
        sample repeated once. `close`: relative tolerance."""
        third = max(1, self.sample.size // 3)
        (whole,) = self._sums(self.whole, calmed)
        first, second = self._sums([third, self.sample.size - third], calmed)
        repeated = replace(self, sample=self.sample.repeated())
        (twice,) = repeated._sums(repeated.whole, calmed)
        return Parts(whole, first, second, close), twice

    def _sums(self, sizes: Sequence[int], calmed: Sequence[str]) -> list[Sums]:
        return [
            sums_of(read_loss(one, lambda size=size: size, False), isinstance(one, Tensor), size)
            for one, size in zip(self.returned(sizes, calmed), sizes, strict=True)
        ]

    def twice(self, calmed: Sequence[str]) -> tuple[float, float, Sequence[str]]:
        """Return the loss of the first piece, its loss in a second pass of the same model, and the
        names of state that the first pass changed in the model."""
        model = self._own_model()
        with self._pieces(self.pieces) as pieces, self._calm(model, calmed), torch.no_grad():
            again = copied(pieces[0])  # a loss may write to its batch
            state, buffers = ModuleState(model.modules()), counting_buffers(model)
            first = number_of(self.task.loss(model, pieces[0]))
            kept = (*written_since(model, buffers), *state.changed(model))
            return first, number_of(self.task.loss(model, again)), kept

    def drawn_elsewhere(self) -> list[str]:
        """Describe the generators, other than torch's default one, that passes draw from."""
        model = self._own_model()
        sources: list[tuple[str, Callable[[], Any]]] = [
            ("random", random.getstate),
            ("numpy.random", np.random.get_state),
        ]
        for one in generators_in(model, self.task.loss):
            kind = f"{type(one).__module__.partition('.')[0]}'s {type(one).__name__}"
            sources.append((f"a generator of its own ({kind})", partial(state_of, one)))
        with self._pieces(self.whole) as pieces, self._calm(model, ()), torch.no_grad():
            before = [pickle.dumps(state()) for _, state in sources]
            self.task.loss(model, pieces[0])
            now = [pickle.dumps(state()) for _, state in sources]
        found = zip(sources, before, now, strict=True)
        return [*dict.fromkeys(name for (name, _), old, new in found if old != new)]

    def _own_model(self) -> nn.Module:
        """Return a copy of the model in `dtype`, or for complex tensors in its complex counterpart."""
        model = copy_of(self.model)._apply(partial(in_precision, dtype=self.dtype))
        return carry_hooks(self.model, model)

    def deviation_when(self, calmed: Sequence[str]) -> float:
        """Return the deviation with random draws held fixed, and with the modules `calmed` in
        evaluation mode."""
        whole = self.gradient(self.whole, calmed=calmed, still=True)
        return deviation(self.gradient(self.pieces, calmed=calmed, still=True), whole)

    @contextmanager
    def _calm(self, model: nn.Module, names: Sequence[str], still: bool = True) -> Iterator[None]:
        """Enter `calm`, and compute in float64 if that is the dtype, regardless of dtypes in the code
        of model or loss. State that the loss keeps between calls is restored afterwards."""
        in_dtype = InDoubles() if self.dtype is torch.float64 else nullcontext()
        with untouched(self.task.loss, aside=True), calm(model, names, still), in_dtype:
            yield

    @contextmanager
    def _pieces(self, sizes: Sequence[int], seed: int = 0) -> Iterator[list[Any]]:
        """Yield the sample in pieces, with torch's generator seeded by `seed`. Pieces are collated
        before draws are held fixed, since the data may also draw random numbers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield list(self.sample.cut(sizes, self.dtype))


def _asks(
    replica: Replica, pieces: Sequence[Any], sizes: Sequence[int], cuts: Sequence[Sequence[int]]
) -> Iterator[Ask | None]:
    """Yield the `Ask` of each pass, after restoring the random state in which it was encoded."""
    if not replica.is_joint or len(sizes) == 1:
        yield from [None] * len(sizes)
        return
    states: list[Tensor] = []
    rows = Rows(sum(sizes))
    for piece, size, cut in zip(pieces, sizes, cuts, strict=True):
        states.append(torch.get_rng_state())
        rows.add(replica.encode(copied(piece), size, cut), size)
    comparison, start = replica.compare(rows.taken(), sum(sizes)), 0
    for state, size in zip(states, sizes, strict=True):
        share = comparison.share(start, start + size)
        start += size
        torch.set_rng_state(state)
        yield lambda _, share=share: share


def number_of(returned: Any) -> float:
    """Return the value of what a loss function returned: a mean, or the sum of a sum and its weight."""
    if isinstance(returned, tuple):
        returned = returned[0]
    return float(returned.sum if isinstance(returned, Loss) else returned)


def deviation(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """2-norm of the difference, relative to the 2-norm of `other`."""
    difference = sum(
        float((a - b).abs().double().square().sum()) for a, b in zip(one, other, strict=True)
    )
    size = sum(float(b.abs().double().square().sum()) for b in other)
    return (difference / size) ** 0.5 if size else float(difference > 0)

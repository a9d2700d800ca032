"""Runs: one model over one sample, in one piece or in several."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anybatch.compute import Replica
from anybatch.compute.calm import calm
from anybatch.data import ghosts
from anybatch.plans import Choice, Recompute
from anybatch.proof.sample import Sample
from anybatch.task import LossFunction, Task, parameters_in


@dataclass(frozen=True)
class Runs:
    """What is run to prove or refute. Nothing of a run remains.

    Attributes:
        task: what is trained.
        model: copied for each run.
        sample: what it is run on.
        pieces: sizes of the pieces.
        ghost: size of ghost batches of BatchNorm, or None.
        dtype: in which all is computed.
    """

    task: Task
    model: nn.Module
    sample: Sample
    pieces: tuple[int, ...]
    ghost: int | None
    dtype: torch.dtype

    @property
    def whole(self) -> tuple[int]:
        """The sample in one piece."""
        return (self.sample.size,)

    def gradient(
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
        task, model = self.task, copy.deepcopy(self.model).to(self.dtype)
        replica = Replica(
            model,
            lambda: task.optimizer(task.parameters_of(model)),
            loss or task.loss,
            Choice(micro_batch=1, evaluation_batch=1, recompute=recompute or Recompute()),
            torch.device("cpu"),
            self.sample.size,
        )
        with torch.random.fork_rng(devices=[]), calm(model, calmed, no_dropout):
            torch.manual_seed(seed)
            weight = 0.0
            for size, piece in zip(sizes, self.sample.cut(sizes, self.dtype), strict=True):
                cut = ghosts(size, self.ghost) if self.ghost and ghosts_kept else ()
                weight += float(replica.accumulate(piece, size, cut).weight)
            replica.finish(weight or 1.0, None)
        gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for p in parameters_in(replica.optimizer.param_groups)
        ]
        replica.close()
        return gradients

    def losses(self, sizes: Sequence[int], calmed: Sequence[str]) -> list[Tensor] | None:
        """What the loss function returns for pieces, where it returns plain means; else None."""
        model = copy.deepcopy(self.model).to(self.dtype)
        losses: list[Tensor] = []
        with calm(model, calmed, no_dropout=True), torch.no_grad():
            for piece in self.sample.cut(sizes, self.dtype):
                returned = self.task.loss(model, piece)
                if not isinstance(returned, Tensor):
                    return None
                losses.append(returned)
        return losses

    def deviation_when(self, calmed: Sequence[str], loss: LossFunction | None = None) -> float:
        """The deviation without dropout, with some modules in evaluation mode or another loss."""
        whole = self.gradient(self.whole, calmed=calmed, no_dropout=True, loss=loss)
        parts = self.gradient(self.pieces, calmed=calmed, no_dropout=True, loss=loss)
        return deviation(parts, whole)


def deviation(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """2-norm of the difference, relative to the 2-norm of `other`."""
    difference = sum(
        float((a - b).double().square().sum()) for a, b in zip(one, other, strict=True)
    )
    size = sum(float(b.double().square().sum()) for b in other)
    return (difference / size) ** 0.5 if size else float(difference > 0)

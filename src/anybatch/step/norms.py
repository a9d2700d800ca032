"""Norms: over which samples the BatchNorm layers of a model normalize in a `Step`."""

from __future__ import annotations

from typing import final

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from anybatch.compute.ghost_norm import batch_norms, looks_across_samples
from anybatch.errors import InputError
from anybatch.parallel.failures import Outdated
from anybatch.step.checks import num_joined, warn


@final
class Norms:
    """The BatchNorm layers of `model`.

    Args:
        ghost_batch: number of samples over which they normalize if they do so over samples of the
            pass; None: all samples of a call, as long as they fit in one piece.

    Attributes:
        across: for each layer, whether it normalizes over samples of the pass. This depends on the
            training mode that the script has set, and is looked up in `begin`.
        ghost: samples of a ghost batch; None: there are none.
        is_synchronised: whether the layers normalize over the samples of all ranks.
    """

    def __init__(self, model: nn.Module, ghost_batch: int | None) -> None:
        self._model = model
        self._ghost_batch = ghost_batch
        self._layers: tuple[_BatchNorm, ...] = ()
        self.across: list[bool] = []
        self.ghost: int | None = None
        self.is_synchronised: bool = False

    def begin(self, is_joint: bool) -> None:
        """Look up how the layers normalize now. `is_joint`: whether the loss compares samples. Raises
        `InputError` if they are to be synchronized over some of the ranks."""
        self._layers = tuple(batch_norms(self._model).values())
        self.across = self._now()
        self.is_synchronised = self._synchronises(is_joint)
        self.ghost = self._ghost_batch if any(self.across) else None

    @property
    def is_whole(self) -> bool:
        """Whether the layers normalize over all samples of a call, which are then one piece."""
        return any(self.across) and self.ghost is None

    @property
    def have_changed(self) -> bool:
        """Whether other layers are in training mode than at `begin`."""
        return self._now() != self.across

    def check(self) -> None:
        """Raises `Outdated` if other layers are in training mode than at `begin`. The engine checks the
        parameters of the optimizer."""
        if self.have_changed:
            raise Outdated("other BatchNorm layers are in training mode than before.")

    def _now(self) -> list[bool]:
        return [looks_across_samples(layer, layer.training) for layer in self._layers]

    def _synchronises(self, is_joint: bool) -> bool:
        """Whether BatchNorm normalizes over the samples of several ranks, all of them. Raises
        `InputError` if it is to do so over some of them."""
        if num_joined() == 1:
            return False
        cut = [norm for norm, is_cut in zip(self._layers, self.across, strict=True) if is_cut]
        synced = [norm for norm in cut if isinstance(norm, nn.SyncBatchNorm)]
        groups = {norm.process_group for norm in synced} - {None}
        if any(dist.get_world_size(one) != num_joined() for one in groups):
            raise InputError(
                "SyncBatchNorm was given a process group of some of the ranks, and Step synchronises"
                " over all of them: leave process_group out, or use BatchNorm, which normalises over"
                " the samples of each rank."
            )
        if synced and is_joint:
            warn(
                "SyncBatchNorm normalises over the samples of each rank here, as BatchNorm does, since"
                " the loss compares the samples of all ranks (JointLoss).",
            )
            return False
        if 0 < len(synced) < len(cut):
            warn(
                f"{len(cut) - len(synced)} of {len(cut)} BatchNorm layers are not SyncBatchNorm, and"
                " are normalised over the samples of all ranks as well: convert all of them, or none.",
            )
        return bool(synced)

"""Building: the model of a task, and the replica that a rank trains."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.compute import Replica
from anybatch.compute.building import checked_optimizer, optimizer_for, place
from anybatch.data import largest_batch
from anybatch.estimate import identify
from anybatch.parallel import Group
from anybatch.parallel.failures import together
from anybatch.plans import Plan
from anybatch.process.cuda_driver import take_workspaces
from anybatch.state import frozen_checksums
from anybatch.task import Task


def build(
    task: Task,
    plan: Plan,
    group: Group,
    device: torch.device,
    undo: ExitStack,
    frozen: dict[str, int] | None = None,
) -> Replica:
    """The replica of this rank, with the same weights as on all others. All ranks call it.

    Args:
        task: what to train.
        plan: how.
        group: the ranks.
        device: of this rank.
        undo: closes the replica.
        frozen: on rank 0, filled with checksums of the parameters that nothing trains, as they were
            built; None: nobody needs them.

    Raises `InputError` if `plan` is of another task, or if model or optimizer cannot be used;
    `PeerFailed` if that is so on another rank.
    """

    def build_model() -> nn.Module:
        take_workspaces(device)
        model = place(task.build_model(), device)
        plan.check_fits(identify(task, model))
        if frozen is not None and group.rank == 0:
            frozen.update(frozen_checksums(task, model))
        return model

    model = group.build(build_model)

    def make_optimizer() -> Optimizer:
        return checked_optimizer(optimizer_for(task, model), model)

    def make() -> Replica:
        size, kernels = largest_batch(task), plan.kernels
        replica = Replica(
            model, make_optimizer, task.loss, plan.choice, device, size, kernels=kernels
        )
        undo.callback(replica.close)  # here, since on another rank this may fail
        return replica

    return together(group, make)

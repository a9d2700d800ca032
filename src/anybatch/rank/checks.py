"""Checks before the first step: all ranks run the same task, and the plan supports it."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version

import torch

from anybatch.data import identity_of_batch, lengths_of, num_samples_of
from anybatch.errors import InputError
from anybatch.events import step_number
from anybatch.parallel import Group
from anybatch.parallel.failures import same_on_all
from anybatch.plans import Plan
from anybatch.task import JointLoss, Task


def check_alike(task: Task, plan: Plan, group: Group) -> None:
    """Raise `InputError` if ranks were started with different versions, data or plans: they would wait
    for each other forever, or train on different samples."""
    if group.size == 1:
        return
    held_out = None if task.valid is None else num_samples_of(task.valid)
    mine = {
        "the versions of anybatch and torch": str(versions()),
        "the task": task.name,
        "the global batch": str(identity_of_batch(task)),
        "the seed": str(task.seed),
        "what to do about bad data": task.bad_data,
        "the number of training samples": str(num_samples_of(task.train)),
        "the number of held-out samples": str(held_out),
        "the lengths of the training samples": _digest_of_lengths(task),
        "the plan": plan.model_dump_json(exclude={"device_name", "notices"}),
    }
    same_on_all(group, mine, "start all ranks with the same software, command and data")


def _digest_of_lengths(task: Task) -> str:
    lengths = lengths_of(task.lengths, task.train, "training")
    return "none" if lengths is None else hashlib.sha256(lengths.numpy().tobytes()).hexdigest()[:12]


def single_sample(index: int, norm: str) -> str:
    """The error message for step `index`, whose single sample BatchNorm `norm` cannot normalize."""
    return (
        f"step {step_number(index)} has 1 sample, and BatchNorm {norm!r} cannot normalise one: a single"
        " value per channel has no variance. Use another global batch of at least 2; if one sample is"
        " the rest of an epoch, last='drop' or last='wrap'; or a norm that looks at one sample only,"
        " such as GroupNorm."
    )


def check_can_skip(task: Task, plan: Plan) -> None:
    """Raise `InputError` if bad samples are to be skipped but the exchange cannot discard their
    gradients."""
    exchange = plan.exchange
    if task.bad_data == "skip" and (exchange.every > 1 or exchange.stale):
        raise InputError(
            "bad_data is 'skip', and the plan exchanges gradients in a way where one that is not finite"
            " stays, in what ranks remember or send off before they agree: use bad_data='stop', or"
            " no local steps and no stale gradients."
        )


def check_can_compare(task: Task, plan: Plan) -> None:
    """Raise `InputError` if the loss compares the samples of all ranks, but under `plan` the ranks
    synchronize BatchNorm inside their passes, take local steps, or apply stale gradients."""
    if not isinstance(task.loss, JointLoss):
        return
    exchange = plan.exchange
    for wrong, what in (
        (plan.norms == "synchronised", "synchronises BatchNorm over the ranks"),
        (exchange.every > 1 or exchange.stale, f"has the ranks exchange {exchange.describe()}"),
    ):
        if wrong:
            raise InputError(
                f"the loss of task {task.name!r} compares all samples of the global batch (JointLoss),"
                f" and the plan {what}: plan anew."
            )


def versions() -> dict[str, str]:
    """The versions of the software used for computation, by name."""
    try:
        own = version("anybatch")
    except PackageNotFoundError:  # found through PYTHONPATH
        own = "not installed"
    return {"anybatch": own, "torch": torch.__version__}

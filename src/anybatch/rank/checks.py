"""Checks before the first step: all ranks run the same task, and the plan supports it."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version

import torch

from anybatch.data import Steps, identity_of_batch, lengths_of, num_samples_of
from anybatch.errors import InputError
from anybatch.events import step_number
from anybatch.parallel import Group
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
    everyone = group.exchange(mine)
    for what, value in everyone[0].items():
        for rank, other in enumerate(everyone):
            if other[what] != value:
                told = "" if what == "the plan" else f" ({value} and {other[what]})"
                raise InputError(
                    f"{what} of rank 0 and rank {rank} differ{told}: start all ranks with the same"
                    " software, command and data."
                )


def _digest_of_lengths(task: Task) -> str:
    lengths = lengths_of(task.lengths, task.train, "training")
    return "none" if lengths is None else hashlib.sha256(lengths.numpy().tobytes()).hexdigest()[:12]


def single_sample(steps: Steps, index: int, norm: str) -> str:
    """The error message for step `index`, whose single sample BatchNorm `norm` cannot normalize."""
    cannot = f"BatchNorm {norm!r} cannot normalise one: a single value per channel has no variance."
    length, size = steps.num_samples, steps.global_batch
    if not isinstance(size, int) or size == 1 or length == 1 or length is None:
        return (
            f"step {step_number(index)} has 1 sample, and {cannot} Train with a global batch of at"
            " least 2, or use a norm that looks at one sample only, such as GroupNorm."
        )
    whole, rest = divmod(length, size)
    if steps.last == "keep" and rest == 1 and index == whole:
        return (
            f"the last step of each epoch has 1 sample ({length:,} = {whole:,} x {size:,} + 1, with"
            f" last='keep'), and {cannot} Use last='drop' or last='wrap', or another global batch."
        )
    return (
        f"the last step has 1 sample (of {steps.total_samples:,} in all, {size:,} per step), and"
        f" {cannot} Train on another number of samples."
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

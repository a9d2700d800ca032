"""Footprint: the memory of a task under one choice, from a trace of its real step.

The trace runs the same code as training: the same `Replica`, through an update that creates the
optimizer state, a step that accumulates gradients, and an evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from anybatch.estimate.family import Family, Traced
from anybatch.estimate.peak import Peak, context_bytes_of, method_on, replayed
from anybatch.estimate.sharding import Division
from anybatch.estimate.stage import num_traced, trace_evaluation, trace_step
from anybatch.estimate.subject import Subject
from anybatch.estimate.workspaces import communicator_bytes, with_workspaces
from anybatch.machine import Device
from anybatch.plans import Choice


@dataclass(frozen=True)
class Footprint:
    """Memory required under one choice.

    Attributes:
        peak: maximum memory that training adds to the device.
        commit_bytes: maximum memory that the update adds to what is allocated before it: in the
            first step, which creates the optimizer state, and in later steps.
        method: description of how the bytes were determined.
    """

    peak: Peak
    commit_bytes: tuple[int, int]
    method: str = ""


def footprint(subject: Subject, choice: Choice, device: Device) -> Footprint:
    """Trace `subject` under `choice` on `device`, which need not be present.

    Raises whatever the model or loss raises on fake tensors.
    """
    traced = traced_step(subject, choice, device)
    return Footprint(
        peak=replayed(traced, device, subject.division).peak(
            constant_bytes(subject, choice, device), device
        ),
        commit_bytes=_commit_of_rank(traced.commit_bytes, subject.division),
        method=method_on(subject.as_traced(device)),
    )


def _commit_of_rank(commit_bytes: tuple[int, int], division: Division | None) -> tuple[int, int]:
    if division is None:
        return commit_bytes
    if division.offload:
        return 0, 0
    first, later = commit_bytes
    return division.part(first), division.part(later)


def traced_step(subject: Subject, choice: Choice, device: Device) -> Traced:
    """Return a training step under `choice`, traced or computed from other traces. Raises as
    `footprint` does."""
    key = "training", num_traced(subject, choice), *_others(choice, device)
    family = subject.families.get(key)
    if family is None:
        family = subject.families[key] = Family(
            lambda size: trace_step(
                subject, choice.model_copy(update={"micro_batch": size}), device
            )
        )
    return with_workspaces(family.at(choice.micro_batch), device)


def constant_bytes(subject: Subject, choice: Choice, device: Device) -> dict[str, int]:
    """Return the bytes, by kind, that are held during training in addition to the tensors of a
    trace."""
    if device.kind != "cpu":
        return _constant_on_device(subject, device)
    waiting = 0
    if subject.is_encoded_first(choice.micro_batch):
        waiting = (subject.whole - choice.micro_batch) * subject.samples.waiting_bytes
    return {"input batch": subject.samples.held_bytes + waiting}


def _constant_on_device(subject: Subject, device: Device) -> dict[str, int]:
    spoken = communicator_bytes(device) if subject.speaks else 0
    return {"libraries": spoken, "device context": context_bytes_of(device)}


def _others(choice: Choice, device: Device) -> tuple[Choice, Device]:
    """Return `choice` without its batch sizes, and `device` without its budget, which no trace depends
    on."""
    others = choice.model_copy(update={"micro_batch": 1, "evaluation_batch": 1})
    return others, replace(device, budget_bytes=0)


def evaluation_peak(subject: Subject, choice: Choice, device: Device) -> Peak:
    """Return the peak of the memory that evaluation under `choice` adds to the device, including
    the training state. Raises as `footprint` does."""
    key = "evaluation", 0, *_others(choice, device)
    family = subject.families.get(key)
    if family is None:
        family = subject.families[key] = Family(
            lambda size: trace_evaluation(
                subject, choice.model_copy(update={"evaluation_batch": size}), device
            )
        )
    traced = with_workspaces(family.at(choice.evaluation_batch), device)
    constant = {} if device.kind == "cpu" else _constant_on_device(subject, device)
    return replayed(traced, device, subject.division).peak(constant, device)

"""Footprint: the bytes of a task under one choice, from a trace of its real step.

What is traced is what is run: the same `Replica`, through an update that makes the optimizer's state, a
step that accumulates, and an evaluation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.compute import Replica
from anybatch.data import ghosts
from anybatch.estimate.allocator import Allocator, CudaCache, GlibcHeap, Taken
from anybatch.estimate.cuda import is_overlaid, laid_over, update_together
from anybatch.estimate.family import Family, Part, Traced
from anybatch.estimate.kernels import kernels_on
from anybatch.estimate.subject import Subject
from anybatch.estimate.trace import Block, Timeline, Tracer, alive, tracing
from anybatch.machine import MMAP_THRESHOLD, Device
from anybatch.plans import Choice
from anybatch.task import parameters_in

CPU_CONSTANT_BYTES = 4 << 20
"""Python objects of a step and of its graph (200 to 450 KiB), and what the heap grows by in a run of
many steps, where they lie between small tensors: 0.5 to 3.7 MiB were measured over the rest. The
kernel's own count of pages is late by up to 64 of them per core."""

CUDA_CONSTANT_BYTES = 640 << 20
"""Context, kernels and cuBLAS workspace: 450 to 650 MiB is what drivers of 2024 and later show."""

_MOST_GHOSTS = 4


@dataclass(frozen=True)
class Peak:
    """The most bytes at any moment, as the budget counts them, and what they are."""

    num_bytes: int
    by_kind: dict[str, int]


@dataclass(frozen=True)
class Footprint:
    """What one choice costs.

    Attributes:
        peak: most that training adds to the device.
        commit_bytes: most that the update adds to what is there before it: in the first step, which
            makes the optimizer's state, and in later ones.
        method: how the bytes were found, in words.
    """

    peak: Peak
    commit_bytes: tuple[int, int]
    method: str = ""


def footprint(subject: Subject, choice: Choice, device: Device) -> Footprint:
    """Trace `subject` under `choice` on `device`, which need not be here.

    Raises whatever the model or loss raises on fake tensors.
    """
    key = "training", _num_traced(subject, choice), _others(choice), device
    family = subject.families.get(key)
    if family is None:
        family = subject.families[key] = Family(
            lambda size: trace_step(
                subject, choice.model_copy(update={"micro_batch": size}), device
            )
        )
    traced = family.at(choice.micro_batch)
    return Footprint(
        peak=_peak(traced.timeline, traced.kept_bytes, device),
        commit_bytes=traced.commit_bytes,
        method=method_on(device),
    )


def _others(choice: Choice) -> Choice:
    """The knobs beside the sizes of batches."""
    return choice.model_copy(update={"micro_batch": 1, "evaluation_batch": 1})


def _num_traced(subject: Subject, choice: Choice) -> int:
    """Micro-batches that show all there is to see: the second one adds to gradients."""
    return 1 if choice.micro_batch >= subject.identity.global_batch else 2


def trace_step(subject: Subject, choice: Choice, device: Device) -> Traced:
    """Trace an update that makes the optimizer's state, and then a step of at most two micro-batches.

    Raises whatever the model or loss raises on fake tensors.
    """
    target = _fake_device(device)
    commits: list[int] = []
    kernels = kernels_on(device.kind)
    with tracing(kernels) as (tracer, _), laid_over(device):
        replica, owners, copies = _set_up(subject, choice, device, tracer)
        replica.model.train()
        _make_gradients(replica, owners, subject, tracer)
        commits.append(_update(replica, owners, subject, tracer))
        begin = tracer.timeline.num_moments + 1
        for _ in range(_num_traced(subject, choice)):
            tracer.phase = "input"
            batch = subject.batch(choice.micro_batch, target)
            tracer.phase = "compute"
            replica.accumulate(batch, choice.micro_batch, _cut(subject, choice.micro_batch))
            del batch
            for param in replica.parameters:
                if param.grad is not None:
                    tracer.see(param.grad, "gradients", owners.get(param, ""))
        commits.append(_update(replica, owners, subject, tracer))
        end = tracer.timeline.num_moments
        modules = _parts(replica.model, owners)
        del copies
    return Traced(
        timeline=tracer.timeline,
        kept_bytes=kernels.kept_bytes,
        commit_bytes=(commits[0], commits[1]),
        begin=begin,
        end=end,
        num_micro_batches=_num_traced(subject, choice),
        modules=modules,
        shapes=tracer.shapes,
        calls=tracer.calls,
    )


Owners = dict[torch.Tensor, str]
"""Names of the modules that parameters belong to, the first where several share one."""


def _make_gradients(replica: Replica, owners: Owners, subject: Subject, tracer: Tracer) -> None:
    if subject.flat:
        return  # they are there from the start
    for param in replica.parameters:
        param.grad = torch.empty_like(param)
        tracer.see(param.grad, "gradients", owners.get(param, ""))


def _parts(model: nn.Module, owners: Owners) -> dict[str, Part]:
    numbers: Counter[str] = Counter()
    for param, owner in owners.items():
        numbers[owner] += param.numel()
    return {
        name or ".": Part(type(module).__name__, numbers[name or "."])
        for name, module in model.named_modules()
    }


def _update(replica: Replica, owners: Owners, subject: Subject, tracer: Tracer) -> int:
    """Trace an update; returns what it adds at its peak."""
    tracer.phase = "update"
    before = tracer.timeline.num_moments
    replica.finish(2.0, subject.clip_norm)
    replica.apply()
    for param, state in replica.optimizer.state.items():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                tracer.see(value, "optimizer state", owners.get(param, ""))
    return _growth(tracer.timeline, before)


def _cut(subject: Subject, num_samples: int) -> list[int]:
    """Ghost batches for a trace. More than a few take as much memory, and longer to trace."""
    size = subject.identity.ghost_batch
    if not size:
        return []
    cut = ghosts(num_samples, size)
    if len(cut) <= _MOST_GHOSTS:
        return cut
    return ghosts(num_samples, -(-num_samples // _MOST_GHOSTS))


def evaluation_peak(subject: Subject, choice: Choice, device: Device) -> Peak:
    """Most bytes that evaluating under `choice` adds to the device. Raises as `footprint` does."""
    key = "evaluation", 0, _others(choice), device
    family = subject.families.get(key)
    if family is None:
        family = subject.families[key] = Family(
            lambda size: _trace_evaluation(subject, choice, size, device)
        )
    traced = family.at(choice.evaluation_batch)
    return _peak(traced.timeline, traced.kept_bytes, device)


def _trace_evaluation(subject: Subject, choice: Choice, size: int, device: Device) -> Traced:
    target = _fake_device(device)
    kernels = kernels_on(device.kind)
    with tracing(kernels) as (tracer, _), laid_over(device):
        replica, owners, copies = _set_up(subject, choice, device, tracer)
        _make_gradients(replica, owners, subject, tracer)
        _update(replica, owners, subject, tracer)  # the optimizer's state stays while evaluating
        begin = tracer.timeline.num_moments + 1
        replica.model.eval()
        for _ in range(2):
            tracer.phase = "input"
            batch = subject.batch(size, target)
            tracer.phase = "compute"
            replica.evaluate(subject.loss, batch, size)
            del batch
        end = tracer.timeline.num_moments
        del copies
    return Traced(tracer.timeline, kernels.kept_bytes, (0, 0), begin, end, 2, {}, {}, {})


def kind_of(block: Block, timeline: Timeline) -> str:
    """What `block` is, as one of the ledger's kinds."""
    if block.kind:
        return block.kind
    if block.phase == "input":
        return "input batch"
    if block.phase != "compute" or not 0 < block.born <= len(timeline.operations):
        return "temporary"
    maker = timeline.operations[block.born - 1]
    if maker.backward:
        return "temporary"
    return "activations" if maker.module else "loss and logits"


def constant_bytes(device: Device) -> int:
    """What the process takes beside tensors and kernels."""
    return CPU_CONSTANT_BYTES if device.kind == "cpu" else CUDA_CONSTANT_BYTES


def _peak(timeline: Timeline, kept_bytes: int, device: Device) -> Peak:
    taken = allocator_of(device).replay(timeline)
    sizes = kinds_at(timeline, kept_bytes, taken, device)
    return Peak(sum(sizes.values()), dict(Counter(sizes).most_common()))


def kinds_at(timeline: Timeline, kept_bytes: int, taken: Taken, device: Device) -> dict[str, int]:
    """Bytes by kind at the peak, none of them zero; they add up to it."""
    kinds: Counter[str] = Counter()
    for block in alive(timeline, taken.moment):
        kinds[kind_of(block, timeline)] += block.num_bytes
    kinds["kernels' scratch"] = timeline.scratch.get(taken.moment, 0)
    kinds["allocator's rounding and holes"] = taken.overhead_bytes
    kinds["libraries"] = kept_bytes
    kinds["libraries" if device.kind == "cpu" else "device context"] += constant_bytes(device)
    return {kind: size for kind, size in kinds.items() if size}


def _set_up(
    subject: Subject, choice: Choice, device: Device, tracer: Tracer
) -> tuple[Replica, Owners, list[torch.Tensor]]:
    target = _fake_device(device)
    with target:
        model: nn.Module = subject.build_model()
    tracer.watch(model)
    owners: Owners = {}
    buffers: dict[torch.Tensor, str] = {}
    for name, module in model.named_modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(param, name or ".")
        for buffer in module.buffers(recurse=False):
            buffers.setdefault(buffer, name or ".")
    for param, owner in owners.items():
        tracer.see(param, "parameters", owner)
    for buffer, owner in buffers.items():
        tracer.see(buffer, "buffers", owner)
    trained: list[nn.Parameter] = []

    def make_optimizer() -> Optimizer:
        optimizer = subject.make_optimizer(model)
        if device.kind == "cuda":
            update_together(optimizer)
        trained.extend(parameters_in(optimizer.param_groups))
        return optimizer

    replica = Replica(
        model,
        make_optimizer,
        subject.loss,
        choice,
        target,
        subject.identity.global_batch,
        # Whether a gradient overflowed has no answer here, and the scaler's own bytes are few.
        loss_scaling=False,
    )
    if subject.flat:
        buckets = replica.flatten()
        for flat in buckets.flats:
            tracer.see(flat, "gradients")
        buckets.attach()
    # Where the optimizer works on float32 copies, they stand in the places of what they are copies of.
    for copied, param in zip(trained, replica.parameters, strict=True):
        owners.setdefault(param, owners.get(copied, ""))
    for param, owner in owners.items():
        tracer.see(param, "parameters", owner)
    copies: list[torch.Tensor] = []  # kept for putting back
    for buffer, owner in buffers.items():
        copies.append(buffer.detach().clone())
        tracer.see(copies[-1], "buffers", owner)
    return replica, owners, copies


def _growth(timeline: Timeline, start: int) -> int:
    """The most bytes alive at once from `start` on, beyond those alive at `start`."""
    changes: Counter[int] = Counter()
    for block in timeline.blocks:
        if block.born > start:
            changes[block.born] += block.num_bytes
            if block.died is not None:
                changes[block.died + 1] -= block.num_bytes
    most = now = 0
    for moment in sorted(changes):
        now += changes[moment]
        most = max(most, now)
    return most


def allocator_of(device: Device) -> Allocator:
    """The allocator of a device."""
    if device.kind == "cpu":
        return GlibcHeap(MMAP_THRESHOLD, MMAP_THRESHOLD)
    return CudaCache(limit_bytes=max(0, device.budget_bytes - CUDA_CONSTANT_BYTES))


def _fake_device(device: Device) -> torch.device:
    """The device of the fake tensors: the real one where it is present. Fake CUDA tensors do not carry
    through a backward pass on a machine without CUDA, so there the trace is one of CPU tensors, with
    CUDA's rules laid over it."""
    return torch.device("cpu" if is_overlaid(device) else device.torch_name)


def method_on(device: Device) -> str:
    """How the bytes on `device` are found, in words."""
    if device.kind == "cpu":
        return (
            "traced on fake tensors, with the workspaces of oneDNN and MKL by rule,"
            " replayed through a model of glibc's heap"
        )
    way = "traced on fake tensors, replayed through a model of torch's CUDA allocator"
    if is_overlaid(device):
        way += (
            " (no such device here: CPU tensors under CUDA's autocast lists, attention that keeps no"
            " scores, and foreach optimizers stand for its own; workspaces of cuDNN are not in it)"
        )
    return way

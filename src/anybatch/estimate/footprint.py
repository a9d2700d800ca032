"""Footprint: the bytes of a task under one choice, from a trace of its real step.

What is traced is what is run: the same `Replica`, through an update that makes the optimizer's state, a
step that accumulates, and an evaluation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from anybatch.data import ghosts
from anybatch.estimate.allocator import (
    Allocator,
    CudaCache,
    GlibcHeap,
    Taken,
    passing_bytes,
)
from anybatch.estimate.cuda import is_overlaid
from anybatch.estimate.family import Family, Traced
from anybatch.estimate.pieces import cut_finer, tensors
from anybatch.estimate.stage import num_traced, trace_evaluation, trace_step
from anybatch.estimate.stage_setup import cut_of
from anybatch.estimate.subject import Subject
from anybatch.estimate.trace import Block, Timeline, alive
from anybatch.machine import MMAP_THRESHOLD, Device
from anybatch.plans import Choice

CPU_CONSTANT_BYTES = 640 << 10
"""C++ objects of a step and of its graph, and the kernel's count of pages, which is late by up to 32 of
them per core. Python's own are taken before the baseline."""

_SCATTER = 1.2
"""Kernels for sizes beyond the first come to lie between tensors that come and go in the heap, and
leave holes (digits, 30 steps with evaluations of two sizes)."""

_PLACES = 1.75
"""Of what comes and goes in the heap, beside the room that it has in the replay: the next block of its
size comes to lie elsewhere. How often is not known; less than this was measured too little (65 samples
in 17 ghost batches, 461 samples of 64 numbers), and more is too much for convolutions of 44 MiB."""

_SAMPLE_BYTES, _MOST_SAMPLES_BYTES = 2050, 1536 << 10
"""Objects of one sample while a batch is put together: 1,025 bytes of heap for two tensors, in two
places; and the most that was seen."""

CUDA_CONSTANT_BYTES = 640 << 20
"""Context, kernels and cuBLAS workspace: 450 to 650 MiB is what drivers of 2024 and later show."""

_MOST_EVALUATION_SIZES = 2  # the last batch of an evaluation is smaller


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
        kernel_bytes: what the first passes of one size leave in the process: kernels for its shapes.
    """

    peak: Peak
    commit_bytes: tuple[int, int]
    method: str = ""
    kernel_bytes: int = 0


def footprint(subject: Subject, choice: Choice, device: Device) -> Footprint:
    """Trace `subject` under `choice` on `device`, which need not be here.

    Raises whatever the model or loss raises on fake tensors.
    """
    traced = _training(subject, choice, device)
    return Footprint(
        peak=_peak(traced.timeline, beside_training(subject, choice, traced, device), device),
        commit_bytes=traced.commit_bytes,
        method=method_on(device),
        kernel_bytes=traced.shape_bytes.forward + traced.shape_bytes.backward,
    )


def _training(subject: Subject, choice: Choice, device: Device) -> Traced:
    key = "training", num_traced(subject, choice), _others(choice), device
    family = subject.families.get(key)
    if family is None:
        family = subject.families[key] = Family(
            lambda size: trace_step(
                subject, choice.model_copy(update={"micro_batch": size}), device
            )
        )
    return in_pieces(family.at(choice.micro_batch), subject, choice, device)


def in_pieces(traced: Traced, subject: Subject, choice: Choice, device: Device) -> Traced:
    """A traced step with as many ghost batches as it really has, in the eyes of glibc's heap."""
    size = subject.identity.ghost_batch
    if device.kind != "cpu" or not size:
        return traced
    real = len(ghosts(choice.micro_batch, size))
    cut = len(cut_of(subject, choice.micro_batch))
    return replace(traced, timeline=cut_finer(traced.timeline, cut, real, MMAP_THRESHOLD))


def beside_training(
    subject: Subject, choice: Choice, traced: Traced, device: Device
) -> dict[str, int]:
    """Bytes by kind that stay with the process while it trains, beside the tensors of `traced`."""
    sizes = subject.course.num_sizes(choice.micro_batch, subject.whole)
    shapes = traced.shape_bytes
    one = shapes.forward + shapes.backward
    others = max(0, sizes - 1) * one
    if subject.course.evaluates_between:  # forward again, on batches of other sizes
        valid = _MOST_EVALUATION_SIZES if subject.num_valid is None else subject.num_valid
        others += min(valid, _MOST_EVALUATION_SIZES) * shapes.forward
    libraries = traced.kept_bytes + one + round(_SCATTER * others)
    return _beside(subject, libraries, traced.timeline, device, choice.micro_batch)


def _beside_evaluation(
    subject: Subject, choice: Choice, traced: Traced, device: Device
) -> dict[str, int]:
    """The same while it evaluates, once it has trained."""
    training = _training(subject, choice, device)
    trained = subject.course.num_sizes(choice.micro_batch, subject.whole)
    evaluated = subject.course.num_evaluation_sizes(choice.evaluation_batch, subject.num_valid)
    one = training.shape_bytes.forward + training.shape_bytes.backward
    others = max(0, trained - 1) * one + evaluated * traced.shape_bytes.forward
    libraries = max(training.kept_bytes, traced.kept_bytes) + one + round(_SCATTER * others)
    return _beside(subject, libraries, traced.timeline, device, choice.evaluation_batch)


def _beside(
    subject: Subject, libraries: int, timeline: Timeline, device: Device, num_samples: int
) -> dict[str, int]:
    constant = constant_bytes(device)
    if device.kind != "cpu":
        return {"libraries": libraries, "device context": constant}
    # What comes and goes in the heap does not find its old places again. Objects and kernels that stay
    # have come to lie between them, and what is left is too small for another block of the same size:
    # glibc aligns a block by asking for up to 96 bytes more, which it gives back.
    passing = passing_bytes(tensors(timeline), MMAP_THRESHOLD)
    holes = round(_PLACES * passing)
    # Where no tensors come to lie behind them, objects of samples leave the end of the heap free.
    holes += min(num_samples * _SAMPLE_BYTES, _MOST_SAMPLES_BYTES, passing)
    return {
        "libraries": libraries + constant,
        "allocator's rounding and holes": holes,
        "input batch": subject.course.order_bytes,
    }


def _others(choice: Choice) -> Choice:
    """The knobs beside the sizes of batches."""
    return choice.model_copy(update={"micro_batch": 1, "evaluation_batch": 1})


def evaluation_peak(subject: Subject, choice: Choice, device: Device) -> Peak:
    """Most bytes that evaluating under `choice` adds to the device. Raises as `footprint` does."""
    key = "evaluation", 0, _others(choice), device
    family = subject.families.get(key)
    if family is None:
        family = subject.families[key] = Family(
            lambda size: trace_evaluation(
                subject, choice.model_copy(update={"evaluation_batch": size}), device
            )
        )
    traced = family.at(choice.evaluation_batch)
    return _peak(traced.timeline, _beside_evaluation(subject, choice, traced, device), device)


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


def _peak(timeline: Timeline, beside: Mapping[str, int], device: Device) -> Peak:
    taken = allocator_of(device).replay(timeline)
    sizes = kinds_at(timeline, beside, taken)
    return Peak(sum(sizes.values()), dict(Counter(sizes).most_common()))


def kinds_at(timeline: Timeline, beside: Mapping[str, int], taken: Taken) -> dict[str, int]:
    """Bytes by kind at the peak, none of them zero, with those `beside` the tensors; they add up to
    it."""
    kinds: Counter[str] = Counter()
    for block in alive(timeline, taken.moment):
        kinds[kind_of(block, timeline)] += block.num_bytes
    kinds["kernels' scratch"] = timeline.scratch.get(taken.moment, 0)
    kinds["allocator's rounding and holes"] = taken.overhead_bytes
    kinds.update(beside)
    return {kind: size for kind, size in kinds.items() if size}


def allocator_of(device: Device) -> Allocator:
    """The allocator of a device."""
    if device.kind == "cpu":
        return GlibcHeap(MMAP_THRESHOLD, MMAP_THRESHOLD)
    return CudaCache(limit_bytes=max(0, device.budget_bytes - CUDA_CONSTANT_BYTES))


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

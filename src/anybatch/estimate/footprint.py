"""Footprint: the bytes of a task under one choice, from a trace of its real step.

What is traced is what is run: the same `Replica`, through an update that makes the optimizer's state, a
step that accumulates, and an evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from anybatch.data import ghosts, micro_batches
from anybatch.estimate.allocator import Taken, passing_bytes
from anybatch.estimate.family import Family, Traced
from anybatch.estimate.kernels import PRIMITIVE_BYTES, made_for_sizes
from anybatch.estimate.kinds import OVERHEAD
from anybatch.estimate.peak import (
    Peak,
    allocator_of,
    context_bytes_of,
    method_on,
    peak_at,
    peak_of,
)
from anybatch.estimate.pieces import cut_finer, tensors
from anybatch.estimate.stage import num_traced, trace_evaluation, trace_step
from anybatch.estimate.stage_setup import cut_of
from anybatch.estimate.subject import Subject
from anybatch.estimate.trace import Timeline
from anybatch.estimate.workspaces import (
    PRODUCTS,
    communicator_bytes,
    recorder_bytes,
    with_workspaces,
)
from anybatch.machine import MMAP_THRESHOLD, Device
from anybatch.plans import Choice

CPU_CONSTANT_BYTES = 600 << 10
"""C++ objects of a step and of its graph, and the kernel's count of pages, which is late by up to 32 of
them per core. Python's own are taken before the baseline."""

_OTHER_SIZES, _OTHER_SIZES_IN_HALF = 0.8, 1.0
"""What kernels for a further size of batch take, of those for the first: those that copy weights are
there already (convolutions alone: 166 of 241 KiB; 91 runs). Kernels of products in half precision are
each their own."""

_ALL_HOLES = 10 << 20
"""Of more than so much that comes and goes in the heap, half of the rest leaves holes: 13 models (GRU,
RNN, cells, up to 200 layers, transformers) with 11 to 44 MiB left 2 to 20 MiB, with less up to
all of it."""

_HOLES_OF_PASSES, _MOST_OF_PASSES = 0.3, 1 << 20
"""More holes where a step has several passes, and the most that was missing (100 layers of width 64, an
RNN: 1.04 and 1.31 times what comes and goes, 0.2 and 1.0 MiB more)."""

_HOLES_OF_RECOMPUTE = 1.6
"""Where blocks are computed again in backward, what comes and goes is mixed with what stays for longer,
and leaves more holes (experts of 0.9 to 1.7 MiB beside 2.5, after the first step)."""

_DRIFT, _IN_HEAP = 0.6, 6
"""Where blocks of one to two thresholds find holes in the first step, more do step by step, until they
leave holes of so large a part of all that come and go, or of so many times what found holes at first (a
small transformer, 4 and 8 blocks, activations of 128 to 240 KiB: 0.46 to 0.58 of all, of which a tenth
to a fifth found holes; another, with a fifteenth: nothing)."""

_FEW = 256 << 10
"""Of less in such blocks it would be a tenth of a MiB."""

_SAMPLE_BYTES, _MOST_SAMPLES_BYTES = 2050, 1536 << 10
"""Objects of one sample while a batch is put together: 1,025 bytes of heap for two tensors, in two
places; and the most that was seen."""


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
    traced = traced_step(subject, choice, device)
    taken = allocator_of(device).replay(traced.timeline)
    beside = beside_training(subject, choice, traced, taken, device)
    return Footprint(
        peak=peak_at(traced, taken, beside, device),
        commit_bytes=traced.commit_bytes,
        method=method_on(subject.as_traced(device)),
        kernel_bytes=traced.shape_bytes.forward + traced.shape_bytes.backward,
    )


def traced_step(subject: Subject, choice: Choice, device: Device) -> Traced:
    """A step of training under `choice`, traced, or read off other traces. Raises as `footprint`."""
    key = "training", num_traced(subject, choice), _others(choice), device
    family = subject.families.get(key)
    if family is None:
        family = subject.families[key] = Family(
            lambda size: trace_step(
                subject, choice.model_copy(update={"micro_batch": size}), device
            )
        )
    size, rest = choice.micro_batch, _second_of_two(subject, choice.micro_batch)
    traced = family.at(size) if rest is None else family.of_two(size, rest)
    return as_run(traced, subject, choice, device)


def _second_of_two(subject: Subject, micro_batch: int) -> int | None:
    """The samples of the second of two passes, where it is the smaller one and the only one that finds
    gradients. Shares of ranks may change, and lengths differ from step to step."""
    identity = subject.identity
    one_rank = subject.sums is None and subject.division is None and not subject.flat
    if not one_rank or identity.longest is not None or identity.grain is not None:
        return None
    ghost = identity.ghost_batch
    if ghost and micro_batch % ghost:
        return None
    pieces = micro_batches(range(subject.whole), micro_batch, ghost, subject.whole)
    is_smaller = len(pieces) == 2 and 1 < len(pieces[1]) < micro_batch
    return len(pieces[1]) if is_smaller else None


def as_run(traced: Traced, subject: Subject, choice: Choice, device: Device) -> Traced:
    """A traced step with what a trace does not see: on a CPU as many ghost batches as it really has, in
    the eyes of glibc's heap; on CUDA the workspaces of its products."""
    size = subject.identity.ghost_batch
    if device.kind != "cpu" or not size:
        return with_workspaces(traced, device)
    real = len(ghosts(choice.micro_batch, size))
    cut = len(cut_of(subject, choice.micro_batch))
    return replace(traced, timeline=cut_finer(traced.timeline, cut, real, MMAP_THRESHOLD))


def beside_training(
    subject: Subject, choice: Choice, traced: Traced, taken: Taken, device: Device
) -> dict[str, int]:
    """Bytes by kind that stay with the process while it trains, beside the tensors of `traced`, for
    which the allocator has `taken` so much."""
    sizes = subject.course.num_sizes(choice.micro_batch, subject.whole)
    shapes = traced.shape_bytes
    one = shapes.forward + shapes.backward
    others = max(0, sizes - 1) * one
    products, between = traced.products, None
    if subject.course.evaluates_between and device.kind == "cpu":
        # Forward again, on batches of other sizes, and what comes and goes in it.
        evaluated = _num_evaluation_sizes(subject, choice, traced)
        others += evaluated * shapes.forward
        between = _evaluation(subject, choice, device)
        products = products.before(between.products)
    kept = traced.kept_bytes + products.kept_bytes
    libraries = kept + _kernel_bytes(subject, choice, traced, device, others)
    passing = _passing(traced.timeline, device)
    beside = _beside(subject, libraries, passing, device, choice.micro_batch)
    if device.kind != "cpu":
        return beside
    if subject.is_encoded_first(choice.micro_batch):
        others = subject.whole - choice.micro_batch
        beside["input batch"] += subject.samples.waiting(others, choice.micro_batch)
    if choice.recompute.blocks:
        beside[OVERHEAD] = round(_HOLES_OF_RECOMPUTE * beside[OVERHEAD])
    if subject.whole > choice.micro_batch:
        beside[OVERHEAD] += min(round(_HOLES_OF_PASSES * _holes(passing)), _MOST_OF_PASSES)
    if between is not None:
        beside[OVERHEAD] += _holes(_passing(between.timeline, device))
    beside[OVERHEAD] += _holes_of_large(traced.timeline, taken, passing)
    beside[OVERHEAD] += _batch_in_hole(traced.timeline, passing)
    return beside


def _beside_evaluation(
    subject: Subject, choice: Choice, traced: Traced, device: Device
) -> dict[str, int]:
    """The same while it evaluates, once it has trained."""
    training = traced_step(subject, choice, device)
    trained = subject.course.num_sizes(choice.micro_batch, subject.whole)
    evaluated = _num_evaluation_sizes(subject, choice, training)
    one = training.shape_bytes.forward + training.shape_bytes.backward
    others = max(0, trained - 1) * one + evaluated * traced.shape_bytes.forward
    kept = training.kept_bytes + training.products.before(traced.products).kept_bytes
    libraries = kept + _kernel_bytes(subject, choice, training, device, others)
    passing = _passing(traced.timeline, device)
    beside = _beside(subject, libraries, passing, device, choice.evaluation_batch)
    if device.kind == "cpu":
        beside[OVERHEAD] += _left_in_heap(subject, choice, training, device)
    return beside


def _beside_evaluation_alone(
    subject: Subject, choice: Choice, traced: Traced, device: Device
) -> dict[str, int]:
    """The same where nothing was trained before."""
    course = subject.course
    sizes = course.num_evaluation_sizes(choice.evaluation_batch, subject.num_valid)
    forward = traced.shape_bytes.forward
    kernels = forward + _of_other_sizes(choice, max(0, sizes - 1) * forward)
    libraries = traced.kept_bytes + traced.products.kept_bytes + kernels
    unordered = replace(subject, course=replace(course, order_bytes=0))
    passing = _passing(traced.timeline, device)
    return _beside(unordered, libraries, passing, device, choice.evaluation_batch)


def _kernel_bytes(
    subject: Subject, choice: Choice, training: Traced, device: Device, others: int
) -> int:
    """Bytes of the kernels for one size of batch, or for all that data ask for, and of those for the
    `others`."""
    one = training.shape_bytes.forward + training.shape_bytes.backward
    made = max(one, _kernels_of_data(subject, choice, training, device))
    return made + _of_other_sizes(choice, others)


def _of_other_sizes(choice: Choice, num_bytes: int) -> int:
    """Bytes of kernels for further sizes of batch, which would be so many if each were the first."""
    in_half = made_for_sizes(choice.precision)
    return round((_OTHER_SIZES_IN_HALF if in_half else _OTHER_SIZES) * num_bytes)


def _left_in_heap(subject: Subject, choice: Choice, training: Traced, device: Device) -> int:
    """Bytes of the heap that training leaves free and keeps, since something lies behind."""
    key = _others(choice), choice.micro_batch, device
    if key not in subject.left:
        timeline = training.timeline
        taken = allocator_of(device).replay(timeline)
        stays = sum(
            block.num_bytes
            for block in timeline.blocks
            if block.num_bytes < MMAP_THRESHOLD and block.died is None
        )
        passing = _passing(timeline, device)
        holes = _holes(passing) + _holes_of_large(timeline, taken, passing)
        subject.left[key] = max(0, taken.heap_bytes - stays) + holes
    return subject.left[key]


def _num_evaluation_sizes(subject: Subject, choice: Choice, training: Traced) -> int:
    """Sizes of batches for which evaluation has kernels made. Forward's are the same as in training,
    but for those of oneDNN's LSTM, which keep something for backward there."""
    seen: set[int] = set()
    if not any("mkldnn_rnn_layer" in op.name for op in training.timeline.operations):
        seen = subject.course.sizes(choice.micro_batch, subject.whole)
    return subject.course.num_evaluation_sizes(choice.evaluation_batch, subject.num_valid, seen)


def _kernels_of_data(subject: Subject, choice: Choice, traced: Traced, device: Device) -> int:
    """Bytes of the kernels that training makes for products whose sizes are data, such as those of
    experts that unequal numbers of tokens choose; 0 where there are none."""
    is_of_data = bool(subject.assumptions) and device.kind == "cpu"
    if not (is_of_data and made_for_sizes(choice.precision)):
        return 0
    products = sum(op.name.startswith(PRODUCTS) for op in traced.timeline.operations)
    per_pass = -(-products // num_traced(subject, choice))
    passes = -(-subject.whole // choice.micro_batch)
    num = subject.course.num_kernels_of_data(per_pass, passes)
    return num * PRIMITIVE_BYTES["product"]


def _beside(
    subject: Subject, libraries: int, passing: int, device: Device, num_samples: int
) -> dict[str, int]:
    constant = constant_bytes(device)
    if device.kind != "cpu":
        spoken = communicator_bytes(device) if subject.speaks else 0
        return {"libraries": libraries + spoken, "device context": constant}
    holes = _holes(passing)
    there = subject.samples.num_there(num_samples)
    # What comes and goes may come to lie behind the objects of samples, too.
    behind = min(there * _SAMPLE_BYTES, _MOST_SAMPLES_BYTES, holes)
    holes += max(behind, there * subject.samples.left_bytes)
    recorded = recorder_bytes(subject.course.total_steps) if subject.speaks else 0
    return {
        "libraries": libraries + constant + recorded + subject.course.worker_bytes,
        OVERHEAD: holes,
        "input batch": subject.course.order_bytes + subject.samples.held_bytes,
    }


def _passing(timeline: Timeline, device: Device) -> int:
    """The most bytes of tensors that come and go in the heap; 0 on a device that has none."""
    return passing_bytes(tensors(timeline), MMAP_THRESHOLD) if device.kind == "cpu" else 0


def _holes(passing: int) -> int:
    """What the heap holds beside so many bytes that come and go. They do not find their old places
    again: objects and kernels that stay have come to lie between them, and what is left is too small
    for another block of the same size, since glibc aligns a block by asking for up to 96 bytes more,
    which it gives back."""
    return min(passing, _ALL_HOLES + max(0, passing - _ALL_HOLES) // 2)


def _holes_of_large(timeline: Timeline, taken: Taken, passing: int) -> int:
    """What it holds beside blocks just above the threshold, where `passing` below it come and go: glibc
    looks into its holes before it maps one. Small blocks then find theirs taken, go to the heap's end,
    and leave larger holes there for the next step."""
    large = passing_bytes(tensors(timeline), 2 * MMAP_THRESHOLD) - passing
    if large < _FEW:
        return 0
    return round(_DRIFT * min(large, _IN_HEAP * taken.large_in_heap_bytes))


def _batch_in_hole(timeline: Timeline, hole: int) -> int:
    """Bytes of a batch that is large enough to be mapped, and that the `hole` of the step before it
    takes in: what lay there goes beyond (an RNN of width 128 over 60 steps, batches of 1.9 MiB, in two
    passes: measured 17% above the prediction). One of less than half the hole leaves room beside it."""
    batch = max((block.num_bytes for block in timeline.blocks if block.phase == "input"), default=0)
    return batch if max(MMAP_THRESHOLD, hole // 2) <= batch <= hole else 0


def _others(choice: Choice) -> Choice:
    """The knobs beside the sizes of batches."""
    return choice.model_copy(update={"micro_batch": 1, "evaluation_batch": 1})


def evaluation_peak(subject: Subject, choice: Choice, device: Device, alone: bool = False) -> Peak:
    """Most bytes that evaluating under `choice` adds to the device: of a run that trains too, or of one
    that does nothing else (`alone`). Raises as `footprint` does."""
    traced = _evaluation(subject, choice, device)
    beside = _beside_evaluation_alone if alone else _beside_evaluation
    return peak_of(traced, beside(subject, choice, traced, device), device)


def _evaluation(subject: Subject, choice: Choice, device: Device) -> Traced:
    key = "evaluation", 0, _others(choice), device
    family = subject.families.get(key)
    if family is None:
        family = subject.families[key] = Family(
            lambda size: trace_evaluation(
                subject, choice.model_copy(update={"evaluation_batch": size}), device
            )
        )
    return with_workspaces(family.at(choice.evaluation_batch), device)


def constant_bytes(device: Device) -> int:
    """What the process takes beside tensors and kernels."""
    return CPU_CONSTANT_BYTES if device.kind == "cpu" else context_bytes_of(device)

"""Stage: a model and its optimizer on fake tensors after one update, from which steps are traced.

Building a model and creating its optimizer state takes long, and is the same for every micro-batch
and every recompute setting. So it is done once, and steps are traced one after the other, as in a
run. Each step begins in the state in which the previous one began, as long as a step leaves nothing
behind and frees nothing that existed before it. If that does not hold (for example, because a
module keeps a table that its first pass creates), each step is traced from the beginning on its own
stage.

Of blocks that are alike, steps after the first traces run a few (`repeats`). Their update is that of
a step with all blocks: it depends neither on the micro-batch nor on recompute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.compute import Replica
from anybatch.compute.ghost_norm import counting_buffers, written_since
from anybatch.compute.joint import Ask, Comparison, rows_like
from anybatch.compute.lm_loss import few_chunks
from anybatch.compute.low_bit_optimizers import check_whole, is_compiled, parts_of, uncompiled
from anybatch.compute.modes import evaluating
from anybatch.compute.optimizer_update import leanest_update
from anybatch.data import ghosts
from anybatch.estimate.cuda import is_overlaid, laid_over, update_together
from anybatch.estimate.fake_modules import without_fused_layers
from anybatch.estimate.fake_op_cache import fake_mode
from anybatch.estimate.family import Part, Traced
from anybatch.estimate.kernels import CudaKernels, Kernels
from anybatch.estimate.layout import layout_on
from anybatch.estimate.reductions import resident_threads
from anybatch.estimate.repeats import (
    VERIFIED_AT_EACH_END,
    NotRegular,
    Repeat,
    do_the_same,
    expanded,
    named_again,
    repeats_of,
    runs_of,
    shortened,
    without,
)
from anybatch.estimate.subject import Subject
from anybatch.estimate.trace import COPIED, Block, Recorder, Timeline, Tracer, recording
from anybatch.machine import Device
from anybatch.plans import Choice, KernelChoices, Recompute, Update
from anybatch.task import parameters_in


def trace_step(subject: Subject, choice: Choice, device: Device) -> Traced:
    """Trace an update that creates the optimizer state, and then a step of at most two
    micro-batches.

    Raises whatever the model or loss raises on fake tensors.
    """
    return subject.following(device, lambda on: _on_stage(Stage.step, subject, choice, on))


def trace_evaluation(subject: Subject, choice: Choice, device: Device) -> Traced:
    """Trace an update that creates the optimizer state, and then two batches of evaluation. Raises
    as `trace_step` does."""
    return subject.following(device, lambda on: _on_stage(Stage.evaluation, subject, choice, on))


def num_traced(subject: Subject, choice: Choice) -> int:
    """Return the number of micro-batches that need to be traced: a second one adds to gradients."""
    alike = (
        subject.identity.longest is None
    )  # otherwise another global batch may take more than the mean
    return 1 if alike and choice.micro_batch >= subject.whole else 2


def stage_with_leanest_update(subject: Subject, choice: Choice, device: Device) -> Stage:
    """Return a new stage for `choice` whose update is the one that takes the least memory. The traces
    of `subject` that follow use it too. Raises as `Stage` does."""
    stage = Stage(subject, choice, device, leanest=True)
    subject.stages[_key(device, choice.model_copy(update={"update": stage.update}))] = stage
    return stage


def _key(device: Device, choice: Choice) -> Hashable:
    return (
        replace(device, budget_bytes=0),  # which no trace depends on
        choice.precision,
        choice.update,
        choice.optimizer_states,
    )


def _on_stage(
    trace: Callable[[Stage, Choice], Traced], subject: Subject, choice: Choice, device: Device
) -> Traced:
    key = _key(device, choice)
    known = subject.stages.get(key)
    if known is not None and known.reusable:
        try:
            return trace(known, choice)
        except NotRegular:  # there are fewer runs now, or none
            del subject.stages[key]
            return _on_stage(trace, subject, choice, device)
        except Exception:
            # The stage cannot be used again, but the error may not occur under other choices.
            del subject.stages[key]
            raise
    stage = Stage(subject, choice, device)
    traced = trace(stage, choice)
    if known is None:  # one that is not reusable stays, so that no other replaces it
        subject.stages[key] = stage
    return traced


class Stage:
    """Model and optimizer from which steps are traced; see the module. A stage serves any recompute
    setting and any batch size.

    Args:
        subject: the task.
        choice: precision, update and place of the optimizer state of all traces.
        device: device of the traces.
        leanest: whether to run the update that takes the least memory, in place of that of `choice`.

    Attributes:
        reusable: whether the traces so far have left the stage unchanged.
        replica: model and optimizer on fake tensors, in the precision of the plan.
        update: how the update is run.

    Raises whatever the model or its optimizer raises on fake tensors.
    """

    def __init__(
        self, subject: Subject, choice: Choice, device: Device, leanest: bool = False
    ) -> None:
        self.reusable: bool = True
        self._subject = subject
        self._device = device
        self._fake = fake_mode()
        home = fake_device(device).type
        self._tracer = tracer = Tracer(kernels_on(device), self._fake, subject.op_cache, home)
        plain = choice.model_copy(update={"recompute": Recompute(), "chunked_head": ""})
        self._plain = plain
        layout = layout_on(device, subject)
        with self._open():
            found = set_up(subject, plain, device, tracer, layout, leanest)
            self.replica: Replica = found[0]
            self.update: Update = found[1]
            self._owners, self._copies = found[2:]
            self._bucketed = bucketed_bytes(self.replica, self._owners) if subject.flat else {}
            self.make_gradients()
            begun = tracer.timeline.num_moments
            self.run_update()
        head = tracer.timeline
        self._first_commit = growth(head, begun)
        self._parts = parts_of_model(self.replica.model, self._owners)
        self._live = head.blocks
        self._head = replace(head, blocks=[replace(block) for block in head.blocks])
        self._settled = [block for block in head.blocks if block.died is None]
        self._first: int | None = None
        self._steady: _TracedUpdate | None = None

    def step(self, choice: Choice) -> Traced:
        """Trace a step of at most two micro-batches and its update."""
        count = num_traced(self._subject, choice)
        if repeats := repeats_of(self._subject.runs.found, choice.recompute):
            try:
                return self._short_step(choice, count, repeats)
            except NotRegular:
                self._subject.runs.refuse()
                if not self.reusable:
                    raise
                return self.step(choice)
        step = self._begin()
        with self._open():
            self.replica.switch(choice)
            before = counting_buffers(self.replica.model)
            self._run(choice, count)
            if not choice.recompute.blocks:
                self._subject.written.update(
                    dict.fromkeys(written_since(self.replica.model, before))
                )
            self.replica.switch(self._plain)
            begun = step.num_moments
            self.run_update()
        return self._ended(step, growth(step, begun), count)

    def _short_step(self, choice: Choice, count: int, repeats: Sequence[Repeat]) -> Traced:
        """Like `step`, without the blocks that `repeats` leave out. Raises `NotRegular`."""
        if self._steady is None:
            self._steady = self._traced_update()
        whole = self._short_passes(choice, count, repeats)
        self._steady.append_to(whole)
        return self._joined(whole, self._steady.commit_bytes, count, repeats)

    def _short_passes(
        self,
        choice: Choice,
        count: int,
        repeats: Sequence[Repeat],
        add: bool = False,
        gone: Sequence[Repeat] = (),
    ) -> Timeline:
        """Trace the passes of a step without the blocks that `repeats` leave out, and return the trace
        with them, except for those of `gone`. `add`: whether there are gradients, to which the first
        pass adds. Raises `NotRegular`, and whatever the model or loss raises."""
        model, written = self.replica.model, self._subject.written
        step = self._begin()
        with self._open():
            if add:
                self.make_gradients()
            with shortened(model, repeats, choice.recompute) as recompute:
                self.replica.switch(choice.model_copy(update={"recompute": recompute}))
                before = counting_buffers(model)
                self._run(choice, count)
                if not choice.recompute.blocks:
                    written.update(dict.fromkeys(written_since(model, before)))
                self.replica.switch(self._plain)
            waiting = [block for block in step.blocks if block.died is None]
            self.replica.drop()
        self._decide_reuse(step)
        for block in waiting:
            block.died = None
        written.update(dict.fromkeys(name for _, name in named_again([*written], repeats)))
        return self._expanded(step, without(repeats, gone))

    def _expanded(self, step: Timeline, repeats: Sequence[Repeat]) -> Timeline:
        if not self.reusable:
            raise NotRegular("a step leaves tensors behind")
        return expanded(step, self._head.num_moments, repeats)

    def _traced_update(self) -> _TracedUpdate:
        """Trace an update of all parameters after a pass."""
        step = self._begin()
        with self._open():
            self.make_all_gradients()
            begun = step.num_moments
            self.run_update()
        self._decide_reuse(step)
        return _TracedUpdate(step, begun)

    def repeats_to_verify(self) -> list[Repeat]:
        """Return the blocks that are left out even of the trace with which `verify_repeats` compares
        a shorter one."""
        if self.replica.is_joint:
            return []
        runs = runs_of(self.replica.model, self._subject.blocks)
        return repeats_of(runs, Recompute(), VERIFIED_AT_EACH_END)

    def verify_repeats(
        self, size: int, longer: Timeline, until: int, gone: Sequence[Repeat]
    ) -> None:
        """Determine the runs of blocks of which a trace needs a few (`Subject.runs`). They are used
        only if the trace of a pass over `size` samples with few of them is the same as `longer`, up to
        its moment `until`, which ran all except for those that `gone` leave out."""
        subject, model = self._subject, self.replica.model
        runs = runs_of(model, subject.blocks)
        repeats = repeats_of(runs, Recompute())
        if not repeats or self.replica.is_joint or not self.reusable:
            return
        try:
            choice = self._plain.model_copy(update={"micro_batch": size})
            found = self._short_passes(choice, 1, repeats, add=True, gone=gone)
        except NotRegular:
            return
        except Exception:  # whatever the user's code raises without some of its blocks
            self.replica.drop()
            for key in [key for key, stage in subject.stages.items() if stage is self]:
                del subject.stages[key]
            return
        start = self._head.num_moments
        if do_the_same(longer, found, start, (until, found.num_moments)):
            subject.runs.found = list(runs)

    def evaluation(self, choice: Choice) -> Traced:
        """Trace two batches of evaluation."""
        size = choice.evaluation_batch
        model = self.replica.model
        plain = choice.model_copy(update={"recompute": Recompute()})
        repeats = repeats_of(self._subject.runs.found, plain.recompute)
        step = self._begin()
        with self._open(), shortened(model, repeats, plain.recompute):
            self.replica.switch(plain)
            with evaluating(model), without_fused_layers():
                if self.replica.is_joint:
                    self._evaluate_together(size)
                else:
                    for batch in self.batches(size, 2):
                        self.replica.evaluate(self._subject.loss, batch, size)
                        del batch
            self.replica.switch(self._plain)
        if not repeats:
            return self._ended(step, 0, count=2)
        self._decide_reuse(step)
        try:
            return self._joined(self._expanded(step, repeats), 0, 2, repeats)
        except NotRegular:
            self._subject.runs.refuse()
            if not self.reusable:
                raise
        return self.evaluation(choice)

    @contextmanager
    def recorded(self, recorder: Recorder) -> Iterator[Timeline]:
        """Context manager for a trace by the caller, without recompute: `recorder` is called with
        each operation. Yields what is traced."""
        step = self._begin()
        self._tracer.recorder = recorder
        try:
            with recording(self._tracer, self._fake), laid_over(self._device):
                yield step
        finally:
            self._tracer.recorder = None
        self._decide_reuse(step)

    # ------------------------------------------------------------------------------------- tracing

    @contextmanager
    def _open(self) -> Iterator[None]:
        with recording(self._tracer, self._fake), laid_over(self._device), few_chunks():
            yield

    def _begin(self) -> Timeline:
        """Return a timeline that continues the head. The stage is not reusable until the trace has
        succeeded."""
        self.reusable = False
        self._first = None
        timeline = Timeline(num_moments=self._head.num_moments)
        self._tracer.begin_anew(timeline, self._settled)
        return timeline

    def _run(self, choice: Choice, count: int) -> None:
        size, cut = choice.micro_batch, cut_of(self._subject, choice.micro_batch)
        ask = self._ask(size, cut) if self.replica.is_joint else None
        for batch in self.batches(size, count):
            self.replica.accumulate(batch, size, cut, ask)
            for param in self.replica.parameters:
                if param.grad is not None:
                    self._tracer.see(param.grad, "gradients", self._owners.get(param, ""))
            del batch

    def _ask(self, size: int, cut: Sequence[int]) -> Ask | None:
        """Return the function from which passes over `size` samples request their share, as in
        `engine.joint`, or None."""
        if not self._subject.is_encoded_first(size):
            several = self._subject.compared > size
            return (lambda encoded: self.compared(encoded).share(0, size)) if several else None
        (batch,) = self.batches(size, 1)
        encoded = self.replica.encode(batch, size, cut)
        del batch
        share = self.compared(encoded).share(0, size)
        self._first = self._tracer.timeline.num_moments
        return lambda _: share

    def compared(self, encoded: Any) -> Comparison:
        """Return a comparison of all samples, whose encodings are like `encoded`."""
        number = self._subject.compared
        return self.replica.compare(rows_like(encoded, number), number)

    def _evaluate_together(self, size: int) -> None:
        """Encode the batches, then compare them; the encodings wait on the host."""
        encoded = None
        for batch in self.batches(size, 2):
            encoded = self.replica.encode(batch, size)
            del batch
        valid = self._subject.num_valid
        number = min(self._subject.compared, valid or self._subject.compared)
        self.replica.compare_held_out(rows_like(encoded, number), number)

    def batches(self, size: int, count: int) -> Iterator[Any]:
        """Yield the batches. As in a run on CUDA (`data.prefetch`), each batch is created before
        the previous one is freed; on a CPU, after it."""
        batch = None
        for _ in range(count):
            if self._device.kind == "cpu":
                batch = None
            self._tracer.phase = COPIED
            batch = self._subject.batch(size, fake_device(self._device))
            self._tracer.phase = "compute"
            yield batch

    def run_update(self) -> None:
        """Trace an update."""
        self._tracer.phase = "update"
        self.replica.finish(2.0, self._subject.clip_norm)
        optimizer = self.replica.optimizer
        if is_compiled(optimizer):
            # A compiled optimizer updates parameters one by one, and both states in float32.
            sizes = [param.numel() for param in parameters_in(optimizer.param_groups)]
            scratch = 2 * 4 * max(sizes, default=0)
            with uncompiled(optimizer), self._tracer.as_kernel("update", scratch):
                self.replica.apply()
        else:
            self.replica.apply()
        for param, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    for part in parts_of(value).values():
                        self._tracer.see(part, "optimizer state", self._owners.get(param, ""))
        self._leave_out_states_on_host()

    def _leave_out_states_on_host(self) -> None:
        """Exclude optimizer states in host memory, since bytes are those of the device."""
        if self.replica.updater.states_on == "host" and self._device.kind == "cuda":
            for param, state in self.replica.optimizer.state.items():
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.shape == param.shape:
                        self._tracer.block_of(value).num_bytes = 0

    def make_all_gradients(self) -> None:
        """Create gradients, also those that a pass without some blocks did not touch."""
        if self.replica.buckets is not None:
            self.replica.buckets.attach()
        self.make_gradients()

    def make_gradients(self) -> None:
        """Create gradients, to which the next pass adds."""
        if self._subject.flat:
            return  # gradients exist from the start
        for param in self.replica.parameters:
            param.grad = torch.empty_like(param)
            self._tracer.see(param.grad, "gradients", self._owners.get(param, ""))

    def _decide_reuse(self, step: Timeline) -> None:
        alive = any(block.died is None for block in step.blocks)
        self.reusable = not (alive or self._tracer.disturbed)

    def _ended(self, step: Timeline, commit: int, count: int) -> Traced:
        """Return the trace of the head followed by `step`."""
        self._decide_reuse(step)
        if self.reusable:
            return self._joined(step, commit, count)
        # Copied now: tensors kept by the loss or by a module are freed after the trace.
        copied = replace(step, blocks=[replace(block) for block in step.blocks])
        head = [replace(block) for block in self._live]
        return self._joined(copied, commit, count, head=head)

    def _joined(
        self,
        step: Timeline,
        commit: int,
        count: int,
        repeats: Sequence[Repeat] = (),
        head: Sequence[Block] | None = None,
    ) -> Traced:
        timeline = Timeline(
            [*(self._head.blocks if head is None else head), *step.blocks],
            {**self._head.scratch, **step.scratch},
            [*self._head.operations, *step.operations],
            step.num_moments,
            released=self._head.num_moments,
        )
        shapes, calls = self._tracer.shapes, self._tracer.calls
        for name, other in named_again([*calls], repeats):
            calls[other] = calls[name]
            if name in shapes:
                shapes[other] = shapes[name]
        return Traced(
            timeline=timeline,
            commit_bytes=(self._first_commit, commit),
            begin=self._head.num_moments + 1,
            end=timeline.num_moments,
            num_micro_batches=count,
            modules=self._parts,
            shapes=shapes,
            calls=calls,
            bucketed=self._bucketed,
            first=self._first,
        )


class _TracedUpdate:
    """An update that was traced once, to follow the passes of any step.

    Args:
        timeline: trace of the gradients and the update.
        begun: last moment before the update.

    Attributes:
        commit_bytes: maximum bytes that the update adds.
    """

    def __init__(self, timeline: Timeline, begun: int) -> None:
        self._timeline = timeline
        self._begun = begun
        self.commit_bytes: int = growth(timeline, begun)
        self._freed: dict[tuple[str, str, int], list[int]] = {}
        for block in timeline.blocks:
            if block.born <= begun and block.died is not None and block.died >= begun:
                self._freed.setdefault(_content(block), []).append(block.died - begun)

    def append_to(self, passes: Timeline) -> None:
        """Append the update to `passes`. Raises `NotRegular` if other tensors than its gradients are
        left of these."""
        shift = passes.num_moments - self._begun
        freed = {content: list(moments) for content, moments in self._freed.items()}
        for block in passes.blocks:
            if block.died is None:
                moments = freed.get(_content(block))
                if not moments:
                    raise NotRegular(f"{block} is no gradient")
                block.died = passes.num_moments + moments.pop()
        if any(freed.values()):
            raise NotRegular("a pass leaves a gradient out")
        own = self._timeline
        passes.operations += own.operations[self._begun - own.num_moments :]
        passes.scratch |= {
            moment + shift: size for moment, size in own.scratch.items() if moment > self._begun
        }
        for block in own.blocks:
            if block.born > self._begun:
                died = None if block.died is None else block.died + shift
                passes.blocks.append(replace(block, born=block.born + shift, died=died))
        passes.num_moments = own.num_moments + shift


def _content(block: Block) -> tuple[str, str, int]:
    return block.kind, block.module, block.num_bytes


_MOST_GHOSTS = 4

Owners = dict[torch.Tensor, str]
"""Names of the modules that own parameters; for a shared parameter, the first module."""


def set_up(
    subject: Subject,
    choice: Choice,
    device: Device,
    tracer: Tracer,
    layout: KernelChoices,
    leanest: bool = False,
) -> tuple[Replica, Update, Owners, list[torch.Tensor]]:
    """Return the replica of `choice` with images in `layout`, its update (the one that takes the least
    memory if `leanest`), the names of the modules that own its parameters, and the copies of its
    buffers that are kept to restore them. All of them are registered with `tracer`. Called while
    `tracer` records."""
    target = fake_device(device)
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
    see_parameters(tracer, owners)
    for buffer, owner in buffers.items():
        tracer.see(buffer, "buffers", owner)
    trained: list[nn.Parameter] = []

    def make_optimizer() -> Optimizer:
        optimizer = subject.make_optimizer(model)
        trained.extend(parameters_in(optimizer.param_groups))
        return optimizer

    replica = Replica(
        model,
        make_optimizer,
        subject.loss,
        choice,
        target,
        subject.whole,
        # Gradient overflow cannot be checked here, and the scaler itself takes few bytes.
        loss_scaling=False,
        kernels=layout,
        host=torch.device("meta") if device.kind == "cuda" else None,
    )
    update = choice.update
    if leanest:
        update = leanest_update(replica.optimizer, model, device.kind)
        replica.updater.take(update, choice.optimizer_states)
    if device.kind == "cuda" and update != "fused":
        update_together(replica.optimizer)
    if subject.division is not None:
        check_whole(replica.optimizer)
    copies: list[torch.Tensor] = []  # of buffers, kept to restore them, and of gradients
    if subject.flat:
        buckets = replica.flatten()
        for flat in buckets.flats:
            tracer.see(flat, "gradients")
        for held in subject.sums.held(buckets.flats) if subject.sums else ():
            copies.append(held)
            tracer.see(held, "gradients")
        buckets.attach()
    # Float32 copies on which the optimizer works belong to the same modules as the originals.
    for copied, param in zip(trained, replica.parameters, strict=True):
        owners.setdefault(param, owners.get(copied, ""))
    see_parameters(tracer, owners)
    for buffer, owner in buffers.items():
        copies.append(buffer.detach().clone())
        tracer.see(copies[-1], "buffers", owner)
    return replica, update, owners, copies


def see_parameters(tracer: Tracer, owners: Owners) -> None:
    """Register the parameters, or the tensors that they consist of, by owner."""
    for param, owner in owners.items():
        for part in parts_of(param).values():
            tracer.see(part, "parameters", owner)


def parts_of_model(model: nn.Module, owners: Owners) -> dict[str, Part]:
    """Return the modules of `model` by name, in order of definition."""
    numbers: Counter[str] = Counter()
    for param, owner in owners.items():
        numbers[owner] += param.numel()
    return {
        name or ".": Part(type(module).__name__, numbers[name or "."])
        for name, module in model.named_modules()
    }


def bucketed_bytes(replica: Replica, owners: Owners) -> dict[str, int]:
    """Return the bytes of gradients by module, for a replica whose gradients are in buckets."""
    sizes: Counter[str] = Counter()
    for param in replica.parameters:
        if param.grad is not None:
            sizes[owners.get(param, "")] += param.grad.nbytes
    return dict(sizes)


def cut_of(subject: Subject, num_samples: int) -> list[int]:
    """Return the sizes of the ghost batches of a trace: at most a few, since tracing each takes
    time."""
    size = subject.identity.ghost_batch
    if not size:
        return []
    cut = ghosts(num_samples, size)
    if len(cut) <= _MOST_GHOSTS:
        return cut
    return ghosts(num_samples, -(-num_samples // _MOST_GHOSTS))


def fake_device(device: Device) -> torch.device:
    """Return the device of the fake tensors: the real device if it is present. Fake CUDA tensors do
    not support a backward pass on a machine without CUDA, so there the trace uses CPU tensors with
    CUDA semantics; see `cuda`."""
    return torch.device("cpu" if is_overlaid(device) else device.torch_name)


def kernels_on(device: Device) -> Kernels:
    """Return the model of the memory that kernels of `device` take."""
    return Kernels() if device.kind == "cpu" else CudaKernels(resident_threads(device))


def growth(timeline: Timeline, start: int) -> int:
    """Return the maximum bytes alive at once after `start`, beyond those alive at `start`."""
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

"""Stage: a model and its optimizer on fake tensors, with one update behind them, where steps begin.

To build a model and to trace updates takes longer than to trace a pass, and is the same for every
micro-batch and every way to recompute. So it is done once, and a trace is put together of three parts:

    head     the model is built, a first update makes the optimizer's state     once
    passes   micro-batches of one size under one way to recompute               each time
    tail     the update of the step                                             once

What is put together is what would be traced from the beginning, operation by operation and block by
block, as long as passes leave nothing behind but gradients, and the same ones: of the same parameters,
in the same layouts. That is looked at after all of them. Where it does not hold (a module keeps a table
that its first pass made, say), steps are traced from the beginning, each on a stage of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from anybatch.compute.ghost_norm import counting_buffers, written_since
from anybatch.compute.joint import Ask, Comparison, rows_like
from anybatch.compute.lm_loss import few_chunks
from anybatch.compute.low_bit_optimizers import is_compiled, parts_of, uncompiled
from anybatch.compute.modes import evaluating
from anybatch.estimate.cuda import laid_over
from anybatch.estimate.fake_modules import without_fused_layers
from anybatch.estimate.fake_op_cache import fake_mode
from anybatch.estimate.family import Traced
from anybatch.estimate.layout import layout_on
from anybatch.estimate.splice import Left, Tail, growth, moved, since
from anybatch.estimate.stage_setup import (
    bucketed_bytes,
    cut_of,
    fake_device,
    kernels_on,
    parts_of_model,
    set_up,
)
from anybatch.estimate.subject import Subject
from anybatch.estimate.trace import COPIED, Block, Timeline, Tracer, recording
from anybatch.estimate.updates import scratch_bytes
from anybatch.machine import Device
from anybatch.plans import Choice, Recompute


def trace_step(subject: Subject, choice: Choice, device: Device) -> Traced:
    """Trace an update that makes the optimizer's state, and then a step of at most two micro-batches.

    Raises whatever the model or loss raises on fake tensors.
    """
    return subject.following(device, lambda on: _on_stage(Stage.step, subject, choice, on))


def trace_evaluation(subject: Subject, choice: Choice, device: Device) -> Traced:
    """Trace an update that makes the optimizer's state, and then two batches of evaluation. Raises as
    `trace_step` does."""
    return subject.following(device, lambda on: _on_stage(Stage.evaluation, subject, choice, on))


def num_traced(subject: Subject, choice: Choice) -> int:
    """Micro-batches that show all there is to see: the second one adds to gradients."""
    alike = (
        subject.identity.longest is None
    )  # else another global batch may take more than the mean
    return 1 if alike and choice.micro_batch >= subject.whole else 2


def _on_stage(
    trace: Callable[[Stage, Choice], Traced | None],
    subject: Subject,
    choice: Choice,
    device: Device,
) -> Traced:
    key = device, choice.precision, choice.update, choice.optimizer_states
    known = subject.stages.get(key)
    if known is not None and known.reusable:
        try:
            traced = trace(known, choice)
        except Exception:
            # It is spoilt, but what raised may not raise under other choices.
            del subject.stages[key]
            raise
        if traced is not None:
            return traced
    stage = Stage(subject, choice, device)
    traced = trace(stage, choice)
    assert traced is not None  # what is traced first on a stage is traced from the beginning
    if known is None:  # one that cannot be used again stays, so that no other takes its place
        subject.stages[key] = stage
    return traced


class Stage:
    """See the module. A stage serves any way to recompute and any sizes of batches.

    Attributes:
        reusable: whether what was traced so far has left it as it was.

    Raises whatever the model or its optimizer raises on fake tensors.
    """

    def __init__(self, subject: Subject, choice: Choice, device: Device) -> None:
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
            found = set_up(subject, plain, device, tracer, layout)
            self._replica, self._owners, self._copies = found
            self._bucketed = bucketed_bytes(self._replica, self._owners) if subject.flat else {}
            self._make_gradients()
            begun = tracer.timeline.num_moments
            self._update()
        head = tracer.timeline
        self._first_commit = growth(head, begun)
        self._parts = parts_of_model(self._replica.model, self._owners)
        self._live = head.blocks
        self._head = Timeline(
            [moved(block, 0) for block in head.blocks],
            head.scratch,
            head.operations,
            head.num_moments,
        )
        self._settled = [block for block in head.blocks if block.died is None]
        self._first: int | None = None
        self._second: int | None = None
        self._tail: Tail | None = None
        self._is_fresh = True

    @property
    def model(self) -> nn.Module:
        """On fake tensors, in the precision of the plan."""
        return self._replica.model

    def step(self, choice: Choice) -> Traced | None:
        """A step of at most two micro-batches and its update; None if what was traced before says
        nothing of it."""
        count = num_traced(self._subject, choice)
        passes = self._begin()
        with self._open():
            self._replica.switch(choice)
            before = counting_buffers(self.model)
            self._run(choice, count)
            if not choice.recompute.blocks:
                self._subject.written.update(dict.fromkeys(written_since(self.model, before)))
            self._replica.switch(self._plain)
            left = self._left_by(passes)
            if self._tail is None:
                return self._with_update(passes, left, count)
            self._replica.drop()
        tail = self._tail
        if left is None or any(block.died is None for block in passes.blocks):
            return None
        self.reusable = True
        if left.signature != tail.signature:
            return None
        return self._traced(self._joined(passes, left, tail), tail.commit_bytes, count)

    def evaluation(self, choice: Choice) -> Traced | None:
        """Two batches of evaluation; None as for `step`."""
        size = choice.evaluation_batch
        model = self._replica.model
        is_fresh = self._is_fresh
        passes = self._begin()
        with self._open():
            self._replica.switch(choice.model_copy(update={"recompute": Recompute()}))
            with evaluating(model), without_fused_layers():
                if self._replica.is_joint:
                    self._evaluate_together(size)
                else:
                    for batch in self._batches(size, 2):
                        self._replica.evaluate(self._subject.loss, batch, size)
                        del batch
            self._replica.switch(self._plain)
        left = self._left_by(passes)
        self.reusable = left is not None and not any(left.signature)
        if not self.reusable and not is_fresh:
            return None
        head = [moved(block, 0) for block in self._live] if is_fresh else self._head.blocks
        return self._traced(self._after_head(head, passes), 0, count=2)

    # ------------------------------------------------------------------------------ what is traced

    @contextmanager
    def _open(self) -> Iterator[None]:
        with recording(self._tracer, self._fake), laid_over(self._device), few_chunks():
            yield

    def _begin(self) -> Timeline:
        """A timeline that goes on where the head ends. Until all went well the stage is spoilt."""
        self.reusable = self._is_fresh = False
        self._first = self._second = None
        timeline = Timeline(num_moments=self._head.num_moments)
        self._tracer.begin_anew(timeline, self._settled)
        return timeline

    def _run(self, choice: Choice, count: int) -> None:
        size, cut = choice.micro_batch, cut_of(self._subject, choice.micro_batch)
        ask = self._ask(size, cut) if self._replica.is_joint else None
        for batch in self._batches(size, count):
            self._replica.accumulate(batch, size, cut, ask)
            for param in self._replica.parameters:
                if param.grad is not None:
                    self._tracer.see(param.grad, "gradients", self._owners.get(param, ""))
            if count > 1 and self._second is None:
                self._second = self._tracer.timeline.num_moments
            del batch

    def _ask(self, size: int, cut: Sequence[int]) -> Ask | None:
        """Whom passes over `size` samples have to ask, as in `engine.joint`."""
        if not self._subject.is_encoded_first(size):
            several = self._subject.compared > size
            return (lambda encoded: self._compared(encoded).share(0, size)) if several else None
        (batch,) = self._batches(size, 1)
        encoded = self._replica.encode(batch, size, cut)
        del batch
        share = self._compared(encoded).share(0, size)
        self._first = self._tracer.timeline.num_moments
        return lambda _: share

    def _compared(self, encoded: Any) -> Comparison:
        """A comparison of all samples, which are as some are `encoded`."""
        number = self._subject.compared
        return self._replica.compare(rows_like(encoded, number), number)

    def _evaluate_together(self, size: int) -> None:
        """Batches are encoded, and then compared; what they become waits on the host."""
        encoded = None
        for batch in self._batches(size, 2):
            encoded = self._replica.encode(batch, size)
            del batch
        valid = self._subject.num_valid
        number = min(self._subject.compared, valid or self._subject.compared)
        self._replica.compare_held_out(rows_like(encoded, number), number)

    def _batches(self, size: int, count: int) -> Iterator[Any]:
        """The batches, each of which comes before the one before it is gone, as in a run on CUDA
        (`data.prefetch`)."""
        batch = None
        for _ in range(count):
            if self._device.kind == "cpu":
                batch = None
            self._tracer.phase = COPIED
            batch = self._subject.batch(size, fake_device(self._device))
            self._tracer.phase = "compute"
            yield batch

    def _update(self) -> None:
        self._tracer.phase = "update"
        self._replica.finish(2.0, self._subject.clip_norm)
        optimizer = self._replica.optimizer
        if is_compiled(optimizer):
            with uncompiled(optimizer), self._tracer.as_kernel("update", scratch_bytes(optimizer)):
                self._replica.apply()
        else:
            self._replica.apply()
        for param, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    for part in parts_of(value).values():
                        self._tracer.see(part, "optimizer state", self._owners.get(param, ""))
        self._leave_out_states_on_host()

    def _leave_out_states_on_host(self) -> None:
        """Bytes are those of the device."""
        if self._replica.updater.states_on == "host" and self._device.kind == "cuda":
            for param, state in self._replica.optimizer.state.items():
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.shape == param.shape:
                        self._tracer.block_of(value).num_bytes = 0

    def _make_gradients(self) -> None:
        if self._subject.flat:
            return  # they are there from the start
        for param in self._replica.parameters:
            param.grad = torch.empty_like(param)
            self._tracer.see(param.grad, "gradients", self._owners.get(param, ""))

    # ------------------------------------------------------------------------------ putting together

    def _with_update(self, passes: Timeline, left: Left | None, count: int) -> Traced:
        """The first step of the stage: its update is traced, and becomes the tail of others if nothing
        speaks against it."""
        end, num_blocks = passes.num_moments, len(passes.blocks)
        self._tracer.settle(())
        self._update()
        commit = growth(passes, end)
        whole = self._after_head([moved(block, 0) for block in self._live], passes)
        if left is None:
            # What the loss keeps goes once the trace is over, and did not in it.
            whole.blocks = [moved(block, 0) for block in whole.blocks]
        traced = self._traced(whole, commit, count)
        own, later = passes.blocks[:num_blocks], passes.blocks[num_blocks:]
        if left is None or any(b.died is None for b in own):
            return traced
        self._tail = Tail(
            signature=left.signature,
            gradients_died=tuple(since(end, block.died) for block in left.blocks),
            head=tuple(
                replace(then, kind=live.kind, module=live.module)
                for then, live in zip(self._head.blocks, self._live, strict=True)
            ),
            head_died={
                place: since(end, live.died)
                for place, (then, live) in enumerate(
                    zip(self._head.blocks, self._live, strict=True)
                )
                if then.died is None and live.died is not None
            },
            timeline=Timeline(
                [moved(block, -end) for block in later],
                {at - end: size for at, size in passes.scratch.items() if at > end},
                passes.operations[end - self._head.num_moments :],
                passes.num_moments - end,
            ),
            commit_bytes=commit,
        )
        self._settled = [block for block in (*self._live, *later) if block.died is None]
        self.reusable = True
        return traced

    def _joined(self, passes: Timeline, left: Left, tail: Tail) -> Timeline:
        """Head, passes and tail in a row."""
        end, after = passes.num_moments, tail.timeline
        for block, died in zip(left.blocks, tail.gradients_died, strict=True):
            block.died = end + died
        head = list(tail.head)
        for place, died in tail.head_died.items():
            head[place] = moved(head[place], 0)
            head[place].died = end + died
        whole = self._after_head(head, passes)
        whole.blocks += [moved(block, end) for block in after.blocks]
        whole.scratch |= {at + end: size for at, size in after.scratch.items()}
        whole.operations += after.operations
        whole.num_moments += after.num_moments
        return whole

    def _after_head(self, head: Iterable[Block], passes: Timeline) -> Timeline:
        return Timeline(
            [*head, *passes.blocks],
            {**self._head.scratch, **passes.scratch},
            [*self._head.operations, *passes.operations],
            passes.num_moments,
            released=self._head.num_moments,
        )

    def _traced(self, timeline: Timeline, commit: int, count: int) -> Traced:
        return Traced(
            timeline=timeline,
            commit_bytes=(self._first_commit, commit),
            begin=self._head.num_moments + 1,
            end=timeline.num_moments,
            num_micro_batches=count,
            modules=self._parts,
            shapes=self._tracer.shapes,
            calls=self._tracer.calls,
            bucketed=self._bucketed,
            first=self._first,
            second=self._second,
        )

    def _gradients(self) -> list[torch.Tensor | None]:
        """Of all parameters, also of those that are trained by nobody."""
        every = dict.fromkeys([*self._replica.parameters, *self._replica.model.parameters()])
        return [param.grad for param in every]

    def _left_by(self, passes: Timeline) -> Left | None:
        """What is left of `passes`, or None if something else is, or something else is gone."""
        alive = {id(block): block for block in passes.blocks if block.died is None}
        found: dict[int, Block] = {}
        places: dict[int, int] = {}
        signature: list[Any] = []
        for gradient in self._gradients():
            if gradient is None:
                signature.append(None)
                continue
            block = self._tracer.block_of(gradient)
            key = id(block)
            if key in alive:  # by its place among them; any other is of the head, and stays
                found.setdefault(key, block)
                places.setdefault(key, len(places))
            layout = gradient.shape, gradient.stride(), gradient.storage_offset(), gradient.dtype
            signature.append((layout, block.num_bytes, key in alive, places.get(key, key)))
        if self._tracer.disturbed or found.keys() != alive.keys():
            return None
        return Left(tuple(signature), tuple(found.values()))

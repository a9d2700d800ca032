"""Subject: a task made ready to be traced, without data and weights of its own.

The model is built on fake tensors where the task builds it and they allow it, or copied onto them; a
batch of any size is made from the shape of a few real samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from anybatch.batch_rule import rule_text
from anybatch.compute import (
    DEFAULT_GHOST_BATCH,
    find_blocks,
    find_chains,
    find_mlps,
    find_recomputable,
)
from anybatch.compute.building import optimizer_for, unhooked
from anybatch.compute.ghost_norm import cut_norms, depends_on_cut
from anybatch.compute.kernel_choices import is_compiled
from anybatch.compute.modes import into_training
from anybatch.data import (
    largest_batch,
    lengths_of,
    map_leaves,
    num_samples_of,
    resized,
)
from anybatch.errors import AnybatchError
from anybatch.estimate.data_dependent_shapes import UNKNOWN
from anybatch.estimate.fake_modules import converting_fake_modules, without_addresses
from anybatch.estimate.fake_op_cache import CachedOps, FakeOpCache, fake_mode
from anybatch.estimate.family import Family
from anybatch.estimate.samples import Samples, padded_of, samples_of, template_of
from anybatch.estimate.sharding import Division, Sums
from anybatch.machine import Device
from anybatch.plans import TaskIdentity
from anybatch.side_effects import code_of, untouched
from anybatch.task import JointLoss, LossFunction, Task, parameters_in

T = TypeVar("T")


@dataclass(frozen=True)
class Subject:
    """What a trace needs of a task.

    Attributes:
        identity: by which plans recognise the task.
        build_model: makes the model on fake tensors, in the modes it is trained in; called inside a
            trace.
        make_optimizer: fake model to optimizer.
        loss: the task's loss.
        users: what else of the user's code runs in traces, besides the model's own state.
        template: a small batch as `collate` makes it.
        num_valid: samples to evaluate; 0: none; None: a stream.
        clip_norm: see `Task`.
        blocks, chains: names of what can be recomputed block by block, and as a tree.
        mlps: names of what may be an MLP inside of a block.
        flat: gradients are kept in buckets, for several ranks.
        sums: what is held of gradients beside the buckets of a reproducible run, or None.
        division: how the model is divided over ranks, or None.
        depends: sentences on what in the model depends on how a step is cut.
        long: the longest sample, and how lengths are spread, in words; empty: they are alike.
        samples: what they take beside their batches.
        compared: samples of all ranks, whose encodings a joint loss compares in a step; 0: the loss is
            a sum over samples.
        written: names of buffers, except those of BatchNorm, that traced passes wrote to.
        compiled: the user has compiled the model, or a part of it.
        uneven: samples that were looked at, of which the largest stand for all, where samples differ in
            size and no lengths are given; else 0.
        families: traces made so far, so that none is made twice.
        stages: what they were made on; see `stage`.
        heads: layers that make the logits, by precision and device; see `head`.
        convolutions: what the model has of them, once it is known; see `layout`.
        stood_for: CUDA devices that are here and whose traces are of CPU tensors all the same.
        op_cache: results of operations, for all of them.
    """

    identity: TaskIdentity
    build_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], Optimizer]
    loss: LossFunction
    template: Any
    num_valid: int | None
    clip_norm: float | None
    blocks: tuple[str, ...]
    chains: tuple[str, ...]
    mlps: tuple[str, ...] = ()
    flat: bool = False
    sums: Sums | None = None
    division: Division | None = None
    users: tuple[object, ...] = ()
    long: str = ""
    samples: Samples = field(default_factory=Samples)
    compared: int = 0
    compiled: bool = False
    uneven: int = 0
    depends: tuple[str, ...] = ()
    written: dict[str, None] = field(default_factory=dict, compare=False, repr=False)
    families: dict[Hashable, Family] = field(default_factory=dict, compare=False, repr=False)
    stages: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)
    heads: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)
    convolutions: list[Any] = field(default_factory=list, compare=False, repr=False)
    stood_for: set[Device] = field(default_factory=set, compare=False, repr=False)
    op_cache: FakeOpCache = field(default_factory=FakeOpCache, compare=False, repr=False)

    @property
    def whole(self) -> int:
        """Samples of a step: of a full one, or as many of the longest as have a mean one's size."""
        return min(self.identity.padded or self.identity.global_batch, self.identity.global_batch)

    @property
    def speaks(self) -> bool:
        """Whether it is one of several processes, which tell each other gradients or weights."""
        alone = self.sums is not None and self.sums.num_ranks == 1
        return self.division is not None or (self.flat and not alone)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What traces took for granted of numbers on which shapes depend, in sentences."""
        return self.op_cache.values.notices if self.op_cache.values is not None else ()

    def as_traced(self, device: Device) -> Device:
        """`device`, as if it were not here if it is one that the task's fake tensors cannot be on."""
        return replace(device, present=False) if device in self.stood_for else device

    def is_encoded_first(self, micro_batch: int) -> bool:
        """Whether a joint loss has a rank encode its samples before it computes with them: where they
        are more than one micro-batch, or ranks that meet inside passes would wait there."""
        return self.compared > 0 and (micro_batch < self.whole or self.division is not None)

    def following(self, device: Device, trace: Callable[[Device], T]) -> T:
        """What `trace` of a device returns, for `device` as it can be traced: what cannot be done
        with fake tensors of CUDA (torch lays the weights of recurrent layers together, by their
        addresses) is done with those of a CPU. Raises what `trace` raises."""
        device = self.as_traced(device)
        try:
            with without_addresses():
                return self.followed(lambda: trace(device))
        except RuntimeError:
            if device.kind == "cpu" or not device.present:
                raise
            self.stages.clear()
            found = self.followed(lambda: trace(replace(device, present=False)))
        self.stood_for.add(device)
        return found

    def followed(self, trace: Callable[[], T]) -> T:
        """What `trace` returns; where shapes depend on numbers that it does not know, it is made again,
        and they are followed from then on. Whatever the loss keeps between calls is as before."""
        try:
            with self._alone():
                return trace()
        except UNKNOWN:
            if self.op_cache.values is not None:
                raise
        self.op_cache.follow()
        self.stages.clear()
        with self._alone():
            return trace()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Around a trace: hooks on the steps of all optimizers are not called, and what the user's code
        keeps between calls is as before."""
        for_all: Any = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
        before = [dict(hooks) for hooks in for_all]
        with untouched(self.loss, *self.users):
            for hooks in for_all:
                hooks.clear()
            try:
                yield
            finally:
                for hooks, own in zip(for_all, before, strict=True):
                    hooks.update(own)

    def batch(self, num_samples: int, device: torch.device) -> Any:
        """A batch of so many samples on fake tensors; called inside a trace. Where samples differ in
        length, they are the longest."""

        def place(leaf: Any) -> Any:
            return leaf.to(device) if isinstance(leaf, Tensor) else leaf

        return map_leaves(resized(self.template, num_samples), place)


def subject_of(task: Task) -> Subject:
    """The subject of `task`. A task that builds its model is not made to build it for real, unless
    that cannot be done on fake tensors (it looks at the values of its weights, say).

    Raises `DataError` if the first samples cannot be read or collated, `InputError` if the model has
    nothing to train, and whatever the model function raises.
    """
    source = task.model
    op_cache = FakeOpCache()
    if isinstance(source, nn.Module):
        model = task.checked_model(source)
        build = partial(fake_copy, source)
    else:

        def on_fake_tensors() -> nn.Module:
            with converting_fake_modules() as real:
                made = task.checked_model(source())
                # A function that reads weights from a file returns real ones; those that it converted
                # are put back, perhaps in a module that others use.
                return _unknown(made) if _is_fake(made) and not real else fake_copy(made)

        build = on_fake_tensors
        fake = fake_mode()
        try:
            with fake, CachedOps(fake, op_cache):
                model = build()
        except AnybatchError:
            raise
        except Exception:
            model = _without_values(task.build_model())
            build = partial(fake_copy, model)
    identity = identify(task, model)
    if identity.grain is None and (padded := padded_of(task, identity.ghost_batch)) is not None:
        identity = identity.model_copy(update={"padded": padded})
    template, uneven = template_of(task)
    blocks = tuple(find_blocks(model) if task.grains else find_recomputable(model))
    return Subject(
        identity=identity,
        build_model=lambda: into_training(build()),
        make_optimizer=lambda model: unhooked(optimizer_for(task, model)),
        loss=task.loss,
        users=(task.optimizer, task.parameters, *code_of(model)),
        template=template,
        num_valid=_num_valid(task),
        clip_norm=task.clip_norm,
        blocks=blocks,
        chains=tuple(find_chains(model)),
        # Sums over tiles round otherwise, so a reproducible run has none.
        mlps=() if task.grains else tuple(find_mlps(model, blocks)),
        op_cache=op_cache,
        long=_told_lengths(task),
        samples=samples_of(task, template),
        compared=largest_batch(task) if isinstance(task.loss, JointLoss) else 0,
        compiled=is_compiled(model),
        uneven=uneven,
        depends=depends_on_cut(model),
    )


def identify(task: Task, model: nn.Module) -> TaskIdentity:
    """What a plan must agree with to be one for `task`.

    Raises `InputError` if the model has nothing to train, or the task's grains would cut ghost batches.
    """
    trainable = list(parameters_in(task.parameters_of(model)))
    lengths = lengths_of(task.lengths, task.train, "training")
    ghost = ghost_batch_of(task, model)
    largest = largest_batch(task)
    grain, part = task.grains.cut(largest, ghost) if task.grains else (None, None)
    return TaskIdentity(
        name=task.name,
        global_batch=largest,
        batch_rule=rule_text(task.global_batch),
        parameters=sum(p.numel() for p in model.parameters()),
        trainable_parameters=sum(p.numel() for p in trainable if p.requires_grad),
        ghost_batch=ghost,
        longest=None if lengths is None else int(lengths.max()),
        grain=grain,
        part=part,
        dtypes=dtypes_of(model),
    )


def dtypes_of(model: nn.Module) -> tuple[str, ...]:
    """The dtypes of the floating parameters of `model`, as torch names them, each once."""
    found = {
        str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()
    }
    return tuple(sorted(found))


def ghost_batch_of(task: Task, model: nn.Module) -> int | None:
    """Samples per ghost batch of BatchNorm, or None for a model without BatchNorm that is trained."""
    if not cut_norms(model):
        return None
    return task.ghost_batch or DEFAULT_GHOST_BATCH


def fake_copy(model: nn.Module) -> nn.Module:
    """A copy of `model` whose parameters and buffers are fake, on the default device; called inside a
    trace (elsewhere they are empty).

    Nothing is allocated: the copy is given empty tensors where it would copy real ones.

    Raises `TypeError` for what torch.jit has compiled, whose copies have parameters of their own.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"{name or 'the model'!r} is compiled by torch.jit")
    memo: dict[int, Any] = {}
    tensors: Iterable[Tensor] = (*model.parameters(), *model.buffers())
    for tensor in tensors:
        if id(tensor) not in memo:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            memo[id(tensor)] = (
                nn.Parameter(empty, requires_grad=tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else empty
            )
    return copy.deepcopy(model, memo)


def _without_values(model: nn.Module) -> nn.Module:
    """`model` on the meta device, where it takes no memory, to be copied onto fake tensors."""
    with torch.device("meta"):
        return fake_copy(model)


def _num_valid(task: Task) -> int | None:
    return 0 if task.valid is None else num_samples_of(task.valid)


def _unknown(model: nn.Module) -> nn.Module:
    """`model`, on fake tensors, without the values that these remember of parameters that were made of
    numbers (`torch.tensor(2.0)`): training changes them, and they keep the dtype that they came in."""
    for param in model.parameters():
        if isinstance(param, FakeTensor):
            param.constant = None
    return model


def _is_fake(model: nn.Module) -> bool:
    return all(isinstance(p, FakeTensor) for p in (*model.parameters(), *model.buffers()))


def _told_lengths(task: Task) -> str:
    lengths = lengths_of(task.lengths, task.train, "training")
    if lengths is None:
        return ""
    longest = int(lengths.argmax())
    return (
        f"the longest training sample, number {longest}, has length {int(lengths[longest]):,} (the"
        f" median is {int(lengths.median()):,})"
    )

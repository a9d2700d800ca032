"""Subject: a task prepared for tracing, without its data and weights.

The model is built on fake tensors if the task builds it and this is possible; otherwise it is
copied onto fake tensors. A batch of any size is created from the shapes of a few real samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from anybatch.batch_rule import rule_text
from anybatch.compute import (
    DEFAULT_GHOST_BATCH,
    find_blocks,
    find_chains,
    find_mlps,
    find_recomputable,
    multi_optimizer,
)
from anybatch.compute.building import optimizer_for, unhooked
from anybatch.compute.dtensor import is_dtensor
from anybatch.compute.ghost_norm import cut_norms, depends_on_cut
from anybatch.compute.kernel_choices import is_compiled
from anybatch.compute.low_bit_optimizers import parts_of
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
from anybatch.estimate.fake_modules import converting_fake_modules, is_faking, without_addresses
from anybatch.estimate.fake_op_cache import CachedOps, FakeOpCache, fake_mode
from anybatch.estimate.family import Family
from anybatch.estimate.repeats import Runs
from anybatch.estimate.samples import Samples, padded_of, samples_of, template_of
from anybatch.estimate.sharding import Division, Sums
from anybatch.machine import Device
from anybatch.plans import TaskIdentity
from anybatch.side_effects import untouched, used_by
from anybatch.task import JointLoss, LossFunction, Task, parameters_in

T = TypeVar("T")


@dataclass(frozen=True)
class Subject:
    """Everything that a trace needs of a task.

    Attributes:
        identity: identity by which plans recognize the task.
        build_model: builds the model on fake tensors, in the modes in which it is trained; called
            inside a trace.
        make_optimizer: creates the optimizer of a fake model.
        loss: the task's loss.
        users: other user code that runs in traces, besides the model's own state.
        optimizer: class and options of the optimizer, without learning rates; empty if unknown.
        template: a small batch as `collate` returns it.
        num_valid: number of samples to evaluate; 0: none; None: a stream.
        clip_norm: see `Task`.
        blocks, chains: names of modules that can be recomputed block by block, and as a tree.
        mlps: names of modules that may be an MLP inside a block.
        flat: whether gradients are kept in buckets, for several ranks.
        sums: gradient sums held in addition to the buckets in a reproducible run, or None.
        division: division of the model over ranks, or None.
        depends: sentences on parts of the model that depend on how a step is cut.
        long: the longest sample, and the distribution of lengths, in words; empty: samples are
            alike.
        samples: memory of the samples in addition to their batches.
        compared: number of samples of all ranks whose encodings a joint loss compares in a step; 0:
            the loss is a sum over samples.
        written: names of buffers, except those of BatchNorm, that traced passes wrote to.
        compiled: whether the user has compiled the model, or a part of it.
        uneven: number of samples that were inspected, of which the largest represent all, if
            samples differ in size and no lengths are given; otherwise 0.
        families: traces made so far, so that none is repeated.
        stages: stages of these traces; see `stage`.
        heads: layers that compute the logits, by precision and device; see `head`.
        inspected: the model of `inspect`, once it is built.
        convolutions: convolutions of the model, once they are known; see `layout`.
        runs: runs of blocks of which a trace needs a few; see `repeats`.
        stood_for: torch names of CUDA devices that are present, but whose traces use CPU tensors.
        op_cache: results of operations, shared by all traces.
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
    optimizer: tuple[object, ...] = ()
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
    inspected: list[nn.Module] = field(default_factory=list, compare=False, repr=False)
    convolutions: list[Any] = field(default_factory=list, compare=False, repr=False)
    runs: Runs = field(default_factory=Runs, compare=False, repr=False)
    stood_for: set[str] = field(default_factory=set, compare=False, repr=False)
    op_cache: FakeOpCache = field(default_factory=FakeOpCache, compare=False, repr=False)

    @property
    def whole(self) -> int:
        """Number of samples in a full step, or number of samples of maximum length that have the
        size of a mean step."""
        return min(self.identity.padded or self.identity.global_batch, self.identity.global_batch)

    @property
    def speaks(self) -> bool:
        """Whether several processes run the task, and exchange gradients or weights."""
        alone = self.sums is not None and self.sums.num_ranks == 1
        return self.division is not None or (self.flat and not alone)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Assumptions of the traces on values that shapes depend on, in sentences."""
        return self.op_cache.values.notices if self.op_cache.values is not None else ()

    def as_traced(self, device: Device) -> Device:
        """Return `device`, marked as not present if the task's fake tensors cannot be on it."""
        return replace(device, present=False) if device.torch_name in self.stood_for else device

    def inspect(self) -> nn.Module:
        """Return the model on fake tensors, to read from it what it consists of. Raises whatever
        `build_model` raises."""
        if not self.inspected:
            with fake_mode():
                self.inspected.append(self.build_model())
        return self.inspected[0]

    def is_encoded_first(self, micro_batch: int) -> bool:
        """Return whether a rank encodes its samples for a joint loss before it computes with them.
        This is so if they are more than one micro-batch, or if ranks synchronize inside passes and
        would block there."""
        return self.compared > 0 and (micro_batch < self.whole or self.division is not None)

    def following(self, device: Device, trace: Callable[[Device], T]) -> T:
        """Return the result of `trace` for `device`. If that fails with fake CUDA tensors, CPU
        tensors are used instead: PyTorch flattens the weights of recurrent layers by their
        addresses, for example. Raises whatever `trace` raises."""
        device = self.as_traced(device)
        try:
            with without_addresses():
                return self.followed(lambda: trace(device))
        except RuntimeError:
            if device.kind == "cpu" or not device.present:
                raise
            self.stages.clear()
            found = self.followed(lambda: trace(replace(device, present=False)))
        self.stood_for.add(device.torch_name)
        return found

    def followed(self, trace: Callable[[], T]) -> T:
        """Return the result of `trace`. If shapes depend on unknown values, the trace is repeated,
        and values are tracked from then on. State that the loss keeps between calls is restored."""
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
        """Context manager for a trace: global hooks on optimizer steps are not called, and state
        that the user's code keeps between calls is restored."""
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
        """Return a batch of `num_samples` samples on fake tensors; called inside a trace. If
        samples differ in length, they have the maximum length."""

        def place(leaf: Any) -> Any:
            return leaf.to(device) if isinstance(leaf, Tensor) else leaf

        return map_leaves(resized(self.template, num_samples), place)


def subject_of(task: Task) -> Subject:
    """Return the subject of `task`. If the task builds its model, it is not built for real unless
    it cannot be built on fake tensors (because it reads the values of its weights, for example).

    Raises `DataError` if the first samples cannot be read or collated, `InputError` if the model
    has nothing to train, and whatever the model function raises.
    """
    source = task.model
    op_cache = FakeOpCache()
    inspected: list[nn.Module] = []
    if isinstance(source, nn.Module):
        model = task.checked_model(source)
        build = partial(fake_copy, source)
    else:

        def on_fake_tensors() -> nn.Module:
            with converting_fake_modules() as real:
                made = task.checked_model(source())
                # A function that reads weights from a file returns real tensors. Those that it
                # converted are put back, possibly in a module that other code uses.
                return _unknown(made) if _is_fake(made) and not real else fake_copy(made)

        build = on_fake_tensors
        fake = fake_mode()
        try:
            with fake, CachedOps(fake, op_cache):
                model = build()
            inspected.append(into_training(model))
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
        users=(task.optimizer, task.parameters, *used_by(model)),
        optimizer=_optimizer_options(task, model),
        template=template,
        num_valid=_num_valid(task),
        clip_norm=task.clip_norm,
        blocks=blocks,
        chains=tuple(find_chains(model)),
        # Sums over tiles round differently, so a reproducible run has no tiles.
        mlps=() if task.grains else tuple(find_mlps(model, blocks)),
        inspected=inspected,
        op_cache=op_cache,
        long=_describe_lengths(task),
        samples=samples_of(task, template),
        compared=largest_batch(task) if isinstance(task.loss, JointLoss) else 0,
        compiled=is_compiled(model),
        uneven=uneven,
        depends=depends_on_cut(model),
    )


def identify(task: Task, model: nn.Module) -> TaskIdentity:
    """Return the identity that a plan for `task` must match.

    Raises `InputError` if the model has nothing to train, or the task's grains would cut ghost
    batches.
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


def _optimizer_options(task: Task, model: nn.Module) -> tuple[object, ...]:
    """See `Subject.optimizer`. `model`: on fake tensors."""
    with suppress(Exception), untouched(task.optimizer, task.parameters):
        return optimizer_options(unhooked(optimizer_for(task, model)))
    return ()


def optimizer_options(optimizer: Optimizer) -> tuple[object, ...]:
    """Return the class of `optimizer` (of each, if several are combined), its defaults, and the options
    of its groups: what its memory depends on, also while a plan has changed how it updates. Learning
    rates are left out: schedules change them."""

    def lasting(options: Mapping[str, Any], *others: str) -> dict[str, Any]:
        return {k: v for k, v in options.items() if "lr" not in k and k not in others}

    return tuple(
        (
            type(part).__qualname__,
            lasting(part.defaults),
            [lasting(group, "params", "fused", "foreach") for group in part.param_groups],
        )
        for part in multi_optimizer.parts_of(optimizer)
    )


def dtypes_of(model: nn.Module) -> tuple[str, ...]:
    """Return the distinct dtypes of the floating-point parameters of `model`, by their PyTorch
    names."""
    found = {
        str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()
    }
    return tuple(sorted(found))


def ghost_batch_of(task: Task, model: nn.Module) -> int | None:
    """Return the samples per ghost batch of BatchNorm, or None for a model without BatchNorm that
    is trained."""
    if not cut_norms(model):
        return None
    return task.ghost_batch or DEFAULT_GHOST_BATCH


def fake_copy(model: nn.Module) -> nn.Module:
    """Return a copy of `model` whose parameters and buffers are fake, on the default device. Called
    inside a trace; outside of one, they are empty.

    Nothing is allocated: the copy receives empty tensors instead of copies of real ones.

    Raises `TypeError` for modules compiled by torch.jit, whose copies have their own parameters.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"{name or 'the model'!r} is compiled by torch.jit")
    memo: dict[int, Any] = {}
    tensors: Iterable[Tensor] = (*model.parameters(), *model.buffers())
    for tensor in tensors:
        if id(tensor) not in memo:
            empty = _empty_like(tensor)
            memo[id(tensor)] = (
                nn.Parameter(empty, requires_grad=tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else empty
            )
    with _CopyingAttributes():
        copied = copy.deepcopy(model, memo)
        for param in model.parameters():
            # Quantized weights of bitsandbytes have their scales there.
            if not isinstance(param, FakeTensor) and vars(param):
                vars(memo[id(param)]).update(copy.deepcopy(vars(param), memo))
        return copied


def _empty_like(tensor: Tensor) -> Tensor:
    """An empty tensor like `tensor` on the default device. A tensor that consists of several ones, such
    as a quantized weight of torchao, is rebuilt from an empty one for each."""
    if is_dtensor(tensor) or not is_traceable_wrapper_subclass(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return transform_subclass(tensor, lambda _, part: _empty_like(part))


class _CopyingAttributes(TorchFunctionMode):
    """Mode that does not copy the plain tensors among the attributes of modules and parameters, such as
    the scales of a quantized weight. In a trace, those with many values become fake; others keep their
    values, from which a model may compute sizes and indices."""

    _MANY = 1024

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = self._copied(tensor)
        return memo[id(tensor)]

    def _copied(self, tensor: Tensor) -> Tensor:
        if tensor.numel() < self._MANY or type(tensor) is not Tensor or not is_faking():
            return tensor
        # Tensors on a GPU are on that of the model.
        device = tensor.device if tensor.device.type == "cpu" else None
        size, stride = tensor.shape, tensor.stride()
        return torch.empty_strided(size, stride, dtype=tensor.dtype, device=device)


def _without_values(model: nn.Module) -> nn.Module:
    """Return `model` on the meta device, where it takes no memory, to be copied onto fake tensors."""
    with torch.device("meta"):
        return fake_copy(model)


def _num_valid(task: Task) -> int | None:
    return 0 if task.valid is None else num_samples_of(task.valid)


def _unknown(model: nn.Module) -> nn.Module:
    """Return `model`, on fake tensors, without the values that these keep for parameters created
    from numbers (`torch.tensor(2.0)`): training changes the values. The parameters keep their
    dtype."""
    for param in model.parameters():
        if isinstance(param, FakeTensor):
            param.constant = None
    return model


def _is_fake(model: nn.Module) -> bool:
    tensors = (
        part for t in (*model.parameters(), *model.buffers()) for part in parts_of(t).values()
    )
    return all(isinstance(tensor, FakeTensor) for tensor in tensors)


def _describe_lengths(task: Task) -> str:
    lengths = lengths_of(task.lengths, task.train, "training")
    if lengths is None:
        return ""
    longest = int(lengths.argmax())
    return (
        f"the longest training sample, number {longest}, has length {int(lengths[longest]):,} (the"
        f" median is {int(lengths.median()):,})"
    )

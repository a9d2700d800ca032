"""Task and Loss: what to train. A task defines the mathematics and is independent of the hardware.

Two runs of one task under different plans compute the same update. Everything that changes the
mathematics is therefore in the task (the global batch, the ghost batch of BatchNorm, clipping, the
schedule), and everything that does not is in the plan (micro-batch, precision of compute, recompute,
devices: see `plans`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from numbers import Integral
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from anybatch.batch_rule import BatchRule, Ramp, Tokens, as_text, tokens_of
from anybatch.errors import InputError, kind_of, listed
from anybatch.metrics import Metrics

Sum: TypeAlias = "tuple[Tensor | float, Tensor | float]"
"""A sum and its weight. Added up over any number of pieces, their quotient is the exact mean."""

Parameters: TypeAlias = "list[Any]"
"""Parameters, or parameter groups as optimizers take them: `[{"params": [...], "lr": ...}, ...]`."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Return value of a loss function for one batch: a sum and its weight.

    The update divides the summed gradient by the total weight of the global batch, so the result does
    not depend on how the batch is cut into micro-batches. Return the *sum* of the per-sample (or
    per-token) losses, and their number:

        F.cross_entropy(logits, targets, reduction="sum", ignore_index=-100),  (targets != -100).sum()

    Attributes:
        sum: scalar floating-point tensor (shape `()`), attached to the graph.
        weight: number, or scalar tensor on any device (a tensor is not read before the end of the
            step). Zero is allowed, for a micro-batch without counted elements; a negative weight is
            not.
        metrics: additional sums to report, by name: a number or scalar tensor (weighted by `weight`),
            or a pair (sum, weight) with a separate weight.
        outputs: additional values for a `Step` to return: tensors or lists with one entry per sample,
            in any nesting. `Outcome.outputs` has those of the whole batch, on the CPU.
    """

    sum: Tensor
    weight: Tensor | float
    metrics: Mapping[str, Tensor | float | Sum] = field(default_factory=dict)
    outputs: Any = None


@dataclass(frozen=True, slots=True)
class JointLoss:
    """A loss that compares all samples of the global batch with each other, such as a contrastive loss.

    Such a loss is not a sum over micro-batches. But it depends on the samples only through the output
    of `encode`, so the step can still be cut, exactly, on any number of ranks:

        JointLoss(
            encode=lambda model, batch: (model.image(batch[0]), model.text(batch[1])),
            compare=lambda model, pairs: clip_loss(*pairs, model.scale.exp()),
        )

    `encode` must process each sample independently of the other samples (BatchNorm is supported, with
    ghost batches). If called like a loss function, a `JointLoss` uses its batch as the global batch.

    Attributes:
        encode: function from `(model, batch)` to a tensor, or any nesting of tensors, with the samples
            of the batch in dim 0. Other inputs of `compare` (such as labels) are passed on here.
        compare: function from `(model, encoded)` to a `Loss`, or a plain mean, over all samples: those
            of all ranks, in the order of the global batch. Parameters that it uses itself are also
            trained. Every rank calls it, so it must not use random numbers.

    Raises `InputError` if `encode` or `compare` is not a function.
    """

    encode: Callable[[nn.Module, Any], Any]
    compare: Callable[[nn.Module, Any], Loss | Tensor | tuple[Tensor, Tensor | float]]

    def __post_init__(self) -> None:
        for name, given in (("encode", "a batch"), ("compare", "what encode made of all samples")):
            if not callable(value := getattr(self, name)):
                raise InputError(
                    f"{name} of a JointLoss is {kind_of(value)}: give a function of the model and"
                    f" {given}."
                )

    def __call__(
        self, model: nn.Module, batch: Any
    ) -> Loss | Tensor | tuple[Tensor, Tensor | float]:
        """The loss of `batch`, used as the whole global batch."""
        return self.compare(model, self.encode(model, batch))


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of training when the learning rate of a step is computed.

    `step`, `samples` and `tokens` count what is already committed (so 0 in step 1), over all ranks.
    `total_steps` and `total_samples` are None for a stream of unknown length; `tokens` and
    `total_tokens` are None if the global batch is not in `Tokens`.
    """

    step: int
    samples: int
    epoch: int
    total_steps: int | None
    total_samples: int | None
    tokens: int | None = None
    total_tokens: int | None = None

    @property
    def fraction(self) -> float:
        """The fraction of training that is done, 0 to 1, in tokens if the global batch is in tokens.
        Raises `InputError` if the length of training is unknown."""
        if self.tokens is not None and self.total_tokens is not None:
            return min(1.0, self.tokens / max(1, self.total_tokens))
        if self.total_samples is None:
            raise InputError(
                "the schedule asks for the fraction of training done, but the length of the training"
                " data is unknown: give the task steps=... or samples=... instead of epochs=..."
            )
        return min(1.0, self.samples / max(1, self.total_samples))


@dataclass(frozen=True, slots=True)
class Grains:
    """How the steps of a reproducible run are cut and summed, independent of the plan.

    A global batch is cut into grains, which are forward passes of one size; consecutive grains form
    parts. Gradients are summed grain by grain within a part, and over the parts in a fixed binary tree.
    A rank takes whole parts.

    Attributes:
        samples: samples per grain. None: a part's share of the global batch, at most 32; a multiple of
            the ghost batch if the model has BatchNorm.
        parts: maximum number of parts in a full global batch; at most this many ranks have work. The
            memory for sums on a rank grows with the logarithm of its number of parts.
    """

    samples: int | None = None
    parts: int = 8

    def cut(self, global_batch: int, ghost_batch: int | None) -> tuple[int, int]:
        """Number of samples in a grain, and in a part.

        Raises `InputError` if grains of this size would cut ghost batches.
        """
        unit = min(ghost_batch or 1, global_batch)
        if self.samples is None:
            wanted = min(_LARGEST_GRAIN, -(-global_batch // self.parts))
            size = -(-wanted // unit) * unit
        else:
            size = self.samples
            if size % unit and size < global_batch:
                raise InputError(
                    f"grains of {size} samples would cut ghost batches of BatchNorm ({unit} samples):"
                    f" make them a multiple of {unit}."
                )
        size = min(size, global_batch)
        num_grains = -(-global_batch // size)
        return size, -(-num_grains // self.parts) * size


_LARGEST_GRAIN = 32


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a task was loaded from, so that it can be loaded again.

    Attributes:
        name: a recipe's name, or `FILE.py:function` with the full path.
        settings: arguments of the function, as text; paths are absolute.
        sha256: checksum of the file, in hexadecimal; empty for a recipe.
    """

    name: str
    settings: Mapping[str, str]
    sha256: str = ""


LossFunction: TypeAlias = (
    "Callable[[nn.Module, Any], Loss | Tensor | tuple[Tensor, Tensor | float]]"
)
MetricFunction: TypeAlias = "Callable[[nn.Module, Any], Mapping[str, Sum]]"
MetricsOfTask: TypeAlias = "MetricFunction | Metrics | Sequence[MetricFunction | Metrics]"
Schedule: TypeAlias = "Callable[[Progress], float]"


_MOST_WORKERS = 1024

_WHOLE_NUMBERS = (
    "global_batch",
    "epochs",
    "steps",
    "samples",
    "ghost_batch",
    "num_workers",
    "evaluate_every",
    "seed",
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Defines what to train. Raises one `InputError` that names all invalid fields.

    Attributes:
        model: a module, or preferably a function that builds one: it can then be traced without
            allocating its weights, and built directly on its device.
        loss: `(model, batch) -> Loss`. A scalar tensor is treated as the plain mean over the samples of
            the batch and is weighted by their number; `(sum, weight)` is equivalent to a `Loss`. A loss
            that compares samples with each other is a `JointLoss`.
        optimizer: function from parameters (or parameter groups, as returned by `parameters`) to an
            optimizer, or to a list of optimizers with separate parameters (Muon for the matrices, AdamW
            for the rest).
        train: map-style data set (with `__len__` and `__getitem__`, and optionally `__getitems__`), or
            an iterable one.
        valid: held-out data set, evaluated at the end of each epoch (or every `evaluate_every` steps),
            or None. A stream without a length that yields more than 100,000 samples, and more than the
            whole training, is considered endless, which is an error.
        global_batch: samples per optimizer step, over all micro-batches and ranks; or `Tokens`; or a
            `Ramp`, whose size changes during training.
        epochs, steps, samples: length of training; exactly one of them.
        schedule: factor for the learning rate as a function of `Progress` (samples or steps), so that
            it does not depend on the number of ranks.
        scheduler: instead of `schedule`: function from the optimizer to a torch `LRScheduler`, which is
            stepped according to `scheduler_interval`. A `ReduceLROnPlateau` is stepped after each
            evaluation (see `valid`), with its loss.
        scheduler_interval: `"epoch"` or `"step"`: whether the scheduler is stepped at the end of each
            epoch or after each global step. Required for any scheduler except `ReduceLROnPlateau`.
        parameters: function from the module to parameter groups, for optimizer options that differ
            between groups; default: all parameters that require a gradient.
        clip_norm: maximum 2-norm of the mean gradient of the global batch, or None.
        collate: function from a list of samples to a batch; default: torch's `default_collate`.
        lengths: for samples that differ in length (such as sequences that `collate` pads): the length
            of each training sample, by index, or a function from a data set (train or valid) to the
            lengths. Micro-batches are then cut by padded size, ranks take parts of equal total length,
            and the samples of a global batch are sorted by length, longest first (not if the model has
            BatchNorm; if gradient noise is measured, one in 16 is left unsorted). The set of samples in
            a global batch stays the same. Only for map-style data.
        metrics: computed in evaluation: a function `(model, batch) -> {name: (sum, weight)}` for means,
            a `Metrics` for values that are not means, or a list of these.
        last: what to do with the samples at the end of an epoch that do not fill a global batch:
            `"keep"` them as a smaller batch (weighted exactly), `"drop"` them, or `"wrap"` the batch
            into the next epoch.
        shuffle: use a new order in each epoch, which depends only on (seed, epoch, number of samples).
        ghost_batch: number of samples over which BatchNorm computes its statistics in training. It is
            part of the task since it changes the result. None: 32 if the model has BatchNorm that is
            trained. If part of a model is given in evaluation mode, and the model itself is not, the
            part stays in evaluation mode and its BatchNorm uses its running statistics.
        num_workers: number of processes that load samples; 0 loads in the training process. Their
            memory does not count toward a CPU budget.
        bad_data: what to do about samples that cannot be loaded, or whose loss or gradient is not
            finite: `"stop"` and name them, or `"skip"`: leave them out, report them, and weight the
            others exactly. With `"skip"`, a step that is not finite although each of its samples is, is
            left out as a whole. Learning rates depend on all samples, including those left out.
        evaluate_every: steps between evaluations; None: at the end of each epoch.
        reproducible: produce the same bits on any number of ranks, under any plan, and after a restart.
            Steps are then always cut in the same way, which a `Grains` value specifies. Only for models
            that are not sharded, with one thread per rank on a CPU.
        tell: function from the trained module (in evaluation mode) to a text, such as a sample of its
            output. Called at the end, on rank 0; the text is emitted as an event.
        seed: seed for the order of samples, initialization and dropout.
        name: name in reports.
        origin: what the task was loaded from, if it was loaded by name; recorded with the run.
    """

    model: nn.Module | Callable[[], nn.Module]
    loss: LossFunction
    optimizer: Callable[[Any], Optimizer | Sequence[Optimizer]]
    train: Any
    valid: Any = None
    global_batch: BatchRule
    epochs: int | None = None
    steps: int | None = None
    samples: int | None = None
    schedule: Schedule | None = None
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    scheduler_interval: Literal["epoch", "step"] | None = None
    parameters: Callable[[nn.Module], Parameters] | None = None
    clip_norm: float | None = None
    collate: Callable[[list[Any]], Any] | None = None
    lengths: Sequence[int] | Callable[[Any], Sequence[int]] | None = None
    metrics: MetricsOfTask | None = None
    last: Literal["keep", "drop", "wrap"] = "keep"
    shuffle: bool = True
    ghost_batch: int | None = None
    num_workers: int = 0
    bad_data: Literal["stop", "skip"] = "stop"
    evaluate_every: int | None = None
    reproducible: bool | Grains = False
    tell: Callable[[nn.Module], str] | None = None
    seed: int = 0
    name: str = "task"
    origin: Origin | None = None

    def __post_init__(self) -> None:
        for name in _WHOLE_NUMBERS:
            value = getattr(self, name)
            if isinstance(value, Integral) and not isinstance(value, bool):
                object.__setattr__(self, name, int(value))  # such as NumPy's
        faults = list(_faults(self))
        if faults:
            raise InputError(f"the task {self.name!r} cannot be trained: {'; '.join(faults)}.")

    @property
    def grains(self) -> Grains | None:
        """How steps are cut in a reproducible run; None: the plan decides."""
        if isinstance(self.reproducible, Grains):
            return self.reproducible
        return Grains() if self.reproducible else None

    def build_model(self) -> nn.Module:
        """Build the module to train, initialized under `seed`. Raises `InputError` if `model` is a
        function that returns something other than a module, or a module that it cached during a
        trace."""
        if isinstance(self.model, nn.Module):
            return self.checked_model(self.model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = self.checked_model(self.model())
        if detect_fake_mode() is not None:  # called by the model function of a traced task
            return model
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            if isinstance(tensor, FakeTensor):
                raise InputError(
                    f"{name!r} of the model that the function of task {self.name!r} returned was made"
                    " when the task was planned, without values: the function keeps what it builds"
                    " (functools.cache, say), so have it build anew each time, or call it once before"
                    " planning."
                )
        return model

    def checked_model(self, model: object) -> nn.Module:
        """Return `model`, as given or as returned by the model function. Raises `InputError` if it is
        not a module, or if some of its parameters have no shape yet."""
        if not isinstance(model, nn.Module):
            raise InputError(
                f"the model function of task {self.name!r} returned {kind_of(model)}:"
                " return a torch.nn.Module."
            )
        check_shapes(model, "it is given to the task, or in the model function")
        return model

    def parameters_of(self, model: nn.Module) -> Parameters:
        """The argument for `optimizer`: the task's groups, or all parameters that require a gradient.

        Raises `InputError` if there are none.
        """
        if self.parameters is None:
            groups = [p for p in model.parameters() if p.requires_grad]
        else:
            groups = self._checked_groups(self.parameters(model))
        if not any(True for group in groups for _ in parameters_in([group])):
            raise InputError(
                f"the model of task {self.name!r} has no parameter that requires a gradient:"
                " there is nothing to train; call requires_grad_() on what should be."
            )
        return groups

    def _checked_groups(self, chosen: object) -> Parameters:
        remedy = "return a list of parameters, or of groups, each a dict with 'params' in it"
        if isinstance(chosen, Tensor | Mapping | str) or not isinstance(chosen, Iterable):
            raise InputError(
                f"the parameters function of task {self.name!r} returned {kind_of(chosen)}: {remedy}."
            )
        groups = list(chosen)
        for i, group in enumerate(groups):
            if not isinstance(group, Tensor) and not (
                isinstance(group, Mapping) and isinstance(group.get("params"), Iterable)
            ):
                what = "a group without 'params'" if isinstance(group, Mapping) else kind_of(group)
                raise InputError(
                    f"entry {i} of what the parameters function of task {self.name!r} returned is"
                    f" {what}: {remedy}."
                )
        return [
            {**g, "params": list(parameters_in([g]))} if isinstance(g, Mapping) else g
            for g in groups
        ]


def is_map_style(dataset: Any) -> bool:
    """Whether samples are accessed by index. (`IterableDataset` has a `__getitem__` too.)"""
    return (
        hasattr(dataset, "__getitem__")
        and hasattr(dataset, "__len__")
        and not isinstance(dataset, IterableDataset)
    )


def num_samples_of(dataset: Any) -> int | None:
    """The length of a data set; None for a stream of unknown length, which may also have a `__len__`
    that raises."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def several(metrics: MetricsOfTask | None) -> Sequence[MetricFunction | Metrics]:
    """The metrics of a task as a sequence."""
    if metrics is None:
        return ()
    if isinstance(metrics, list | tuple):
        return metrics
    return [cast("MetricFunction | Metrics", metrics)]


def check_task(value: object) -> None:
    """Raises `InputError` if `value` is not a `Task`."""
    if not isinstance(value, Task):
        raise InputError(f"the task is {kind_of(value)}: give an anybatch.Task.")


def loss_fault(loss: object) -> str | None:
    """What is wrong with a loss function, as far as visible without calling it; None: nothing."""
    if not callable(loss):
        return f"loss is {kind_of(loss)}; give a function of model and batch"
    if getattr(loss, "__module__", None) in ("torch.nn.modules.loss", "torch.nn.functional"):
        name = getattr(loss, "__name__", type(loss).__name__)
        return (
            f"loss is torch's {name}, which takes outputs and targets; give a function of model and"
            " batch, such as lambda model, batch: criterion(model(batch[0]), batch[1])"
        )
    return None


def clip_fault(clip: object) -> str | None:
    """What is wrong with a value of `clip_norm`; None: nothing."""
    if clip is None or (isinstance(clip, int | float) and clip is not True and clip > 0):
        return None
    return f"clip_norm is {clip!r}; give a number above zero or None"


def check_shapes(model: nn.Module, before: str) -> None:
    """Raises `InputError` if a layer of `model` (such as `nn.LazyLinear`) has not seen an input yet.
    `before` names what must not happen until it has."""
    for name, layer in model.named_modules():
        own = chain(layer.parameters(recurse=False), layer.buffers(recurse=False))
        if any(map(is_lazy, own)):
            raise InputError(
                f"the layer {name or '.'!r} of the model ({type(layer).__name__}) has seen no input,"
                f" from which its parameters take their shapes: run one forward pass before {before}."
            )


def parameters_in(groups: Iterable[Any]) -> Iterable[nn.Parameter]:
    """The parameters in a list of parameters or of parameter groups, in order."""
    for group in groups:
        if isinstance(group, Mapping):
            params = group["params"]
            yield from [params] if isinstance(params, Tensor) else params  # type: ignore[misc]
        else:
            yield group


def _faults(task: Task) -> Iterable[str]:
    if not isinstance(task.model, nn.Module) and not callable(task.model):
        yield f"model is {kind_of(task.model)}; give a torch.nn.Module or a function that builds one"
    if fault := loss_fault(task.loss):
        yield fault
    if not callable(task.optimizer):
        yield (
            f"optimizer is {kind_of(task.optimizer)}; give a function of the parameters that makes it,"
            " such as lambda params: torch.optim.AdamW(params, lr=1e-3)"
        )
    for name in ("schedule", "scheduler", "parameters", "collate", "tell"):
        if getattr(task, name) is not None and not callable(getattr(task, name)):
            yield f"{name} is {kind_of(getattr(task, name))}; give a function or None"
    for name in _CALLED_WITH:
        yield from cannot_be_called(name, getattr(task, name))
    if isinstance(task.loss, type) and issubclass(task.loss, nn.Module):
        yield f"loss is the class {task.loss.__name__}; give a function of model and batch"
    if not isinstance(task.shuffle, bool | np.bool_):
        yield f"shuffle is {task.shuffle!r}; give True or False"
    if not isinstance(task.origin, Origin | None):
        yield f"origin is {kind_of(task.origin)}; give an anybatch.Origin or None"
    for metric in several(task.metrics):
        if callable(getattr(metric, "compute", None)):
            yield (
                f"metrics is {kind_of(metric)}, which does not say what it is updated with; give"
                " anybatch.Metrics({name: metric}, inputs)"
            )
        elif not isinstance(metric, Metrics) and not callable(metric):
            yield (
                f"metrics is {kind_of(metric)}; give a function, an anybatch.Metrics, a list of these,"
                " or None"
            )
    if task.schedule is not None and task.scheduler is not None:
        yield "schedule and scheduler are both given; give one of them"
    yield from _batch_faults(task)
    for name in ("epochs", "steps", "samples", "ghost_batch", "evaluate_every"):
        if getattr(task, name) is not None:
            yield from _whole(task, name, least=1)
    yield from _whole(task, "num_workers", least=0)
    if isinstance(task.num_workers, int) and task.num_workers > _MOST_WORKERS:
        yield f"num_workers is {task.num_workers}; give at most {_MOST_WORKERS} processes"
    seed = task.seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        yield f"seed is {seed!r}; give a whole number of at most 64 bits"
    if not isinstance(task.name, str) or not task.name.strip():
        yield f"name is {task.name!r}; give a text that is not empty"

    lengths = [n for n in ("epochs", "steps", "samples") if getattr(task, n) is not None]
    if len(lengths) != 1:
        given = f"{' and '.join(lengths)} are given" if lengths else "none of them is given"
        yield f"exactly one of epochs, steps and samples says how long to train, but {given}"
    if fault := clip_fault(task.clip_norm):
        yield fault
    for name, choices in _CHOICES.items():
        value = getattr(task, name)
        if value not in choices and not (value is None and name == "scheduler_interval"):
            yield f"{name} is {value!r}; give {listed(choices)}"
    yield from _grain_faults(task)
    yield from _data_faults(task)


_CHOICES = {
    "scheduler_interval": ("epoch", "step"),
    "last": ("keep", "drop", "wrap"),
    "bad_data": ("stop", "skip"),
}

_CALLED_WITH = {
    "model": (),
    "loss": ("model", "batch"),
    "optimizer": ("parameters",),
    "schedule": ("progress",),
    "scheduler": ("optimizer",),
    "parameters": ("model",),
    "collate": ("samples",),
    "tell": ("model",),
}
"""The arguments with which each function of a task is called."""


def cannot_be_called(name: str, value: Any) -> Iterable[str]:
    """Yield a sentence if `value`, the function or class of a task called `name`, cannot be called with
    the arguments that it is given."""
    given = _CALLED_WITH[name]
    if not callable(value) or (name == "model" and isinstance(value, nn.Module)):
        return
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # no signature available
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        own = getattr(value, "__name__", type(value).__name__)
        what = f"the class {own}" if isinstance(value, type) else repr(own)
        takes = ", ".join(given) or "nothing"
        yield (
            f"{name} is {what}, which cannot be called with {takes} ({error}); give a function that"
            f" can, such as lambda {', '.join(given)}: {own}(...)".replace("lambda :", "lambda:")
        )


def _grain_faults(task: Task) -> Iterable[str]:
    grains = task.reproducible
    if not isinstance(grains, bool | Grains):
        yield f"reproducible is {kind_of(grains)}; give True, False or anybatch.Grains"
    elif isinstance(grains, Grains):
        if grains.samples is not None:
            yield from _whole(grains, "samples", least=1, of="reproducible.")
        yield from _whole(grains, "parts", least=1, of="reproducible.")


def _data_faults(task: Task) -> Iterable[str]:
    for name, data in (("train", task.train), ("valid", task.valid)):
        if name == "valid" and data is None:
            continue
        if isinstance(data, type):
            yield f"{name} is the class {data.__name__}; give a data set, which it makes"
            continue
        if isinstance(data, str | bytes):
            yield f"{name} is the text {data!r}; give a data set, such as one that reads that file"
            continue
        if isinstance(data, DataLoader) and data.batch_sampler is not None:
            yield (
                f"{name} is a DataLoader, which gives batches where samples belong; give its dataset,"
                " and its collate_fn and num_workers as collate and num_workers of the task (where its"
                " sampler has an order of its own, an iterable data set that yields it)"
            )
            continue
        map_style, length = is_map_style(data), num_samples_of(data)
        if name == "valid" and hasattr(data, "__next__"):
            yield (
                f"valid is an iterator (of type {type(data).__name__}), which can be read only once;"
                " give a data set, a list, or an object whose __iter__ starts anew"
            )
        elif not map_style and not hasattr(data, "__iter__"):
            yield (
                f"{name} is {kind_of(data)}; give a data set with __len__ and __getitem__,"
                " or an iterable one"
            )
        elif name == "train" and not map_style and task.lengths is not None:
            yield (
                f"lengths are given for {name}, {kind_of(data)}, whose samples have no index; leave"
                " them out, or give a data set with __len__ and __getitem__"
            )
        elif length == 0:
            yield f"{name} is an empty data set; give at least one sample"
        elif name == "train" and _drops_all(task, length):
            yield (
                f"last='drop' drops every one of the {length} training samples, since they do"
                f" not fill one global batch of {task.global_batch}; use 'keep' or 'wrap'"
            )


def _batch_faults(task: Task) -> Iterable[str]:
    batch = task.global_batch
    if callable(batch):
        yield (
            "global_batch is a function; give Ramp(start, stop, until=1, shape=function), which says"
            " how large the batch can be: the plan is made for the largest"
        )
        return
    if not isinstance(batch, Tokens | Ramp):
        yield from _whole(task, "global_batch", least=1)
        return
    if isinstance(batch, Ramp) and batch.learning_rate is not None and task.scheduler is not None:
        yield (
            f"learning_rate of the Ramp is {batch.learning_rate!r} and a scheduler is given, which sets"
            " the rate by itself; give schedule instead of scheduler"
        )
    unit = tokens_of(batch)
    stream = not is_map_style(task.train)
    if unit is not None and not stream and lengths_for(task) is None:
        yield (
            f"global_batch is {as_text(batch)} and no lengths are given; give lengths, or the Tokens"
            " of=..., or a number of samples"
        )
    if unit is not None and stream:
        yield (
            f"global_batch is {as_text(batch)} and train is {kind_of(task.train)}, whose samples have"
            " no lengths before they are read; give a data set with __len__ and __getitem__, or a"
            " number of samples"
        )
    if task.last == "drop":
        yield (
            f"last is 'drop' and global_batch is {as_text(batch)}, whose steps have no fixed number of"
            " samples; use 'keep' or 'wrap'"
        )


def lengths_for(task: Task) -> Sequence[int] | Callable[[Any], Sequence[int]] | None:
    """The lengths of the training samples, or a function that returns them, if the global batch is in
    tokens; None if it is not or no lengths are given."""
    unit = tokens_of(task.global_batch)
    if unit is None or unit.of is not None:
        return None if unit is None else unit.of
    return getattr(task.train, "lengths", None) if task.lengths is None else task.lengths


def _drops_all(task: Task, num_samples: int | None) -> bool:
    size = task.global_batch
    if task.last != "drop" or num_samples is None or not isinstance(size, int):
        return False
    return num_samples < size


def _whole(owner: Task | Grains, name: str, least: int, of: str = "") -> Iterable[str]:
    value = getattr(owner, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        yield f"{of}{name} is {value!r}; give a whole number of at least {least}"

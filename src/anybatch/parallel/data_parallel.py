"""Wrappers for code in the style of `nn.DataParallel`: several devices, one process, one module.

`nn.DataParallel` gathers all outputs on the first device and computes the loss there, so that device
needs more memory than any other. Here outputs and losses stay on their devices. Parameters, their
gradients and two numbers per device are transferred between devices:

    model = DataParallelModel(model)              outputs: one per device, each on its own
    criterion = DataParallelCriterion(criterion)  loss: the exact mean over the whole batch
    loss = criterion(model(inputs), targets)
    loss.backward()                               gradients: those of the plain module

Replicas are built as `torch.nn.parallel.replicate` builds them (`Module._replicate_for_data_parallel`).
That function, `parallel_apply` and `gather` are not used: they do not support the CPU, change the type
of an error, and give zero gradients to parameters that have no gradient in the plain module.

For new code, `anybatch.train` offers more: it also divides the batch in time.
"""

from __future__ import annotations

import contextvars
import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeVar, cast, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.compute.loss import read_loss, widened
from anybatch.compute.loss_reduction_check import warn_of_reduction
from anybatch.data import batch_size, map_leaves, share, split, to_device
from anybatch.data.batch_slices import is_samples, parts_of, rebuilt
from anybatch.errors import DataError, InputError
from anybatch.task import Loss

T = TypeVar("T")

Device = torch.device | str | int


@final
class Outputs(list[Any]):
    """The outputs of a `DataParallelModel`: one per device that had samples, in the order of the
    devices, each on its own device.

    Attributes:
        sizes: number of samples of each output.
    """

    def __init__(self, outputs: Sequence[Any], sizes: Sequence[int]) -> None:
        super().__init__(outputs)
        self.sizes: tuple[int, ...] = tuple(sizes)


class _Front(nn.Module):
    """Base class of modules that run on several devices. Their `state_dict` is that of the plain
    module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module: nn.Module = module
        # For a wrapper inside a module whose state is loaded.
        self.register_load_state_dict_pre_hook(_insert_prefix)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict of the plain module: names have no `module.` prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the state dict of the plain module, or that of `nn.DataParallel`, whose names begin with
        `module.`."""
        own = self.module.state_dict().keys()
        bare = {name.removeprefix("module."): value for name, value in state_dict.items()}
        if len(own & bare.keys()) > len(own & state_dict.keys()):
            state_dict = bare
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)


class _OnDevices(_Front, ABC):
    """Base class of models whose inputs are scattered over devices."""

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[Device] | None,
        device_ids: Sequence[Device] | None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise InputError(
                f"{type(self).__name__} is given a value of type {type(module).__name__} as its"
                " module: give a torch.nn.Module."
            )
        if devices is not None and device_ids is not None:
            raise InputError(
                f"devices is {devices!r} and device_ids is {device_ids!r}, which are two names of the"
                " same: give one of them."
            )
        super().__init__(module)
        self.devices: tuple[torch.device, ...] = _devices(
            device_ids if devices is None else devices
        )

    @abstractmethod
    def sizes(self, num_samples: int) -> list[int]:
        """How many of `num_samples` samples each device takes."""

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], dim: int = 0) -> Outputs:
        self._check_home()
        # A mapping is always treated as a structure; a tuple of tensors might be taken for samples.
        batch: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        if dim:
            batch = map_leaves(batch, lambda leaf: _moved(leaf, dim, 0))
        num_samples = batch_size(batch) if batch else 0
        taken = [(i, n) for i, n in enumerate(self.sizes(num_samples)) if n]
        taken = taken or [(0, num_samples)]  # without samples the first device runs it
        numbers, sizes = zip(*taken, strict=True)
        devices = [self.devices[i] for i in numbers]
        pieces = _scattered(batch, sizes, devices) if num_samples else [batch]
        if dim:
            pieces = [map_leaves(piece, lambda leaf: _moved(leaf, 0, dim)) for piece in pieces]
        modules = _replicas(self.module, devices, first_is_home=numbers[0] == 0)
        works = [
            functools.partial(_call, module, piece, len(args))
            for module, piece in zip(modules, pieces, strict=True)
        ]
        outputs = Outputs(_in_parallel(works, devices), sizes)
        if numbers[0] != 0:  # the home module keeps what the first replica wrote
            with torch.no_grad():
                for own, written in zip(self.module.buffers(), modules[0].buffers(), strict=True):
                    own.copy_(written)
        return outputs

    def _check_home(self) -> None:
        home = self.devices[0]
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if tensor.device != home:
                raise InputError(
                    f"{name!r} of the module is on {tensor.device}, but the first of the devices is"
                    f" {home}: move the module there with .to({str(home)!r})."
                )


@final
class DataParallelModel(_OnDevices):
    """Runs `module` on several devices; outputs stay on the device that computed them.

    `forward` splits its arguments along dim 0 by exact shares (tensors in any nesting, lists of
    samples, keyword arguments; a value without samples goes to every device), and returns `Outputs`. A
    batch can have any size; a device without samples runs nothing.

    In training mode BatchNorm normalizes on each device with the samples of that device, and the
    running statistics are those of the first device that has samples, as with `nn.DataParallel`. On the
    CPU all replicas draw from one random generator, in no fixed order; each CUDA device has its own.

    Args:
        module: the module, on the first device.
        devices: devices to use; by default all visible CUDA devices, or the CPU if there are none. A
            device can be listed twice.
        shares: ratios of the numbers of samples that the devices take; by default all equal.
        device_ids, output_device, dim: for compatibility with code written for other wrappers:
            `device_ids` is an alias of `devices`; the other two accept only None and 0.

    Attributes:
        module: the plain module.
        devices: the devices in use.

    Raises:
        InputError: the devices or the shares are invalid, or the module is on another device.
        DataError: the arguments disagree on the number of samples.

    If several replicas run, an error of one of them is raised unchanged, with a note that names the
    device.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[Device] | None = None,
        shares: Sequence[float] | None = None,
        *,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__(module, devices, device_ids)
        if output_device is not None or dim != 0:
            raise InputError(
                f"DataParallelModel is given output_device={output_device!r} and dim={dim!r}, but its"
                " outputs stay where they are made, cut along dim 0: leave both out, and give the"
                " outputs to DataParallelCriterion, or to gather with a device."
            )
        self._shares = tuple(shares) if shares is not None else (1,) * len(self.devices)
        if len(self._shares) != len(self.devices):
            raise InputError(
                f"there are {len(self._shares)} shares for {len(self.devices)} devices: give one for"
                " each device."
            )
        share(1, self._shares, 0)  # raises if a share is invalid

    def sizes(self, num_samples: int) -> list[int]:
        """How many of `num_samples` samples each device takes."""
        return _cut(num_samples, self._shares)

    def forward(self, *args: Any, **kwargs: Any) -> Outputs:
        """The outputs of all devices that have samples."""
        return self._run(args, kwargs)


@final
class BalancedDataParallel(_OnDevices):
    """`nn.DataParallel` whose first device takes fewer samples, since outputs are gathered on it.

    `forward` returns the gathered output, on one device. If the loss can be computed on each device,
    use `DataParallelModel`, which does not gather.

    Args:
        first_device_share: number of samples per forward pass for the first device, 0 for none; at
            most an even share. The other devices take even shares of the rest.
        model: the module, on the first device.
        dim: dimension of the samples, in inputs and outputs.
        devices: devices to use; by default all visible CUDA devices, or the CPU if there are none.
            `device_ids` is an alias.
        output_device: device on which the output is gathered; by default the first device.

    Raises the same errors as `DataParallelModel`.
    """

    def __init__(
        self,
        first_device_share: int,
        model: nn.Module,
        dim: int = 0,
        devices: Sequence[Device] | None = None,
        *,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
    ) -> None:
        super().__init__(model, devices, device_ids)
        self.output_device: torch.device = (
            self.devices[0] if output_device is None else _device(output_device)
        )
        whole = isinstance(first_device_share, int) and not isinstance(first_device_share, bool)
        if not whole or first_device_share < 0:
            raise InputError(
                f"the share of the first device is {first_device_share!r}: give its number of samples"
                " per forward pass, a whole number of at least 0."
            )
        self.first_device_share: int = first_device_share
        self.dim: int = dim

    def sizes(self, num_samples: int) -> list[int]:
        """How many of `num_samples` samples each device takes."""
        even = _cut(num_samples, (1,) * len(self.devices))
        if len(even) == 1:
            return even
        first = min(self.first_device_share, even[0])
        return [first, *_cut(num_samples - first, (1,) * (len(even) - 1))]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output for the whole batch, on `output_device`."""
        return _gathered(self._run(args, kwargs, self.dim), self.output_device, self.dim)


@final
class DataParallelCriterion(_Front):
    """Computes `criterion` on each device, and combines the results to the exact mean over the batch.

    It is called with the outputs of a `DataParallelModel` and the targets of the whole batch, in the
    order of the batch; each device receives its part of the targets. It returns a scalar equal to
    `criterion(outputs of the whole batch, targets)`, by default on the device of the first output:

    - `nn.CrossEntropyLoss` and `nn.NLLLoss` are weighted by the denominators of their means (class
      weights, `ignore_index`), and so are `F.cross_entropy` and `F.nll_loss`;
    - with `reduction="sum"` the sums are added;
    - `anybatch.Loss` and pairs (sum, weight) provide their own weight;
    - any other scalar is interpreted as the mean over the samples, and weighted by their number. The
      first call warns if the scalar is known to be another mean, or a sum.

    Args:
        criterion: maps `(output, *targets)` to one of these; a module or a function.
        device_ids: accepted but ignored: targets go to the devices of the outputs.
        output_device: device of the loss; by default that of the first output.
        dim: dimension of the samples in the targets; must be 0.

    Attributes:
        module: the criterion.

    Raises:
        InputError: the outputs do not match the targets.
        LossError: the criterion returned something else.
    """

    def __init__(
        self,
        criterion: Callable[..., Any],
        *,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
    ) -> None:
        if dim != 0:
            raise InputError(
                f"DataParallelCriterion is given dim={dim!r}, but targets are cut along dim 0, as the"
                " outputs are: leave dim out, and transpose the targets."
            )
        if not callable(criterion):
            raise InputError(
                f"the criterion is a value of type {type(criterion).__name__}: give a loss module or"
                " a function."
            )
        super().__init__(_as_module(criterion))
        self._output_device = None if output_device is None else _device(output_device)
        self._is_checked = False

    def forward(self, outputs: Sequence[Any], *targets: Any, **kwargs: Any) -> Tensor:
        """The loss: a scalar tensor, by default on the device of the first output."""
        if isinstance(outputs, Tensor) or not isinstance(outputs, Sequence) or not outputs:
            raise InputError(
                f"the criterion is given a value of type {type(outputs).__name__} as outputs: give the"
                " list that DataParallelModel returns, one output per device."
            )
        whole: dict[Any, Any] = {**dict(enumerate(targets)), **kwargs}
        sizes = _sizes_of(outputs, whole)
        devices = [_device_of(output) for output in outputs]
        pieces = _scattered(whole, sizes, devices) if whole else [whole] * len(outputs)
        home = next((t.device for t in _tensors_of(self.module)), devices[0])
        criteria = _replicas(self.module, devices, first_is_home=home == devices[0])
        check = len(outputs) > 1 and not self._is_checked
        self._is_checked |= check
        works = [
            functools.partial(_sum_and_weight, criterion, output, piece, len(targets), size, check)
            for criterion, output, piece, size in zip(criteria, outputs, pieces, sizes, strict=True)
        ]
        losses = _in_parallel(works, devices)
        device = self._output_device or devices[0]
        total = _added([loss.sum for loss in losses], device)
        if getattr(self.module, "reduction", None) == "sum":
            return total
        return total / _added([loss.weight for loss in losses], device)


def gather(outputs: Sequence[Any], device: Device | None = None) -> Any:
    """Gather the outputs of all devices on one device, as the plain module returns them for the whole
    batch. Intended for evaluation; differentiable.

    Tensors are concatenated along dim 0, and lists of samples end to end; scalar tensors, one per
    device, become a vector; other values become the first one if all are equal, otherwise a list.

    Args:
        outputs: outputs of a `DataParallelModel`.
        device: target device; by default that of the first output.

    Raises `InputError` if there are no outputs.
    """
    if isinstance(outputs, Tensor) or not outputs:
        raise InputError(
            "there are no outputs to gather: give the list that DataParallelModel returns, one output"
            " per device."
        )
    return _gathered(outputs, _device_of(outputs[0]) if device is None else _device(device), dim=0)


# -------------------------------------------------------------------------------- devices and batches


def _devices(devices: Sequence[Device] | None) -> tuple[torch.device, ...]:
    if devices is None:
        count = torch.cuda.device_count()
        return tuple(torch.device("cuda", i) for i in range(count)) or (torch.device("cpu"),)
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
        raise InputError(
            f"the devices are {devices!r}: give a list such as ['cuda:0', 'cuda:1'], or leave them out"
            " to use all."
        )
    return tuple(_device(device) for device in devices)


def _device(name: Device) -> torch.device:
    try:
        device = torch.device("cuda", name) if isinstance(name, int) else torch.device(name)
    except (RuntimeError, TypeError, ValueError):
        raise InputError(f"there is no device {name!r}: give 'cpu' or 'cuda:0', say.") from None
    if device.type != "cuda":
        return device
    count, index = torch.cuda.device_count(), device.index or 0
    if index >= count:
        raise InputError(
            f"there is no device {str(device)!r}: {count} CUDA devices are visible to this process."
        )
    return torch.device("cuda", index)


def _device_of(output: Any) -> torch.device:
    """The device of the first tensor in `output`; the CPU if there is none."""
    found: list[torch.device] = []
    map_leaves(output, lambda leaf: found.append(leaf.device) if isinstance(leaf, Tensor) else leaf)
    return found[0] if found else torch.device("cpu")


def _cut(num_samples: int, shares: Sequence[float]) -> list[int]:
    return [len(share(num_samples, shares, i)) for i in range(len(shares))]


def _scattered(batch: Any, sizes: Sequence[int], devices: Sequence[torch.device]) -> list[Any]:
    pieces = zip(split(batch, sizes), devices, strict=True)
    return [to_device(piece, device, non_blocking=True) for piece, device in pieces]


def _moved(leaf: Any, source: int, target: int) -> Any:
    return leaf.movedim(source, target) if isinstance(leaf, Tensor) and leaf.dim() else leaf


def _to(tensor: Tensor, device: torch.device, copy: bool = False) -> Tensor:
    # A non-blocking copy to the host could be read before it completes.
    return tensor.to(device, non_blocking=device.type != "cpu", copy=copy)


# ----------------------------------------------------------------------------------------- replicas


class _Copies(torch.autograd.Function):
    """Copies a tensor to several devices; its gradients are added in the order of the devices.

    Each call handles one tensor, so that a gradient leaves its device as soon as it is final, and the
    gradient of a parameter that no replica used remains None, as in the plain module.
    """

    @staticmethod
    def forward(ctx: Any, devices: Sequence[torch.device], tensor: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.home = tensor.device
        return tuple(_to(tensor, device, copy=True) for device in devices)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, Tensor | None]:
        there = [_to(gradient, ctx.home) for gradient in gradients if gradient is not None]
        return None, functools.reduce(operator.add, there) if there else None


def _replicas(
    module: nn.Module, devices: Sequence[torch.device], first_is_home: bool
) -> list[nn.Module]:
    """One module per device; their gradients flow back to `module`.

    On the home device the replica is `module` itself, so that what its forward writes (running
    statistics, counters) persists.
    """
    away = list(devices[1:] if first_is_home else devices)
    copies: dict[int, Any] = {}
    if away:
        copies = {id(tensor): _Copies.apply(away, tensor) for tensor in _tensors_of(module)}
    replicas = [
        _rewired(module, {key: tensors[i] for key, tensors in copies.items()})
        for i in range(len(away))
    ]
    return [module, *replicas] if first_is_home else replicas


def _rewired(module: nn.Module, copies: Mapping[int, Tensor]) -> nn.Module:
    """A shallow copy of `module` that shares everything with it except parameters and buffers."""
    # Modules with further references to their parameters (RNNs) extend torch's method.
    shells: dict[nn.Module, Any] = {m: m._replicate_for_data_parallel() for m in module.modules()}
    for original, shell in shells.items():
        for name, child in original._modules.items():
            shell._modules[name] = None if child is None else shells[child]
        for name, param in original._parameters.items():
            if param is not None:
                setattr(shell, name, copies[id(param)])
                vars(shell).pop(name, None)
            # Registered so that `parameters()` works in forward; these are not leaf tensors.
            shell._parameters[name] = None if param is None else copies[id(param)]
        for name, buffer in original._buffers.items():
            shell._buffers[name] = None if buffer is None else copies[id(buffer)]
    return shells[module]


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _insert_prefix(
    front: nn.Module, state_dict: dict[str, Any], prefix: str, *_rest: object
) -> None:
    """Rename the entries of the plain module to the names that torch expects in a wrapper: with
    `module.`."""
    own = {f"{prefix}{name}" for name in front.state_dict()}
    for name in [name for name in state_dict if name in own]:
        inner = name.removeprefix(prefix)
        state_dict[f"{prefix}module.{inner}"] = state_dict.pop(name)


# ------------------------------------------------------------------------------------------ running


def _call(function: Callable[..., Any], batch: Mapping[Any, Any], num_args: int) -> Any:
    args = [batch[i] for i in range(num_args)]
    return function(*args, **{name: v for name, v in batch.items() if isinstance(name, str)})


def _in_parallel(works: Sequence[Callable[[], T]], devices: Sequence[torch.device]) -> list[T]:
    """Run `works`, each in a separate thread on its device, with the grad, inference and autocast modes
    of the caller, and return the results. All have finished when this returns; if several failed, the
    error of the first in order is raised."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    cache = torch.is_autocast_cache_enabled()
    kinds = {"cpu", *(device.type for device in devices)}
    casts = [(k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k)]
    streams = [torch.cuda.current_stream(d) if d.type == "cuda" else None for d in devices]

    def run(i: int) -> T:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            stack.enter_context(torch.cuda.stream(streams[i]))  # None: no effect
            return works[i]()

    if len(works) == 1:
        return [run(0)]
    with ThreadPoolExecutor(len(works), "anybatch-replica") as pool:
        contexts = [contextvars.copy_context() for _ in works]
        futures = [pool.submit(context.run, run, i) for i, context in enumerate(contexts)]
    failed = next((i for i, one in enumerate(futures) if one.exception() is not None), None)
    try:
        if failed is not None:
            note = f"raised on {devices[failed]}, number {failed} of {len(works)} devices"
            cast(BaseException, futures[failed].exception()).add_note(note)
        return [one.result() for one in futures]
    finally:  # else the traceback would keep the tensors of all replicas alive through this frame
        del futures


# -------------------------------------------------------------------------------- losses and outputs


def _as_module(criterion: Callable[..., Any]) -> nn.Module:
    if isinstance(criterion, nn.Module):
        return criterion
    function, options = criterion, {}
    if isinstance(criterion, functools.partial) and not criterion.args:
        function, options = criterion.func, criterion.keywords
    # These two do not divide by the number of samples.
    if function is F.cross_entropy:
        return nn.CrossEntropyLoss(**options)
    if function is F.nll_loss:
        return nn.NLLLoss(**options)
    module = nn.Module()
    module.forward = criterion
    return module


def _sum_and_weight(
    criterion: nn.Module,
    output: Any,
    targets: Mapping[Any, Any],
    num_args: int,
    size: int,
    check: bool,
) -> Loss:
    reduction = getattr(criterion, "reduction", None)
    plain = type(criterion).forward in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
    if plain and reduction == "mean" and len(targets) == 1:
        return _class_loss(criterion, output, next(iter(targets.values())))
    returned = _call(functools.partial(criterion, output), targets, num_args)
    if reduction == "sum":
        returned = (widened(returned) if isinstance(returned, Tensor) else returned), 1
    elif check:
        warn_of_reduction(criterion.forward, returned, size)
    return read_loss(returned, lambda: size, training=False)


def _class_loss(criterion: Any, output: Tensor, target: Tensor) -> Loss:
    """Sum and weight of a class loss. The sum is not computed as mean times weight: the mean is 0 / 0
    if every target is ignored."""
    output = widened(output)
    weight = None if criterion.weight is None else criterion.weight.to(output.dtype)
    options = {"weight": weight, "ignore_index": criterion.ignore_index, "reduction": "sum"}
    if isinstance(criterion, nn.NLLLoss):
        total = F.nll_loss(output, target, **options)
    else:
        smoothing = criterion.label_smoothing
        total = F.cross_entropy(output, target, label_smoothing=smoothing, **options)
    if target.is_floating_point():  # probabilities: the mean is over all positions
        return Loss(total, target.numel() // target.size(1))
    counted = target != criterion.ignore_index
    if weight is None:
        return Loss(total, counted.sum())
    return Loss(total, (weight[target.where(counted, 0)] * counted).sum())


def _added(values: Sequence[Tensor | float], device: torch.device) -> Any:
    """The sum of scalars, added in order; on `device` if one of them is a tensor."""
    here: list[Any] = [_to(v, device) if isinstance(v, Tensor) else v for v in values]
    return functools.reduce(operator.add, here)


def _sizes_of(outputs: Sequence[Any], targets: Mapping[Any, Any]) -> Sequence[int]:
    """The number of samples of each output; their sum is that of the targets."""
    total = batch_size(targets) if targets else None
    known = outputs.sizes if isinstance(outputs, Outputs) else None
    if known is not None and total in (None, sum(known)):
        return known
    # The user has transformed the outputs, or a sample has several rows in outputs and targets.
    found = [_size_of(output) for output in outputs]
    if None not in found and total in (None, sum(n or 0 for n in found)):
        return [n or 0 for n in found]
    raise InputError(
        f"the outputs of {len(outputs)} devices have {known or found} samples, but the targets have"
        f" {total}: give the targets of the whole batch, in its order, and the outputs as"
        " DataParallelModel returned them."
    )


def _size_of(output: Any) -> int | None:
    try:
        return batch_size(output)
    except DataError:
        return None


def _gathered(outputs: Sequence[Any], device: torch.device, dim: int) -> Any:
    sizes = outputs.sizes if isinstance(outputs, Outputs) else map(_size_of, outputs)
    moved = [to_device(output, device, non_blocking=device.type != "cpu") for output in outputs]
    return _joined(moved, list(sizes), dim)


def _joined(parts: list[Any], sizes: Sequence[int | None], dim: int) -> Any:
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(parts, dim) if first.dim() else torch.stack(parts)
    if isinstance(first, np.ndarray):
        return np.concatenate(parts, dim) if first.ndim else np.stack(parts)
    members = [parts_of(part) for part in parts]
    if members[0] is None:
        plain = bool | int | float | str | bytes
        same = all(p is first or (type(p) is type(first) and p == first) for p in parts[1:])
        return first if same and (first is None or isinstance(first, plain)) else parts
    if isinstance(first, list | tuple) and not hasattr(first, "_fields"):
        lengths = [len(part) for part in parts]
        samples = lengths == list(sizes) and is_samples(first, len(first))
        if samples or len(set(lengths)) > 1:
            return type(first)([member for part in parts for member in part])
    names = [[name for name, _ in part or ()] for part in members]
    if names.count(names[0]) != len(names):
        listing = " and ".join(str(each) for each in names)
        raise InputError(
            f"the outputs of the devices have different parts ({listing}): return the same ones"
            " whatever the samples."
        )
    columns = [[value for _, value in part or ()] for part in members]
    return rebuilt(first, [_joined(list(c), sizes, dim) for c in zip(*columns, strict=True)])

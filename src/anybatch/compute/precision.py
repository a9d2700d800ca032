"""Precision: how numbers are held, as one table, and the little that has to be done for each row.

Autocast and GradScaler are torch's. Half-precision weights run under autocast too, since it knows
which operations to keep in float32; only their master copies are kept here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import _Orthogonal, _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim import Optimizer

from anybatch.errors import InputError
from anybatch.machine import Device, NumberFormat, cpu_computes_in
from anybatch.plans import LOSS_SCALED, Precision

NORMS: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)


@dataclass(frozen=True, slots=True)
class Format:
    """One row of the table.

    Attributes:
        compute: dtype of autocast, or None.
        weights: dtype of the weights, or None to leave them.
        masters: norms stay float32 and the optimizer works on float32 copies of the weights.
    """

    compute: torch.dtype | None = None
    weights: torch.dtype | None = None
    masters: bool = False


FORMATS: dict[Precision, Format] = {
    "fp32": Format(),
    "tf32": Format(),
    "bf16": Format(compute=torch.bfloat16),
    "fp16": Format(compute=torch.float16),
    "bf16-weights": Format(compute=torch.bfloat16, weights=torch.bfloat16, masters=True),
    "fp16-weights": Format(compute=torch.float16, weights=torch.float16, masters=True),
    "bf16-pure": Format(weights=torch.bfloat16),
    "fp16-pure": Format(weights=torch.float16),
    "fp8": Format(compute=torch.bfloat16),
}


class Numerics:
    """One model in one precision on one device, from its construction to `undo`.

    Attributes:
        scaler: torch's GradScaler, or None.
        gradient_factor: power of two by which the sum of losses is multiplied before backward, so
            that gradients, which are sums over the global batch, stay in the range of a mean: that of
            float16 is short. Where the total weight is that very power, the sums are the mean, and a
            pass over all gradients is saved.
    """

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        device: torch.device,
        global_batch: int,
        loss_scaling: bool = True,
    ) -> None:
        self._model = model
        self._format = FORMATS[precision]
        self._device = device
        self._undo: list[Callable[[], None]] = []
        self._halved: list[nn.Parameter] = []
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        self.expect(global_batch)
        scaled = precision in LOSS_SCALED and loss_scaling
        self.scaler: torch.amp.GradScaler | None = (
            torch.amp.GradScaler(device.type) if scaled else None
        )
        if self._format.weights is not None:
            _check_halvable(model, precision, self._format.masters)
        try:
            if precision == "fp8":
                self._undo.append(_float8(model))
            if device.type == "cuda" and precision in ("fp32", "tf32"):
                self._undo.append(_tensor_float32(precision == "tf32"))
            # A model that is divided over ranks keeps its masters itself: see `parallel.Shard`.
            divided = any(isinstance(p, DTensor) for p in model.parameters())
            if self._format.weights is not None and not (divided and self._format.masters):
                self._halve(self._format.weights)
        except BaseException:
            self.undo()
            raise

    def expect(self, global_batch: int) -> None:
        """Between two steps: take `gradient_factor` for steps of so many samples from now on."""
        self.gradient_factor: float = 2.0 ** -((global_batch - 1).bit_length())

    def region(self) -> AbstractContextManager[Any]:
        """Where the forward pass runs."""
        if self._format.compute is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._format.compute)

    def adopt(self, optimizer: Optimizer) -> None:
        """Let `optimizer` work on the float32 masters instead of the half-precision weights, and with
        states of the dtype of what it works on."""
        masters = {param: self._masters.get(param, param) for param in self._halved}
        _exchange(optimizer, masters)
        # Undone last: then the weights have the dtype again that they came in.
        self._undo.insert(0, partial(_exchange, optimizer, {m: p for p, m in masters.items()}))

    @property
    def is_halved(self) -> bool:
        """Whether parameters are kept in half precision here."""
        return bool(self._halved)

    def leaves(self) -> dict[nn.Parameter, nn.Parameter]:
        """For each master, the parameter whose gradient is poured into it."""
        return {master: param for param, master in self._masters.items()}

    def publish(self) -> None:
        """Copy the masters to the weights that the model computes with, after an update."""
        if self._masters:
            with torch.no_grad():
                torch._foreach_copy_(list(self._masters), list(self._masters.values()))

    @torch.no_grad()
    def take_edits(self) -> None:
        """Between two steps: what was written to weights from outside (loaded, clamped) is written to
        their masters too, or the next update would undo it. Neither waits for the device nor changes
        the master of a weight that is as it was published."""
        for param, master in self._masters.items():
            edited = param != master.to(param.dtype)
            master.copy_(torch.where(edited, param.to(master.dtype), master))

    def undo(self) -> None:
        """Give the model back in the dtype it came in, from the masters where there are any."""
        with ExitStack() as last_first:
            for undo in self._undo:
                last_first.callback(undo)
        self._undo.clear()

    def _halve(self, dtype: torch.dtype) -> None:
        keep = self._format.masters
        if keep and any(param.dtype == torch.float64 for param in self._model.parameters()):
            self._undo.append(_narrowing_inputs(self._model))
        for module in self._model.modules():
            if keep and isinstance(module, NORMS):
                continue
            for param in module.parameters(recurse=False):
                if param.is_floating_point() and param.dtype != dtype:
                    self._halve_one(param, dtype, keep and param.requires_grad)
            if not keep:
                for buffer in module.buffers(recurse=False):
                    if buffer.is_floating_point():
                        self._undo.append(partial(_restore, buffer, None, buffer.dtype))
                        buffer.data = buffer.data.to(dtype)
        if not keep:
            self._undo.append(_casting_io(self._model, dtype))

    def _halve_one(self, param: nn.Parameter, dtype: torch.dtype, master: bool) -> None:
        self._halved.append(param)
        copy = None
        before = param.dtype
        if master:
            copy = nn.Parameter(param.detach().float().clone())
            self._masters[param] = copy
            handle = param.register_post_accumulate_grad_hook(_pour_into(copy))
            self._undo.append(handle.remove)
        self._undo.append(partial(_restore, param, copy, before))
        # By way of the master, so that rounding is that of `publish`.
        param.data = (param if copy is None else copy).data.to(dtype)


def _check_halvable(model: nn.Module, precision: Precision, keep: bool) -> None:
    """Raises `InputError` if a part of `model` cannot compute with weights in half precision; `keep`:
    its buffers stay as they are."""
    format = "bf16" if precision.startswith("bf16") else "fp16"
    for name, module in model.named_modules():
        spectral = isinstance(module, _SpectralNorm) or any(
            isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()
        )
        why = None
        if spectral and keep:
            why = "is a spectral norm, which multiplies weights with vectors of float32"
        elif isinstance(module, _Orthogonal) and not keep:
            why = "is an orthogonal parametrization, which is computed in float32 at least"
        elif not keep and any(param.is_complex() for param in module.parameters(recurse=False)):
            why = f"has complex parameters, and there are no complex numbers of {format}"
        if why is not None:
            raise InputError(
                f"precision {precision} keeps weights in half precision, and {name or 'the model'!r}"
                f" {why}: use {format}, which leaves the weights as they are."
            )


def check_available(precision: Precision, device: Device) -> None:
    """Raises `InputError` if `precision` cannot be had on `device`, saying what is missing."""
    if precision == "fp8":
        other = "fp16" if device.kind == "cuda" and not device.has("bf16") else "bf16"
        _check_has("fp8", device, "8.9", other)
        if importlib.util.find_spec("torchao") is None:
            raise InputError("precision fp8 needs torchao: pip install torchao, or use bf16.")
    if precision == "tf32":
        _check_has("tf32", device, "8.0", "fp32")


def precision_notices(precision: Precision, device: Device) -> Iterator[str]:
    """What to say where `device` computes in `precision`, but not as it computes best."""
    format = FORMATS[precision]
    if device.kind == "cpu":
        half = format.compute or format.weights
        if half is not None and not cpu_computes_in(half):
            yield (
                f"This CPU has no instructions for {str(half).removeprefix('torch.')}: in {precision}"
                " products are no faster than in fp32, and convolutions take many times as long, and"
                " more memory."
            )
    elif torch.bfloat16 in (format.compute, format.weights) and not device.has("bf16"):
        yield (
            f"{device.name} has no bfloat16 (compute capability {device.capability}): {precision} is"
            " emulated on it, no faster than float32. Its half precision is float16:"
            f" precision {precision.replace('bf16', 'fp16')}."
        )


def _check_has(format: NumberFormat, device: Device, since: str, instead: str) -> None:
    if device.has(format):
        return
    found = f"{device.name} has {device.capability}" if device.capability else "this is the cpu"
    raise InputError(
        f"precision {format} needs a CUDA device of compute capability {since} or newer, and {found}:"
        f" use {instead}."
    )


def _pour_into(master: nn.Parameter) -> Callable[[Tensor], None]:
    """A hook that adds a half-precision gradient to its master's in float32, and drops it: adding up
    micro-batches in half precision would lose the small ones."""

    def pour(param: Tensor) -> None:
        if param.grad is None:
            return
        if master.grad is None:
            master.grad = param.grad.to(master.dtype)
        else:
            master.grad.add_(param.grad)
        param.grad = None

    return pour


def _restore(tensor: Tensor, master: Tensor | None, dtype: torch.dtype) -> None:
    tensor.data = (tensor if master is None else master).data.to(dtype)
    tensor.grad = None


def _narrowing_inputs(model: nn.Module) -> Callable[[], None]:
    """Cast what goes into a model in float64 to float32, since autocast leaves float64 as it is, and
    half-precision weights do not go with it."""

    def narrowed(_module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _cast(args, torch.float32, torch.float64), _cast(
            kwargs, torch.float32, torch.float64
        )

    return model.register_forward_pre_hook(narrowed, with_kwargs=True).remove


def _casting_io(model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Cast what goes into a purely half-precision model to its dtype, and what comes out to float32,
    in which losses are computed."""
    before = model.register_forward_pre_hook(
        lambda _module, args, kwargs: (_cast(args, dtype), _cast(kwargs, dtype)), with_kwargs=True
    )
    after = model.register_forward_hook(lambda _module, _args, output: _cast(output, torch.float32))

    def undo() -> None:
        before.remove()
        after.remove()

    return undo


def _cast(value: Any, dtype: torch.dtype, only: torch.dtype | None = None) -> Any:
    """`value` with its floating-point tensors, or those of the dtype `only`, in `dtype`."""
    if isinstance(value, Tensor):
        meant = value.is_floating_point() if only is None else value.dtype == only
        return value.to(dtype) if meant else value
    if isinstance(value, dict):
        return type(value)({key: _cast(item, dtype, only) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_cast(item, dtype, only) for item in value)
    return value


def _exchange(optimizer: Optimizer, others: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Let `optimizer` work on the values of `others` in place of the keys, with the same states."""
    for group in optimizer.param_groups:
        group["params"] = [others.get(p, p) for p in group["params"]]
    for old, new in others.items():
        if old in optimizer.state:
            state = optimizer.state.pop(old)
            optimizer.state[new] = {
                name: value.to(new.dtype) if _is_like(value, new) and name != "step" else value
                for name, value in state.items()
            }


def _is_like(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == param.shape


def _tensor_float32(allowed: bool) -> Callable[[], None]:
    """Matrix products and convolutions in TensorFloat-32, or not; these are process-wide switches.

    torch has an old set of them and a new one. It refuses to tell an old one while a new one says
    otherwise, and takes the new ones that are not set from `torch.backends.fp32_precision`. So both
    are set, to the same; and to tell the old ones they are asked under either setting of the new."""
    backends: Any = torch.backends
    new = backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn
    found = [switch.fp32_precision for switch in new]
    products: str | None = None
    convolutions: bool | None = None

    def switch(products: str | None, convolutions: bool | None, values: Sequence[str]) -> None:
        if products is not None:
            torch.set_float32_matmul_precision(products)
        if convolutions is not None:
            backends.cudnn.allow_tf32 = convolutions
        for one, value in zip(new, values, strict=True):
            one.fp32_precision = value

    for value in ("ieee", "tf32"):
        switch(None, None, [value] * len(new))
        with suppress(RuntimeError):
            products = torch.get_float32_matmul_precision()
        with suppress(RuntimeError):
            convolutions = backends.cudnn.allow_tf32
    switch("high" if allowed else "highest", allowed, ["tf32" if allowed else "ieee"] * len(new))
    return lambda: switch(products, convolutions, found)


def _float8(model: nn.Module) -> Callable[[], None]:
    """Linear layers in float8 by torchao, where both their sides are multiples of 16 as the kernel
    demands. The layers that come back share the parameters, so undoing is putting the old ones back."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def fits(module: nn.Module, _name: str) -> bool:
        return (
            isinstance(module, nn.Linear)
            and module.in_features % 16 == 0
            and module.out_features % 16 == 0
        )

    linears = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    # The rows of a micro-batch, of any number, are the inner side of a product in backward.
    config = Float8LinearConfig(pad_inner_dim=True)
    convert_to_float8_training(model, config=config, module_filter_fn=fits)

    def undo() -> None:
        for name, linear in linears.items():
            model.set_submodule(name, linear)

    return undo

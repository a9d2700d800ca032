"""Precision: a table of number formats, and the code that applies each of them to a model.

Autocast and GradScaler are torch's. Half-precision weights run under autocast too, since it knows
which operations to keep in float32; only their master copies are managed here.
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
from torch.nn.utils.parametrizations import _Orthogonal
from torch.optim import Optimizer

from anybatch.compute.dtensor import is_dtensor
from anybatch.compute.ghost_norm import is_spectral_norm
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
        compute: dtype of autocast, or None to disable it.
        weights: dtype of the weights, or None to leave them unchanged.
        masters: whether norms stay in float32 and the optimizer updates float32 copies of the weights.
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
    """Applies a precision to one model on one device, from construction until `undo`.

    Attributes:
        scaler: torch's GradScaler, or None.
        gradient_factor: power of two by which the sum of losses is multiplied before backward, so
            that gradients, which are sums over the global batch, stay in the range of a mean: the range
            of float16 is small. If the total weight is exactly the inverse of this factor, the scaled
            sums are the mean, which saves a pass over all gradients.
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
            # A model that is sharded over ranks keeps its own masters: see `parallel.Shard`.
            divided = any(is_dtensor(p) for p in model.parameters())
            if self._format.weights is not None and not (divided and self._format.masters):
                self._halve(self._format.weights)
        except BaseException:
            self.undo()
            raise

    def expect(self, global_batch: int) -> None:
        """Set `gradient_factor` for steps of `global_batch` samples. Called between two steps."""
        self.gradient_factor: float = 2.0 ** -((global_batch - 1).bit_length())

    def region(self) -> AbstractContextManager[Any]:
        """Context manager in which the forward pass runs: autocast, if the precision uses it."""
        if self._format.compute is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._format.compute)

    def adopt(self, optimizer: Optimizer) -> None:
        """Make `optimizer` update the float32 masters instead of the half-precision weights. Its states
        get the dtype of the parameters that it updates."""
        masters = {param: self._masters.get(param, param) for param in self._halved}
        _exchange(optimizer, masters)
        # Undone last, when the weights have their original dtype again.
        self._undo.insert(0, partial(_exchange, optimizer, {m: p for p, m in masters.items()}))

    @property
    def is_halved(self) -> bool:
        """Whether this object has converted parameters to half precision."""
        return bool(self._halved)

    def leaves(self) -> dict[nn.Parameter, nn.Parameter]:
        """Map each master to the parameter whose gradient is accumulated into it."""
        return {master: param for param, master in self._masters.items()}

    def publish(self) -> None:
        """Copy the masters to the weights of the model, after an update."""
        if self._masters:
            with torch.no_grad():
                torch._foreach_copy_(list(self._masters), list(self._masters.values()))

    @torch.no_grad()
    def take_edits(self) -> None:
        """Copy external changes of weights (loading, clamping) to their masters, since the next update
        would otherwise undo them. Called between two steps. Does not synchronize with the device, and
        does not change masters of weights that are as published."""
        for param, master in self._masters.items():
            edited = param != master.to(param.dtype)
            master.copy_(torch.where(edited, param.to(master.dtype), master))

    def undo(self) -> None:
        """Restore the original dtypes of the model, with the values of the masters where they exist."""
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
        # Cast from the master, so that rounding is the same as in `publish`.
        param.data = (param if copy is None else copy).data.to(dtype)


def _check_halvable(model: nn.Module, precision: Precision, keep: bool) -> None:
    """Raises `InputError` if a part of `model` cannot compute with weights in half precision. `keep`:
    whether buffers keep their dtype."""
    format = "bf16" if precision.startswith("bf16") else "fp16"
    for name, module in model.named_modules():
        why = None
        if keep and is_spectral_norm(module):
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
    """Raises `InputError` if `precision` is not available on `device`, and names what is missing."""
    if precision == "fp8":
        other = "fp16" if device.kind == "cuda" and not device.has("bf16") else "bf16"
        _check_has("fp8", device, "8.9", other)
        if importlib.util.find_spec("torchao") is None:
            raise InputError("precision fp8 needs torchao: pip install torchao, or use bf16.")
    if precision == "tf32":
        _check_has("tf32", device, "8.0", "fp32")


def precision_notices(precision: Precision, device: Device) -> Iterator[str]:
    """Yield notices if `device` supports `precision`, but not efficiently."""
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
    """Return a hook that adds a half-precision gradient to that of its master in float32, and drops it:
    accumulating micro-batches in half precision would lose small gradients."""

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
    """Cast float64 inputs of `model` to float32, since autocast does not cast float64, which cannot be
    combined with half-precision weights. Returns a function that undoes this."""

    def narrowed(_module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _cast(args, torch.float32, torch.float64), _cast(
            kwargs, torch.float32, torch.float64
        )

    return model.register_forward_pre_hook(narrowed, with_kwargs=True).remove


def _casting_io(model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Cast the inputs of a purely half-precision model to its dtype, and its outputs to float32, in
    which losses are computed. Returns a function that undoes this."""
    before = model.register_forward_pre_hook(
        lambda _module, args, kwargs: (_cast(args, dtype), _cast(kwargs, dtype)), with_kwargs=True
    )
    after = model.register_forward_hook(lambda _module, _args, output: _cast(output, torch.float32))

    def undo() -> None:
        before.remove()
        after.remove()

    return undo


def _cast(value: Any, dtype: torch.dtype, only: torch.dtype | None = None) -> Any:
    """Cast the floating-point tensors in `value`, or only those with the dtype `only`, to `dtype`."""
    if isinstance(value, Tensor):
        meant = value.is_floating_point() if only is None else value.dtype == only
        return value.to(dtype) if meant else value
    if isinstance(value, dict):
        return type(value)({key: _cast(item, dtype, only) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_cast(item, dtype, only) for item in value)
    return value


def _exchange(optimizer: Optimizer, others: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace the keys of `others` by their values in `optimizer`, and cast their states."""
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
    """Enable or disable TensorFloat-32 for matrix products and convolutions. The switches are
    process-wide. Returns a function that restores them.

    torch has an old set of switches and a new one. Reading an old switch raises an error while a new
    one disagrees with it, and new switches that are not set follow `torch.backends.fp32_precision`. So
    both sets get the same value, and the old switches are read under either setting of the new ones."""
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
    """Convert linear layers to float8 with torchao, if both dimensions are multiples of 16, as the
    kernel requires. Parameters are shared, so the returned function puts the original layers back."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def fits(module: nn.Module, _name: str) -> bool:
        return (
            isinstance(module, nn.Linear)
            and module.in_features % 16 == 0
            and module.out_features % 16 == 0
        )

    linears = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    # In backward, the arbitrary number of rows of a micro-batch is the inner dimension of a product.
    config = Float8LinearConfig(pad_inner_dim=True)
    convert_to_float8_training(model, config=config, module_filter_fn=fits)

    def undo() -> None:
        for name, linear in linears.items():
            model.set_submodule(name, linear)

    return undo

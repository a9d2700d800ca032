"""Memory that kernels take beyond their arguments and results, which a trace does not see.

On a CPU only what follows from the semantics of torch's operators is counted; what oneDNN and MKL keep
is not, since a plan for a CPU that is here is rehearsed. CUDA's rules are in `cuda_kernels`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anybatch.errors import InputError
from anybatch.machine import cpu_computes_in

_aten: Any = torch.ops.aten
_LSTM = _aten.mkldnn_rnn_layer.default
CTC_BACKWARD = (_aten._ctc_loss_backward.default, _aten._ctc_loss_backward.Tensor)
_CONTIGUOUS = {  # operation -> which of its arguments it reads as contiguous
    _aten.native_layer_norm.default: (0,),
    _aten.native_layer_norm_backward.default: (0, 1),
    _aten.native_group_norm.default: (0,),
    _aten.native_group_norm_backward.default: (0, 1),
    _aten._softmax.default: (0,),
    _aten._softmax_backward_data.default: (0, 1),
    _aten._log_softmax.default: (0,),
    _aten._log_softmax_backward_data.default: (0, 1),
}
_PROMOTING = {
    packet.Tensor for packet in (_aten.add, _aten.sub, _aten.mul, _aten.div, _aten.add_, _aten.mul_)
} | {_aten.where.self}
_HALF = (torch.bfloat16, torch.float16)


class Scratch(int):
    """Bytes that a rule computes from sizes, so that they can be interpolated between two batches
    though they do not grow linearly.

    Attributes:
        rule: makes the bytes of the sizes.
        sizes: whole numbers.
    """

    rule: Callable[..., int]
    sizes: tuple[int, ...]

    def __new__(cls, rule: Callable[..., int], *sizes: int) -> Scratch:
        """`rule(*sizes)`."""
        made = super().__new__(cls, rule(*sizes))
        made.rule, made.sizes = rule, sizes
        return made

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """A copy, and what is stored, is the number alone."""
        return int, (int(self),)

    def between(self, other: int, part: float) -> int:
        """Bytes for the sizes between these (`part` 0) and those of `other` (1), or beyond them."""
        if isinstance(other, Scratch) and (self.rule, len(self.sizes)) == (
            other.rule,
            len(other.sizes),
        ):
            sizes = [
                round(a + (b - a) * part) for a, b in zip(self.sizes, other.sizes, strict=True)
            ]
            return self.rule(*sizes)
        return max(0, round(self + (other - self) * part))


class Kernels(ABC):
    """Memory of the kernels of one kind of device."""

    @abstractmethod
    def scratch(self, op: Any, args: tuple[Any, ...], result: Any) -> int:
        """Bytes that `op` takes and gives back while it runs; a `Scratch` where they are not in
        proportion to the batch."""

    def copies(self, op: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Bytes of each copy of an argument that `op` makes before its result and frees after it, in
        addition to its scratch."""
        return ()

    def workspace(self, op: Any, args: tuple[Any, ...], result: Any) -> tuple[Tensor, int] | None:
        """A result whose shape does not tell its bytes, and those bytes."""
        return None


class CpuKernels(Kernels):
    """Copies that torch's own operators make on a CPU, by their semantics."""

    def scratch(self, op: Any, args: tuple[Any, ...], result: Any) -> int:
        """See `Kernels`."""
        if op in _PROMOTING:
            return _promoted_bytes(args, result)
        if op in _CONTIGUOUS:
            return sum(_bytes(args[i]) for i in _CONTIGUOUS[op] if not args[i].is_contiguous())
        if op in CTC_BACKWARD:
            return _bytes(args[6])  # the backward variables, as large as the saved forward ones
        return 0

    def workspace(self, op: Any, args: tuple[Any, ...], result: Any) -> tuple[Tensor, int] | None:
        """See `Kernels`: an LSTM saves four gates and a cell of each step for backward."""
        if op is not _LSTM:
            return None
        inputs, recurrent = args[0], args[2]
        if inputs.dtype in _HALF and not cpu_computes_in(inputs.dtype):
            name = str(inputs.dtype).removeprefix("torch.")
            raise InputError(
                f"the model has an LSTM, which torch computes in {name} under autocast by oneDNN alone,"
                f" and oneDNN only on CPUs with instructions for {name}, of which this is none: use"
                " precision fp32."
            )
        gates = inputs.size(0) * inputs.size(1) * recurrent.size(0) * inputs.element_size()
        return result[3], gates + gates // 4


def _promoted_bytes(args: tuple[Any, ...], result: Tensor) -> int:
    """Copies of the operands that do not have the common dtype; scalars are converted on the way."""
    operands = [a for a in args if isinstance(a, Tensor) and a.dim() and a.dtype != torch.bool]
    common = result.dtype
    for operand in operands:
        common = _common(common, operand.dtype)
    return sum(a.numel() * common.itemsize for a in operands if a.dtype != common)


@functools.cache  # while a step is traced, torch's takes 0.3 ms: it goes through the tracer
def _common(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return torch.promote_types(one, other)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

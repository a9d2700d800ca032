"""Updates that are compiled: what they take and move, by rule, since a trace sees them uncompiled.

The rules are those of torchao 0.18 and torch 2.13 on x86: what the process held at the peak of an
update of 8 million values, and after the compilation for one more shape.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from anybatch.compute.low_bit_optimizers import parts_of
from anybatch.task import parameters_in


@dataclass(frozen=True, slots=True)
class _Rule:
    """Of one format of states.

    Attributes:
        scratch_bytes: stored in between, for each value of a parameter.
        passes: how often the update could read and write what it does in the time that it takes on a
            CPU, which searches for each value's code in a table.
    """

    scratch_bytes: int
    passes: float


_RULES = {"8bit": _Rule(8, 5.0), "4bit": _Rule(26, 10.0), "Fp8": _Rule(0, 2.5)}
"""By the end of the optimizer's name."""

_KERNEL_BYTES = 5 << 19
"""What the process keeps of a compiled kernel, of which there is one for each shape."""

_HOLE_BYTES = 32 << 20
"""What compilers leave free in the heap, and tensors come to lie in: 0 to 45 MiB from run to run."""


def _rule(optimizer: Optimizer) -> _Rule:
    name = type(optimizer).__name__
    return next((rule for end, rule in _RULES.items() if name.endswith(end)), _RULES["4bit"])


def scratch_bytes(optimizer: Optimizer) -> int:
    """What a compiled update stores besides states at its peak: parameters are updated one by one."""
    sizes = [param.numel() for param in parameters_in(optimizer.param_groups)]
    return _rule(optimizer).scratch_bytes * max(sizes, default=0)


def kernel_bytes(optimizer: Optimizer) -> int:
    """What stays in host memory of its compilation."""
    parameters = parameters_in(optimizer.param_groups)
    return _HOLE_BYTES + _KERNEL_BYTES * len({(p.shape, p.dtype) for p in parameters})


def moved_bytes(optimizer: Optimizer, kind: str) -> dict[Tensor, float]:
    """Bytes that the update of each parameter reads and writes on a device of `kind`: the gradient
    once, the others twice."""
    times = _rule(optimizer).passes if kind == "cpu" else 1.0
    return {
        param: times * (3.0 * param.nbytes + 2.0 * sum(map(_num_bytes, state.values())))
        for param, state in optimizer.state.items()
    }


def _num_bytes(value: object) -> int:
    if not isinstance(value, Tensor):
        return 0
    return sum(part.nbytes for part in parts_of(value).values())

"""Updates that are compiled: their scratch and the bytes that they move, since a trace sees them
uncompiled."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from anybatch.compute.low_bit_optimizers import parts_of
from anybatch.task import parameters_in

_STATES_IN_FLOAT32 = 2 * 4
"""Bytes for each value of a parameter: both of its states, in the precision that is computed in."""


def scratch_bytes(optimizer: Optimizer) -> int:
    """What a compiled update stores besides states at most: parameters are updated one by one."""
    sizes = [param.numel() for param in parameters_in(optimizer.param_groups)]
    return _STATES_IN_FLOAT32 * max(sizes, default=0)


def moved_bytes(optimizer: Optimizer) -> dict[Tensor, float]:
    """Bytes that the update of each parameter reads and writes: the gradient once, the others twice."""
    return {
        param: 3.0 * param.nbytes + 2.0 * sum(map(_num_bytes, state.values()))
        for param, state in optimizer.state.items()
    }


def _num_bytes(value: object) -> int:
    if not isinstance(value, Tensor):
        return 0
    return sum(part.nbytes for part in parts_of(value).values())

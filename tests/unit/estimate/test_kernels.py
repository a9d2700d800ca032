"""Memory of kernels beyond tensors, by the rules of the estimate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from anybatch.errors import InputError
from anybatch.estimate import kernels as rules
from anybatch.estimate.kernels import CpuKernels

_aten = torch.ops.aten


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(*shape, dtype=dtype)


@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_a_softmax_copies_what_does_not_lie_in_a_row(name: str):
    kernels, turned, straight = CpuKernels(), fake(64, 32).t(), fake(32, 64)
    forward, backward = (getattr(_aten, name + way).default for way in ("", "_backward_data"))
    assert kernels.scratch(forward, (turned, 1, False), turned) == turned.nbytes
    assert kernels.scratch(forward, (straight, 1, False), straight) == 0
    both = (turned, turned, 1, torch.float32)
    assert kernels.scratch(backward, both, straight) == 2 * turned.nbytes


def test_operands_of_two_dtypes_are_copied_to_the_common_one():
    wide, half = fake(64, 32), fake(64, 32, dtype=torch.bfloat16)
    kernels = CpuKernels()
    assert kernels.scratch(_aten.add.Tensor, (wide, half), wide) == 64 * 32 * 4
    assert kernels.scratch(_aten.add.Tensor, (half, half), half) == 0
    assert kernels.scratch(_aten.mul.Tensor, (wide, torch.tensor(2.0).double()), wide) == 0


def lstm(dtype: torch.dtype) -> tuple[Tensor, int]:
    """What the LSTM of five steps of three samples, of width 16, saves for backward."""
    inputs, weight, recurrent = (fake(*s, dtype=dtype) for s in ((5, 3, 8), (64, 8), (64, 16)))
    saved = fake(0, dtype=dtype)
    args = (inputs, weight, recurrent)
    found = CpuKernels().workspace(_aten.mkldnn_rnn_layer.default, args, (None, None, None, saved))
    assert found is not None
    assert found[0] is saved
    return found


def test_an_lstm_saves_four_gates_and_a_cell_of_each_step():
    assert lstm(torch.float32)[1] == 5 * 3 * (4 + 1) * 16 * 4


@pytest.mark.parametrize("has_instructions", [False, True])
def test_an_lstm_in_half_precision_that_torch_has_not_is_refused(
    has_instructions: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rules, "cpu_computes_in", lambda dtype: has_instructions)
    if has_instructions:
        assert lstm(torch.bfloat16)[1] == 5 * 3 * (4 + 1) * 16 * 2
        return
    with pytest.raises(InputError, match=r"LSTM.*bfloat16.*use precision fp32"):
        lstm(torch.bfloat16)

"""Memory of kernels beyond tensors, by the rules of the estimate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from anybatch.errors import InputError
from anybatch.estimate import kernels as rules
from anybatch.estimate.kernels import Kernels

_aten = torch.ops.aten


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(*shape, dtype=dtype)


def lstm(dtype: torch.dtype) -> tuple[Tensor, int]:
    """What the LSTM of five steps of three samples, of width 16, saves for backward."""
    inputs, weight, recurrent = (fake(*s, dtype=dtype) for s in ((5, 3, 8), (64, 8), (64, 16)))
    saved = fake(0, dtype=dtype)
    args = (inputs, weight, recurrent)
    found = Kernels().workspace(_aten.mkldnn_rnn_layer.default, args, (None, None, None, saved))
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

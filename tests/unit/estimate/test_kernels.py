"""Memory of kernels beyond tensors, by the rules of the estimate."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from anybatch.errors import InputError
from anybatch.estimate import kernels as rules
from anybatch.estimate.cuda_kernels import CudaKernels
from anybatch.estimate.kernels import CpuKernels, Scratch

_aten = torch.ops.aten
LAST = torch.channels_last


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


def laid(last: bool, *shape: int) -> Tensor:
    empty = fake(*shape)
    return empty.contiguous(memory_format=LAST) if last else empty


@pytest.mark.parametrize(
    ("image_last", "gradient_last", "forward", "backward"),
    [(False, False, 0, 0), (True, True, 1, 0), (True, False, 1, 64), (False, True, 0, 64)],
)
def test_on_cuda_weights_and_gradients_are_laid_out_as_images_are(
    image_last: bool, gradient_last: bool, forward: int, backward: int
):
    kernels, some = CudaKernels(1 << 17), ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    image, weight = laid(image_last, 256, 32, 32, 32), fake(512, 32, 4, 4)  # of 1 MiB
    gradient = laid(gradient_last, 128, 128, 32, 32)  # of 64

    def taken(op: Any, *args: Any) -> int:
        return kernels.scratch(op, args, None) + sum(kernels.copies(op, args))

    assert taken(_aten.convolution.default, image, weight, None, *some) == forward << 20
    args = (_aten.convolution_backward.default, gradient, image, weight, None, *some)
    assert taken(*args, [True, True, False]) == backward << 20
    # The copy of a weight is gone when its gradient is made, if there is one.
    assert taken(*args, [True, False, False]) == (backward + forward) << 20


@pytest.mark.parametrize("last", [False, True])
def test_on_cuda_pooling_backward_copies_its_gradient_where_layouts_differ(last: bool):
    image, gradient = laid(True, 8, 32, 32, 32), laid(last, 8, 32, 16, 16)
    args = (gradient, image, [2, 2], [2, 2], [0, 0], [1, 1], False, fake(8, 32, 16, 16))
    backward = _aten.max_pool2d_with_indices_backward.default
    assert CudaKernels(1 << 17).scratch(backward, args, image) == (0 if last else gradient.nbytes)


def test_a_number_by_a_rule_is_copied_as_the_number():
    made = Scratch(lambda rows: 4 * rows, 3)
    copied = copy.deepcopy({"bytes": made})["bytes"]
    assert type(copied) is int
    assert copied == made == 12

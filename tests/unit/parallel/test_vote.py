"""What ranks tell each other: tensors of any dtype and layout, and errors by their right name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from anybatch.errors import PeerLost
from anybatch.parallel.vote import calling, same_weights


class Odd(nn.Module):
    """Buffers that not every backend carries as they are."""

    def __init__(self, scale: int):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3) * scale)
        rows = torch.arange(6).view(2, 3) * scale
        for name, value in {
            "short": rows.to(torch.int16),
            "turned": rows.double().T,
            "expanded": torch.tensor([[scale]]).expand(4, 3),
            "flags": rows > 3,
            "complex": torch.complex(rows.float(), -rows.float()),
            "none": torch.empty(0, 3),
            "scalar": torch.tensor(scale),
            "bf16": rows.to(torch.bfloat16),
        }.items():
            self.register_buffer(name, value)


def taken_over(rank, size):
    model = Odd(rank + 1)
    same_weights(model)
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_every_rank_has_the_weights_of_rank_0_whatever_their_dtype_and_layout(crew):
    expected = Odd(1).state_dict()
    for state in crew(2, taken_over):
        for name, value in expected.items():
            assert state[name].dtype == value.dtype
            assert torch.equal(state[name], value), name


def test_an_error_of_this_device_is_no_lost_rank():
    with pytest.raises(torch.AcceleratorError), calling("in a vote"):
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")
    with pytest.raises(PeerLost, match="did not answer in a vote"), calling("in a vote"):
        raise RuntimeError("Connection closed by peer")

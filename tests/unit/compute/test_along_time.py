"""Recurrent layers that are recomputed are cut along time: the same gradients in less memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.compute.along_time import is_cut_along_time
from anybatch.compute.blocks import find_recomputable
from anybatch.compute.recompute import install
from anybatch.plans import Recompute

LAYERS: dict[str, Callable[[], nn.RNNBase]] = {
    "LSTM": lambda: nn.LSTM(3, 5, num_layers=2),
    "LSTM, batch first, projected": lambda: nn.LSTM(3, 5, batch_first=True, proj_size=2),
    "GRU": lambda: nn.GRU(3, 5, batch_first=True),
    "RNN": lambda: nn.RNN(3, 5),
    "GRU that reads backwards, too": lambda: nn.GRU(3, 5, bidirectional=True),
}


def gradients(
    layer: nn.RNNBase, given: Tensor | PackedSequence, state: object = None
) -> list[Tensor]:
    output, last = layer(given) if state is None else layer(given, hx=state)
    values = output.data if isinstance(output, PackedSequence) else output
    states = last if isinstance(last, tuple) else (last,)
    total = values.square().sum() + sum(one.sum() for one in states)
    layer.zero_grad()
    total.backward()
    return [total.detach(), *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("shape", [(23, 4, 3), (1, 4, 3), (23, 3)])
def test_pieces_have_the_gradients_of_the_whole(name: str, shape: tuple[int, ...]):
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    given = torch.randn(shape, dtype=torch.float64)
    plain = gradients(layer, given)
    undo = install(layer, Recompute(blocks=(".",)))
    try:
        for one, other in zip(gradients(layer, given), plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    finally:
        undo()


def test_a_first_state_and_packed_sequences_are_taken():
    torch.manual_seed(0)
    layer = nn.GRU(3, 5).double()
    given = torch.randn(9, 2, 3, dtype=torch.float64)
    state = torch.randn(1, 2, 5, dtype=torch.float64)
    packed = pack_padded_sequence(given, torch.tensor([9, 4]))
    plain = gradients(layer, given, state), gradients(layer, packed)
    undo = install(layer, Recompute(blocks=(".",)))
    try:
        found = gradients(layer, given, state), gradients(layer, packed)
    finally:
        undo()
    for run, expected in zip(found, plain, strict=True):
        for one, other in zip(run, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_only_what_pieces_can_compute_is_cut():
    assert is_cut_along_time(nn.LSTM(3, 5, num_layers=2))
    assert not is_cut_along_time(nn.LSTM(3, 5, num_layers=2, dropout=0.1))
    assert not is_cut_along_time(nn.GRU(3, 5, bidirectional=True))
    assert not is_cut_along_time(nn.Linear(3, 5))
    model = nn.ModuleDict({"encoder": nn.LSTM(3, 5), "head": nn.Linear(5, 1)})
    assert find_recomputable(model) == ["encoder"]


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(2, 64, batch_first=True), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


@pytest.mark.slow
def test_long_sequences_are_planned_into_a_budget_that_does_not_hold_one_whole():
    draw = torch.Generator().manual_seed(0)
    task = ab.Task(
        model=Last,
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=TensorDataset(
            torch.randn(4, 8192, 2, generator=draw), torch.randn(4, 1, generator=draw)
        ),
        global_batch=4,
        steps=1,
    )
    machine = ab.Machine.here()
    peaks = {
        way: ab.plan(task, machine, micro_batch=1, recompute=way).prediction
        for way in ("none", "all")
    }
    assert peaks["none"] is not None
    assert peaks["all"] is not None
    needed = peaks["none"].peak_bytes
    assert peaks["all"].peak_bytes < needed / 3
    found = ab.plan(task, machine, memory=needed * 3 // 4)
    assert found.choice.recompute.blocks == ("rnn",)

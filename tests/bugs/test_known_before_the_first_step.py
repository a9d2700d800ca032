"""What ended a run late, or in words of torch's, though it could be known or done.

Symptoms (0.1): a loss with a gradient in it (forces from an energy) failed at the first evaluation,
after a whole epoch; a complex128 model with `out` failed when its weights were written, in the end;
`verify` of a complex model ended in a mismatch of dtypes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.errors import InputError

DRAW = torch.Generator().manual_seed(2)
X = torch.randn(12, 8, generator=DRAW)
Y = torch.randn(12, 1, generator=DRAW)


def _forces(model, batch):
    x = batch[0].detach().requires_grad_()
    energy = model(x)
    (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return ab.Loss((energy - batch[1]).square().sum() + force.square().sum(), len(x))


def _task(model, loss, **changes):
    return ab.Task(
        model=model,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        train=TensorDataset(X, Y),
        global_batch=12,
        shuffle=False,
        epochs=2,
        **changes,
    )


def test_held_out_samples_are_evaluated_by_a_loss_with_a_gradient_in_it():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    by_hand = build()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        (_forces(by_hand, (X, Y)).sum / 12).backward()
        optimizer.step()
    want = float(_forces(by_hand, (X, Y)).sum.detach() / 12)
    events: list[object] = []
    task = _task(build, _forces, valid=TensorDataset(X, Y))
    ab.train(task, progress=False, micro_batch=5, sinks=[events.append])
    last = [event for event in events if isinstance(event, ab.events.Evaluated)][-1]
    assert last.loss == pytest.approx(want, rel=1e-4)


class Spectral(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.full((5,), 0.3 + 0.1j, dtype=dtype))
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        return self.out(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=8).to(x.dtype))


def _squares(model, batch):
    return ab.Loss((model(batch[0]) - batch[1]).square().sum(), len(batch[0]))


def test_weights_that_cannot_be_written_are_named_before_the_first_step(tmp_path: Path):
    events: list[object] = []
    task = _task(lambda: Spectral(torch.complex128), _squares)
    with pytest.raises(InputError, match="'weight' of the model is of complex128, which a file"):
        ab.train(task, progress=False, out=tmp_path / "run", sinks=[events.append])
    assert not any(isinstance(event, ab.events.StepDone) for event in events)


def test_a_complex_model_is_verified():
    task = _task(lambda: Spectral(torch.complex64), _squares)
    verdict = ab.verify(task, ab.plan(task, micro_batch=5))
    assert verdict.exact, verdict.causes

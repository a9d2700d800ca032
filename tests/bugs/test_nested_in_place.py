"""Nested recompute of a chain with layers that work in place.

Symptom (0.1): `Recompute(blocks=("body",), nested=True)` on a sequence of convolution, BatchNorm and
`ReLU(inplace=True)` raised "one of the variables needed for gradient computation has been modified by
an inplace operation".

Mechanism: the tree cut the chain right before the ReLU, so the input that a checkpoint kept, to run
the ReLU again, was overwritten by its first run. Now no cut lies there, and in-place layers at the
beginning of the chain, whose input is somebody else's, are run outside the tree.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from anybatch.compute import recompute
from anybatch.plans import Recompute

CHAINS = {
    "conv, norm, relu": lambda: [nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(True)],
    "relu last of two": lambda: [nn.BatchNorm2d(3), nn.ReLU(True)],
    "several in a row": lambda: [
        nn.Conv2d(3, 3, 1),
        nn.ReLU(True),
        nn.Conv2d(3, 3, 1),
        nn.BatchNorm2d(3),
        nn.SiLU(inplace=True),
    ],
    "first": lambda: [nn.ReLU(True), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(True)],
    "only": lambda: [nn.ReLU(True)],
    "inside": lambda: [
        nn.Conv2d(3, 3, 1),
        nn.Sequential(nn.ReLU(True), nn.Conv2d(3, 3, 1)),
        nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(True)),
    ],
}


class Residual(nn.Module):
    """Looks at the input of its chain again after the chain, which may have written to it."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.before = nn.Conv2d(3, 3, 1)
        self.body = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return self.body(x) + x


@pytest.mark.parametrize("name", CHAINS)
def test_gradients_and_buffers_are_those_of_the_plain_model(name: str):
    torch.manual_seed(0)
    plain = Residual(CHAINS[name]()).double()
    nested = copy.deepcopy(plain)
    undo = recompute.install(nested, Recompute(blocks=("body",), nested=True))
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    outputs = [model(x) for model in (plain, nested)]
    for output in outputs:
        output.square().sum().backward()
    assert torch.equal(*outputs)
    undo()
    for one, other in zip(plain.parameters(), nested.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for one, other in zip(plain.buffers(), nested.buffers(), strict=True):
        assert torch.equal(one, other)


def test_the_chain_is_still_cut_elsewhere():
    """Of a long chain little is kept: the cut before each convolution is there."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(16):
        layers += [nn.Conv2d(3, 3, 1), nn.ReLU(True)]
    kept: dict[bool, int] = {}
    for is_nested in (False, True):
        model = Residual(layers)
        undo = (
            recompute.install(model, Recompute(blocks=("body",), nested=True))
            if is_nested
            else None
        )
        sizes: list[int] = []

        def pack(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(2, 3, 8, 8))
        kept[is_nested] = sum(sizes)
        if undo:
            undo()
    assert kept[True] < kept[False] / 4

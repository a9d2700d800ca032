"""What `Shard` refuses, and which modules it gathers at a time. No training: see tests/equivalence."""

from __future__ import annotations

import pytest
import torch
from tests.crew import RankError
from tests.equivalence.decoder import Decoder
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import anybatch as ab
from anybatch.parallel.shard import Shard

CPU = torch.device("cpu")


class Scaled(nn.Module):
    """With a parameter that is a single number, as CLIP's temperature is."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))


def mixed():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64))


def sparse():
    return nn.Sequential(nn.Embedding(5, 4, sparse=True))


def prepared(rank, size, make, options):
    group = Shard((1.0,) * size, CPU, **options)
    try:
        group.prepare(make())
    finally:
        group.close()


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (Scaled, {}, "the parameter 'scale' is a single number without a dim"),
        (mixed, {}, "trainable parameters in float32 and float64"),
        (sparse, {}, "makes sparse gradients"),
        (Decoder, {"precision": "fp8"}, "cannot be trained in fp8"),
    ],
    ids=["scalar", "dtypes", "sparse", "fp8"],
)
def test_what_cannot_be_divided_is_told_in_a_sentence(crew, make, options, words):
    with pytest.raises(RankError) as caught:
        crew(2, prepared, make, options)
    assert isinstance(caught.value.error, ab.InputError)
    assert words in str(caught.value.error)


def gathered_at_a_time(rank, size, make, options):
    """Names of the modules that are gathered by themselves, and the shapes of this rank's parts."""
    torch.manual_seed(rank)
    group = Shard((1.0,) * size, CPU, **options)
    model = group.build(make)
    group.close()
    found = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    parts = {n: (p.to_local().shape, p.shape) for n, p in model.named_parameters()}
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return found, parts


def shared_inside():
    """The first block has a parameter of the root."""
    model = Decoder(depth=2)
    model.layers[0].out.bias = model.norm.bias
    return model


def plain_sequence():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("make", "options", "expected"),
    [
        (Decoder, {}, ["", "layers.0", "layers.1", "layers.2"]),
        (shared_inside, {}, ["", "layers.1"]),
        (plain_sequence, {}, ["", "0", "2"]),
    ],
    ids=["decoder", "shared parameter", "sequence"],
)
def test_what_is_gathered_at_a_time(crew, make, options, expected):
    for found, _ in crew(2, gathered_at_a_time, make, options):
        assert found == expected


def test_each_rank_keeps_its_part_of_every_parameter(crew):
    ranks = crew(3, gathered_at_a_time, Decoder, {})
    for name, (_, whole) in ranks[0][1].items():
        rows = [parts[name][0][0] for _, parts in ranks]
        assert sum(rows) == whole[0]
        assert max(rows) == -(-whole[0] // 3)

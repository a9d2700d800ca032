"""Names of blocks: found in a model, and found by name."""

import pytest
from torch import nn

from anybatch.compute import find_blocks, find_chains
from anybatch.compute.blocks import match_blocks
from anybatch.errors import InputError


def residual():
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(2, 1) for _ in range(3))
        self.head = nn.Linear(2, 3)


class Stages(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.stages = nn.Sequential(*(nn.Sequential(residual(), residual()) for _ in range(2)))


class Mixture(nn.Module):
    """Of experts, in each layer of a decoder: in a module of their own, or beside the attention."""

    def __init__(self, inside):
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(self.layer(inside) for _ in range(2))
        self.head = nn.Linear(2, 3)

    @staticmethod
    def layer(inside):
        layer = nn.Module()
        layer.attention = nn.MultiheadAttention(2, 1)
        branches = nn.ModuleList(residual() for _ in range(4))
        if inside:
            layer.mlp = nn.Module()
            layer.mlp.branches = branches
        else:
            layer.experts = branches
        return layer


class Hierarchy(nn.Module):
    """Stages of blocks, each with what joins it to the next."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(self.stage() for _ in range(2))

    @staticmethod
    def stage():
        stage = nn.Module()
        stage.blocks = nn.ModuleList(residual() for _ in range(2))
        stage.merge = residual()
        return stage


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Transformer(), ["layers.0", "layers.1", "layers.2"]),
        (Mixture(inside=True), ["decoder.layers.0", "decoder.layers.1"]),
        (Mixture(inside=False), ["decoder.layers.0", "decoder.layers.1"]),
        (
            Hierarchy(),
            [f"stages.{i}.{part}" for i in range(2) for part in ("blocks.0", "blocks.1", "merge")],
        ),
        (Stages(), ["stem", "stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]),
        (nn.Linear(2, 2), []),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []),
        (nn.Sequential(residual(), residual()), ["0", "1"]),
    ],
)
def test_blocks_are_the_parts_that_repeat(model, expected):
    assert find_blocks(model) == expected


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), ["."]),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []),
        (Transformer(), []),
        (nn.ModuleDict({"a": nn.Sequential(*(residual() for _ in range(4)))}), ["a"]),
    ],
)
def test_chains_are_the_longest_sequences(model, expected):
    assert find_chains(model) == expected


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ([], []),
        (["layers.1"], ["layers.1"]),
        (["layers.*"], ["layers.0", "layers.1", "layers.2"]),
        (["*.1"], ["layers.1"]),
        (["layers.0", "layers.0.linear1", "head"], ["layers.0", "head"]),
        (["."], ["."]),
        ([".", "head"], ["."]),
        (["layers.[02]"], ["layers.0", "layers.2"]),
        (["*.self_attn"], []),
    ],
)
def test_names_and_patterns(patterns, expected):
    if not expected and patterns:
        with pytest.raises(InputError, match="no such module"):
            match_blocks(Transformer(), patterns)
    else:
        assert list(match_blocks(Transformer(), patterns)) == expected


def test_a_name_of_nothing_is_answered_with_the_names_there_are():
    with pytest.raises(InputError, match=r"'layer\.0'.*'layers.0', 'layers.1' or 'layers.2'"):
        match_blocks(Transformer(), ["layer.0"])

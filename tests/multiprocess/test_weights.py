"""Weights between one device, several ranks and plain torch, in every direction."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import anybatch as ab

FILES = ["w.safetensors", "w.pt"]


class Net(nn.Module):
    """Sizes that no number of ranks divides; tied weights; a buffer; a dtype of its own."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 5)
        self.body = nn.Sequential(nn.Linear(5, 11), nn.BatchNorm1d(11), nn.Linear(11, 5))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.body[1].running_mean += seed

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


def sharded(seed, size):
    model = Net(seed)
    mesh = init_device_mesh("cpu", (size,))
    fully_shard(model.body[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


BUILDS = {
    "plain": lambda seed, size: Net(seed),
    "ddp": lambda seed, size: nn.parallel.DistributedDataParallel(Net(seed)),
    "sharded": sharded,
}


def whole(model):
    """The values of a model of any kind, on this rank."""
    return [
        (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone()
        for v in model.state_dict().values()
    ]


def there_and_back(rank, size, writer, reader, name, folder):
    model = BUILDS[writer](1, size)
    written = ab.save_weights(model, Path(folder) / name)
    dist.barrier()
    other = BUILDS[reader](2, size)
    before = list(other.parameters())
    ab.load_weights(other, Path(folder) / name)
    assert all(a is b for a, b in zip(before, other.parameters(), strict=True))
    equal = all(torch.equal(a, b) for a, b in zip(whole(model), whole(other), strict=True))
    with torch.no_grad():  # what was gathered for a pass before is not used any more
        output = other.eval()(torch.arange(7))
    dist.barrier()
    return str(written), equal, output


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("reader", sorted(BUILDS))
@pytest.mark.parametrize("writer", sorted(BUILDS))
def test_there_and_back(crew, tmp_path, writer, reader, name):
    ranks = crew(2, there_and_back, writer, reader, name, str(tmp_path))
    wanted = Net(1).eval()
    for written, equal, output in ranks:
        assert written == str(tmp_path / name)
        assert equal
        assert torch.allclose(output, wanted(torch.arange(7)), atol=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    # One process, in plain torch code.
    read = safetensors.torch.load_file if name == "w.safetensors" else torch.load
    state = read(tmp_path / name)
    names = Net(1).state_dict().keys()
    assert state.keys() == (names if name == "w.pt" else names - {"head.weight"})
    plain, loaded = Net(3), Net(4)
    plain.load_state_dict(state, strict=name == "w.pt")
    ab.load_weights(loaded, tmp_path / name)
    for one in (plain, loaded):
        values = zip(one.state_dict().values(), wanted.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in values)


def test_what_three_ranks_wrote_one_reads_and_two_read(crew, tmp_path):
    crew(3, there_and_back, "sharded", "sharded", "w.safetensors", str(tmp_path))
    ranks = crew(2, read_only, str(tmp_path / "w.safetensors"))
    for values in ranks:
        for mine, wanted in zip(values, Net(1).state_dict().values(), strict=True):
            assert torch.equal(mine, wanted)


def read_only(rank, size, path):
    model = sharded(5, size)
    ab.load_weights(model, path)
    return whole(model)


def each_its_own_file(rank, size, folder):
    ab.save_weights(Net(rank), Path(folder) / f"{rank}.safetensors")


def test_only_rank_0_writes(crew, tmp_path):
    crew(3, each_its_own_file, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["0.safetensors"]


def wrongly(rank, size, what, folder):
    model = sharded(1, size)
    before = whole(model)
    try:
        if what == "nowhere":
            ab.save_weights(model, Path(folder) / "missing" / "w")
        else:
            if what != "missing" and rank == 0:
                state = {} if what == "torn" else {"embed.weigth": torch.ones(7, 5)}
                torch.save(state, Path(folder) / "w")
            ab.load_weights(model, Path(folder) / "w")
    except ab.InputError as error:
        told = str(error)
    assert all(torch.equal(a, b) for a, b in zip(before, whole(model), strict=True))
    return told


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nowhere", "cannot be written"),
        ("missing", "there are no weights at"),
        ("torn", "there is no state dict in it"),
        ("another", "'embed.weigth' is not in the model"),
    ],
)
def test_a_fault_on_rank_0_is_told_on_all(crew, tmp_path, what, words):
    first, second = crew(2, wrongly, what, str(tmp_path))
    assert first == second
    assert words in first


def test_old_files_without_counters_fill_a_sharded_model(crew, tmp_path):
    state = {f"module.{n}": v for n, v in Net(1).state_dict().items() if "num_batches" not in n}
    torch.save({"state_dict": state}, tmp_path / "w")
    for values in crew(2, read_only, str(tmp_path / "w")):
        for mine, wanted in zip(values, Net(1).state_dict().values(), strict=True):
            assert torch.equal(mine, wanted)

"""Checkpoints of several ranks: saved by some number of them, loaded by another."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import anybatch.parallel as parallel
from anybatch.errors import InputError, PeerLost
from anybatch.state import Checkpoints, Content, Failed, Saved, storage


def group_of(size):
    if size == 1:
        return parallel.SingleDevice()
    return parallel.Replicate((1.0,) * size, torch.device("cpu"))


class Net(nn.Module):
    """Sizes that no number of ranks divides, one smaller than the number of ranks, tied weights."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 5)
        self.body = nn.Sequential(nn.Linear(5, 11), nn.BatchNorm1d(11), nn.Linear(11, 5))
        self.narrow = nn.Linear(5, 1)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.body[1].running_mean += seed

    def forward(self, tokens):
        hidden = self.body(self.embed(tokens))
        return self.head(hidden) + self.narrow(hidden)


def plain(seed, size):
    return Net(seed)


def sharded(seed, size):
    mesh = init_device_mesh("cpu", (size,))
    model = Net(seed)
    fully_shard(model.body[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trained(build, seed, size):
    """A model and its optimizer after a step, the same on all ranks."""
    model = build(seed, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(7)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def tensors_of(model, optimizer):
    tensors = {f"model/{name}": value for name, value in model.state_dict(keep_vars=True).items()}
    for number, state in enumerate(optimizer.state.values()):
        tensors |= {f"optimizer/{number}/{key}": value for key, value in state.items()}
    return tensors


def whole(tensors):
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in tensors.items()
    }


def saves(rank, size, folder, build, stage):
    tensors = tensors_of(*trained(build, 1, size))
    group = group_of(size)
    tensors[f"rank-{rank}.own"] = torch.tensor(rank)
    checkpoints = Checkpoints(Path(folder), group)
    checkpoints.save(Content(tensors, {"seen": 12}), 3, stage=stage)
    checkpoints.close()
    ended = checkpoints.finished()
    del tensors[f"rank-{rank}.own"]
    return [type(one).__name__ for one in ended], whole(tensors)


def loads(rank, size, folder, build):
    tensors = tensors_of(*trained(build, 2, size))
    before = {name: id(value) for name, value in tensors.items()}
    checkpoints = Checkpoints(Path(folder), group_of(size))
    found = checkpoints.newest()
    own = torch.tensor(-1)
    checkpoints.load(found, tensors if rank else {**tensors, "rank-0.own": own})
    assert before == {name: id(value) for name, value in tensors.items()}
    return found.step, found.facts, int(own), whole(tensors)


@pytest.mark.parametrize("stage", [True, False], ids=["staged", "direct"])
@pytest.mark.parametrize(
    ("wrote", "reads"),
    [
        ((1, plain), (3, sharded)),
        ((2, plain), (1, plain)),
        ((2, sharded), (1, plain)),
        ((2, sharded), (3, sharded)),
        ((3, sharded), (2, sharded)),
        ((3, sharded), (2, plain)),
    ],
    ids=lambda pair: f"{pair[0]}-{pair[1].__name__}",
)
def test_any_number_of_ranks_loads_what_another_saved(crew, tmp_path, wrote, reads, stage):
    saved = crew(wrote[0], saves, str(tmp_path / "c"), wrote[1], stage)
    assert [kinds for kinds, _ in saved] == [["Saved"]] + [[]] * (wrote[0] - 1)
    wanted = saved[0][1]
    for rank, (step, facts, own, got) in enumerate(
        crew(reads[0], loads, str(tmp_path / "c"), reads[1])
    ):
        assert (step, facts, own) == (3, {"seen": 12}, -1 if rank else 0)
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_every_rank_writes_a_share_of_what_all_have(crew, tmp_path):
    crew(2, saves, str(tmp_path / "c"), plain, True)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "c/step-00000003").glob("*.data"))]
    assert len(sizes) == 2
    assert max(sizes) < 2 * min(sizes)


# ------------------------------------------------------------------------------------------- meshes

PLACEMENTS = {
    "rows": [Shard(0), Replicate()],
    "columns": [Replicate(), Shard(1)],
    "both": [Shard(0), Shard(1)],
    "last dim": [Shard(2), Replicate()],
    "one dim twice": [Shard(0), Shard(0)],
}
VALUE = torch.arange(6 * 5 * 3, dtype=torch.float32).view(6, 5, 3)


def crosses(rank, size, folder, saved):
    mesh = init_device_mesh("cpu", (2, 2))
    checkpoints = Checkpoints(Path(folder), group_of(size))
    checkpoints.save(Content({"x": distribute_tensor(VALUE, mesh, PLACEMENTS[saved])}), 0)
    checkpoints.wait()
    found = checkpoints.newest()
    equal = []
    for placements in PLACEMENTS.values():
        target = distribute_tensor(torch.zeros_like(VALUE), mesh, placements)
        checkpoints.load(found, {"x": target})
        equal.append(torch.equal(target.full_tensor(), VALUE))
    return equal


@pytest.mark.parametrize("saved", sorted(PLACEMENTS))
def test_tensors_cut_along_two_axes(crew, tmp_path, saved):
    ranks = crew(4, crosses, str(tmp_path), saved)
    assert ranks == [[True] * len(PLACEMENTS)] * 4


def shards_in_two_dims(rank, size, folder):
    """Tensor parallel inside, FSDP outside: torch cuts one dim twice, in an order of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def build(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        return fully_shard(model, mesh=mesh["dp"])

    checkpoints = Checkpoints(Path(folder), group_of(size))
    first = build(0)
    checkpoints.save(Content(dict(first.named_parameters())), 0)
    checkpoints.wait()
    second = build(1)
    checkpoints.load(checkpoints.newest(), dict(second.named_parameters()))
    same = all(
        torch.equal(a.full_tensor(), b.full_tensor())
        for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    return same, whole(dict(first.named_parameters()))


def test_tensor_parallel_inside_fsdp(crew, tmp_path):
    ranks = crew(4, shards_in_two_dims, str(tmp_path))
    assert all(same for same, _ in ranks)
    checkpoints = Checkpoints(tmp_path, parallel.SingleDevice())
    alone = {name: torch.zeros_like(value) for name, value in ranks[0][1].items()}
    checkpoints.load(checkpoints.newest(), alone)
    assert all(torch.equal(alone[name], value) for name, value in ranks[0][1].items())


# ----------------------------------------------------------------------------------------- failures


def one_cannot(rank, size, folder):
    """Three saves: rank 1 has something that cannot be saved, then its disk fails, then all is well."""
    checkpoints = Checkpoints(Path(folder), group_of(size))
    good = {"x": torch.full((50,), 7.0)}
    bad = {**good, "rank-1.y": torch.eye(3).to_sparse()} if rank else good
    checkpoints.save(Content(bad), 1)
    write = storage.write_part
    if rank:

        def full_disk(*args, **kwargs):
            raise OSError(28, "No space left on device")

        storage.write_part = full_disk
    try:
        for stage, step in ((True, 2), (False, 3)):
            checkpoints.save(Content(good), step, stage=stage)
        checkpoints.wait()
    finally:
        storage.write_part = write
    checkpoints.save(Content(good), 4)
    checkpoints.wait()
    found = checkpoints.newest()
    checkpoints.close()
    return checkpoints.finished(), found.step


def test_what_fails_on_one_rank_is_told_by_rank_0_and_the_next_save_works(crew, tmp_path):
    (first, step), (second, _) = crew(2, one_cannot, str(tmp_path / "c"))
    assert [type(one) for one in first] == [Failed, Failed, Failed, Saved]
    assert second == []
    assert "rank 1: 'rank-1.y' has the layout torch.sparse_coo" in first[0].reason
    assert "rank 1: No space left on device" in first[1].reason
    assert "rank 1: No space left on device" in first[2].reason
    assert step == 4
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [".lock", "step-00000004"]


def own_folder(rank, size, folder):
    before = storage.UNSEEN_SECONDS, storage.UNSEEN_AGAIN_SECONDS, storage._await_folder
    storage.UNSEEN_SECONDS, storage.UNSEEN_AGAIN_SECONDS = 0.1, 0.05
    waited = []

    def awaited(partial, rank, seconds):
        waited.append(seconds)
        before[2](partial, rank, seconds)

    storage._await_folder = awaited
    mine = Path(folder) / f"{rank}"
    (mine / "c").mkdir(parents=True)
    checkpoints = Checkpoints(mine / "c", group_of(size))
    try:
        for stage in (True, False):
            checkpoints.save(Content({"x": torch.ones(3)}), 1, stage=stage)
        if rank == 0:
            Checkpoints(mine / "c", parallel.SingleDevice()).save(Content({}), 2, stage=False)
        with pytest.raises(InputError) as none:
            checkpoints.newest()
    finally:
        storage.UNSEEN_SECONDS, storage.UNSEEN_AGAIN_SECONDS, storage._await_folder = before
    return [one.reason for one in checkpoints.finished()], str(none.value), waited


def test_a_folder_that_is_not_shared_is_named(crew, tmp_path):
    (reasons, here, _), (_, there, waited) = crew(2, own_folder, str(tmp_path))
    assert waited == [0.1, 0.05]
    assert len(reasons) == 2
    assert all("rank 1 does not see" in one and "machines share" in one for one in reasons)
    assert here == there
    assert "rank 1 does not see the checkpoint" in here


def damaged(rank, size, folder):
    checkpoints = Checkpoints(Path(folder), group_of(size))
    tensors = {f"rank-{rank}.x": torch.arange(9.0) + rank}
    checkpoints.save(Content(tensors), 1)
    checkpoints.wait()
    found = checkpoints.newest()
    if rank:
        path = found.folder / "rank-1.data"
        path.write_bytes(b"\1" + path.read_bytes()[1:])
    dist.barrier()
    with pytest.raises(InputError) as told:
        checkpoints.load(found, {f"rank-{rank}.x": torch.zeros(9)})
    with pytest.raises(InputError) as missing:
        checkpoints.load(found, {} if rank else {"z": torch.zeros(9)})
    checkpoints.close()
    return str(told.value), str(missing.value)


def test_what_one_rank_cannot_load_all_are_told(crew, tmp_path):
    here, there = crew(2, damaged, str(tmp_path))
    assert here == there
    assert "rank-1.data is damaged: its bytes 0 to 36" in here[0]
    assert "'z' is not in it" in here[1]


def leaves(rank, size, folder):
    checkpoints = Checkpoints(Path(folder), group_of(size))
    content = Content({"x": torch.ones(9), "y": torch.ones(9)})
    checkpoints.save(content, 1)
    checkpoints.wait()
    if rank:
        import os

        os._exit(7)
    with pytest.raises(PeerLost):
        checkpoints.save(content, 2)
    checkpoints.close()
    assert not any(thread.name.startswith("checkpoint") for thread in threading.enumerate())
    return [type(one).__name__ for one in checkpoints.finished()]


def test_a_rank_that_is_gone_is_an_error_and_no_wait(crew, tmp_path):
    (error, result), (lost, _) = crew.outcomes(2, leaves, str(tmp_path))
    assert error is None, result
    assert result == ["Saved"]
    assert isinstance(lost, EOFError)
    found = Checkpoints(tmp_path, parallel.SingleDevice()).newest()
    assert found.step == 1

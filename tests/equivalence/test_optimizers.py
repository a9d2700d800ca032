"""Updates that take less memory: torch's own, run in other ways, and torchao's, with states in few
bits."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.equivalence.reference import plan_for, train, train_plainly
from tests.equivalence.worlds import World, task_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.compute import Replica, optimizer_update
from anybatch.compute.low_bit_optimizers import parts_of
from anybatch.errors import InputError
from anybatch.recipes import resolve
from anybatch.state import whole_state

WAYS = [
    {"update": "fused"},
    {"update": "in parts"},
    {"optimizer_states": "host"},
    {"update": "fused", "optimizer_states": "host"},
]


def distance(found: nn.Module, wanted: nn.Module) -> float:
    pairs = zip(found.state_dict().values(), wanted.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: ", ".join(way.values()))
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_ways_of_the_update(monkeypatch, way, clip_norm):
    monkeypatch.setattr(optimizer_update, "PART_BYTES", 64)
    task = task_of(World(optimizer="adamw", groups=True, tied=True, clip_norm=clip_norm))
    found = train(task, 3, **way)
    assert distance(found.model, train_plainly(task).model) < 1e-6


@pytest.mark.parametrize("way", WAYS, ids=lambda way: ", ".join(way.values()))
@pytest.mark.parametrize("precision", ["bf16-weights", "fp16"])
def test_in_half_precision(way, precision):
    task = dataclasses.replace(squares(torch.optim.AdamW), steps=4)
    found = train(task, 5, precision=precision, **way)
    wanted = train(task, 5, precision=precision)
    assert distance(found.model, wanted.model) < 1e-5


@pytest.mark.parametrize("way", WAYS, ids=lambda way: ", ".join(way.values()))
def test_saved_and_resumed(tmp_path, way):
    wanted = run(squares(torch.optim.AdamW), **way)
    run(squares(torch.optim.AdamW), tmp_path, until=3, **way)
    found = run(squares(torch.optim.AdamW), tmp_path, resume=True, **way)
    assert same(found, wanted)


def test_what_is_saved_under_one_way_goes_on_under_another(tmp_path):
    wanted = run(squares(torch.optim.AdamW))
    run(squares(torch.optim.AdamW), tmp_path, until=3, optimizer_states="host")
    found = run(squares(torch.optim.AdamW), tmp_path, resume=True)
    assert same(found, wanted)


def test_memory_runs_out_and_the_states_go_to_the_host(monkeypatch):
    task = task_of(World(optimizer="adamw", steps=6))
    plan = plan_for(task, 8)
    ladder = (plan.choice.model_copy(update={"optimizer_states": "host"}),)
    seen: list[str] = []

    def failing(self: Replica, *batch: Any) -> Any:
        seen.append(self.updater.states_on)
        if len(seen) == 5:  # in the third step
            raise MemoryError("you tried to allocate 5 bytes")
        return accumulate(self, *batch)

    accumulate = Replica.accumulate
    monkeypatch.setattr(Replica, "accumulate", failing)
    with ab.Session(task, plan.model_copy(update={"ladder": ladder})) as session:
        for _ in session.steps():
            pass
        assert session.plan.choice.optimizer_states == "host"
        found = session.model
    assert set(seen[:5]) == {"device"}
    assert set(seen[5:]) == {"host"}
    monkeypatch.undo()
    assert distance(found, train_plainly(task).model) < 1e-6


def in_parts_of_the_model(rank: int, size: int) -> dict[str, Tensor]:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    try:
        task = squares(torch.optim.AdamW)
        return run(task, parallel="shard", shares=(1.0,) * size, update="fused")
    finally:
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[variable]


def test_fused_on_a_divided_model(crew):
    found = crew(2, in_parts_of_the_model)[0]
    for name, value in run(squares(torch.optim.AdamW)).items():
        assert (found[name] - value).norm() < 1e-5 * value.norm()


# --------------------------------------------------------------------------------------- torchao's


def of_torchao(name: str) -> Any:
    """One of torchao's optimizers."""
    return partial(getattr(pytest.importorskip("torchao.optim"), name), lr=1e-2)


@pytest.fixture(autouse=True)
def no_machine_code():
    """Making it takes long, and it computes the same but for rounding."""
    with torch.compiler.set_stance("default", force_backend="eager"):
        yield


NAMES = ("AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit")


def square() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def squares(optimizer: Any, **changes: Any) -> ab.Task:
    """Weights of 4,096 values, from which on torchao keeps states in few bits."""
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(60, 64, generator=draw)
    y = torch.randint(64, (60,), generator=draw)
    fields: dict[str, Any] = {
        "model": square,
        "loss": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        "optimizer": optimizer,
        "train": TensorDataset(x, y),
        "global_batch": 20,
        "steps": 7,
    }
    return ab.Task(**{**fields, **changes})


def run(task: ab.Task, folder: Any = None, *, resume=False, until=None, **knobs: Any):
    """The weights; with a folder it saves when it stops."""
    with ab.Session(task, plan_for(task, 7, **knobs), checkpoints=folder) as session:
        if resume:
            assert session.resume()
        for event in session.steps():
            if event.step == until:
                session.save(wait=True)
                break
        return whole_state(session.model)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], value) for name, value in wanted.items()
    )


@pytest.mark.parametrize("name", NAMES)
def test_accumulated_as_in_one_piece(name):
    # The first updates: later ones may round to another code, by a gradient's last bit.
    task = squares(of_torchao(name), steps=2, clip_norm=0.5)
    assert distance(train(task, 7).model, train_plainly(task).model) < 1e-4


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *(pytest.param(name, "bf16-pure", marks=pytest.mark.nightly) for name in NAMES),
        ("AdamW8bit", "fp32"),
        ("AdamW8bit", "bf16-weights"),
    ],
)
def test_resumed_to_the_bit(tmp_path, name, precision):
    task = squares(of_torchao(name), schedule=lambda p: 1 / (1 + p.step))
    wanted = run(task, precision=precision)
    run(task, tmp_path, until=3, precision=precision)
    assert same(run(task, tmp_path, resume=True, precision=precision), wanted)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("AdamW8bit", "AdamW4bit"),
        ("AdamW8bit", "AdamWFp8"),
        ("AdamW8bit", torch.optim.AdamW),
        (torch.optim.AdamW, "AdamW8bit"),
    ],
)
def test_resumed_with_another_optimizer(tmp_path, before, after):
    first, second = (of_torchao(one) if isinstance(one, str) else one for one in (before, after))
    run(squares(first), tmp_path, until=2)
    with pytest.raises(InputError, match=r"of another optimizer: it remembers 'exp_avg"):
        run(squares(second), tmp_path, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *(pytest.param(name, "fp32", marks=pytest.mark.nightly) for name in NAMES),
        ("AdamW8bit", "bf16-pure"),
    ],
)
def test_states_are_planned_as_large_as_they_are(name, precision):
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

    task = squares(of_torchao(name), model=wide, steps=1)
    plan = ab.plan(task, memory="1GiB", precision=precision)
    assert plan.prediction is not None
    with ab.Session(task, plan_for(task, 20, precision=precision)) as session:
        for _ in session.steps():
            pass
        states = session._replica.optimizer.state.values()
        held = sum(
            part.nbytes
            for state in states
            for value in state.values()
            for part in parts_of(value).values()
        )
    assert plan.prediction.by_kind["optimizer state"] == pytest.approx(held, rel=0.02)


def on_ranks(rank: int, size: int, name: str, parallel: str) -> dict[str, Tensor]:
    task = squares(of_torchao(name), steps=2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    try:
        with torch.compiler.set_stance("default", force_backend="eager"):
            return run(task, parallel=parallel, shares=(1.0,) * size)
    finally:
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[variable]


def test_over_ranks(crew):
    pytest.importorskip("torchao.optim")
    first, second = crew(2, on_ranks, "AdamW8bit", "replicate")
    assert same(first, second)
    wanted = run(squares(of_torchao("AdamW8bit"), steps=2))
    for name, value in wanted.items():
        assert (first[name] - value).norm() < 1e-4 * value.norm()


def test_not_divided_over_ranks(crew):
    pytest.importorskip("torchao.optim")
    with pytest.raises(Exception, match=r"AdamW8bit, whose states share a scale.*'replicate'"):
        crew(2, on_ranks, "AdamW8bit", "shard")
    two = ab.Machine.describe("2 x 1GiB")
    with pytest.raises(InputError, match="whose states share a scale"):
        ab.plan(squares(of_torchao("AdamW8bit")), two, parallel="shard")


@pytest.fixture(scope="module")
def digits() -> tuple[ab.Task, list[float]]:
    """A task, and the losses of training it with plain states."""
    task = resolve("digits", {"global_batch": "128", "epochs": "6", "width": "32"})
    return task, train(task, 128).losses


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("AdamW8bit", 0.1), ("AdamW4bit", 0.1), ("AdamWFp8", 0.35)],
)
def test_the_loss_falls_as_with_plain_states(digits, name, tolerance):
    module = pytest.importorskip("torchao.optim")
    task, plain = digits

    def other(params: Any) -> Any:
        return getattr(module, name)(params, lr=_rate(task))

    found = train(dataclasses.replace(task, optimizer=other), 128).losses
    assert sum(found) == pytest.approx(sum(plain), rel=tolerance)
    assert found[-1] == pytest.approx(plain[-1], abs=tolerance)


def _rate(task: ab.Task) -> float:
    return task.optimizer([nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"]


@pytest.mark.slow
def test_compiled_to_machine_code(tmp_path):
    task = squares(of_torchao("AdamW8bit"), model=lambda: nn.Linear(64, 64, bias=False))
    with torch.compiler.set_stance("default"):
        wanted = run(task)
        run(task, tmp_path, until=3)
        assert same(run(task, tmp_path, resume=True), wanted)

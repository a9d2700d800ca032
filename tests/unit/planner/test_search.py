"""The search: some of the blocks, devices side by side, the frontier, and what knobs would buy."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.unit.planner.tasks import Block, deep_task
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.errors import NoPlanFits
from anybatch.estimate import footprint, subject_of
from anybatch.machine import Machine
from anybatch.planner import costs as module
from anybatch.planner.costs import Costs
from anybatch.planner.knobs import knobs
from anybatch.planner.ranks import reserve_of
from anybatch.planner.setting import setting_of
from anybatch.plans import Plan, Recompute
from anybatch.units import format_seconds, parse_bytes

MIB = 1 << 20
BLOCKS = 6


def tower(*widths: int) -> nn.Module:
    """Blocks in a row, not in a sequence that could become a tree."""

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(wide(width) for width in widths)
            self.head = nn.Linear(64, 1)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    return Tower()


def wide(width: int) -> nn.Module:
    block = Block()
    block.up, block.down = nn.Linear(64, width), nn.Linear(width, 64)
    return block


def tower_task(*widths: int, **changes: Any) -> ab.Task:
    shape = widths or (256,) * BLOCKS
    return deep_task(model=lambda: tower(*shape), global_batch=1024, **changes)


@cache
def pinned(budget: int, *widths: int) -> Plan:
    return ab.plan(tower_task(*widths), memory=budget, micro_batch=1024)


def peak(recompute: Recompute) -> int:
    choice = pinned(200 * MIB).choice.model_copy(update={"recompute": recompute})
    device = Machine.here(device="cpu").device
    return footprint(subject_of(tower_task()), choice, device).peak.num_bytes


# ------------------------------------------------------------------------- some of the blocks


@pytest.mark.slow
def test_only_as_many_blocks_are_recomputed_as_memory_asks_for():
    none = peak(Recompute())
    every = peak(Recompute(blocks=tuple(f"layers.{i}" for i in range(BLOCKS))))
    numbers = []
    for part in (0.75, 0.5, 0.25):
        room = every + part * (none - every)
        plan = pinned(int(room) + reserve_of(int(room), "cpu") + MIB // 8)
        assert plan.prediction
        assert plan.prediction.peak_bytes <= (plan.budget_bytes or 0)
        assert plan.choice.recompute.keep == "nothing" or part > 0.5
        numbers.append(len(plan.choice.recompute.blocks))
    if "matmuls" not in {pinned(int(none)).choice.recompute.keep}:
        assert numbers == sorted(numbers)
    assert 0 < numbers[-1] <= BLOCKS


def test_blocks_that_are_recomputed_are_the_first_of_equals():
    none = peak(Recompute())
    blocks = pinned(int(0.9 * none)).choice.recompute.blocks
    assert blocks == tuple(f"layers.{i}" for i in range(len(blocks)))


def test_few_traces_suffice(monkeypatch):
    traced: list[Any] = []
    real = module.footprint

    def counting(subject: Any, choice: Any, device: Any) -> Any:
        traced.append(choice)
        return real(subject, choice, device)

    monkeypatch.setattr(module, "footprint", counting)
    plan = ab.plan(tower_task(), memory=12 * MIB)
    assert plan.choice.micro_batch < 1024
    assert len(traced) == len(set(traced)) <= 20


# ---------------------------------------------------------------------------- several devices


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_devices_share_the_batch(count: int):
    machine = Machine.describe("rtx-4090", count=count)
    plan = ab.plan(deep_task(), machine, recompute="none")
    told = plan.prediction
    assert told
    assert plan.num_ranks == count
    assert plan.choice.micro_batch <= -(-4096 // count)
    assert ("exchange of gradients" in told.step_parts) == (count > 1)
    words = dict(plan.explain())
    assert words["device"].startswith("GeForce")
    if count > 1:
        assert f"up to {-(-4096 // count):,} per rank" in words["global batch"]


def test_ghost_batches_are_not_cut_between_devices():
    from tests.unit.planner.tasks import deep

    task = deep_task(model=lambda: deep(norm=True), global_batch=1000, ghost_batch=48)
    plan = ab.plan(task, Machine.describe("rtx-4090", count=3), recompute="none")
    assert plan.choice.micro_batch % 48 == 0
    assert "up to 336 per rank" in dict(plan.explain())["global batch"]


def test_parts_of_the_time_add_up():
    told = ab.plan(deep_task(), Machine.describe("4 x a100-80gb"), recompute="all").prediction
    assert told
    assert sum(told.step_parts.values()) == pytest.approx(told.step_seconds)
    assert {"forward", "backward", "recompute", "update"} < told.step_parts.keys()
    assert "nominal" in told.seconds_method


# -------------------------------------------------------------------------------- the frontier


def test_the_frontier_holds_what_nothing_beats():
    plan = ab.plan(tower_task(), memory=12 * MIB, frontier=True)
    assert len(plan.frontier) >= 2
    peaks = [point.peak_bytes for point in plan.frontier]
    times = [point.step_seconds for point in plan.frontier]
    assert peaks == sorted(peaks)
    assert times == sorted(times, reverse=True)
    for candidate in plan.rejected:
        assert not any(
            candidate.peak_bytes < point.peak_bytes
            and candidate.step_seconds < 0.99 * point.step_seconds
            for point in plan.frontier
        )
    assert Plan.from_json(plan.to_json()) == plan


def test_asking_for_the_frontier_does_not_change_the_choice():
    plain, drawn = (ab.plan(tower_task(), memory=12 * MIB, frontier=f) for f in (False, True))
    assert plain.choice == drawn.choice
    assert plain.ladder == drawn.ladder


# ------------------------------------------------------------------------------------ the knobs


def test_knobs_say_what_each_change_would_do():
    task = tower_task()
    subject, device = subject_of(task), Machine.here(device="cpu").device
    plan = ab.plan(task, micro_batch=1024, recompute="none")
    costs = Costs(subject, setting_of(subject, device))
    found = {knob.what: knob for knob in knobs(costs, plan.choice)}
    before = footprint(subject, plan.choice, device).peak.num_bytes
    assert all(knob.peak_bytes < before for knob in found.values())
    assert list(found.values()) == sorted(found.values(), key=lambda knob: knob.peak_bytes)

    recomputed = plan.choice.model_copy(update={"recompute": Recompute(blocks=subject.blocks)})
    every = found["recompute every block"]
    assert every.peak_bytes == footprint(subject, recomputed, device).peak.num_bytes
    plain = costs.setting.pace.step(1024, Recompute(), 1024).total
    assert every.step_seconds > plain
    assert found["micro-batch 1"].peak_bytes < found["micro-batch 512"].peak_bytes
    assert found["micro-batch 1"].step_seconds > plain
    assert found["2 devices, state divided"].remark
    assert not every.remark


def test_when_nothing_fits_the_knobs_that_are_left_are_named():
    with pytest.raises(ab.NoPlanFits) as caught:
        ab.plan(tower_task(1024, 1024), memory="2MiB")
    told = str(caught.value)
    assert "one change at a time" in told
    assert "devices, state divided" in told
    assert "micro-batch 1 " not in told.partition("\n")[2]  # it has that already
    assert "per step" in told


def test_when_nothing_fits_no_choice_is_traced_that_cannot_be_the_leanest():
    watched: list[str] = []
    with pytest.raises(ab.NoPlanFits) as caught:
        ab.plan(tower_task(1 << 22), Machine.describe("2GiB"), watch=watched.append)
    assert "optimizer states in host memory" in str(caught.value)
    before_knobs = watched[: watched.index("counting the work of one pass in bf16")]
    single = [told for told in before_knobs if "micro-batch 1, fp32, recompute none" in told]
    assert single
    assert all("states in host memory" in told for told in single)


def test_a_trace_serves_every_budget():
    subject = subject_of(tower_task(256))
    found: list[int] = []
    for size in ("600MiB", "700MiB"):
        device = replace(Machine.describe("8GiB").device, budget_bytes=parse_bytes(size))
        costs = Costs(subject, setting_of(subject, device))
        found.append(costs.peak(costs.choice(Recompute(), 64)))
    assert found[0] == found[1]
    assert (len(subject.families), len(subject.stages)) == (1, 1)


class Words(nn.Module):
    """Next words out of 50,000: hardly anything but logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50_000, 64), nn.Linear(64, 50_000, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def next_word(model: nn.Module, batch: Any) -> Tensor:
    logits, words = model(batch[0]), batch[0]
    return nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())


def test_a_loss_that_fills_the_memory_could_be_computed_in_chunks():
    data = TensorDataset(torch.zeros(2, 128, dtype=torch.long))
    task = deep_task(model=Words, loss=next_word, train=data, global_batch=64, last="wrap")
    device = Machine.describe("24GiB").device
    costs = Costs(subject_of(task), setting_of(subject_of(task), device))
    choice = costs.choice(Recompute(), 64)
    found = {knob.what: knob for knob in knobs(costs, choice)}
    logits = 64 * 128 * 50_000 * 4
    freed = costs.peak(choice) - found["loss in chunks"].peak_bytes
    assert 1.5 * logits < freed < 3.5 * logits


def test_when_nothing_fits_the_times_of_knobs_are_those_that_runs_have_taught(monkeypatch):
    from anybatch.estimate.calibration import Correction
    from anybatch.planner import setting

    monkeypatch.setattr(setting, "correction", lambda device, task: Correction(3.0, 3))
    task = tower_task(1024, 1024)
    with pytest.raises(ab.NoPlanFits) as caught:
        ab.plan(task, memory="2MiB", recompute="none")
    subject, device = subject_of(task), Machine.here(device="cpu").device
    costs = Costs(subject, setting_of(subject, device))
    found = knobs(costs, costs.choice(Recompute(), 1))
    assert found
    for knob in found:
        row = next(r for r in str(caught.value).splitlines() if r.strip().startswith(knob.what))
        assert f"{format_seconds(knob.step_seconds)} per step" in row


@pytest.mark.parametrize("precision", ["bf16-weights", "bf16-pure"])
def test_no_plan_takes_a_lower_precision_by_itself(precision: str):
    with pytest.raises(ab.NoPlanFits):
        ab.plan(tower_task(1024, 1024), memory="2MiB")
    plan = ab.plan(tower_task(), memory="2GiB", precision=precision, recompute="none")
    assert plan.choice.precision == precision


# -------------------------------------------------------------------------- what was learned


def test_the_time_that_earlier_runs_taught_is_in_the_prediction(monkeypatch):
    from anybatch.estimate.calibration import Correction
    from anybatch.planner import setting

    plain = ab.plan(tower_task(), memory="64MiB", recompute="none", micro_batch=512)
    monkeypatch.setattr(setting, "correction", lambda device, task: Correction(1.5, 3))
    taught = ab.plan(tower_task(), memory="64MiB", recompute="none", micro_batch=512)
    before, after = plain.prediction, taught.prediction
    assert before
    assert after
    assert after.step_seconds == pytest.approx(1.5 * before.step_seconds)
    assert after.peak_bytes == before.peak_bytes
    assert sum(after.by_kind.values()) == after.peak_bytes
    assert after.corrected_runs == 3
    for one, other in zip(plain.rejected, taught.rejected, strict=True):
        assert other.step_seconds == pytest.approx(1.5 * one.step_seconds)


def test_a_data_set_of_one_sample_is_planned():
    task = tower_task(train=TensorDataset(torch.zeros(1, 64), torch.zeros(1, 1)))
    assert ab.plan(task, recompute="none").choice.micro_batch <= 1024


def on_a_gpu(recompute: str | Recompute, **wishes: Any) -> Plan:
    """A tower of 32 blocks, each keeping 1.25 MiB of activations at a micro-batch of 1024."""
    task = deep_task(model=lambda: tower(*[256] * 32), global_batch=4096)
    wishes = {"micro_batch": 1024, **wishes}
    return ab.plan(task, Machine.describe("rtx-4090"), recompute=recompute, **wishes)


@pytest.mark.slow
def test_activations_in_host_memory_cost_a_way_there_and_back():
    plain, host = on_a_gpu("none"), on_a_gpu(Recompute(to_host=True))
    assert plain.prediction is not None
    assert host.prediction is not None
    kept = 32 * 1024 * (64 + 256) * 4  # the input of each block, and what ReLU makes in it
    saved = plain.prediction.peak_bytes - host.prediction.peak_bytes
    assert saved == pytest.approx(kept, rel=0.2)
    assert host.prediction.by_kind.get("activations", 0) < kept / 10
    # Four passes; ReLU saves what the product behind it saves too, and both go. PCIe 4: 32 GB/s.
    moved = 4 * 2 * 32 * 1024 * (64 + 2 * 256) * 4 / 32e9
    longer = host.prediction.step_seconds - plain.prediction.step_seconds
    assert longer == pytest.approx(moved, rel=0.1)


def test_on_a_cpu_there_is_no_other_memory_to_move_to():
    task = deep_task(model=lambda: tower(*[256] * 4), global_batch=1024)
    plain = ab.plan(task, memory="1GiB", micro_batch=1024, recompute="none")
    host = ab.plan(task, memory="1GiB", micro_batch=1024, recompute=Recompute(to_host=True))
    assert plain.prediction is not None
    assert host.prediction is not None
    assert host.prediction.peak_bytes == plain.prediction.peak_bytes
    assert not any(c.choice.recompute.to_host for c in plain.rejected)


@pytest.mark.nightly
def test_where_nothing_else_fits_activations_go_to_host_memory():
    class Chunked(nn.Module):
        """Nothing that could be recomputed: no two modules are alike."""

        def __init__(self) -> None:
            super().__init__()
            for i in range(24):
                setattr(self, f"line{i}", nn.Linear(512 + i, 513 + i))

        def forward(self, x: Tensor) -> Tensor:
            for i in range(24):
                x = getattr(self, f"line{i}")(x).relu()
            return x

    task = deep_task(
        model=Chunked,
        loss=lambda model, batch: model(batch[0]).square().mean(),
        train=TensorDataset(torch.zeros(64, 1024, 512)),
        global_batch=64,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    device = Machine.describe("24GiB")
    leanest = ab.plan(task, device, micro_batch=1, recompute="none")
    assert leanest.prediction is not None
    plan = ab.plan(task, device, memory=int(leanest.prediction.peak_bytes * 0.97))
    assert plan.choice.recompute.to_host
    with pytest.raises(ab.NoPlanFits):
        ab.plan(task, Machine.describe("24GiB"), memory="650MiB")


class Huge(nn.Module):
    """Saves two tensors of 16 GiB per sample for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.tanh(self.line(x).unsqueeze(1).expand(-1, 1 << 26, -1))
        return x + torch.tanh(wide).mean(dim=1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 12])
def test_one_block_of_one_sample_may_be_more_than_the_room(number: int):
    def model() -> nn.Module:
        return nn.Sequential(
            *[nn.Sequential(Huge(), nn.Identity()) for _ in range(number)], nn.Linear(64, 1)
        )

    with pytest.raises(NoPlanFits, match="no plan fits the budget"):
        ab.plan(deep_task(model=model, global_batch=64), Machine.describe("24GiB"))

"""Seconds: work is counted as it is, times follow from speeds, and blocks add up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.planner.tasks import deep, deep_task, mean_square
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.estimate import subject_of
from anybatch.estimate.calibration import Speeds, nominal
from anybatch.estimate.seconds import Pace, tabulated_link
from anybatch.estimate.seconds_work import Counting, Operation, Work
from anybatch.machine import Machine
from anybatch.plans import Choice, Recompute

CPU = Machine.here(device="cpu").device


def even(**changes: Any) -> Speeds:
    """A device that does everything at one rate: a billion per second."""
    fields: dict[str, Any] = {
        "matmul": {"float32": 1e9},
        "memory": 1e9,
        "call_seconds": 0.0,
        "overlap": False,
    }
    return Speeds(**{**fields, **changes})


def work(task: ab.Task, micro_batch: int) -> Work:
    choice = Choice(micro_batch=micro_batch, evaluation_batch=1)
    return Counting(subject_of(task), choice, CPU).at(micro_batch)


def pace(task: ab.Task, speeds: Speeds | None = None) -> Pace:
    return Pace(subject_of(task), CPU, speeds or even(), "fp32")


# ------------------------------------------------------------------------------------- the work


class Attending(nn.Module):
    """A layer of attention, with dropout in it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(32, 4, dropout=dropout, batch_first=True)

    def forward(self, x_btd: torch.Tensor) -> torch.Tensor:
        return self.layer(x_btd, x_btd, x_btd, need_weights=False)[0]


def test_attention_on_a_device_that_is_not_here_is_counted_as_one_kernel_with_dropout_too():
    def names(dropout: float) -> list[str]:
        task = ab.Task(
            model=lambda: Attending(dropout),
            loss=lambda model, x: ab.Loss(model(x).square().sum(), len(x)),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            train=torch.zeros(8, 16, 32),
            global_batch=8,
            steps=1,
        )
        choice = Choice(micro_batch=8, evaluation_batch=1)
        found = Counting(subject_of(task), choice, Machine.describe("24GiB").device).at(8)
        return [operation.name for operation in found.operations]

    assert names(0.1) == names(0.0)
    assert sum("attention" in name for name in names(0.1)) == 2  # forward and backward


def test_products_are_counted_as_textbooks_count_them():
    found = work(deep_task(), 10)
    forward = sum(o.flops for o in found.operations if o.phase == "forward")
    # Per sample 2 x 64 x 256 twice in each of two blocks, and 2 x 64 for the last layer.
    assert forward == 10 * (2 * 2 * 2 * 64 * 256 + 2 * 64)
    backward = sum(o.flops for o in found.operations if o.phase == "backward")
    # Twice as much, but for the gradient of the data, which nobody asks for.
    assert backward == 2 * forward - 10 * 2 * 64 * 256


def test_the_operations_of_blocks_are_those_of_the_blocks():
    found = work(deep_task(), 10)
    for block in (0, 1):
        inside = [o for o in found.operations if o.block == block]
        assert {o.phase for o in inside} == {"forward"}
        assert sum(o.flops for o in inside) == 10 * 2 * 2 * 64 * 256
        names = [o.name for o in inside]
        assert names.count("addmm") == 2
        assert "relu" in names


def test_what_a_block_keeps_is_what_it_makes_and_saves():
    # ReLU's result serves itself and the next layer; 256 wide, float32.
    assert work(deep_task(), 10).kept_bytes == (10 * 256 * 4, 10 * 256 * 4)


class Attention(nn.Module):
    """Two heads of 16, over 7 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q = self.line(x).view(len(x), 2, 7, 16)
        return nn.functional.scaled_dot_product_attention(q, q, q)


def attending() -> ab.Task:
    return deep_task(
        model=Attention,
        loss=lambda model, batch: model(batch[0]).square().mean(),
        train=TensorDataset(torch.zeros(64, 7, 32)),
        global_batch=64,
    )


def test_attention_on_a_cpu_has_its_arithmetic_counted():
    found = [o for o in work(attending(), 3).operations if "scaled_dot_product" in o.name]
    assert [o.flops for o in found if o.phase == "forward"] == [3 * 2 * 7 * 7 * 16 * 4]
    assert all(o.flops for o in found)


# ------------------------------------------------------------------------------------ the speeds


def test_a_described_device_is_as_fast_as_its_sheet_allows():
    slow, fast = (nominal(Machine.describe(name).device) for name in ("t4", "h100-80gb"))
    for speeds in (slow, fast):
        assert not speeds.measured
        assert speeds.overlap
    for arithmetic in ("float32", "float16"):
        assert slow.matmul[arithmetic] < fast.matmul[arithmetic]
    assert fast.matmul["bfloat16"] < 989.4e12


# ------------------------------------------------------------------------------------- the times


def roofline(operations: Iterable[Operation]) -> float:
    """Seconds at a billion bytes and a billion floating-point operations per second."""
    return sum(max(o.num_bytes, o.flops) for o in operations) / 1e9


def test_time_is_that_of_arithmetic_or_of_memory_whichever_is_longer():
    found = pace(deep_task())
    operations = [o for o in work(deep_task(), 100).operations if o.phase == "forward"]
    forward, _, again = found.micro(100, Recompute())
    assert forward == pytest.approx(roofline(operations), rel=0.01, abs=3.1e-4)
    assert again == 0.0


def test_starting_an_operation_takes_its_time_on_a_cpu():
    plain, called = pace(deep_task()), pace(deep_task(), even(call_seconds=1e-3))
    num_calls = sum(o.phase == "forward" for o in work(deep_task(), 8).operations)
    more = called.micro(8, Recompute())[0] - plain.micro(8, Recompute())[0]
    assert more == pytest.approx(num_calls * 1e-3)


def test_any_micro_batch_lies_on_the_line_of_two():
    found = pace(deep_task())
    for size in (1, 8, 100, 4096):
        traced = roofline(work(deep_task(), size).operations)
        seconds = sum(found.micro(size, Recompute())) + found.update_seconds
        assert seconds == pytest.approx(traced, rel=0.01, abs=3.1e-4)


def test_blocks_that_are_recomputed_cost_their_forward():
    found = pace(deep_task())
    each = found.block_seconds(64)
    assert each[0] == pytest.approx(each[1])
    assert found.micro(64, Recompute(blocks=("1",)))[2] == pytest.approx(each[0])
    assert found.micro(64, Recompute(blocks=("1", "2")))[2] == pytest.approx(sum(each))
    kept = found.micro(64, Recompute(blocks=("1", "2"), keep="matmuls"))[2]
    assert 0 < kept < 0.5 * sum(each)
    tree = found.micro(64, Recompute(blocks=(".",), nested=True))[2]
    beside = 1.5e-4 * len(each) - 3e-4  # of Python: blocks, but no pass
    assert tree == pytest.approx(2 * (found.micro(64, Recompute())[0] + beside))


def test_a_step_is_its_micro_batches_and_an_update():
    found = pace(deep_task(), even(call_seconds=1e-5))
    one, rest = found.micro(100, Recompute()), found.micro(50, Recompute())
    step = found.step(100, Recompute(), 250, exchange=0.5)
    assert step.forward == pytest.approx(2 * one[0] + rest[0])
    assert step.update == found.update_seconds
    assert step.total == pytest.approx(2 * sum(one) + sum(rest) + found.update_seconds + 0.5)


def test_starting_operations_counts_once_where_they_overlap():
    calls = even(call_seconds=1e-3)
    found, ahead = pace(deep_task(), calls), pace(deep_task(), replace(calls, overlap=True))
    assert sum(ahead.micro(8, Recompute())) < sum(found.micro(8, Recompute()))
    num_calls = sum(o.phase == "forward" for o in work(deep_task(), 8).operations)
    assert ahead.micro(8, Recompute())[0] == pytest.approx(num_calls * 1e-3, rel=0.01, abs=4e-4)


def recurring(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return model(batch[0])[0].square().mean()


def test_a_recurrent_layer_on_a_cpu_has_its_arithmetic_counted():
    data = TensorDataset(torch.zeros(64, 5, 24))
    task = deep_task(
        model=lambda: nn.LSTM(24, 16, batch_first=True), loss=recurring, train=data, global_batch=64
    )
    found = {o.name: o for o in work(task, 3).operations if "rnn" in o.name}
    forward, backward = found["mkldnn_rnn_layer"], found["mkldnn_rnn_layer_backward"]
    assert forward.flops == 2 * 3 * 5 * 4 * 16 * (24 + 16)
    assert backward.flops == 2 * forward.flops


def test_ghost_batches_take_more_operations():
    few = deep_task(model=lambda: deep(norm=True), ghost_batch=512)
    many = deep_task(model=lambda: deep(norm=True), ghost_batch=16)
    speeds = even(call_seconds=1e-3)
    slow, fast = (pace(task, speeds).micro(512, Recompute())[0] for task in (many, few))
    # 32 norms for one, and what cuts and joins their batches.
    assert 31e-3 < slow - fast < 3 * 32e-3


def test_gradients_cross_the_link_in_a_ring():
    device = Machine.describe("2 x a100-80gb").device
    link = tabulated_link(device)
    assert link.seconds(10**9, 1) == 0.0
    two, eight = (link.seconds(10**9, ranks) for ranks in (2, 8))
    assert two == pytest.approx(1e9 / 300e9, rel=0.05)
    assert eight == pytest.approx(2 * 7 / 8 * 1e9 / 300e9, rel=0.1)


def test_a_loss_that_reads_values_is_traced():
    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = mean_square(model, batch)
        return found * float(found.item() > 0)

    assert work(deep_task(loss=loss), 4).operations

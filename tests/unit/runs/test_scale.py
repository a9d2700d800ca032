"""How long a step takes on several numbers of ranks: measured here, predicted elsewhere."""

from __future__ import annotations

import re

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.errors import InputError
from anybatch.events import COMPUTING, EXCHANGE, UPDATE
from anybatch.insight.scaling import Scaled, efficiency, limit
from anybatch.report import print_scale
from anybatch.runs.scale import _correction


def mean_square(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return model(batch[0]).square().mean()


def sgd(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)  # pyright: ignore[reportArgumentType]


def task(width: int = 512) -> ab.Task:
    return ab.Task(
        model=nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 8)),
        loss=mean_square,
        optimizer=sgd,
        train=TensorDataset(torch.randn(256, 64)),
        global_batch=64,
        epochs=3,
    )


def test_ranks_of_this_machine_are_measured_and_the_model_is_left_alone():
    given = task()
    assert isinstance(given.model, nn.Module)
    before = {name: value.clone() for name, value in given.model.state_dict().items()}
    (row,) = ab.scale(given, [1], steps=4)
    assert row.is_measured
    assert row.step_seconds == pytest.approx(row.parts[COMPUTING])
    assert efficiency(row, [row]) == 1.0
    after = given.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.nightly
def test_two_ranks_are_started_and_timed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("anybatch.runs.scale.num_cores", lambda: 2)
    one, two, four = ab.scale(task(), [1, 2, 4], steps=4)
    assert one.is_measured
    assert two.is_measured
    assert two.plan is not None
    assert two.plan.num_ranks == 2
    assert EXCHANGE in two.parts
    assert not four.is_measured
    assert four.plan is not None
    assert four.plan.num_ranks == 4


def test_described_devices_are_predicted_and_the_parts_are_those_of_the_plan():
    machine = ab.Machine.describe("a100-40gb")
    rows = ab.scale(task(2048), [8, 1], machine)
    assert [row.ranks for row in rows] == [8, 1]
    for row in rows:
        assert not row.is_measured
        told = ab.plan(task(2048), machine, ranks=row.ranks).prediction
        assert told is not None
        assert row.step_seconds == pytest.approx(told.step_seconds)
        assert row.parts[UPDATE] == told.step_parts["update"]
    assert (rows[0].exchange_share or 0.0) > 0.0


def test_predictions_beyond_this_machine_are_corrected_by_what_was_measured():
    given = task()
    told = ab.plan(given, ab.Machine.here(), ranks=1).prediction
    assert told is not None
    computing = told.step_seconds - told.step_parts["update"]
    run = Scaled(1, 9.0, {COMPUTING: 3 * computing}, is_measured=True)
    assert _correction(given, [run], {}) == pytest.approx(3.0)
    assert _correction(given, [], {}) == 1.0


def test_what_does_not_fit_is_a_row_with_its_reason():
    (row,) = ab.scale(task(1 << 22), [1], ab.Machine.describe("1GiB"))
    assert row.step_seconds is None
    assert "no plan fits" in limit(row, [row])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"ranks": []}, "ranks is empty"),
        ({"ranks": [1, 0]}, "one of ranks is 0"),
        ({"ranks": [1], "steps": 2}, "steps is 2"),
        ({"ranks": [1], "machine": ab.Machine.describe("2 x 24GiB")}, "has 2 devices"),
    ],
)
def test_numbers_that_cannot_be_are_refused(options: dict[str, object], told: str):
    with pytest.raises(InputError, match=told):
        ab.scale(task(), **options)  # pyright: ignore[reportArgumentType]


def test_the_table_tells_what_was_measured_and_how_the_rest_was_found():
    rows = [
        Scaled(1, 0.8, {COMPUTING: 0.8}, is_measured=True),
        Scaled(2, 0.5, {COMPUTING: 0.4, EXCHANGE: 0.1}, is_measured=True),
        Scaled(4, 0.4, {COMPUTING: 0.2, EXCHANGE: 0.2}),
        Scaled(8, None, reason="no plan fits"),
    ]
    console = Console(width=100, record=True, quiet=True)
    console.quiet = False
    with console.capture() as capture:
        print_scale(console, rows, 64)
    lines = [re.sub(r"\s+", " ", line.strip()) for line in capture.get().splitlines()]
    assert "1 800 ms 80 100% measured" in lines
    assert "2 500 ms 128 20% 80% measured" in lines
    assert "4 400 ms 160 50% 50% predicted" in lines
    assert "8 not possible" in lines
    assert any(line.startswith("4 exchange, 50% of a step") for line in lines)
    assert "1 nothing so far: more devices would shorten it" in lines
    assert any("ring all-reduce" in line for line in lines)


def test_a_device_that_is_not_kept_busy_is_named():
    rows = [
        Scaled(1, 1.0, {COMPUTING: 0.9, UPDATE: 0.1}),
        Scaled(8, 1.0, {COMPUTING: 0.7, EXCHANGE: 0.2, UPDATE: 0.1}),
    ]
    assert limit(rows[1], rows).startswith("computing, 70% of a step: a rank's part of the batch")
    assert limit(rows[0], rows) == "nothing so far, but none of the larger numbers shortens it"
    rows.append(Scaled(16, 0.9, {COMPUTING: 0.9}))
    assert limit(rows[0], rows) == "nothing so far: more devices would shorten it"

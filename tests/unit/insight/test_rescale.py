"""`rescale`: every setting is told, with its rule; what cannot be converted is refused in words."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import pytest
import torch

import anybatch as ab
from anybatch.errors import InputError


def values(change: ab.BatchChange) -> dict[str, float]:
    return {row.name: row.after for row in change.rows}


def test_sgd_by_linear_scaling():
    change = ab.rescale("sgd", 256, 8192, lr=0.1, momentum=0.9, weight_decay=1e-4)
    assert change.settings == {"lr": pytest.approx(3.2), "momentum": 0.9, "weight_decay": 1e-4}


def test_sgd_with_the_half_life_of_its_momentum_in_samples():
    change = ab.rescale("sgd", 256, 512, lr=0.1, momentum=0.9, averages="half-life")
    assert change.settings["momentum"] == pytest.approx(0.81)
    assert change.settings["lr"] == pytest.approx(2 * 0.1 * 0.19 / 0.1)


def test_adamw_by_the_square_root_rule():
    options = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    change = ab.rescale("adamw", 256, 1024, lr=3e-4, **options)
    assert change.settings == {
        "lr": pytest.approx(6e-4),
        "betas": (pytest.approx(0.6), pytest.approx(0.8)),
        "eps": pytest.approx(5e-9),
        "weight_decay": pytest.approx(0.2, rel=1e-4),
    }


def test_adam_keeps_what_is_part_of_the_loss():
    change = ab.rescale("adam", 256, 1024, lr=3e-4, weight_decay=0.1)
    assert change.settings["weight_decay"] == 0.1


def test_averages_that_are_kept():
    change = ab.rescale("adamw", 256, 65536, lr=3e-4, averages="kept")
    assert change.settings["betas"] == (0.9, 0.999)
    assert change.settings["lr"] == pytest.approx(16 * 3e-4)


def test_warm_up_and_training_last_for_the_same_samples():
    change = ab.rescale("sgd", 256, 1000, lr=0.1, warmup_steps=1000, steps=10_000)
    assert change.warmup_steps == 256
    assert change.steps == 2560
    longer = ab.rescale("sgd", 256, 1000, lr=0.1, warmup_steps=1, steps=3)
    assert (longer.warmup_steps, longer.steps) == (1, 1)  # rounded up: none is lost
    assert ab.rescale("sgd", 256, 1000, lr=0.1).warmup_steps is None


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("averages", ["published", "half-life", "kept"])
def test_the_same_batch_changes_nothing(kind: str, averages: Any):
    change = ab.rescale(kind, 96, 96, lr=3e-4, averages=averages, warmup_steps=7, steps=70)
    for row in change.rows:
        assert row.after == pytest.approx(row.before, rel=1e-12), row.name


@pytest.mark.parametrize("averages", ["published", "half-life", "kept"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sgd", {"momentum": 0.9, "weight_decay": 1e-4}),
        ("adam", {"betas": (0.9, 0.99), "weight_decay": 0.1}),
        ("adamw", {"betas": (0.9, 0.99), "weight_decay": 0.1}),
    ],
)
def test_there_and_back_is_where_it_was(kind: str, options: dict[str, Any], averages: Any):
    there = ab.rescale(kind, 64, 448, lr=0.01, averages=averages, **options)
    back = ab.rescale(kind, 448, 64, averages=averages, **there.settings)
    for row, other in zip(there.rows, back.rows, strict=True):
        assert other.after == pytest.approx(row.before, rel=1e-9), row.name


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_what_is_not_given_is_as_torch_has_it(kind: type[torch.optim.Optimizer]):
    told = ab.rescale(kind, 2, 2, lr=0.1).settings
    for name, parameter in inspect.signature(kind).parameters.items():
        if name in told and name != "lr":
            assert told[name] == parameter.default, name
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    assert kind(parameters, **told).defaults["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("beta", "before", "last"), [(0.9, 256, 2559), (0.95, 1, 19), (0.9, 1, 9), (0.999, 32, 31_999)]
)
def test_where_the_square_root_rule_ends_it_says_so(beta: float, before: int, last: int):
    options = {"lr": 1e-3, "betas": (beta, beta)}
    after = ab.rescale("adam", before, last, **options).settings["betas"][0]
    assert 0 < after < 1
    with pytest.raises(InputError, match=rf"betas\[0\] is {beta}.*{last:,} samples.*half-life"):
        ab.rescale("adam", before, last + 1, **options)
    change = ab.rescale("adam", before, last + 1, averages="half-life", **options)
    assert 0 < change.settings["betas"][0] < 1


def test_to_first_order_both_rules_for_averages_are_one():
    published, half = (
        ab.rescale("adam", 100, 200, lr=1e-3, betas=(0.999, 0.9999), averages=averages)
        for averages in ("published", "half-life")
    )
    for one, other in zip(published.settings["betas"], half.settings["betas"], strict=True):
        assert abs(one - other) < (1 - other) ** 2


def test_at_a_known_noise_scale_the_limit_is_a_figure():
    change = ab.rescale("sgd", 256, 2048, lr=0.1, noise_scale=1000)
    wanted = (1 + 1000 / 256) / (1 + 1000 / 2048)
    assert any(f"grows by about {wanted:.3g}, not by 8" in limit for limit in change.limits)
    change = ab.rescale("adam", 250, 1000, lr=0.1, noise_scale=1000)
    assert any("20% of the squared gradient" in limit for limit in change.limits)
    assert any("50% after" in limit for limit in change.limits)


def test_every_row_has_a_rule_and_each_rule_but_arithmetic_its_source():
    change = ab.rescale("adamw", 256, 512, lr=0.1, weight_decay=0.1, warmup_steps=5, steps=9)
    assert all(row.rule for row in change.rows)
    assert [row.name for row in change.rows if not row.source] == ["steps"]


def test_it_prints_as_a_table_of_a_terminals_width():
    change = ab.rescale("adamw", 256, 1024, lr=3e-4, warmup_steps=2000, noise_scale=2000)
    lines = str(change).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "AdamW, from 256 to 1,024 samples per step (k = 4)"
    rows = [line.split() for line in lines]
    assert ["lr", "0.0003", "0.0006", "lr", "*", "sqrt(k)", "[1]"] in rows
    assert "  [1] Malladi et al. (2022)" in str(change)
    assert "  * The square root holds where the noise" in str(change)


def test_nothing_of_it_can_be_changed():
    change = ab.rescale("sgd", 1, 2, lr=0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        change.after = 3  # type: ignore[misc]
    change.settings["lr"] = 7.0  # one's own copy
    assert change.settings["lr"] == 0.2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"optimizer": "lion"}, "optimizer is 'lion'.*'adam', 'adamw' or 'sgd'"),
        ({"optimizer": torch.optim.Adagrad}, "optimizer is 'Adagrad'"),
        ({"optimizer": "adan"}, "give 'adam', "),  # the close one first
        ({"before": 0}, "before is 0; it counts samples per step"),
        ({"after": 2.5}, "after is 2.5; it counts"),
        ({"after": True}, "after is True"),
        ({"lr": 0.0}, "lr is 0.0; give a number above zero"),
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": "1e-3"}, "lr is '1e-3'"),
        ({"momentum": 1.0}, "momentum is 1.0; give a number from 0 to below 1"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0; give a number of at least zero"),
        ({"betas": (0.9, 0.99)}, "betas is given, and SGD has none"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum is given, and Adam has none"),
        ({"optimizer": "adam", "betas": 0.9}, r"betas is 0.9: give two numbers"),
        ({"optimizer": "adam", "betas": (0.9, 1.0)}, r"betas\[1\] is 1.0"),
        ({"optimizer": "adam", "eps": -1}, "eps is -1"),
        ({"optimizer": "adamw", "lr": 20.0, "weight_decay": 0.1}, "would leave nothing of"),
        ({"warmup_steps": -1}, "warmup_steps is -1; give a whole number"),
        ({"steps": 1.5}, "steps is 1.5"),
        ({"averages": "halflife"}, "averages is 'halflife'; give 'half-life'"),
        ({"noise_scale": 0}, "noise_scale is 0; it counts samples"),
        ({"lr": -1.0, "after": 0}, "after is 0.*lr is -1.0"),  # all of them at once
    ],
)
def test_what_cannot_be_is_named(arguments: dict[str, Any], words: str):
    given = {"optimizer": "sgd", "before": 32, "after": 64, "lr": 0.1, **arguments}
    with pytest.raises(InputError, match=words):
        ab.rescale(**given)

"""Precision: refused, or told of, where a device has not its format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import anybatch.compute.precision
import anybatch.machine
from anybatch.compute.precision import Numerics, check_available, precision_notices
from anybatch.errors import InputError
from anybatch.machine import Device, Machine
from anybatch.plans import Precision


def device(name: str) -> Device:
    return Machine.describe(name).device


@pytest.mark.parametrize(
    ("precision", "name"),
    [("fp8", "rtx-4090"), ("fp8", "h100"), ("tf32", "a10"), ("tf32", "24GiB"), ("bf16", "t4")],
)
def test_a_device_that_is_not_here_is_judged_by_its_own_capability(precision: Precision, name: str):
    check_available(precision, device(name))


@pytest.mark.parametrize(
    ("precision", "name", "told"),
    [
        ("fp8", "rtx-3090", r"8\.9 or newer, and GeForce RTX 3090 \(24 GB\) has 8\.6: use bf16"),
        ("fp8", "t4", r"Tesla T4 \(16 GB\) has 7\.5: use fp16"),
        ("tf32", "v100-16gb", r"8\.0 or newer, and Tesla V100 SXM2 \(16 GB\) has 7\.0: use fp32"),
    ],
)
def test_what_a_device_has_not_is_refused_by_its_name(precision: Precision, name: str, told: str):
    with pytest.raises(InputError, match=told):
        check_available(precision, device(name))


def test_a_cpu_has_neither():
    here = Machine.here(device="cpu").device
    for precision in ("fp8", "tf32"):
        with pytest.raises(InputError, match=f"precision {precision} .* this is the cpu"):
            check_available(precision, here)


@pytest.mark.parametrize(
    ("precision", "told"),
    [("bf16", "bfloat16"), ("bf16-pure", "bfloat16"), ("fp16", "float16"), ("fp32", None)],
)
def test_half_precision_on_a_cpu_without_its_instructions_is_told(
    precision: Precision, told: str | None, monkeypatch: pytest.MonkeyPatch
):
    def notices(has_instructions: bool) -> list[str]:
        for module in (anybatch.machine, anybatch.compute.precision):
            monkeypatch.setattr(module, "cpu_computes_in", lambda dtype: has_instructions)
        return list(precision_notices(precision, Machine.here(device="cpu").device))

    assert notices(True) == []
    without = notices(False)
    assert without == [] if told is None else f"no instructions for {told}" in without[0]


@pytest.mark.parametrize("precision", ["bf16", "bf16-weights", "bf16-pure"])
def test_bfloat16_that_is_emulated_is_told_with_what_to_take_instead(precision: Precision):
    (notice,) = precision_notices(precision, device("t4"))
    assert "Tesla T4 (16 GB) has no bfloat16 (compute capability 7.5)" in notice
    assert notice.endswith(f"precision {precision.replace('bf16', 'fp16')}.")


@pytest.mark.parametrize(
    ("precision", "name"), [("bf16", "rtx-3090"), ("fp16", "t4"), ("fp32", "t4"), ("bf16", "24GiB")]
)
def test_nothing_is_told_of_a_format_that_a_device_has(precision: Precision, name: str):
    assert list(precision_notices(precision, device(name))) == []


BACKENDS: Any = torch.backends


@pytest.fixture
def switches() -> Iterator[list[Any]]:
    """torch's new ones of float32, left as they were found."""
    places = [BACKENDS, BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn]
    found = [place.fp32_precision for place in places]
    yield places
    for place, value in zip(places, found, strict=True):
        place.fp32_precision = value


def told(switches: list[Any]) -> list[Any]:
    """What every switch says; None where torch refuses, since the old and the new ones disagree."""
    values: list[Any] = [place.fp32_precision for place in switches]
    for old in (torch.get_float32_matmul_precision, lambda: BACKENDS.cudnn.allow_tf32):
        try:
            values.append(old())
        except RuntimeError:
            values.append(None)
    return values


@pytest.mark.parametrize("number", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("value", ["ieee", "tf32"])
def test_float32_is_that_of_the_plan_whatever_torch_was_told(
    switches: list[Any], number: int | None, value: str
):
    if number is not None:
        switches[number].fp32_precision = value
    before = told(switches)
    precisions: list[tuple[Precision, str]] = [("fp32", "ieee"), ("tf32", "tf32")]
    for precision, expected in precisions:
        numerics = Numerics(nn.Linear(2, 2), precision, torch.device("cuda"), 8)
        tf32 = expected == "tf32"
        assert told(switches)[1:] == [expected] * 3 + ["high" if tf32 else "highest", tf32]
        numerics.undo()
        assert told(switches) == before

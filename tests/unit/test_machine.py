"""Machines: detected, described, and given a budget."""

from __future__ import annotations

import psutil
import pytest

from anybatch.errors import InputError
from anybatch.machine import USABLE, Machine

GIB = 1 << 30


def test_here_is_a_device_with_most_of_what_is_free():
    device = Machine.here(device="cpu").device
    assert device.present
    assert device.torch_name == "cpu"
    assert 0 < device.budget_bytes <= USABLE * device.total_bytes
    assert device.total_bytes == psutil.virtual_memory().total
    assert "budget" in device.describe()


@pytest.mark.parametrize(
    ("memory", "num_bytes"), [("1GiB", GIB), ("512M", GIB // 2), (12345678, 12345678)]
)
def test_a_budget_is_taken_as_it_is_given(memory: str | int, num_bytes: int):
    assert Machine.here(memory, "cpu").device.budget_bytes == num_bytes


@pytest.mark.parametrize(
    ("text", "count", "gib"),
    [("24GiB", 1, 24), ("4 x 24GiB", 4, 24), ("2x80GiB", 2, 80), ("3 * 1 GiB", 3, 1)],
)
def test_a_machine_is_described_in_words(text: str, count: int, gib: int):
    machine = Machine.describe(text)
    assert [device.torch_name for device in machine.devices] == [f"cuda:{i}" for i in range(count)]
    for device in machine.devices:
        assert device.total_bytes == device.budget_bytes == gib * GIB
        assert not device.present


def test_a_budget_holds_for_each_device_and_leaves_its_size():
    machine = Machine.describe("2 x 24GiB").with_budget("10GiB")
    assert [device.budget_bytes for device in machine.devices] == [10 * GIB] * 2
    assert [device.total_bytes for device in machine.devices] == [24 * GIB] * 2


def test_a_budget_beyond_the_device_is_refused():
    with pytest.raises(InputError, match=r"'25GiB', but any 24.0 GiB GPU has only 24.0 GiB"):
        Machine.describe("24GiB").with_budget("25GiB")


@pytest.mark.parametrize("text", ["", "x", "big", "0 x 24GiB", "24", "-1GiB", "4 x", "4x", "h2000"])
def test_what_is_no_machine_is_refused_or_too_small_to_be_one(text: str):
    if text == "24":  # bytes
        assert Machine.describe(text).device.budget_bytes == 24
        return
    with pytest.raises(InputError, match=r"machine|device"):
        Machine.describe(text)


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("rtx-4090", 1, "RTX 4090"),
        ("4090", 1, "RTX 4090"),
        ("8 x h100-80gb", 8, "H100 SXM5"),
        ("8xH100 80GB", 8, "H100 SXM5"),
        ("2 * MI300X", 2, "MI300X"),
    ],
)
def test_a_machine_is_described_by_the_names_of_its_devices(text: str, count: int, name: str):
    machine = Machine.describe(text)
    assert len(machine.devices) == count
    assert name in machine.device.name
    assert machine.device.capability
    assert machine.device.rates.half_flops > 1e14
    assert machine.device.budget_bytes == machine.device.total_bytes


def test_the_number_of_devices_is_given_once():
    assert len(Machine.describe("24GiB", count=3).devices) == 3
    with pytest.raises(InputError, match="once"):
        Machine.describe("2 x 24GiB", count=3)
    with pytest.raises(InputError, match="devices is 0"):
        Machine.describe("24GiB", count=0)


def test_ranks_on_one_cpu_share_its_memory():
    one, two = Machine.here(device="cpu"), Machine.here(device="cpu", count=2)
    assert len(two.devices) == 2
    assert two.device.budget_bytes < 0.6 * one.device.budget_bytes


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "CPU", ""])
def test_a_device_is_named_as_torch_names_it(device: str):
    with pytest.raises(InputError, match="device is"):
        Machine.here(device=device)

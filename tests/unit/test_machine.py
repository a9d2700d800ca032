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
    assert device.total_bytes <= psutil.virtual_memory().total
    assert device.free_bytes is not None
    assert device.free_bytes <= device.total_bytes
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


@pytest.mark.parametrize("text", ["", "x", "big", "0 x 24GiB", "-1GiB", "4 x", "4x", "h2000"])
def test_what_is_no_machine_is_refused(text: str):
    with pytest.raises(InputError, match=r"machine|device"):
        Machine.describe(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("24", r"device is '24', which is 24 bytes: write '24GiB', if you mean that, or '24B'"),
        ("1", "device is '1', which is 1 byte: write '1GiB'"),
        ("2 x 80", "'80', which is 80 bytes: write '80GiB'"),
        ("1PiB", "'1PiB', which is not a size: write a size above zero such as 512MiB"),
        ("24XB", "'24XB', which is not a size"),
        ("gtx1080", "catalogue of GPUs: write its memory"),
        ("mps", "CPUs, and on GPUs of CUDA or ROCm"),
    ],
)
def test_what_is_meant_as_a_size_or_a_name_is_answered_as_such(text: str, told: str):
    with pytest.raises(InputError, match=told):
        Machine.describe(text)


@pytest.mark.parametrize("memory", ["24", 24, "4096", "12.5", 12.5])
def test_a_budget_of_a_few_bytes_lacks_its_unit(memory: str | int):
    with pytest.raises(InputError, match=f"memory is {memory!r}, which is .* bytes: write '"):
        Machine.here(memory, "cpu")


def test_bytes_with_their_unit_are_taken_at_their_word():
    assert Machine.here("4096B", "cpu").device.budget_bytes == 4096
    assert Machine.here(1 << 20, "cpu").device.budget_bytes == 1 << 20


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


@pytest.mark.parametrize(
    ("device", "formats"),
    [
        ("t4", set()),
        ("v100-16gb", set()),
        ("rtx-3090", {"bf16", "tf32"}),
        ("rtx-4090", {"bf16", "tf32", "fp8"}),
        ("b200", {"bf16", "tf32", "fp8"}),
        ("mi250x", {"bf16"}),
        ("mi300x", {"bf16", "tf32", "fp8"}),
        ("mi355x", {"bf16", "fp8"}),
        ("24GiB", {"bf16", "tf32", "fp8"}),  # of which nothing else is known
    ],
)
def test_a_device_knows_the_formats_that_its_matrix_units_have(device: str, formats: set[str]):
    one = Machine.describe(device).device
    assert {name for name in ("bf16", "tf32", "fp8") if one.has(name)} == formats


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

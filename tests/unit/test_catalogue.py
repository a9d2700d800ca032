"""The catalogue: names are forgiving, and the figures are such as a device can have."""

from __future__ import annotations

import pytest

from anybatch.catalogue import MODELS, find, recognise
from anybatch.errors import InputError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h100-80gb", "h100-80gb"),
        ("H100 80GB", "h100-80gb"),
        ("h100", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-80gb-pcie"),
        ("rtx-4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("GeForce RTX4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("3060", "rtx-3060-12gb"),
        ("a100 40", "a100-40gb"),
        ("Tesla T4", "t4"),
        ("MI300X", "mi300x"),
        ("AMD Instinct mi250x", "mi250x"),
    ],
)
def test_a_name_is_understood_however_it_is_written(written: str, name: str):
    assert find(written).name == name


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_name_finds_itself(name: str):
    assert find(name) is MODELS[name]
    assert find(name.upper().replace("-", " ")) is MODELS[name]


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("a100", "'a100-40gb'.*'a100-80gb'"),
        ("v100", "'v100-16gb' or 'v100-32gb'"),
        ("h2000", "'h200'"),
        ("rtx 4099", "'rtx-4090'"),
        ("banana", "its memory, such as '24GiB'"),
        ("", "its memory"),
    ],
)
def test_what_is_not_there_or_not_clear_names_what_is(written: str, told: str):
    with pytest.raises(InputError, match=told):
        find(written)


@pytest.mark.parametrize(
    ("reported", "gib", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-80gb"),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx-4090"),
        ("Tesla V100-SXM2-32GB", 31.7, "v100-32gb"),
        ("Tesla T4", 14.7, "t4"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("AMD Instinct MI300X", 191.9, "mi300x"),
    ],
)
def test_a_driver_s_name_is_recognised_and_its_memory_is_not_overstated(
    reported: str, gib: float, name: str
):
    found = recognise(reported, int(gib * GIB))
    assert found is MODELS[name]
    assert 0.9 * gib < found.usable_bytes / GIB <= gib


def test_an_unknown_device_is_none_of_them():
    assert recognise("Some Accelerator 3000", 24 * GIB) is None
    assert recognise("NVIDIA H200", 24 * GIB) is None


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_figures_are_in_proportion(model):
    assert 8 <= model.memory_gib <= 192
    assert 0.85 < model.usable_bytes / (model.memory_gib * GIB) < 1
    assert 5e12 < model.fp32 < 3e14
    assert model.fp32 * 1.9 < model.half < 3e15
    assert model.tf32 == 0 or model.fp32 <= model.tf32 <= model.half
    assert 2e11 < model.memory_bandwidth < 1e13
    assert 1e10 < model.link_bandwidth < 1e12
    assert model.source
    older = model.capability.startswith("7")
    assert model.bfloat16 != older
    assert (model.tf32 == 0) == (older or model.capability == "gfx90a")

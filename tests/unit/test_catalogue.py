"""The catalogue: names are forgiving, and the figures are such as a device can have."""

from __future__ import annotations

import pytest

from anybatch.catalogue import MODELS, Model, find, knows, recognise
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
        ("H100SXM", "h100-80gb"),
        ("h20", "h20-96gb"),
        ("l40", "l40"),
        ("4070ti", "rtx-4070ti"),
        ("RTX 4070TiSUPER", "rtx-4070ti-super"),
        ("4090D", "rtx-4090-d"),
        ("RTX A6000", "rtx-a6000"),
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
        ("3080", "'rtx-3080-10gb' or 'rtx-3080-12gb'"),
        ("rtx 6000", "'quadro-rtx-6000', 'rtx-6000-ada' or 'rtx-pro-6000'"),
        ("h2000", "write 'h200'"),
        ("rtx 4099", "write 'rtx-4090'"),
        ("gtx1080", "catalogue of GPUs: write its memory, such as '24GiB'"),
        ("tpu", "CPUs, and on GPUs of CUDA or ROCm"),
        ("banana", "its memory, such as '24GiB'"),
        ("", "its memory"),
    ],
)
def test_what_is_not_there_or_not_clear_names_what_is(written: str, told: str):
    with pytest.raises(InputError, match=told):
        find(written)


@pytest.mark.parametrize("written", ["h2", "a4", "b2", "l40x", "mi300", "4090 laptop", "titan"])
def test_part_of_a_word_is_no_name(written: str):
    with pytest.raises(InputError, match="catalogue"):
        find(written)
    assert not knows(written)


@pytest.mark.parametrize("written", ["24", "80gb", "24GiB", "1e9", "1.5 GB"])
def test_a_size_is_no_name(written: str):
    assert not knows(written)


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
        ("NVIDIA A10G", 22.1, "a10g"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "a100-40gb-pcie"),
        ("NVIDIA H100 NVL", 93.1, "h100-94gb-nvl"),
        ("NVIDIA H20", 95.1, "h20-96gb"),
        ("NVIDIA GH200 480GB", 94.5, "gh200-96gb"),
        ("NVIDIA B300 SXM6 AC", 267.7, "b300"),
        ("NVIDIA GeForce RTX 3090 Ti", 23.6, "rtx-3090ti"),
        ("NVIDIA GeForce RTX 4060 Ti", 15.7, "rtx-4060ti-16gb"),
        ("NVIDIA GeForce RTX 4080 SUPER", 15.7, "rtx-4080-super"),
        ("NVIDIA RTX 6000 Ada Generation", 47.4, "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 94.9, "rtx-pro-6000"),
    ],
)
def test_a_driver_s_name_is_recognised_and_its_memory_is_not_overstated(
    reported: str, gib: float, name: str
):
    found = recognise(reported, int(gib * GIB))
    assert found is not None
    assert found is MODELS[name]
    assert 0.9 * gib < found.usable_bytes / GIB <= gib


@pytest.mark.parametrize(
    ("reported", "gib"),
    [
        ("Some Accelerator 3000", 24),
        ("NVIDIA H200", 24),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 19.6),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", 7.6),
        ("NVIDIA GeForce RTX 2080 with Max-Q Design", 7.6),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 94.9),
        ("NVIDIA TITAN V", 11.8),
        ("NVIDIA H20-3e", 139.7),
    ],
)
def test_a_word_more_or_another_memory_is_another_device(reported: str, gib: float):
    assert recognise(reported, int(gib * GIB)) is None


@pytest.mark.parametrize(
    ("name", "fp32", "tf32", "half"),
    [
        ("rtx-2080ti", 13.4, 0, 53.8),
        ("titan-rtx", 16.3, 0, 130.5),
        ("rtx-3090", 35.6, 35.6, 71),
        ("rtx-a6000", 38.7, 77.4, 154.8),
        ("rtx-4090", 82.6, 82.6, 165.2),
        ("l40", 90.5, 90.5, 181),
        ("rtx-6000-ada", 91.1, 182.1, 364.2),
        ("rtx-5090", 104.8, 104.8, 209.5),
    ],
)
def test_cores_and_clock_give_the_rates_of_the_architecture_s_paper(
    name: str, fp32: float, tf32: float, half: float
):
    model = MODELS[name]
    found = [rate / 1e12 for rate in (model.fp32, model.tf32, model.half)]
    assert found == pytest.approx([fp32, tf32, half], rel=0.005)


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_figures_are_in_proportion(model: Model):
    assert 8 <= model.memory_gib <= 288
    assert 0.85 < model.usable_bytes / (model.memory_gib * GIB) < 1
    assert 5e12 < model.fp32 < 3e14
    assert model.fp32 * 1.9 < model.half < 3e15
    assert model.tf32 == 0 or model.fp32 <= model.tf32 <= model.half
    assert 2e11 < model.memory_bandwidth < 1e13
    assert 1e10 < model.link_bandwidth < 1e12
    assert model.source
    without_tf32 = ("7.", "gfx90a", "gfx950", "gfx11")
    assert (model.tf32 == 0) == model.capability.startswith(without_tf32)

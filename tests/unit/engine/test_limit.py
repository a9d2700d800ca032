"""Budgets: of one CUDA device that several hold at once, and of a CPU, by measurement."""

import sys
from types import SimpleNamespace

import pytest
import torch
from tests.alone import alone

from anybatch.engine import limit
from anybatch.engine.limit import CpuLimit, OverBudget, at_work, uncounted
from anybatch.errors import InputError

MIB = 1 << 20


def test_budgets_of_one_cuda_device_know_of_each_other_and_of_no_other_device(monkeypatch):
    fractions = {0: 0.9, 1: 1.0}  # the first one as the script has set it
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "mem_get_info", lambda device: (0, 1000))
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "get_per_process_memory_fraction", lambda index: fractions[index])
    monkeypatch.setattr(
        cuda,
        "set_per_process_memory_fraction",
        lambda value, index: fractions.update({index: value}),
    )
    held = SimpleNamespace(beside_bytes=100, used_bytes=lambda: 250)
    monkeypatch.setattr(limit, "CudaMeter", lambda device: held)
    names = {"cuda": 500, "cuda:0": 300, "cuda:1": 700}
    wide, strict, other = (limit.CudaLimit(torch.device(n), b) for n, b in names.items())
    for one in (wide, strict, other):
        one.enter()
    assert fractions == {0: 0.2, 1: 0.6}
    strict.leave()
    assert fractions == {0: 0.4, 1: 0.6}
    wide.leave()
    other.leave()
    assert fractions == {0: 0.9, 1: 1.0}
    with pytest.raises(InputError, match=r"holds 250 B of cuda:1 already.* the budget is 200 B"):
        limit.CudaLimit(torch.device("cuda:1"), 200).enter()
    assert fractions == {0: 0.9, 1: 1.0}


def ones(num_mib: int) -> torch.Tensor:
    return torch.ones(num_mib * MIB, dtype=torch.uint8)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's peak is Linux's")
@alone
def test_a_pass_over_a_cpu_budget_is_found_and_what_is_set_aside_counts_for_nobody():
    strict, wide = CpuLimit(64 * MIB), CpuLimit(256 * MIB)
    with at_work():
        meters = [strict.enter(), wide.enter()]
        with uncounted():
            aside = ones(512)
        for held in (strict, wide):
            with held.watched("pass", None):
                ones(48)
        with wide.watched("pass", None):
            ones(128)
        with (
            pytest.raises(OverBudget, match="more than the budget of 64") as caught,
            strict.watched("pass", None),
        ):
            ones(128)
        assert 120 * MIB < caught.value.used_bytes < 136 * MIB, caught.value
        with strict.watched("pass", None):  # the peak that was undone is forgotten
            ones(48)
        strict.reserve(48 * MIB)
        with pytest.raises(OverBudget):
            strict.reserve(72 * MIB)
    script = ones(128)
    with at_work():
        for held in (strict, wide):
            with held.watched("pass", None):
                ones(48)
    assert len(aside) + len(script) == 640 * MIB
    assert 40 * MIB < meters[0].peak_bytes() <= 64 * MIB, meters[0].peak_bytes()
    for held in (strict, wide):
        held.leave()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's peak is Linux's")
@alone
def test_what_a_refused_pass_has_left_free_in_the_heap_is_no_part_of_the_peak():
    held = CpuLimit(64 * MIB)

    def small_blocks() -> list[torch.Tensor]:
        blocks = [(ones(8), torch.ones(1 << 16)) for _ in range(16)]
        return [block[1] for block in blocks]  # between the large ones, which become holes

    with at_work():
        meter = held.enter()
        held.follow("kept")
        with pytest.raises(OverBudget), held.watched("pass", None):
            small = small_blocks()
        with held.watched("pass", None):
            ones(8)
        assert meter.peak_bytes() < 64 * MIB, meter.peak_bytes()
        assert len(small) == 16
        held.leave()

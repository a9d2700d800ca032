"""What the environment says of torch's CUDA allocator is followed, and told."""

from __future__ import annotations

import pytest

import anybatch as ab
from anybatch.estimate.allocator import (
    AllocatorSettings,
    allocator_notices,
    settings_here,
)
from anybatch.machine import Machine
from anybatch.recipes import resolve

NAMES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("", AllocatorSettings()),
        ("expandable_segments:True", AllocatorSettings(expandable=True)),
        ("expandable_segments:False, max_split_size_mb: 64", AllocatorSettings(False, 64 << 20)),
        ("backend:native", AllocatorSettings()),
        (
            "roundup_power2_divisions:[256:1,512:2,>:4],expandable_segments:True",
            AllocatorSettings(True, None, ("roundup_power2_divisions:[256:1,512:2,>:4]",)),
        ),
        ("backend:cudaMallocAsync", AllocatorSettings(ignored=("backend:cudaMallocAsync",))),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_settings_are_read(
    name: str, told: str, expected: AllocatorSettings, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(name, told)
    assert settings_here() == expected


def test_nothing_is_told_of_defaults_and_something_of_all_else(monkeypatch: pytest.MonkeyPatch):
    assert not list(allocator_notices())
    monkeypatch.setenv(NAMES[0], "expandable_segments:True,backend:cudaMallocAsync")
    followed, ignored = allocator_notices()
    assert "under expandable_segments, which PYTORCH_ALLOC_CONF sets here" in followed
    assert "backend:cudaMallocAsync, which the prediction of bytes does not follow" in ignored


def test_a_plan_for_cuda_follows_expandable_segments_and_says_so(monkeypatch: pytest.MonkeyPatch):
    machine, task = Machine.describe("rtx-3080-10gb"), resolve("digits", {"global_batch": "64"})
    plain = ab.plan(task, machine)
    monkeypatch.setenv(NAMES[1], "expandable_segments:True")
    grown = ab.plan(task, machine)
    assert not any("expandable" in notice for notice in plain.notices)
    assert any("under expandable_segments" in notice for notice in grown.notices)
    # Segments grow by 20 MiB instead of being reserved one by one.
    assert plain.prediction is not None
    assert grown.prediction is not None
    assert grown.prediction.peak_bytes != plain.prediction.peak_bytes

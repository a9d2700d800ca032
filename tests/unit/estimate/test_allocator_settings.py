"""What the environment says of torch's CUDA allocator is told, and expandable segments are followed."""

from __future__ import annotations

import pytest

import anybatch as ab
from anybatch.estimate.allocator import allocator_notices, is_expandable
from anybatch.machine import Machine
from anybatch.recipes import resolve

NAMES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("told", "expandable", "ignored"),
    [
        ("", False, ""),
        ("expandable_segments:True", True, ""),
        ("expandable_segments:False, max_split_size_mb: 64", False, "max_split_size_mb:64"),
        ("backend:native", False, ""),
        (
            "roundup_power2_divisions:[256:1,512:2,>:4],expandable_segments:True",
            True,
            "roundup_power2_divisions:[256:1,512:2,>:4]",
        ),
        ("backend:cudaMallocAsync", False, "backend:cudaMallocAsync"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_settings_are_read_and_told(
    name: str, told: str, expandable: bool, ignored: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(name, told)
    assert is_expandable() is expandable
    sentences = list(allocator_notices())
    if expandable:
        assert f"under expandable_segments, which {name} sets here" in sentences.pop(0)
    if ignored:
        assert (
            f"{name} sets {ignored}, which the prediction of bytes does not follow"
            in sentences.pop()
        )
    assert not sentences


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

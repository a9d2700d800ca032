"""Who is taken to be gone, and when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

from anybatch.launch import council
from anybatch.launch.council import Council


@pytest.fixture
def alone() -> Iterator[Council]:
    """The only machine, which serves the store itself."""
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False
    )
    one = Council(store, "here", "node1", None, restarts=0, least=1, most=1)
    yield one
    one.close()


def test_a_machine_that_has_slept_misses_nobody(alone: Council, monkeypatch: pytest.MonkeyPatch):
    attempt = alone.open(alone._store, 0, 1)
    later = SimpleNamespace(
        monotonic=lambda: time.monotonic() + 3600, monotonic_ns=time.monotonic_ns, sleep=time.sleep
    )
    monkeypatch.setattr(council, "time", later)
    alone.check()
    assert alone.silent() == []
    assert alone.heard.told == [None]
    assert attempt.index == 0

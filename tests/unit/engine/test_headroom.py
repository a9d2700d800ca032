"""Room on devices whose allocator keeps what is freed: had once, in pieces, before it is needed. (Of
the heap: see `tests/faults/test_headroom.py`.)"""

from __future__ import annotations

import pytest
import torch

from anybatch.engine.headroom import Headroom


@pytest.mark.parametrize(
    ("least", "pieces", "asked"),
    [
        (100, (30, 0, 40), [30, 40, 30]),
        (100, (), [100]),
        (20, (30,), [20]),
        (0, (30,), []),
    ],
)
def test_a_device_is_asked_for_as_much_in_pieces(
    monkeypatch: pytest.MonkeyPatch, least: int, pieces: tuple[int, ...], asked: list[int]
):
    sizes: list[int] = []
    empty = torch.empty

    def noted(size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        sizes.append(size)
        return empty(size, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", noted)
    room = Headroom(torch.device("meta"))
    room.take(least, 10 * least, pieces)
    assert sizes == asked
    assert not room  # it is the allocator that keeps it

"""Room for the update is allocated once, in pieces, before the ranks agree on a step."""

from __future__ import annotations

import pytest
import torch

from anybatch.engine.update_room import try_out


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
    try_out(least, pieces, torch.device("meta"))
    assert sizes == asked

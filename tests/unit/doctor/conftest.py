"""Processes of the doctor that meet a torch which is not one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import anybatch


@pytest.fixture
def broken_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Have processes that are started from now on import this code by the name of torch."""

    def put(code: str) -> Path:
        folder = tmp_path / "ahead"
        folder.mkdir()
        (folder / "torch.py").write_text(code)
        source = str(Path(anybatch.__file__).parents[1])
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), source]))
        return folder

    return put

"""The versions that a run tells."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch

from anybatch.rank.checks import versions


def test_a_source_tree_that_is_not_installed_can_be_trained_from(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert versions() == {"anybatch": "not installed", "torch": torch.__version__}

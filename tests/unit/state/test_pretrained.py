"""What is asked about models of transformers, without importing it."""

from __future__ import annotations

import sys
import types

import pytest
from torch import nn

from anybatch.state.pretrained import is_pretrained


def test_a_library_that_imports_its_parts_when_asked_is_not_asked(monkeypatch: pytest.MonkeyPatch):
    lazy = types.ModuleType("transformers")

    def imports(name):
        raise MemoryError(f"importing {name} under a budget")

    lazy.__getattr__ = imports
    monkeypatch.setitem(sys.modules, "transformers", lazy)
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils", raising=False)
    assert not is_pretrained(nn.Linear(2, 2))

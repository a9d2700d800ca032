"""Options that may stand without their value."""

from __future__ import annotations

import pytest

from anybatch.cli.options import _with_values


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("", ""),
        ("a.py", "a.py"),
        ("a.py --tensorboard", "a.py --tensorboard="),
        ("a.py --tensorboard logs", "a.py --tensorboard logs"),
        ("a.py --tensorboard=logs", "a.py --tensorboard=logs"),
        ("--tensorboard --resume a.py", "--tensorboard= --resume a.py"),
        ("a.py --tensorboard -s lr=1", "a.py --tensorboard= -s lr=1"),
        ("a.py --json", "a.py --json=-"),
        ("a.py --json -", "a.py --json -"),
        ("a.py --json --all", "a.py --json=- --all"),
    ],
)
def test_the_value_that_is_meant(line: str, meant: str):
    assert list(_with_values(line.split())) == meant.split()

"""The text recipe from the command line, on one rank and on two: the same figures, the same sample."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.warm import Warm

from anybatch.events import Evaluated, Said
from anybatch.report import read

SMALL = ("limit=30kB", "context=32", "width=16", "depth=1", "heads=2", "steps=5")


def trained(warm: Warm, folder: Path, *options: str) -> tuple[Evaluated, str]:
    settings = [word for setting in SMALL for word in ("-s", setting)]
    line = ["train", "text", "--memory", "24MiB", "--out", str(folder), *settings, *options]
    done = warm(["anybatch", *line], folder.parent)
    assert done.returncode == 0, done.stderr
    events = read(folder / "events.jsonl")
    (said,) = [event.text for event in events if isinstance(event, Said)]
    assert said.rstrip("\n").splitlines()[0] in done.stdout
    return [event for event in events if isinstance(event, Evaluated)][-1], said


@pytest.mark.nightly
def test_two_ranks_train_and_tell_as_one_does(warm, tmp_path):
    one, said = trained(warm, tmp_path / "one", "--micro-batch", "16")
    two, said_by_two = trained(warm, tmp_path / "two", "--ranks", "2")
    assert two.loss == pytest.approx(one.loss, rel=1e-4)
    assert two.metrics == pytest.approx(one.metrics, rel=1e-3)
    assert said_by_two.partition("\n")[0] == said.partition("\n")[0]

"""What a task tells of its trained model: once, in the end, to all who read events."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.errors import InputError
from anybatch.events import RunEnded, Said, from_json, to_json
from anybatch.report import describe, read
from anybatch.report.folder import unfinished_step


def task(**changes):
    data = TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
    given = {
        "model": lambda: nn.Linear(3, 1),
        "loss": lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "train": data,
        "global_batch": 4,
        "epochs": 1,
    }
    return ab.Task(**{**given, **changes})


def test_what_is_told_is_the_last_event_and_in_the_report(tmp_path):
    def tell(model):
        assert not model.training
        return f"The bias is {model.bias.item():.3f}.\n  <so it is>"

    events = []
    result = ab.train(task(tell=tell), out=tmp_path / "run", sinks=[events.append])
    assert [type(event) for event in events[-2:]] == [RunEnded, Said]
    assert describe(events[-1]) == tell(result.model)
    assert read(tmp_path / "run" / "events.jsonl")[-1] == events[-1]
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert f"The bias is {result.model.bias.item():.3f}.\n  &lt;so it is&gt;" in page
    assert unfinished_step(tmp_path / "run") is None  # it had checkpoints, and has ended


def test_a_run_that_cannot_tell_is_finished_all_the_same(tmp_path):
    events = []
    tell = {}.__getitem__
    result = ab.train(task(tell=tell), out=tmp_path / "run", sinks=[events.append])
    assert result.ended.finished
    assert "could not tell of the trained model: KeyError" in events[-1].text
    assert (tmp_path / "run" / "report.html").exists()


def test_what_tells_is_a_function():
    with pytest.raises(InputError, match="tell is a value of type str; give a function or None"):
        task(tell="all is well")


def test_an_event_of_it_is_read_back():
    said = Said(time=1.0, text='two\nlines, "quoted"')
    assert from_json(to_json(said)) == said

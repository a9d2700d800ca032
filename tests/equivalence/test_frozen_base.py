"""What is not trained is left out of checkpoints where the task builds it again, and a run goes on over
the very same alone."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from tests.equivalence.test_resume import assert_close, plan_of, run, trained
from torch import nn

import anybatch as ab
from anybatch.errors import InputError
from anybatch.state import whole_state

DRAW = torch.Generator().manual_seed(3)
SAMPLES = list(
    zip(
        torch.randn(24, 6, generator=DRAW, dtype=torch.float64),
        torch.randn(24, 2, generator=DRAW, dtype=torch.float64),
        strict=True,
    )
)


class OverABase(nn.Module):
    """A small head over a larger base with norms, which is not trained."""

    def __init__(self, trained_base=False):
        super().__init__()
        layers = nn.Linear(6, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 32)
        self.base = nn.Sequential(*layers).requires_grad_(trained_base)
        self.head = nn.Linear(32, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs):
        if self.training:
            self.seen += 1.0
        return self.head(self.base(inputs))


def build():
    return OverABase().double()


def another():
    made = build()
    made.base[3].bias.data[0] += 1e-12
    return made


def task_of(model=build, **changes):
    fields = {
        "loss": lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.02),
        "train": SAMPLES,
        "global_batch": 8,
        "steps": 6,
    }
    return ab.Task(model=model, **{**fields, **changes})


def manifest(folder):
    (one,) = folder.glob("step-*")
    return json.loads((one / "manifest.json").read_text())["manifest"]


def held(folder):
    return {name for name in manifest(folder)["tensors"] if name.startswith("weights/")}


WITHOUT_BASE = {"weights/head.weight", "weights/head.bias", "weights/seen"}
BASE = {f"base.{i}.{kind}" for i in (0, 1, 3) for kind in ("weight", "bias")}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, "single"), (1, "single")),
        ((2, "replicate"), (1, "single")),
        ((1, "single"), (2, "shard")),
        ((2, "shard"), (2, "replicate")),
        ((2, "replicate"), (2, "shard")),
    ],
    ids=lambda way: f"{way[0]}-{way[1]}",
)
def test_it_is_not_held_and_the_run_ends_as_one_that_was_not_stopped(crew, tmp_path, before, after):
    wanted, _ = trained(task_of(), plan_of(task_of(), 1))
    run(crew, task_of, plan_of(task_of(), *before), tmp_path, until=2)
    assert held(tmp_path) == WITHOUT_BASE
    assert manifest(tmp_path)["facts"]["base"].keys() == BASE
    found, _ = run(crew, task_of, plan_of(task_of(), *after), tmp_path, resume=True)
    found["seen"] = wanted["seen"]  # passes, which other ranks have others of
    assert_close(found, wanted)


def test_resumed_in_another_precision_it_is_as_it_was_built(tmp_path):
    task = task_of(lambda: OverABase(), train=[(x.float(), y.float()) for x, y in SAMPLES])
    trained(task, plan_of(task, 1, precision="bf16-weights"), tmp_path, until=2)
    assert held(tmp_path) == WITHOUT_BASE
    with ab.Session(task, plan_of(task, 1), checkpoints=tmp_path) as session:
        assert session.resume()
        built = task.build_model().base.state_dict()
        assert_close(session.model.base.state_dict(), built, 0.0)


def followed(task, plan, folder, *, until=None, resume=False):
    """Train, with a base that follows the head's scale: written to behind autograd's back."""
    with ab.Session(task, plan, checkpoints=folder) as session:
        if resume:
            assert session.resume()
        for event in session.steps():
            session.model.base[0].weight.data.mul_(1 + session.model.head.bias.data[0])
            if event.step == until:
                break
        if until:
            session.save(wait=True)
        return {name: value.clone() for name, value in whole_state(session.model).items()}


def test_what_no_optimizer_has_and_changes_all_the_same_is_held(tmp_path):
    wanted = followed(task_of(), plan_of(task_of(), 1), tmp_path / "none")
    followed(task_of(), plan_of(task_of(), 1), tmp_path, until=3)
    assert held(tmp_path) == WITHOUT_BASE | {"weights/base.0.weight"}
    found = followed(task_of(), plan_of(task_of(), 1), tmp_path, resume=True)
    assert_close(found, wanted, 0.0)


def test_of_a_module_that_was_given_everything_is_held_and_either_task_resumes_it(tmp_path):
    wanted, _ = trained(task_of(), plan_of(task_of(), 1))
    whole = task_of(task_of().build_model())
    trained(whole, plan_of(whole, 1), tmp_path, until=2)
    assert held(tmp_path) == WITHOUT_BASE | {f"weights/{name}" for name in BASE}
    # By a function that builds another base: what is held counts, as with older checkpoints.
    other = task_of(another)
    for task in (task_of(whole.model), task_of(), other):
        found, _ = trained(task, plan_of(task, 1), tmp_path, resume=True)
        assert_close(found, wanted, 0.0)


def test_a_module_may_take_the_place_of_the_function(tmp_path):
    wanted, _ = trained(task_of(), plan_of(task_of(), 1))
    trained(task_of(), plan_of(task_of(), 1), tmp_path, until=2)
    given = task_of(task_of().build_model())
    found, _ = trained(given, plan_of(given, 1), tmp_path, resume=True)
    assert_close(found, wanted, 0.0)


def refused(task, folder, words):
    with (
        ab.Session(task, plan_of(task, 1), checkpoints=folder) as session,
        pytest.raises(InputError, match=words),
    ):
        session.resume()


def test_another_base_is_refused_by_name(tmp_path):
    trained(task_of(), plan_of(task_of(), 1), tmp_path, until=2)
    words = r"of another base: nothing trains 'base\.3\.bias', .* same file, .* torch "
    refused(task_of(another), tmp_path, words)


def test_a_base_that_is_trained_now_is_refused(tmp_path):
    trained(task_of(), plan_of(task_of(), 1), tmp_path, until=2)
    task = task_of(lambda: OverABase(trained_base=True).double())
    refused(
        task, tmp_path, r"does not hold 'base\.0\.\w+', .* and 3 more: nothing trained that when"
    )


def test_a_base_that_is_not_there_now_is_refused(tmp_path):
    def without():
        made = build()
        made.base[3] = nn.Identity()
        return made

    trained(task_of(), plan_of(task_of(), 1), tmp_path, until=2)
    refused(task_of(without), tmp_path, r"of another model: 'base\.3\.\w+' is not in the model")


def test_without_checkpoints_it_is_not_read(monkeypatch):
    def never(*_):
        raise AssertionError("read")

    monkeypatch.setattr("anybatch.state.base.bytes_of", never)
    task = dataclasses.replace(task_of(), steps=1)
    trained(task, plan_of(task, 1))

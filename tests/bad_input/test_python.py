"""The same mistakes in Python: each raises a named error whose text is the sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab

X = torch.arange(120.0).reshape(40, 3) / 120
Y = X.sum(dim=1, keepdim=True)


def mse(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def task(**changes: Any) -> ab.Task:
    fields = {
        "model": lambda: nn.Linear(3, 1),
        "loss": mse,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "train": TensorDataset(X, Y),
        "global_batch": 8,
        "epochs": 1,
    }
    return ab.Task(**{**fields, **changes})


def step(loss: Any = mse, **options: Any) -> ab.Step:
    model = nn.Linear(3, 1)
    return ab.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, **options)


def of_two_devices() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1, device="meta"))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter(TensorDataset(X, Y))


def unseen() -> nn.Module:
    """Takes shapes from its first input."""
    return nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(1))


def called(loss: Any = mse, batch: Any = (X, Y), **options: Any) -> None:
    with step(loss, **options) as one:
        one(batch)


ROWS: list[tuple[str, Callable[[], object], type[Exception], tuple[str, ...]]] = [
    ("train-no-task", lambda: ab.train(3), ab.InputError, ("type int", "anybatch.Task")),
    ("plan-no-task", lambda: ab.plan(nn.Linear(3, 1)), ab.InputError, ("Linear", "anybatch.Task")),
    (
        "verify-no-task",
        lambda: ab.verify("digits", ab.plan(task())),
        ab.InputError,
        ("type str", "anybatch.Task"),
    ),
    (
        "joint-encode",
        lambda: ab.JointLoss("clip", mse),
        ab.InputError,
        ("encode of a JointLoss", "type str", "a function of the model and a batch"),
    ),
    ("joint-compare", lambda: ab.JointLoss(mse, None), ab.InputError, ("compare", "NoneType")),
    (
        "joint-rows",
        lambda: called(ab.JointLoss(lambda model, batch: 3, mse), micro_batch=8),
        ab.LossError,
        ("encode returned a value of type int", "one row for each sample"),
    ),
    ("memory", lambda: ab.plan(task(), memory="lots"), ab.InputError, ("'lots'", "10GiB")),
    ("memory-bool", lambda: ab.plan(task(), memory=True), ab.InputError, ("True",)),
    ("precision", lambda: ab.plan(task(), precision="fp7"), ab.InputError, ("'fp7'", "bf16")),
    ("micro-batch", lambda: ab.plan(task(), micro_batch=0), ab.InputError, ("micro_batch is 0",)),
    (
        "lengths-of-others",
        lambda: ab.plan(task(lengths=[1] * 39)),
        ab.InputError,
        ("39 lengths for 40 training samples",),
    ),
    (
        "lengths-no-numbers",
        lambda: ab.plan(task(lengths=[1] * 39 + ["long"])),
        ab.InputError,
        ("sample 39 is 'long'", "whole number"),
    ),
    (
        "lengths-of-a-stream",
        lambda: task(train=Stream(), lengths=[1] * 40),
        ab.InputError,
        ("lengths are given for train", "no index"),
    ),
    (
        "plan-and-memory",
        lambda: ab.train(task(), "1GiB", plan=ab.plan(task())),
        ab.InputError,
        ("memory='1GiB'", "leave one"),
    ),
    (
        "plan-of-another-task",
        lambda: ab.train(task(), plan=ab.plan(task(global_batch=16))),
        ab.InputError,
        ("another task", "16 in the plan and 8"),
    ),
    (
        "nothing-fits",
        lambda: ab.plan(task(), memory="512KiB"),
        ab.NoPlanFits,
        ("512 KiB", '(memory="'),
    ),
    ("described", lambda: ab.Machine.describe("big"), ab.InputError, ("'big'", "'24GiB'")),
    ("described-empty", lambda: ab.Machine.describe(""), ab.InputError, ("''", "8 x h100-80gb")),
    (
        "device",
        lambda: ab.Machine.here(device="tpu"),
        ab.InputError,
        ("'tpu'", "'cuda:N'"),
    ),
    (
        "device-absent",
        lambda: ab.Machine.here(device="cuda:99"),
        ab.InputError,
        ("'cuda:99'", "CUDA_VISIBLE_DEVICES"),
    ),
    (
        "session-closed",
        lambda: ab.Session(task(), ab.plan(task())).evaluate(),
        ab.InputError,
        ("not open", "with anybatch.Session"),
    ),
    (
        "nothing-to-evaluate-on",
        lambda: evaluated(task()),
        ab.InputError,
        ("no held-out data", "valid="),
    ),
    ("step-of-no-model", lambda: ab.Step(3, 4, mse), ab.InputError, ("int and int", "Module")),
    (
        "step-on-two-devices",
        lambda: ab.Step(
            of_two_devices(), torch.optim.SGD(of_two_devices().parameters(), lr=0.1), mse
        ),
        ab.InputError,
        ("2 devices",),
    ),
    (
        "step-of-another-model",
        lambda: ab.Step(
            nn.Linear(3, 1), torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1), mse
        ),
        ab.InputError,
        ("none of the 2 parameters of the optimizer (SGD)", "Linear", "model.parameters()"),
    ),
    (
        "step-before-any-input",
        lambda: ab.Step(unseen(), torch.optim.SGD(unseen().parameters(), lr=0.1), mse),
        ab.InputError,
        ("layer '1' of the model (LazyLinear)", "run one forward pass before", "Step"),
    ),
    (
        "model-before-any-input",
        lambda: ab.plan(task(model=unseen())),
        ab.InputError,
        ("layer '1' of the model (LazyLinear)", "run one forward pass before", "the task"),
    ),
    (
        "model-function-without-any-input",
        lambda: ab.plan(task(model=unseen)),
        ab.InputError,
        ("layer '1' of the model (LazyLinear)", "run one forward pass", "in the model function"),
    ),
    ("step-precision", lambda: step(precision="tf32"), ab.InputError, ("tf32", "use fp32")),
    (
        "step-parts-disagree",
        lambda: called(batch={"x": X, "y": Y[:7]}),
        ab.DataError,
        ("batch['x'] has 40", "batch['y'] has 7"),
    ),
    ("step-no-samples", lambda: called(batch=3), ab.DataError, ("type int", "no samples")),
    (
        "step-nan",
        lambda: called(lambda m, b: m(b[0]).mean() * float("nan")),
        ab.LossError,
        ("step 1 is nan", "samples 0 to 39"),
    ),
    ("step-none", lambda: called(lambda m, b: None), ab.LossError, ("None", "return")),
    (
        "step-micro-batch",
        lambda: called(micro_batch=0),
        ab.InputError,
        ("micro_batch is 0",),
    ),
    ("warm-up", lambda: ab.warmup_cosine(1.5), ab.InputError, ("warmup is 1.5", "0 to 1")),
    ("floor", lambda: ab.warmup_linear(floor=-1), ab.InputError, ("floor is -1",)),
    (
        "weights-absent",
        lambda: ab.load_weights(nn.Linear(3, 1), "missing.safetensors"),
        ab.InputError,
        ("missing.safetensors", "give"),
    ),
    (
        "attribute",
        lambda: ab.trian,  # type: ignore[attr-defined]
        AttributeError,
        ("'anybatch'", "'trian'"),
    ),
]


def evaluated(one: ab.Task) -> None:
    with ab.Session(one, ab.plan(one)) as session:
        session.evaluate()


@pytest.mark.parametrize(
    ("call", "kind", "words"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS]
)
@pytest.mark.usefixtures("folder")
def test_a_mistake_raises_a_sentence(
    call: Callable[[], object], kind: type[Exception], words: tuple[str, ...]
):
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    sentence = str(caught.value)
    assert "\n" not in sentence
    for word in words:
        assert word in sentence


def test_every_error_is_what_code_without_anybatch_would_catch():
    for kind in (ab.InputError, ab.DataError, ab.LossError):
        assert issubclass(kind, ValueError)
        assert kind("x").exit_status == 2
    assert ab.NoPlanFits("x").exit_status == 3


def test_training_again_with_the_least_memory_that_was_named_works():
    one = task(model=lambda: nn.Linear(3, 4_000_000), loss=lambda m, b: m(b[0]).square().mean())
    with pytest.raises(ab.NoPlanFits) as caught:
        ab.plan(one, memory="8MiB")
    least = caught.value.least_bytes
    assert least is not None
    assert ab.plan(one, memory=least).choice.micro_batch == 1
    with pytest.raises(ab.NoPlanFits):
        ab.plan(one, memory=least - (1 << 17))


def test_a_step_that_failed_changes_nothing_and_the_next_one_works():
    outcomes = iter([float("nan"), 1.0])

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return mse(model, batch) * factor

    with step(loss, micro_batch=8) as one:
        before = [p.detach().clone() for p in one._model.parameters()]
        factor = next(outcomes)
        with pytest.raises(ab.LossError):
            one((X, Y))
        after = list(one._model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert all(p.grad is None for p in after)
        factor = next(outcomes)
        assert one((X, Y)).num_micro_batches == 5


def test_a_folder_is_looked_at_before_the_plan_is_made(folder: Path):
    def model() -> nn.Module:
        raise AssertionError("planned first")

    (folder / "file").write_text("")
    with pytest.raises(ab.InputError, match="file/run cannot be written to: Not a directory"):
        ab.train(task(model=model), out=folder / "file" / "run")


@pytest.mark.usefixtures("one_of_three")
def test_another_number_of_ranks_than_were_started_is_refused():
    with pytest.raises(ab.InputError, match="ranks is 2, but this process is one of 3"):
        ab.plan(task(), ranks=2)

"""Nothing wrong in silence: after public reports about several tools, one row each.

A row is trained in micro-batches of 5 of 24 samples, by `Step` and by `train`. Either the weights are
those of a plain loop over whole batches in float64, or exactly one sentence says what is wrong: a
warning, a notice of the plan, or an error. `verify` names the true cause of each planted fault.
"""

from __future__ import annotations

import copy
import itertools
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import anybatch as ab
from anybatch.data import evaluation
from anybatch.errors import AnybatchError, DataError, InputError

KIND: Any = {"dtype": torch.float64}
DRAW = torch.Generator().manual_seed(0)
X, T = torch.randn(24, 6, generator=DRAW, **KIND), torch.randn(24, 3, generator=DRAW, **KIND)
Y = torch.randint(0, 3, (24,), generator=DRAW)
IDS = torch.randint(0, 10, (24, 3), generator=DRAW)
W = torch.rand(24, generator=DRAW, **KIND)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8, **KIND), nn.Tanh(), nn.Linear(8, 3, **KIND))


def mean(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def each(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def total(model: nn.Module, batch: Any) -> Tensor:
    return each(model, batch).sum()


def counted(model: nn.Module, batch: Any) -> ab.Loss:
    kept = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    return ab.Loss(kept, (batch[1] != -100).sum())


def standardised(rows: Tensor) -> Tensor:
    return (rows - rows.mean(0)) / rows.std(0)


@dataclass(frozen=True)
class Row:
    """`told`: by Step, and by train where that says something else; nothing: the weights are right."""

    loss: Callable[[nn.Module, Any], Any] = mean
    told: str = ""
    by_train: str | None = None
    build: Callable[[], nn.Module] = build
    data: tuple[Any, ...] = (X, Y)
    collate: Callable[[list[int]], Any] | None = None
    optimizer: Callable[[Any], Any] = field(default=lambda params: torch.optim.SGD(params, lr=0.3))
    clip: float | None = None
    reference: Callable[[nn.Module, Any], Any] | None = None

    def batch(self) -> Any:
        """All samples, as each step has them."""
        if self.collate is not None:
            return self.collate(list(range(24)))
        return tuple(copy.deepcopy(part) for part in self.data)

    def made(self) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = self.build()
        return model, self.optimizer([p for p in model.parameters() if p.requires_grad])


# --------------------------------------------------------------------------------- models and losses


class Around(nn.Module):
    """Runs the network between `before` and `after`, which may keep something in the module."""

    def __init__(self, before: Any = None, after: Any = None) -> None:
        super().__init__()
        self.inner, self.teacher = build(), build().requires_grad_(False)
        self.before, self.after = before, after
        self.register_buffer("centre", torch.zeros(3, **KIND))
        self.calls = 0
        self.own = random.Random(3)
        self.generators = torch.Generator(), np.random.default_rng(1)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.before is None else self.before(self, x)
        y = self.inner(x)
        return y if self.after is None else self.after(self, y)


def centred(model: Any, y: Tensor) -> Tensor:
    result = y - model.centre
    model.centre = 0.9 * model.centre + 0.1 * y.detach().mean(0)
    return result


def counting(model: Any, y: Tensor) -> Tensor:
    model.calls += 1
    return y * (1 + 0.1 * model.calls)


def with_momentum(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        for old, new in zip(model.teacher.parameters(), model.inner.parameters(), strict=True):
            old.lerp_(new, 0.1)
    return x - model.teacher(x).mean(1, keepdim=True)


def hooked(put_on: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = build()
        put_on(model)
        return model

    return make


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


def clamped_inside(_: Any, y: Tensor) -> Tensor:
    if y.requires_grad:
        y.register_hook(clamped)
    return y


class Attached(torch.autograd.Function):
    """Passes `x` on, and gives `auxiliary` a gradient of one, as mixtures of experts do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, auxiliary: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, torch.ones((), **KIND)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * 2


class Normalised(Doubled):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / (gradient.norm() + 1e-9)


def attached(model: nn.Module, batch: Any) -> Tensor:
    y = model(batch[0])
    return F.cross_entropy(Attached.apply(y, 0.01 * y.square().mean()), batch[1])


def applied(kind: Any) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, batch: F.cross_entropy(kind.apply(model(batch[0])), batch[1])


def embedded(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Embedding(10, 4, **options, **KIND), nn.Flatten(), nn.Linear(12, 3, **KIND)
    )


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6, **KIND), nn.Tanh(), nn.Linear(6, 6, **KIND))
    model[2].weight = model[0].weight
    return model


def sometimes(model: Any, x: Tensor) -> Tensor:
    """A part of the parameters is used for few samples."""
    rare = x[:, 0] > 1.0
    return x + torch.where(rare[:, None], model.side(x), 0) if rare.any() else x


def with_rare_parameters() -> nn.Module:
    model = Around(before=sometimes)
    model.side = nn.Linear(6, 6, **KIND)
    return model


def batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8, **KIND), nn.BatchNorm1d(8, **KIND), nn.Linear(8, 3, **KIND)
    )


def in_place(model: nn.Module, batch: Any) -> Tensor:
    batch[0].div_(255)
    return mean(model, batch)


def forces(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0].clone().requires_grad_()
    energy = model(x)
    (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return F.cross_entropy(energy, batch[1]) + slope.square().sum(1).mean()


def balanced(model: nn.Module, batch: Any) -> Tensor:
    """The auxiliary loss of a mixture of experts: a square of a mean over the batch."""
    y = model(batch[0])
    return F.cross_entropy(y, batch[1]) + 0.1 * y.softmax(1).mean(0).square().sum()


def dropped(numbers: list[int]) -> Any:
    kept = [i for i in numbers if i not in (1, 2, 7, 13, 21)]
    return X[kept], Y[kept]


def ctc(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch[0]).log_softmax(-1).repeat(4, 1, 1)
    lengths, one = torch.full((len(scores[0]),), 4), torch.ones(len(scores[0]), dtype=torch.int64)
    return F.ctc_loss(scores, batch[1].clamp(min=1)[:, None], lengths, one, reduction="sum")


def replaced(values: Tensor, place: Any, value: Any) -> Tensor:
    result = values.clone()
    result[place] = value
    return result


def averaging(params: Any) -> Any:
    """Keeps an average of its own in a step hook, and trains by another rate in each step."""
    optimizer, seen = torch.optim.SGD(params, lr=0.3), []

    def before(one: Any, args: Any, options: Any) -> None:
        seen.append(None)
        one.param_groups[0]["lr"] = 0.3 / len(seen)
        nn.utils.clip_grad_value_(params, 0.01)

    optimizer.register_step_pre_hook(before)
    return optimizer


def named(numbers: list[int]) -> Any:
    return {
        "x": {"a": X[numbers], "none": None},
        "y": Y[numbers],
        "names": [str(i) for i in numbers],
        "scale": torch.tensor(2.0, **KIND),
        "mask": W[numbers] > 0.5,
    }


ADD = "does not add up over samples"


def detected(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean over samples of the mean over their objects, of which a sample may have none."""
    total = 0.0 * model(batch[0]).sum()
    for sample, num_objects in zip(*batch, strict=True):
        if num_objects:
            found = model(sample.expand(int(num_objects), -1))
            total = total + F.smooth_l1_loss(found, torch.zeros_like(found))
    return total / len(batch[0])


AGAIN = "gives another loss when the same samples pass a second time"
PROPORTION = "has a gradient that is not proportional to it"
LEFT_OUT = "leaves out targets"
ABOUT_COST = r"could not be traced|[Bb]ytes and seconds|the estimate takes"
UNEQUAL = "returns a mean over .* elements per sample in one micro-batch and .* in another"
ALL = torch.ones(24, 3, dtype=torch.bool)

ROWS = {
    # what is right
    "a mean": Row(),
    "all targets of one micro-batch are ignored": Row(
        counted, data=(X, replaced(Y, slice(5, 10), -100))
    ),
    "some samples have no mean": Row(detected, data=(X, torch.arange(24) * 7 % 5)),
    "one micro-batch weighs nothing": Row(
        lambda model, batch: ab.Loss((each(model, batch) * batch[2]).sum(), batch[2].sum()),
        data=(X, Y, replaced(W, slice(5, 10), 0.0)),
    ),
    "a mask": Row(
        lambda model, batch: ab.Loss(
            (model(batch[0]) - batch[1])[batch[2]].square().sum(), batch[2].sum()
        ),
        data=(X, T, T > 0),
    ),
    "label smoothing": Row(
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)
    ),
    "tied weights are clipped": Row(
        lambda model, batch: F.mse_loss(model(batch[0])[:, :3], batch[1]),
        build=tied,
        data=(X, T),
        clip=0.05,
    ),
    "parameters without gradient in some micro-batches": Row(
        build=with_rare_parameters,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.5),
    ),
    "hooks of the optimizer": Row(optimizer=averaging),
    "embedding, max_norm": Row(build=embedded(max_norm=0.5), data=(IDS, Y)),
    "embedding, sparse": Row(build=embedded(sparse=True), data=(IDS, Y)),
    "names, masks and numbers in a batch": Row(
        lambda model, batch: F.cross_entropy(model(batch["x"]["a"]) / batch["scale"], batch["y"]),
        collate=named,
    ),
    "in-place work on the batch": Row(in_place),
    "a gradient of inputs in the loss": Row(forces),
    "a penalty beside a mean": Row(
        lambda model, batch: mean(model, batch) + 0.1 * model[0].weight.square().sum()
    ),
    "a mean over weights beside a mean": Row(
        lambda model, batch: mean(model, batch) + model[0].weight.square().mean()
    ),
    "an autograd function that scales": Row(applied(Doubled)),
    "collate leaves out samples": Row(collate=dropped),
    "a number that belongs to the batch": Row(
        lambda model, batch: ab.Loss(total(model, batch), batch[2]),
        "the weight of the loss does not add up",
        by_train="",
        collate=lambda numbers: (X[numbers], Y[numbers], torch.tensor(float(len(numbers)))),
    ),
    # what is told
    "targets that only a later micro-batch ignores": Row(
        mean, LEFT_OUT, data=(X, replaced(Y, slice(18, 20), -100))
    ),
    "a mean over nothing": Row(
        mean,
        "a mean over no element|is one over no element",
        data=(X, replaced(Y, slice(5, 10), -100)),
    ),
    "classes that are weighed": Row(
        lambda model, batch: F.cross_entropy(
            model(batch[0]), batch[1], weight=torch.tensor([1.0, 10.0, 0.1], **KIND)
        ),
        "a mean that weighs classes",
    ),
    "a mask that only a later micro-batch has": Row(
        lambda model, batch: (model(batch[0]) - batch[1])[batch[2]].square().mean(),
        UNEQUAL,
        data=(X, T, replaced(ALL, (slice(20, 24), 0), False)),
    ),
    "one target of each sample is left out": Row(  # as models of transformers shift labels
        lambda model, batch: F.cross_entropy(
            torch.stack([model(batch[0]), -batch[1]], -1).flatten(0, 1),
            torch.tensor([0, 1, -100]).repeat(len(batch[0])),
        ),
        data=(X, T),
    ),
    "a mean in each sample": Row(
        lambda model, batch: (
            sum(
                (y - t)[m].square().mean()
                for y, t, m in zip(model(batch[0]), *batch[1:], strict=True)
            )
            / len(batch[0])
        ),
        data=(X, T, replaced(ALL, (slice(20, 24), 0), False)),
    ),
    "one or two means in each sample": Row(
        lambda model, batch: (
            sum(
                y.square().mean() + ((y - t)[m].square().mean() if m.any() else 0.0)
                for y, t, m in zip(model(batch[0]), *batch[1:], strict=True)
            )
            / len(batch[0])
        ),
        data=(X, T, T > 0.5),
    ),
    "five means, one of them over a mask": Row(  # as many as samples, in all micro-batches but one
        lambda model, batch: (
            (model(batch[0]) - batch[1])[batch[2]].square().mean()
            + sum(model(batch[0])[:, i % 3].square().mean() for i in range(4))
        ),
        UNEQUAL,
        data=(X, T, replaced(ALL, (slice(20, 24), 0), False)),
    ),
    "a weighted mean": Row(
        lambda model, batch: (each(model, batch) * batch[2]).sum() / batch[2].sum(),
        ADD,
        data=(X, Y, W),
    ),
    "a sum": Row(total, "the loss is a sum over the samples"),
    "a sum divided by the global batch": Row(
        lambda model, batch: total(model, batch) / 24, "the loss is a sum over the samples"
    ),
    "a sum of a connectionist loss": Row(ctc, "the loss is a sum over the samples"),
    "a constant weight": Row(
        lambda model, batch: ab.Loss(total(model, batch), 1),
        "the weight of the loss does not add up",
    ),
    "a penalty in a sum": Row(
        lambda model, batch: ab.Loss(
            total(model, batch) + model[0].weight.square().sum(), len(batch[0])
        ),
        "adds a term to its sum",
    ),
    "the root of a mean": Row(
        lambda model, batch: F.mse_loss(model(batch[0]), batch[1]).sqrt(), ADD, data=(X, T)
    ),
    "the hardest three": Row(lambda model, batch: each(model, batch).topk(3)[0].mean(), ADD),
    "a square of a mean": Row(balanced, ADD),
    "a weak look across the batch": Row(
        mean, ADD, build=lambda: Around(before=lambda model, x: x + 1e-3 * x.mean(0))
    ),
    "a hinge that few pairs of samples exceed": Row(
        lambda model, batch: F.relu(
            1 - (z := 3 * model(batch[0].float())[:, 0])[:, None] + z
        ).mean(),
        ADD,
        build=lambda: build().float(),
    ),
    "labels in the first micro-batch": Row(
        lambda model, batch: (
            model(batch[0]).square().mean()
            + (each(model, batch)[batch[2]].mean() if batch[2].any() else 0.0)
        ),
        ADD,
        data=(X, Y, torch.arange(24) < 5),
    ),
    "values divided by the deviation over samples": Row(
        lambda model, batch: ab.Loss(standardised(model(batch[0])).square().sum(), len(batch[0])),
        ADD,
    ),
    "samples that are mixed": Row(
        lambda model, batch: mean(model, (0.7 * batch[0] + 0.3 * batch[0].flip(0), batch[1])), ADD
    ),
    "a counter": Row(mean, AGAIN, build=lambda: Around(after=counting)),
    "layers dropped by a generator of its own": Row(
        mean,
        AGAIN,
        build=lambda: Around(after=lambda model, y: y * (1 + model.own.random())),
    ),
    "a momentum encoder": Row(
        mean, f"{AGAIN}|Every pass writes to 'teacher", build=lambda: Around(before=with_momentum)
    ),
    "a spectral norm": Row(
        mean,
        "keep statistics that advance once per pass",
        build=lambda: nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8, **KIND)),
            nn.Tanh(),
            nn.utils.spectral_norm(nn.Linear(8, 3, **KIND)),
        ),
    ),
    "a centre": Row(
        mean, f"{AGAIN}|Every pass writes to 'centre'", build=lambda: Around(after=centred)
    ),
    "an auxiliary gradient that is attached": Row(attached, f"{PROPORTION}.*'Attached'"),
    "a gradient that is normalised": Row(applied(Normalised), f"{PROPORTION}.*'Normalised'"),
    "a clamp on an activation": Row(mean, PROPORTION, build=lambda: Around(after=clamped_inside)),
    "a clamp on a parameter": Row(
        mean,
        "the gradient of '0.weight' has a hook",
        build=hooked(lambda model: model[0].weight.register_hook(clamped)),
    ),
    "gradients by frequency": Row(
        mean, "scale_grad_by_freq", build=embedded(scale_grad_by_freq=True), data=(IDS, Y)
    ),
    "collate subtracts a mean": Row(
        mean,
        by_train="collate makes something else of a sample",
        collate=lambda numbers: (X[numbers] - X[numbers].mean(0), Y[numbers]),
    ),
    "BatchNorm": Row(
        mean, "BatchNorm normalises over 5 samples", "would cut a ghost batch", build=batch_norm
    ),
    "a loss that does not depend on the model": Row(
        lambda model, batch: mean(model, batch).detach(), "does not depend on any parameter"
    ),
    "a whole number": Row(
        lambda model, batch: (model(batch[0]).argmax(1) != batch[1]).sum(), "dtype torch.int64"
    ),
    "one loss for each sample": Row(each, r"the shape \(\d+,\)"),
    "backward in the loss": Row(
        lambda model, batch: [mean(model, batch).backward(), mean(model, batch)][1],
        "calls backward\\(\\) itself",
    ),
    "a metric in place of the weight": Row(
        lambda model, batch: (total(model, batch), torch.tensor(0.5, **KIND)),
        "taken as the weight of the first|the weight of the loss does not add up",
    ),
}


def plainly(row: Row) -> nn.Module:
    model, optimizer = row.made()
    for _ in range(3):
        optimizer.zero_grad()
        found = row.loss(model, row.batch())
        found = found.sum / found.weight if isinstance(found, ab.Loss) else found
        found.backward()
        if row.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), row.clip)
        optimizer.step()
    return model


def stepped(row: Row) -> tuple[nn.Module, tuple[str, ...]]:
    model, optimizer = row.made()
    options: dict[str, Any] = {"micro_batch": 5, "clip_norm": row.clip, "verbose": False}
    with ab.Step(model, optimizer, row.loss, **options) as step:
        for _ in range(3):
            step(row.batch())
    return model, ()


def trained(row: Row) -> tuple[nn.Module, tuple[str, ...]]:
    task = ab.Task(
        model=row.made()[0],
        loss=row.loss,
        optimizer=row.optimizer,
        train=range(24) if row.collate else TensorDataset(*row.data),
        collate=row.collate,
        global_batch=24,
        shuffle=False,
        steps=3,
        clip_norm=row.clip,
    )
    result = ab.train(task, micro_batch=5, progress=False)
    about_result = [one for one in result.plan.notices if not re.search(ABOUT_COST, one)]
    return result.model, tuple(about_result)


@pytest.mark.parametrize("way", [stepped, trained])
@pytest.mark.parametrize("name", ROWS)
def test_the_weights_are_right_or_one_sentence_says_what_is_wrong(name: str, way: Any):
    row = ROWS[name]
    told = row.by_train if way is trained and row.by_train is not None else row.told
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            model, said = way(row)
        except AnybatchError as error:
            model, said = None, (str(error),)
    sentences = [str(one.message) for one in caught if one.category is UserWarning]
    sentences = [one for one in (*sentences, *said) if "Triggered internally" not in one]
    if told:
        assert sentences
        assert all(re.search(told, one) for one in sentences), sentences
        assert len(sentences) <= 1 + told.count("|Every pass")
        return
    assert not sentences
    assert model is not None
    for found, want in zip(model.parameters(), plainly(row).parameters(), strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("memory", [None, "64MiB"])
def test_one_piece_leaves_what_forward_writes_to_as_a_plain_loop_does(memory: str | None):
    """Passes that are tried before the first step are undone, in frozen parameters too."""
    row = Row(build=lambda: Around(before=with_momentum, after=centred))
    model, optimizer = row.made()
    with ab.Step(model, optimizer, row.loss, memory, verbose=False) as step:
        for _ in range(3):
            step(row.batch())
    want = plainly(row)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, want.state_dict()[name], rtol=0, atol=1e-12)


def test_a_new_step_is_told_anew():
    for _ in range(2):
        with pytest.warns(UserWarning, match=PROPORTION):
            stepped(ROWS["a gradient that is normalised"])


def test_a_hook_that_updates_and_clears_is_no_loss_without_a_gradient(
    recwarn: pytest.WarningsRecorder,
):
    model = build()
    for param in model.parameters():
        own = torch.optim.SGD([param], lr=0.1)

        def update(_: Tensor, own: torch.optim.SGD = own) -> None:
            own.step()
            own.zero_grad()

        param.register_post_accumulate_grad_hook(update)
    with ab.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), mean) as step:
        step((X, Y))
    texts = [str(one.message) for one in recwarn]
    assert any("has a hook" in text for text in texts)
    assert not any("gradient of exactly zero" in text for text in texts)


# -------------------------------------------------------------------------------- verify


def in_blocks(draw: Callable[[Any], float]) -> Callable[[], nn.Module]:
    return lambda: Around(after=lambda model, y: y * (1 + draw(model)))


ELSEWHERE = "draws random numbers from "


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    rows = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(rows @ rows.T / 0.1, torch.arange(len(rows)))


CAUSES: dict[str, tuple[dict[str, Any], str]] = {
    "in-place work": ({"loss": in_place}, ""),
    "samples that collate drops": ({"train": range(24), "collate": dropped}, ""),
    "a centre": ({"model": lambda: Around(after=centred)}, r"pass a second time.*\('centre'\)"),
    "a momentum encoder": (
        {"model": lambda: Around(before=with_momentum)},
        r"pass a second time.*'teacher\.0\.weight'",
    ),
    "a counter": ({"model": lambda: Around(after=counting)}, r"pass a second time.*\('calls'\)"),
    "random": ({"model": in_blocks(lambda _: random.random())}, f"{ELSEWHERE}random,"),
    "numpy": (
        {"model": in_blocks(lambda _: float(np.random.rand()))},  # noqa: NPY002
        rf"{ELSEWHERE}numpy\.random,",
    ),
    "Python's generator": (
        {"model": in_blocks(lambda model: model.own.random())},
        f"{ELSEWHERE}a generator of its own .random's Random",
    ),
    "torch's generator": (
        {"model": in_blocks(lambda model: float(torch.rand((), generator=model.generators[0])))},
        f"{ELSEWHERE}a generator of its own .torch's Generator",
    ),
    "numpy's generator": (
        {"model": in_blocks(lambda model: model.generators[1].random())},
        f"{ELSEWHERE}a generator of its own .numpy's Generator",
    ),
    "an attached gradient": ({"loss": attached}, "gradient is not proportional to the loss"),
    "a normalised gradient": ({"loss": applied(Normalised)}, "not proportional to the loss"),
    "a hook": (
        {"model": hooked(lambda model: model[0].weight.register_hook(clamped))},
        "not proportional to the loss",
    ),
    "a sum": ({"loss": total}, "is a sum over the samples"),
    "a sum of a connectionist loss": ({"loss": ctc}, "is a sum over the samples"),
    "a constant weight": (
        {"loss": lambda model, batch: ab.Loss(total(model, batch), 1)},
        "The weight of the loss does not add up",
    ),
    "a contrastive loss": ({"loss": contrastive}, "tells the samples of a pass from one another"),
    "a penalty": ({"loss": ROWS["a penalty in a sum"].loss}, "adds a term to its sum"),
    "frequencies": (
        {"model": embedded(scale_grad_by_freq=True), "train": TensorDataset(IDS, Y)},
        "'0' divides gradients by how often",
    ),
    "a mean in collate": (
        {"train": range(24), "collate": ROWS["collate subtracts a mean"].collate},
        "collate computes with the samples of a batch together",
    ),
}


def task(**changes: Any) -> ab.Task:
    options: dict[str, Any] = {
        "model": build,
        "loss": mean,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "train": TensorDataset(X, Y),
        "global_batch": 24,
        "epochs": 2,
    }
    return ab.Task(**{**options, **changes})


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CAUSES)
def test_verify_names_the_cause(name: str):
    changes, cause = CAUSES[name]
    one = task(**changes)
    plan, before = ab.plan(one, micro_batch=5), random.getstate()
    verdict = ab.verify(one, plan)
    assert random.getstate() == before
    assert verdict.exact == (not cause), verdict
    if cause:
        (found,) = verdict.causes
        assert re.search(cause, found), found


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("kind", ["graphs", "an object"])
def test_verify_takes_batches_that_do_not_show_their_samples(kind: str, streams: bool):
    rows = [torch.randn(1 + i % 3, 6, generator=DRAW, **KIND) for i in range(12)]

    def graphs(numbers: list[int]) -> Any:
        some = [rows[i] for i in numbers]
        number = torch.repeat_interleave(torch.tensor([len(one) for one in some]))
        found = torch.cat(some), number, T[numbers, 0]
        return found if kind == "graphs" else Held(found)

    def loss(model: nn.Module, batch: Any) -> ab.Loss:
        x, number, y = batch if kind == "graphs" else batch.parts
        found = torch.zeros(len(y), **KIND).index_add(0, number, model(x)[:, 0])
        return ab.Loss((found - y).square().sum(), len(y))

    data = Stream(range(12)) if streams else range(12)
    one = task(train=data, collate=graphs, loss=loss, global_batch=12, epochs=None, steps=1)
    verdict = ab.verify(one, ab.plan(one, micro_batch=5))
    assert verdict.exact, verdict.causes


class Held:
    def __init__(self, parts: Any) -> None:
        self.parts = parts


class Stream(IterableDataset[Any]):
    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


# ------------------------------------------------------------------------------ endless streams


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(zip(X, Y, strict=True))


class EndlessWithLength(Endless):
    def __len__(self) -> int:
        return 30


def test_an_endless_stream_of_held_out_samples(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("anybatch.rank.batches.MOST_WITHOUT_LENGTH", 100)
    assert evaluation.MOST_WITHOUT_LENGTH > 100
    with pytest.raises(DataError, match=r"has given 100 samples and goes on.*__len__"):
        ab.train(task(valid=Endless()), progress=False)
    events: list[Any] = []
    ab.train(task(valid=EndlessWithLength()), progress=False, sinks=[events.append])
    assert {one.samples for one in events if isinstance(one, ab.events.Evaluated)} == {30}
    with pytest.raises(InputError, match="valid is an iterator"):
        task(valid=itertools.cycle([(X[0], Y[0])]))


# ------------------------------------------------------------------------------ values of a task


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": nn.Linear}, "model is the class Linear, which cannot be called with nothing"),
        ({"train": "x"}, "train is the text 'x'"),
        ({"valid": TensorDataset}, "valid is the class TensorDataset"),
        ({"seed": 2**70}, "seed is 1180591620717411303424"),
        ({"name": 5}, "name is 5"),
        ({"name": ""}, "name is ''"),
        ({"num_workers": 10**6}, "num_workers is 1000000; give at most"),
        ({"clip_norm": True}, "clip_norm is True"),
        ({"shuffle": "no"}, "shuffle is 'no'; give True or False"),
        ({"origin": 5}, "origin is a value of type int"),
        ({"loss": nn.Linear}, "loss is the class Linear"),
        (
            {"loss": lambda batch: batch},
            "loss is '<lambda>', which cannot be called with model, batch",
        ),
        ({"collate": lambda: 1}, "collate is '<lambda>', which cannot be called with samples"),
        ({"scheduler": torch.optim.lr_scheduler.StepLR}, "scheduler is the class StepLR"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(changes: dict[str, Any], told: str):
    with pytest.raises(InputError, match=re.escape(told)):
        task(**changes)


# ----------------------------------------------------------------------- rows in files of their own

OTHER_FILES = {
    "fused updates in half precision": "bugs/test_fused_in_half.py",
    "a block called twice through the script's own checkpoint": "equivalence/test_shard.py",
    "hooks on fake tensors": "bugs/test_hooks_in_planning.py",
    "in-place work in a step that is done again": "bugs/test_in_place_on_a_batch.py",
    "draws in recomputed blocks": "equivalence/test_recompute.py",
    "bad data in a collate that drops": "bugs/test_collate_that_drops.py",
    "optimizers with modes": "equivalence/test_schedule_free.py",
    "buffers that a plan names": "bugs/test_buffers_per_pass.py",
    "held-out forces, complex weights": "bugs/test_known_before_the_first_step.py",
    "weight_norm, halved norms, vmap, Adafactor, sums in fp16": "bugs/test_raw_errors.py",
    "torch.jit": "bugs/test_compiled_by_jit.py",
    "sparse, nested, packed and flattened batches": "equivalence/test_kinds_of_batches.py",
}


@pytest.mark.parametrize("row", OTHER_FILES)
def test_the_other_rows_are_there(row: str):
    text = (Path(__file__).parents[1] / OTHER_FILES[row]).read_text()
    assert "\ndef test_" in text

"""Losses that do not add up over samples are told before the first update of a step that is cut."""

# ruff: noqa: NPY002 - user code draws from the old generators

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

import anybatch as ab
from anybatch.compute import frozen_randomness
from anybatch.compute.loss_reduction_check import _warn
from anybatch.data.batch_slices import doubled
from anybatch.errors import LossError

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(24, 6, generator=GENERATOR)
LABELS = torch.randint(2, (24,), generator=GENERATOR)
R = torch.randn(24, generator=GENERATOR)
GENERATOR_OF_LOSS = np.random.default_rng(0)
Batch = tuple[Tensor, Tensor, Tensor]


def build() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 2)
        )


def trained(loss: Any, micro_batch: int, model: nn.Module | None = None) -> list[str]:
    """What one step warns of."""
    _warn.cache_clear()
    model = build() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"micro_batch": micro_batch, "verbose": False}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        with ab.Step(model, optimizer, loss, **options, ghost_batch=micro_batch) as step:
            step((X, LABELS, R))
    return [str(one.message) for one in told if "the loss function" in str(one.message)]


def summed(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def pair(model: nn.Module, batch: Batch) -> ab.Loss:
    logits = model(batch[0])
    right = (logits.argmax(1) == batch[1]).sum()
    total = F.cross_entropy(logits, batch[1], reduction="sum")
    return ab.Loss(total, len(logits), metrics={"accuracy": right, "own": (right, len(logits))})


def mean_with_a_penalty(model: nn.Module, batch: Batch) -> Tensor:
    return mean(model, batch) + 0.1 * penalty(model)


def penalty(model: nn.Module) -> Tensor:
    return torch.stack([p.abs().sum() for p in model.parameters()]).sum()


def noisy_mean(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]) + torch.randn(len(batch[0]), 2)).square().mean()


def in_place(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch[0].mul_(0.5)).square().mean()


def pseudo_labels(model: nn.Module, batch: Batch) -> ab.Loss:
    """Switches modes by itself, so BatchNorm normalises over each pass."""
    model.eval()
    with torch.no_grad():
        labels = model(batch[0]).argmax(1)
    model.train()
    return ab.Loss(F.cross_entropy(model(batch[0] + 0.1), labels, reduction="sum"), len(labels))


@pytest.mark.parametrize("micro_batch", [8, 2])
@pytest.mark.parametrize(
    "loss", [mean, pair, mean_with_a_penalty, noisy_mean, in_place, pseudo_labels]
)
def test_nothing_is_said_of_what_adds_up(loss: Callable[[nn.Module, Batch], Any], micro_batch: int):
    assert trained(loss, micro_batch) == []


def diffusion(model: nn.Module, batch: Batch) -> Tensor:
    """The squared error per sample at a random level of noise."""
    level = torch.randint(1, 10, (len(batch[0]), 1)) / 10
    noise = torch.randn_like(batch[0])
    return (model(level * batch[0] + (1 - level) * noise)[:, :1] - noise).square().mean(1)


DRAWN: dict[str, Callable[[Tensor], Tensor]] = {
    "rrelu": lambda y: F.rrelu(y, training=True),
    "RReLU": nn.RReLU(),
    "Gumbel": F.gumbel_softmax,
    "hard Gumbel": lambda y: F.gumbel_softmax(y, hard=True),
    "multinomial": lambda y: y.gather(1, torch.multinomial(y.softmax(1), 1)),
    "Categorical": lambda y: torch.distributions.Categorical(logits=y).sample() * y[:, 0],
    "Poisson": lambda y: torch.poisson(y.exp()) * y,
    "Gamma": lambda y: torch.distributions.Gamma(y.exp(), torch.ones(())).rsample(),
    "Dirichlet": lambda y: torch.distributions.Dirichlet(y.exp()).rsample()[:, 0],
    "random_": lambda y: y * torch.empty(len(y), 1).random_(5),
    "random": lambda y: y * random.random(),
    "numpy": lambda y: y * torch.from_numpy(np.random.rand(len(y), 1)),
    "mixup": lambda y: 0.3 * y + 0.7 * y[torch.randperm(len(y))],
}


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_nothing_is_said_of_random_numbers(draw: Callable[[Tensor], Tensor]):
    def loss(model: nn.Module, batch: Batch) -> ab.Loss:
        return ab.Loss(draw(model(batch[0])).square().sum(), len(batch[0]))

    assert trained(loss, 8) == []


def test_random_numbers_hide_no_fault():
    def right(model: nn.Module, batch: Batch) -> ab.Loss:
        return ab.Loss(diffusion(model, batch).sum(), len(batch[0]))

    def wrong(model: nn.Module, batch: Batch) -> ab.Loss:
        return ab.Loss(diffusion(model, batch).mean(), len(batch[0]))

    def root_of(model: nn.Module, batch: Batch) -> Tensor:
        return diffusion(model, batch).mean().sqrt()

    assert trained(right, 8) == []
    with pytest.raises(LossError, match="the sum of the loss is a mean"):
        trained(wrong, 8)
    (told,) = trained(root_of, 8)
    assert "does not add up over samples" in told


@pytest.mark.parametrize(
    "draw", [lambda: np.random.uniform(0.9, 1.1), lambda: random.random(), GENERATOR_OF_LOSS.random]
)
def test_as_many_random_numbers_for_any_samples_hide_no_fault(draw: Callable[[], float]):
    def root_of(model: Any, batch: Batch) -> Tensor:
        return model(batch[0] * draw()).square().mean().sqrt()

    (told,) = trained(root_of, 8)
    assert "does not add up over samples" in told


def test_random_numbers_of_samples_are_no_fault_where_two_draws_are_close():
    def drawn(model: Any, batch: Batch) -> Tensor:
        factors = torch.from_numpy(np.random.uniform(1.0, 1.002, (len(batch[0]), 1)))
        return (model(batch[0].float() * factors.float()) - 1).square().mean()

    torch.manual_seed(0)
    for micro_batch in (2, 3, 4):
        for width in (1, 2, 4):
            assert trained(drawn, micro_batch, nn.Linear(6, width)) == []


def test_a_loss_that_draws_until_a_condition_holds_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(frozen_randomness, "MOST_DRAWS", 1000)

    def masked(model: nn.Module, batch: Batch) -> Tensor:
        while not (mask := torch.rand(len(batch[0]), 6) < 0.4).any():
            pass
        return model(batch[0].masked_fill(mask, 0.0)).square().mean()

    assert trained(masked, 8) == []


class Recurrent(nn.Module):
    """Keeps its hidden state; `fits` starts anew where the number of samples is another."""

    def __init__(self, fits: bool) -> None:
        super().__init__()
        self.cell, self.fits, self.state = nn.GRUCell(6, 2), fits, None

    def forward(self, x: Tensor) -> Tensor:
        if self.fits and self.state is not None and len(self.state) != len(x):
            self.state = None
        state = self.cell(x, self.state)
        self.state = state.detach()
        return state


@pytest.mark.parametrize("fits", [True, False])
def test_a_hidden_state_of_the_last_pass_is_told(fits: bool):
    (told,) = trained(mean, 8, Recurrent(fits))
    assert "another loss when the same samples pass a second time" in told
    assert "a hidden state" in told


def test_hooks_on_gradients_are_told_by_what_they_see():
    for register, words in (
        ("register_hook", "sees the sum over the samples of one pass"),
        ("register_post_accumulate_grad_hook", "on the sum over all passes so far"),
    ):
        model = build()
        getattr(model[0].weight, register)(lambda gradient: None)
        with pytest.warns(UserWarning, match=words):
            ab.Step(model, torch.optim.SGD(model.parameters()), mean, micro_batch=8, verbose=False)(
                (X, LABELS, R)
            )


def plain_sum(model: nn.Module, batch: Batch) -> Tensor:
    return 2 * summed(model, batch)


def autoencoder(model: nn.Module, batch: Batch) -> Tensor:
    """A public VAE's loss: noise, and a sum over everything."""
    found = model(batch[0])
    return (found + torch.randn_like(found) - 1).square().sum() + found.exp().sum()


def weight_of_one(model: nn.Module, batch: Batch) -> ab.Loss:
    return ab.Loss(summed(model, batch), 1)


def mean_as_sum(model: nn.Module, batch: Batch) -> ab.Loss:
    return ab.Loss(2 * mean(model, batch), len(batch[0]))


@pytest.mark.parametrize("micro_batch", [8, 2, 1])
@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (plain_sum, "the loss is a sum over the samples"),
        (autoencoder, "the loss is a sum over the samples"),
        (weight_of_one, "the weight of the loss does not add up: it is 1 for"),
        (mean_as_sum, "the sum of the loss is a mean"),
    ],
)
def test_a_loss_of_the_wrong_kind_is_refused_before_anything_is_trained(
    loss: Callable[[nn.Module, Batch], Any], told: str, micro_batch: int
):
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(LossError, match=told):
        trained(loss, micro_batch, model)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def sum_with_a_penalty(model: nn.Module, batch: Batch) -> ab.Loss:
    return ab.Loss(summed(model, batch) + 0.1 * penalty(model), len(batch[0]))


def mean_metric(model: nn.Module, batch: Batch) -> ab.Loss:
    sure = model(batch[0]).softmax(1).amax(1).mean()
    return ab.Loss(summed(model, batch), len(batch[0]), metrics={"sure": sure})


def dice(model: nn.Module, batch: Batch) -> Tensor:
    found, wanted = model(batch[0]).softmax(1)[:, 1], batch[1].float()
    return 1 - (2 * (found * wanted).sum() + 1) / (found.sum() + wanted.sum() + 1)


def correlation(model: nn.Module, batch: Batch) -> Tensor:
    z, y = model(batch[0])[:, 0], batch[2] - batch[2].mean()
    z = z - z.mean()
    return 1 - (z * y).sum() / (z.norm() * y.norm() + 1e-6)


def root(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0])[:, 0] - batch[2]).square().mean().sqrt()


def normalised(model: nn.Module, batch: Batch) -> ab.Loss:
    a = (batch[2] - batch[2].mean()) / (batch[2].std(correction=0) + 1e-8)
    return ab.Loss((-model(batch[0]).log_softmax(1)[:, 0] * a).sum(), len(a))


def contrastive(model: nn.Module, batch: Batch) -> Tensor:
    found = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(10 * found @ found.T, torch.arange(len(found)))


def batch_hard(model: nn.Module, batch: Batch) -> Tensor:
    distances = torch.cdist(model(batch[0]), model(batch[0]))
    same = batch[1][:, None] == batch[1]
    return (distances * same).amax(1).mean() - (distances + 10.0 * same).amin(1).mean()


def counted(model: nn.Module, batch: Batch) -> Tensor:
    """A mean over those that count."""
    each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (each * (batch[2] > 0)).sum() / (batch[2] > 0).sum().clamp(min=1)


@pytest.mark.parametrize("micro_batch", [8, 2, 1])
@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (sum_with_a_penalty, "adds a term to its sum that does not depend on the samples"),
        (mean_metric, "gives a metric 'sure' that is a mean"),
        (dice, "does not add up over samples"),
        (correlation, "does not add up over samples"),
        (root, "does not add up over samples"),
        (normalised, "does not add up over samples"),
        (contrastive, r"does not add up over samples|tells the samples of a pass"),
        (batch_hard, "does not add up over samples"),
        (counted, "does not add up over samples"),
    ],
)
def test_what_depends_on_the_cut_is_told_once(
    loss: Callable[[nn.Module, Batch], Any], told: str, micro_batch: int
):
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    found = [one for one in trained(loss, micro_batch, model) if "exactly zero" not in one]
    assert len(found) == 1
    assert any(part in found[0] for part in told.split("|"))


def balanced(model: nn.Module, batch: Batch) -> Tensor:
    """Scales a term to the size of another one, without a gradient through the factor."""
    logits = model(batch[0])
    main, other = F.cross_entropy(logits, batch[1]), logits.square().mean()
    return main + other * (main.detach() / other.detach())


def test_a_factor_without_a_gradient_is_told():
    (told,) = trained(balanced, 8)
    assert "gradient that does not add up over samples" in told


class Later:
    """A loss that compares samples from its `begin`th step on; before, it is 0 or a plain mean."""

    def __init__(self, begin: int, before: float) -> None:
        self.begin, self.before, self.step = begin, before, 1

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        each = model(batch[0]).square().mean(1)
        if self.step < self.begin:
            return self.before * each.mean()
        return each.mean() + each.std()


@pytest.mark.parametrize("before", [0.0, 1.0])
def test_what_the_first_step_does_not_show_is_told_in_a_later_one(before: float):
    _warn.cache_clear()
    loss, model = Later(3, before), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    told: list[int] = []
    with ab.Step(model, optimizer, loss, micro_batch=8, ghost_batch=8, verbose=False) as step:
        for loss.step in range(1, 9):
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always", UserWarning)
                step((X, LABELS, R))
            told += [loss.step for one in found if "does not add up" in str(one.message)]
    assert told == [4]


def encoded(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch[0])


def centred(model: nn.Module, batch: Batch) -> Tensor:
    found = model(batch[0])
    return found - found.mean(0)


def leaving(model: nn.Module, batch: Batch) -> Tensor:
    found = model(batch[0])
    model.left = found.detach().square().mean()
    return found


def contrast(_model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def contrast_and_left(model: nn.Module, rows: Tensor) -> Tensor:
    return contrast(model, rows) + model.left


@pytest.mark.parametrize(
    ("encode", "compare", "said"),
    [
        (encoded, contrast, None),
        (centred, contrast, "gives a sample another encoding"),
        (leaving, contrast_and_left, "leaves something on the model"),
    ],
)
def test_an_encoding_that_depends_on_the_pass_is_told(
    encode: Callable[[nn.Module, Batch], Tensor],
    compare: Callable[[nn.Module, Tensor], Tensor],
    said: str | None,
):
    _warn.cache_clear()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = ab.JointLoss(encode, compare)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        with ab.Step(model, optimizer, loss, micro_batch=8, ghost_batch=8, verbose=False) as step:
            step((X, LABELS, R))
    found = [str(one.message) for one in told if "the encode function" in str(one.message)]
    assert [said in one for one in found] == ([] if said is None else [True])


def test_a_generator_of_the_loss_is_no_state():
    draw = np.random.default_rng(0)

    def augmented(model: nn.Module, batch: Batch) -> Tensor:
        flip = torch.from_numpy(draw.integers(0, 2, (len(batch[0]), 1)) * 2.0 - 1.0).float()
        return model(batch[0] * flip).square().mean()

    assert trained(augmented, 8) == []


def test_a_loss_in_float32_of_a_model_in_float64_is_compared_as_such():
    model = build().double()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0].double()).float(), batch[1])

    assert trained(loss, 8, model) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_that_is_rounded_inside_is_compared_as_such(dtype: torch.dtype):
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 200)).to(dtype)

    def smoothed(model: nn.Module, batch: Batch) -> ab.Loss:
        """As transformers' LabelSmoother, which sums in float32."""
        scores = -F.log_softmax(model(batch[0].to(dtype)), -1)
        total = scores.gather(-1, batch[1][:, None]).sum()
        every = scores.sum(-1, dtype=torch.float32).sum() / 200
        return ab.Loss(0.9 * total + 0.1 * every, len(batch[0]))

    def half(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0].to(dtype)).bfloat16(), batch[1]).to(dtype)

    def half_inside(model: nn.Sequential, batch: Batch) -> Tensor:
        hidden = model[:2](batch[0].to(dtype)).bfloat16()
        logits = F.linear(hidden, *(param.bfloat16() for param in model[2].parameters()))
        return F.cross_entropy(logits.float(), batch[1])

    for seed in range(4):
        torch.manual_seed(seed)
        for param in model.parameters():
            nn.init.normal_(param, std=0.3)
        for loss in (smoothed, half, half_inside):
            assert trained(loss, 8, model) == []


def test_one_piece_is_as_the_script_has_it():
    assert trained(plain_sum, 24) == []
    assert trained(dice, 24) == []


def constant(model: nn.Module, batch: Batch) -> Tensor:
    return (0 * model(batch[0])).mean()


@pytest.mark.parametrize("micro_batch", [24, 8])
def test_a_gradient_of_zero_is_told(micro_batch: int):
    (told,) = trained(constant, micro_batch)
    assert "has a gradient of exactly zero in step 1" in told


def test_looking_leaves_no_trace():
    """Weights, running statistics and random numbers are those of a loop by hand."""
    draws: list[list[float]] = []

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.num_calls = build(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.num_calls += 1
            return self.inner(x)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch[0].mul_(0.5)) + torch.randn(8, 2) * np.random.rand()).square().mean()

    def numbers() -> list[float]:
        return [random.random(), np.random.rand(), float(torch.rand(()))]

    def seed() -> None:
        random.seed(3), np.random.seed(3), torch.manual_seed(3)

    results: list[list[Tensor]] = []
    for by_hand in (True, False):
        model, x = Counting(), X.clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seed()
        if by_hand:
            for start in range(0, 24, 8):
                (loss(model, (x[start : start + 8], LABELS, R)) / 3).backward()
            optimizer.step()
        else:
            options = {"micro_batch": 8, "ghost_batch": 8, "verbose": False}
            with ab.Step(model, optimizer, loss, **options) as step:
                step((x, LABELS, R))
        draws.append(numbers())
        assert model.num_calls == 3
        results.append([*model.state_dict().values(), x])
    assert draws[0] == draws[1]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def task_of(loss: Any, global_batch: int, train: Any = None) -> ab.Task:
    """One step of a linear model on the samples, or on `train`."""
    return ab.Task(
        model=lambda: nn.Linear(6, 2),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=train or torch.utils.data.TensorDataset(X, LABELS, R),
        global_batch=global_batch,
        steps=1,
    )


def test_a_task_is_looked_at_too():
    task = task_of(plain_sum, global_batch=24)
    with pytest.raises(LossError, match="the loss is a sum over the samples"):
        ab.train(task, micro_batch=8, progress=False)


@pytest.mark.parametrize("micro_batch", [1, 2, 5])
@pytest.mark.parametrize("as_task", [False, True])
def test_it_takes_no_more_memory_than_the_plan(
    micro_batch: int, as_task: bool, capsys: pytest.CaptureFixture[str]
):
    """With gradients no more samples pass than a micro-batch has, and few more without."""

    def noting(model: nn.Module, batch: Batch) -> Tensor:
        # Printed: what a loss function keeps is put back after the check.
        print("pass", len(batch[1]), torch.is_grad_enabled())
        return mean(model, batch)

    if as_task:
        task = task_of(noting, global_batch=20)
        plan = ab.plan(task, micro_batch=micro_batch, rehearsal=False)
        capsys.readouterr()
        ab.train(task, plan=plan, progress=False)
    else:
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"micro_batch": micro_batch, "verbose": False}
        with ab.Step(model, optimizer, noting, **options) as step:
            step((X[:20], LABELS[:20], R[:20]))
    sizes: dict[str, set[int]] = {"True": set(), "False": set()}
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("pass "):
            _, size, with_gradients = line.split()
            sizes[with_gradients].add(int(size))
    assert max(sizes["True"]) == micro_batch
    assert 1 < max(sizes["False"]) <= max(3, 2 * micro_batch)


@pytest.mark.parametrize("streams", [False, True])
def test_a_task_s_passes_of_one_sample_are_looked_at_several_together(streams: bool):
    """A correlation of one sample with itself is a constant, which adds up."""

    class Rows(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(zip(X, LABELS, R, strict=True))

    task = task_of(correlation, global_batch=12, train=Rows() if streams else None)
    _warn.cache_clear()
    with pytest.warns(UserWarning, match="does not add up over samples"):
        ab.train(task, micro_batch=1, progress=False)


@pytest.mark.parametrize(
    ("batch", "twice"),
    [
        ((X[:2], [1, 2], 3), lambda got: len(got[0]) == 4 and got[1] == [1, 2, 1, 2]),
        ({"x": X[:3].numpy(), "name": "a"}, lambda got: got["x"].shape == (6, 6)),
        ([{"x": 1}, {"x": 2}], lambda got: got == [{"x": 1}, {"x": 2}] * 2),
    ],
)
def test_batches_are_doubled(batch: Any, twice: Callable[[Any], bool]):
    assert twice(doubled(batch))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_batches_of_sequences_are_doubled(layout: torch.layout):
    first, second = X[:3], X[:2]
    packed = pack_sequence([second, first], enforce_sorted=False)
    nested = torch.nested.as_nested_tensor([second, first], layout=layout)
    found, also, labels = doubled((packed, nested, LABELS[:2]))
    wanted = [second, first, second, first]
    for some in (unpack_sequence(found), also.unbind()):
        assert all(torch.equal(one, other) for one, other in zip(some, wanted, strict=True))
    assert labels.tolist() == LABELS[:2].tolist() * 2


def test_the_standard_deviation_of_one_sample_is_named_as_a_cause():
    def spread(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch[0]).std(0).sum()

    with pytest.raises(LossError, match="std or var over a single sample"):
        trained(spread, 1, nn.Linear(6, 2))

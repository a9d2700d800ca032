"""Another batch with converted settings trains alike over the same samples, by torch's own optimizers.

Two schemes learn from `k` parts of a large batch, one after the other or together:

    small       k steps with rate lr, each by the mean gradient of one part
    together    one step with rate k lr, by the mean gradient of all (accumulated, say)

They are one where the gradient is the same at all points that the small steps pass. Elsewhere they
differ by terms of second order in lr, which have a formula; and Adam, whose steps depend on the noise
of a batch, keeps the distribution of its weights rather than the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab

PARTS = 4
SIZE = 3  # parameters

Gradient = Callable[[Tensor, int], Tensor]
"""Of the loss of one part of a batch, at these parameters."""


def drawn(*shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def small_steps(gradient: Gradient, start: Tensor, kind: Any, num_rounds: int = 1, **settings: Any):
    """The parameters after each round of `PARTS` steps."""
    return _rounds(gradient, start, kind, num_rounds, [[part] for part in range(PARTS)], settings)


def large_steps(gradient: Gradient, start: Tensor, kind: Any, num_rounds: int = 1, **settings: Any):
    """The parameters after each step by the mean gradient of all parts."""
    return _rounds(gradient, start, kind, num_rounds, [list(range(PARTS))], settings)


def _rounds(
    gradient: Gradient,
    start: Tensor,
    kind: Any,
    num_rounds: int,
    batches: list[list[int]],
    settings: dict[str, Any],
) -> list[Tensor]:
    weights = start.clone().requires_grad_()
    optimizer = kind([weights], **settings)
    passed = []
    for _ in range(num_rounds):
        for batch in batches:
            at = weights.detach()
            weights.grad = torch.stack([gradient(at, part) for part in batch]).mean(0)
            optimizer.step()
        passed.append(weights.detach().clone())
    return passed


def converted(kind: str, **settings: Any) -> dict[str, Any]:
    return ab.rescale(kind, 32, 32 * PARTS, **settings).settings


# ----------------------------------------------------------------------------------------------- SGD


def test_on_a_linear_loss_the_two_schemes_are_one():
    slopes = drawn(PARTS, SIZE)

    def gradient(at: Tensor, part: int) -> Tensor:
        return slopes[part]

    (small,) = small_steps(gradient, drawn(SIZE), torch.optim.SGD, lr=0.3)
    (large,) = large_steps(gradient, drawn(SIZE), torch.optim.SGD, **converted("sgd", lr=0.3))
    torch.testing.assert_close(large, small, rtol=1e-13, atol=1e-13)


def quadratic() -> tuple[Gradient, Tensor, Tensor]:
    """(gradient, curvature, minima of the parts)"""
    root, minima = drawn(SIZE, SIZE), drawn(PARTS, SIZE)
    curvature = root @ root.T / SIZE

    def gradient(at: Tensor, part: int) -> Tensor:
        return curvature @ (at - minima[part])

    return gradient, curvature, minima


def test_on_a_curved_loss_they_differ_at_second_order_by_the_formula():
    """small - together = lr^2 * sum over i > j of H g_j, and terms of third order: each small step's
    gradient has changed by what the steps before it have moved."""
    gradient, curvature, _ = quadratic()
    start = drawn(SIZE)
    slopes = [gradient(start, part) for part in range(PARTS)]
    formula = sum(curvature @ slopes[earlier] for later in range(PARTS) for earlier in range(later))
    distances = []
    for lr in (2e-3, 1e-3):
        (small,) = small_steps(gradient, start, torch.optim.SGD, lr=lr)
        (large,) = large_steps(gradient, start, torch.optim.SGD, **converted("sgd", lr=lr))
        torch.testing.assert_close((small - large) / lr**2, formula, rtol=0.05, atol=0.05)
        distances.append((small - large).norm())
    assert distances[0] / distances[1] == pytest.approx(4, rel=0.02)


def test_without_the_conversion_they_differ_at_first_order():
    gradient, _, _ = quadratic()
    distances = []
    for lr in (2e-3, 1e-3):
        (small,) = small_steps(gradient, drawn(SIZE), torch.optim.SGD, lr=lr)
        (large,) = large_steps(gradient, drawn(SIZE), torch.optim.SGD, lr=lr)
        distances.append((small - large).norm())
    assert distances[0] / distances[1] == pytest.approx(2, rel=0.02)


def test_l2_in_the_loss_needs_no_conversion():
    """With x = lr * decay, (1 - x) ** k against 1 - k x: second order again."""
    settings = {"lr": 1e-3, "weight_decay": 0.5}
    start = drawn(SIZE)
    (small,) = small_steps(no_gradient, start, torch.optim.SGD, **settings)
    (large,) = large_steps(no_gradient, start, torch.optim.SGD, **converted("sgd", **settings))
    second_order = PARTS * (PARTS - 1) / 2 * (1e-3 * 0.5) ** 2 * start
    torch.testing.assert_close(small - large, second_order, rtol=1e-2, atol=0)


def no_gradient(at: Tensor, part: int) -> Tensor:
    return torch.zeros_like(at)


def test_momentum_with_its_half_life_in_samples_gathers_way_alike():
    """By a constant gradient. Each large step goes as far as k of the last of the small ones: at the
    beginning, on the way, and at full speed."""
    tuned = {"lr": 1e-2, "momentum": 0.95}
    new = converted("sgd", averages="half-life", **tuned)
    small, large = steps_by_one(60 * PARTS, **tuned), steps_by_one(60, **new)
    torch.testing.assert_close(large, PARTS * small[PARTS - 1 :: PARTS], rtol=1e-9, atol=0)


def steps_by_one(num_steps: int, **settings: Any) -> Tensor:
    """How far each step goes by a gradient of one."""
    weights = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weights], **settings)
    passed = [0.0]
    for _ in range(num_steps):
        weights.grad = torch.ones_like(weights)
        optimizer.step()
        passed.append(weights.item())
    return torch.tensor(passed, dtype=torch.float64).diff()


@pytest.mark.parametrize("averages", ["published", "half-life"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_at_full_speed_both_ways_with_momentum_go_as_far(averages: str, nesterov: bool):
    tuned = {"lr": 1e-2, "momentum": 0.9}
    new = converted("sgd", averages=averages, **tuned)
    small = steps_by_one(400, nesterov=nesterov, **tuned)
    large = steps_by_one(400, nesterov=nesterov, **new)
    assert large[-1].item() == pytest.approx(PARTS * small[-1].item(), rel=1e-9)


@pytest.mark.parametrize("averages", ["published", "half-life"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_curvature_up_to_which_it_is_stable_is_as_told(averages: str, momentum: float):
    change = ab.rescale("sgd", 32, 32 * PARTS, lr=0.1, momentum=momentum, averages=averages)
    (told,) = [limit for limit in change.limits if limit.startswith("Stable up to a curvature")]
    steepest = float(told.split()[-2])

    def far_from_zero(curvature: float) -> float:
        def gradient(at: Tensor, part: int) -> Tensor:
            return curvature * at

        start = torch.ones(1, dtype=torch.float64)
        return (
            large_steps(gradient, start, torch.optim.SGD, 2000, **change.settings)[-1].abs().item()
        )

    assert far_from_zero(0.98 * steepest) < 1e-3
    assert far_from_zero(1.02 * steepest) > 1e3


# ---------------------------------------------------------------------------------------------- Adam


@pytest.mark.parametrize("times", [0.25, PARTS, 300])
def test_decoupled_decay_is_the_same_over_the_same_samples(times: float):
    """Of weights that nothing else moves: exactly."""
    before = 32 if times >= 1 else round(32 / times)
    after = round(before * times)
    tuned = {"lr": 1e-2, "weight_decay": 0.1}
    new = ab.rescale("adamw", before, after, averages="half-life", **tuned).settings
    num_samples = 3 * max(before, after)
    left = [decayed(num_samples // batch, one) for batch, one in ((before, tuned), (after, new))]
    torch.testing.assert_close(left[1], left[0], rtol=1e-12, atol=0)


def decayed(num_steps: int, settings: dict[str, Any]) -> Tensor:
    weights = torch.ones(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([weights], **settings)
    for _ in range(num_steps):
        weights.grad = torch.zeros_like(weights)
        optimizer.step()
    return weights.detach()


class Pull(NamedTuple):
    """What draws a weight to zero against the noise: the loss, or the decay of its optimizer."""

    optimizer: str
    curvature: float
    weight_decay: float


class Way(NamedTuple):
    """How many walkers went: their mean on the way, as part of the start, and their variance at the
    end."""

    drift: float
    variance: float


NUM_WALKERS, START, NOISE, RATE = 20_000, 0.1, 1.0, 5e-3
SAMPLES = 1600  # in batches of the tuned size: eight times as long as it takes to be drawn in


def walked(pull: Pull, times: int, settings: dict[str, Any]) -> Way:
    """Independent weights, each drawn to zero by its loss, on gradients whose noise falls with the
    batch, which is `times` as large as that for which the noise is `NOISE`."""
    draw = torch.Generator().manual_seed(0)
    weights = torch.full((NUM_WALKERS,), START, requires_grad=True)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[pull.optimizer]
    optimizer = kind([weights], **settings)
    num_steps, mean = SAMPLES // times, 0.0
    for step in range(num_steps):
        noise = torch.randn(NUM_WALKERS, generator=draw) * (NOISE / times**0.5)
        weights.grad = pull.curvature * weights.detach() + noise
        optimizer.step()
        if step + 1 == num_steps // 8:
            mean = weights.detach().mean().item()
    return Way(mean / START, weights.detach().var().item())


PULLS = [Pull("adam", 1.0, 0.0), Pull("adam", 0.0, 1.0), Pull("adamw", 0.0, 1.0)]


@pytest.mark.parametrize("averages", ["published", "half-life"])
@pytest.mark.parametrize("pull", PULLS, ids=["loss", "coupled decay", "decoupled decay"])
def test_adam_drifts_and_scatters_alike(pull: Pull, averages: str):
    """Drawn in by a part in e over an eighth of the way, with a stationary variance of lr / 2 for a
    pull and a noise of 1: both stay as they are."""
    tuned = {"lr": RATE, "weight_decay": pull.weight_decay}
    new = converted(pull.optimizer, averages=averages, **tuned)
    before, after = walked(pull, 1, tuned), walked(pull, PARTS, new)
    assert before.drift == pytest.approx(0.368, rel=0.1)
    assert before.variance == pytest.approx(RATE / 2, rel=0.1)
    assert after.drift == pytest.approx(before.drift, rel=0.06)
    assert after.variance == pytest.approx(before.variance, rel=0.06)


def test_by_the_linear_rule_adam_would_scatter_more():
    tuned = {"lr": RATE}
    before = walked(PULLS[0], 1, tuned)
    after = walked(PULLS[0], PARTS, {"lr": RATE * PARTS})
    assert after.variance > 1.6 * before.variance


def test_with_the_old_rate_adam_would_not_get_there():
    after = walked(PULLS[0], PARTS, {"lr": RATE})
    assert after.drift > 1.4 * 0.368


# ---------------------------------------------------------------------------- by whole trainings


@pytest.mark.parametrize(("curved", "alike"), [(False, 1e-12), (True, 1e-3)])
def test_a_task_with_k_times_the_batch_and_the_rate_ends_at_the_same_place(
    curved: bool, alike: float
):
    """The same samples in the same order, accumulated from micro-batches of the small batch; in the
    middle of k small steps there is nothing to compare."""
    samples = drawn(64, SIZE)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        found = model(batch)
        return ((found**2 if curved else 0) + found).mean()

    def trained(batch: int, settings: dict[str, Any]) -> Tensor:
        task = ab.Task(
            model=lambda: nn.Linear(SIZE, 1, dtype=torch.float64),
            loss=loss,
            optimizer=lambda params: torch.optim.SGD(params, **settings),
            train=samples,
            global_batch=batch,
            epochs=1,
            seed=0,
        )
        result = ab.train(task, micro_batch=8, progress=False)
        return torch.cat([p.detach().flatten() for p in result.model.parameters()])

    tuned = {"lr": 1e-3}
    change = ab.rescale("sgd", 8, 8 * PARTS, **tuned)
    small, large = trained(8, tuned), trained(8 * PARTS, change.settings)
    unchanged = trained(8 * PARTS, tuned)
    assert (large - small).norm() < alike
    assert (unchanged - small).norm() > 20 * (large - small).norm()

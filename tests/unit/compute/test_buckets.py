"""Gradients in buckets, which are never set to zero as a whole: nothing old comes through."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from anybatch.compute import Replica
from anybatch.compute import buckets as module
from anybatch.compute.buckets import Buckets, norm_of
from anybatch.plans import Choice


class Branches(nn.Module):
    """A pass may leave out `left` or `right`; `tied` is used twice; `norm` has tiny parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tied = nn.Linear(5, 5)
        self.left = nn.Linear(5, 3)
        self.right = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.norm = nn.LayerNorm(5)
        self.double()

    def forward(self, x: Tensor, ways: str) -> Tensor:
        x = self.norm(torch.relu(self.tied(torch.relu(self.tied(x)))))
        total = x.square().mean()
        if "left" in ways:
            total = total + self.left(x).sin().mean()
        if "right" in ways:
            total = total + self.right(x[:, :2, None, None].expand(-1, 2, 3, 3)).mean()
        return total


def filled(model: nn.Module) -> Buckets:
    """Buckets that hold what an earlier step, or the ranks' sums, left in them."""
    buckets = Buckets(list(model.parameters()))
    for flat in buckets.flats:
        flat.fill_(float("nan"))
    buckets.drop()
    return buckets


def gradients(model: nn.Module, passes: list[str]) -> list[Tensor]:
    """Of a plain loop; zeros where there is none."""
    plain = copy.deepcopy(model)
    for seed, ways in enumerate(passes):
        run(plain, seed, ways)
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in plain.parameters()]


def run(model: nn.Module, seed: int, ways: str) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    model(x, ways).backward()


@pytest.mark.parametrize(
    "passes",
    [["left right"], ["left", "right"], ["left", "left"], [""], ["left right", "right", ""]],
    ids=["all", "in turn", "one never", "both never", "three"],
)
def test_what_is_left_in_a_bucket_does_not_count(passes: list[str]):
    model = Branches()
    buckets = filled(model)
    wanted = gradients(Branches(), passes)
    for seed, ways in enumerate(passes):
        run(model, seed, ways)
    buckets.complete()
    for view, one in zip(buckets.views, wanted, strict=True):
        assert torch.equal(view, one)
    used = [bool(one.any()) for one in wanted]
    assert buckets.used == used
    buckets.drop_unused(used)
    for param, view, kept in zip(model.parameters(), buckets.views, used, strict=True):
        assert param.grad is (view if kept else None)


def test_what_the_user_computes_between_two_steps_does_not_count():
    model = Branches()
    buckets = filled(model)
    run(model, 7, "left right")
    buckets.drop()
    assert all(param.grad is None for param in model.parameters())
    run(model, 0, "left")
    buckets.complete()
    for view, one in zip(buckets.views, gradients(Branches(), ["left"]), strict=True):
        assert torch.equal(view, one)


def test_a_bucket_is_whole_when_it_is_given_away():
    model = Branches()
    buckets = filled(model)
    wanted = gradients(Branches(), ["left right"])
    given: list[list[Tensor]] = []
    with buckets.giving(lambda number: given.append([view.clone() for view in buckets.views])):
        run(model, 0, "left right")
    assert len(given) == len(buckets.flats)
    for view, one in zip(given[-1], wanted, strict=True):
        assert torch.equal(view, one)


def test_norms_of_buckets_are_the_norm_of_the_gradients():
    model = Branches()
    buckets = filled(model)
    for flat in buckets.flats:  # the room between two gradients is zero, as it was laid out
        flat.zero_()
    run(model, 0, "left right")
    for number in range(len(buckets.flats)):
        buckets.measure(number)
    wanted = torch.cat([one.flatten() for one in gradients(Branches(), ["left right"])]).norm()
    found = torch.stack(buckets.norms).norm()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-12)
    buckets.drop()
    assert not buckets.norms


def test_a_bucket_is_closed_by_the_parameter_that_fills_it(monkeypatch: pytest.MonkeyPatch):
    """Biases do not get buckets of their own between two large weights."""
    monkeypatch.setattr(module, "FIRST_BYTES", 1 << 10)
    monkeypatch.setattr(module, "CPU_BUCKET_BYTES", 1 << 12)
    layers = nn.Sequential(*[nn.Linear(40, 40) for _ in range(4)])  # 6400 and 160 bytes
    buckets = Buckets(list(layers.parameters()))
    assert len(buckets.flats) == 4


@pytest.mark.parametrize("clip_norm", [None, 1e-3, 1e3], ids=["plain", "clipped", "not clipped"])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("measured", [False, True])
def test_gradients_are_divided_and_clipped_as_by_hand(flat: bool, measured: bool, clip_norm):
    model, weight = nn.Linear(6, 3).double(), 7.0
    by_hand = copy.deepcopy(model)
    x = torch.randn(5, 6, dtype=torch.float64)
    replica = Replica(
        model,
        lambda: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda one, batch: (one(batch).square().sum(), weight),
        Choice(micro_batch=5, evaluation_batch=5),
        torch.device("cpu"),
        5,
    )
    buckets = replica.flatten() if flat else None
    replica.accumulate(x, 5)
    if buckets is not None and measured:
        for number in range(len(buckets.flats)):
            buckets.measure(number)
    norm = replica.finish(weight, clip_norm)
    (by_hand(x).square().sum() / weight).backward()
    wanted = nn.utils.clip_grad_norm_(by_hand.parameters(), clip_norm or 1e9)
    assert norm.item() == pytest.approx(wanted.item(), rel=1e-12)
    for mine, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.allclose(mine.grad, other.grad, rtol=1e-12, atol=0)
    replica.close()
    assert all(param.grad is None for param in model.parameters())


def test_the_norm_of_half_precision_sums_may_be_taken_beyond_their_range():
    values = [torch.full((4,), 40_000.0, dtype=torch.float16), torch.ones(3, dtype=torch.float64)]
    assert not norm_of(values[:1]).isfinite()
    assert norm_of(values[:1], wide=True).item() == 80_000
    assert norm_of(values, wide=True).item() == pytest.approx((80_000.0**2 + 3) ** 0.5)

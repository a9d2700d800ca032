"""Synchronised norms and what depends on the cut. Ranks are threads here; as processes they are in
tests/equivalence/test_norms_over_ranks.py."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from torch import nn

from anybatch.compute.ghost_norm import GhostBatches, depends_on_cut
from anybatch.errors import InputError


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


class Meeting:
    """Where the threads meet."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=600)
        self.said = [None] * size

    def of(self, rank):
        return Thread(self, rank)


class Thread:
    """An exchange of one of them."""

    def __init__(self, meeting, rank):
        self.meeting, self.rank = meeting, rank
        self.num_passes = 0

    def begin_pass(self):
        self.num_passes += 1

    def meet(self, place, count, mine):
        assert mine.dtype == torch.float64
        meeting = self.meeting
        meeting.said[self.rank] = (place, count, mine)
        meeting.barrier.wait()
        said = list(meeting.said)
        meeting.barrier.wait()
        assert len({place for place, _, _ in said}) == 1
        return [count for _, count, _ in said], torch.stack([mine for _, _, mine in said])


def over_threads(norm, pieces, weights):
    """Each piece through a copy of `norm` in a thread: outputs, gradients of inputs, the copies."""
    meeting = Meeting(len(pieces))
    norms = [copy.deepcopy(norm) for _ in pieces]
    inputs = [piece.detach().clone().requires_grad_() for piece in pieces]

    def run(rank):
        ghosts = GhostBatches(norms[rank], meeting.of(rank))
        with ghosts.cut([len(pieces[rank])]):
            output = norms[rank](inputs[rank])
            output.backward(weights[rank])
        ghosts.undo()
        return output.detach()

    with ThreadPoolExecutor(len(pieces)) as pool:
        outputs = list(pool.map(run, range(len(pieces))))
    return outputs, [x.grad for x in inputs], norms


def close(ours, plain, tolerance):
    """Relative to the largest value."""
    scale = plain.double().abs().max().clamp(min=1e-30)
    assert ((ours.double() - plain.double()).abs().max() / scale).item() < tolerance


@settings(max_examples=60)
@given(
    cut=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(lambda c: sum(c) > 1),
    inner=st.sampled_from([(), (3,), (2, 3), (2, 1, 2)]),
    momentum=st.sampled_from([0.1, 1.0, None]),
    affine=st.booleans(),
    tracking=st.booleans(),
    mean=st.sampled_from([0.0, 1e4]),
    seed=st.integers(0, 5),
)
@example(
    cut=[1, 0, 1], inner=(), momentum=0.1, affine=True, tracking=True, mean=0.0, seed=0
)  # two samples apart, and nothing between
def test_any_division_of_a_ghost_batch_is_the_whole_one(
    cut, inner, momentum, affine, tracking, mean, seed
):
    draw = torch.Generator().manual_seed(seed)
    kind = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}
    norm = kind[1 + len(inner)](
        3, momentum=momentum, affine=affine, track_running_stats=tracking, dtype=torch.float64
    )
    for param in norm.parameters():
        torch.nn.init.normal_(param, generator=draw)
    x = torch.randn(sum(cut), 3, *inner, generator=draw, dtype=torch.float64) + mean
    dy = torch.randn(x.shape, generator=draw, dtype=torch.float64)

    whole = copy.deepcopy(norm)
    plain = x.clone().requires_grad_()
    output = whole(plain)
    output.backward(dy)
    outputs, gradients, norms = over_threads(norm, x.split(cut), dy.split(cut))

    close(torch.cat(outputs), output, 1e-10)
    assert (torch.cat(gradients) - plain.grad).abs().max() < 1e-8 * max(1, plain.grad.abs().max())
    for name, param in whole.named_parameters():
        added = sum(dict(one.named_parameters())[name].grad for one in norms)
        close(added, param.grad, 1e-10)
    for name, buffer in whole.named_buffers():
        for one in norms:
            close(dict(one.named_buffers())[name], buffer, 1e-12 if mean == 0 else 1e-10)
            assert torch.equal(
                dict(one.named_buffers())[name], dict(norms[0].named_buffers())[name]
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("half_parameters", [False, True])
def test_half_inputs_have_float32_statistics(dtype, half_parameters):
    draw = torch.Generator().manual_seed(0)
    x = (torch.randn(10, 4, 5, 5, generator=draw) * 3 + 2).to(dtype)
    dy = torch.randn(10, 4, 5, 5, generator=draw).to(dtype)
    exact = nn.BatchNorm2d(4, dtype=torch.float64)
    norm = nn.BatchNorm2d(4, dtype=dtype if half_parameters else torch.float32)
    plain = x.double().requires_grad_()
    output = exact(plain)
    output.backward(dy.double())

    cut = [3, 7]
    outputs, gradients, norms = over_threads(norm, x.split(cut), dy.split(cut))

    assert outputs[0].dtype == gradients[0].dtype == dtype
    rounding = torch.finfo(dtype).eps
    close(torch.cat(outputs), output, 2 * rounding)
    close(torch.cat(gradients), plain.grad, 2 * rounding)
    kept = torch.finfo(norm.running_mean.dtype).eps
    close(norms[1].running_mean, exact.running_mean, 2 * kept)
    close(norms[1].running_var, exact.running_var, 2 * kept)


def test_values_far_from_zero_keep_their_variance():
    """E[x^2] - E[x]^2 in float32 would be off by more than the variance itself."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(64, 2, generator=draw) + 3000
    outputs, _, _ = over_threads(
        nn.BatchNorm1d(2), x.split([20, 44]), torch.ones(64, 2).split([20, 44])
    )
    exact = nn.BatchNorm1d(2, dtype=torch.float64)(x.double())
    close(torch.cat(outputs), exact, 1e-3)


def test_channels_last_stays():
    x = torch.randn(6, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    outputs, gradients, _ = over_threads(
        nn.BatchNorm2d(4), x.split(3), torch.ones(6, 4, 3, 3).split(3)
    )
    assert outputs[0].is_contiguous(memory_format=torch.channels_last)
    plain = x.clone().requires_grad_()
    nn.BatchNorm2d(4)(plain).sum().backward()
    torch.testing.assert_close(torch.cat(gradients), plain.grad, atol=1e-5, rtol=0)


class WithActivation(nn.BatchNorm2d):
    """A norm with something after it, as model libraries have them."""

    def forward(self, x):
        return F.relu(super().forward(x), inplace=True)


class ByNative(nn.BatchNorm2d):
    """A norm that calls the operator under the function."""

    def forward(self, x):
        return torch.batch_norm(
            x, self.weight, self.bias, self.running_mean, self.running_var, True, 0.1, 1e-5, False
        )


class ByHand(nn.BatchNorm2d):
    """A norm that computes everything itself."""

    def forward(self, x):
        return x - x.mean((0, 2, 3), keepdim=True)


def test_a_norm_with_a_forward_of_its_own():
    x, dy = torch.randn(7, 4, 3, 3), torch.randn(7, 4, 3, 3)
    plain = x.clone().requires_grad_()
    norm = WithActivation(4)
    whole = copy.deepcopy(norm)
    output = whole(plain)
    output.backward(dy)
    outputs, gradients, norms = over_threads(norm, x.split([2, 5]), dy.split([2, 5]))
    torch.testing.assert_close(torch.cat(outputs), output)
    torch.testing.assert_close(torch.cat(gradients), plain.grad)
    torch.testing.assert_close(norms[0].running_var, whole.running_var)


@pytest.mark.parametrize("kind", [ByHand, ByNative])
def test_a_norm_that_computes_by_hand_is_named(kind):
    with pytest.raises(InputError, match=r"'' computes its statistics in a way of its own"):
        over_threads(kind(4), [torch.randn(2, 4, 3, 3)], [torch.ones(2, 4, 3, 3)])


def test_a_single_value_is_one_over_all_ranks():
    with pytest.raises(InputError, match="single value per channel"):
        over_threads(
            nn.BatchNorm1d(3), torch.randn(1, 3).split([1, 0]), torch.ones(1, 3).split([1, 0])
        )


def test_outside_a_pass_nobody_is_asked():
    exchange = Meeting(2).of(0)
    model = nn.Sequential(nn.BatchNorm1d(3))
    ghosts = GhostBatches(model, exchange)
    x = torch.randn(5, 3)
    torch.testing.assert_close(model(x), nn.BatchNorm1d(3)(x))
    model.eval()
    with ghosts.cut([5]):
        torch.testing.assert_close(model(x), model(x))
    assert exchange.num_passes == 1


def test_a_copy_of_the_model_is_not_one_of_the_ranks():
    model = nn.Sequential(nn.BatchNorm1d(3))
    ghosts = GhostBatches(model, Meeting(2).of(0))
    with ghosts.cut([5]):
        other = copy.deepcopy(model)
        x = torch.randn(5, 3)
        torch.testing.assert_close(other(x), nn.BatchNorm1d(3)(x))
    assert ghosts.exchange is not None


def test_a_norm_without_statistics_is_cut_in_evaluation_mode_too():
    """It normalises over the batch in both modes."""
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)).eval()
    ghosts = GhostBatches(model)
    x = torch.randn(6, 3)
    with ghosts.cut([2, 4]):
        ours = model(x)
    torch.testing.assert_close(ours, torch.cat([nn.BatchNorm1d(3)(p) for p in x.split([2, 4])]))


class Running(nn.Module):
    """Another library's norm."""

    def __init__(self, momentum):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(3))
        self.momentum = momentum


def test_what_depends_on_the_cut_is_named():
    model = nn.ModuleDict(
        {
            "norm": nn.BatchNorm2d(3),
            "sync": nn.SyncBatchNorm(3),
            "layer": nn.LayerNorm(3),
            "plain": nn.InstanceNorm2d(3),
            **{f"tracking{i}": nn.InstanceNorm2d(3, track_running_stats=True) for i in range(5)},
            "foreign": Running(0.1),
            "spectral": torch.nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
        }
    )
    (told,) = depends_on_cut(model)
    assert told.startswith(
        "'tracking0', 'tracking1', 'tracking2' and 4 more keep statistics that advance once per pass"
    )
    (foreign,) = depends_on_cut(nn.ModuleDict({"foreign": model["foreign"]}))
    assert foreign.startswith("'foreign' keeps statistics that advance once per pass")
    (spectral,) = depends_on_cut(nn.ModuleDict({"spectral": model["spectral"]}))
    assert spectral.startswith("'spectral.parametrizations.weight.0' keeps statistics that advance")


def test_batch_norm_depends_on_nothing():
    assert depends_on_cut(nn.Sequential(nn.BatchNorm2d(3), nn.Linear(3, 3))) == ()


class Attention(nn.Module):
    """Hands its rate to a function."""

    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout


def test_random_numbers_depend_on_the_cut():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1), nn.Dropout(0.0), Attention(0.2))
    (sentence,) = depends_on_cut(model)
    assert "draws random numbers (in '1', '3')" in sentence


def test_a_rate_of_zero_or_a_part_in_evaluation_mode_draws_nothing():
    frozen = nn.Dropout(0.1).eval()
    assert depends_on_cut(nn.Sequential(frozen, Attention(0.0), nn.GRU(2, 2, 2))) == ()
    assert depends_on_cut(nn.Sequential(nn.GRU(2, 2, 2, dropout=0.5)))

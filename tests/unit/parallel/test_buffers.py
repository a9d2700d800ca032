"""What ranks agree their buffers to be is what one rank holds that has seen everything."""

import copy
import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from torch import nn

from anybatch.parallel.buffers import BufferAgreement


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


class Ranks:
    """Ranks one after the other in one process, each with a copy of `model`."""

    def __init__(self, model, size, **options):
        self.models = [copy.deepcopy(model) for _ in range(size)]
        self.agreements = [BufferAgreement(one, **options) for one in self.models]
        self.num_crossed = 0

    def step(self, *passes):
        """`passes`: for each rank, a function of its model."""
        contributions = []
        for model, agreement, run in zip(self.models, self.agreements, passes, strict=True):
            held = {
                (module, name): None if buffer is None else buffer.clone()
                for module in model.modules()
                for name, buffer in module._buffers.items()
            }
            run(model)
            contributions.append(agreement.contribution(lambda *place, held=held: held[place]))
        contributions = torch.stack(contributions)
        assert contributions.dtype == torch.float64
        assert contributions.shape == (len(self.models), self.agreements[0].size)
        calls = [self._settled(rank, contributions) for rank in range(len(self.models))]
        sources = {source: (places, tensors) for source, places, tensors in itertools.chain(*calls)}
        for agreement in self.agreements:
            agreement.settle(contributions, lambda mine, source: self._copies(sources[source][1]))
        self.num_crossed += sum(len(tensors) for _, tensors in sources.values())

    def _settled(self, rank, contributions):
        """What this rank would give when asked: a first settlement on a copy, nothing received."""
        asked = []

        def broadcast(mine, source):
            if source == rank:
                asked.append((source, rank, [None if t is None else t.clone() for t in mine]))
            return list(mine)

        saved = [
            (module, name, None if b is None else b.clone())
            for module in self.models[rank].modules()
            for name, b in module._buffers.items()
        ]
        self.agreements[rank].settle(contributions, broadcast)
        for module, name, buffer in saved:
            module._buffers[name] = buffer
        return asked

    def _copies(self, tensors):
        return [None if t is None else t.clone() for t in tensors]

    @property
    def states(self):
        return [dict(one.named_buffers()) for one in self.models]


def deviation(ours, plain):
    """Largest difference, relative to the largest value."""
    scale = plain.double().abs().max().clamp(min=1e-30)
    return ((ours.double() - plain.double()).abs().max() / scale).item()


def identical(states):
    return all(torch.equal(one[name], states[0][name]) for one in states for name in states[0])


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}


@settings(max_examples=150)
@given(
    seen=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    momentum=st.sampled_from([0.1, 0.9, 1.0, 0.0, 0.003, None]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    affine=st.booleans(),
    before=st.integers(0, 3),
    seed=st.integers(0, 3),
)
@example(seen=[0, 0], momentum=None, dtype=torch.float32, affine=True, before=0, seed=0)
@example(seen=[0, 40, 0, 1], momentum=1.0, dtype=torch.float32, affine=True, before=0, seed=0)
def test_any_distribution_of_ghost_batches_is_one_rank(seen, momentum, dtype, affine, before, seed):
    draw = torch.Generator().manual_seed(seed)
    norm = nn.BatchNorm1d(3, momentum=momentum, affine=affine, dtype=dtype)
    batches = torch.randn(before + 2 * sum(seen), 4, 3, generator=draw, dtype=torch.float64)
    batches = (batches * 2 + 1).to(dtype)
    for batch in batches[:before]:
        norm(batch)
    plain, ranks = copy.deepcopy(norm), Ranks(norm, len(seen))
    todo = iter(batches[before:])
    for _ in range(2):
        mine = [list(itertools.islice(todo, count)) for count in seen]
        ranks.step(*(lambda model, mine=one: [model(batch) for batch in mine] for one in mine))
        for batch in itertools.chain(*mine):
            plain(batch)
    assert identical(ranks.states)
    for name, buffer in plain.named_buffers():
        assert ranks.states[0][name].dtype == buffer.dtype
        assert deviation(ranks.states[0][name], buffer) < TOLERANCE[dtype], name
    assert ranks.models[0].num_batches_tracked == before + 2 * sum(seen)


class Net(nn.Module):
    """Norms of many kinds: called twice, never, frozen, without statistics."""

    def __init__(self, dtype):
        super().__init__()
        self.twice = nn.BatchNorm1d(3)
        self.never = nn.BatchNorm1d(5)
        self.frozen = nn.BatchNorm1d(3)
        self.without = nn.BatchNorm1d(3, track_running_stats=False)
        self.cumulative = nn.BatchNorm1d(3, momentum=None)
        self.frozen.eval()
        self.frozen.running_mean.fill_(0.3)
        self.to(dtype)

    def forward(self, x):
        return self.cumulative(self.without(self.frozen(self.twice(self.twice(x) + 1))))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_norms_of_many_kinds(dtype):
    model = Net(dtype)
    plain, ranks = copy.deepcopy(model), Ranks(model, 3)
    batches = torch.randn(12, 4, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    for step in batches.split(6):
        ranks.step(*(lambda m, p=p: [m(batch) for batch in p] for p in step.split([3, 1, 2])))
        for batch in step:
            plain(batch)
    assert identical(ranks.states)
    for name, buffer in plain.named_buffers():
        assert deviation(ranks.states[0][name], buffer) < TOLERANCE[dtype], name
    for name in ("frozen.running_mean", "frozen.running_var", "never.running_mean"):
        assert torch.equal(ranks.states[0][name], dict(model.named_buffers())[name])
    assert ranks.num_crossed == 0


def test_a_norm_that_one_rank_alone_ran_is_that_of_this_rank():
    """To the bit: nothing is added to it, and nothing rounded."""
    ranks = Ranks(nn.BatchNorm1d(3), 3)
    x = torch.randn(4, 3)
    plain = nn.BatchNorm1d(3)
    plain(x)
    ranks.step(lambda m: None, lambda m: m(x), lambda m: None)
    assert all(torch.equal(s["running_var"], plain.running_var) for s in ranks.states)


def test_a_norm_whose_count_forward_sets_back_keeps_what_it_has():
    """Its batches in the step are then not known."""
    norm = nn.BatchNorm1d(2)
    norm.num_batches_tracked.fill_(7)
    ranks = Ranks(norm, 2)
    ranks.step(lambda m: m.reset_running_stats(), lambda m: m.reset_running_stats())
    assert identical([*ranks.states, dict(norm.named_buffers())])


@pytest.mark.parametrize("synchronised", [False, True])
def test_a_norm_that_is_not_run_keeps_what_it_has(synchronised):
    norm = nn.BatchNorm1d(2)
    norm.running_var.copy_(torch.tensor([math.inf, 0.1]))
    norm.num_batches_tracked.fill_(7)
    ranks = Ranks(norm, 2, synchronised=synchronised)
    ranks.step(lambda m: None, lambda m: m.eval()(torch.randn(4, 2)))
    assert identical([*ranks.states, dict(norm.named_buffers())])


def test_synchronised_norms_are_those_of_a_rank_that_saw_all():
    def run(num):
        return lambda model: [model(x) for x in batches[:num]]

    batches = torch.randn(3, 4, 3)
    plain = nn.BatchNorm1d(3)
    run(3)(plain)
    ranks = Ranks(nn.BatchNorm1d(3), 3, synchronised=True)
    ranks.step(run(0), run(3), run(2))
    assert identical([*ranks.states, dict(plain.named_buffers())])


class Own(nn.Module):
    """Buffers of one's own: a counter written behind autograd's back, a table that grows, a mask."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int16))
        self.register_buffer("table", torch.zeros(0), persistent=False)
        self.register_buffer("absent", None)
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool))

    def forward(self, length):
        self.passes.data.add_(1)
        if length > len(self.table):
            self.table = torch.arange(length) + float(length) / 10
        self.mask = self.mask.clone()  # another tensor, the same content


def test_own_buffers_are_those_of_the_lowest_rank_that_wrote_them():
    ranks = Ranks(nn.Sequential(Own(), Own()), 3)
    ranks.step(
        lambda m: None,
        lambda m: [m[0](3), m[1](0)],
        lambda m: [m[0](5), m[0](6), m[1](7), m[1](8)],
    )
    assert identical(ranks.states)
    state = ranks.states[0]
    assert state["0.passes"].item() == state["1.passes"].item() == 1
    torch.testing.assert_close(state["0.table"], torch.arange(3) + 0.3)
    # Buffers of a module come from one rank: the second table stays that of rank 1, as it was.
    assert state["1.table"].numel() == 0
    assert ranks.num_crossed == 4


def test_constant_buffers_do_not_cross():
    ranks = Ranks(nn.Sequential(Own(), nn.Linear(2, 2)), 2)
    ranks.step(lambda m: None, lambda m: None)
    assert ranks.num_crossed == 0


def test_a_buffer_that_appears_and_one_that_goes():
    def swap(model):
        model.absent, model.mask = torch.ones(2), None

    ranks = Ranks(Own(), 2)
    ranks.step(lambda m: None, swap)
    for model in ranks.models:
        assert torch.equal(model.absent, torch.ones(2))
        assert model.mask is None


class Kernel(nn.Module):
    """A norm of another library: its kernel writes statistics without a new version."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x):
        return nn.functional.batch_norm(x, self.mean, self.var, training=True)


def test_a_kernel_that_writes_without_a_version_is_seen():
    versions = []

    def run(model):
        versions.append(model.mean._version)
        model(torch.randn(4, 3))
        versions.append(model.mean._version)

    ranks = Ranks(Kernel(), 2)
    ranks.step(lambda m: None, run)
    assert versions[0] == versions[1]
    assert ranks.states[0]["mean"].any()
    assert identical(ranks.states)


def test_more_buffers_on_a_norm():
    class Renorm(nn.BatchNorm1d):
        def __init__(self):
            super().__init__(3)
            self.register_buffer("limit", torch.zeros(1))

        def forward(self, x):
            self.limit += 1
            return super().forward(x)

    ranks, x = Ranks(Renorm(), 2), torch.randn(2, 4, 3)
    ranks.step(lambda m: m(x[0]), lambda m: m(x[1]))
    assert identical(ranks.states)
    assert ranks.states[1]["limit"] == 1
    assert ranks.states[1]["num_batches_tracked"] == 2


def test_a_model_without_buffers_has_nothing_to_say():
    ranks = Ranks(nn.Linear(2, 2), 2)
    ranks.step(lambda m: None, lambda m: None)
    assert ranks.agreements[0].size == 0

"""BatchNorm in `ab.Step` on several ranks: SyncBatchNorm looks at all of them, and what does not fit is
cut on all of them alike."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import anybatch as ab
from anybatch.plans import Choice, TaskIdentity
from anybatch.step.plans import _agreed_plan

KIND = {"dtype": torch.float64}


class Net(nn.Module):
    def __init__(self, norm, channels=4):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(3, channels, 3), norm(channels), nn.ReLU(), nn.Conv2d(channels, channels, 3)
        )
        self.last = norm(channels)
        self.head = nn.Linear(channels, 2)
        self.double()

    def forward(self, images):
        return self.head(self.last(self.body(images)).relu().mean((2, 3)))


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def samples(number, count, side=6):
    draw = torch.Generator().manual_seed(number)
    images = torch.randn(count, 3, side, side, generator=draw, **KIND) * 2 + number
    return images, torch.randint(2, (count,), generator=draw)


def part_of(number, sizes, rank, side=6):
    if sizes[rank] is None:
        return None
    start = sum(size or 0 for size in sizes[:rank])
    whole = samples(number, sum(size or 0 for size in sizes), side)
    return [tensor[start : start + sizes[rank]] for tensor in whole]


def trained(rank, size, parts, norm=nn.SyncBatchNorm, options=None, side=6):
    """Weights and buffers, losses, numbers of passes, and warnings."""
    model = Net(norm, channels=4 if side == 6 else 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with ab.Step(
            model, optimizer, loss, clip_norm=0.5, verbose=False, **(options or {})
        ) as step:
            done = [step(part_of(n, sizes, rank, side)) for n, sizes in enumerate(parts)]
    told = [str(one.message) for one in warned if one.category is UserWarning]
    return model.state_dict(), [o.loss for o in done], [o.num_micro_batches for o in done], told


def plainly(groups):
    """A plain loop in one process. `groups`: for each step the samples of each forward pass."""
    model = Net(nn.BatchNorm2d)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for number, passes in enumerate(groups):
        count = sum(map(len, passes))
        images, labels = samples(number, count)
        sums = [
            F.cross_entropy(model(images[rows]), labels[rows], reduction="sum") for rows in passes
        ]
        total = sum(sums) / count
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(total.item())
    return model.state_dict(), losses


def check_same(ranks, wanted, losses):
    for state, told, *_ in ranks:
        assert told == pytest.approx(losses, rel=1e-9)
        for name, value in state.items():
            assert torch.equal(value, ranks[0][0][name]), name
            assert torch.allclose(value, wanted[name], rtol=1e-8, atol=1e-11), name


@pytest.mark.parametrize(
    "parts",
    [[(4, 4, 4), (4, 4, 4)], [(7, 1, 2), (None, 5, 1), (2, 9, None)]],
    ids=["equal", "unequal"],
)
def test_sync_batch_norm_normalises_over_the_samples_of_all_ranks(crew, parts):
    ranks = crew(3, trained, parts)
    whole = [[list(range(sum(size or 0 for size in sizes)))] for sizes in parts]
    check_same(ranks, *plainly(whole))
    for rank, (_, _, passes, told) in enumerate(ranks):
        assert passes == [int(sizes[rank] is not None) for sizes in parts]
        assert not told


def without_a_backend_for_cpus(rank, size, parts):
    """As in a process group of NCCL alone: the norms make a group of their own for what is on CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anybatch.parallel.norms._devices_of_default_group", lambda: ["cuda"])
        made, before = [], dist.new_group
        patch.setattr(dist, "new_group", lambda **kwargs: made.append(before(**kwargs)) or made[-1])
        found = trained(rank, size, parts)
    (own,) = made
    with pytest.raises((TypeError, ValueError)):  # it was destroyed
        dist.get_backend(own)
    return found


def test_a_process_group_that_sends_no_cpu_tensors(crew):
    parts = [(4, 3), (1, 5)]
    whole = [[list(range(sum(sizes)))] for sizes in parts]
    check_same(crew(2, without_a_backend_for_cpus, parts), *plainly(whole))


def test_its_ghost_batches_are_as_many_samples_of_each_rank(crew):
    ranks = crew(2, trained, [(5, 4), (2, 6)], nn.SyncBatchNorm, {"ghost_batch": 2})
    # In the first step the passes of rank 0 are samples 0, 1 and 2, 3, 4; of rank 1 5, 6 and 7, 8.
    groups = [[[0, 1, 5, 6], [2, 3, 4, 7, 8]], [[0, 1, 2, 3], [4, 5], [6, 7]]]
    check_same(ranks, *plainly(groups))


def test_batch_norm_looks_at_each_rank_alone(crew):
    ranks = crew(2, trained, [(5, 4)], nn.BatchNorm2d)
    _, losses = plainly([[list(range(5)), list(range(5, 9))]])
    assert [told for _, told, *_ in ranks] == [pytest.approx(losses, rel=1e-9)] * 2
    assert not any(told for *_, told in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.SyncBatchNorm])
def test_what_does_not_fit_is_cut_on_all_ranks_alike(crew, norm):
    """The second batch of rank 1 is the first that does not fit."""
    parts = [(4, 4), (8, 48), (4, 4)]
    first, second = crew(2, trained, parts, norm, {"memory": "100MiB"}, 48)
    assert first[2][0] == second[2][0] == 1
    assert second[2][1] > 1
    (told,) = [text for text in first[3] if "does not fit the memory in one piece" in text]
    of_each = " of each rank" if norm is nn.SyncBatchNorm else ""
    found = re.search(rf"over ghost batches of (\d+) samples{of_each} from now on", told)
    assert found is not None
    assert int(found[1]) in (6, 12, 24)  # halves of the largest, which is not that of rank 0
    assert not any("in one piece" in text for text in second[3])
    for name, value in first[0].items():
        assert torch.equal(value, second[0][name]), name


def encode(model, batch):
    return model(batch[0])


def compare(model, encoded):
    return ab.Loss((encoded @ encoded.T).logsumexp(1).sum(), len(encoded))


def with_a_joint_loss(rank, size):
    model = Net(nn.SyncBatchNorm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        joint = ab.JointLoss(encode, compare)
        with ab.Step(model, optimizer, joint, verbose=False) as step:
            step(part_of(0, (3, 4), rank))
    return [(str(one.message), one.filename) for one in warned]


def test_a_loss_over_all_samples_leaves_each_rank_alone_and_says_so(crew):
    for told in crew(2, with_a_joint_loss):
        (text, where), *_ = [one for one in told if "SyncBatchNorm" in one[0]]
        assert text.startswith("SyncBatchNorm normalises over the samples of each rank here")
        assert where == __file__


def with_a_group_of_one(rank, size):
    own = [dist.new_group([one]) for one in range(size)][rank]
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Net(nn.BatchNorm2d), own)
    step = ab.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    with pytest.raises(ab.InputError) as raised:
        step(part_of(0, (3, 4), rank))
    return str(raised.value)


def test_a_process_group_of_some_ranks_is_refused(crew):
    for told in crew(2, with_a_group_of_one):
        assert told.startswith("SyncBatchNorm was given a process group of some of the ranks")


def with_some_of_each(rank, size):
    model = Net(nn.SyncBatchNorm)
    model.last = nn.BatchNorm2d(4, **KIND)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with ab.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss) as step:
            step(part_of(0, (3, 4), rank))
    return [str(one.message) for one in warned]


def test_norms_of_both_kinds_are_told(crew):
    for told in crew(2, with_some_of_each):
        assert any(one.startswith("1 of 2 BatchNorm layers are not SyncBatchNorm") for one in told)


def plan_of(num_samples, micro_batch, budget_bytes):
    return ab.Plan(
        task=TaskIdentity(
            name="step",
            global_batch=num_samples,
            ghost_batch=8,
            parameters=1,
            trainable_parameters=1,
        ),
        device="cpu",
        budget_bytes=budget_bytes,
        choice=Choice(micro_batch=micro_batch, evaluation_batch=1),
    )


def test_ranks_that_run_alike_follow_the_largest_and_keep_their_budgets():
    plans = [plan_of(17, 16, 1 << 30), plan_of(200, 64, 2 << 30), None]
    agreed = [
        _agreed_plan(SimpleNamespace(rank=rank, size=3), plans, alike=True) for rank in range(3)
    ]
    assert {number for _, number in agreed} == {217}
    assert [plan.budget_bytes for plan, _ in agreed] == [1 << 30, 2 << 30, 1 << 30]
    for plan, _ in agreed:
        sizes = [choice.micro_batch for choice in (plan.choice, *plan.ladder)]
        assert sizes == [64, 32, 16, 8]
        assert plan.shares == (17.0, 200.0, 0.0)


def test_ranks_that_run_on_their_own_have_ladders_of_one_length():
    plans = [plan_of(17, 16, 1 << 30), plan_of(200, 64, 2 << 30)]
    agreed = [
        _agreed_plan(SimpleNamespace(rank=rank, size=2), plans, alike=False)[0] for rank in (0, 1)
    ]
    sizes = [[choice.micro_batch for choice in (one.choice, *one.ladder)] for one in agreed]
    assert sizes == [[16, 8, 8, 8], [64, 32, 16, 8]]


def reported(rank, size, options):
    model = Net(nn.BatchNorm2d)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ab.Step(model, optimizer, loss, verbose=False, **options) as step:
        step(part_of(0, (8, 4), rank))
        return step.report()


@pytest.mark.parametrize(
    ("options", "cuts"),
    [
        ({}, ("in one piece", "in one piece")),
        ({"micro_batch": 2}, ("4 micro-batches", "2 micro-batches")),
    ],
)
def test_the_report_of_a_rank_tells_how_its_own_samples_are_cut(crew, options, cuts):
    for text, samples, cut in zip(crew(2, reported, options), (8, 4), cuts, strict=True):
        assert f"12 samples per step, {samples} of this rank: {cut}" in text

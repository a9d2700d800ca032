"""`ab.Step` in a script that several processes run: what one process does with all samples at once."""

from __future__ import annotations

import os
import re
import threading
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.crew import RankError
from tests.ports import free_port
from torch import nn

import anybatch as ab
from anybatch.events import OutOfMemory, Replanned

KIND = {"dtype": torch.float64}
PARTS = {
    "unequal": [(5, 4, 1), (3, 8, 2), (2, 1, 7)],
    "some without": [(5, None, 1), (3, 2, None), (None, 6, 1)],
    "empty tensors": [(0, 4, 1), (3, 0, 2), (2, 9, 0)],
    "first without": [(None, 4, None), (3, 8, 2), (2, None, 7)],
}
"""For each step what each rank has."""


class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(3, 6, **KIND), nn.Tanh(), nn.Linear(6, 2, **KIND))
        self.scale = nn.Buffer(torch.full((), 1.0 + seed, **KIND))

    def forward(self, x):
        return self.body(x) * self.scale


def loss(model, batch):
    x, y, weights = batch
    losses = F.cross_entropy(model(x), y, reduction="none") * weights
    return ab.Loss(losses.sum(), weights.sum(), metrics={"size": (x.abs().sum(), x.numel())})


def samples(number, count):
    draw = torch.Generator().manual_seed(number)
    x = torch.randn(count, 3, generator=draw, **KIND)
    y = torch.randint(0, 2, (count,), generator=draw)
    return x, y, torch.rand(count, generator=draw, **KIND) + 0.1


def cut(number, sizes, rank):
    """The part of `rank` of the global batch of step `number`; None if it has none."""
    if sizes[rank] is None:
        return None
    start = sum(size or 0 for size in sizes[:rank])
    return [t[start : start + sizes[rank]] for t in samples(number, sum(s or 0 for s in sizes))]


def steps(rank, size, parts, options):
    model = Net(seed=rank)  # every rank begins with weights of its own
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with ab.Step(model, optimizer, loss, clip_norm=0.5, **options) as step:
        outcomes = [step(cut(n, sizes, rank)) for n, sizes in enumerate(parts)]
        plan = step.plan
    told = [(o.loss, o.weight, o.metrics, o.grad_norm) for o in outcomes]
    passes = [o.num_micro_batches for o in outcomes]
    return model.state_dict(), told, passes, plan


def plainly(parts):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for number, sizes in enumerate(parts):
        one = loss(model, samples(number, sum(s or 0 for s in sizes)))
        optimizer.zero_grad()
        (one.sum / one.weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append((one.sum / one.weight).item())
    return model.state_dict(), losses


@pytest.mark.parametrize("micro_batch", [None, 1])
@pytest.mark.parametrize("kind", sorted(PARTS))
def test_any_parts_make_the_step_of_the_whole_batch(crew, kind, micro_batch):
    ranks = crew(3, steps, PARTS[kind], {"micro_batch": micro_batch})
    wanted, losses = plainly(PARTS[kind])
    for state, told, _, plan in ranks:
        assert told == ranks[0][1]
        assert [one[0] for one in told] == pytest.approx(losses, rel=1e-9)
        for name, value in state.items():
            assert torch.equal(value, ranks[0][0][name])
            assert torch.allclose(value, wanted[name], rtol=1e-9, atol=1e-12)
        assert plan.parallel == "replicate"
        assert plan.num_ranks == 3
    if micro_batch == 1:
        assert [passes for _, _, passes, _ in ranks] == [
            [sizes[rank] or 0 for sizes in PARTS[kind]] for rank in range(3)
        ]


def packed(numbers):
    """Sequences end to end, and where each begins and ends."""
    lengths = [1 + number % 3 for number in numbers]
    draw = torch.Generator().manual_seed(numbers[0])
    return {
        "x": torch.randn(sum(lengths), 3, generator=draw, **KIND),
        "ends": torch.tensor([0, *lengths]).cumsum(0),
    }


def time_first(numbers):
    x = torch.stack([torch.arange(15, **KIND).view(5, 3).sin() + n for n in numbers], 1)
    return x, torch.tensor(numbers, **KIND)


def of_packed(model, batch):
    ends = batch["ends"]
    return ab.Loss(model(batch["x"]).square().cumsum(0)[ends[1:] - 1].sum(), len(ends) - 1)


def of_time_first(model, batch):
    x, y = batch
    return F.mse_loss(model(x).sum((0, 2)), y)


CUTS = {
    "packed": (packed, of_packed, lambda batch: len(batch["ends"]) - 1),
    "time first": (time_first, of_time_first, lambda batch: len(batch[1])),
}


def by_own_cut(rank, size, kind):
    collate, loss, count = CUTS[kind]
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def cut(batch, start, stop):
        assert (start, stop) == (0, 1)  # there is one sample
        return batch

    with (
        warnings.catch_warnings(),
        ab.Step(model, optimizer, loss, count_samples=count, slice_batch=cut) as step,
    ):
        warnings.simplefilter("error")
        step(collate([1 + rank]))
    return model.state_dict()


@pytest.mark.parametrize("kind", sorted(CUTS))
def test_one_sample_of_each_rank_that_the_script_cuts_itself(crew, kind):
    collate, loss, _ = CUTS[kind]
    ranks = crew(2, by_own_cut, kind)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in (1, 2):
        one = loss(model, collate([number]))
        ((one.sum if kind == "packed" else one) / 2).backward()
    optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.allclose(ranks[1][name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "parts",
    [
        [(2, 1, 1), (40, 1, 1), (40, 3, 2), (40, 3, 2)],
        [(2, 1, None), (40, None, 9), (None, 4, None), (40, 4, 9)],
    ],
    ids=["all", "some without"],
)
def test_a_larger_part_of_one_rank_is_planned_for_from_the_next_step_on(crew, parts):
    ranks = crew(3, steps, parts, {})
    wanted, losses = plainly(parts)
    for state, told, _, _ in ranks:
        assert [one[0] for one in told] == pytest.approx(losses, rel=1e-9)
        for name, value in state.items():
            assert torch.equal(value, ranks[0][0][name])
            assert torch.allclose(value, wanted[name], rtol=1e-9, atol=1e-12)
    passes = ranks[0][2]
    assert passes[1] == 20
    assert passes[3] < 20


def under_a_budget(rank, size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.Linear(512, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(rank)
    batch = torch.randn(8192, 64, generator=draw), torch.randint(2, (8192,), generator=draw)

    def mean(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    with ab.Step(model, optimizer, mean, memory="40MiB", verbose=False) as step:
        passes = step(batch).num_micro_batches
        return passes, step.plan


def test_a_plan_that_cuts_is_rehearsed_on_every_rank(crew):
    for passes, plan in crew(2, under_a_budget):
        assert passes > 1
        assert plan.prediction.rehearsed
        assert plan.prediction.peak_bytes <= plan.budget_bytes
        assert plan.task.global_batch == 2 * 8192
        assert plan.num_ranks == 2


class Tempered(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(float(seed), **KIND))

    def forward(self, model, batch):
        x, y, _ = batch
        return F.cross_entropy(model(x) * self.log_scale.exp(), y, reduction="sum"), len(x)


def with_a_loss_that_learns(rank, size):
    model, criterion = Net(seed=rank), Tempered(rank)
    params = [*model.parameters(), *criterion.parameters()]
    with ab.Step(model, torch.optim.SGD(params, lr=0.1), criterion) as step:
        told = [step(cut(n, (3, 5), rank)).loss for n in range(3)]
    return told, criterion.log_scale.detach()


def test_parameters_of_the_loss_are_the_same_on_all_ranks(crew):
    (first, scale), (second, other) = crew(2, with_a_loss_that_learns)
    assert first == second
    assert torch.equal(scale, other)


def unfreezing(rank, size, parts):
    """The first layer is in the optimizer from the beginning, and frozen for two steps."""
    model = Net()
    model.body[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with ab.Step(model, optimizer, loss, clip_norm=0.5) as step:
        for number, sizes in enumerate(parts):
            model.body[0].requires_grad_(number >= 2)
            step(cut(number, sizes, rank))
    return model.state_dict()


def test_a_layer_that_is_unfrozen_on_the_way_stays_the_same_on_all_ranks(crew):
    parts = [(3, 5), (2, 1), (4, 2), (None, 3), (6, 1)]
    first, second = crew(2, unfreezing, parts)
    (alone,) = crew(1, unfreezing, [(sum(size or 0 for size in sizes),) for sizes in parts])
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert torch.allclose(value, alone[name], rtol=1e-9, atol=1e-12)


def changing_alone(rank, size, change):
    """What rank 1 trains changes before step 1, and nowhere else. What each rank raises; whether the
    weights were kept; and the weights after a step in which the ranks are alike again."""
    model = nn.Sequential(
        nn.Linear(3, 4, **KIND), nn.BatchNorm1d(4, **KIND), nn.Linear(4, 2, **KIND)
    )
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ab.Step(model, optimizer, loss) as step:
        step(samples(rank, 4))
        before = model[2].weight.detach().clone()
        if rank == 1 and change == "group":
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1, **KIND))]})
        if rank == 1 and change == "unfrozen":
            model[0].requires_grad_(True)
        if rank == 1 and change == "mode":
            model[1].eval()
        with pytest.raises(ab.InputError) as raised:
            step(samples(rank, 4))
        kept = torch.equal(model[2].weight, before)
        if rank == 1 and change == "group":
            del optimizer.param_groups[-1]
        model[0].requires_grad_(False)
        model[1].train()
        step(samples(rank, 4))
    return str(raised.value), kept, model.state_dict()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "group",
            "the optimizer of rank 0 and rank 1 differ (SGD on [6] parameters and SGD on [6, 1]",
        ),
        ("unfrozen", "are frozen of rank 0 and rank 1 differ (0.weight, 0.bias and none)"),
        ("mode", "which BatchNorm layers are in training mode of rank 0 and rank 1 differ"),
    ],
)
def test_what_changes_on_one_rank_alone_is_told_by_all(crew, change, words):
    (first, kept, state), (second, _, other) = crew(2, changing_alone, change)
    assert words in first
    assert first == second
    assert kept
    assert all(torch.equal(state[name], other[name]) for name in state)


def changing_and_failing(rank, size):
    """In step 1 rank 0 trains other parameters than before, and rank 1 has a batch that is none."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ab.Step(model, optimizer, loss) as step:
        step(samples(rank, 4))
        if rank == 0:
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1, **KIND))]})
        with pytest.raises(ab.AnybatchError) as raised:
            step("no batch" if rank else samples(rank, 4))
    return type(raised.value).__name__, str(raised.value)


def test_a_rank_that_fails_is_told_before_one_whose_parameters_have_changed(crew):
    (kind, told), (other, _) = crew(2, changing_and_failing)
    assert (kind, other) == ("PeerFailed", "DataError")
    assert told.startswith("rank 1 failed in step 2 with DataError")


def join(rank, size, rendezvous):
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size)
    dist.barrier()  # none may leave while another is still on its way to it


def leaving_in_between(rank, size, rendezvous):
    model = Net()
    step = ab.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    step(samples(rank, 4))
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(ab.InputError) as raised:
        step(samples(rank, 4))
    step.close()
    join(rank, size, rendezvous)  # as the crew has it
    return str(raised.value)


def joining_in_between(rank, size, rendezvous):
    dist.destroy_process_group()
    model = Net()
    step = ab.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    step(samples(rank, 4))
    join(rank, size, rendezvous)
    with pytest.raises(ab.InputError) as raised:
        step(samples(rank, 4))
    step.close()
    return str(raised.value)


def test_other_ranks_than_in_the_first_call(crew, tmp_path):
    for told in crew(2, leaving_in_between, f"tcp://127.0.0.1:{free_port()}"):
        assert told.startswith(
            "the number of ranks is 1, and was 2 when this Step began: make torch's"
        )
    for told in crew(2, joining_in_between, f"file://{tmp_path}/joined"):
        assert told.startswith(
            "the number of ranks is 2, and was 1 when this Step began: make torch's"
        )


def apart(rank, size, rendezvous):
    """Started as one of two ranks, which nobody has joined."""
    dist.destroy_process_group()
    model = Net()
    step = ab.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", str(size))
        step(samples(rank, 4))
        step(samples(rank, 4))
    step.close()
    join(rank, size, rendezvous)
    return [(str(one.message), one.filename) for one in warned]


def test_ranks_that_nobody_has_joined_are_warned_of(crew, tmp_path):
    (told,), others = crew(2, apart, f"file://{tmp_path}/joined")
    assert told[0].startswith(
        "torchrun has started 2 ranks, but there is no process group of torch"
    )
    assert told[1] == __file__
    assert not others


def failing(rank, size, parts, bad_rank, times):
    """Memory runs out on `bad_rank` in `times` passes after its first step."""
    model = Net()
    left, events = [0], []

    def fail(_module, inputs):
        if rank == bad_rank and left[0] and not isinstance(inputs[0], torch._subclasses.FakeTensor):
            left[0] -= 1
            raise torch.OutOfMemoryError("tried to allocate more than there is")

    model.body.register_forward_pre_hook(fail)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with ab.Step(model, optimizer, loss, clip_norm=0.5, sinks=[events.append]) as step:
        for number, sizes in enumerate(parts):
            step(cut(number, sizes, rank))
            left[0] = times if number == 0 else left[0]
    return model.state_dict(), [type(e) for e in events]


def test_memory_that_runs_out_on_one_rank_leaves_no_trace(crew):
    parts = [(40, 7), (33, 40), (8, 1)]
    ranks = crew(2, failing, parts, 1, 2)
    wanted, _ = plainly(parts)
    for state, _ in ranks:
        assert all(torch.allclose(state[n], wanted[n], rtol=1e-9, atol=1e-12) for n in wanted)
    # And the part of rank 1 that was larger than its first is planned for.
    assert ranks[0][1] == [OutOfMemory, Replanned, OutOfMemory, Replanned, Replanned]
    assert not ranks[1][1]  # only rank 0 speaks


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_ladders_of_different_lengths_end_on_all_ranks_at_once(crew, bad_rank):
    outcomes = crew.outcomes(2, failing, [(64, 1), (8, 8)], bad_rank, 10**9)
    for error, _ in outcomes:
        assert isinstance(error, ab.NoPlanFits), error


def with_an_error(rank, size, what):
    model = Net()
    begun = []

    def bad(model, batch):
        if rank == 1 and begun and what == "loss":
            return 1 / 0
        return loss(model, batch)

    step = ab.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), bad)
    step(samples(0, 4))
    begun.append(True)
    before = model.body[0].weight.detach().clone()
    try:
        step("no batch" if rank == 1 and what == "batch" else samples(1, 4))
    except Exception as error:
        told = error
    step.close()
    return torch.equal(model.body[0].weight, before), type(told).__name__, str(told)


@pytest.mark.parametrize(("what", "name"), [("loss", "ZeroDivisionError"), ("batch", "DataError")])
def test_an_error_on_one_rank_stops_all_and_is_named(crew, what, name):
    first, second = crew(2, with_an_error, what)
    assert first[0]
    assert second[0]
    assert second[1] == name
    assert first[1] == "PeerFailed"
    assert f"rank 1 failed in step 2 with {name}" in first[2]


def with_norms(rank, size, parts):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3, **KIND)
    model = nn.Sequential(norm, nn.Linear(3, 2, **KIND))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ab.Step(model, optimizer, loss, ghost_batch=4) as step:
        for number, sizes in enumerate(parts):
            step(cut(number, sizes, rank))
    return model.state_dict()


def test_parts_of_whole_ghost_batches_are_normalised_as_in_one_process(crew):
    # Two ghost batches of four on the first rank, one on the second; then the other way round.
    ranks = crew(2, with_norms, [(8, 4), (4, 8), (4, None)])
    (wanted,) = crew(1, with_norms, [(12,), (12,), (4,)])
    for state in ranks:
        for name, value in state.items():
            assert torch.allclose(value, wanted[name], rtol=1e-9, atol=1e-12), name


def called_unequally(rank, size):
    model = Net()
    step = ab.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    for number in range(2 - rank):
        step(samples(number, 4))
    return "done"


def test_a_rank_that_calls_less_often_is_missed(crew):
    (error, _), (none, done) = crew.outcomes(2, called_unequally)
    assert type(error).__name__ == "PeerLost"
    assert "did not answer" in str(error)
    assert (none, done) == (None, "done")


class Listens:
    """Standard error that hears what a step says that waits."""

    def __init__(self):
        self.text = ""
        self.said = threading.Event()

    def write(self, text):
        self.text += text
        if "has been in step 3" in text:
            self.said.set()

    def flush(self):
        """Nothing is held back."""


def coming_late(rank, size):
    """Rank 1 comes to its third call when rank 0 has said that it waits."""
    model = Net()
    store = dist.distributed_c10d._get_default_store()
    heard = Listens()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anybatch.step.step._WAIT_SECONDS", 0.3)
        patch.setattr("sys.stderr", heard)
        step = ab.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
        for number in range(2):
            step(samples(number, 4))
        if rank == 0:
            threading.Thread(
                target=lambda: heard.said.wait(60) and store.set("said", ""), daemon=True
            ).start()
        else:
            store.wait(["said"], timedelta(seconds=60))
        step(samples(2, 4))  # late
        step.close()
    return heard.text


def test_a_step_that_waits_for_a_rank_says_so(crew):
    told, other = crew(2, coming_late)
    assert re.search(
        r"anybatch: rank 0 of 2 has been in step 3 for \d+ s. Perhaps it waits for a rank that hangs,"
        r" is busy with something else, or has ended its loop: .* with None where .*\.\n",
        told,
    )
    assert not other


def differently(rank, size, options):
    model = nn.Linear(3 if rank or options else 2, 2, **KIND)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ab.Step(model, optimizer, loss, **(options if rank else {}))
    step(samples(0, 4))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "names and shapes"),
        ({"clip_norm": 1.0}, r"clip_norm of rank 0 and rank 1 differ \(None"),
    ],
    ids=["model", "clip_norm"],
)
def test_ranks_that_train_differently_are_told_apart(crew, options, words):
    with pytest.raises(RankError, match=words) as caught:
        crew(2, differently, options)
    assert isinstance(caught.value.error, ab.InputError)


class WithoutRate(torch.optim.SGD):
    """Chooses its own, as Adafactor does."""

    def __init__(self, params):
        super().__init__(params)
        self.param_groups[0]["lr"] = None

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param -= 0.1 * param.grad


def going_apart(rank, size, change):
    """Rank 1 alone changes something after two steps. What is raised in the third."""
    model = Net()
    kind = WithoutRate if change == "weights" else partial(torch.optim.SGD, lr=0.1)
    optimizer = kind(model.parameters())
    with ab.Step(model, optimizer, loss) as step:
        for number in range(2):
            step(samples(number, 4))
        if rank == 1 and change == "rate":
            torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)
        if rank == 1 and change == "weights":
            model.load_state_dict(Net(seed=1).state_dict())
        with pytest.raises(ab.InputError) as raised:
            step(samples(2, 4))
    return str(raised.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("rate", "the learning rates of rank 0 and rank 1 differ before step 3 (0.1 and 0.05)"),
        ("weights", "the weights of rank 0 and rank 1 differ before step 3"),
    ],
)
def test_what_a_script_has_changed_on_one_rank_alone_is_told(crew, change, words):
    told, other = crew(2, going_apart, change)
    assert told == other
    assert words in told


def nobody_has_samples(rank, size):
    model = Net()
    ab.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)(None)


def test_a_first_call_without_any_samples(crew):
    with pytest.raises(RankError, match="the batch of every rank is empty in the first call"):
        crew(2, nobody_has_samples)


def wrapped(rank, size):
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        ab.Step(model, optimizer, loss)
    except ab.InputError as error:
        told = str(error)
    try:
        ab.Step(nn.Sequential(nn.Identity(), model), optimizer, loss)
    except ab.InputError as error:
        inside = str(error)
    with ab.Step(model.module, optimizer, loss) as step:  # as the remedy says
        step(cut(0, (3, 5), rank))
    dist.barrier()
    return told, inside, model.module.state_dict()


def test_a_model_that_is_wrapped_already(crew):
    (told, inside, first), (_, _, second) = crew(2, wrapped)
    assert "is wrapped in DistributedDataParallel" in told
    assert "pass model.module" in told
    assert "module '1' of the model is wrapped in DistributedDataParallel" in inside
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(ab.InputError, match=r"wrapped in DataParallel.*pass model\.module"):
        ab.Step(nn.DataParallel(nn.Linear(1, 1)), None or torch.optim.SGD([torch.ones(1)]), loss)


def wrapped_outside(rank, size):
    model = Net()
    wrapper = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = []
    for through in (wrapper, torch.compile(wrapper, backend="eager")):
        step = ab.Step(model, optimizer, lambda _, batch, one=through: loss(one, batch))
        with pytest.raises(ab.InputError) as error, step:
            step(cut(0, (3, 5), rank))
        told.append(str(error.value))
    with ab.Step(model, optimizer, lambda *args, unused=wrapper: loss(*args)) as step:
        step(cut(0, (3, 5), rank))  # it reaches the wrapper, and does not call it
    loss(wrapper, cut(0, (3, 5), rank)).sum.backward()  # nor is it refused outside of a step
    dist.barrier()
    return told


def test_a_wrapper_that_the_loss_calls(crew):
    for told in crew(2, wrapped_outside):
        assert all(
            "the loss calls a DistributedDataParallel around the model" in one for one in told
        )


@pytest.mark.nightly
def test_the_example_prints_the_same_on_any_number_of_ranks(warm, tmp_path):
    example = Path(__file__).parents[2] / "examples" / "own_loop_ddp.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    outputs = []
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]):
        done = warm(["python", *launcher, example], tmp_path, environment)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.splitlines())
        (tmp_path / "model.safetensors").unlink()
    assert len(outputs[0]) == 4
    assert outputs[0] == outputs[1]

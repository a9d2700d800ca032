"""A step commits whole or leaves no trace: memory runs out, or the loss is none, at any place."""

import copy
import dataclasses
import functools
import gc
import itertools

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from tests.equivalence.reference import deviation, plan_for, train
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import anybatch as ab
from anybatch.engine import update_room
from anybatch.errors import LossError, NoPlanFits, RankLost
from anybatch.events import OutOfMemory, Replanned, StepDone
from anybatch.plans import Choice, Recompute

pytestmark = pytest.mark.usefixtures("losses_are_not_checked")

KIND = {"dtype": torch.float64}
ERRORS = {
    "cuda": lambda: torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 1 GiB"
    ),
    "cpu": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory:"
        " you tried to allocate 123 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "python": lambda: MemoryError(),
}
REFUSED = {**ERRORS, "onednn": lambda: RuntimeError("could not create a primitive")}


class Mine:
    """Raises an error at the n-th passing of a place, n-th after n-th."""

    def __init__(self, place="", at=(), error="cpu"):
        self.place, self.at, self.error = place, set(at), error
        self.passed = 0
        self.blown = 0

    def __call__(self, place):
        if place != self.place:
            return
        self.passed += 1
        if self.passed in self.at:
            self.blown += 1
            raise REFUSED[self.error]()


class InBackward(torch.autograd.Function):
    """The identity, whose backward passes a mine."""

    @staticmethod
    def forward(ctx, x, mine):
        ctx.mine = mine
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.mine("backward")
        return grad, None


class Net(nn.Module):
    """BatchNorm, counters, dropout: everything that forward changes; passes mines."""

    def __init__(self, mine, dropout):
        super().__init__()
        self.mine = [mine]
        self.first = nn.Linear(4, 8, bias=False, **KIND)
        self.norm = nn.BatchNorm1d(8, **KIND)
        self.drop = nn.Dropout(dropout)
        self.second = nn.Linear(8, 3, **KIND)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros((), **KIND))
        self.sums = []

    def forward(self, x):
        if not self.training:
            self.mine[0]("evaluation")
        self.mine[0]("forward begins")
        if self.training:
            self.seen += len(x)
            self.last = self.last + x.detach().sum()
            self.sums += [len(x), x.detach().sum()]
        x = InBackward.apply(self.norm(self.first(x)), self.mine[0])
        self.mine[0]("forward ends")
        out = self.second(self.drop(torch.tanh(x)))
        if out.requires_grad:
            out.register_hook(lambda grad: self.mine[0]("hook"))
        return out


class Samples(Dataset):
    def __init__(self, x, y, mine):
        self.x, self.y, self.mine = x, y, mine

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.mine("dataset")
        return self.x[index], self.y[index]


def loss(model, batch):
    x, y = batch
    out = model(x)
    model.mine[0]("loss")
    return ab.Loss(F.cross_entropy(out, y, reduction="sum"), len(y), metrics={"size": len(y)})


def task_of(mine, steps=5, dropout=0.0, global_batch=16, **more):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=draw, **KIND)
    y = torch.randint(0, 3, (40,), generator=draw)

    def collate(samples):
        mine("collate")
        return torch.utils.data.default_collate(samples)

    return ab.Task(
        model=lambda: Net(mine, dropout),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        train=Samples(x, y, mine),
        valid=TensorDataset(x[:11], y[:11]),
        collate=collate,
        global_batch=global_batch,
        ghost_batch=2,
        clip_norm=1.0,
        evaluate_every=100,
        schedule=lambda p: 1 / (1 + p.samples),
        **({"steps": steps} | more),
    )


@functools.cache
def undisturbed_run():
    return train(task_of(Mine()), 16)


PLACES = ["dataset", "collate", "forward begins", "forward ends", "loss", "hook", "backward"]
PHASES = {"dataset": "loading", "collate": "loading", "hook": "backward", "backward": "backward"}


def assert_same(ours, theirs, tolerance=1e-12):
    assert deviation(ours.model, theirs.model) <= tolerance
    assert ours.rates == theirs.rates
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)
    assert float(ours.model.seen) == float(theirs.model.seen)
    assert float(sum(ours.model.sums)) == pytest.approx(float(sum(theirs.model.sums)), abs=1e-9)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("place", PLACES)
def test_an_error_at_any_place_leaves_no_trace(place, error):
    undisturbed = undisturbed_run()
    events = []
    mine = Mine(place, at=[2, 5, 9], error=error)
    ours = train(task_of(mine), 16, sinks=[events.append])
    assert mine.blown == 3
    assert_same(ours, undisturbed)
    failures = [e for e in events if isinstance(e, OutOfMemory)]
    assert [e.phase for e in failures] == [PHASES.get(place, "forward")] * 3
    assert [e.micro_batch for e in failures] == [16, 8, 4]
    assert {e.requested_bytes for e in failures} == {{"cuda": 2 << 20, "cpu": 123}.get(error)}
    steps = [e for e in events if isinstance(e, StepDone)]
    assert [s.step for s in steps] == [1, 2, 3, 4, 5]
    assert {s.metrics["size"] for s in steps} == {
        1.0
    }  # of an attempt that failed nothing is counted


@settings(max_examples=12)
@given(
    place=st.sampled_from(PLACES),
    error=st.sampled_from(["cuda", "cpu", "python"]),
    at=st.lists(st.integers(1, 60), max_size=5, unique=True),
    size=st.sampled_from([2, 4, 10, 16]),
    way=st.sampled_from([Recompute(), Recompute(blocks=("norm", "second"))]),
)
def test_errors_at_random_micro_batches(place, error, at, size, way):
    undisturbed = undisturbed_run()
    ladder = tuple(
        Choice(micro_batch=m, evaluation_batch=4, recompute=way) for m in [size] * 5 if at
    )
    mine = Mine(place, at, error)
    ours = train(task_of(mine), size, ladder=ladder)
    assert_same(ours, undisturbed)


def test_the_cache_is_emptied_before_the_first_update_and_once_after_it(monkeypatch):
    """As on CUDA, also where the first step is redone when its passes were done."""
    emptied = []
    real = update_room.UpdateRoom.__init__

    def untidy(self, *args):
        real(self, *args)
        self._is_tidy = False
        monkeypatch.setattr(
            update_room, "release_unused", functools.partial(release, self._replica)
        )

    def release(replica, _device):
        emptied.append(len(replica.optimizer.state))
        if len(emptied) == 1:
            raise MemoryError

    monkeypatch.setattr(update_room.UpdateRoom, "__init__", untidy)
    train(task_of(Mine()), 16)
    assert emptied == [0, 0, len(list(Net(Mine(), 0.0).parameters()))]


def test_dropout_of_a_redone_step_is_that_of_a_run_under_the_final_plan():
    mine = Mine("backward", at=[3])
    final = train(task_of(Mine(), dropout=0.5), 8)
    events = []
    ours = train(
        task_of(mine, dropout=0.5),
        8,
        ladder=(Choice(micro_batch=8, evaluation_batch=8),),
        sinks=[events.append],
    )
    assert mine.blown == 1
    assert_same(ours, final, tolerance=0)


def test_five_errors_in_a_run():
    mine = Mine("forward ends", at=[2, 4, 6, 9, 13])
    ladder = tuple(Choice(micro_batch=m, evaluation_batch=4) for m in (12, 8, 6, 4))
    events = []
    ours = train(task_of(mine, steps=9), 16, ladder=ladder, sinks=[events.append])
    assert mine.blown == 5
    assert [e.micro_batch for e in events if isinstance(e, OutOfMemory)] == [16, 12, 8, 6, 4]
    assert [e.plan["choice"]["micro_batch"] for e in events if isinstance(e, Replanned)] == [
        12,
        8,
        6,
        4,
        2,
    ]
    assert_same(ours, train(task_of(Mine(), steps=9), 16))


def snapshot(session):
    return copy.deepcopy((session.model.state_dict(), session._replica.optimizer.state_dict()))


def assert_identical(one, other):
    for left, right in zip(one, other, strict=True):
        assert_tree(left, right)


def assert_tree(left, right):
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_tree(left[key], right[key])
    elif isinstance(left, list | tuple):
        for a, b in zip(left, right, strict=True):
            assert_tree(a, b)
    else:
        assert left == right


def test_when_nothing_fits_all_is_as_the_last_step_left_it():
    mine = Mine("backward")
    task = task_of(mine)
    with ab.Session(task, plan_for(task, 8)) as session:
        steps = session.steps()
        next(steps)
        next(steps)
        before = snapshot(session)
        mine.at = set(range(1000))
        with pytest.raises(NoPlanFits, match=r"leanest plan \(micro-batch 2"):
            next(steps)
        assert_identical(snapshot(session), before)
        assert all(p.grad is None for p in session.model.parameters())
        mine.at = set()
        for _ in session.steps():  # and training can go on from there
            pass
        model = session.model
    assert deviation(model, undisturbed_run().model) < 1e-12


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError("mine"), LossError("x")])
def test_any_other_error_leaves_the_last_step_and_passes(error):
    armed = []

    def failing(model, batch):
        result = loss(model, batch)
        if armed and armed.pop() == "now":
            raise error
        return result

    task = task_of(Mine())
    task = dataclasses.replace(task, loss=failing)
    with ab.Session(task, plan_for(task, 4)) as session:
        steps = session.steps()
        next(steps)
        before = snapshot(session)
        armed += ["now", "later", "later"]
        with pytest.raises(type(error) if isinstance(error, Exception) else error):
            next(steps)
        assert_identical(snapshot(session), before)


def test_memory_that_runs_out_while_buffers_are_saved_harms_none(monkeypatch):
    """The first save clones the buffers one by one; those not yet cloned were lost."""
    from anybatch.engine.rollback import SavedBuffers

    model = Net(Mine(), 0.0)
    expected = copy.deepcopy(model.state_dict())
    saved = SavedBuffers(model)
    clones = itertools.count()
    clone = torch.Tensor.clone

    def scarce(tensor, **kwargs):
        if next(clones) == 2:
            raise ERRORS["cpu"]()
        return clone(tensor, **kwargs)

    monkeypatch.setattr(torch.Tensor, "clone", scarce)
    with pytest.raises(RuntimeError):
        saved.save()
    monkeypatch.undo()
    saved.put_back()
    assert_tree(dict(model.state_dict()), dict(expected))
    # A later save that fails must not bring back what an earlier one saved.
    saved.save()
    model.last = torch.ones((), **KIND) * 7
    model.seen += 3
    expected = copy.deepcopy(model.state_dict())
    clones = itertools.count(2)
    monkeypatch.setattr(torch.Tensor, "clone", scarce)
    with pytest.raises(RuntimeError):
        saved.save()
    monkeypatch.undo()
    saved.put_back()
    assert_tree(dict(model.state_dict()), dict(expected))


# ------------------------------------------------------------------- losses that cannot be learned from

BAD = {
    "nan loss": (
        lambda out, total: ab.Loss(total * float("nan"), len(out)),
        r"loss of step 2 is nan in micro-batch 2 \(samples \d+, \d+, \d+, \d+ \(epoch 0\)\)",
    ),
    "infinite loss": (
        lambda out, total: ab.Loss(total + float("inf"), len(out)),
        r"loss of step 2 is inf in micro-batch 2 \(samples",
    ),
    "negative weight": (
        lambda out, total: ab.Loss(total, torch.tensor(-1.0)),
        "negative weight in step 2",
    ),
    "negative number": (lambda out, total: ab.Loss(total, -1), "weight of the loss is -1"),
    "nan weight": (
        lambda out, total: ab.Loss(total, torch.tensor(float("nan"))),
        r"weight of step 2 is nan",
    ),
    "infinite weight": (
        lambda out, total: ab.Loss(total, torch.tensor(float("inf"))),
        r"weight of step 2 is inf",
    ),
    "infinite number": (
        lambda out, total: ab.Loss(total, float("inf")),
        "weight of the loss is inf",
    ),
    "gradient": (
        lambda out, total: ab.Loss(total + (out - out.detach()).abs().sum().sqrt(), len(out)),
        r"norm of the gradient of step 2 is (nan|inf)",
    ),
    "no graph": (lambda out, total: ab.Loss(total.detach(), 1), "does not depend on any parameter"),
    "several numbers": (lambda out, total: out.sum(0), r"has the shape \(3,\)"),
    "nothing": (lambda out, total: None, "returned None .is a return statement missing"),
    "a number": (lambda out, total: total.item(), "returned a value of type float"),
    "integers": (lambda out, total: (out > 0).sum(), "dtype torch.int64, which has no gradient"),
    "weights": (lambda out, total: ab.Loss(total, torch.ones(3)), r"weight .* shape \(3,\)"),
    "a word": (lambda out, total: (total, "four"), "weight of the loss is a value of type str"),
    "a metric": (
        lambda out, total: ab.Loss(total, 1, metrics={"m": "x"}),
        "metric 'm' is of type str",
    ),
    "other metrics": (
        lambda out, total: ab.Loss(total, 1, metrics={"n": 1}),
        r"metrics \['n'\] of this micro-batch are not the metrics \['size'\]",
    ),
}


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("bad", BAD)
def test_a_loss_that_cannot_be_learned_from_is_named_and_leaves_no_trace(bad, clip_norm):
    returned, message = BAD[bad]
    calls = itertools.count()

    def spoiled(model, batch):
        x, y = batch
        out = model(x)
        total = F.cross_entropy(out, y, reduction="sum")
        if next(calls) == 4 + 2:  # 4 micro-batches per step: the third of the second step
            result = returned(out, total)
            if isinstance(result, ab.Loss) and not result.metrics:
                return dataclasses.replace(result, metrics={"size": len(y)})
            return result
        return ab.Loss(total, len(y), metrics={"size": len(y)})

    task = dataclasses.replace(task_of(Mine()), loss=spoiled, clip_norm=clip_norm)
    with ab.Session(task, plan_for(task, 4)) as session:
        steps = session.steps()
        next(steps)
        before = snapshot(session)
        with pytest.raises(LossError, match=message):
            next(steps)
        assert_identical(snapshot(session), before)
        assert all(p.grad is None for p in session.model.parameters())


def test_a_step_without_weight_is_named():
    def weightless(model, batch):
        return ab.Loss(model(batch[0]).sum() * 0, 0)

    task = dataclasses.replace(task_of(Mine()), loss=weightless)
    with ab.Session(task, plan_for(task, 4)) as session:
        before = snapshot(session)
        with pytest.raises(LossError, match="total weight of step 1 is zero"):
            next(session.steps())
        assert_identical(snapshot(session), before)


def test_the_samples_of_a_bad_loss_are_named_rightly():
    task = task_of(Mine())
    x = task.train.x
    x[17] = float("nan")
    with (
        ab.Session(task, plan_for(task, 2)) as session,
        pytest.raises(LossError, match=r"^sample 17 \(epoch 0\) makes the loss of step \d nan"),
    ):
        list(session.steps())


# --------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("error", ERRORS)
def test_memory_that_runs_out_in_evaluation_changes_nothing(error):
    mine = Mine("evaluation", at=[1, 4], error=error)
    events = []
    task = task_of(mine)
    with ab.Session(task, plan_for(task, 8), [events.append]) as session:
        list(session.steps())
        ours = session.evaluate()
        # and training goes on under the same micro-batch
        assert session.plan.choice.micro_batch == 8
        assert session.plan.choice.evaluation_batch == 2
    task = task_of(Mine())
    with ab.Session(task, plan_for(task, 8)) as session:
        list(session.steps())
        theirs = session.evaluate()
    assert mine.blown == 2
    assert ours.samples == theirs.samples == 11
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-12)
    assert [e.phase for e in events if isinstance(e, OutOfMemory)] == ["evaluation"] * 2


@pytest.mark.parametrize("place", ["forward ends", "backward", "evaluation"])
def test_a_kernel_that_onednn_was_refused_memory_for_ends_the_run_as_it_was_after_a_step(place):
    mine = Mine(place, at=[1 if place == "evaluation" else 2], error="onednn")
    task = task_of(mine)
    with ab.Session(task, plan_for(task, 16)) as session:
        steps = session.steps()
        next(steps)
        before = snapshot(session)
        said = (
            r"^oneDNN cannot go on in this process .*could not create a primitive.*last checkpoint"
        )
        with pytest.raises(RankLost, match=said):
            session.evaluate() if place == "evaluation" else next(steps)
        assert mine.blown == 1
        assert_identical(snapshot(session), before)


def test_evaluation_of_a_single_sample_that_does_not_fit():
    mine = Mine("evaluation", at=range(100))
    task = task_of(mine)
    with (
        ab.Session(task, plan_for(task, 4)) as session,
        pytest.raises(NoPlanFits, match="memory ran out in evaluation"),
    ):
        session.evaluate()
    assert all(m.training for m in session.model.modules())


# ------------------------------------------------------------------------------------- what stays alive


def tensors_alive():
    gc.collect()
    return sum(
        o.untyped_storage().nbytes()
        for o in gc.get_objects()
        if type(o) in (torch.Tensor, nn.Parameter) and o.layout is torch.strided
    )


@pytest.mark.parametrize("place", [*PLACES, "evaluation"])
def test_no_tensor_of_a_failed_attempt_stays_alive(place):
    """What is alive after the recovery is what was alive before the failure."""
    mine = Mine(place)
    task = task_of(mine, global_batch=20)
    marks = []

    class Mark(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            big = torch.zeros(1 << 20)
            marks.append(torch.multiprocessing.reductions.StorageWeakRef(big.untyped_storage()))
            ctx.save_for_backward(big)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    def marked(model, batch):
        x, y = batch
        held = Mark.apply(model.first.weight.sum())
        return loss(model, (x, y)).sum + 0 * held, len(y)

    task = dataclasses.replace(task, loss=marked)
    with ab.Session(task, plan_for(task, 20)) as session:
        steps = session.steps()
        next(steps)
        session.evaluate()
        before = tensors_alive()
        mine.at = {mine.passed + 1}
        if place == "evaluation":
            session.evaluate()
        else:
            next(steps)
        assert mine.blown == 1
        assert tensors_alive() <= before + (1 << 12)
        assert all(mark.expired() for mark in marks)

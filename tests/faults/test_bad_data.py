"""Bad samples: left out exactly where that is asked for, named where it is not, and never silently."""

from __future__ import annotations

import dataclasses
import pickle
import re

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from tests.equivalence.reference import plan_for
from tests.faults.bad_data import (
    INF,
    KINDS,
    MISSING,
    NAN,
    ODD,
    RAISES,
    STEEP,
    UNSEEN,
    Faulty,
    FaultyStream,
    NormModel,
    as_rank,
    batch_of,
    fails_on,
    loss_of,
    run,
    task_of,
    train_plainly,
)
from torch import nn

import anybatch as ab
from anybatch.engine.skips import MOST_IN_A_ROW
from anybatch.errors import DataError, InputError
from anybatch.events import Skipped, from_json, to_json
from anybatch.report.sentences import describe

pytestmark = pytest.mark.faults

BAD = {3: RAISES, 4: MISSING, 11: ODD, 17: NAN, 18: NAN, 30: INF}
STEEP_TOO = BAD | {20: STEEP, 33: STEEP}
LENGTH = 40


def plan_of(task, micro_batch):
    return plan_for(task, micro_batch, parallel="single", shares=(1.0,))


def parallel_of(size):
    return "replicate" if size > 1 else "single"


def check(ran, plain, bad=BAD, epochs=2):
    """`ran` has learned what the plain loop has, and left out what is bad."""
    assert not ran.error
    assert ran.left_out == sorted((epoch, index) for epoch in range(epochs) for index in bad)
    assert ran.num_skipped == epochs * len(bad)
    assert ran.losses == pytest.approx(plain.losses, rel=1e-6)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(ran.state[name], value, rtol=1e-6, atol=1e-9, check_dtype=False)


# ---------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("micro_batch", [1, 5, 12])
def test_the_others_are_learned_from_as_if_there_were_no_bad_ones(micro_batch, num_workers):
    task = task_of(Faulty(LENGTH, STEEP_TOO), num_workers=num_workers)
    ran = run(task, plan_of(task, micro_batch))
    check(ran, train_plainly(task, LENGTH, STEEP_TOO), STEEP_TOO)
    assert ran.samples_seen == 2 * LENGTH


@pytest.mark.parametrize("last", ["drop", "wrap"])
def test_however_epochs_end(last):
    task = task_of(Faulty(LENGTH, BAD), last=last)
    ran = run(task, plan_of(task, 5))
    plain = train_plainly(task, LENGTH, BAD)
    assert ran.losses == pytest.approx(plain.losses, rel=1e-6)
    assert set(ran.left_out) <= {(epoch, index) for epoch in range(2) for index in BAD}


@pytest.mark.parametrize("parallel", ["replicate", "shard"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_leave_out_the_same(crew, size, parallel):
    bad = BAD if parallel == "shard" else STEEP_TOO  # where no rank has a gradient by itself
    data = Faulty(LENGTH, bad)
    ranks = crew(size, as_rank, (data, {}), 3, parallel)
    plain = train_plainly(task_of(data), LENGTH, bad)
    check(ranks[0], plain, bad)
    for ran in ranks:
        assert ran.num_skipped == 2 * len(bad)
        assert ran.losses == pytest.approx(plain.losses, rel=1e-6)


def test_a_sample_that_only_one_rank_cannot_read_is_left_out_by_all(crew):
    data = Faulty(LENGTH, dict.fromkeys(range(0, LENGTH, 3), RAISES))
    ranks = crew(2, fails_on, (data, {}), 3, 1)
    left_out = dict.fromkeys((index for _, index in ranks[0].left_out), RAISES)
    assert left_out
    assert all(e.rank == 1 for e in ranks[0].skipped)
    for ran in ranks:
        assert not ran.error
        assert ran.losses == ranks[0].losses


@pytest.mark.parametrize("micro_batch", [8, 24])
@pytest.mark.parametrize("size", [1, 2])
def test_ghost_batches_are_those_of_the_samples_that_are_left(crew, size, micro_batch):
    options = {"model": NormModel, "ghost_batch": 8, "global_batch": 24}
    data = Faulty(LENGTH, BAD)
    plain = train_plainly(task_of(data, **options), LENGTH, BAD)
    check(crew(size, as_rank, (data, options), micro_batch, parallel_of(size))[0], plain)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("micro_batch", [2, 12])
def test_streams(crew, size, micro_batch):
    data = FaultyStream(LENGTH, BAD)
    plain = train_plainly(task_of(data), LENGTH, BAD, shuffle=False)
    check(crew(size, as_rank, (data, {}), micro_batch, parallel_of(size))[0], plain)


@pytest.mark.nightly
@hypothesis.settings(max_examples=25)
@hypothesis.given(
    bad=st.dictionaries(st.integers(0, 22), st.sampled_from(KINDS), max_size=12),
    micro_batch=st.integers(1, 9),
    global_batch=st.integers(1, 23),
    size=st.sampled_from([1, 2]),
    stream=st.booleans(),
)
def test_what_is_left_out_depends_on_no_plan(crew, bad, micro_batch, global_batch, size, stream):
    data = FaultyStream(23, bad | {22: NAN}) if stream else Faulty(23, bad)
    if stream:  # one that ends right after an error cannot be told from one that broke off
        bad = bad | {22: NAN}
    options = {"global_batch": global_batch, "epochs": 1}
    task, micro_batch = task_of(data, **options), min(micro_batch, global_batch)
    ran = crew(size, as_rank, (data, options), micro_batch, parallel_of(size))[0]
    if len(bad) * 2 > 23:
        assert "more than half" in ran.error
        return
    check(ran, train_plainly(task, 23, bad, shuffle=not stream), bad, epochs=1)


def test_memory_that_runs_out_in_the_same_step():
    task = task_of(Faulty(LENGTH, BAD))
    failures = []

    def fails_once_per_step(session):
        def hook(module, args, output):
            if torch.is_grad_enabled() and len(args[0]) == 6 and len(failures) < 3:
                failures.append(1)
                raise torch.OutOfMemoryError("tried to allocate more than there is")

        session.model.body.register_forward_hook(hook)

    ran = run(task, plan_of(task, 6), fails_once_per_step)
    assert failures
    check(ran, train_plainly(task, LENGTH, BAD))


# -------------------------------------------------------------------------------------- whole steps


@pytest.mark.parametrize("size", [1, 3])
def test_a_gradient_that_is_no_number_leaves_out_its_step(crew, size):
    bad = {5: UNSEEN, 9: NAN}
    data = Faulty(LENGTH, bad)
    for ran in crew(size, as_rank, (data, {}), 4, parallel_of(size)):
        plain = train_plainly(task_of(data), LENGTH, bad)
        assert not ran.error
        assert ran.losses == pytest.approx(plain.losses, rel=1e-6)
        for name, value in plain.model.state_dict().items():
            torch.testing.assert_close(ran.state[name], value, rtol=1e-6, atol=1e-9)
    ran = run(task_of(data), plan_of(task_of(data), 4))
    whole = [event for event in ran.skipped if not event.samples]
    assert [event.epoch for event in whole] == [0, 1]
    assert all("gradient has the norm nan" in event.reason for event in whole)
    assert sum(event.num_samples for event in ran.skipped) == ran.num_skipped


@pytest.mark.parametrize("kind", [RAISES, NAN])
def test_a_step_without_any_good_sample(kind):
    bad = dict.fromkeys(range(12), kind)
    task = task_of(Faulty(LENGTH, bad), shuffle=False)
    ran = run(task, plan_of(task, 5))
    check(ran, train_plainly(task, LENGTH, bad, shuffle=False), bad)
    assert ran.samples_seen == 2 * LENGTH
    assert [e.reason for e in ran.skipped if not e.samples] == ["each of its samples is bad"] * 2


def test_a_scheduler_goes_on_through_a_step_that_is_left_out():
    rates = []

    def seen(session):
        session.model.register_forward_hook(lambda *_: rates.append(optimizers[0]))

    optimizers = []

    def scheduler(optimizer):
        made = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        optimizers.append(made)
        return made

    task = task_of(
        Faulty(LENGTH, dict.fromkeys(range(12), RAISES)),
        shuffle=False,
        epochs=1,
        schedule=None,
        scheduler=scheduler,
        scheduler_interval="step",
    )
    ran = run(task, plan_of(task, 12), seen)
    assert len(ran.losses) == 3
    assert optimizers[0].last_epoch == 4


@pytest.mark.parametrize("size", [1, 2])
def test_too_many_steps_left_out_end_the_training_on_all_ranks(crew, size):
    data = Faulty(400, dict.fromkeys(range(400), UNSEEN))
    for ran in crew(size, as_rank, (data, {"global_batch": 8}), 4, parallel_of(size)):
        assert ran.kind == "LossError"
        assert (
            f"the last {MOST_IN_A_ROW} steps had to be left out whole, up to step 10" in ran.error
        )
        assert ran.losses == []


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_too_many_samples_left_out_end_the_training_on_all_ranks(crew, stream, size):
    bad = {i: RAISES for i in range(LENGTH - 1) if i % 3}
    data = FaultyStream(LENGTH, bad) if stream else Faulty(LENGTH, bad)
    for ran in crew(size, as_rank, (data, {}), 4, parallel_of(size)):
        assert ran.kind == "DataError"
        assert f"of the {LENGTH} samples of epoch 0 are bad" in ran.error
        assert "more than half" in ran.error


def test_samples_that_do_not_go_together_are_no_bad_samples():
    class Ragged(Faulty):
        def __getitem__(self, index):
            return torch.zeros(2 + index % 2), torch.tensor(0.0), torch.tensor(0.0)

    task = task_of(Ragged(LENGTH))
    ran = run(task, plan_of(task, 4))
    assert ran.kind == "DataError"
    assert "cannot be put into one batch" in ran.error
    assert ran.skipped == []


@pytest.mark.parametrize("at", [7, LENGTH - 1])
def test_a_stream_that_is_over_after_an_error_is_not_taken_for_one_that_ended(at):
    task = task_of(FaultyStream(LENGTH, {at: RAISES}, generator=True))
    ran = run(task, plan_of(task, 4))
    assert ran.kind == "DataError"
    assert f"sample {at} of the stream" in ran.error
    assert "was over after that" in ran.error


# -------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_held_out_samples_are_left_out_of_every_evaluation(stream, num_workers):
    bad = {0: RAISES, 5: ODD, 6: MISSING}
    valid = FaultyStream(11, bad) if stream else Faulty(11, bad)
    task = task_of(Faulty(LENGTH), valid=valid, num_workers=num_workers)
    ran = run(task, plan_of(task, 4))
    assert not ran.error
    assert sorted(i for event in ran.skipped for i in event.samples) == [0, 5, 6]  # told once
    assert all(event.held_out for event in ran.skipped)
    assert ran.num_skipped == 0
    model = task.build_model()
    model.load_state_dict(ran.state)
    with torch.no_grad():
        wanted = loss_of(model, batch_of([i for i in range(11) if i not in bad]))
    assert ran.evaluated == pytest.approx([float(wanted.sum / wanted.weight)], rel=1e-9)


@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_ranks_evaluate_on_the_same_samples(crew, parallel):
    valid = Faulty(11, {0: RAISES, 1: RAISES, 2: RAISES, 3: RAISES})  # all of a batch of rank 0
    ranks = crew(2, as_rank, (Faulty(LENGTH), {"valid": valid}), 4, parallel)
    alone = task_of(Faulty(LENGTH), valid=valid)
    wanted = run(alone, plan_of(alone, 4)).evaluated
    assert [ran.evaluated for ran in ranks] == [pytest.approx(wanted)] * 2


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_held_out_loss_that_is_no_number_is_told_as_it_is(policy):
    task = task_of(Faulty(LENGTH), valid=Faulty(11, {3: NAN}), bad_data=policy)
    ran = run(task, plan_of(task, 4))
    assert not ran.error
    assert ran.evaluated[0] != ran.evaluated[0]


def test_too_many_bad_held_out_samples_are_an_error():
    task = task_of(Faulty(LENGTH), valid=Faulty(11, dict.fromkeys(range(6), RAISES)))
    ran = run(task, plan_of(task, 4))
    assert ran.kind == "DataError"
    assert "6 of the 11 held-out samples are bad" in ran.error


# -------------------------------------------------------------------------------------------- stop

WHO = r"^sample 23 \(epoch 0\)( on rank 1)? "
SAYS = {
    RAISES: (r"sample 23 of Faulty \(epoch 0\) cannot be loaded: ValueError: sample 23 is broken",),
    MISSING: (r"sample 23 of Faulty \(epoch 0\) cannot be loaded: IndexError", "is __len__ right"),
    ODD: (r"sample 23 \(epoch 0\) of Faulty cannot be put into a batch, not even alone: ",),
    NAN: (WHO + "makes the loss of step 2 nan: mend it", "bad_data='skip'"),
    INF: (WHO + "makes the loss of step 2 inf: mend it", "bad_data='skip'"),
    STEEP: (WHO + "makes the norm of the gradient of step 2 nan", "bad_data='skip'"),
    UNSEEN: ("^the norm of the gradient of step 2 is nan, though its loss is [^,]*:",),
}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", list(SAYS))
def test_what_stops_training_names_the_sample(kind, num_workers):
    options = {"shuffle": False, "bad_data": "stop", "num_workers": num_workers}
    task = task_of(Faulty(LENGTH, {23: kind}), **options)
    ran = run(task, plan_of(task, 5))
    check_stopped(ran, kind)


def check_stopped(ran, kind):
    for part in SAYS[kind]:
        assert re.search(part, ran.error), ran.error
    assert len(ran.losses) == 1
    first = task_of(Faulty(12), shuffle=False, epochs=1)
    for name, value in train_plainly(first, 12, {}, shuffle=False).model.state_dict().items():
        torch.testing.assert_close(ran.state[name], value, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("parallel", ["replicate", "shard"])
@pytest.mark.parametrize("kind", list(SAYS))
def test_what_stops_several_ranks_names_the_sample_and_the_rank(crew, kind, parallel):
    options = {"shuffle": False, "bad_data": "stop"}
    other, holder = crew(2, as_rank, (Faulty(LENGTH, {23: kind}), options), 2, parallel)
    if kind == STEEP and parallel == "shard":
        kind = UNSEEN
    check_stopped(holder, kind)
    check_stopped(other, kind)
    if kind in (NAN, INF):
        assert " on rank 1 " in holder.error
        assert other.error == holder.error
    elif kind not in (STEEP, UNSEEN):
        assert other.kind == "PeerFailed"
        assert other.error.startswith("rank 1 failed in step 2 with ")


def raises_at(index):
    """A task whose loss raises an error for one sample."""
    task = task_of(Faulty(LENGTH), shuffle=False, bad_data="stop")
    wrong = task.train[index][1]

    def loss(model, batch):
        if (batch[1] == wrong).any():
            raise KeyError("no such class")
        return task.loss(model, batch)

    return dataclasses.replace(task, loss=loss)


@pytest.mark.parametrize("micro_batch", [1, 5, 12])
def test_an_error_of_the_loss_names_the_sample(micro_batch):
    task = raises_at(15)
    with (
        pytest.raises(KeyError, match="no such class") as caught,
        ab.Session(task, plan_of(task, micro_batch)) as session,
    ):
        list(session.steps())
    (note,) = caught.value.__notes__
    assert note.startswith("It is raised for sample 15 (epoch 0), alone too (step 2")


def test_an_error_of_the_loss_in_a_rehearsal_names_the_sample():
    task = raises_at(3)
    with (
        pytest.raises(KeyError, match="no such class") as caught,
        ab.Session(task, plan_of(task, 2)) as session,
    ):
        session.rehearsed(is_fixed=True)
    (note,) = caught.value.__notes__
    assert note.startswith("It is raised for sample 3 (epoch 0), alone too (step 1, micro-batch 1)")


def test_an_error_of_the_loss_for_every_sample_blames_none():
    def loss(model, batch):
        raise KeyError("no such class")

    task = dataclasses.replace(task_of(Faulty(LENGTH)), loss=loss)
    with (
        pytest.raises(KeyError, match="no such class") as caught,
        ab.Session(task, plan_of(task, 5)) as session,
    ):
        list(session.steps())
    assert not hasattr(caught.value, "__notes__")


# ----------------------------------------------------------------------------------- the odd corners


@pytest.mark.slow  # `train` measures this machine first
def test_a_plan_is_made_though_the_first_samples_are_bad():
    data = Faulty(LENGTH, {0: RAISES, 1: ODD, 2: MISSING})
    assert ab.train(task_of(data), micro_batch=5).ended.num_skipped == 6
    with pytest.raises(DataError, match=r"^sample 0 of Faulty"):
        ab.train(task_of(data, bad_data="stop"), micro_batch=5)


def test_a_model_that_has_no_loss_in_evaluation_mode_blames_nobody():
    class Silent(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 1, dtype=torch.float64)

        def forward(self, x):
            return self.body(x).squeeze(1) if self.training else {"boxes": x}

    task = task_of(Faulty(LENGTH, {23: NAN}), model=Silent, shuffle=False, epochs=1)
    ran = run(task, plan_of(task, 5))
    assert not ran.error
    assert len(ran.losses) == 3
    (event,) = ran.skipped
    assert event.samples == ()
    assert event.num_samples == 12
    assert "none of its samples is to blame alone" in event.reason


def test_where_gradients_leave_before_the_vote_nothing_can_be_skipped():
    task = task_of(Faulty(LENGTH))
    exchange = ab.Exchange(stale=True)
    plan = plan_for(task, 4, parallel="single", shares=(1.0,)).model_copy(
        update={"exchange": exchange}
    )
    with pytest.raises(InputError, match="bad_data is 'skip', and the plan exchanges"):
        run(task, plan)


def test_the_word_for_it_is_checked():
    with pytest.raises(InputError, match="bad_data is 'ignore'; give 'skip' or 'stop'"):
        task_of(Faulty(3), bad_data="ignore")


@pytest.mark.parametrize(
    ("samples", "rank", "held_out", "says"),
    [
        ((7,), 0, False, "Sample 7 of epoch 2 is left out of step 5: its loss is nan."),
        ((7, 9), 1, False, "Samples 7, 9 of epoch 2 are left out of step 5 (rank 1): its loss"),
        ((7,), 0, True, "Sample 7 of the held-out data is left out of evaluation: its loss"),
        (tuple(range(11)), 0, False, "Samples 0, 1, 2, 3, 4, 5, 6, 7 and 3 more of epoch 2 are"),
        ((), None, False, "Step 5 is left out, with 12 samples of epoch 2: its loss is nan."),
    ],
)
def test_what_is_left_out_is_told(samples, rank, held_out, says):
    event = Skipped(
        time=0.0,
        step=5,
        rank=rank,
        epoch=2,
        samples=samples,
        num_samples=len(samples) or 12,
        reason="its loss is nan",
        held_out=held_out,
    )
    assert describe(event).startswith(says)
    assert from_json(to_json(event)) == event


def test_the_error_crosses_processes():
    task = task_of(Faulty(LENGTH, {0: RAISES}), bad_data="stop")
    with pytest.raises(DataError) as caught, ab.Session(task, plan_of(task, 4)) as session:
        list(session.steps())
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.bad == caught.value.bad

"""A loss that compares all samples of the global batch: cut into any passes, on any number of ranks,
the step is that of the whole batch in one piece."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.equivalence.joint import Towers, compare, encode, encode_all, task_of
from tests.equivalence.reference import assert_equal, deviation, plan_for, train, train_plainly
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.errors import InputError, LossError
from anybatch.events import OutOfMemory, Replanned
from anybatch.rank.checks import check_can_compare


@pytest.mark.parametrize("recompute", [(), ("left", "right")])
@pytest.mark.parametrize("micro_batch", [5, 10, 30, 35])
def test_any_cut_is_the_whole_batch(micro_batch, recompute):
    task = task_of(evaluate_every=100)
    ours = train(task, micro_batch, recompute=ab.Recompute(blocks=recompute))
    assert_equal(ours, train_plainly(task), tolerance=1e-9)


@settings(max_examples=15, deadline=None)
@given(
    global_batch=st.integers(2, 50),
    micro_batch=st.integers(1, 50),
    last=st.sampled_from(["keep", "drop", "wrap"]),
)
def test_any_sizes(global_batch, micro_batch, last):
    task = task_of(53, norm=False, global_batch=global_batch, last=last, steps=3)
    ours = train(task, min(micro_batch, global_batch))
    assert_equal(ours, train_plainly(task), tolerance=1e-9)


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [("fp32", 1e-6), ("bf16", 1e-2), ("fp16", 1e-3), ("bf16-weights", 5e-3), ("bf16-pure", 2e-2)],
)
def test_in_other_precisions_it_is_near_the_whole(precision, tolerance):
    task = task_of(
        dtype=torch.float32,
        norm=False,
        steps=3,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    whole, cut = (train(task, size, precision=precision) for size in (35, 6))
    assert cut.losses == pytest.approx(whole.losses, rel=tolerance)
    assert deviation(cut.model, whole.model) < tolerance


def test_what_is_dropped_is_dropped_both_times():
    """With other draws in the two passes over a micro-batch its gradient would be that of nothing."""
    task = task_of(norm=False, dropout=0.5, steps=1, clip_norm=None)
    seen: list[torch.Tensor] = []

    def watched(model, batch):
        encoded = encode(model, batch)
        seen.append(encoded["left"].detach().clone())
        return encoded

    train(dataclasses.replace(task, loss=ab.JointLoss(watched, compare)), 10)
    first, again = seen[:4], seen[4:]
    assert len(again) == 4
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(first[0], first[1])


def test_samples_are_read_once_a_step():
    read = []

    class Counted(TensorDataset):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

        __getitems__ = None

    task = task_of()
    counted = Counted(*task.train.tensors)
    data = torch.utils.data.Subset(counted, range(70))
    train(dataclasses.replace(task, train=data, steps=2), 5)
    assert sorted(read) == list(range(70))


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return (self.data[i] for i in range(len(self.data)))


def test_a_stream():
    task = task_of(shuffle=False, steps=2)
    streamed = dataclasses.replace(task, train=Stream(task.train))
    assert_equal(train(streamed, 10), train_plainly(task), tolerance=1e-9)


def test_samples_of_unequal_length():
    """A pass has as many as their padded size allows, and the order is that of length."""
    task = task_of(norm=False)
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 9, (90,), generator=draw).tolist()
    rows = [
        (left.expand(n, 6) * torch.linspace(1, 2, n, dtype=left.dtype)[:, None], right, weight)
        for n, (left, right, weight) in zip(lengths, task.train, strict=True)
    ]

    def padded(samples):
        left, right, weight = zip(*samples, strict=True)
        sizes = torch.tensor([len(one) for one in left])
        return nn.utils.rnn.pad_sequence(left, batch_first=True), sizes, right, weight

    def pooled(model, batch):
        left, sizes, right, weight = batch
        mean = left.sum(1) / sizes[:, None]
        return encode(model, [mean, torch.stack(right), torch.stack(weight)])

    task = dataclasses.replace(
        task,
        train=rows,
        lengths=lengths,
        collate=padded,
        loss=ab.JointLoss(pooled, compare),
    )
    assert_equal(train(task, 4), train_plainly(task), tolerance=1e-9)


def with_one_bad(**changes):
    """Sample 40, in the middle of step 2, has a NaN."""
    task = task_of(norm=False, shuffle=False, steps=3, **changes)
    left, right, weight = (one.clone() for one in task.train.tensors)
    left[40] = torch.nan
    return dataclasses.replace(task, train=TensorDataset(left, right, weight))


def test_a_bad_sample_is_named_by_its_encoding():
    with pytest.raises(LossError, match=r"sample 40 \(epoch 0\) makes the loss of step 2 nan"):
        train(with_one_bad(), 10)


def test_a_bad_sample_is_left_out_and_the_others_are_compared():
    task = with_one_bad()
    ours = train(dataclasses.replace(task, bad_data="skip"), 10)
    model = task.build_model()
    optimizer = task.optimizer(model.parameters())
    losses = []
    for places in (range(35), [i for i in range(35, 70) if i != 40], range(70, 90)):
        one = task.loss(model, [t[list(places)] for t in task.train.tensors])
        optimizer.zero_grad()
        (one.sum / one.weight).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append((one.sum / one.weight).item())
    assert ours.losses == pytest.approx(losses, rel=1e-9)
    assert deviation(ours.model, model) < 1e-9


def test_a_run_that_is_resumed(tmp_path):
    task = task_of(dropout=0.3, steps=6)
    plan = plan_for(task, 10)
    whole = train(task, 10)
    with ab.Session(task, plan, checkpoints=tmp_path) as session:
        steps = session.steps()
        for _ in range(3):
            next(steps)
        session.save(wait=True)
    with ab.Session(task, plan, checkpoints=tmp_path) as session:
        assert session.resume()
        losses = [done.loss for done in session.steps()]
        assert losses == whole.losses[3:]
        assert deviation(session.model, whole.model) == 0.0


def test_a_script_of_ones_own():
    task = task_of()
    plain = train_plainly(dataclasses.replace(task, shuffle=False, steps=2))
    model = task.build_model()
    optimizer = task.optimizer(model.parameters())
    losses, told = [], []
    torch.manual_seed(7)
    with ab.Step(model, optimizer, task.loss, micro_batch=10, ghost_batch=5, clip_norm=0.5) as step:
        for start in (0, 35):
            done = step([t[start : start + 35] for t in task.train.tensors])
            losses.append(done.loss)
            told.append(done.num_micro_batches)
    assert losses == pytest.approx(plain.losses, rel=1e-9)
    assert deviation(model, plain.model) < 1e-9
    assert told == [4, 4]
    after = torch.rand(3)
    torch.manual_seed(7)
    torch.randint(1 << 62, ())
    torch.randint(1 << 62, ())
    assert torch.equal(after, torch.rand(3))  # the script's generators go on, whatever passes drew


def evaluated_plainly(task, model):
    """Of the held-out samples, compared as many at a time as make a global batch."""
    model.eval()
    size = task.global_batch
    tensors = task.valid.tensors
    total = weight = hits = count = 0.0
    for start in range(0, len(tensors[0]), size):
        with torch.no_grad():
            one = task.loss(model, [t[start : start + size] for t in tensors])
        total, weight = total + float(one.sum), weight + float(one.weight)
        hits += float(one.metrics["hits"][0])
        count += one.metrics["hits"][1]
    model.train()
    return total / weight, hits / count


@pytest.mark.parametrize("micro_batch", [5, 35])
def test_evaluation_does_not_depend_on_the_plan(micro_batch):
    task = task_of()
    held_out = TensorDataset(*(t[:50] for t in task.train.tensors))

    def spread(model, batch):
        return {"spread": (model.left(batch[0]).square().sum(), len(batch[0]))}

    task = dataclasses.replace(task, valid=held_out, metrics=spread, evaluate_every=100)
    with ab.Session(task, plan_for(task, micro_batch)) as session:
        for _ in session.steps():
            pass
        found = session.evaluate()
    model = train_plainly(task).model
    loss, hits = evaluated_plainly(task, model)
    assert found.samples == 50
    assert found.loss == pytest.approx(loss, rel=1e-9)
    assert found.metrics["hits"] == pytest.approx(hits)
    model.eval()
    with torch.no_grad():
        wanted = model.left(held_out.tensors[0]).square().sum().item() / 50
    assert found.metrics["spread"] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("where", ["encoding", "comparison", "again"])
def test_memory_that_runs_out_leaves_no_trace(where):
    """In each of the three, once in step 3: the step is done again under a smaller plan."""
    task = task_of()
    calls = {"encoding": 0, "comparison": 0, "again": 0}

    def count(what, at):
        calls[what] += 1
        if what == where and calls[what] == at:
            raise torch.OutOfMemoryError("tried to allocate more than there is")

    def encoded(model, batch):
        if torch.is_grad_enabled():
            count("again", 2 * 4 + 2)
        else:
            count("encoding", 2 * 4 + 2)
        return encode(model, batch)

    def compared(model, rows):
        count("comparison", 3)
        return compare(model, rows)

    events = []
    ours = train(
        dataclasses.replace(task, loss=ab.JointLoss(encoded, compared)), 10, [events.append]
    )
    assert_equal(ours, train_plainly(task), tolerance=1e-9)
    failed = [e for e in events if isinstance(e, OutOfMemory)]
    assert [(e.step, e.phase) for e in failed] == [(3, {"again": "forward"}.get(where, where))]
    assert any(isinstance(e, Replanned) for e in events)


def test_a_reproducible_run_has_the_same_bits():
    task = task_of(dtype=torch.float32, dropout=0.2, reproducible=ab.Grains(samples=5, parts=4))
    states = []
    for recompute in ((), ("left",)):
        plan = ab.plan(task, recompute=ab.Recompute(blocks=recompute))
        with ab.Session(task, plan) as session:
            losses = [done.loss for done in session.steps()]
            states.append((losses, session.model.state_dict()))
    (first, one), (second, other) = states
    assert first == second
    assert all(torch.equal(one[name], other[name]) for name in one)


def proved(task):
    return ab.verify(task, plan_for(task, 5))


def test_verify_proves_it():
    assert proved(task_of()).exact


def test_verify_finds_an_encoding_that_depends_on_its_neighbours():
    def centred(model, batch):
        encoded = encode(model, batch)
        return {**encoded, "left": encoded["left"] - encoded["left"].mean(0)}

    verdict = proved(task_of(loss=ab.JointLoss(centred, compare)))
    assert not verdict.exact
    assert any("encode does something else with a sample" in cause for cause in verdict.causes)


def test_hooks_on_gradients_are_called_by_passes_alone():
    def build():
        model = Towers(norm=False).double()
        model.scale.register_hook(lambda gradient: gradient * 3)
        return model

    task = task_of(model=build, clip_norm=None)
    with pytest.warns(UserWarning, match="has a hook"):
        ours = train(task, 10)
    assert_equal(ours, train_plainly(task), tolerance=1e-9)


def test_labels_say_what_belongs_together():
    """Supervised contrast (Khosla et al. 2020): what is compared needs more than encodings."""

    def rows(model, batch):
        return F.normalize(model.left(batch[0]), dim=-1), (batch[2] * 4).long()

    def loss(model, encoded):
        z, labels = encoded
        alike = labels[:, None] == labels[None, :]
        alone = torch.eye(len(z), dtype=torch.bool)
        scores = (z @ z.T / 0.2).masked_fill(alone, -torch.inf)
        chances = scores.log_softmax(1).masked_fill(alone, 0.0)
        others = (alike & ~alone).double()
        return -((chances * others).sum(1) / others.sum(1).clamp(min=1)).mean()

    task = task_of(loss=ab.JointLoss(rows, loss))
    assert_equal(train(task, 5), train_plainly(task), tolerance=1e-9)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (lambda model, batch: model.left(batch[0]).sum(), r"shape \(\) for 10 samples"),
        (lambda model, batch: model.left(batch[0])[1:], r"shape \(9, 5\) for 10 samples"),
        (lambda model, batch: 3.0, "a value of type float: return tensors"),
        (lambda model, batch: model.left(batch[0]).detach(), "does not depend on any parameter"),
    ],
)
def test_encodings_that_cannot_be_compared(rows, sentence):
    task = task_of(loss=ab.JointLoss(rows, lambda model, z: z.square().mean()))
    with pytest.raises(LossError, match=sentence):
        train(task, 10)


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [(lambda z: (z.sum(), 3, 4), "a tuple of 3"), (lambda z: z, r"shape \(35, 5\), not that of a")],
)
def test_comparisons_that_are_no_loss(returned, sentence):
    loss = ab.JointLoss(lambda model, batch: model.left(batch[0]), lambda model, z: returned(z))
    with pytest.raises(LossError, match=sentence):
        train(task_of(loss=loss), 10)


def test_encodings_of_two_shapes():
    def ragged(model, batch):
        z = model.left(batch[0])
        return z if len(z) == 10 else z[:, 1:]

    task = task_of(loss=ab.JointLoss(ragged, lambda model, z: z.square().mean()))
    with pytest.raises(LossError, match=r"\(\[5\] float64\) and \(\[4\] float64\)"):
        train(task, 10)


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        ({"norms": "synchronised"}, "norms is 'synchronised' and the loss compares"),
        ({"exchange": ab.Exchange(every=4)}, "exchange is .* and the loss compares"),
    ],
)
def test_what_ranks_cannot_do_besides(wish, sentence):
    with pytest.raises(InputError, match=sentence):
        ab.plan(task_of(), ranks=2, **wish)


def test_a_model_is_divided_only_if_the_comparison_uses_none_of_it():
    handed = task_of(loss=ab.JointLoss(encode_all, compare))
    assert ab.plan(handed, ranks=2, parallel="shard").parallel == "shard"
    with pytest.raises(InputError, match="compare uses a parameter of the model itself"):
        ab.plan(task_of(), ranks=2, parallel="shard")


def test_a_plan_by_hand_that_has_ranks_part():
    task = task_of()
    plan = plan_for(task, 5, parallel="replicate", shares=(1.0, 1.0))
    with pytest.raises(InputError, match=r"has the ranks exchange .* plan anew"):
        check_can_compare(task, plan.exchanging(ab.Exchange(every=4)))


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 32))


def test_the_plan_knows_what_comparing_takes():
    """More samples are compared than a pass has: their pairs are in the predicted peak."""
    data = TensorDataset(torch.randn(2000, 64))

    def planned(global_batch):
        def pairs(model, z):
            return torch.logsumexp(z @ z.T, 1).mean()

        task = ab.Task(
            model=Wide,
            loss=ab.JointLoss(lambda model, batch: model.layers(batch[0]), pairs),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            train=data,
            global_batch=global_batch,
            epochs=1,
        )
        return ab.plan(task, micro_batch=100).prediction

    few, many = planned(500), planned(2000)
    pairs = 4 * (2000**2 - 500**2)
    assert 2 * pairs < many.peak_bytes - few.peak_bytes < 6 * pairs
    assert many.step_seconds > few.step_seconds

"""Evaluation over ranks: what one process finds, for any number of samples."""

from __future__ import annotations

import dataclasses
import multiprocessing

import pytest
import torch
import torch.nn.functional as F
from tests.equivalence.reference import plan_for
from tests.equivalence.sharding import Sharded
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from torchmetrics import MeanSquaredError, MetricCollection, PearsonCorrCoef
from torchmetrics.classification import BinaryAUROC, BinaryF1Score, BinaryRecall

import anybatch as ab
from anybatch.compute import Replica
from anybatch.data import evaluation_batches
from anybatch.engine import Evaluation
from anybatch.engine.limit import CpuLimit
from anybatch.engine.step_thread import StepThread
from anybatch.events import Evaluated, OutOfMemory, Replanned
from anybatch.metrics import Metrics
from anybatch.parallel import SingleDevice

CPU = torch.device("cpu")
KIND = {"dtype": torch.float64}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5, **KIND), nn.Tanh())
        self.head = nn.Linear(5, 1, **KIND)

    def forward(self, x):
        return self.head(self.body(x)).squeeze(1)


def samples(count, seed=1):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=draw, **KIND)
    y = (torch.rand(count, generator=draw) < 0.4).long()
    return TensorDataset(x, y, torch.arange(count))


class Stream(IterableDataset):
    """Adds noise drawn as it is read."""

    def __init__(self, count):
        self.rows = list(samples(count))

    def __iter__(self):
        for x, y, number in self.rows:
            yield x + 0.1 * torch.randn(3, **KIND), y, number


class Slow(Dataset):
    """By index, from worker processes, with noise of its own."""

    def __init__(self, count):
        self.rows = list(samples(count))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        x, y, number = self.rows[index]
        return x + 0.1 * torch.randn(3, **KIND), y, number


SETS = {"tensors": samples, "stream": Stream, "slow": Slow}


def loss(model, batch):
    x, y, _ = batch
    weights = 1.0 + y
    losses = F.binary_cross_entropy_with_logits(model(x), y.to(x.dtype), reduction="none")
    right = ((model(x) > 0) == y).sum()
    return ab.Loss((losses * weights).sum(), weights.sum(), metrics={"accuracy": (right, len(y))})


def largest(model, batch):
    return {"size": (batch[0].abs().sum(), batch[0].numel())}


def scored(model, batch):
    return model(batch[0]).sigmoid(), batch[1]


def regressed(model, batch):
    return {"preds": model(batch[0]), "target": batch[0][:, 0]}


def objects():
    return [
        largest,
        Metrics({"f1": BinaryF1Score(), "auroc": BinaryAUROC()}, scored),
        Metrics(MetricCollection([BinaryRecall(), MeanSquaredError()], prefix="c_"), scored),
        Metrics({"r": PearsonCorrCoef()}, regressed),
    ]


def task_of(valid, metrics=largest, **more):
    return ab.Task(
        model=Net,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=samples(20, seed=0),
        valid=valid,
        metrics=metrics,
        **({"global_batch": 8, "steps": 2} | more),
    )


def evaluate(rank, size, kind, counts, batch, metrics, workers=0):
    """The evaluations of data sets of `counts` samples, and the events."""
    found, events = [], []
    for count in counts:
        task = task_of(SETS[kind](count), metrics, num_workers=workers)
        plan = plan_for(task, 4, evaluation_batch=batch, **over(size))
        with ab.Session(task, plan, [events.append]) as session:
            list(session.steps())
            one = session.evaluate()
        found.append((one.loss, one.metrics, one.samples))
    return found, [e for e in events if isinstance(e, Evaluated)]


def over(size):
    return {"parallel": "replicate", "shares": (1.0,) * size} if size > 1 else {}


def same(ranks, alone):
    for found, _ in ranks:
        assert found == ranks[0][0]  # to the bit, on every rank
        for (loss_, metrics, count), wanted in zip(found, alone, strict=True):
            assert loss_ == pytest.approx(wanted[0], rel=1e-10)
            assert metrics == pytest.approx(wanted[1], rel=1e-5, nan_ok=True)
            assert count == wanted[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "batch"), [("tensors", 7), ("tensors", 4096), ("stream", 7), ("slow", 7)]
)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_find_what_one_process_finds(crew, size, kind, batch):
    counts = [1, 2, 7, 8, 41] + ([1000] if kind == "tensors" else [])
    alone, _ = evaluate(0, 1, kind, counts, batch, largest)
    ranks = crew(size, evaluate, kind, counts, batch, largest)
    same(ranks, alone)
    assert [found[2] for found in alone] == counts
    assert len(ranks[0][1]) >= len(counts)
    assert not any(events for _, events in ranks[1:])  # only rank 0 speaks


def with_workers(rank, size, *args):
    multiprocessing.current_process()._config["daemon"] = (
        False  # a rank is, and may have no children
    )
    try:
        return evaluate(rank, size, *args)
    finally:
        multiprocessing.current_process()._config["daemon"] = True


@pytest.mark.nightly
def test_worker_processes_give_the_same(crew):
    alone, _ = evaluate(0, 1, "slow", [23], 5, largest)
    same(crew(2, with_workers, "slow", [23], 5, largest, 1), alone)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensors", "stream"])
@pytest.mark.parametrize("size", [2, 3])
def test_metric_objects_are_merged_exactly(crew, size, kind):
    counts = [2, 7, 41, 230]
    alone, _ = evaluate(0, 1, kind, counts, 6, objects())
    assert set(alone[0][1]) == {
        *("accuracy", "size", "f1", "auroc", "c_BinaryRecall", "c_MeanSquaredError", "r")
    }
    same(crew(size, evaluate, kind, counts, 6, objects()), alone)


class Blocks(nn.Module):
    """Blocks, which are gathered one by one where the model is sharded."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 3, **KIND), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(3, 1, **KIND)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).squeeze(1)


def evaluate_sharded(rank, size, kind, counts, bad_rank, most):
    """As `evaluate`, with a sharded model; `bad_rank` has room for `most` samples in the last block."""
    task = dataclasses.replace(task_of(samples(9), objects()), model=Blocks)
    events, found = [], []
    if size > 1:
        one = Sharded(task, 4, (1.0,) * size)
        replica, group = one.replica, one.group
    else:
        group, plan = SingleDevice(), plan_for(task, 4)
        replica = Replica(
            task.build_model(),
            lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1),
            loss,
            plan.choice,
            CPU,
            8,
        )

    def crowded(_module, inputs):
        if rank == bad_rank and len(inputs[0]) > most:
            raise torch.OutOfMemoryError("tried to allocate more than there is")

    replica.model.blocks[2].register_forward_pre_hook(crowded)
    evaluation = Evaluation(
        replica,
        group,
        device=CPU,
        thread=StepThread(),
        limit=CpuLimit(),
        meter=CpuLimit().enter(),
        sink=events.append,
    )
    plan = plan_for(task, 4, evaluation_batch=8)
    for count in counts:
        data = SETS[kind](count)

        def batches(batch, data=data):
            return evaluation_batches(
                data, None, batch, rank=group.rank, shares=group.shares, lockstep=group.lockstep
            )

        measured, plan = evaluation.means(plan, 0, batches, loss, task.metrics)
        found.append((measured.loss, measured.metrics, measured.samples))
    group.close()
    return found, [type(e) for e in events], plan.choice.evaluation_batch


@pytest.mark.slow
@pytest.mark.parametrize("most", [100, 3])
@pytest.mark.parametrize("kind", ["tensors", "stream"])
def test_a_sharded_model_is_evaluated_in_step(crew, kind, most):
    counts = [2, 7, 23, 41]
    alone, _, _ = evaluate_sharded(0, 1, kind, counts, None, 0)
    ranks = crew(3, evaluate_sharded, kind, counts, 1, most)
    same([(found, None) for found, *_ in ranks], alone)
    assert {size for _, _, size in ranks} == {8 if most == 100 else 2}
    for _, events, _ in ranks:
        assert events == [OutOfMemory, Replanned] * (0 if most == 100 else 2)


# ------------------------------------------------------------------------------------------ failures


def evaluate_with_failure(rank, size, kind, bad_rank, most):
    """Evaluate where `bad_rank` has room for `most` samples, and then again."""
    events = []
    task = task_of(SETS[kind](41), objects())
    plan = plan_for(task, 4, evaluation_batch=16, **over(size))
    with ab.Session(task, plan, [events.append]) as session:
        list(session.steps())
        events.clear()

        def crowded(_module, inputs):
            if rank == bad_rank and len(inputs[0]) > most:
                raise torch.OutOfMemoryError("tried to allocate more than there is")

        handle = session.model.head.register_forward_pre_hook(crowded)
        one = session.evaluate()
        again = session.evaluate()
        handle.remove()
        outputs = list(session.predict(samples(20), lambda model, batch: model(batch[0])))
        size = session.plan.choice.evaluation_batch
    found = [(e.loss, e.metrics, e.samples) for e in (one, again)]
    return found, [(type(e), getattr(e, "rank", None)) for e in events], size, len(outputs)


@pytest.mark.parametrize("kind", ["tensors", "stream"])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_memory_that_runs_out_on_one_rank_halves_the_batch_on_all(crew, bad_rank, kind):
    alone, _ = evaluate(0, 1, kind, [41, 41], 16, objects())
    ranks = crew(2, evaluate_with_failure, kind, bad_rank, 5)
    same([(found, None) for found, *_ in ranks], alone)
    assert [size for _, _, size, _ in ranks] == [4, 4]
    told = [(OutOfMemory, bad_rank), (Replanned, None)] * 2
    assert ranks[0][1] == [*told, (Evaluated, None), (Evaluated, None)]


def without_room(rank, size):
    task = task_of(samples(9))
    with ab.Session(task, plan_for(task, 4, evaluation_batch=4, **over(size))) as session:
        if rank == 1:
            session.model.head.register_forward_pre_hook(no_memory)
        session.evaluate()


def no_memory(*_):
    raise torch.OutOfMemoryError("tried to allocate more than there is")


def test_without_room_for_a_sample_all_ranks_stop(crew):
    for error, _ in crew.outcomes(2, without_room):
        assert isinstance(error, ab.NoPlanFits)
        assert "memory ran out in evaluation" in str(error)


class Broken(BinaryF1Score):
    def __init__(self, where):
        super().__init__()
        self.where = where

    def update(self, preds, target):
        if self.where == "update" and torch.distributed.get_rank() == 1:
            raise ZeroDivisionError("in update")
        super().update(preds, target)

    def compute(self):
        if self.where == "compute" and torch.distributed.get_rank() == 1:
            raise ZeroDivisionError("in compute")
        return super().compute()


class BrokenSet(Slow):
    def __getitem__(self, index):
        if index == 4:
            raise OSError("disk gone")
        return super().__getitem__(index)


def with_an_error(rank, size, where):
    task = task_of(
        BrokenSet(9) if where == "data" else samples(9), Metrics({"f1": Broken(where)}, scored)
    )
    with ab.Session(task, plan_for(task, 4, **over(size))) as session:
        if where == "model" and rank == 1:
            session.model.head.register_forward_pre_hook(lambda *_: 1 / 0)
        session.evaluate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "kind", "words"),
    [
        ("model", ZeroDivisionError, "division by zero"),
        ("data", ab.DataError, "sample 4 of BrokenSet"),
        ("update", ZeroDivisionError, "in update"),
        ("compute", ZeroDivisionError, "in compute"),
    ],
)
def test_an_error_on_one_rank_stops_all_and_is_named(crew, where, kind, words):
    (first, _), (second, _), (third, _) = crew.outcomes(3, with_an_error, where)
    assert isinstance(second, kind)
    assert words in str(second)
    for error in (first, third):
        assert type(error).__name__ == "PeerFailed"
        assert f"rank 1 failed with {kind.__name__}" in str(error)
        assert words in str(error)


# ---------------------------------------------------------------------------------------- prediction


def predict(rank, size, kind, counts, output, most):
    found = []
    task = task_of(samples(3))
    plan = plan_for(task, 4, evaluation_batch=16, **over(size))
    with ab.Session(task, plan) as session:
        list(session.steps())
        crowded = rank == size - 1
        session.model.head.register_forward_pre_hook(
            lambda _m, i: no_memory() if crowded and len(i[0]) > most else None
        )
        for count in counts:
            found.append(session.predict_all(SETS[kind](count), output))
    return found


def losses_and_more(model, batch):
    x, y, numbers = batch
    losses = F.binary_cross_entropy_with_logits(model(x), y.to(x.dtype), reduction="none")
    return {
        "loss": losses,
        "more": (numbers, [f"sample {n}" for n in numbers.tolist()]),
        "no": None,
    }


@pytest.mark.parametrize("most", [100, 3])
@pytest.mark.parametrize("kind", sorted(SETS))
@pytest.mark.parametrize("size", [2, 3])
def test_predictions_of_all_ranks_come_in_the_order_of_the_data(crew, size, kind, most):
    counts = [1, 2, 16, 17, 50]
    alone = predict(0, 1, kind, counts, losses_and_more, 100)
    for found in crew(size, predict, kind, counts, losses_and_more, most):
        for one, wanted, count in zip(found, alone, counts, strict=True):
            assert one["more"][0].tolist() == list(range(count))
            assert one["more"][1] == [f"sample {n}" for n in range(count)]
            assert one["no"] is None
            assert torch.allclose(one["loss"], wanted["loss"], rtol=1e-10)


def test_a_prediction_that_is_none_of_single_samples(crew):
    for error, _ in crew.outcomes(2, predict, "tensors", [5], loss_mean, 100):
        assert isinstance(error, ab.InputError)
        assert "return one value for each sample" in str(error)


def loss_mean(model, batch):
    return model(batch[0]).mean()


def test_the_objects_of_the_task_stay_as_they_are():
    metric = BinaryF1Score()
    task = task_of(samples(9), Metrics({"f1": metric}, scored))
    with ab.Session(task, plan_for(task, 4)) as session:
        session.evaluate()
        first = session.evaluate().metrics
        assert session.evaluate().metrics == first
    assert metric.update_count == 0
    assert dataclasses.is_dataclass(task.metrics)

"""Precision on the CPU: close to float32, scaled and unscaled exactly, masters in float32."""

import copy
import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from tests.equivalence.reference import assert_equal, deviation, own_model, plan_for, train
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.compute import Replica
from anybatch.compute.precision import FORMATS
from anybatch.errors import InputError, LossError
from anybatch.events import Overflowed
from anybatch.plans import PRECISION_ALIASES, Choice, Recompute, parse_precision


class Net(nn.Module):
    """Layers of each kind: matrix products, norms, an embedding-like table of parameters."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 16),
            nn.LayerNorm(16),
            nn.Tanh(),
            nn.Linear(16, 8, bias=False),
            nn.BatchNorm1d(8),
        )
        self.shift = nn.Parameter(torch.zeros(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x) + self.shift)


def loss(model, batch):
    x, y = batch
    logits = model(x)
    correct = (logits.detach().argmax(1) == y).sum()
    return ab.Loss(
        F.cross_entropy(logits, y, reduction="sum"), len(y), metrics={"accuracy": correct}
    )


def accuracy(model, batch):
    x, y = batch
    return {"also": ((model(x).argmax(1) == y).sum(), len(y))}


def task_of(steps=20, optimizer=None, model=Net, **more):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(48, 8, generator=draw)
    y = (x[:, :3]).argmax(1)
    return ab.Task(
        model=model,
        loss=loss,
        optimizer=optimizer or (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)),
        train=TensorDataset(x, y),
        valid=TensorDataset(x, y),
        metrics=accuracy,
        global_batch=16,
        ghost_batch=4,
        steps=steps,
        **more,
    )


HALVES = ["bf16", "fp16", "bf16-weights", "fp16-weights", "bf16-pure", "fp16-pure"]


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("way", [Recompute(), Recompute(blocks=("body",))])
def test_half_precision_stays_close_to_float32(precision, way):
    task = task_of(steps=24)
    full = train(task, 16)
    half = train(task, 4, precision=precision, recompute=way)
    assert 1e-7 < deviation(half.model, full.model) < 0.15
    assert abs(half.losses[-1] - full.losses[-1]) < 0.1 * full.losses[0]
    assert half.losses[-1] < 0.95 * half.losses[0]
    assert all(t.dtype in (torch.float32, torch.int64) for t in half.model.state_dict().values())


@pytest.mark.parametrize("precision", HALVES)
def test_evaluation_runs_in_the_precision_of_training(precision):
    task = task_of(steps=3)
    with ab.Session(task, plan_for(task, 4, precision=precision)) as session:
        for _ in session.steps():
            pass
        done = session.evaluate()
    assert done.metrics["also"] == done.metrics["accuracy"]
    with ab.Session(own_model(task_of(steps=3)), plan_for(task, 4)) as session:
        for _ in session.steps():
            pass
        assert abs(session.evaluate().loss - done.loss) < 0.1


def gradients(precision, pieces, scaling=True, model=None):
    """The gradient of a batch of 16 cut into `pieces`, before the update, as float64."""
    task = task_of()
    model = model or task.build_model()
    replica = Replica(
        model,
        lambda: torch.optim.SGD(model.parameters(), lr=0.1),
        loss,
        Choice(micro_batch=4, evaluation_batch=4, precision=precision),
        torch.device("cpu"),
        16,
        scaling,
    )
    x, y = task.train.tensors
    for start in range(0, 16, 16 // pieces):
        stop = start + 16 // pieces
        replica.accumulate(
            (x[start:stop], y[start:stop]), stop - start, [4] * ((stop - start) // 4)
        )
    replica.finish(16.0, None)
    found = [p.grad.double() for p in replica.parameters]
    scale = replica.loss_scale
    replica.close()
    return found, scale


@pytest.mark.parametrize("precision", ["fp16", "fp16-weights"])
@pytest.mark.parametrize("pieces", [1, 4])
def test_the_loss_scale_is_taken_out_once_per_step(precision, pieces):
    with_scaling, scale = gradients(precision, pieces)
    without, none = gradients(precision, pieces, scaling=False)
    assert scale == 65536.0
    assert none is None
    for a, b in zip(with_scaling, without, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-4)
    exact, _ = gradients("fp32", 4)
    for a, b in zip(with_scaling, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=0.1, atol=5e-3)


def begin_at_scale(session, scale):
    """Let fp16 begin at another loss scale than torch's 65536."""
    replica = session._replica
    replica.load_scaler_state({**replica.scaler_state(), "scale": scale})


def run_scaled(task, scale, precision="fp16"):
    events = []
    with ab.Session(own_model(task), plan_for(task, 4, precision=precision), [events.append]) as s:
        begin_at_scale(s, scale)
        done = list(s.steps())
        optimizer = copy.deepcopy(s._replica.optimizer.state_dict())
    return s.model, done, optimizer, [e for e in events if isinstance(e, Overflowed)]


@pytest.mark.parametrize("precision", ["fp16", "fp16-weights"])
def test_an_overflow_is_redone_at_half_the_scale_and_nothing_else_advances(precision):
    task = task_of(
        steps=9, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01), schedule=lambda p: 0.9**p.step
    )
    calm, steps, state, none = run_scaled(task, 2.0**14, precision)
    assert not none
    model, redone, state_after, overflows = run_scaled(task, 2.0**21, precision)
    assert overflows
    scales = [2.0**21, *(e.loss_scale_after for e in overflows)]
    assert [e.loss_scale_before for e in overflows] == scales[:-1]
    assert all(b == a / 2 for a, b in itertools.pairwise(scales))
    assert {e.step for e in overflows} == {1}
    assert [s.step for s in redone] == list(range(1, 10))
    assert [s.samples_seen for s in redone] == [s.samples_seen for s in steps]
    assert [s.learning_rate for s in redone] == [s.learning_rate for s in steps]
    assert redone[0].loss_scale == scales[-1]
    counts = [float(s["step"]) for s in state_after["state"].values()]
    assert set(counts) == {9.0}
    # Scales are powers of two, so all but the last bits of float16's smallest numbers agree.
    assert deviation(model, calm) < 1e-2
    assert len(state["state"]) == len(state_after["state"])


def test_a_run_that_overflowed_equals_one_that_began_with_the_right_scale():
    task = task_of(steps=6)
    model, _, state, overflows = run_scaled(task, 2.0**24)
    calm, _, other, none = run_scaled(task, overflows[-1].loss_scale_after)
    assert not none
    for a, b in zip(model.state_dict().values(), calm.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(state["state"].values(), other["state"].values(), strict=True):
        assert torch.equal(a["momentum_buffer"], b["momentum_buffer"])


def test_a_gradient_that_no_scale_mends_is_named():
    class Bad(Net):
        def forward(self, x):
            return super().forward(x) + (self.shift.sum() * 0).sqrt()

    task = task_of(steps=2, model=Bad())
    before = copy.deepcopy(task.model.state_dict())
    with (
        ab.Session(task, plan_for(task, 4, precision="fp16")) as session,
        pytest.raises(LossError, match="not finite at any loss scale"),
    ):
        list(session.steps())
    assert all(torch.equal(before[n], v) for n, v in task.model.state_dict().items())


@pytest.mark.parametrize("precision", ["bf16-weights", "fp16-weights"])
def test_half_weights_have_float32_norms_masters_and_states(precision):
    half = FORMATS[precision].weights
    task = task_of(steps=4, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))
    with ab.Session(task, plan_for(task, 4, precision=precision)) as session:
        list(session.steps())
        model, optimizer = session.model, session._replica.optimizer
        assert model.body[0].weight.dtype == half
        assert model.shift.dtype == half
        for norm in (model.body[1], model.body[4]):
            assert norm.weight.dtype == torch.float32
            assert norm.running_mean.dtype == torch.float32 if hasattr(norm, "running_mean") else 1
        in_optimizer = [p for group in optimizer.param_groups for p in group["params"]]
        assert {p.dtype for p in in_optimizer} == {torch.float32}
        assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {torch.float32}
        masters = [p.detach().clone() for p in in_optimizer]
        for p, master in zip(model.parameters(), masters, strict=True):
            assert torch.equal(p, master.to(p.dtype))
    for p, master in zip(model.parameters(), masters, strict=True):
        assert p.dtype == torch.float32
        assert torch.equal(p, master)
        assert p.grad is None
    assert any(not torch.equal(m, m.to(half).float()) for m in masters)


def test_updates_too_small_for_bf16_are_kept_by_the_masters():
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x * self.weight

    def make(precision):
        task = ab.Task(
            model=One,
            loss=lambda m, b: ab.Loss(m(b[0]).sum(), len(b[0])),
            optimizer=lambda p: torch.optim.SGD(p, lr=2**-12),
            train=TensorDataset(torch.ones(4, 1)),
            global_batch=4,
            steps=32,
        )
        return train(task, 2, precision=precision).model.weight.item()

    assert make("bf16-weights") == 1 - 32 * 2**-12
    assert make("bf16-pure") == 1.0  # each update is lost


@pytest.mark.parametrize("precision", ["bf16-weights", "fp16-weights"])
def test_states_that_the_optimizer_makes_at_once_move_to_the_masters(precision):
    task = task_of(steps=6, optimizer=lambda p: torch.optim.Adagrad(p, lr=0.1))
    full, half = train(task, 16), train(task, 4, precision=precision)
    assert {s["sum"].dtype for s in half.optimizer.state.values()} == {torch.float32}
    assert deviation(half.model, full.model) < 0.15


def test_micro_batches_are_added_up_in_float32():
    """In bf16, 256 + 1 is 256: the small gradients after a large one would be lost."""

    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return x * self.weight

    task = ab.Task(
        model=One,
        loss=lambda m, b: ab.Loss(m(b[0]).sum(), len(b[0])),
        optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
        train=TensorDataset(torch.tensor([[1024.0]] + [[1.0]] * 64)),
        global_batch=65,
        steps=1,
        shuffle=False,
    )
    weight = train(task, 1, precision="bf16-weights").model.weight.item()
    assert weight == pytest.approx(-(1024 + 64) / 65, rel=1e-6)


def test_tied_weights_stay_tied_in_half():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.b = nn.Linear(8, 8)
            self.b.weight = self.a.weight
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.b(torch.tanh(self.a(x))))

    task = task_of(steps=5, model=Tied)
    for precision in HALVES:
        model = train(task, 4, precision=precision).model
        assert model.a.weight is model.b.weight
        assert deviation(model, train(task, 16).model) < 0.1


@pytest.mark.parametrize("precision", ["tf32", "fp8"])
def test_what_the_device_does_not_have_is_refused(precision):
    task = task_of(steps=1, model=Net())
    with (
        pytest.raises(InputError, match=f"precision {precision} needs a CUDA device .* cpu: use"),
        ab.Session(task, plan_for(task, 4, precision=precision)),
    ):
        pass
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
    with pytest.raises(InputError, match=f"precision {precision} needs a CUDA device"):
        ab.Step(task.model, optimizer, loss, precision=precision)


def test_apex_names():
    expected = {"O0": "fp32", "o1": "fp16", "O2": "fp16-weights", "O3": "fp16-pure"}
    assert {name: parse_precision(name) for name in expected} == expected
    assert set(PRECISION_ALIASES.values()) <= set(FORMATS)
    assert parse_precision("BF16") == "bf16"
    with pytest.raises(InputError, match=r"precision is 'O4': choose one of fp32, tf32"):
        parse_precision("O4")


def test_names_of_apex_train_as_what_they_stand_for():
    task = dataclasses.replace(task_of(steps=2), valid=None)
    results = {}
    for name in ("O1", "fp16"):
        model = task.build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ab.Step(model, optimizer, loss, precision=name, micro_batch=4, ghost_batch=4) as step:
            step(list(task.train.tensors))
        results[name] = model
    assert deviation(results["O1"], results["fp16"]) == 0


def test_float32_is_exact_whatever_the_precision_before():
    task = task_of(steps=3)
    assert_equal(train(task, 4), train(task, 16), 1e-5)

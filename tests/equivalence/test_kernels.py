"""Layouts and compilers change the kernels, never what is computed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.equivalence.reference import assert_equal, deviation, plan_for, train, train_plainly
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.compute import kernel_choices
from anybatch.plans import KernelChoices, Recompute

COMPILED = KernelChoices(compile=True)


@pytest.fixture(autouse=True)
def compiled_here():
    """No processes of the compiler's own: they would outlive the test."""
    import torch._inductor.config

    with torch._inductor.config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()


@pytest.fixture
def without_kernels(monkeypatch):
    """What is compiled is run by torch's own kernels, which takes no C++ compiler, and seconds less."""
    compiled = torch.compile
    monkeypatch.setattr(
        kernel_choices.torch, "compile", lambda run, **_: compiled(run, backend="aot_eager")
    )


class Attending(nn.Module):
    """(B, T) tokens to (B, T, 7)."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, dropout, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 7)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Perceptron(nn.Module):
    """(B, 6) to (B, 3), in blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)) for _ in range(3)
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def convolutional():
    """(B, 3, 8, 8) to (B, 3), with BatchNorm."""

    def block(channels):
        return nn.Sequential(
            nn.Conv2d(channels, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU()
        )

    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
    return nn.Sequential(block(3), block(6), block(6), head)


def classified(model, batch):
    x, y = batch
    return ab.Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


def next_token(model, batch):
    (tokens,) = batch
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return ab.Loss(
        F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum"), logits.size(0)
    )


def task_of(kind, dtype=torch.float64, **changes):
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (30,), generator=draw)
    tokens = torch.randint(7, (30, 6), generator=draw)
    vectors = torch.randn(30, 6, generator=draw, dtype=dtype)
    images = torch.randn(30, 3, 8, 8, generator=draw, dtype=dtype)
    build, loss, data = {
        "perceptron": (Perceptron, classified, (vectors, labels)),
        "transformer": (Attending, next_token, (tokens,)),
        "convolutions": (convolutional, classified, (images, labels)),
    }[kind]
    fields = {
        "model": lambda: build().to(dtype),
        "loss": loss,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.01),
        "train": TensorDataset(*data),
        "global_batch": 12,
        "epochs": 2,
        "ghost_batch": 4 if kind == "convolutions" else None,
        "clip_norm": 1.0,
    }
    return ab.Task(**{**fields, **changes})


@pytest.mark.parametrize("recompute", [Recompute(), Recompute(blocks=("0", "1"))])
@pytest.mark.parametrize("micro_batch", [8, 12])
def test_channels_last_convolutions_compute_what_the_plain_loop_does(micro_batch, recompute):
    task = task_of("convolutions")
    kernels = KernelChoices(channels_last=True)
    ours = train(task, micro_batch, kernels=kernels, recompute=recompute)
    assert_equal(ours, train_plainly(task), 1e-9)
    assert all(p.is_contiguous() for p in ours.model.parameters())


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize(
    ("kind", "micro_batch", "recompute"),
    [
        ("perceptron", 5, Recompute()),  # of 12: 5, 5, 2; and of the 6 left at the end: 5, 1
        ("perceptron", 5, Recompute(blocks=("blocks.*",))),
        ("perceptron", 12, Recompute(blocks=("blocks.0", "blocks.2"), nested=True)),
        pytest.param("transformer", 5, Recompute(), marks=pytest.mark.slow),
        pytest.param("transformer", 12, Recompute(blocks=("layers.*",)), marks=pytest.mark.nightly),
        pytest.param("convolutions", 8, Recompute(), marks=pytest.mark.nightly),
        pytest.param("convolutions", 4, Recompute(blocks=("1", "2")), marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_compute_what_the_plain_loop_does(kind, micro_batch, recompute):
    task = task_of(kind)
    ours = train(task, micro_batch, kernels=COMPILED, recompute=recompute)
    assert_equal(ours, train_plainly(task), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "micro_batch", "dtype", "tolerance"),
    [
        pytest.param("perceptron", 5, torch.float64, 1e-6, marks=pytest.mark.nightly),
        ("perceptron", 12, torch.float32, 1e-5),
        pytest.param("convolutions", 12, torch.float64, 1e-6, marks=pytest.mark.nightly),
    ],
)
def test_so_do_the_kernels_that_the_compiler_writes(kind, micro_batch, dtype, tolerance):
    task = task_of(kind, dtype, **({} if micro_batch == 5 else {"epochs": None, "steps": 2}))
    assert_equal(train(task, micro_batch, kernels=COMPILED), train_plainly(task), tolerance)


@pytest.mark.nightly
@pytest.mark.parametrize("recompute", [Recompute(), Recompute(blocks=("layers.*",))])
def test_dropout_draws_the_masks_that_it_draws_uncompiled(recompute):
    model = lambda: Attending(dropout=0.3).double()  # noqa: E731
    task = task_of("transformer", model=model, epochs=None, steps=2)
    compiled = train(task, 6, kernels=COMPILED, recompute=recompute)
    assert deviation(compiled.model, train(task, 6).model) < 1e-6


@pytest.mark.usefixtures("without_kernels")
def test_a_compiled_run_is_evaluated_saved_and_resumed(tmp_path):
    task = task_of("perceptron", valid=task_of("perceptron").train)
    plan = plan_for(task, 6, kernels=COMPILED)
    with ab.Session(task, plan, checkpoints=tmp_path) as session:
        steps = session.steps()
        for _ in range(3):
            next(steps)
        session.save(wait=True)
    uncompiled = plan.running(KernelChoices())
    losses = []
    for way in (plan, uncompiled):
        with ab.Session(task, way, checkpoints=tmp_path) as session:
            assert session.resume()
            for _ in session.steps():
                pass
            losses.append(session.evaluate().loss)
            assert list(session.model.state_dict()) == list(task.build_model().state_dict())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert deviation(session.model, train_plainly(task).model) < 1e-6


@pytest.mark.usefixtures("without_kernels")
def test_memory_that_runs_out_in_a_compiled_pass_leaves_no_trace():
    task = task_of("perceptron")
    passes = []

    class Failing(Perceptron):
        def forward(self, x):
            out = super().forward(x)
            passes.append(len(x))
            if len(passes) == 5:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return out

    failing = task_of("perceptron", model=lambda: Failing().double())
    ladder = plan_for(task, 6).choice, plan_for(task, 3).choice
    events = []
    ours = train(failing, 6, sinks=[events.append], kernels=COMPILED, ladder=ladder[1:])
    assert "Replanned" in {type(event).__name__ for event in events}
    assert 3 in passes
    assert_equal(ours, train_plainly(task), 1e-6)


@pytest.mark.usefixtures("without_kernels")
def test_a_loop_of_ones_own_compiles_on_request():
    x, y = task_of("perceptron").train.tensors
    weights = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Perceptron().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ab.Step(model, optimizer, classified, micro_batch=8, compile=compiled) as step:
            losses = [step((x[:size], y[:size])).loss for size in (20, 30, 7)]
            assert step.plan.kernels == KernelChoices(compile=compiled)
        weights.append((losses, nn.utils.parameters_to_vector(model.parameters())))
    assert weights[0][0] == pytest.approx(weights[1][0], rel=1e-9)
    torch.testing.assert_close(weights[0][1], weights[1][1], rtol=1e-9, atol=1e-12)


def test_the_plan_says_what_is_not_for_its_device():
    plan = plan_for(task_of("perceptron"), 6)
    with pytest.raises(ab.InputError, match=r"kernels.autotune is true, but device is 'cpu'"):
        plan.running(KernelChoices(autotune=True))

"""Whether blocks are compiled is decided by the clock, alike on all ranks, and told; nothing of it ends
a run."""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading

import pytest
import torch
from tests.equivalence.reference import plan_for
from tests.unit.engine.noisy import Noisy, keep_time_by, loss, noisy_task, told
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.compute import kernel_choices
from anybatch.engine import compile_trial
from anybatch.engine.compile_trial import COMPILE_SECONDS, too_short
from anybatch.events import CompileDecided, OutOfMemory, Replanned, Tried
from anybatch.plans import KernelChoices, Plan, Recompute
from anybatch.report.sentences import describe

OPEN = KernelChoices(compile_if_faster="open")
torch_compile = torch.compile


def open_plan(task, micro_batch=6, **changes):
    given = {"kernels": OPEN, "prediction": told(), **changes}
    return plan_for(task, micro_batch).model_copy(update=given)


class Compiler:
    """Stands for torch.compile and the clock: a pass takes one second per sample as it is, `seconds`
    where what it ran was compiled. With `failing`, compiled code raises that."""

    def __init__(self, seconds=1.0, failing=None):
        self.seconds, self.failing = seconds, failing
        self.now, self.num_compiled, self.num_passes = 0.0, 0, 0
        self._ran_compiled = False
        self.lock = threading.Lock()  # what is beside one is not put back after a trial

    def compile(self, run, **_):
        self.num_compiled += 1

        def compiled(*args):
            if self.failing is not None:
                raise self.failing
            self._ran_compiled = True
            return run(*args)

        return compiled

    def loss(self, model, batch):
        self._ran_compiled = False
        found = loss(model, batch)
        self.num_passes += self._ran_compiled
        self.now += len(batch[0]) * (self.seconds if self._ran_compiled else 1.0)
        return found

    def installed(self, patch, compile_seconds=5.0):
        keep_time_by(patch, lambda: self.now)
        patch.setattr(kernel_choices.torch, "compile", self.compile)
        patch.setattr(compile_trial, "COMPILE_SECONDS", compile_seconds)
        return self


@pytest.fixture
def compiler(monkeypatch):
    return Compiler().installed(monkeypatch)


def run(task, plan, compiler, num_steps=3, **options):
    """The weights after some steps, what was told, and the plan that was followed."""
    events = []
    task = dataclasses.replace(task, loss=compiler.loss)
    with ab.Session(task, plan, [events.append], **options) as session:
        for _, _ in zip(range(num_steps), session.steps(), strict=False):
            pass
        state = {name: t.detach().clone() for name, t in session.model.state_dict().items()}
        return state, events, session.plan


def decided(events):
    (event,) = [event for event in events if isinstance(event, CompileDecided)]
    return event


def same(state, other):
    return all(torch.equal(state[name], other[name]) for name in other)


def test_compiled_blocks_are_taken_where_they_are_faster_and_nothing_of_the_trial_remains(compiler):
    task, compiler.seconds = noisy_task(), 0.75
    state, events, followed = run(task, open_plan(task), compiler)
    assert followed.kernels == KernelChoices(compile=True, compile_if_faster="decided")
    event = decided(events)
    assert (event.compiled, event.reason) == (True, "")
    assert (event.plain_seconds, event.compiled_seconds) == pytest.approx((12.0, 9.0))
    assert Plan.model_validate_json(followed.to_json()) == followed
    assert event.plan["kernels"]["compile"]
    assert followed.prediction is not None
    assert followed.prediction.step_seconds == pytest.approx(9.1)
    assert "9.0 s instead of 12.0 s for the passes of a step, taken." in describe(event)
    # The trial's rounds, and all of the steps.
    assert compiler.num_passes == 2 * 5 + 3 * 2
    plain, _, _ = run(task, plan_for(task, 6), compiler)
    assert same(state, plain)


@pytest.mark.parametrize(
    ("seconds", "told"), [(1.2, "no faster"), (0.97, "less than 4% faster"), (5.0, "no faster")]
)
def test_they_are_not_where_they_are_slower_or_hardly_faster(compiler, seconds, told):
    task, compiler.seconds = noisy_task(), seconds
    state, events, followed = run(task, open_plan(task), compiler)
    assert followed.kernels == KernelChoices(compile_if_faster="decided")
    event = decided(events)
    assert event.compiled_seconds == pytest.approx(12 * seconds)
    assert f"not taken, since that is {told}." in describe(event)
    num_rounds = 2 if seconds == 5.0 else 5  # far slower: tried no further
    assert compiler.num_passes == 2 * num_rounds
    plain, _, _ = run(task, plan_for(task, 6), compiler)
    assert same(state, plain)


def test_nor_where_they_are_faster_in_some_rounds_only(monkeypatch):
    class Unsteady(Compiler):
        def loss(self, model, batch):  # two passes a round, and the third of them is slow
            self.seconds = 1.5 if 6 <= self.num_passes < 8 else 0.5
            return super().loss(model, batch)

    task = noisy_task()
    _, events, followed = run(task, open_plan(task), Unsteady().installed(monkeypatch))
    assert not followed.kernels.compile
    assert decided(events).compiled_seconds == pytest.approx(6.0)
    assert decided(events).reason == "that was not so in every round"


def test_without_being_asked_to_a_run_tries_no_compiler(compiler):
    task, compiler.seconds = noisy_task(), 0.1
    _, events, followed = run(task, open_plan(task, kernels=KernelChoices()), compiler, trial=True)
    assert not followed.kernels.compile
    assert compiler.num_compiled == 0
    assert not [event for event in events if isinstance(event, CompileDecided)]


def test_it_comes_after_the_trial_of_choices(compiler):
    task, compiler.seconds = noisy_task(), 0.5
    _, events, followed = run(task, open_plan(task), compiler, trial=True)
    kinds = [type(event) for event in events if isinstance(event, Tried | CompileDecided)]
    assert kinds == [Tried, CompileDecided]
    assert followed.kernels.compile


def test_a_run_that_is_too_short_for_it_stays_uncompiled_and_says_so(monkeypatch):
    task, compiler = noisy_task(), Compiler(0.1).installed(monkeypatch, COMPILE_SECONDS)
    _, events, followed = run(task, open_plan(task), compiler)
    assert followed.kernels == KernelChoices(compile_if_faster="decided")
    assert compiler.num_compiled == 0
    assert describe(decided(events)) == (
        "The blocks are not compiled: what is left of the run takes about 20 min 00 s, and trying it"
        " out about 40.0 s, more than 2% of that."
    )


@pytest.mark.parametrize(
    ("prediction", "num_steps", "expected"),
    [
        (told(), 2000, ""),
        (told(), 1999, "more than 2% of that"),
        (told(10.0), 600, "about 2 min 10 s, more than 2%"),
        (told(10.0), 700, ""),
        (told(), None, "steps=... or samples=..."),
        (None, 10**6, "is not predicted"),
    ],
)
def test_how_long_a_run_has_to_be(prediction, num_steps, expected):
    found = too_short(open_plan(noisy_task(), prediction=prediction), num_steps)
    assert expected in found
    assert bool(found) == bool(expected)


@pytest.mark.parametrize("error", [ZeroDivisionError("of theirs\nand more"), MemoryError()])
def test_a_compiler_that_fails_ends_no_run(compiler, error):
    task, compiler.failing = noisy_task(), error
    state, events, followed = run(task, open_plan(task), compiler)
    assert followed.kernels == KernelChoices(compile_if_faster="decided")
    reason = (
        "ran out of memory"
        if isinstance(error, MemoryError)
        else ("failed with ZeroDivisionError: of theirs")
    )
    assert decided(events).reason == f"compiled passes {reason}"
    assert not [event for event in events if isinstance(event, OutOfMemory)]
    plain, _, _ = run(task, plan_for(task, 6), compiler)
    assert same(state, plain)


def test_the_cause_that_torchs_compiler_wraps_is_named(monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel\nat all")

    task, compiler = noisy_task(), Compiler().installed(monkeypatch)
    compile = functools.partial(torch_compile, backend=broken)
    monkeypatch.setattr(kernel_choices.torch, "compile", lambda run, **_: compile(run))
    _, events, followed = run(task, open_plan(task), compiler)
    assert not followed.kernels.compile
    assert decided(events).reason == "compiled passes failed with RuntimeError: no such kernel"
    torch._dynamo.reset()


def test_what_cannot_be_compiled_later_runs_uncompiled(monkeypatch):
    graphs = []

    def once(graph, _inputs):
        graphs.append(graph)
        if len(graphs) > 1:
            raise RuntimeError("no second one")
        return graph.forward

    task, compiler = noisy_task(model=functools.partial(nn.Linear, 4, 3)), Compiler()
    compiler.installed(monkeypatch)
    compile = functools.partial(torch_compile, backend=once)
    monkeypatch.setattr(kernel_choices.torch, "compile", lambda run, **_: compile(run))
    kept = KernelChoices(compile=True, compile_if_faster="decided")
    before = torch._dynamo.config.suppress_errors
    state, _, _ = run(task, open_plan(task, 5, kernels=kept), compiler)  # of 12: 5, 5, 2
    assert len(graphs) == 2
    assert torch._dynamo.config.suppress_errors == before
    plain, _, _ = run(task, plan_for(task, 5), compiler)
    assert same(state, plain)
    torch._dynamo.reset()


def test_without_a_compiler_the_remedy_is_told(compiler, monkeypatch):
    task = noisy_task()
    monkeypatch.setattr(kernel_choices.shutil, "which", lambda name: None)
    _, events, followed = run(task, open_plan(task), compiler)
    assert not followed.kernels.compile
    assert "there is no C++ compiler" in decided(events).reason
    assert "install g++" in decided(events).reason
    # Nor does a run that goes on end for want of it.
    kept = KernelChoices(compile=True, compile_if_faster="decided")
    with ab.Session(task, open_plan(task, kernels=kept)) as session:
        next(session.steps())
        assert not session.plan.kernels.compile
        assert "not compiled any more" in session.started().notices[-1]


def test_what_compiled_passes_reach_has_to_fit_the_budget(compiler):
    task, compiler.seconds = noisy_task(), 0.1
    _, events, followed = run(task, open_plan(task, budget_bytes=1), compiler)
    assert not followed.kernels.compile
    assert decided(events).reason.endswith("of a budget of 1 B")


def test_on_a_cpu_with_a_budget_that_is_enforced_nothing_is_compiled(compiler, monkeypatch):
    # Its optimizers, if a test before has loaded them, are compiled before the budget counts.
    monkeypatch.delitem(sys.modules, "torchao.optim", raising=False)
    task = noisy_task()
    _, events, followed = run(task, open_plan(task, budget_bytes=1 << 32, enforced=True), compiler)
    assert not followed.kernels.compile
    assert compiler.num_compiled == 0
    assert "which is enforced" in decided(events).reason


def test_ranks_that_take_steps_of_their_own_compile_nothing(crew):
    knobs = {"exchange": ab.Exchange(every=2)}
    for compiled, _, reasons in crew(2, functools.partial(on_a_rank, knobs, (0.5, 0.5), None)):
        assert not compiled
        assert all("cannot run passes each by itself" in reason for reason in reasons)


def test_the_decision_outlives_a_leaner_plan_and_another_recompute(compiler):
    passes = []

    class Failing(Noisy):
        def forward(self, x):
            passes.append(len(x))
            if len(passes) == 3:  # of the first step: what passes of the trial note is put back
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().forward(x)

    task, compiler.seconds = noisy_task(model=Failing), 0.5
    plan = open_plan(task)
    leaner = plan.choice.model_copy(
        update={"micro_batch": 4, "recompute": Recompute(blocks=("first",))}
    )
    plan = plan.model_copy(update={"ladder": (leaner,)})
    _, events, followed = run(task, plan, compiler)
    (new,) = [event for event in events if isinstance(event, Replanned)]
    assert new.plan["kernels"]["compile"]
    assert (followed.choice, followed.kernels.compile) == (leaner, True)
    decided(events)  # once
    assert compiler.num_passes == 10 + 2 + 3 + 3  # of the trial, and all of the steps


@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_a_resumed_run_keeps_what_was_decided(compiler, tmp_path, seconds):
    task, compiler.seconds = noisy_task(), seconds
    plan = open_plan(task, device_name="here")
    with ab.Session(
        dataclasses.replace(task, loss=compiler.loss), plan, checkpoints=tmp_path
    ) as session:
        next(session.steps())
        session.save(wait=True)
    num_compiled, passes = compiler.num_compiled, compiler.num_passes
    compiler.seconds = 1.0  # would not be found to be faster now
    events = []
    for name, kept in (("here", True), ("elsewhere", False)):
        events.clear()
        plan = open_plan(task, device_name=name)
        task = dataclasses.replace(task, loss=compiler.loss)
        with ab.Session(task, plan, [events.append], checkpoints=tmp_path) as session:
            assert session.resume()
            next(session.steps())
            assert session.plan.kernels.compile == (kept and seconds < 1)
        assert ("before the run was resumed" in decided(events).reason) == kept
        assert (decided(events).compiled_seconds is None) == kept
        if kept and seconds > 1:
            assert (compiler.num_compiled, compiler.num_passes) == (num_compiled, passes)


def test_a_plan_tells_what_was_decided_and_is_read_back():
    plan = open_plan(noisy_task())
    assert ("kernels", "blocks compiled if a trial shows it is faster") in plan.explain()
    assert Plan.from_json(plan.to_json()) == plan
    for compiled, words in (
        (True, "compiled blocks, measured to be faster"),
        (False, "left uncompiled"),
    ):
        kernels = KernelChoices(compile=compiled, compile_if_faster="decided")
        assert words in dict(plan.running(kernels).explain())["kernels"]
    older = plan.to_json().replace(',\n    "compile_if_faster": "open"', "")
    assert Plan.from_json(older).kernels == KernelChoices()
    with pytest.raises(ab.InputError, match=r"leaves it to the run.*: make compile false"):
        plan.running(KernelChoices(compile=True, compile_if_faster="open"))


def test_a_step_in_a_loop_of_ones_own_refuses():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ab.InputError, match="does not know how many steps will follow"):
        ab.Step(model, optimizer, loss, compile="if-faster")
    with pytest.raises(ab.InputError, match="compile is 'yes': give True, False or 'if-faster'"):
        ab.Step(model, optimizer, loss, compile="yes")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("seconds", "failing", "compiled"),
    [((0.5, 0.8), None, True), ((0.5, 1.5), None, False), ((0.5, 0.5), 1, False)],
)
def test_ranks_decide_alike(crew, seconds, failing, compiled):
    found = crew(2, functools.partial(on_a_rank, {}, seconds, failing))
    assert [choice for choice, _, _ in found] == [compiled] * 2
    assert torch.equal(found[0][1], found[1][1])
    reason = found[0][2][0]  # told by rank 0
    if failing is not None:
        assert reason == "on rank 1 compiled passes failed with ZeroDivisionError: of rank 1"


def on_a_rank(knobs, seconds, failing, rank, size):
    """Whether blocks are compiled, a weight, and the reasons that were told."""
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(48, 4, generator=draw), torch.randn(48, 3, generator=draw))
    task = noisy_task(
        model=functools.partial(nn.Linear, 4, 3),
        train=data,
        global_batch=24,
        ghost_batch=None,
    )
    plan = open_plan(task, 6, parallel="replicate", shares=(1.0, 1.0), **knobs)
    wrong = ZeroDivisionError(f"of rank {rank}") if rank == failing else None
    with pytest.MonkeyPatch.context() as patch:
        compiler = Compiler(seconds[rank], wrong).installed(patch)
        state, events, followed = run(task, plan, compiler)
    reasons = [event.reason for event in events if isinstance(event, CompileDecided)]
    return followed.kernels.compile, state["weight"], reasons

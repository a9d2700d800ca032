"""The commands: options reach the task, plans make the round trip, runs leave four files."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.bad_input.conftest import Outcome
from tests.warm import Warm

import anybatch
from anybatch.cli import run
from anybatch.events import RunEnded, RunStarted, StepDone
from anybatch.plans import Plan
from anybatch.report import last_plan, read

FILES = {"plan.json", "events.jsonl", "checkpoints", "model.safetensors", "report.html"}

# A task whose function takes no global batch, and one of a learning rate that follows from it.
SCALED = """
def scaled(global_batch: int = 8, lr: float = 0.01):
    def optimizer(params): return torch.optim.SGD(params, lr=lr * global_batch)
    return ab.Task(**{**given(), "optimizer": optimizer, "global_batch": global_batch})
"""


def events(folder: Path) -> tuple[RunStarted, list[StepDone], RunEnded]:
    found = read(folder / "events.jsonl")
    assert isinstance(found[0], RunStarted)
    assert isinstance(found[-1], RunEnded)
    return found[0], [event for event in found if isinstance(event, StepDone)], found[-1]


@pytest.fixture
def trained(
    folder: Path, write_task: Callable[..., Path], command: Callable[..., Outcome]
) -> Callable[..., Path]:
    """Train `task.py` with these options; the run folder."""

    def call(*options: str, code: str = "", function: str = "") -> Path:
        write_task(code)
        number = len(list((folder / "runs").glob("*"))) + 1
        outcome = command("train", f"task.py{function}", *options)
        assert outcome.status == 0, outcome.err
        return folder / "runs" / f"task-{number}"

    return call


# -------------------------------------------------------------------------- options reach the task


def test_a_run_leaves_its_files(trained: Callable[..., Path]):
    run = trained()
    assert {path.name for path in run.iterdir()} == FILES
    started, steps, ended = events(run)
    assert started.total_steps == len(steps) == ended.steps == 5
    assert ended.finished
    assert Plan.from_json(json.dumps(started.plan)) == Plan.load(run / "plan.json")
    weights = load_file(run / "model.safetensors")
    assert weights.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert all(value.isfinite().all() for value in weights.values())


@pytest.mark.parametrize(("how", "ghost_batch"), [("as-written", 8), ("ghosts", 2)])
def test_batch_norm_normalises_over_what_norms_names(
    trained: Callable[..., Path], how: str, ghost_batch: int
):
    norm = "nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))"
    code = f"CHANGES = dict(model=lambda: {norm}, ghost_batch=2)\n"
    run = trained("--norms", how, "--backend", "gloo", code=code)
    assert Plan.load(run / "plan.json").task.ghost_batch == ghost_batch


def test_a_run_tells_by_which_command_it_was_started_and_where(
    trained: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    line = ["train", "task.py", "-s", "epochs=1"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/anybatch", *line])
    folder = trained(*line[2:])
    started, _, _ = events(folder)
    assert started.command == "anybatch train task.py -s epochs=1"
    assert started.host == socket.gethostname()
    assert started.versions.keys() == {"anybatch", "torch", "Python"}
    assert started.command in (folder / "report.html").read_text()


def test_s_options_reach_the_function(trained: Callable[..., Path]):
    _, steps, _ = events(trained("-s", "epochs=3", "-s", "global-batch=20"))
    assert [step.samples for step in steps] == [20] * 6


def test_the_global_batch_is_passed_where_the_function_takes_it(trained: Callable[..., Path]):
    run = trained("--global-batch", "20", code=SCALED, function=":scaled")
    _, steps, _ = events(run)
    assert [step.samples for step in steps] == [20, 20]
    assert steps[0].learning_rate == pytest.approx(0.2)


@pytest.mark.parametrize("argument", ["", "global_batch: int = 8"])
def test_the_global_batch_is_set_where_the_function_does_not_use_it(
    trained: Callable[..., Path], argument: str
):
    code = f"def plain({argument}): return ab.Task(**given())\n"
    _, steps, _ = events(trained("--global-batch", "20", code=code, function=":plain"))
    assert [step.samples for step in steps] == [20, 20]


def test_the_global_batch_wins_over_the_same_option(trained: Callable[..., Path]):
    _, steps, _ = events(trained("--global-batch", "20", "-s", "global-batch=10"))
    assert [step.samples for step in steps] == [20, 20]


def test_a_ramp_passes_its_larger_end_to_the_function(trained: Callable[..., Path]):
    run = trained("--global-batch", "5:20:0.5:linear", code=SCALED, function=":scaled")
    started, steps, _ = events(run)
    assert started.total_samples == 40
    assert [step.samples for step in steps] == [5, 9, 16, 10]  # round(5 + 15 * done / 0.5)
    assert [step.learning_rate for step in steps] == pytest.approx(
        [0.2 * size / 20 for size in (5, 9, 16, 20)]
    )
    assert last_plan(run).task.batch_rule == "5:20:0.5:linear"


def test_a_batch_in_tokens_passes_a_mean_number_of_samples(trained: Callable[..., Path]):
    code = SCALED.replace('"global_batch"', '"lengths": [2, 4] * 20, "global_batch"')
    run = trained("--global-batch", "30tokens", code=code, function=":scaled")
    _, steps, _ = events(run)
    assert sum(step.samples for step in steps) == 40
    assert all(8 <= step.samples <= 15 for step in steps[:-1])
    assert steps[0].learning_rate == pytest.approx(0.01 * 10)


def test_micro_batch_precision_and_recompute_reach_the_plan(trained: Callable[..., Path]):
    run = trained("--micro-batch", "3", "--precision", "bf16", "--recompute", "0,1")
    choice = Plan.load(run / "plan.json").choice
    assert (choice.micro_batch, choice.precision) == (3, "bf16")
    assert choice.recompute.blocks == ("0", "1")
    _, steps, _ = events(run)
    assert {step.micro_batch for step in steps} == {3}


def test_a_reproducible_run_has_the_same_bits_whatever_is_recomputed(trained: Callable[..., Path]):
    one = trained("--reproducible", "--grain", "3")
    other = trained("--reproducible", "--grain", "3", "--recompute", "0")
    assert Plan.load(one / "plan.json").task.grain == 3
    weights = [(run / "model.safetensors").read_bytes() for run in (one, other)]
    assert weights[0] == weights[1]


def test_every_cut_trains_to_the_same_weights(trained: Callable[..., Path]):
    whole = load_file(trained() / "model.safetensors")
    cut = load_file(trained("--micro-batch", "3", "--recompute", "0") / "model.safetensors")
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------------------------ run folders


def test_runs_are_numbered(trained: Callable[..., Path], folder: Path):
    assert [trained().name for _ in range(3)] == ["task-1", "task-2", "task-3"]
    assert {path.name for path in (folder / "runs").iterdir()} == {"task-1", "task-2", "task-3"}


def test_a_task_with_a_name_gives_it_to_its_runs(
    folder: Path, write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    write_task("CHANGES = dict(name='mine')\n")
    assert command("train", "task.py").status == 0
    assert (folder / "runs" / "mine-1" / "report.html").is_file()


def test_a_second_run_into_the_same_folder_replaces_the_first(
    folder: Path, write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    write_task()
    assert command("train", "task.py", "--out", "here").status == 0
    assert command("train", "task.py", "--out", "here", "-s", "epochs=2").status == 0
    assert events(folder / "here")[2].steps == 10


# ----------------------------------------------------------------------------------- plan, report


def test_a_plan_makes_the_round_trip_through_a_file(
    folder: Path, write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    write_task()
    assert command("plan", "task.py", "--micro-batch", "2", "--out", "p.json").status == 0
    plan = Plan.load(folder / "p.json")
    assert plan.choice.micro_batch == 2
    assert command("train", "task.py", "--plan", "p.json").status == 0
    assert Plan.load(folder / "runs" / "task-1" / "plan.json") == plan
    _, steps, _ = events(folder / "runs" / "task-1")
    assert {step.micro_batch for step in steps} == {2}


def test_a_plan_edited_by_hand_is_followed(
    folder: Path, write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    write_task()
    assert command("plan", "task.py", "--out", "p.json").status == 0
    plan = json.loads((folder / "p.json").read_text())
    plan["choice"]["micro_batch"] = 5
    (folder / "p.json").write_text(json.dumps(plan))
    assert command("train", "task.py", "--plan", "p.json").status == 0
    assert {s.micro_batch for s in events(folder / "runs" / "task-1")[1]} == {5}


def test_planning_leaves_nothing_behind(
    folder: Path, write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    write_task()
    outcome = command("plan", "task.py")
    assert outcome.status == 0
    assert "micro-batch" in outcome.out or "in one piece" in outcome.out
    assert [path.name for path in folder.iterdir()] == ["task.py"]


def test_why_shows_every_plan_that_was_rejected(
    write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    write_task()
    short = command("plan", "task.py", "--global-batch", "64")
    long = command("plan", "task.py", "--global-batch", "64", "--why")
    assert "`anybatch plan --why`" in short.out
    assert "`anybatch plan --why`" not in long.out
    told, listed = (outcome.out.partition("Rejected")[2] for outcome in (short, long))
    assert len(listed.splitlines()) > 2 + len(told.splitlines())


def test_a_machine_that_is_not_here(
    folder: Path, write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    write_task()
    outcome = command("plan", "task.py", "--device", "24GiB", "--memory", "8GiB", "--out", "p.json")
    assert outcome.status == 0
    plan = Plan.load(folder / "p.json")
    assert plan.device == "cuda:0"
    assert plan.budget_bytes == 8 << 30


def test_the_report_is_written_anew(trained: Callable[..., Path], command: Callable[..., Outcome]):
    run = trained()
    before = (run / "report.html").read_text()
    (run / "report.html").unlink()
    outcome = command("report", str(run))
    assert outcome.status == 0
    assert outcome.out.strip() == str(run / "report.html")
    assert (run / "report.html").read_text() == before


# ----------------------------------------------------------------------------------------- verify


def test_verify_says_exact_with_0_and_not_exact_with_1(
    write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    write_task()
    good = command("verify", "task.py")
    assert good.status == 0
    assert "Exact" in good.out
    assert "float64" in good.out
    write_task(
        "def loss(model, batch): return F.mse_loss(model(batch[0]), batch[1], reduction='sum')\n"
    )
    bad = command("verify", "task.py", "--samples", "23")
    assert bad.status == 1
    assert "23 samples" in bad.out
    assert "Not exact" in bad.out
    assert "Return anybatch.Loss(sum, weight=number of samples)" in " ".join(bad.out.split())


def test_verify_calls_a_task_with_dropout_exact_apart_from_what_is_drawn(
    write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    write_task(
        "def loss(model, batch): return F.mse_loss(F.dropout(model(batch[0]), 0.5), batch[1])\n"
    )
    done = command("verify", "task.py", "--samples", "24")
    assert done.status == 0
    assert "Exact, apart from what the model draws" in done.out
    assert "held still" in done.out


# --------------------------------------------------------------------------------------- the rest


def test_recipes_are_listed_with_their_options(command: Callable[..., Outcome]):
    assert "digits" in command("recipes").out
    listed = command("recipes", "digits").out
    for option in ("global_batch", "epochs", "ghost_batch"):
        assert option in listed


def test_the_options_of_a_file_are_listed(
    write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    write_task()
    listed = command("recipes", "task.py").out
    assert "global_batch" in listed
    assert "epochs" in listed


def test_version(command: Callable[..., Outcome]):
    assert command("--version").out.strip() == anybatch.__version__


def test_no_command_shows_the_help(command: Callable[..., Outcome]):
    outcome = command()
    for name in ("train", "plan", "memory", "verify", "report", "recipes"):
        assert name in outcome.out + outcome.err
    assert outcome.status in (0, 2)


def test_python_m_anybatch():
    done = subprocess.run(
        [sys.executable, "-m", "anybatch", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == anybatch.__version__


def test_stopped_by_hand_ends_with_130_and_keeps_the_record(
    folder: Path, write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    write_task("CHANGES = dict(schedule=lambda p: (_ for _ in ()).throw(KeyboardInterrupt))\n")
    outcome = command("train", "task.py")
    assert outcome.status == 130
    assert outcome.err == "anybatch: stopped by hand; what was not saved before is lost.\n"
    ended = events(folder / "runs" / "task-1")[2]
    assert not ended.finished
    assert ended.reason == "KeyboardInterrupt"


def test_a_fault_of_anybatch_keeps_its_traceback(
    write_task: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    write_task()

    def broken(*_arguments: object) -> None:
        raise ZeroDivisionError("a fault of anybatch")

    monkeypatch.setattr("anybatch.runs.planning.subject_of", broken)
    with pytest.raises(ZeroDivisionError, match="a fault of anybatch"):
        run(["plan", "task.py"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("global_batch", "memory"),
    [pytest.param("1", "12MiB", marks=pytest.mark.nightly), ("1797", "12MiB"), ("100000", "12MiB")],
)
def test_digits_with_any_batch_runs_or_names_the_memory_it_needs(
    global_batch: str, memory: str, folder: Path, warm: Warm
):
    def train(budget: str) -> subprocess.CompletedProcess[str]:
        line = ["train", "digits", "--global-batch", global_batch, "--memory", budget]
        settings = ["-s", "epochs=1", "-s", "width=4"]
        return warm(["anybatch", *line, *settings, "--out", "run"], folder)

    done = train(memory)
    if done.returncode == 3:
        named = done.stderr.partition("(--memory ")[2].partition(")")[0]
        assert named, done.stderr
        assert not (folder / "run").exists()
        done = train(named)
    assert done.returncode == 0, done.stderr
    _, steps, ended = events(folder / "run")
    assert ended.finished
    assert sum(step.samples for step in steps) == 1437
    assert len(steps) == (1437 if global_batch == "1" else 1)


# ------------------------------------------------------------------------------- memory, devices


def test_memory_tells_where_the_bytes_go(
    folder: Path, write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    write_task()
    outcome = command("memory", "task.py", "--json", "m.json", "--html", "m.html")
    assert outcome.status == 0
    for title in ("By layer", "When most is in use, by kind", "Over one step"):
        assert title in outcome.out
    found = json.loads((folder / "m.json").read_text())
    assert found.keys() == {"plan", "ledger", "knobs"}
    assert sum(found["ledger"]["by_kind"].values()) == found["ledger"]["totals"]["total"]
    page = (folder / "m.html").read_text()
    assert page.count("<svg") == 2  # the step and its key
    assert len(page) < 400_000


@pytest.mark.rehearsed
def test_memory_is_that_of_the_plan(
    write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    write_task()
    planned = command("plan", "task.py", "--memory", "64MiB", "--json")
    found = json.loads(command("memory", "task.py", "--memory", "64MiB", "--json").out)
    assert found["plan"]["prediction"]["rehearsed"]
    assert found["plan"]["choice"] == json.loads(planned.out)["choice"]


@pytest.mark.parametrize("last", [("--json",), ("--json", "-"), ("--json", "--compile")])
def test_memory_as_json_prints_that_and_nothing_else(
    write_task: Callable[..., Path], command: Callable[..., Outcome], last: tuple[str, ...]
):
    write_task()
    outcome = command("memory", "task.py", *last)
    assert outcome.status == 0, outcome.err
    found = json.loads(outcome.out)
    assert found.keys() == {"plan", "ledger", "knobs"}
    assert found["plan"]["kernels"]["compile"] == ("--compile" in last)
    sizes = list(bytes_in(found["ledger"])) + [knob["peak_bytes"] for knob in found["knobs"]]
    assert len(sizes) > 20
    assert {type(size) for size in sizes} == {int}


def bytes_in(data: Any) -> Iterator[Any]:
    """Every number in `data` that is one of bytes."""
    if isinstance(data, list):
        for item in data:
            yield from bytes_in(item)
    elif isinstance(data, dict):
        for name, item in data.items():
            if name in ("totals", "by_kind"):
                yield from item.values()
            elif name.endswith("_bytes"):
                yield item
            else:
                yield from bytes_in(item)


def test_memory_as_json_where_nothing_fits_tells_so_beside_it(
    write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    write_task()
    outcome = command("memory", "task.py", "--memory", "512KiB", "--json")
    assert outcome.status == 0
    assert json.loads(outcome.out)["plan"]["budget_bytes"] == 512 << 10
    assert "No plan fits the budget" in outcome.err


def test_a_task_is_not_taken_for_the_file_of_json_without_a_word(command: Callable[..., Outcome]):
    outcome = command("memory", "--json", "task.py")
    assert outcome.status == 2
    assert "TASK" in outcome.err


def test_memory_is_told_all_the_more_where_nothing_fits(
    write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    write_task()
    assert command("plan", "task.py", "--memory", "512KiB").status == 3
    outcome = command("memory", "task.py", "--memory", "512KiB")
    assert outcome.status == 0
    assert "By layer" in outcome.out
    assert "No plan fits the budget" in outcome.out


def test_a_plan_as_json_is_a_plan(write_task: Callable[..., Path], command: Callable[..., Outcome]):
    write_task()
    outcome = command("plan", "task.py", "--json")
    assert Plan.from_json(outcome.out).choice.micro_batch >= 1


def test_a_plot_of_the_frontier(
    folder: Path, write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    write_task()
    outcome = command("plan", "task.py", "--plot", "f.html")
    assert outcome.status == 0
    assert "f.html" in outcome.out
    assert "frontier" in (folder / "f.html").read_text()


def test_devices_by_name_and_number(
    folder: Path, write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    write_task()
    words = ("--device", "H100 80GB", "--devices", "2", "--out", "p.json")
    assert command("plan", "task.py", *words).status == 0
    plan = Plan.load(folder / "p.json")
    assert plan.prediction
    assert plan.num_ranks == 2
    assert "H100" in plan.device_name


@pytest.mark.parametrize(
    ("raised", "status"),
    [("ab.errors.Stopped('asked to stop')", 75), ("KeyboardInterrupt", 130)],
    ids=["signal", "Ctrl-C"],
)
def test_a_rank_that_is_stopped_leaves_it_to_its_starter_to_say_so(
    raised: str,
    status: int,
    write_task: Callable[..., Path],
    command: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
):
    write_task(f"import anybatch.errors\ndef stopped(): raise {raised}\n")
    outcome = command("train", "task.py:stopped")
    assert (outcome.status, outcome.err.count("anybatch: ")) == (status, 1)
    monkeypatch.setenv("ANYBATCH_LAUNCHED", "1")
    outcome = command("train", "task.py:stopped")
    assert (outcome.status, outcome.err) == (status, "")


def test_the_command_gives_rows_as_json(
    folder: Path, write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    write_task("")
    outcome = command("scale", "task.py", "--ranks", "1,2", "--device", "24GiB", "--json")
    assert outcome.status == 0, outcome.err
    rows = json.loads(outcome.out)
    assert [row["ranks"] for row in rows] == [1, 2]
    assert all(row["step_seconds"] > 0 for row in rows)
    assert command("scale", "task.py", "--ranks", "1,x").status == 2


@pytest.mark.nightly
def test_standard_error_may_be_closed():
    command = f"exec {sys.executable} -m anybatch plan digits --device 24GiB 2>&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("Plan\n")

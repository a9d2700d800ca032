"""A plan is a file that people edit: each bad edit is told with its place, before anything is run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.bad_input.conftest import Outcome, tree
from tests.bad_input.test_commands import NORM, check_told

GHOSTS = NORM + "CHANGES = dict(global_batch=16, ghost_batch=4)\n"


class Edit(NamedTuple):
    """A change of a good plan, and words that the sentence must have."""

    name: str
    change: Callable[[dict[str, Any]], object]
    words: tuple[str, ...]


EDITS = [
    Edit(
        "version", lambda p: p.update(version=7), ("version 7", "reads version 1", "plan the task")
    ),
    Edit("no-version", lambda p: p.pop("version"), ("version None",)),
    Edit("extra-field", lambda p: p.update(colour=1), ("colour is not a field of a plan",)),
    Edit(
        "misspelt",
        lambda p: p["choice"].update(microbatch=2),
        ("choice.microbatch is not a field",),
    ),
    Edit("missing", lambda p: p.pop("choice"), ("choice is missing",)),
    Edit("missing-inside", lambda p: p["task"].pop("parameters"), ("task.parameters is missing",)),
    Edit(
        "type",
        lambda p: p["choice"].update(micro_batch="4"),
        ("choice.micro_batch is '4'", "integer"),
    ),
    Edit("fraction", lambda p: p["choice"].update(micro_batch=4.5), ("choice.micro_batch is 4.5",)),
    Edit("zero", lambda p: p["choice"].update(micro_batch=0), ("choice.micro_batch is 0",)),
    Edit(
        "evaluation", lambda p: p["choice"].update(evaluation_batch=-1), ("evaluation_batch is -1",)
    ),
    Edit(
        "precision", lambda p: p["choice"].update(precision="fp7"), ("choice.precision is 'fp7'",)
    ),
    Edit("device", lambda p: p.update(device="gpu"), ("device is 'gpu'",)),
    Edit(
        "long",
        lambda p: p.update(device="x" * 90_000),
        ("device is 'xxx", "characters left out", "plan the task anew"),
    ),
    Edit(
        "many-faults",
        lambda p: p["task"].update({f"field{i}": 1 for i in range(5000)}),
        ("task.field0 is not a field of a plan", "4,992 more"),
    ),
    Edit("budget", lambda p: p.update(budget_bytes=0), ("budget_bytes is 0",)),
    Edit(
        "link",
        lambda p: p.update(link={"bytes_per_second": 0.0, "hop_seconds": -1.0}),
        ("link.bytes_per_second is 0.0", "link.hop_seconds is -1.0"),
    ),
    Edit(
        "no-number",
        lambda p: (
            p.update(shares=[math.inf]),
            p["prediction"].update(step_seconds=math.inf, step_parts={"update": math.nan}),
        ),
        ("shares.0 is inf", "prediction.step_seconds is inf", "step_parts.update is nan", "finite"),
    ),
    Edit("flag", lambda p: p.update(enforced="yes"), ("enforced is 'yes'",)),
    Edit(
        "recompute", lambda p: p["choice"].update(recompute=["0"]), ("choice.recompute is ['0']",)
    ),
    Edit(
        "above-the-global-batch",
        lambda p: p["choice"].update(micro_batch=32),
        ("choice.micro_batch is 32", "global batch of 16"),
    ),
    Edit(
        "cuts-a-ghost",
        lambda p: p["choice"].update(micro_batch=6),
        ("choice.micro_batch is 6", "ghost batch", "multiple of 4"),
    ),
    Edit(
        "rung-cuts-a-ghost",
        lambda p: p["ladder"][0].update(micro_batch=6),
        ("ladder.0.micro_batch is 6", "multiple of 4"),
    ),
    Edit(
        "two-faults",
        lambda p: (p.update(device="gpu"), p["choice"].update(micro_batch=0)),
        ("device is 'gpu'", "choice.micro_batch is 0"),
    ),
    Edit(
        "other-global-batch",
        lambda p: p["task"].update(global_batch=20),
        ("another task", "global_batch is 20 in the plan and 16 in the task"),
    ),
    Edit(
        "other-model",
        lambda p: p["task"].update(parameters=9, trainable_parameters=9),
        ("parameters is 9 in the plan", "Plan this task anew"),
    ),
    Edit(
        "recompute-names-nothing",
        lambda p: p["choice"].update(recompute={"blocks": ["layer7"]}),
        ("'layer7'", "no such module"),
    ),
    Edit("kernels", lambda p: p.update(kernels=["compile"]), ("kernels is ['compile']",)),
    Edit("kernel", lambda p: p["kernels"].update(compile=1), ("kernels.compile is 1",)),
    Edit(
        "no-such-kernel",
        lambda p: p["kernels"].update(fused=True),
        ("kernels.fused is not a field of a plan",),
    ),
    Edit(
        "tuned-on-a-cpu",
        lambda p: p["kernels"].update(autotune=True),
        ("kernels.autotune is true", "device is 'cpu'", "make it false"),
    ),
    Edit(
        "digits",
        lambda p: p.update(budget_bytes=10**400 - 1),
        ("the number 99999", "left out", "has more than 64 bits", "plan the task anew"),
    ),
    Edit("share", lambda p: p.update(shares=[1e308]), ("shares is [1e+308]", "below 1e+100")),
    Edit("absent-device", lambda p: p.update(device="cuda:99"), ("'cuda:99'", "another device")),
]


@pytest.fixture
def plan_file(
    folder: Path, write_task: Callable[..., Path], command: Callable[..., Outcome]
) -> Path:
    write_task(GHOSTS)
    assert command("plan", "task.py", "--out", "plan.json").status == 0
    return folder / "plan.json"


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)
def test_a_bad_edit_is_told_with_its_place(
    edit: Edit, plan_file: Path, folder: Path, command: Callable[..., Outcome]
):
    plan = json.loads(plan_file.read_text())
    edit.change(plan)
    plan_file.write_text(json.dumps(plan))
    before = tree(folder)

    outcome = command("train", "task.py", "--plan", "plan.json")

    assert outcome.status == 2, outcome.err
    check_told(outcome.err, edit.words)
    assert tree(folder) == before


def test_the_plan_without_an_edit_runs(plan_file: Path, command: Callable[..., Outcome]):
    assert command("train", "task.py", "--plan", str(plan_file)).status == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{\n  'version': 1}", ("plan.json is not JSON", "line 2, column 3")),
        (b"", ("plan.json is not JSON", "line 1")),
        (b"[1, 2]", ("holds list", "an object")),
        (b"\xff\xfe\x00", ("plan.json cannot be read", "not a text file")),
    ],
    ids=["quotes", "empty", "list", "binary"],
)
def test_a_file_that_is_no_plan(
    content: bytes, words: tuple[str, ...], plan_file: Path, command: Callable[..., Outcome]
):
    plan_file.write_bytes(content)
    outcome = command("train", "task.py", "--plan", "plan.json")
    assert outcome.status == 2
    check_told(outcome.err, words)


@pytest.mark.parametrize(
    ("file", "words"),
    [("missing.json", ("missing.json", "No such file")), (".", ("Is a directory",))],
)
def test_a_plan_that_is_not_there(
    file: str,
    words: tuple[str, ...],
    folder: Path,
    write_task: Callable[..., Path],
    command: Callable[..., Outcome],
):
    write_task()
    before = tree(folder)
    outcome = command("train", "task.py", "--plan", file)
    assert outcome.status == 2
    check_told(outcome.err, (*words, "'anybatch plan --out'"))
    assert tree(folder) == before


@pytest.mark.parametrize(
    "option",
    ["--memory 3GiB", "--precision bf16", "--micro-batch 2", "--recompute none"],
)
def test_a_plan_beside_an_option_that_it_settles(
    option: str, plan_file: Path, command: Callable[..., Outcome]
):
    outcome = command("train", "task.py", "--plan", "plan.json", *option.split())
    assert outcome.status == 2
    check_told(outcome.err, ("--plan", option, "leave one of them out"))


def test_a_plan_for_another_task_leaves_the_run_of_before_as_it_is(
    plan_file: Path, folder: Path, write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    assert command("train", "task.py", "--plan", "plan.json", "--out", "run").status == 0
    write_task(GHOSTS + "CHANGES['global_batch'] = 20\n")
    before = tree(folder)
    outcome = command("train", "task.py", "--plan", "plan.json", "--out", "run")
    assert outcome.status == 2
    check_told(outcome.err, ("another task", "16 in the plan and 20 in the task"))
    assert tree(folder) == before

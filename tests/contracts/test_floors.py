"""Imports go down only: the contracts of pyproject.toml are kept, and would notice if not."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = ROOT / "pyproject.toml"
CONTRACTS = {
    contract["id"]: contract["name"]
    for contract in tomllib.loads(PYPROJECT.read_text("utf-8"))["tool"]["importlinter"]["contracts"]
}


@dataclass(frozen=True)
class Verdict:
    kept: set[str]
    broken: set[str]
    output: str


def judge(source: Path) -> Verdict:
    """Check the contracts on the package `anybatch` in the folder `source`."""
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    process = subprocess.run(
        [sys.executable, "-c", command, "--no-logo", "--no-cache", "--config", str(PYPROJECT)],
        cwd=source,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    output = process.stdout + process.stderr
    lines = [line.strip() for line in output.splitlines()]
    verdict = Verdict(
        kept={key for key in CONTRACTS if is_said_of(key, "KEPT", lines)},
        broken={key for key in CONTRACTS if is_said_of(key, "BROKEN", lines)},
        output=output,
    )
    assert verdict.kept | verdict.broken == CONTRACTS.keys(), output
    assert (process.returncode == 0) == (not verdict.broken), output
    return verdict


def is_said_of(contract: str, word: str, lines: list[str]) -> bool:
    return any(line.startswith(f"{CONTRACTS[contract]} {word}") for line in lines)


def write_package(folder: Path, modules: dict[str, str]) -> None:
    """Write a package `anybatch` whose modules contain one line of code each."""
    for name, code in {"__init__": "", **modules}.items():
        path = folder.joinpath("anybatch", *name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code + "\n", "utf-8")
        (path.parent / "__init__.py").touch()


def test_the_package_keeps_its_floors():
    verdict = judge(ROOT / "src")
    names = [CONTRACTS[key] for key in sorted(verdict.broken)]
    assert not names, f"Broken: {', '.join(names)}.\n\n{verdict.output}"


def test_imports_that_go_down_are_kept(tmp_path: Path):
    write_package(
        tmp_path,
        {
            "__init__": "def train(): from anybatch.runs.train import train as it; return it()",
            "errors": "",
            "units": "import anybatch.errors",
            "machine": "import anybatch.units",
            "plans": "import anybatch.machine",
            "task": "import anybatch.errors",
            "compute.loss": "import anybatch.task",
            "estimate.memory": "import anybatch.compute.loss",
            "parallel.shard": "import anybatch.compute.loss",
            "planner.choose": "import anybatch.estimate.memory, anybatch.plans",
            "engine.step": "import anybatch.parallel.shard, anybatch.plans",
            "runs.session": "import anybatch.planner.choose, anybatch.engine.step",
            "recipes.digits": "import anybatch; from anybatch.task import Task",
            "runs.train": "import anybatch.runs.session, anybatch.recipes.digits",
            "cli.main": "import anybatch, anybatch.runs.train",
        },
    )
    verdict = judge(tmp_path)
    assert not verdict.broken, verdict.output


@pytest.mark.parametrize(
    ("importer", "imported", "contract"),
    [
        ("units", "plans.plan", "floors"),
        ("plans.plan", "engine.step", "floors"),
        ("compute.loss", "engine.step", "floors"),
        ("planner.choose", "engine.step", "floors"),
        ("engine.step", "planner.choose", "floors"),
        ("estimate.memory", "parallel.shard", "floors"),
        ("parallel.shard", "estimate.memory", "floors"),
        ("estimate.memory", "planner.choose", "floors"),
        ("planner.choose", "parallel.shard", "planner-parallel"),
        ("engine.step", "estimate.memory", "estimate-engine"),
        ("step", "runs.train", "floors"),
        ("runs.train", "cli.main", "floors"),
        ("task", "__init__", "front"),
        ("engine.step", "__init__", "front"),
        ("recipes.digits", "runs.session", "recipes"),
        ("recipes.digits", "engine.step", "recipes"),
    ],
)
def test_an_import_against_the_floors_is_noticed(
    tmp_path: Path, importer: str, imported: str, contract: str
):
    target = "anybatch" if imported == "__init__" else f"anybatch.{imported}"
    write_package(tmp_path, {imported: "", importer: f"import {target}"})
    verdict = judge(tmp_path)
    assert contract in verdict.broken, verdict.output


def test_a_module_without_a_floor_is_noticed(tmp_path: Path):
    write_package(tmp_path, {"errors": "", "helpers": ""})
    verdict = judge(tmp_path)
    assert verdict.broken == {"floors"}, verdict.output
    assert "anybatch.helpers" in verdict.output

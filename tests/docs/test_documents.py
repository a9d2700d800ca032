"""What the documents say is run: their commands, their code, the examples; and links are followed.

Each case has processes of its own in a folder of its own, so they run side by side under `pytest -n`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer.main
from tests.docs.reading import (
    ROOT,
    blocks,
    command_blocks,
    commands_of,
    documents,
    examples,
    scripts,
    text_of,
)

from anybatch.cli import _app

SECONDS = 300  # far more than any of them needs, so that a hang fails and a slow machine does not

COMMANDS = (
    "train",
    "plan",
    "scale",
    "memory",
    "submit",
    "verify",
    "evaluate",
    "export",
    "report",
    "recipes",
    "doctor",
)

WITH_TESTS_OF_THEIR_OWN = {
    "anybatch doctor --json doctor.json",  # faults/test_doctor.py, unit/cli/test_doctor.py
    "examples/nano_anybatch.py",  # multiprocess/test_against_nano.py
    "examples/own_loop_ddp.py",  # multiprocess/test_step.py
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder with the examples in it, as a reader would have them."""
    shutil.copytree(
        ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__")
    )
    return tmp_path


@pytest.fixture
def run(warm, folder: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command in `folder`, with the environment of a terminal of 80 columns."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return partial(
        warm, cwd=folder, env={**os.environ, "PATH": path, "COLUMNS": "80"}, timeout=SECONDS
    )


def told(done: subprocess.CompletedProcess[str]) -> str:
    return f"{done.args} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def marked_blocks() -> list[Any]:
    """The blocks of commands; those without a command of the README run at night only."""
    first = {one for block in blocks("README.md") for one in commands_of(block)}
    found = []
    for block in command_blocks():
        mark = pytest.mark.slow if first & set(block) else pytest.mark.nightly
        found.append(pytest.param(block, id=" ; ".join(map(str, block)), marks=mark))
    return found


@pytest.mark.parametrize("commands", marked_blocks())
def test_commands_end_as_the_document_says(commands, run):
    for command in commands:
        if str(command) in WITH_TESTS_OF_THEIR_OWN:
            continue
        done = run(command.words)
        assert done.returncode == command.status, told(done)


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", [code for _, code in scripts()], ids=[document for document, _ in scripts()]
)
def test_code_of_a_document_runs_from_top_to_bottom(code, folder, run):
    (folder / "script.py").write_text(code, encoding="utf-8")
    done = run((sys.executable, "script.py"))
    assert done.returncode == 0, told(done)


def other_examples() -> list[str]:
    """The examples that neither a command of a document runs nor another test."""
    commands = [one.words for block in command_blocks() for one in block]
    run_elsewhere = {words[1] for words in commands if words[0] == "python"}
    run_elsewhere |= WITH_TESTS_OF_THEIR_OWN
    return [example for example in examples() if example not in run_elsewhere]


@pytest.mark.nightly
@pytest.mark.parametrize("example", other_examples())
def test_examples_run(example, run):
    done = run((sys.executable, example))
    assert done.returncode == 0, told(done)
    assert done.stdout


@pytest.mark.parametrize("document", documents())
def test_links_lead_somewhere(document):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(document)):
        path, _, heading = target.partition("#")
        if path.startswith(("http://", "https://", "mailto:")):
            continue
        file = (ROOT / document).parent / path if path else ROOT / document
        if not file.exists() or (heading and heading not in headings(file)):
            broken.append(target)
    assert not broken


def headings(file: Path) -> set[str]:
    """The anchors of a document's headings."""
    titles = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", documents())
def test_files_that_are_named_exist(document):
    named = re.findall(r"`((?:src|tests|benchmarks|examples|docs)/[\w/.-]*)`", text_of(document))
    if document.startswith("docs/floors/"):
        floor = ROOT / "src/anybatch" / Path(document).stem
        first_cells = re.findall(r"^\| ([^|]+) \|", text_of(document), re.MULTILINE)
        files = [name for cell in first_cells for name in re.findall(r"`(\w+\.py)`", cell)]
        named += [str((floor / name).relative_to(ROOT)) for name in files]
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("document", documents())
def test_make_targets_that_are_named_exist(document):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    text = text_of(document)
    named = re.findall(r"`make ([a-z-]+)[^`]*`", text)
    named += re.findall(r"^(?:    |\$ )make ([a-z-]+)", text, re.MULTILINE)
    assert set(named) <= targets


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_documented(command):
    installed = Path(sys.executable).with_name("anybatch")
    done = subprocess.run(
        [installed, command, "--help"], capture_output=True, text=True, timeout=SECONDS
    )
    options = set(re.findall(r"--[a-z][a-z-]+", done.stdout))
    assert options
    described = text_of("docs/commands.md")
    assert not {option for option in options if f"`{option}" not in described}
    assert f"\n| `anybatch {command}" in described


@pytest.mark.parametrize("page", ["docs/commands.md", "docs/zh/commands.md"])
def test_shared_options_name_the_commands_that_take_them(page):
    """A command that describes an option in its own section may be left out."""
    shared, *sections = re.split(r"^## anybatch (?=[a-z])", text_of(page), flags=re.MULTILINE)
    tables = {section.split(None, 1)[0]: section for section in sections}
    options_of = {
        name: {word for one in command.params for word in (*one.opts, *one.secondary_opts)}
        for name, command in typer.main.get_command(_app).commands.items()
    }
    rows = re.findall(r"^\| `(--?[a-z-]+)[^|]* \|.* \| ([a-z, 、]+) \|$", shared, re.MULTILINE)
    assert len(rows) > 10
    wrong = []
    for option, commands in rows:
        named = set(re.split(", |、", commands))
        taking = {command for command, names in options_of.items() if option in names}
        elsewhere = {command for command in taking if f"`{option}" in tables[command]}
        if not taking - elsewhere <= named <= taking:
            wrong.append((option, named, taking))
    assert not wrong

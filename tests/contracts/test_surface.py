"""The public surface: complete, lazily loaded, quick to import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import anybatch

INIT = Path(anybatch.__file__)


def in_a_fresh_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", [*anybatch.__all__, "__version__"])
def test_every_public_name_is_there(name: str):
    assert getattr(anybatch, name) is not None


def test_the_lists_of_public_names_agree():
    """What type checkers see, what is loaded lazily, what `*` imports, and what `dir` shows."""
    tree = ast.parse(INIT.read_text("utf-8"))
    typed = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("anybatch.")
        for alias in node.names
        if alias.asname
    }
    assert typed == set(anybatch.__all__)
    assert set(anybatch._WHERE) == set(anybatch.__all__)
    assert anybatch.__all__ == sorted(anybatch.__all__)
    assert set(anybatch.__all__) <= set(dir(anybatch))


def test_typed_imports_name_the_homes_that_are_loaded():
    tree = ast.parse(INIT.read_text("utf-8"))
    homes = {
        alias.asname: (node.module or "").removeprefix("anybatch.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("anybatch.")
        for alias in node.names
        if alias.asname
    }
    assert homes == anybatch._WHERE


@pytest.mark.parametrize("name", sorted(anybatch.__all__))
def test_every_public_name_has_a_docstring(name: str):
    assert (getattr(anybatch, name).__doc__ or "").strip()


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'anybatch' has no attribute 'trian'"):
        anybatch.trian  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.slow
def test_star_imports_everything():
    names = in_a_fresh_process("from anybatch import *; print(*sorted(dir()))").split()
    assert set(anybatch.__all__) <= set(names)


HEAVY = ["torch", "numpy", "pydantic", "rich", "jinja2", "sklearn"]


def test_importing_loads_nothing_heavy():
    code = f"import sys, anybatch; print(*[name for name in {HEAVY} if name in sys.modules])"
    assert in_a_fresh_process(code) == ""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], ["recipes"]])
def test_help_and_lists_do_not_load_torch(arguments: list[str]):
    code = (
        "import sys\nfrom anybatch.cli import run\n"
        f"assert run({arguments}) == 0\nassert 'torch' not in sys.modules\nprint('done')"
    )
    assert in_a_fresh_process(code).splitlines()[-1] == "done"


def test_importing_takes_a_moment():
    """Of the processor, which passes no faster when the machine is busy."""
    code = (
        "import time\nbegun = time.process_time()\nimport anybatch\n"
        "print(time.process_time() - begun)"
    )
    assert min(float(in_a_fresh_process(code)) for _ in range(3)) < 0.1


@pytest.mark.slow
def test_importing_touches_neither_environment_nor_signals_nor_threads():
    code = """
import os, signal, threading
before = dict(os.environ), [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
import anybatch
for name in anybatch.__all__:
    getattr(anybatch, name)
after = dict(os.environ), [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
changed = {k for k in after[0] if before[0].get(k) != after[0][k]}
changed -= {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR"}
print(sorted(changed), before[1] == after[1], threading.active_count())
"""
    assert in_a_fresh_process(code) == "[] True 1"


def test_the_package_says_that_it_is_typed():
    assert (INIT.parent / "py.typed").is_file()

"""Some of the mistakes in real processes: their exit status, and what stands on standard error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.bad_input.test_commands import check_told


def anybatch(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "anybatch", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,  # by then it hangs
        check=False,
        **options,  # type: ignore[call-overload]
    )


@pytest.mark.slow
def test_bad_input_ends_with_2(write_task: Callable[..., Path]):
    write_task("def loss(model, batch): return model(batch[0])[:, 0]\n")
    done = anybatch("train", "task.py")
    assert done.returncode == 2
    assert not done.stdout
    check_told(done.stderr, ("(8,)", "reduction='sum'"))


@pytest.mark.nightly
def test_no_plan_fits_ends_with_3_and_the_memory_it_names_becomes_enough(
    write_task: Callable[..., Path],
):
    write_task(
        "def model(): return nn.Linear(3, 4_000_000)\ndef loss(m, b): return m(b[0]).square().mean()\n"
    )
    refused = anybatch("train", "task.py", "--memory", "8MiB")
    assert refused.returncode == 3
    check_told(refused.stderr, ("budget of 8.00 MiB", "--memory"), ("one change at a time",))

    trained = refused
    for _ in range(3):  # what one process measures is not to the byte what the next one does
        named = trained.stderr.partition("(--memory ")[2].partition(")")[0]
        trained = anybatch("train", "task.py", "--memory", named)
        if trained.returncode == 0:
            break
    assert trained.returncode == 0, trained.stderr
    assert f"of {named.removesuffix('MiB')}" in trained.stdout.replace(".0 MiB", "")


def test_an_unknown_word_ends_with_2_and_help_with_0():
    assert anybatch("trian").returncode == 2
    assert anybatch("train", "--help").returncode == 0


@pytest.mark.slow
@pytest.mark.usefixtures("one_of_three")
def test_another_number_of_ranks_than_were_started_ends_with_2(write_task: Callable[..., Path]):
    write_task()
    done = anybatch("train", "task.py", "--ranks", "2")
    assert done.returncode == 2
    assert not done.stdout
    check_told(done.stderr, ("--ranks is 2", "one of 3 that torchrun has started"))


@pytest.mark.slow
def test_an_output_that_nobody_reads_to_its_end_is_no_error(write_task: Callable[..., Path]):
    write_task()
    process = subprocess.Popen(
        [sys.executable, "-m", "anybatch", "plan", "task.py", "--why"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait() == 1

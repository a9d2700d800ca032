"""Limits on addresses that leave too little for torch: a sentence, and no traceback of its import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from anybatch.process import import_memory

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(sys.platform != "linux", reason="ulimit -v holds on Linux"),
]


def limited(mib: int, *words: str) -> subprocess.CompletedProcess[str]:
    """`words` run by this Python with so many MiB of addresses."""
    limit = ["/bin/sh", "-c", f'ulimit -v {mib << 10}; exec "$@"', "sh", sys.executable]
    return subprocess.run(
        [*limit, *words], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("mib", [100, 200, 400, 600, 1000])
@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_limit_that_torch_does_not_fit_is_told(command: str, mib: int, tmp_path: Path):
    done = limited(mib, "-m", "anybatch", command, "digits")
    assert (done.returncode, done.stdout) == (3, "")
    told = re.fullmatch(
        r"anybatch: the limit of (\d+) MiB on this process \(RLIMIT_AS, ulimit -v\) leaves (\d+) MiB of"
        r" addresses, and torch needs 1024 MiB to start: lift it \(`ulimit -v unlimited`\), .*"
        r" a memory budget.*\.\n",
        done.stderr,
    )
    assert told, done.stderr
    assert int(told[1]) == mib
    assert 0 < int(told[2]) < mib


def test_what_needs_no_torch_works_under_it():
    done = limited(200, "-m", "anybatch", "recipes")
    assert done.returncode == 0, done.stderr
    assert "digits" in done.stdout


def test_a_script_is_told_by_the_error_of_the_same_class():
    """It may have what it needs without torch, so only its import is refused."""
    script = """
import anybatch as ab
try:
    ab.Task
except ab.NoPlanFits as error:
    print(error)
"""
    done = limited(300, "-c", script)
    assert done.returncode == 0, done.stderr
    assert "an import was refused memory" in done.stdout
    assert "ulimit -v unlimited" in done.stdout


def test_another_error_of_an_import_stays_what_it_is():
    error = ImportError("libc10.so: cannot allocate memory in static TLS block")
    with pytest.raises(ImportError, match="static TLS"), import_memory.explained():
        raise error
    with pytest.raises(ModuleNotFoundError), import_memory.explained():
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401

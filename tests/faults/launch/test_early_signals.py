"""A signal while libraries are imported, here or in ranks: one line, the status, and nothing left.

torch is imported from C++, which clears whatever Python raises there. The import that stands still here
does the same.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.faults

SECONDS = 120.0

STANDS_STILL = """
import os, signal, sys, time
from pathlib import Path

class Finder:
    def find_spec(self, name, path=None, target=None):
        who = os.environ.get("LOCAL_RANK", "agent")
        if name == os.environ["STANDS_AT"] and who in os.environ["WHO"]:
            Path(os.environ["READY"], who).write_text(str(os.getpid()))
            try:
                while signal.SIGINT not in signal.sigpending():
                    time.sleep(0.01)
            except BaseException:
                pass

sys.meta_path.insert(0, Finder())
"""

BY_HAND = 130, "anybatch: stopped by hand; what was not saved before is lost.\n"
PREEMPTED = (
    75,
    "anybatch: the run was asked to stop before its first step: start it again in the same way.\n",
)


@pytest.mark.parametrize(
    ("number", "told"), [(signal.SIGINT, BY_HAND), (signal.SIGTERM, PREEMPTED)], ids=["INT", "TERM"]
)
@pytest.mark.parametrize(
    ("who", "module"),
    [
        (["agent"], "torch"),
        pytest.param(["0", "1"], "anybatch.launch.worker", marks=pytest.mark.nightly),
        pytest.param(["0", "1"], "torch", marks=pytest.mark.slow),
    ],
    ids=["agent", "ranks that begin", "ranks"],
)
def test_a_signal_while_libraries_are_imported(
    who: list[str], module: str, number: signal.Signals, told: tuple[int, str], tmp_path: Path
):
    for name in ("ready", "temporary", "python", "work"):
        (tmp_path / name).mkdir()
    (tmp_path / "python" / "sitecustomize.py").write_text(STANDS_STILL)
    process = subprocess.Popen(
        [sys.executable, "-m", "anybatch", "train", "digits", "--ranks", "2"],
        cwd=tmp_path / "work",
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path / "python"), *sys.path]),
            "STANDS_AT": module,
            "WHO": " ".join(who),
            "READY": str(tmp_path / "ready"),
            "TMPDIR": str(tmp_path / "temporary"),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "of_torch"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        ready = [tmp_path / "ready" / name for name in who]
        deadline = time.monotonic() + SECONDS
        while not all(path.exists() and path.read_text() for path in ready):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        output, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, errors) == told
    assert not output
    assert not list((tmp_path / "temporary").iterdir())
    assert not [path for path in (tmp_path / "work").rglob("*") if path.name != "runs"]
    for path in ready:
        assert not psutil.pid_exists(int(path.read_text()))

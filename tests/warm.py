"""Commands and scripts in processes of their own that need not load torch first.

Loading it takes an interpreter two to three seconds, more than most commands of a test take for what
they do. One process has loaded torch and the modules that every command imports, and has done nothing
else; it forks for each command:

    def test_it(warm, tmp_path):
        done = warm(["anybatch", "plan", "digits"], cwd=tmp_path)

What is forked is a new interpreter but for what is imported: arguments, environment, folder, session
and output are its own, and it ends as an interpreter does. Tests of what a process imports start one
anew.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import selectors
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NoReturn

SECONDS = 300.0
"""A command that takes longer hangs."""


class Warm:
    """The process that forks; it is started when it is first needed, and again after a timeout.

    Attributes:
        pids: of all that were started: they outlive the test that first asked for one.
    """

    pids: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __call__(
        self,
        words: Sequence[str],
        cwd: Path,
        env: Mapping[str, str] | None = None,
        timeout: float = SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        """What `subprocess.run` returns for these words with the output captured.

        Args:
            words: `anybatch ...`, or `python` (or its path) followed by a script, `-m` or `-c`.
            cwd: the folder it runs in.
            env: its environment variables; by default those of this process.
            timeout: in seconds, after which it is killed and `subprocess.TimeoutExpired` raised.
        """
        words = [str(word) for word in words]
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            request = {
                "words": words,
                "cwd": str(cwd),
                "env": dict(os.environ if env is None else env),
                "out": str(out),
                "err": str(err),
            }
            print(json.dumps(request), file=process.stdin, flush=True)
            pid = int(process.stdout.readline())
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                if not selector.select(timeout):
                    os.killpg(pid, signal.SIGKILL)
                    self.close()
                    raise subprocess.TimeoutExpired(
                        words, timeout, out.read_bytes(), err.read_bytes()
                    )
            status = int(process.stdout.readline())
            told = [path.read_text(encoding="utf-8") for path in (out, err)]
        return subprocess.CompletedProcess(words, status, *told)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self.pids.discard(self._process.pid)
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=tempfile.gettempdir(),
            )
            self.pids.add(self._process.pid)
            assert self._process.stdout is not None
            assert self._process.stdout.readline() == "ready\n"
        return self._process


def _serve() -> None:
    """Fork for each request; answer with the number of the process, and then with how it ended."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.path.pop(0)  # the folder of this file
    _load()
    print("ready", file=answers, flush=True)
    for line in iter(requests.readline, ""):
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            requests.close()
            answers.close()
            _become(**json.loads(line))
        print(pid, file=answers, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _load() -> None:
    """Import what most commands do. As in anybatch's own processes, nobody looks for garbage among it:
    see `anybatch.process.libraries`."""
    gc.disable()
    import sklearn.datasets
    import torch._dynamo

    import anybatch.cli
    import anybatch.report
    import anybatch.runs.planning
    import anybatch.runs.train

    del anybatch, sklearn, torch
    gc.freeze()
    gc.enable()


def _become(words: list[str], cwd: str, env: dict[str, str], out: str, err: str) -> NoReturn:
    """Go on as the process that `words` would start."""
    os.setsid()
    for path, stream in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if words[0] == "anybatch":
        words = ["python", "-m", *words]
    _, how, *rest = words
    if how == "-m":
        sys.argv = rest
        sys.path.insert(0, cwd)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(rest[0], sys.modules["__main__"].__dict__)
    else:
        sys.argv = [how, *rest]
        sys.path.insert(0, str(Path(how).parent.resolve()))
        runpy.run_path(how, run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    _serve()

"""Examine: run the checks, each in a child process within a deadline, and collect the findings.

    parent                                   child
    ["step", "cuda:0"]  -- standard input -->  packages.look_step("cuda:0"), may hang or crash
                        <- standard output --  plain values, pickled
    facts of all checks -> one function per group -> findings

A check without an answer is a finding too, and stops no other: the next is asked of a new process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import queue
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import IO, Any, NamedTuple

from anybatch.doctor import environment, gpus, host, packages, ranks
from anybatch.doctor.finding import Facts, Finding, Level, Report, first_line, warning
from anybatch.threads import begin

_GRACE_SECONDS = 2.0
"""A process that a driver holds in the kernel does not even end when it is killed."""

_RESTART_DRIVER = "look at dmesg for lines with NVRM or Xid; if there are such, restart the machine"


class Check(NamedTuple):
    """Something to look at.

    Attributes:
        look: returns plain values; runs in the child.
        what: it looks at, in words.
        seconds: within which it has to answer: far more than it takes where all is well.
        level, remedy: of its not answering.
    """

    look: Callable[..., Any]
    what: str
    seconds: float
    level: Level
    remedy: str


_REPORT, _DISK = "report it, with what --json prints", "see whether the disk with them answers"
_FOLDERS = "see whether the disk of this folder answers (df)"
_NO_LIMIT = "do without --memory on the CPU"
_TORCH = "see whether the disk with torch on it answers"
_FIREWALL = "see whether a firewall stands in the way of 127.0.0.1"
_NAMES = "see whether the name server answers"

CHECKS = {
    "gpus": Check(gpus.look, "the driver of GPUs", 20, "problem", _RESTART_DRIVER),
    "host": Check(host.look, "cores and memory", 10, "warning", _REPORT),
    "enforcement": Check(host.look_limit, "a limit on memory", 10, "warning", _NO_LIMIT),
    "folders": Check(host.look_folders, "folders", 15, "problem", _FOLDERS),
    "network": Check(ranks.look, "the network", 20, "warning", _NAMES),
    "python": Check(packages.look, "the packages", 30, "warning", _DISK),
    "torch": Check(packages.look_torch, "torch", 90, "problem", _TORCH),
    "step": Check(packages.look_step, "steps of training", 60, "problem", _RESTART_DRIVER),
    "pair": Check(ranks.look_pair, "gloo", 60, "problem", _FIREWALL),
}

_GROUPS: tuple[tuple[str, Callable[[Facts], Iterator[Finding]], tuple[str, ...]], ...] = (
    ("Python and packages", packages.check_packages, ("python",)),
    ("torch", packages.check_torch, ("torch", "step")),
    ("GPUs", gpus.check, ("gpus",)),
    ("Processor and memory", host.check, ("host", "enforcement")),
    ("Several ranks", ranks.check, ("network", "pair")),
    ("Folders", host.check_folders, ("folders",)),
    ("Environment", environment.check, ()),
)
"""Title, the function that makes the findings, and the checks whose silence belongs there."""

_LIMITS = "raise the limits of this process on memory, files and processes (ulimit -a shows them)"

_ENDS = (
    (r"ImportError|ModuleNotFoundError", "install the package that is named anew"),
    (r"no process could be started|[Mm]emory|map segment", _LIMITS),
)
"""Why a check gave no answer, and what to do."""

_ENDS_WITHOUT_GPU = (
    (
        "SIGILL",
        "install a build of torch for this CPU, which lacks instructions that this one uses",
    ),
    ("SIGKILL", "see what memory is free, and what limits it: the kernel ends who goes beyond"),
    ("SIG", "install torch anew: libraries are broken, or do not go with each other"),
)


class Silence(NamedTuple):
    """A check that gave no answer, what it was asked about, and why."""

    check: str
    arguments: tuple[str, ...]
    why: str


def examine() -> Report:
    """Look at this machine, as far as it concerns training. Takes a few seconds where all is well, and
    less than the sum of the deadlines in any case."""
    facts: Facts = {
        "environment": environment.relevant(os.environ),
        **dict.fromkeys(CHECKS.keys() - {"step"}),
        "steps": [],
    }
    silences: list[Silence] = []
    child = Child()

    def ask(name: str, *arguments: str) -> Any:
        try:
            return child.ask(name, *arguments, seconds=CHECKS[name].seconds)
        except Unanswered as error:
            silences.append(Silence(name, arguments, str(error)))
            return None

    try:
        with contextlib.suppress(Unanswered):  # it is asked again
            child.ask("pair", ranks.AHEAD, seconds=CHECKS["pair"].seconds)
        for name in ("gpus", "host", "enforcement", "folders", "network", "python", "torch"):
            facts[name] = ask(name)  # GPUs before steps, which hold some of their memory
        torch = facts["torch"]
        if torch is not None and not torch["fault"]:
            for device in ("cpu", *(f"cuda:{index}" for index in range(len(torch["devices"])))):
                if step := ask("step", device):
                    facts["steps"].append(step)
            facts["pair"] = ask("pair")
    except MemoryError:  # what was not seen is not known
        pass
    finally:
        child.end()
    return Report(findings(facts, silences), facts)


def findings(facts: Facts, silences: Iterable[Silence] = ()) -> dict[str, list[Finding]]:
    """The findings on `facts` and on checks that gave no answer, by group."""
    groups: dict[str, list[Finding]] = {}
    for title, check, names in _GROUPS:
        found = groups[title] = []
        try:
            found.extend(check(facts))
        except Exception as error:  # facts that nobody thought of
            meaning = f"the rest of this group could not be judged ({first_line(error)})"
            found.append(warning("doctor", "a fault of its own", meaning, _REPORT))
        found.extend(_of_silence(one) for one in silences if one.check in names)
    return groups


def _of_silence(silence: Silence) -> Finding:
    check = CHECKS[silence.check]
    on_gpu = silence.check == "gpus" or any(name != "cpu" for name in silence.arguments)
    ends = _ENDS if on_gpu else (*_ENDS, *_ENDS_WITHOUT_GPU)
    remedy = next((what for end, what in ends if re.search(end, silence.why)), check.remedy)
    name = " on ".join((check.what, *silence.arguments))
    meaning = silence.why.rstrip(".")
    return Finding(name, "could not be looked at", check.level, "", meaning, remedy)


# --------------------------------------------------------------------------------- the child process


class Unanswered(Exception):
    """A check gave no answer; the message says why."""


class Child:
    """A process that answers one check after the other; started when it is first asked."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._errors: IO[bytes] | None = None

    def ask(self, check: str, *arguments: str, seconds: float) -> Any:
        """What the check saw. Raises `Unanswered` if it failed, crashed or was not done in time."""
        begun = time.monotonic()
        try:
            process = self._process or self._start()
            assert process.stdin is not None
            process.stdin.write(json.dumps([seconds, check, *arguments]).encode() + b"\n")
            process.stdin.flush()
        except (OSError, RuntimeError, MemoryError) as error:
            self.end()
            raise Unanswered(f"no process could be started to look ({error})") from None
        try:
            reply = self._replies.get(timeout=seconds + _GRACE_SECONDS)
        except queue.Empty:
            reply = None
        if reply is None:
            how = self.end(wait_seconds=0.1)
            if time.monotonic() - begun >= seconds:
                raise Unanswered(f"no answer came within {seconds:g} s")
            raise Unanswered(f"the process that looked {how}")
        is_seen, value = reply
        if not is_seen:
            raise Unanswered(value)
        return value

    def _start(self) -> subprocess.Popen[bytes]:
        with contextlib.suppress(OSError):  # no temporary folder is a finding by itself
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in end)
        self._replies = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from anybatch.doctor.examine import answer; answer()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors or subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if begin(partial(_read, self._process.stdout, self._replies)) is None:
            raise RuntimeError("can't start new thread")
        return self._process

    def end(self, wait_seconds: float = 0.0) -> str:
        """Kill it with all that it has started. Returns how it ended, and its last words.

        `wait_seconds`: for it to end by itself, if it is about to, which tells more."""
        process, errors = self._process, self._errors
        self._process = self._errors = None
        if process is None:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_seconds)
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        how = _ended(process.returncode)
        if errors is not None:
            errors.seek(0)
            lines = errors.read().decode("utf-8", "replace").split("\n")
            errors.close()
            words = next((line.strip() for line in reversed(lines) if line.strip()), "")
            how += f" ({words[:300]})" * bool(words)
        return how


def _read(stream: IO[bytes], replies: queue.SimpleQueue[Any]) -> None:
    """Pass on each reply, and None when no more will come."""
    with stream:
        while True:
            try:
                replies.put(pickle.load(stream))
            except Exception:  # the end, or half an answer
                replies.put(None)
                return


def _ended(status: int | None) -> str:
    if status is None:
        return "does not end"
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def answer() -> None:
    """The child: answer what comes on standard input. What libraries print goes to standard error."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin.buffer:
        seconds, check, *arguments = json.loads(line)
        # So that nothing is left where the parent is killed while this hangs.
        with contextlib.suppress(RuntimeError):
            faulthandler.dump_traceback_later(seconds, exit=True)
        try:
            reply = True, CHECKS[check].look(*arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a broken library may raise anything
            reply = False, first_line(error)
        faulthandler.cancel_dump_traceback_later()
        pickle.dump(reply, replies)
        replies.flush()

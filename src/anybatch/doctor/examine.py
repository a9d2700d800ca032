"""Runs the checks in child processes with deadlines, since a broken driver or library may hang or
crash.

A child prints each finding immediately as a line of JSON. Findings before a crash are kept, and the
crash itself is reported as a finding.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

from anybatch.doctor import checks
from anybatch.doctor.finding import Finding, Level, Report

_GRACE_SECONDS = 2.0
"""Time to wait for a killed process: one that is blocked in the kernel by a driver does not end."""


class Check(NamedTuple):
    """Properties of a check function in `checks`.

    Attributes:
        group: title of the group of its findings.
        seconds: deadline, far above its duration on a healthy machine.
        level, remedy: level and remedy of the finding that is reported if the check does not finish.
    """

    group: str
    seconds: float
    level: Level
    remedy: str


_DRIVER = "look at dmesg for lines with NVRM or Xid; if there are any, restart the machine"

CHECKS = {
    "packages": Check("Python and packages", 30, "warning", "check the disk with the packages"),
    "torch": Check("torch", 90, "problem", "reinstall torch, or check its disk"),
    "training_steps": Check("torch", 90, "problem", _DRIVER),
    "gpus": Check("GPUs", 20, "problem", _DRIVER),
    "cores_and_memory": Check(
        "Processor and memory", 10, "warning", "do without --memory on the CPU"
    ),
    "gloo": Check("Several ranks", 100, "problem", "check whether a firewall blocks 127.0.0.1"),
    "network": Check("Several ranks", 20, "warning", "check the name server"),
    "folders": Check("Folders", 15, "problem", "check the disk of this folder (df)"),
    "environment": Check("Environment", 10, "warning", "report it, with what --json prints"),
}
"""Checks by the name of their function, in the order in which findings are shown."""

_REMEDIES = (
    (r"ImportError|ModuleNotFoundError", "reinstall the package that is named"),
    (
        r"no process could be started|[Mm]emory|map segment",
        "raise the limits of this process on memory, files and processes (ulimit -a shows them)",
    ),
    ("SIGILL", "install a build of torch for this CPU: it lacks instructions that this one uses"),
    ("SIGKILL", "check free memory and its limits: the kernel kills processes that exceed them"),
)
"""(pattern, remedy): remedies by a pattern in the reason why a check did not finish."""


def examine() -> Report:
    """Check everything on this machine that concerns training. Takes a few seconds on a healthy
    machine, and less than the sum of the deadlines in any case."""
    found = run(["gpus"])  # before the training steps, which occupy GPU memory
    found |= run(["packages", "torch", "cores_and_memory", "network", "folders", "environment"])
    if not any(one.name == "torch" and one.level == "problem" for one in found["torch"]):
        found |= run(["training_steps", "gloo"])
    groups: dict[str, list[Finding]] = {}
    for name, check in CHECKS.items():
        groups.setdefault(check.group, []).extend(found.get(name, []))
    return Report(groups)


def run(names: Sequence[str]) -> dict[str, list[Finding]]:
    """Run these checks concurrently, each in its own child process, and return their findings."""
    code = "from anybatch.doctor.examine import child; child()"
    began = time.monotonic()
    processes: dict[str, subprocess.Popen[bytes]] = {}
    found: dict[str, list[Finding]] = {}
    try:
        for name in names:
            try:
                processes[name] = subprocess.Popen(
                    [sys.executable, "-c", code, name],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except (OSError, MemoryError) as error:
                found[name] = [_unfinished(name, f"no process could be started to look ({error})")]
        for name, process in processes.items():
            found[name] = _answer(name, process, began)
    finally:
        for process in processes.values():
            _kill(process)
    return found


def child() -> None:
    """Entry point of the child process: run the check named by its argument. Output of libraries is
    redirected to standard error."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    end = {"why": ""}
    try:
        for finding in getattr(checks, sys.argv[1])():
            print(json.dumps(asdict(finding)), file=replies, flush=True)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a broken library may raise anything
        end = {"why": checks.first_line(error)}
    print(json.dumps(end), file=replies, flush=True)


def _answer(name: str, process: subprocess.Popen[bytes], began: float) -> list[Finding]:
    seconds, why = CHECKS[name].seconds, ""
    try:
        left = max(0.0, began + seconds - time.monotonic())
        output, errors = process.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        why = f"no answer came within {seconds:g} s"
        _kill(process)
        try:
            output, errors = process.communicate(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired as error:
            output, errors = error.output or b"", error.stderr or b""
    found: list[Finding] = []
    for line in output.splitlines():
        with contextlib.suppress(ValueError):  # an incomplete line
            answer = json.loads(line)
            if "why" not in answer:
                found.append(Finding(**answer))
            else:
                return [*found, _unfinished(name, answer["why"])] if answer["why"] else found
    return [*found, _unfinished(name, why or _ending(process.returncode, errors))]


def _ending(status: int, errors: bytes) -> str:
    ending = f"ended with status {status}"
    if status < 0:
        names = {-one: one.name for one in signal.Signals}
        ending = f"was ended by {names.get(status, f'signal {-status}')}"
    lines = errors.decode("utf-8", "replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"the process that looked {ending}" + f" ({last[:300]})" * bool(last)


def _unfinished(name: str, why: str) -> Finding:
    check = CHECKS[name]
    remedy = next((it for words, it in _REMEDIES if re.search(words, why)), check.remedy)
    words = name.replace("_", " ")
    return Finding(words, "not checked to the end", check.level, why.rstrip("."), remedy)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and, except on Windows, all processes that it has started."""
    with contextlib.suppress(OSError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)

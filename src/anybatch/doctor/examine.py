"""Examine: look at the machine in child processes with deadlines, and turn what they saw into findings.

a child process for each look     may hang or crash; one line of JSON, or none, which is a finding too
facts of all looks                -> one check function per group -> findings
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from anybatch.doctor import check
from anybatch.doctor.finding import Facts, Finding, Level, Report
from anybatch.doctor.look import first_line

_GRACE_SECONDS = 2.0
"""A process that a driver holds in the kernel does not end even when it is killed."""


class Look(NamedTuple):
    """Something to look at.

    Attributes:
        subject: what it looks at, in words.
        seconds: deadline, far above what it takes on a healthy machine.
        level, remedy: of the finding if it gives no answer.
    """

    subject: str
    seconds: float
    level: Level
    remedy: str


_REPORT = "report it, with what --json prints"
_DRIVER = "look at dmesg for lines with NVRM or Xid; if there are any, restart the machine"
_FIREWALL = "check whether a firewall blocks 127.0.0.1"

LOOKS = {
    "gpus": Look("the driver of GPUs", 20, "problem", _DRIVER),
    "host": Look("cores and memory", 10, "warning", _REPORT),
    "enforcement": Look("a limit on memory", 10, "warning", "do without --memory on the CPU"),
    "folders": Look("folders", 15, "problem", "check the disk of this folder (df)"),
    "network": Look("the network", 20, "warning", "check the name server"),
    "python": Look("the packages", 30, "warning", "check the disk with the packages"),
    "torch": Look("torch", 90, "problem", "check the disk with torch on it"),
    "step": Look("steps of training", 60, "problem", _DRIVER),
    "pair": Look("gloo", 60, "problem", _FIREWALL),
}

_GROUPS: tuple[tuple[str, Callable[[Facts], Iterator[Finding]], tuple[str, ...]], ...] = (
    ("Python and packages", check.packages, ("python",)),
    ("torch", check.torch, ("torch", "step")),
    ("GPUs", check.gpus, ("gpus",)),
    ("Processor and memory", check.host, ("host", "enforcement")),
    ("Several ranks", check.ranks, ("network", "pair")),
    ("Folders", check.folders, ("folders",)),
    ("Environment", check.environment, ()),
)
"""Title, the function that makes the findings, and the looks that belong there if they fail."""

_REMEDIES = (
    (r"ImportError|ModuleNotFoundError", "reinstall the package that is named"),
    (
        r"no process could be started|[Mm]emory|map segment",
        "raise the limits of this process on memory, files and processes (ulimit -a shows them)",
    ),
)
"""For words of why a look gave no answer. The signals below are about the CPU only."""

_CPU_REMEDIES = (
    ("SIGILL", "install a build of torch for this CPU: it lacks instructions that this one uses"),
    ("SIGKILL", "check free memory and its limits: the kernel kills processes that exceed them"),
    ("SIG", "reinstall torch: libraries are broken or of versions that do not match"),
)


class Silence(NamedTuple):
    """A look (`"gpus"`, `"step cuda:0"`) that gave no answer, and why."""

    look: str
    why: str


def examine() -> Report:
    """Look at this machine, as far as it concerns training. Takes a few seconds on a healthy machine,
    and less than the sum of the deadlines in any case."""
    facts: Facts = {
        "environment": check.relevant(os.environ),
        **dict.fromkeys(LOOKS.keys() - {"step"}),
        "steps": [],
    }
    silences: list[Silence] = []

    def look(*names: str) -> None:
        answers = ask({name: LOOKS[name.split()[0]].seconds for name in names})
        for name, answer in answers.items():
            if "why" in answer:
                silences.append(Silence(name, answer["why"]))
            elif name.startswith("step"):
                facts["steps"].append(answer["seen"])
            else:
                facts[name] = answer["seen"]

    look("gpus")  # before steps of training, which hold some of their memory
    look("host", "enforcement", "folders", "network", "python", "torch")
    if facts["torch"] is not None and not facts["torch"]["fault"]:
        devices = "cpu", *(f"cuda:{index}" for index in range(len(facts["torch"]["devices"])))
        look(*(f"step {device}" for device in devices), "pair")
    return Report(findings(facts, silences), facts)


def findings(facts: Facts, silences: Iterable[Silence] = ()) -> dict[str, list[Finding]]:
    """The findings from `facts` and from looks without an answer, by group."""
    groups: dict[str, list[Finding]] = {}
    for title, judge, names in _GROUPS:
        found = groups[title] = []
        try:
            found.extend(judge(facts))
        except Exception as error:  # facts that the check does not expect
            meaning = f"the rest of this group could not be checked ({first_line(error)})"
            found.append(Finding("doctor", "an error of its own", "warning", meaning, _REPORT))
        found.extend(_of_silence(one) for one in silences if one.look.split()[0] in names)
    return groups


def _of_silence(silence: Silence) -> Finding:
    name, _, device = silence.look.partition(" ")
    look = LOOKS[name]
    on_gpu = name == "gpus" or device.startswith("cuda")
    remedies = _REMEDIES if on_gpu else (*_REMEDIES, *_CPU_REMEDIES)
    remedy = next((it for words, it in remedies if re.search(words, silence.why)), look.remedy)
    subject = f"{look.subject} on {device}" if device else look.subject
    return Finding(subject, "could not be looked at", look.level, silence.why.rstrip("."), remedy)


# -------------------------------------------------------------------------------- child processes


def ask(seconds: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """The answers to these looks (name to deadline), each by a child process of its own, all at a time:
    what it saw, `{"seen": value}`, or why there is no answer, `{"why": words}`."""
    code = "from anybatch.doctor.look import answer; answer()"
    began = time.monotonic()
    processes: dict[str, subprocess.Popen[bytes]] = {}
    answers: dict[str, dict[str, Any]] = {}
    try:
        for name in seconds:
            try:
                processes[name] = subprocess.Popen(
                    [sys.executable, "-c", code, *name.split()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except (OSError, MemoryError) as error:
                answers[name] = {"why": f"no process could be started to look ({error})"}
        for name, process in processes.items():
            answers[name] = _answer(process, seconds[name], began)
    finally:
        for process in processes.values():
            _kill(process)
    return {name: answers[name] for name in seconds}


def _answer(process: subprocess.Popen[bytes], seconds: float, began: float) -> dict[str, Any]:
    is_late = False
    try:
        left = max(0.0, began + seconds - time.monotonic())
        output, errors = process.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        is_late = True
        _kill(process)
        try:
            output, errors = process.communicate(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired as error:
            output, errors = error.output or b"", error.stderr or b""
    with contextlib.suppress(ValueError):  # nothing, or half a line
        return json.loads(output)
    if is_late:
        return {"why": f"no answer came within {seconds:g} s"}
    status = process.returncode
    ending = f"ended with status {status}"
    if status < 0:
        names = {-one: one.name for one in signal.Signals}
        ending = f"was ended by {names.get(status, f'signal {-status}')}"
    lines = errors.decode("utf-8", "replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return {"why": f"the process that looked {ending}" + f" ({last[:300]})" * bool(last)}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill it with all processes that it has started."""
    with contextlib.suppress(OSError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)

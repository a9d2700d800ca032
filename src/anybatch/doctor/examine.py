"""Examine: look at the machine in child processes with deadlines, and turn what they saw into findings.

    parent                                    child
    names of looks  -- command line ----->    host.look(), ..., packages.look_torch(), may hang or crash
                    <- standard output ---    one line of JSON per look
    facts of all looks -> one check function per group -> findings

A look without an answer is a finding too. The looks after it are answered by a new child.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from anybatch.doctor import environment, gpus, host, packages, ranks
from anybatch.doctor.finding import Facts, Finding, Level, Report, first_line, warning

_GRACE_SECONDS = 2.0
"""A process that a driver holds in the kernel does not end even when it is killed."""


class Look(NamedTuple):
    """Something to look at.

    Attributes:
        function: returns plain values; runs in the child.
        subject: what it looks at, in words.
        seconds: deadline, far above what it takes on a healthy machine.
        level, remedy: of the finding if it gives no answer.
    """

    function: Callable[..., Any]
    subject: str
    seconds: float
    level: Level
    remedy: str


_REPORT = "report it, with what --json prints"
_RESTART_DRIVER = "look at dmesg for lines with NVRM or Xid; if there are any, restart the machine"

LOOKS = {
    # GPUs come before steps of training, which hold some of their memory.
    "gpus": Look(gpus.look, "the driver of GPUs", 20, "problem", _RESTART_DRIVER),
    "host": Look(host.look, "cores and memory", 10, "warning", _REPORT),
    "enforcement": Look(
        host.look_limit, "a limit on memory", 10, "warning", "do without --memory on the CPU"
    ),
    "folders": Look(
        host.look_folders, "folders", 15, "problem", "check the disk of this folder (df)"
    ),
    "network": Look(ranks.look, "the network", 20, "warning", "check the name server"),
    "python": Look(
        packages.look, "the packages", 30, "warning", "check the disk with the packages"
    ),
    "torch": Look(packages.look_torch, "torch", 90, "problem", "check the disk with torch on it"),
    "step": Look(packages.look_step, "steps of training", 60, "problem", _RESTART_DRIVER),
    "pair": Look(
        ranks.look_pair, "gloo", 60, "problem", "check whether a firewall blocks 127.0.0.1"
    ),
}

_BATCHES = (("gpus",), ("host", "enforcement", "folders", "network", "python", "torch"))
"""Looks that one child answers. What needs torch follows `torch`, see `_following`."""

_GROUPS: tuple[tuple[str, Callable[[Facts], Iterator[Finding]], tuple[str, ...]], ...] = (
    ("Python and packages", packages.check_packages, ("python",)),
    ("torch", packages.check_torch, ("torch", "step")),
    ("GPUs", gpus.check, ("gpus",)),
    ("Processor and memory", host.check, ("host", "enforcement")),
    ("Several ranks", ranks.check, ("network", "pair")),
    ("Folders", host.check_folders, ("folders",)),
    ("Environment", environment.check, ()),
)
"""Title, the function that makes the findings, and the looks that belong there if they fail."""

_LIMITS = "raise the limits of this process on memory, files and processes (ulimit -a shows them)"

_REMEDIES = (
    (r"ImportError|ModuleNotFoundError", "reinstall the package that is named"),
    (r"no process could be started|[Mm]emory|map segment", _LIMITS),
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
        "environment": environment.relevant(os.environ),
        **dict.fromkeys(LOOKS.keys() - {"step"}),
        "steps": [],
    }
    silences: list[Silence] = []
    for batch in _BATCHES:
        pending = list(batch)
        while pending:
            answers, ending = ask({name: LOOKS[name.split()[0]].seconds for name in pending})
            for name, (is_seen, value) in answers.items():
                pending.remove(name)
                if not is_seen:
                    silences.append(Silence(name, value))
                elif name.startswith("step"):
                    facts["steps"].append(value)
                else:
                    facts[name] = value
                    pending += _following(name, value)
            if pending:
                silences.append(Silence(pending.pop(0), ending))
    return Report(findings(facts, silences), facts)


def _following(name: str, value: Any) -> list[str]:
    """The looks that become possible with the answer to another."""
    if name != "torch" or value["fault"]:
        return []
    devices = ("cpu", *(f"cuda:{index}" for index in range(len(value["devices"]))))
    return [*(f"step {device}" for device in devices), "pair"]


def findings(facts: Facts, silences: Iterable[Silence] = ()) -> dict[str, list[Finding]]:
    """The findings from `facts` and from looks without an answer, by group."""
    groups: dict[str, list[Finding]] = {}
    for title, check, names in _GROUPS:
        found = groups[title] = []
        try:
            found.extend(check(facts))
        except Exception as error:  # facts that the check does not expect
            meaning = f"the rest of this group could not be checked ({first_line(error)})"
            found.append(warning("doctor", "an error of its own", meaning, _REPORT))
        found.extend(_of_silence(one) for one in silences if one.look.split()[0] in names)
    return groups


def _of_silence(silence: Silence) -> Finding:
    name, _, device = silence.look.partition(" ")
    look = LOOKS[name]
    on_gpu = name == "gpus" or device.startswith("cuda")
    remedies = _REMEDIES if on_gpu else (*_REMEDIES, *_CPU_REMEDIES)
    remedy = next((it for words, it in remedies if re.search(words, silence.why)), look.remedy)
    subject = f"{look.subject} on {device}" if device else look.subject
    value, meaning = "could not be looked at", silence.why.rstrip(".")
    return Finding(subject, value, look.level, "", meaning, remedy)


# --------------------------------------------------------------------------------- the child process


def ask(seconds: Mapping[str, float]) -> tuple[dict[str, tuple[bool, Any]], str]:
    """Answers of a new child to these looks (name to deadline) and to those that follow them, as far as
    it came: whether the look succeeded, and what it saw or why it failed. And how the child ended."""
    code = "from anybatch.doctor.examine import answer; answer()"
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(seconds)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, MemoryError) as error:
        return {}, f"no process could be started to look ({error})"
    total = sum(seconds.values())
    if "torch" in seconds:
        total += LOOKS["step"].seconds + LOOKS["pair"].seconds
    output, errors = _end(process, total)
    answers = {name: (is_seen, value) for name, is_seen, value in _lines(output)}
    unanswered = next((name for name in seconds if name not in answers), "step")
    limit = seconds.get(unanswered, LOOKS["step"].seconds)
    return answers, _ending(process.returncode, errors, limit)


def _end(process: subprocess.Popen[bytes], seconds: float) -> tuple[bytes, bytes]:
    """What the child writes until it ends or is killed, to standard output and standard error."""
    try:
        return process.communicate(timeout=seconds + _GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        _kill(process)
        try:
            return process.communicate(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired as error:
            return error.output or b"", error.stderr or b""
    finally:
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill it with all processes that it has started."""
    with contextlib.suppress(OSError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)


def _lines(output: bytes) -> Iterator[tuple[str, bool, Any]]:
    for line in output.splitlines():
        with contextlib.suppress(ValueError):  # half a line
            yield tuple(json.loads(line))


def _ending(status: int | None, errors: bytes, seconds: float) -> str:
    if status is None or (sys.platform != "win32" and status == -signal.SIGALRM):
        return f"no answer came within {seconds:g} s"
    ending = f"ended with status {status}"
    if status < 0:
        names = {int(one): one.name for one in signal.Signals}
        ending = f"was ended by {names.get(-status, f'signal {-status}')}"
    lines = errors.decode("utf-8", "replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"the process that looked {ending}" + f" ({last[:300]})" * bool(last)


def answer() -> None:
    """The child. What libraries print goes to standard error."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    deadlines: dict[str, float] = json.loads(sys.argv[1])
    pending = list(deadlines)
    while pending:
        name = pending.pop(0)
        look, *arguments = name.split()
        if sys.platform != "win32":  # the signal ends this process, whatever it is doing
            signal.setitimer(signal.ITIMER_REAL, deadlines.get(name, LOOKS[look].seconds))
        try:
            reply = name, True, LOOKS[look].function(*arguments)
            pending += _following(name, reply[2])
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a broken library may raise anything
            reply = name, False, first_line(error)
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

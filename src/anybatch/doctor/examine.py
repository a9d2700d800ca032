"""Examine: send the probes out, hand the judges what they saw, and collect the findings.

    probes, each in a process of its own    ->  facts           ->  judges, pure  ->  findings
    two processes side by side, a               plain values                          by group
    deadline for each probe

A probe that gives no answer is a finding too, and stops no other.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeAlias

from anybatch.doctor.apart import Apart, Unanswered
from anybatch.doctor.facts import Facts, Step
from anybatch.doctor.finding import Finding, Level
from anybatch.doctor.judges import (
    environment,
    folders,
    gpus,
    host,
    packages,
    ranks,
    torch_build,
)
from anybatch.doctor.probes import AHEAD
from anybatch.threads import begin

_RESTART_DRIVER = "look at dmesg for lines with NVRM or Xid; if there are such, restart the machine"


@dataclass(frozen=True, slots=True)
class Probe:
    """What is known of a probe beforehand.

    Attributes:
        what: it looks at, in words.
        seconds: within which it has to answer: far more than it takes where all is well.
        level: of its not answering.
        remedy: for that.
    """

    what: str
    seconds: float
    level: Level
    remedy: str


_PROBES = {
    "python": Probe("the packages", 30, "warning", "see whether the disk with them answers"),
    "folders": Probe("folders", 15, "problem", "see whether the disk of this folder answers (df)"),
    "network": Probe("the network", 20, "warning", "see whether the name server answers"),
    "host": Probe("cores and memory", 10, "warning", "report it, with what --json prints"),
    "enforcement": Probe("a limit on memory", 10, "warning", "do without --memory on the CPU"),
    "gpus": Probe("the driver of GPUs", 20, "problem", _RESTART_DRIVER),
    "torch_build": Probe("torch", 90, "problem", "see whether the disk with torch on it answers"),
    "step": Probe("steps of training", 60, "problem", _RESTART_DRIVER),
    "pair": Probe(
        "gloo",
        60,
        "problem",
        "see whether a firewall stands in the way of 127.0.0.1",
    ),
}

_LIMITS = "raise the limits of this process on memory, files and processes (ulimit -a shows them)"

_ENDS = (
    (r"ImportError|ModuleNotFoundError", "install the package that is named anew"),
    (r"no process could be started|[Mm]emory|map segment", _LIMITS),
)
"""Why a probe gave no answer, and what to do."""

_ENDS_WITHOUT_GPU = (
    (
        "SIGILL",
        "install a build of torch for this CPU, which lacks instructions that this one uses",
    ),
    ("SIGKILL", "see what memory is free, and what limits it: the kernel ends who goes beyond"),
    ("SIG", "install torch anew: libraries are broken, or do not go with each other"),
)
"""The same, where it was no driver."""

_GROUPS: tuple[tuple[str, Callable[[Facts], Iterator[Finding]], tuple[str, ...]], ...] = (
    ("Python and packages", packages.judge, ("python",)),
    ("torch", torch_build.judge, ("torch_build", "step")),
    ("GPUs", gpus.judge, ("gpus",)),
    ("Processor and memory", host.judge, ("host", "enforcement")),
    ("Several ranks", ranks.judge, ("network", "pair")),
    ("Folders", folders.judge, ("folders",)),
    ("Environment", environment.judge, ()),
)


@dataclass(frozen=True, slots=True)
class Silence:
    """A probe that gave no answer, what it was asked about, and why."""

    probe: str
    arguments: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Group:
    """Findings on one subject."""

    title: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """All that was found, and the facts behind it."""

    groups: tuple[Group, ...]
    facts: Facts

    def named(self, level: Level) -> tuple[str, ...]:
        """The names of the findings of a level, in order."""
        return tuple(
            one.name for group in self.groups for one in group.findings if one.level == level
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: the number of findings of each level, the findings, and the facts."""
        levels: tuple[Level, ...] = ("problem", "warning", "note", "ok")
        return {
            "counts": {level: len(self.named(level)) for level in levels},
            "findings": [
                {"group": group.title, **asdict(one)}
                for group in self.groups
                for one in group.findings
            ],
            "facts": asdict(self.facts),
        }


Ask: TypeAlias = Callable[..., Any]
"""Asks a probe by name; returns its record, or None if it gives none."""


def examine() -> Report:
    """Look at this machine, as far as it concerns training. Takes a few seconds where all is well, and
    less than the sum of the probes' deadlines in any case."""
    seen: dict[str, Any] = {}
    silences: list[Silence] = []
    children = [Apart() for _ in _LANES]

    def run(lane: Callable[[Ask], dict[str, Any]], child: Apart) -> None:
        def ask(probe: str, *arguments: str) -> Any:
            try:
                return child.ask(probe, *arguments, seconds=_PROBES[probe].seconds)
            except Unanswered as error:
                silences.append(Silence(probe, arguments, str(error)))
                return None

        with suppress(MemoryError):  # what was not seen is not known
            seen.update(lane(ask))

    try:
        ends: list[threading.Event] = []
        for lane, child in zip(_LANES, children, strict=True):
            end = begin(partial(run, lane, child))
            if end is None:  # no thread to be had: one after the other, then
                run(lane, child)
            else:
                ends.append(end)
        for end in ends:
            end.wait()
    finally:  # also when it is stopped by hand
        for child in children:
            child.close()
    facts = Facts(environment=environment.relevant(os.environ), **seen)
    return Report(judged(facts, silences), facts)


def judged(facts: Facts, silences: Iterable[Silence] = ()) -> tuple[Group, ...]:
    """What the judges say to `facts`, and to probes that gave no answer."""
    heard = [one for one in silences if one.arguments != (AHEAD,)]  # it is asked for again
    groups: list[Group] = []
    for title, judge, probes in _GROUPS:
        findings = list(_without_fail(judge, facts))
        findings += [_of_silence(one) for one in heard if one.probe in probes]
        groups.append(Group(title, tuple(findings)))
    return tuple(groups)


def _without_fail(judge: Callable[[Facts], Iterator[Finding]], facts: Facts) -> Iterator[Finding]:
    """What `judge` yields; what it raises, on facts that nobody thought of, is one more finding."""
    try:
        yield from judge(facts)
    except Exception as error:
        yield Finding(
            "doctor",
            "a fault of its own",
            "warning",
            meaning=f"the rest of this group could not be judged ({type(error).__name__}: {error})",
            remedy="report it, with what --json prints",
        )


def _of_silence(silence: Silence) -> Finding:
    probe = _PROBES[silence.probe]
    on = f" on {silence.arguments[0]}" if silence.arguments else ""
    return Finding(
        f"{probe.what}{on}",
        "could not be looked at",
        probe.level,
        meaning=silence.why.rstrip("."),
        remedy=_remedy(silence),
    )


def _remedy(silence: Silence) -> str:
    on_gpu = silence.probe == "gpus" or any(name != "cpu" for name in silence.arguments)
    ends = _ENDS if on_gpu else (*_ENDS, *_ENDS_WITHOUT_GPU)
    by_end = (remedy for end, remedy in ends if re.search(end, silence.why))
    return next(by_end, _PROBES[silence.probe].remedy)


# -------------------------------------------------------------------------------------------- lanes
#
# What is asked of one process, in order. They run side by side.


def _system(ask: Ask) -> dict[str, Any]:
    names = ("host", "folders", "network", "enforcement", "python")
    return {name: ask(name) for name in names}


def _torch(ask: Ask) -> dict[str, Any]:
    ask("pair", AHEAD)
    gpus = ask("gpus")  # before steps on them hold some of their memory
    torch = ask("torch_build")
    if torch is None or torch.fault:
        return {"gpus": gpus, "torch": torch}
    devices = ["cpu", *(f"cuda:{index}" for index in range(len(torch.devices)))]
    steps: list[Step | None] = [ask("step", device) for device in devices]
    found = tuple(step for step in steps if step is not None)
    return {"gpus": gpus, "torch": torch, "steps": found, "pair": ask("pair")}


_LANES = (_system, _torch)

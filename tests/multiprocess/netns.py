"""Machines as network namespaces: each has its own interfaces and addresses, and nothing but a cable to
the other. What leads to the right machine only because both are this one, fails here.

It needs root, `ip` (Debian: iproute2), and a kernel that lets namespaces be made.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_SECONDS = 60.0
_count = itertools.count()


@dataclass(frozen=True)
class Machine:
    """A namespace: its name, its address, the interface that has it."""

    name: str
    address: str
    interface: str

    def command(self, *arguments: str) -> list[str]:
        """A command line that runs `arguments` on this machine."""
        return ["ip", "netns", "exec", self.name, *arguments]


def why_not() -> str | None:
    """Why no namespaces can be made here, or None if they can."""
    if shutil.which("ip") is None:
        return "ip is not installed (Debian: iproute2)"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    probe = f"anybatch-probe-{os.getpid()}"
    made = _ip("netns", "add", probe, check=False)
    if made.returncode:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    _ip("netns", "delete", probe)
    return None


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two machines, joined by a cable, in a network of their own. Gone afterwards."""
    number = next(_count)
    key = f"{os.getpid()}-{number}"
    # The host does not see these addresses, so that they need not differ from test to test.
    machines = tuple(
        Machine(f"anybatch-{key}-{i}", f"10.77.0.{i}", f"ab{os.getpid() % 10**6}n{number}{i}")
        for i in (1, 2)
    )
    first, second = machines
    try:
        for machine in machines:
            _ip("netns", "add", machine.name)
        _ip(
            *("link", "add", first.interface, "netns", first.name, "type", "veth"),
            *("peer", "name", second.interface, "netns", second.name),
        )
        for machine in machines:
            inside = ("-n", machine.name)
            _ip(*inside, "address", "add", f"{machine.address}/24", "dev", machine.interface)
            _ip(*inside, "link", "set", machine.interface, "up")
            _ip(*inside, "link", "set", "lo", "up")
        yield first, second
    finally:
        for machine in machines:
            _ip("netns", "delete", machine.name, check=False)


def _ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, timeout=_SECONDS, check=check
    )


def slow_down(machine: Machine, rate_mbit: int) -> None:
    """Let no more than `rate_mbit` out of `machine`, by `tc`, which comes with `ip` (token bucket)."""
    subprocess.run(
        machine.command(
            *("tc", "qdisc", "add", "dev", machine.interface, "root", "tbf"),
            *("rate", f"{rate_mbit}mbit", "burst", "512kb", "latency", "100ms"),
        ),
        timeout=_SECONDS,
        check=True,
    )


def cut(machine: Machine) -> None:
    """Pull the cable: nothing goes in or out any more, and nobody is told."""
    _ip("-n", machine.name, "link", "set", machine.interface, "down")

"""The janitor: a small process that outlives an agent which is killed, and clears up after it.

Nothing that an agent does on its way out helps against SIGKILL. Its ranks then lose their parent and
Linux ends them, but neither the processes that they have started nor the folder with what was handed
to them. The janitor holds the other end of a pipe. If the pipe breaks without a word, it ends the
process groups of all ranks and deletes the folders. Run as a file, without site packages.

    python -I -S orphan_cleanup.py FOLDER ...

Ranks sign in to the first folder.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time

DONE = b"."
"""What the agent writes when all its ranks have ended: there is nothing to clear up."""

_CHECK_SECONDS = 2.0
_ROUNDS, _PAUSE_SECONDS = 10, 0.1


def main() -> None:
    """Wait for the agent's word or its end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    folders, agent = sys.argv[1:], os.getppid()
    while True:
        readable, _, _ = select.select([0], [], [], _CHECK_SECONDS)
        if readable:
            word = os.read(0, 1)
            break
        if os.getppid() != agent:  # a process that the agent forked holds the pipe open
            word = b""
            break
    if word != DONE:
        end_ranks(folders[0])
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def end_ranks(folder: str) -> None:
    """Kill the process groups of the ranks that have signed in to `folder`, and of those that sign in
    at the last moment."""
    for _ in range(_ROUNDS):
        for pid, started in signed_in(folder).values():
            if start_time(pid) in (started, None):
                kill_group(pid)
        time.sleep(_PAUSE_SECONDS)


def signed_in(folder: str) -> dict[tuple[int, int], tuple[int, int | None]]:
    """Process id and start time of each rank, by (attempt, local rank)."""
    ranks: dict[tuple[int, int], tuple[int, int | None]] = {}
    try:
        names = os.listdir(folder)
    except OSError:
        return ranks
    for name in names:
        stem, _, suffix = name.rpartition(".")
        if suffix != "pid":
            continue
        attempt, _, local_rank = stem.partition("-")
        with open(os.path.join(folder, name), encoding="ascii") as file:
            pid, started = file.read().split()
        ranks[int(attempt), int(local_rank)] = int(pid), int(started) if int(started) else None
    return ranks


def start_time(pid: int) -> int | None:
    """When a process was started, in ticks since the machine was, or None if it is gone or the system
    does not tell. Tells a process from a later one with the same number."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def kill_group(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to the process group of `pid`, if there still is one."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return


if __name__ == "__main__":
    main()

"""Ranks watched for their end, which is noted when it happens.

A process that asks every tenth of a second finds that one rank's end has ended others, and no longer
knows which was first. Here the kernel wakes it (Linux), or it asks more often (elsewhere).
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Mapping

_POLL_SECONDS = 0.05


class Watch:
    """The processes of the ranks of this machine, in one attempt.

    Attributes:
        processes: by local rank.
        ended: when each that has ended did, in nanoseconds of the monotonic clock.
    """

    def __init__(self, processes: Mapping[int, subprocess.Popen[bytes]]) -> None:
        self.processes: dict[int, subprocess.Popen[bytes]] = dict(processes)
        self.ended: dict[int, int] = {}
        self._poll = select.poll() if hasattr(os, "pidfd_open") else None
        self._open: dict[int, int] = {}
        for local, process in self.processes.items():
            if self._poll is None:
                continue
            try:
                descriptor = os.pidfd_open(process.pid)
            except OSError:  # it has ended, and was asked how
                self._note(local)
                continue
            self._poll.register(descriptor, select.POLLIN)
            self._open[descriptor] = local

    def wait(self, seconds: float) -> None:
        """Return when a rank has ended, or after `seconds`; at once if all have."""
        if self._poll is None:
            time.sleep(min(seconds, _POLL_SECONDS))
            for local in self.processes.keys() - self.ended.keys():
                if self.processes[local].poll() is not None:
                    self._note(local)
            return
        for descriptor, _ in self._poll.poll(1000 * seconds):
            self._poll.unregister(descriptor)
            os.close(descriptor)
            self._note(self._open.pop(descriptor))

    def code(self, local: int) -> int | None:
        """The exit code of a rank, negative for a signal; None while it runs."""
        return self.processes[local].poll()

    def close(self) -> None:
        """Watch no longer."""
        for descriptor in self._open:
            os.close(descriptor)
        self._open.clear()

    def _note(self, local: int) -> None:
        self.ended[local] = time.monotonic_ns()

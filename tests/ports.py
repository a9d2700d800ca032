"""Ports for tests that have to name one before anybody listens there.

A port that the system gives out, and that is let go again, may be given to any other process before it
is used: each connection of each rank takes one of the same range. So these are taken from below that
range, and each worker of pytest has a part of them.
"""

from __future__ import annotations

import itertools
import os
import socket

_FIRST, _LAST = 20_000, 32_000
_PER_WORKER = 400

_count = itertools.count()


def free_port() -> int:
    """A port of this machine where nobody listens, and which no other test is given."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    # Another run on the same machine begins elsewhere.
    run = int(os.environ.get("PYTEST_XDIST_TESTRUNUID", "0")[:6] or "0", 16) or os.getpid()
    first = run * 7919 + int(worker) * _PER_WORKER
    for _ in range(_PER_WORKER):
        port = _FIRST + (first + next(_count)) % (_LAST - _FIRST)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"none of {_PER_WORKER} ports is free")

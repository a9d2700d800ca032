"""How a rank ends from a thread that is not its main one.

A rank whose main thread hangs, perhaps inside C code, raises nothing and cleans up nothing: nobody can
make it. What can be done from another thread is to leave the word that the rank would have left, to
end what it has started, and to end the process under it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import NoReturn

import psutil

from anybatch.errors import AnybatchError, PeerLost
from anybatch.launch import first_failure

_PRINT_SECONDS = 2.0
"""That printing may take: what reads standard error may hang as well."""

_write: Callable[[AnybatchError], None] | None = None


def prepare(write: Callable[[AnybatchError], None]) -> None:
    """`write` leaves word of an error for the agent of this rank."""
    global _write
    _write = write


def leave(error: AnybatchError) -> NoReturn:
    """End this process with the status of `error`, having told it to the agent and to standard error;
    that another rank is lost, to the agent alone, if there is one, which says so to people. The
    processes that it has started end first."""
    try:
        first_failure.note(error)
        if _write is None or type(error) is not PeerLost:
            _print(error)
        if _write is not None:
            _write(error)  # last: from then on the agent takes it for told
        for child in psutil.Process().children(recursive=True):
            child.kill()
    except (OSError, psutil.Error):
        pass  # the process ends all the same
    finally:
        os._exit(error.exit_status)


def _print(error: AnybatchError) -> None:
    told = f"anybatch: {error}\n".encode(errors="replace")
    # Not by `sys.stderr`: the main thread may hold its lock.
    printing = threading.Thread(target=os.write, args=(2, told), daemon=True)
    printing.start()
    printing.join(_PRINT_SECONDS)

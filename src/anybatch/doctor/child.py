"""The process in which probes look: it answers one after the other, and may hang or crash.

    parent                                   child
    ["step", "cuda:0"]  -- standard input -->  anybatch.doctor.probes.step.look("cuda:0")
                        <- standard output --  (True, Step(...)), pickled

What libraries print goes to standard error.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import sys
from importlib import import_module
from typing import Any


def answer(probe: str, *arguments: str) -> tuple[bool, Any]:
    """Whether the probe came to its end, and what it saw, or of what it failed."""
    try:
        return True, import_module(f"anybatch.doctor.probes.{probe}").look(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a broken library may raise anything
        lines = str(error).strip().splitlines()
        return False, f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _main() -> None:
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin.buffer:
        seconds, probe, *arguments = json.loads(line)
        # So that nothing is left where the parent is killed while this hangs.
        with contextlib.suppress(RuntimeError):
            faulthandler.dump_traceback_later(seconds, exit=True)
        reply = answer(probe, *arguments)
        faulthandler.cancel_dump_traceback_later()
        pickle.dump(reply, replies)
        replies.flush()


if __name__ == "__main__":
    _main()

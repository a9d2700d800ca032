"""Asking probes in a process of their own, each with a deadline: a broken driver hangs or kills that
process, and not this one. The next question starts another."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from typing import IO, Any

from anybatch.threads import begin

_GRACE_SECONDS = 2.0
"""A process that a driver holds in the kernel does not even end when it is killed."""

_LONGEST_WORDS = 300


class Unanswered(Exception):
    """A probe gave no answer; the message says why."""


class Apart:
    """A process that answers one probe after the other; started when it is first asked."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._errors: IO[bytes] | None = None
        self._closed = False
        self._lock = threading.Lock()

    def ask(self, probe: str, *arguments: str, seconds: float) -> Any:
        """What the probe saw. Raises `Unanswered` if it failed, crashed or was not done in time."""
        begun = time.monotonic()
        try:
            process = self._start()
            assert process.stdin is not None
            process.stdin.write(json.dumps([seconds, probe, *arguments]).encode() + b"\n")
            process.stdin.flush()
        except (OSError, RuntimeError, MemoryError) as error:
            self._end()
            raise Unanswered(f"no process could be started to look ({error})") from None
        try:
            reply = self._replies.get(timeout=seconds + _GRACE_SECONDS)
        except queue.Empty:
            reply = None
        if reply is None:
            status, words = self._end()
            if time.monotonic() - begun >= seconds:
                raise Unanswered(f"no answer came within {seconds:g} s")
            raise Unanswered(f"the process that looked {_ended(status)}{words}")
        is_seen, value = reply
        if not is_seen:
            raise Unanswered(value)
        return value

    def close(self) -> None:
        """End it, from whichever thread; whoever waits for an answer gets none."""
        with self._lock:
            self._closed = True
        self._end(wait_seconds=0.0)

    def _start(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise RuntimeError("stopped")
            if self._process is not None:
                return self._process
            try:
                self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in _end)
            except OSError:  # no folder for it, which is told elsewhere
                self._errors = None
            self._replies = queue.SimpleQueue()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "anybatch.doctor.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors or subprocess.DEVNULL,
                start_new_session=True,
            )
            assert self._process.stdout is not None
            if begin(partial(_read, self._process.stdout, self._replies)) is None:
                raise RuntimeError("can't start new thread")
            return self._process

    def _end(self, wait_seconds: float = 0.1) -> tuple[int | None, str]:
        """Kill it with what it has started. How it ended, and its last words.

        `wait_seconds`: for it to end by itself, if it is about to, which tells more."""
        with self._lock:
            process, errors = self._process, self._errors
            self._process = self._errors = None
        if process is None:
            return None, ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_seconds)
        _kill(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        words = ""
        if errors is not None:
            words = _last_line(errors)
            errors.close()
        return process.returncode, words


def _read(stream: IO[bytes], replies: queue.SimpleQueue[Any]) -> None:
    """Hand on what comes, and None when nothing will come any more."""
    with stream:
        while True:
            try:
                replies.put(pickle.load(stream))
            except Exception:  # the end, or half an answer
                replies.put(None)
                return


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def _ended(status: int | None) -> str:
    if status is None:
        return "does not end"
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    text = errors.read().decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f" ({lines[-1][:_LONGEST_WORDS]})" if lines else ""

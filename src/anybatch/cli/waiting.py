"""Waiting: a line on standard error that says what is being done, where somebody watches."""

from __future__ import annotations

import sys
from shutil import get_terminal_size
from typing import Any, TextIO


class Waiting:
    """Shows what it was last called with, until it is left. Files and pipes get nothing."""

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self._what = what
        self._stream = stream or sys.stderr
        self._shows = self._stream.isatty()

    def __enter__(self) -> Waiting:
        self("")
        return self

    def __call__(self, now: str) -> None:
        """From now on this is being done."""
        text = f"{self._what} {now}"
        self._write(text[: get_terminal_size().columns - 1].rstrip())

    def __exit__(self, *error: Any) -> None:
        self._write("")

    def _write(self, text: str) -> None:
        if self._shows:
            self._stream.write(f"\r\x1b[K{text}")  # over what is there
            self._stream.flush()

"""Waiting: a status line on standard error, shown only on a terminal."""

from __future__ import annotations

import sys
from shutil import get_terminal_size
from typing import Any, TextIO


class Waiting:
    """Context manager that shows the text of its last call. Nothing is written to files and pipes."""

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self._what = what
        self._stream = stream or sys.stderr
        self._shows = self._stream is not None and self._stream.isatty()  # None in a daemon

    def __enter__(self) -> Waiting:
        self("")
        return self

    def __call__(self, now: str) -> None:
        """Show `now` as the current activity."""
        text = f"{self._what} {now}"
        self._write(text[: get_terminal_size().columns - 1].rstrip())

    def __exit__(self, *error: Any) -> None:
        self._write("")

    def _write(self, text: str) -> None:
        if self._shows:
            self._stream.write(f"\r\x1b[K{text}")  # overwrites the current line
            self._stream.flush()

"""Where the threads of this process stand: whether in a wait for other ranks, and shown to people."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from textwrap import indent
from types import FrameType

_WAITING_IN = ("torch.distributed", "anybatch.parallel")

_OWN = ("anybatch-watchdog", "anybatch-board")


def waits_for_others(threads: Sequence[int]) -> bool:
    """Whether one of these threads of this process stands in a collective. A backward pass on a GPU
    runs in a thread of autograd's own, while the one that began it waits."""
    with _frames() as frames:
        modules = [_module(frames.get(thread)) for thread in threads]
        if any(module.startswith("torch.autograd") for module in modules):
            modules += map(_module, frames.values())
    return any(module.startswith(_WAITING_IN) for module in modules)


@contextmanager
def _frames() -> Iterator[dict[int, FrameType]]:
    """The innermost frame of every thread. They are let go at the end: this thread's own is among them
    and would hold them all, in a cycle, with the tensors of the pass that they were in."""
    frames = sys._current_frames()
    try:
        yield frames
    finally:
        frames.clear()


def _module(frame: FrameType | None) -> str:
    return str(frame.f_globals.get("__name__", "")) if frame else ""


def stacks(threads: Sequence[int]) -> str:
    """The stacks of `threads`, and then those of the other threads that run Python code, indented."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    rest = [
        ident
        for ident, name in names.items()
        if ident not in threads and ident != threading.get_ident() and name not in _OWN
    ]
    lines: list[str] = []
    with _frames() as frames:
        for ident in (*threads, *rest):
            if ident in frames:
                lines.append(f"thread {names.get(ident, ident)}, most recent call last:\n")
                lines += traceback.format_stack(frames[ident])
    return indent("".join(lines).rstrip(), "  ")

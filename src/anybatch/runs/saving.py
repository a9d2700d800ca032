"""When a run saves checkpoints, and how it is stopped by a signal.

All ranks write a checkpoint after the same step, so all of them have to know the reason for it. What
only one rank knows, it communicates in the vote of the next step (`Wish`).

    every N steps                  known to all ranks
    every N minutes                requested by rank 0
    the best evaluation so far     known to all ranks
    SIGTERM, SIGINT, SIGUSR1       requested by the ranks that receive it; then all stop
    an error that ends the run     known to all ranks, if all raise it at the same point
    the end                        known to all ranks
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import final

from anybatch.errors import InputError, Stopped, setting, worded
from anybatch.events import StepDone
from anybatch.launch import find
from anybatch.parallel import Wish
from anybatch.process import early_stop_signal
from anybatch.process.interrupts import Handler, handle
from anybatch.runs.session import Session
from anybatch.units import parse_seconds

DEFAULT_EVERY = "10min"


@dataclass(frozen=True, slots=True)
class Every:
    """Interval between checkpoints, in steps or in seconds. If neither is set, the run saves only when
    it has to stop, and at its end."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, value: int | str | None) -> Every:
        """Parses `500` or `"500"` (steps), `"10min"` (time), and None or `"never"`. Raises
        `InputError`."""
        name = "checkpoint_every"
        if value is None or value == "never":
            return cls()
        if isinstance(value, str) and not value.strip().isdecimal():
            return cls(seconds=parse_seconds(value, name))
        if isinstance(value, bool) or not isinstance(value, int | str) or int(value) < 1:
            raise InputError(
                f"{setting(name)} is {value!r}: give a number of steps of at least 1, a time such as"
                " '10min', or 'never'."
            )
        return cls(steps=int(value))


@contextmanager
def kept(session: Session, every: Every, out: Path | None = None) -> Iterator[Iterator[StepDone]]:
    """Context manager that yields an iterator over the remaining steps of `session`, which also saves
    checkpoints when they are due, after the same steps on every rank.

    Inside the block, a termination signal stops the run: `Stopped` is raised after the current step,
    with everything saved if possible. On exit, either at the end or on an error that all ranks raised
    at the same point, unsaved progress is saved. If the session has no checkpoint folder, nothing is
    saved and signals are not handled.

    Args:
        session: open session, before its first step.
        every: interval between checkpoints.
        out: run folder, named in messages.
    """
    if not session.keeps:
        yield session.steps()
        return
    keeper = _Keeper(session, every, out)
    with _stopping(session):
        try:
            yield keeper.steps()
        except Exception:
            if session.failed_together:
                keeper.finish()
            raise
        keeper.finish()


@final
class _Keeper:
    def __init__(self, session: Session, every: Every, out: Path | None) -> None:
        self._session = session
        self._every = every
        self._out = out
        self._saved_step = session.num_steps  # at the beginning there is nothing to save
        self._saved_time = time.monotonic()
        self._least_loss = math.inf

    def steps(self) -> Iterator[StepDone]:
        """Iterates over the steps, and saves or stops after each one if that is due."""
        for event in self._session.steps():
            self._after(event)
            yield event

    def finish(self) -> None:
        """Save unsaved progress, and wait until it is written."""
        if self._session.num_steps != self._saved_step:
            self._save(wait=True)
        self._session.saved(wait=True)

    def _after(self, event: StepDone) -> None:
        session, every = self._session, self._every
        session.saved()
        if Wish.STOP in session.wished:
            self.finish()
            has_failed = session.last_save_failed()
            what = ", which could not be saved" if has_failed else "; everything is saved"
            again = "resume it to go on"
            if self._out is not None:
                python = f"out={str(self._out)!r} and resume=True"
                again = f"{worded(python, f'--out {self._out} --resume')} goes on"
            if has_failed:
                again += ", from the newest checkpoint that is complete"
            raise Stopped(f"stopped as asked after step {event.step}{what}: {again}.")
        # Skipped steps emit no event, so a multiple of `every.steps` may be passed.
        due = every.steps and session.num_steps // every.steps > self._saved_step // every.steps
        if due or Wish.SAVE in session.wished or self._is_best():
            self._save()
        passed = time.monotonic() - self._saved_time
        if session.is_leader and every.seconds and passed >= every.seconds:
            session.wish |= Wish.SAVE

    def _save(self, wait: bool = False) -> None:
        self._session.wish &= ~Wish.SAVE
        self._session.save(wait)
        self._saved_step, self._saved_time = self._session.num_steps, time.monotonic()

    def _is_best(self) -> bool:
        last = self._session.last_evaluation
        if last is None or not self._session.evaluated_now or not last.loss < self._least_loss:
            return False
        self._least_loss = last.loss
        return True


@contextmanager
def _stopping(session: Session) -> Iterator[None]:
    """Context manager in which a termination signal requests all ranks of `session` to stop after the
    current step. The previous handlers are restored on the first signal, so a second one ends the
    process immediately.

    Handles SIGTERM and SIGINT, and SIGUSR1 (which Slurm is often configured to send as a warning) and
    SIGHUP unless they have another handler. Signal handlers can be set only in the main thread;
    in other threads, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    early_stop_signal.over()
    session.stops = False
    before: dict[int, Handler] = {}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        found = signal.getsignal(number)
        if number in (signal.SIGTERM, signal.SIGINT) or found is signal.SIG_DFL:
            before[number] = found

    def ask(number: int, frame: FrameType | None) -> None:
        session.stops = True  # nothing else writes it meanwhile, so the request cannot be lost
        put_back()

    def come_late(number: int, frame: FrameType | None) -> None:
        put_back()

    def put_back() -> None:
        for number, handler in before.items():
            handle(number, handler)

    for number in before:
        signal.signal(number, ask)
    comes_late = False
    try:
        yield
    except Stopped:
        # If another rank requested the stop, the signal that it received may still reach this rank,
        # and must not kill it while it closes.
        comes_late = find() is not None and not session.stops
        raise
    finally:
        put_back()
        for number in before.keys() - {signal.SIGINT} if comes_late else ():
            signal.signal(number, come_late)

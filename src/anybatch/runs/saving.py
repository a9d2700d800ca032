"""When a run saves, and how it is asked to stop.

A checkpoint is written by all ranks after the same step, so every reason for one has to be known to all
of them. Some are by themselves: the number of the step, the loss of an evaluation, an error that all
met together. A clock and a signal are known to one rank, which tells the others with the next step's
vote (`Wish`).

    every so many steps            all know
    every so many minutes          rank 0 wishes
    the best evaluation so far     all know
    SIGTERM, SIGINT, SIGUSR1       the ranks that were sent it wish; then all stop
    an error that ends the run     all know, if they met it together
    the end                        all know
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

from anybatch.errors import InputError, Stopped
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
    """How often a run saves by itself. Neither: only where it has to stop, and at its end."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, value: int | str | None) -> Every:
        """`500` or `"500"`: steps; `"10min"`: time; None or `"never"`. Raises `InputError`."""
        name = "checkpoint_every"
        if value is None or value == "never":
            return cls()
        if isinstance(value, str) and not value.strip().isdecimal():
            return cls(seconds=parse_seconds(value, name))
        if isinstance(value, bool) or not isinstance(value, int | str) or int(value) < 1:
            raise InputError(
                f"{name} is {value!r}: give a number of steps of at least 1, a time such as '10min', or"
                " 'never'."
            )
        return cls(steps=int(value))


@contextmanager
def kept(session: Session, every: Every, out: Path | None = None) -> Iterator[Iterator[StepDone]]:
    """The steps of `session` that are left, saved at the right moments. Every rank has the same.

    Within the block a signal to end stops the run: `Stopped` is raised after the step, with everything
    saved if it can be. When the block is left, by its end or by an error that all ranks have met
    together, what is not saved yet is. A session without a folder for checkpoints has its steps alone.

    Args:
        session: open, before its first step.
        every: how often it saves by itself.
        out: folder of the run, which a message names.
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
        self._saved_step = session.num_steps  # nothing is lost at the beginning
        self._saved_time = time.monotonic()
        self._least_loss = math.inf

    def steps(self) -> Iterator[StepDone]:
        """The steps, each followed by what is due after it."""
        for event in self._session.steps():
            self._after(event)
            yield event

    def finish(self) -> None:
        """Save what is not saved yet, and wait for it."""
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
                again = f"--out {self._out} --resume goes on (in Python, out and resume=True)"
            if has_failed:
                again += ", from the newest checkpoint that is complete"
            raise Stopped(
                f"the run was asked to stop, and has after step {event.step}{what}: {again}."
            )
        # Steps that were left out whole are passed without an event.
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
    """Within the block a signal to end asks all ranks of `session` to stop after the step. A second one
    does what it would without this: the process ends at once.

    SIGTERM, SIGINT, and SIGUSR1 (by which Slurm is often told to warn) and SIGHUP where nothing else
    handles them. Only the main thread can be told of signals; elsewhere nothing is changed.
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
        session.stops = True  # written by nobody else meanwhile, so it cannot be lost
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
        # By what the other ranks said. The signal that they were sent is on its way to this one, which
        # is not to die of it while it closes.
        comes_late = find() is not None and not session.stops
        raise
    finally:
        put_back()
        for number in before.keys() - {signal.SIGINT} if comes_late else ():
            signal.signal(number, come_late)

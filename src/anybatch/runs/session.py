"""Session: a task running under a plan, one global step at a time. Owning the loop:

    with ab.Session(task, plan) as session:
        for step in session.steps():
            if step.step % 100 == 0:
                print(session.evaluate().metrics)

With several ranks every rank runs this same code, as under torchrun; steps and evaluations are done
by all of them together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from anybatch.engine import Watchdog, at_work, checked_seconds
from anybatch.engine.process import use_one_heap
from anybatch.errors import InputError, StopTraining
from anybatch.events import Evaluated, Event, Resumed, RunEnded, RunStarted, Sink, StepDone
from anybatch.launch import find, join, leave, open_board
from anybatch.machine import Machine
from anybatch.oom import is_limited
from anybatch.parallel import Group, Wish, group_of
from anybatch.plans import Plan
from anybatch.process.control_group import cores_of_group
from anybatch.process.threads import num_cores
from anybatch.rank import Rank, can_rehearse
from anybatch.state import Checkpoints
from anybatch.task import Task


class Session:
    """A task running under a plan. A context manager: the memory budget holds inside.

    Args:
        task: what to train.
        plan: how; made for this task.
        sinks: readers of the events; those of rank 0 are called. One may raise `StopTraining`: then
            one more step is done, so that all ranks know of it, and training is over.
        checkpoints: folder for `save` and `resume`, which all ranks see; None: nothing is saved.
        keep: so many checkpoints stay, the last ones, and the best evaluated one beside them.
        stall_seconds: without progress, after which a rank counts as stuck: it is named with its stack,
            and ended if it was started as one of several. None: 300 s, or 20 times the longest that
            it ever stood still before it went on, and half an hour for what is done for the first
            time.
        trial: before the first step, try the plan and its rivals on the samples of that step, and
            follow the fastest, if that takes at most a fiftieth of the run. Else the plan is followed
            as it is. On one device, or where each rank has the whole model.

    Attributes:
        plan: as it is now: leaner than the one given if memory ran out.

    Raises (on entering) `InputError`: the plan was made for another task or another number of ranks, or
    the model or optimizer cannot be used.
    """

    def __init__(
        self,
        task: Task,
        plan: Plan,
        sinks: Sequence[Sink] = (),
        checkpoints: str | Path | None = None,
        keep: int = 3,
        stall_seconds: float | None = None,
        trial: bool = False,
    ) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise InputError(f"keep is {keep!r}: give a whole number of at least 1.")
        self._folder = None if checkpoints is None else Path(checkpoints)
        self._keep = keep
        self._task = task
        self._given = plan
        self._trial = trial
        self._sinks = tuple(sinks)
        self._stall_seconds = checked_seconds(stall_seconds)
        self._running: Rank | None = None
        self._model: nn.Module | None = None
        self._last = plan

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self._given.parallel != "single":
                stack.enter_context(joined())
            group, name = group_of(self._given)
            Machine.here(device=name)  # or says that there is no such device
            device = torch.device(name)
            self._leader = group.rank == 0
            self._watchdog = self._watched(stack, group.rank, group.size)
            pulse = self._watchdog.pulse(group.rank)
            checkpoints = self._open_checkpoints(group)
            with at_work(), pulse.at_work("set-up"):
                rank = Rank(
                    self._task,
                    self._given,
                    group,
                    device,
                    self.emit,
                    pulse,
                    checkpoints,
                    self._trial,
                )
            self._running = rank
            self._model = rank.model
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        rank = self._rank
        self._last = rank.plan
        self._running = None
        with self._stack:
            rank.close()

    @property
    def model(self) -> nn.Module:
        """The user's module, trained so far."""
        if self._model is None:
            self._rank  # noqa: B018 - raises
        assert self._model is not None
        return self._model

    @property
    def plan(self) -> Plan:
        """The plan that is followed now, or was at the end."""
        return self._running.plan if self._running else self._last

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0: the one that speaks to people and writes files."""
        return self._leader

    @property
    def num_steps(self) -> int:
        """Global steps that are committed, those before a resumption included."""
        return self._rank.num_steps

    @property
    def keeps(self) -> bool:
        """Whether it has a folder for checkpoints."""
        return self._folder is not None

    @property
    def total_steps(self) -> int | None:
        """Global steps in all; None for a stream of unknown length."""
        return self._rank.total_steps

    @property
    def evaluated_now(self) -> bool:
        """Whether the model was evaluated since the last step."""
        return self._rank.evaluated_now

    @property
    def last_evaluation(self) -> Evaluated | None:
        """The last evaluation, or None if there was none."""
        return self._rank.last_evaluation

    @property
    def peak_bytes(self) -> int:
        """Most memory that training has used so far, on this rank's device, above the baseline."""
        return self._rank.peak_bytes

    @property
    def wish(self) -> Wish:
        """What this rank wishes all to do, `Wish.SAVE` or `Wish.STOP`. To be set at any time; the next
        step's vote carries it to all ranks, and `wished` tells it there. It stays until it is taken
        back."""
        return self._rank.wish

    @wish.setter
    def wish(self, wish: Wish) -> None:
        self._rank.wish = wish

    @property
    def stops(self) -> bool:
        """Whether this rank wishes to stop, which `wished` tells as `Wish.STOP`. For signal handlers:
        what one adds to `wish` is lost if it comes while the loop, too, changes `wish`."""
        return self._rank.stops

    @stops.setter
    def stops(self, stops: bool) -> None:
        self._rank.stops = stops

    @property
    def wished(self) -> Wish:
        """What any rank wished before the last step, the same on all ranks. To save and to stop is for
        whoever owns the loop."""
        return self._rank.wished

    @property
    def failed_together(self) -> bool:
        """Whether the error that ended `steps` was met by all ranks at the same place: then they can
        still save."""
        return self._rank.failed_together

    def steps(self) -> Iterator[StepDone]:
        """Do the global steps that are left, one each time the next value is asked for.

        Raises:
            NoPlanFits: memory ran out under the leanest plan.
            LossError, DataError: the loss or the data cannot be learned from. The model is then as
                the last committed step left it.
            PeerFailed, PeerLost: another rank raised an error, or is gone.
        """
        self._rank.begin()
        while Wish.END not in self._rank.wished and (event := self._rank.step()) is not None:
            for stalled in self._watchdog.stalled():
                self.emit(stalled)
            yield event

    def rehearsed(self, is_fixed: bool = False) -> Plan | None:
        """The plan that passes over the first samples confirm on this device, with the peak and the
        time that they were measured to take. All ranks call it, before the first step; nothing of the
        passes remains.

        Args:
            is_fixed: measure the choice of the plan, and try no other one.

        Returns None if there are no samples, or if a fixed choice does not fit. Raises `NoPlanFits` if
        nothing fits the budget, `InputError` if ranks cannot run passes by themselves (of a divided
        model), and what the data, the model or the loss raises.
        """
        if not can_rehearse(self._given):
            raise InputError(
                "a rehearsal is for ranks that hold the whole model each and meet once per step."
            )
        return self._rank.rehearsed(is_fixed)

    def save(self, wait: bool = False) -> None:
        """Save everything that outlives a step. All ranks call it, after the same step. The bytes are
        written while training goes on, where there is memory for a copy of them; `wait` for them.

        Whether it worked is told by an event, `CheckpointSaved` or `CheckpointFailed`: a full disk does
        not end training. Raises `InputError` if the session has no folder for checkpoints.
        """
        self._check_folder()
        self._rank.save(at_once=wait)
        self._rank.saved(wait)

    def saved(self, wait: bool = False) -> None:
        """Tell, by events, what has become of the checkpoints begun so far; `wait` for those that are
        still being written."""
        self._rank.saved(wait)

    def resume(self) -> bool:
        """Go on from the newest intact checkpoint, if there is one: with the parameters, the optimizer,
        the loss scale, the schedule, the samples and the random state that come next, on as many
        ranks as there are now. All ranks call it, before the first step.

        Returns whether there was one. Raises `InputError` if it is of another task or model, or those
        that are there are damaged.
        """
        event = self.resumed()
        if event is not None:
            self.emit(event)
        return event is not None

    def resumed(self) -> Resumed | None:
        """As `resume`, and the event that tells of it; `train` emits it, after that which opens a
        run."""
        self._check_folder()
        return self._rank.resume()

    def take_checkpoint(self, step: int | None = None) -> Path:
        """Have the weights, and only these, of the newest intact checkpoint, or of the one of `step`,
        to evaluate or predict with. All ranks call it. Nothing in the folder is touched. Returns where
        the checkpoint lies.

        Raises `InputError` if there is none, it is of another model, or it is damaged.
        """
        self._check_folder()
        return self._rank.take_checkpoint(step)

    def take_weights(self, path: str | Path, step: int = 0, epoch: int = 0) -> None:
        """Have the weights in the file `path`, as `load_weights` reads it, to evaluate or predict with.
        All ranks call it. What the file holds beside them while it is read is not counted as memory of
        the run.

        Args:
            path: of the file.
            step, epoch: that the weights are of, which `evaluate` tells.

        Raises `InputError` if there is no such file, it is damaged, or it is for another model.
        """
        self._rank.take_weights(Path(path), step, epoch)

    def evaluate(self) -> Evaluated:
        """Evaluate on all held-out samples, each once, under the plan's own batch.

        Raises `InputError` if the task has none.
        """
        return self._rank.evaluate()

    def predict(
        self, data: Any, output: Callable[[nn.Module, Any], Any] | None = None
    ) -> Iterator[Any]:
        """What the model gives for `data`, batch after batch in order, on the host. Each rank predicts
        what it is asked for.

        Args:
            data: samples as the task's data sets give them.
            output: `(model, batch)` to tensors in any nesting; default `model(batch)`.

        Raises `NoPlanFits` if there is no room for a single sample.
        """
        yield from self._rank.predict(data, output or _call)

    def predict_all(self, data: Any, output: Callable[[nn.Module, Any], Any] | None = None) -> Any:
        """What the model gives for all of `data`, in its order, on the host of every rank: each rank
        predicts a part. All ranks call it. The loss of each held-out sample, say:

            session.predict_all(
                task.valid,
                lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
            )

        Args:
            data: samples as the task's data sets give them.
            output: `(model, batch)` to tensors with the samples on dim 0, or lists of them, in any
                nesting; default `model(batch)`.

        Returns what `output` would for one batch of all samples.

        Raises:
            NoPlanFits: there is no room for a single sample.
            InputError: the outputs cannot be joined.
            PeerFailed, PeerLost: another rank raised an error, or is gone.
        """
        return self._rank.predict_all(data, output or _call)

    def started(self) -> RunStarted:
        """The event that opens a run; `train` emits it."""
        return self._rank.started()

    def ended(self, seconds: float, finished: bool, reason: str = "") -> RunEnded:
        """The event that closes a run; `train` emits it. If `finished`, all ranks must call it."""
        return self._rank.ended(seconds, finished, reason)

    def to_be_evaluated(self) -> AbstractContextManager[None]:
        """Around what evaluates or saves `model` by itself, between two steps: an optimizer that has
        modes (a schedule-free one) is in evaluation mode, and with it the weights."""
        return self._rank.to_be_evaluated()

    def emit(self, event: Event) -> None:
        """Give `event` to all sinks, on rank 0. After one that raises `StopTraining` the others have it
        all the same."""
        if not self._leader:
            return
        for sink in self._sinks:
            try:
                sink(event)
            except StopTraining:
                if self._running is not None:
                    self._running.wish |= Wish.END

    def _watched(self, stack: ExitStack, rank: int, size: int) -> Watchdog:
        """A watchdog of this process, which ends it only if somebody waits for its end."""
        awaited = find() is not None
        # Threads that come and go would be taken for memory that training uses.
        counts = self._given.enforced and self._given.device == "cpu"
        watchdog = Watchdog(
            self._stall_seconds,
            open_board(rank, size),
            leave if awaited else None,
            last_resort=awaited and not counts,
        )
        return stack.enter_context(watchdog)

    def _open_checkpoints(self, group: Group) -> Checkpoints | None:
        if self._folder is None:
            return None
        return Checkpoints(self._folder, group, keep=self._keep)

    def _check_folder(self) -> None:
        if self._folder is None:
            raise InputError(
                "the session has no folder for checkpoints: make it with checkpoints=FOLDER."
            )

    @property
    def _rank(self) -> Rank:
        if self._running is None:
            raise InputError(
                "the session is not open: use it inside `with anybatch.Session(...) as session:`."
            )
        return self._running


@contextmanager
def joined() -> Iterator[None]:
    """Among the ranks, if this process was started as one of several; else as it is. A process group
    that is there already is left alone.

    Raises what `launch.find` and `launch.join` raise.
    """
    member = find()
    if member is None or member.world_size == 1:
        with _threads_of_group():
            yield
        return
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if is_limited():
        use_one_heap()  # before the network's library starts its threads; see `engine.headroom`
    with join(member, kind, timeout_seconds=RENDEZVOUS_SECONDS):
        yield


@contextmanager
def _threads_of_group() -> Iterator[None]:
    """No more threads for operations than the cores of the control group, unless the user has said how
    many: torch counts those of the machine, and more threads wait for each other."""
    before = torch.get_num_threads()
    if cores_of_group() is None or "OMP_NUM_THREADS" in os.environ or before <= num_cores():
        yield
        return
    torch.set_num_threads(num_cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)


RENDEZVOUS_SECONDS = 300.0
"""How long ranks wait for each other before the first step."""


def _call(model: nn.Module, batch: Any) -> Any:
    return model(batch)

"""Ray Train integration: trains a task inside a `TorchTrainer`, on any number of workers.

    from anybatch.integrations.ray import train

    def train_loop_per_worker(config):
        train(task(), memory="22GiB")

    TorchTrainer(train_loop_per_worker, scaling_config=ScalingConfig(num_workers=4)).fit()

Ray starts the workers, creates the process group and restarts workers after a failure. Checkpoints are
Ray's, in its storage. The number of workers may change in a restart; the global batch does not.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, final

from torch import nn

from anybatch.errors import InputError
from anybatch.events import CheckpointSaved, Evaluated, Event, Sink, StepDone
from anybatch.launch import find
from anybatch.parallel import Wish, exchange, leads
from anybatch.plans import Plan
from anybatch.runs.planning import plan as make_plan
from anybatch.runs.saving import DEFAULT_EVERY, Every
from anybatch.runs.session import Session
from anybatch.task import Task


def train(
    task: Task,
    memory: str | int | None = None,
    *,
    plan: Plan | None = None,
    checkpoint_every: int | str | None = DEFAULT_EVERY,
    folder: str | Path | None = None,
    sinks: Sequence[Sink] = (),
    **options: Any,
) -> nn.Module:
    """Train `task` to its end on all workers. Each worker must call this.

    Metrics are reported to Ray after each evaluation, with each checkpoint and at the end: `step`,
    `epoch`, `samples_seen` and `loss` of the last step, and `held_out_loss` and one `held_out_NAME` per
    metric of the last evaluation.

    Args:
        task: task to train.
        memory: budget per worker, see `anybatch.train`.
        plan: plan to follow instead of making one.
        checkpoint_every: see `anybatch.train`.
        folder: folder in which checkpoints are written before Ray copies them to its storage,
            accessible to all workers; None: a temporary folder, for workers on one machine.
        sinks: called with each event, on the worker of rank 0.
        options: options of `anybatch.plan`.

    Returns the trained module, in evaluation mode.

    Raises:
        InputError: this process is not a Ray Train worker, or there are workers on several machines and
            no folder.
        NoPlanFits, LossError, DataError, PeerFailed, PeerLost: see `Session.steps`. Ray restarts the
            workers according to its `FailureConfig`.
    """
    _imported()
    every = Every.parse(checkpoint_every)
    latest = _Latest()
    if plan is None:
        plan = make_plan(task, memory=memory, **options)
    with (
        _shared(folder) as checkpoints,
        Session(task, plan, [latest, *sinks], checkpoints, keep=1) as session,
    ):
        _resume(session, checkpoints)
        saver = _Saver(session, every, latest)
        for _done in session.steps():
            saver.after()
        is_saved = saver.saved_step == session.num_steps
        if task.valid is not None and not session.evaluated_now:
            session.evaluate()
            is_saved = False  # not with these metrics
        if not is_saved:
            saver.save()
    return session.model.eval()


@final
class _Latest:
    """Sink that keeps the latest metrics and checkpoint folder from the events of rank 0."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}
        self.folder: str | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone):
            values = ("step", "epoch", "samples_seen", "loss")
            self.metrics |= {name: getattr(event, name) for name in values}
        elif isinstance(event, Evaluated):
            held_out = {"loss": event.loss, **event.metrics}
            self.metrics |= {f"held_out_{name}": value for name, value in held_out.items()}
        elif isinstance(event, CheckpointSaved):
            self.folder = event.folder


@final
class _Saver:
    """Saves and reports, on all workers after the same step, since Ray's `report` waits for all of
    them."""

    def __init__(self, session: Session, every: Every, latest: _Latest) -> None:
        self._session, self._every, self._latest = session, every, latest
        self.saved_step, self._saved_time = session.num_steps, time.monotonic()

    def after(self) -> None:
        """Save or report after a step, if due."""
        session, every = self._session, self._every
        passed = session.num_steps - self.saved_step
        if Wish.SAVE in session.wished or (every.steps and passed >= every.steps):
            self.save()
        elif session.evaluated_now:
            self._report()
        if every.seconds and leads() and time.monotonic() - self._saved_time >= every.seconds:
            session.wish |= Wish.SAVE  # known to all workers after the next step

    def save(self) -> None:
        """Save a checkpoint and report it to Ray."""
        session, latest = self._session, self._latest
        session.wish &= ~Wish.SAVE
        session.save(wait=True)
        session.saved(wait=True)
        self.saved_step, self._saved_time = session.num_steps, time.monotonic()
        self._report(latest.folder)
        latest.folder = None

    def _report(self, folder: str | None = None) -> None:
        ray_train = _imported()
        # The parent, so that `resume` finds the checkpoint as a folder inside it.
        checkpoint = (
            ray_train.Checkpoint.from_directory(str(Path(folder).parent)) if folder else None
        )
        ray_train.report(dict(self._latest.metrics), checkpoint=checkpoint)


def _resume(session: Session, folder: Path) -> None:
    """Resume from Ray's checkpoint, if there is one."""
    checkpoint = _imported().get_checkpoint()
    if checkpoint is None:
        return
    if leads():
        checkpoint.to_directory(str(folder))
    exchange(None)  # the other workers wait for the copy
    session.resume()


@contextlib.contextmanager
def _shared(folder: str | Path | None) -> Iterator[Path]:
    """Context manager that yields a folder accessible to all workers: a new one in `folder`, which rank
    0 deletes at the end."""
    member = find()
    if folder is None and member is not None and member.local_world_size < member.world_size:
        raise InputError(
            f"the {member.world_size} workers are on several machines, and train(...) of"
            " anybatch.integrations.ray has no folder that all of them see: give it one on a shared"
            " disk, folder=..., in which checkpoints are made before Ray copies them."
        )
    with contextlib.ExitStack() as stack:
        made = ""
        if leads():
            inside = None if folder is None else str(folder)
            made = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="anybatch-ray-", dir=inside)
            )
        yield Path(exchange(made)[0])


def _imported() -> Any:
    """Returns the module `ray.train`. Raises `InputError` if it cannot be imported, or if this process
    is not a Ray Train worker."""
    try:
        ray_train: Any = import_module("ray.train")
    except ImportError as error:
        raise InputError(
            f"anybatch.integrations.ray needs the package ray, which cannot be imported ({error}):"
            " pip install 'ray[train]'."
        ) from None
    try:
        ray_train.get_context()
    except RuntimeError as error:
        raise InputError(
            "train(...) of anybatch.integrations.ray is called by a process that is no worker of Ray"
            f" Train ({error}): call it inside the train_loop_per_worker of a TorchTrainer."
        ) from None
    return ray_train

"""The task of a run that exists, made again for whoever evaluates it or exports its weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from anybatch.errors import InputError
from anybatch.recipes import resolve
from anybatch.report import PastRun
from anybatch.task import Grains, Task, check_task


def task_of(
    run: PastRun, task: Task | str | None = None, settings: Mapping[str, str] | None = None
) -> Task:
    """The task of `run`, with the global batch and the grains that it was run with.

    Args:
        run: its folder remembers what the task was loaded by.
        task: instead of that, a task or its name. The settings of the run are those of another function
            then, and left out, unless file and function are called the same.
        settings: arguments of the task's function, beside and in place of those of the run.

    Raises `InputError` if nothing tells where the task comes from, and what `resolve` raises.
    """
    if isinstance(task, Task):
        if settings:
            raise InputError(
                f"settings ({', '.join(settings)}) are given for a task that is made already: make it"
                " with them, or give its name."
            )
        return task
    if task is not None and not isinstance(task, str):
        check_task(task)
    name = task or run.source
    if not name:
        raise InputError(
            f"the run in {run.folder} does not tell where its task {run.task!r} comes from: name it"
            " with --task FILE.py[:function] or --task RECIPE, and its settings with -s (in Python,"
            " task=)."
        )
    given = {key.replace("-", "_"): value for key, value in (settings or {}).items()}
    before = run.settings if _is_called(name) == _is_called(run.source) else {}
    return _as_run(resolve(name, {**before, **given}), run)


def _is_called(name: str) -> str:
    """A task's name without the folders of its file, with its function."""
    last = os.path.basename(name)
    return f"{last}:task" if last.endswith(".py") else last


def _as_run(task: Task, run: PastRun) -> Task:
    """`task` of the size that it was run in, which may have been set beside its function."""
    identity = run.plan.task
    if task.global_batch != identity.global_batch:
        task = replace(task, global_batch=identity.global_batch)
    if identity.grain is None:
        return task
    return replace(task, reproducible=Grains(identity.grain, identity.num_parts or 1))


def checked_step(step: int | None) -> None:
    """Raises `InputError` if `step` is no number of a step."""
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise InputError(f"step is {step!r}: give the number of a step that was saved.")


def check_has_weights(run: PastRun) -> None:
    """Raises `InputError` if the run has no weights at all."""
    if not any(run.checkpoints.glob("step-*")):
        state = "has finished, and its weights are gone" if run.finished else "has not finished"
        raise InputError(
            f"the run in {run.folder} {state}, and it has no checkpoint: there are no weights in it."
            " Train on (--resume) until it has saved some."
        )

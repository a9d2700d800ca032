"""Reloading the task of an existing run, to evaluate the run or to export its weights.

A run folder may come from someone else, so the file that it names is not trusted: the file is executed
only if it is outside the folder, is not part of an installed package, and has the same checksum as the
file that trained the run. A file that the user names is executed without these checks.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from anybatch.batch_rule import as_text, read_rule
from anybatch.errors import InputError, as_setting, setting, worded
from anybatch.recipes import file_of, resolve, sha256_of
from anybatch.report import PastRun
from anybatch.task import Grains, Task, check_task


def task_of(
    run: PastRun, task: Task | str | None = None, settings: Mapping[str, str] | None = None
) -> Task:
    """Returns the task of `run`, with the global batch and the grains of the run. A `Task` that is
    passed as `task` is returned unchanged.

    Args:
        run: run whose folder records how its task was loaded.
        task: task, or its name, to use instead. The settings of the run are then ignored, since they
            belong to another function, unless file and function have the same names.
        settings: arguments of the task's function. They are added to those of the run and override
            them.

    Raises `InputError` if the origin of the task is not known or the file that the run names must not
    be executed, and what `resolve` raises.
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
            f" with {as_setting('task', 'FILE.py[:function]')} or as a recipe, and give its settings"
            f" ({worded('settings=', '-s')})."
        )
    if task is None:
        _check_file(run)
    given = {key.replace("-", "_"): value for key, value in (settings or {}).items()}
    before = run.settings if _is_called(name) == _is_called(run.source) else {}
    return _as_run(resolve(name, {**before, **given}), run)


def _check_file(run: PastRun) -> None:
    """Raises `InputError` if the run names a file that may be executed only if the user names it."""
    file = file_of(run.source)
    if file is None or not file.is_file():  # a recipe, or a missing file, which `resolve` reports
        return
    if file.is_relative_to(run.folder.resolve()):
        why = "lies in that folder, which may be somebody else's"
    elif any(file.is_relative_to(folder) for folder in _installed()):
        why = "is part of an installed package"
    elif not run.source_sha256:
        why = "may have changed since: the run has recorded no checksum of it"
    elif sha256_of(file) != run.source_sha256:
        why = "is not the one that trained it (its checksum differs)"
    else:
        return
    raise InputError(
        f"the run in {run.folder} names the file {str(file)!r} for its task, which {why}, so it is not"
        f" run: read it, and name it with {as_setting('task')}, if it is what you want."
    )


def _installed() -> list[Path]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    package = Path(__file__).resolve().parents[1]
    return [package, *(Path(sysconfig.get_path(name)).resolve() for name in names)]


def _is_called(name: str) -> str:
    """Returns a task's name without the folders of its file, and with its function."""
    last = os.path.basename(name)
    return f"{last}:task" if last.endswith(".py") else last


def _as_run(task: Task, run: PastRun) -> Task:
    """Returns `task` with the global batch and grains of `run`, which may have been set outside the
    task's function."""
    identity = run.plan.task
    size = identity.batch_rule or str(identity.global_batch)
    # `size` lacks the shape of a ramp and the lengths in tokens; the task's function has them.
    if as_text(task.global_batch) != size:
        task = replace(task, global_batch=read_rule(size))
    if identity.grain is None:
        return task
    return replace(task, reproducible=Grains(identity.grain, identity.num_parts or 1))


def checked_step(step: int | None) -> None:
    """Raises `InputError` if `step` is not a valid step number."""
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise InputError(
            f"{setting('step')} is {step!r}: give the number of a step that was saved."
        )


def check_has_weights(run: PastRun) -> None:
    """Raises `InputError` if the run has no weights at all."""
    if not any(run.checkpoints.glob("step-*")):
        state = "has finished, and its weights are gone" if run.finished else "has not finished"
        raise InputError(
            f"the run in {run.folder} {state}, and it has no checkpoint: there are no weights in it."
            f" Train on ({as_setting('resume', True)}) until it has saved some."
        )

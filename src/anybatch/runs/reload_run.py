"""The task of a run that exists, loaded again to evaluate it or to export its weights.

A run folder may come from somebody else, and what it names is not to be trusted: a file that it names
is run only if it lies outside the folder, is none of an installed package, and is the same, by its
checksum, as the one that trained the run. A file that the user names is run as it is.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from anybatch.batch_rule import as_text, read_rule
from anybatch.errors import InputError
from anybatch.recipes import file_of, resolve, sha256_of
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

    Raises `InputError` if nothing tells where the task comes from or the file that the run names is not
    to be run, and what `resolve` raises.
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
    if task is None:
        _check_file(run)
    given = {key.replace("-", "_"): value for key, value in (settings or {}).items()}
    before = run.settings if _is_called(name) == _is_called(run.source) else {}
    return _as_run(resolve(name, {**before, **given}), run)


def _check_file(run: PastRun) -> None:
    """Raises `InputError` if the run names a file that is not to be run unless the user names it."""
    file = file_of(run.source)
    if file is None or not file.is_file():  # a recipe; or `resolve` says that the file is gone
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
        " run: read it, and name it with --task (in Python, task=), if it is what you want."
    )


def _installed() -> list[Path]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    package = Path(__file__).resolve().parents[1]
    return [package, *(Path(sysconfig.get_path(name)).resolve() for name in names)]


def _is_called(name: str) -> str:
    """A task's name without the folders of its file, with its function."""
    last = os.path.basename(name)
    return f"{last}:task" if last.endswith(".py") else last


def _as_run(task: Task, run: PastRun) -> Task:
    """`task` of the size that it was run in, which may have been set beside its function."""
    identity = run.plan.task
    size = identity.batch_rule or str(identity.global_batch)
    # The shape of a ramp and the lengths of tokens are not read back; the task's function has them.
    if as_text(task.global_batch) != size:
        task = replace(task, global_batch=read_rule(size))
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

"""Strong scaling: how the step time of a task depends on the number of ranks.

The global batch is the same for every number of ranks, so each of n ranks computes 1/n of it. Up to the
number of devices of this machine (on a CPU: of cores), a few steps are run and timed. For more ranks,
and for a described machine, times are predicted:

    step(n) = computing(n) * correction + exchange(n) + update(n)

where the three terms are those of the plan for n ranks (see `Prediction.step_parts`; the exchange is a
ring all-reduce over the plan's link). The correction is the ratio of measured to predicted computing
time for the largest number of ranks that was run, or 1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from anybatch.errors import InputError, NoPlanFits, setting
from anybatch.events import COMPUTING
from anybatch.insight.scaling import Scaled
from anybatch.machine import Machine
from anybatch.plans import Parallel
from anybatch.process.threads import num_cores
from anybatch.rank.record import predicted_parts
from anybatch.runs.planning import default_ranks, plan
from anybatch.runs.train import train
from anybatch.task import Task, check_task
from anybatch.units import check_count

STEPS = 12


def scale(
    task: Task,
    ranks: Sequence[int],
    machine: Machine | None = None,
    *,
    memory: str | int | None = None,
    precision: str = "fp32",
    parallel: Parallel | None = None,
    steps: int = STEPS,
    watch: Callable[[str], None] | None = None,
) -> tuple[Scaled, ...]:
    """Measure or predict the step time of `task` for each number of `ranks`.

    Args:
        task: task to train. Its model is not modified.
        ranks: numbers of ranks, in the order of the result.
        machine: description of a machine with one device, one of which is assumed for each rank; None:
            this machine, on which steps are run.
        memory, precision, parallel: see `plan`.
        steps: number of steps to run for each number of ranks on this machine.
        watch: called with a short description of the current activity.

    Raises `InputError` for invalid numbers, and what `plan` and `train` raise, except `NoPlanFits`,
    which is reported as a row of the result.
    """
    check_task(task)
    _check(ranks, steps, machine)
    wishes = {"memory": memory, "precision": precision, "parallel": parallel}
    here = 0 if machine is not None else _devices_here()
    found: dict[int, Scaled] = {}
    correction: float | None = None  # numbers ascend, so no steps are run after it is computed
    for count in sorted(set(ranks)):
        if watch is not None:
            watch(f"{count} rank{'s' if count > 1 else ''}")
        way = "single" if count == 1 else parallel
        try:
            if count <= here:
                found[count] = _run(task, count, steps, **{**wishes, "parallel": way})
            else:
                if correction is None:
                    correction = _correction(task, found.values(), wishes)
                options = {**wishes, "parallel": way}
                found[count] = _predicted(task, count, machine, correction, **options)
        except NoPlanFits as error:
            found[count] = Scaled(count, None, reason=str(error).partition("\n")[0])
    return tuple(found[count] for count in ranks)


def _check(ranks: Sequence[int], steps: int, machine: Machine | None) -> None:
    for count in ranks:
        check_count(count, "one of ranks")
    if not ranks:
        raise InputError("ranks is empty: give numbers of ranks, such as 1,2,4.")
    if steps < 3:
        raise InputError(
            f"{setting('steps')} is {steps}: the first ones are warm-up, so give at least 3."
        )
    if machine is not None and len(machine.devices) > 1:
        raise InputError(
            f"the machine has {len(machine.devices)} devices: describe one, which stands for each rank."
        )


def _devices_here() -> int:
    device = Machine.here().device
    return default_ranks() if device.kind == "cuda" else num_cores()


def _run(task: Task, count: int, steps: int, **wishes: object) -> Scaled:
    """Returns the step time of `count` ranks, measured by running `steps` steps."""
    model = task.model
    short = replace(
        task,
        model=(lambda: copy.deepcopy(model)) if isinstance(model, nn.Module) else model,
        steps=steps,
        epochs=None,
        samples=None,
        valid=None,
    )
    result = train(short, ranks=count, progress=False, **wishes)  # pyright: ignore[reportArgumentType]
    ended = result.ended
    assert ended.step_seconds is not None
    parts = dict(ended.step_parts) or {COMPUTING: ended.step_seconds}
    return Scaled(count, ended.step_seconds, parts, is_measured=True, plan=result.plan)


def _predicted(
    task: Task, count: int, machine: Machine | None, correction: float, **wishes: object
) -> Scaled:
    one = machine or Machine.here()
    where = Machine.here(count=count) if machine is None and one.device.kind == "cpu" else one
    made = plan(task, where, ranks=count, **wishes)  # pyright: ignore[reportArgumentType]
    if made.prediction is None:
        return Scaled(count, None, reason="no trace can follow the model, so nothing is predicted")
    parts = predicted_parts(made.prediction.step_parts)
    parts[COMPUTING] *= correction
    return Scaled(count, sum(parts.values()), parts, plan=made)


def _correction(task: Task, rows: Iterable[Scaled], wishes: Mapping[str, object]) -> float:
    """Returns the ratio of measured to predicted computing time for the largest number of ranks that
    was run; 1 if none was."""
    run = [row for row in rows if row.is_measured]
    if not run:
        return 1.0
    last = run[-1]
    forecast = _predicted(task, last.ranks, None, 1.0, **{**wishes, "parallel": last.parallel})
    predicted = forecast.parts.get(COMPUTING, 0.0)
    return last.parts[COMPUTING] / predicted if predicted else 1.0

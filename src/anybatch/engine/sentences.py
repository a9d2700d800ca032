"""The sentences for memory that no plan makes room for."""

from __future__ import annotations

from anybatch.engine.growth import Leak
from anybatch.oom import MemoryFailure
from anybatch.plans import Plan
from anybatch.units import format_bytes, format_count


def too_late(step: int, voted: bool, failure: MemoryFailure) -> str:
    """The sentence for a lack of memory where failing can no more be undone."""
    where = "in the update of" if voted else "while ranks spoke to each other in"
    return (
        f"memory ran out {where} step {step}, where there is no way back ({failure.message}): the run"
        " goes on from its last checkpoint when it is started again; a plan made by anybatch, or more"
        " memory, keeps this from happening."
    )


def nothing_leaner(plan: Plan, phase: str, failure: MemoryFailure, leak: Leak | None = None) -> str:
    """The sentence for the end of the ladder. `leak`: that was found."""
    if leak is not None:
        return (
            f"memory ran out in {phase} even under the leanest plan ({plan.choice.describe()}), since"
            f" memory in use has grown by {format_bytes(leak.bytes_per_step)} a step:"
            f" {format_bytes(leak.before)} after step {format_count(leak.since)},"
            f" {format_bytes(leak.after)} after step {format_count(leak.until)}. Code of the task keeps"
            " something of each step, such as losses with their graphs in a list, or a cache in the"
            " model or the data set: keep numbers (loss.item()) or detached tensors, or empty it."
        )
    budget = "" if plan.budget_bytes is None else f" of {format_bytes(plan.budget_bytes)}"
    # Samples need not be loaded in this process: the failure itself says where memory was refused.
    why = (
        failure.message
        if failure.requested_bytes is None or phase == "loading"
        else f"{format_bytes(failure.requested_bytes)} more were asked for"
    )
    ghost = plan.task.ghost_batch
    remedy = (
        f"give it more memory, a smaller ghost batch than {ghost}, or lower precision"
        if ghost and plan.choice.micro_batch <= ghost
        else "give it more memory, or lower precision"
    )
    return (
        f"the budget{budget} is too small even for the leanest plan ({plan.choice.describe()}):"
        f" memory ran out in {phase} ({why}). To train this, {remedy}."
    )

"""Option: a choice made ready for a plan, with its batch for evaluation and what is leaner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anybatch.estimate import Footprint, Peak
from anybatch.estimate.seconds import StepSeconds
from anybatch.planner.costs import Costs
from anybatch.planner.ways import leaner
from anybatch.plans import Choice, Recompute

_LARGEST_EVALUATION_BATCH = 1024


@dataclass(frozen=True, slots=True)
class Option:
    """A choice, what it costs, and what is leaner."""

    choice: Choice
    footprint: Footprint
    evaluation: Peak
    seconds: StepSeconds
    ladder: tuple[Choice, ...]


def option_of(choice: Choice, ways: Sequence[Recompute], costs: Costs) -> Option:
    """`choice`, made ready; `ways` are those that its ladder may lead to."""
    size, evaluation = _evaluation_batch(choice, costs)
    chosen = choice.model_copy(update={"evaluation_batch": size})
    ladder = tuple(leaner(chosen, ways, costs))
    return Option(chosen, costs.footprint(choice), evaluation, costs.step(choice), ladder)


def _evaluation_batch(choice: Choice, costs: Costs) -> tuple[int, Peak]:
    """The batch for evaluation, and the peak that it leads to."""
    valid = costs.subject.num_valid
    if valid == 0:
        return choice.micro_batch, Peak(0, {})
    size = min(4 * choice.micro_batch, _LARGEST_EVALUATION_BATCH)
    size = min(size, valid) if valid else size
    while True:
        peak = costs.evaluation(choice.model_copy(update={"evaluation_batch": size}))
        if size == 1 or peak.num_bytes <= costs.room:
            return size, peak
        size //= 2

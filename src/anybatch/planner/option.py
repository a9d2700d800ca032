"""Option: a choice made ready for a plan, with its batch for evaluation and what is leaner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anybatch.estimate import Footprint, Peak
from anybatch.estimate.seconds import StepSeconds
from anybatch.planner.costs import Costs
from anybatch.planner.recompute_options import leaner
from anybatch.planner.sizes import first_evaluation_batch
from anybatch.plans import Choice, Recompute

_EASE = 0.85
"""More samples at once than training has are not worth a peak like training's: what training leaves in
the heap of a CPU, and blocks of other sizes find there, is known to 10% (benchmarks/budgets, 85)."""


@dataclass(frozen=True, slots=True)
class Option:
    """A choice, what it costs, and what is leaner."""

    choice: Choice
    footprint: Footprint
    evaluation: Peak
    seconds: StepSeconds
    ladder: tuple[Choice, ...]


def option_of(
    choice: Choice, ways: Sequence[Recompute], costs: Costs, leaner_costs: Sequence[Costs] = ()
) -> Option:
    """`choice`, made ready; its ladder may lead to `ways`, and at its end to what choices of the
    `leaner_costs` have in common."""
    size, evaluation = _evaluation_batch(choice, costs)
    chosen = choice.model_copy(update={"evaluation_batch": size})
    ladder = tuple(leaner(chosen, ways, costs))
    last = (chosen, *ladder)[-1]
    for other in leaner_costs:
        head = other.head.name if other.head else ""
        common = {"optimizer_states": other.states_on, "chunked_head": head}
        ladder += (last.model_copy(update=common),)
    return Option(chosen, costs.footprint(chosen), evaluation, costs.step(choice), ladder)


def _evaluation_batch(choice: Choice, costs: Costs) -> tuple[int, Peak]:
    """The batch for evaluation, and the peak that it leads to."""
    valid = costs.subject.num_valid
    if valid == 0:
        return choice.micro_batch, Peak(0, {})
    size = first_evaluation_batch(choice.micro_batch, valid)
    trained = costs.peak(choice)
    while True:
        peak = costs.evaluation(choice.model_copy(update={"evaluation_batch": size}))
        most = _EASE * trained if size > choice.micro_batch else costs.room
        if size == 1 or peak.num_bytes <= most:
            return size, peak
        size //= 2

"""Comparison: prepares the selected choice for the plan, and everything else that was considered:
choices that are nearly as fast, leaner choices, and rejected choices with reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from anybatch.estimate import Footprint, Peak
from anybatch.estimate.calibration import SHEET_ERROR
from anybatch.estimate.seconds import StepSeconds
from anybatch.planner.costs import Costs, first_evaluation_batch
from anybatch.planner.setting import Setting, Wishes
from anybatch.plans import Candidate, Choice, FrontierPoint, Plan, Prediction, Recompute
from anybatch.units import format_bytes

SAME_TIME = 1.01
"""Predicted times that differ by less than this factor are considered equal; then the smaller peak
wins."""


def rejected(costs: Costs, taken: Choice, by: Costs) -> tuple[Candidate, ...]:
    """All choices that `costs` considered, with the reasons for their rejection, except the
    selected choice (`taken`), which was considered `by` these or other costs."""
    return tuple(
        Candidate(
            choice=choice,
            parallel=costs.parallel,
            peak_bytes=costs.bytes(choice),
            step_seconds=costs.seconds(choice),
            reason=_reason(choice, costs, taken, by),
        )
        for choice in sorted(costs.weighed(), key=order)
        if choice != taken or costs is not by
    )


def impossible(
    choice: Choice, costs: Costs, reason: str, peak_bytes: float | None = None
) -> Candidate:
    """The candidate for a `choice` that cannot be run, for this `reason`; its bytes may be unknown."""
    return Candidate(
        choice=choice,
        parallel=costs.parallel,
        peak_bytes=None if peak_bytes is None else int(peak_bytes),
        step_seconds=costs.seconds(choice),
        possible=False,
        reason=reason,
    )


def frontier(every: Iterable[Costs]) -> tuple[FrontierPoint, ...]:
    """The Pareto frontier of bytes and time over all choices considered, leanest first."""
    weighed = [
        (peak, costs.seconds(choice), order(choice), choice, costs)
        for costs in every
        for choice, peak in costs.weighed().items()
    ]
    points: list[FrontierPoint] = []
    fastest = float("inf")
    for peak, seconds, _, choice, costs in sorted(weighed, key=lambda item: item[:3]):
        if seconds < fastest / 1.001:
            fastest = seconds
            points.append(
                FrontierPoint(
                    choice=choice,
                    parallel=costs.parallel,
                    peak_bytes=peak,
                    step_seconds=seconds,
                )
            )
    return tuple(points)


def _reason(choice: Choice, costs: Costs, taken: Choice, by: Costs) -> str:
    peak = costs.bytes(choice)
    if peak > costs.room:
        over = format_bytes(peak - costs.room)
        return f"exceeds the {format_bytes(costs.room)} planned for by {over}"
    return _of_fitting(costs.seconds(choice), by.seconds(taken), peak > by.bytes(taken))


def _of_fitting(seconds: float, of_plan: float, needs_more: bool) -> str:
    slower = seconds / max(of_plan, 1e-12) - 1
    if slower >= 1:
        return f"fits, but is predicted to take {1 + slower:.1f} times as long"
    if slower > SAME_TIME - 1:
        return f"fits, but is predicted to be {slower:.0%} slower"
    if needs_more:
        return "fits and is as fast, but needs more memory"
    return "fits and is as fast, or too little faster to be sure of"


def rejected_after(plan: Plan, choice: Choice, reason: str) -> tuple[Candidate, ...]:
    """The candidates that `plan` rejected, if `choice` replaces its own, which is rejected for this
    `reason`. Those that fit are compared with `choice`."""
    prediction, seconds = plan.prediction, plan.predicted_seconds(choice)
    if prediction is None or plan.choice.trains_like(choice):
        return plan.rejected
    before = Candidate(
        choice=plan.choice,
        parallel=plan.parallel,
        peak_bytes=prediction.peak_bytes,
        step_seconds=prediction.step_seconds,
        reason=reason,
    )
    found = [before]
    peak = next((c.peak_bytes for c in plan.rejected if choice.trains_like(c.choice)), None) or 0
    for one in plan.rejected:
        if choice.trains_like(one.choice):
            continue
        if seconds is not None and one.reason.startswith("fits"):
            why = _of_fitting(one.step_seconds, seconds, (one.peak_bytes or 0) > peak)
            other = one.choice.model_copy(update={"micro_batch": choice.micro_batch})
            if one.choice.micro_batch > choice.micro_batch and choice.trains_like(other):
                why = "is larger than what fitted in the rehearsal"
            elif (faster := seconds / max(one.step_seconds, 1e-12)) > SAME_TIME:
                why = f"fits, but was not rehearsed; predicted to be {1 - 1 / faster:.0%} faster"
            found.append(one.model_copy(update={"reason": why}))
        else:
            found.append(one)
    return tuple(found)


_EASE = 0.85
"""An evaluation batch larger than the micro-batch may take at most this fraction of the training
peak: it is not worth a peak as high as that of training. The memory that training leaves in the
heap of a CPU, and the blocks of other sizes that fit into it, are known to 10% (benchmarks/budgets,
85)."""


@dataclass(frozen=True, slots=True)
class Option:
    """A choice, its costs, and leaner choices."""

    choice: Choice
    footprint: Footprint
    evaluation: Peak
    seconds: StepSeconds
    ladder: tuple[Choice, ...]


def option_of(
    choice: Choice, ways: Sequence[Recompute], costs: Costs, leaner_costs: Sequence[Costs] = ()
) -> Option:
    """Complete `choice` to an option. Its ladder may lead to `ways`, and at its end to the settings
    that the choices of `leaner_costs` have in common."""
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
    """The evaluation batch, and its peak."""
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


_CLOSE = 1.5
"""A choice that is predicted to take up to this many times as long as the fastest may be the faster
one: measured side by side, predictions for one task were off by less."""

_MOST = 3


def rivals_of(best: Choice, wishes: Wishes, costs: Costs) -> Iterator[Choice]:
    """Choices that a rehearsal may find to be faster than `best`, fastest first.

    On a CPU there are none: the speed of small passes depends on the layout of the heap, which
    passes of other sizes change (docs/log.md).
    """
    device, subject = costs.setting.device, costs.subject
    here = device.present and device.kind == "cuda"
    open_to = wishes.micro_batch is None and not subject.long
    if not (here and open_to and subject.division is None):
        return
    slowest = _CLOSE * costs.seconds(best)
    close = [
        choice
        for choice, peak in costs.weighed().items()
        if choice != best and peak <= costs.room and costs.seconds(choice) <= slowest
    ]
    close.sort(key=lambda choice: (costs.seconds(choice), order(choice)))
    yield from [choice for choice in close if costs.fits(choice)][:_MOST]


def prediction_of(option: Option, setting: Setting, meeting_seconds: float = 0.0) -> Prediction:
    """The prediction for `option`. Its time is corrected by earlier runs, and includes the seconds
    of a step that ranks spend synchronizing norms (`meeting_seconds`)."""
    learned = setting.correction
    training, evaluation = option.footprint.peak, option.evaluation
    higher = max(training, evaluation, key=lambda peak: peak.num_bytes)
    seconds = {
        "forward": option.seconds.forward,
        "backward": option.seconds.backward,
        "recompute": option.seconds.recompute,
        "update": option.seconds.update,
        "exchange of gradients": option.seconds.exchange,
        "norms over ranks": meeting_seconds,
    }
    return Prediction(
        peak_bytes=higher.num_bytes,
        evaluation_peak_bytes=evaluation.num_bytes,
        commit_bytes=option.footprint.commit_bytes,
        step_seconds=option.seconds.total + meeting_seconds,
        by_kind=dict(higher.by_kind),
        totals={
            name: max(size, evaluation.totals.get(name, 0))
            for name, size in training.totals.items()
        },
        choice=option.choice,
        method=option.footprint.method,
        step_parts={part: time for part, time in seconds.items() if time},
        seconds_method=_describe_timing(setting),
        seconds_corrected_by=learned.seconds,
        corrected_runs=learned.num_runs,
    )


def _describe_timing(setting: Setting) -> str:
    if not setting.pace.measured:
        return f"from nominal figures of the device: expect them within a factor of {SHEET_ERROR:g}"
    way = "from speeds measured on this device"
    if not setting.correction.num_runs:
        return way
    runs = f"{setting.correction.num_runs} run{'s' if setting.correction.num_runs > 1 else ''}"
    return f"{way}, corrected by {setting.correction.seconds:.2f} from {runs} on this machine"


def ways_of(costs: Costs) -> Iterator[Recompute]:
    """All recompute methods that a model supports as a whole, from least to most recompute. MLPs in
    tiles are added if nothing else fits, see `search`."""
    subject, pace = costs.subject, costs.setting.pace
    yield Recompute()
    if blocks := subject.blocks:
        if pace.blocks_have_products:
            yield Recompute(blocks=blocks, keep="matmuls")
        yield Recompute(blocks=blocks)
    if subject.chains:
        yield Recompute(blocks=subject.chains, nested=True)
    if pace.has_host:
        yield Recompute(to_host=True)


def leaner(chosen: Choice, ways: Sequence[Recompute], costs: Costs) -> Iterator[Choice]:
    """Choices that need less memory than `chosen`: first smaller micro-batches, which cost the
    least time, then more recompute."""
    size, evaluation = chosen.micro_batch, chosen.evaluation_batch
    for size in costs.sizes.halves(chosen.micro_batch):
        evaluation = max(1, evaluation // 2)
        yield chosen.model_copy(update={"micro_batch": size, "evaluation_batch": evaluation})
    if chosen.recompute in ways:
        more = ways[ways.index(chosen.recompute) + 1 :]
    else:  # some blocks are recomputed: continue with all of them
        more = [way for way in ways if way.keep == "nothing" and way.blocks]
    for way in more:
        yield chosen.model_copy(
            update={"micro_batch": size, "evaluation_batch": evaluation, "recompute": way}
        )


def order(choice: Choice) -> tuple[int, bool, bool, str, str, int]:
    """Sort key for the order in which a table shows choices."""
    way = choice.recompute
    return (
        len(way.blocks),
        bool(way.tiled) or way.chunked_attention,
        way.nested,
        way.keep,
        choice.chunked_head,
        -choice.micro_batch,
    )

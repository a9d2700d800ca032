"""Scaling: the time of a step on several ranks, and the part that limits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from anybatch.errors import as_setting, worded
from anybatch.events import COMPUTING, EXCHANGE, SAMPLES, SLOWER, UPDATE
from anybatch.plans import Parallel, Plan

_NOT_MUCH = 0.15
"""Minimum share of a step for a part to count as its limit."""

_BUSY = "a rank's part of the batch is too small to keep its device busy"


@dataclass(frozen=True, slots=True)
class Scaled:
    """Time of a step on a given number of ranks.

    Attributes:
        ranks: number of ranks.
        step_seconds: seconds of a typical step; None if it is not known, for the given `reason`.
        parts: seconds of the step by part, as in `RunEnded.step_parts`.
        is_measured: whether the time was measured in steps on this machine, not predicted.
        plan: plan of the step.
    """

    ranks: int
    step_seconds: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    is_measured: bool = False
    plan: Plan | None = None
    reason: str = ""

    @property
    def parallel(self) -> Parallel | None:
        """How the ranks share a step."""
        return self.plan and self.plan.parallel

    @property
    def exchange_share(self) -> float | None:
        """Fraction of a step spent waiting for communication between ranks, from 0 to 1."""
        if not self.step_seconds:
            return None
        return self.parts.get(EXCHANGE, 0.0) / self.step_seconds


def efficiency(row: Scaled, rows: Sequence[Scaled]) -> float | None:
    """Returns the parallel efficiency: the speedup of `row` over the row of `rows` with the fewest
    ranks, divided by the ratio of their numbers of ranks."""
    first = _fewest(rows)
    if first is None or not first.step_seconds or not row.step_seconds:
        return None
    return first.step_seconds * first.ranks / (row.step_seconds * row.ranks)


def limit(row: Scaled, rows: Sequence[Scaled]) -> str:
    """Returns text on what limits the scaling of `row`: the part of its step with the largest excess
    over ideal scaling from the row of `rows` with the fewest ranks."""
    first = _fewest(rows)
    if row.step_seconds is None or first is None:
        return row.reason
    ideal = first.ranks / row.ranks
    excess = {part: s - ideal * first.parts.get(part, 0.0) for part, s in row.parts.items()}
    most = max(excess, key=excess.__getitem__)
    if excess[most] <= _NOT_MUCH * row.step_seconds:
        more = [r.step_seconds for r in rows if r.step_seconds and r.ranks > row.ranks]
        if more and min(more) >= row.step_seconds:
            return "nothing so far, but none of the larger numbers shortens it"
        return "nothing so far: more devices would shorten it"
    return _sentence(most, row.parts[most] / row.step_seconds, _BUSY if most == COMPUTING else "")


def _fewest(rows: Sequence[Scaled]) -> Scaled | None:
    return min((row for row in rows if row.step_seconds), key=lambda row: row.ranks, default=None)


def what_limits(parts: Mapping[str, float]) -> str:
    """Returns text on the part that limits a step, its share, and what would help.

    Args:
        parts: seconds of a typical step by part; see `RunEnded`.
    """
    total = sum(parts.values())
    others = {part: seconds for part, seconds in parts.items() if part != COMPUTING}
    most = max(others, key=others.__getitem__)
    part = most if others[most] > _NOT_MUCH * total else COMPUTING
    return _sentence(part, parts[part] / total)


def _sentence(part: str, share: float, why: str = "") -> str:
    return f"{part}, {share:.0%} of a step: {why or _remedy(part)}"


def _remedy(part: str) -> str:
    """Returns what would shorten `part`."""
    if part == SLOWER:
        measured = as_setting("balance", "measured")
        return f"the others wait for the slowest rank, which {measured} would give less to do"
    if part == EXCHANGE:
        less = worded("compression and local steps (exchange=)", "--compress and --local-steps")
        return (
            f"a larger global batch has fewer exchanges for as many samples, and {less} send less"
        )
    if part == UPDATE:
        divided = as_setting("parallel", "shard")
        return f"more devices do not shorten it, unless they divide the model ({divided})"
    if part == SAMPLES:
        return "more workers in the task (num_workers) would load them meanwhile"
    return "more devices would shorten it"

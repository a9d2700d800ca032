"""Subsets: recomputing some of the blocks, where none is too much memory and all too much time.

What a subset frees follows from what each block keeps; whatever is chosen so is traced itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anybatch.planner.blocks import cheapest, level
from anybatch.planner.costs import Costs
from anybatch.planner.largest import largest
from anybatch.plans import Choice, Recompute

_MOST_TRIES = 4
"""Subsets of blocks that are traced for one micro-batch, each somewhat leaner than the last."""


def subsets(
    ways: Sequence[Recompute],
    found: Mapping[Recompute, int],
    fitting: Sequence[Choice],
    costs: Costs,
) -> list[Choice]:
    """Choices that recompute some of the blocks, faster than what fits so far (`fitting`), each traced.

    Args:
        ways: those that are open to the search.
        found: the largest micro-batch that fits, of ways that were looked at.
        fitting: what fits so far.
        costs: of all of them.
    """
    plain, everything = Recompute(), Recompute(blocks=costs.subject.blocks)
    if len(everything.blocks) < 2 or plain not in ways or everything not in ways:
        return []
    if found.get(plain) == costs.sizes.whole:
        return []
    top = found.get(everything) or largest(everything, costs)
    if top is None:
        return []
    chosen: list[Choice] = []
    # At the plain way's own largest micro-batch one block recomputed would save no pass.
    for size in costs.sizes.between(found.get(plain, 0), top):
        bar = min(map(costs.seconds, (*fitting, *chosen)), default=float("inf"))
        choice = leanest_subset(size, bar, costs)
        if choice is not None:
            chosen.append(choice)
    return chosen


def leanest_subset(size: int, bar: float, costs: Costs) -> Choice | None:
    """The blocks to recompute at micro-batch `size`, so that it fits, for the least time; None unless
    that is less than `bar` seconds per step."""
    names, pace = costs.subject.blocks, costs.setting.pace
    kept = [max(0.0, k) for k, _, _ in pace.block_bytes(size)]
    seconds = pace.block_seconds(size)
    none = costs.about(Recompute(), size)
    every = costs.about(Recompute(blocks=names), size)
    highest, lowest = level(kept, ()), level(kept, range(len(kept)))
    if highest <= lowest or none <= every:
        return None
    # What a trace shows to be freed in all is what the blocks free together.
    per_byte = (none - every) / (highest - lowest)
    room = float(costs.room)
    for _ in range(_MOST_TRIES):
        numbers = cheapest(kept, seconds, lowest + (room - every) / per_byte)
        if not numbers or len(numbers) == len(names):
            return None
        choice = costs.choice(Recompute(blocks=tuple(names[number] for number in numbers)), size)
        if costs.seconds(choice) >= bar:
            return None
        over = costs.peak(choice) - costs.room
        if over <= 0:
            return choice
        room -= max(over, 0.02 * (none - every) / len(names))
    return None

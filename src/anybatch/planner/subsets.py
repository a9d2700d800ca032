"""The largest micro-batch that fits, and which blocks to recompute where none is too much memory and
all too much time.

Backward goes through the blocks from the last to the first. While it is at block k, what is alive is
what blocks 1 to k - 1 have kept, and all of block k, kept or computed anew. So the last blocks are kept
before the first ones are, and what counts of a set of blocks is the worst of these moments:

    level(S) = max over k of ( sum of kept_j for j < k, j not in S ) + kept_k

Blocks are kept by their time per byte, or by their time, whichever order is the better one, as long as
there is room. What a subset frees follows from what each block keeps; whatever is chosen so is traced
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from anybatch.planner.costs import Costs
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
    kept = pace.block_bytes(size)
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


def level(kept: Sequence[float], recomputed: Collection[int]) -> float:
    """Bytes at the worst moment of backward if the blocks numbered `recomputed` are computed anew."""
    below = worst = 0.0
    for number, size in enumerate(kept):
        worst = max(worst, below + size)
        if number not in recomputed:
            below += size
    return worst


def cheapest(
    kept: Sequence[float], seconds: Sequence[float], most: float
) -> tuple[int, ...] | None:
    """The blocks to recompute, by number, so that `level` is at most `most`, for little time; None
    if even all of them are not enough.

    Args:
        kept: bytes that each block keeps for backward, in order of forward.
        seconds: time to compute each again.
        most: bytes.
    """
    everything = range(len(kept))
    if level(kept, everything) > most:
        return None

    def keeping(worth: Callable[[int], float]) -> tuple[int, ...]:
        """What is left where all that fits is kept, the worthiest first; of equals the later one, which
        backward needs first."""
        chosen = set(everything)
        for number in sorted(everything, key=lambda number: (-worth(number), -number)):
            if level(kept, chosen - {number}) <= most:
                chosen.remove(number)
        return tuple(sorted(chosen))

    ways = (
        keeping(lambda number: seconds[number] / max(1.0, kept[number])),
        keeping(lambda number: seconds[number]),
    )
    return min(ways, key=lambda chosen: sum(seconds[number] for number in chosen))


_CLOSE_ENOUGH = 1.04
"""Bisection stops when the largest micro-batch that fits is known to within this factor."""


def largest(way: Recompute, costs: Costs) -> int | None:
    """The largest micro-batch of `way` that fits, or None if the smallest does not."""
    sizes = costs.sizes

    def fits(size: int) -> bool:
        return costs.fits(costs.choice(way, size))

    if fits(sizes.whole):
        return sizes.whole
    unit, low, high = sizes.smallest, sizes.low, sizes.whole
    if not fits(low):
        return unit if unit < low and fits(unit) else None
    while sizes.passes(low) > sizes.passes(high - unit) and high > low * _CLOSE_ENOUGH:
        middle = sizes.in_units(_guess(way, low, high, costs))
        middle = min(max(middle, low + unit), sizes.in_units(high - 1))
        if middle <= low:
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _guess(way: Recompute, low: int, high: int, costs: Costs) -> int:
    """Where the peak meets the room, if it grows in a straight line from `low` to `high`; kept off the
    ends, so that a bend in the line costs few steps."""
    least, most = (costs.peak(costs.choice(way, size)) for size in (low, high))
    part = (costs.room - least) / max(1, most - least)
    return low + int((high - low) * min(max(part, 0.02), 0.98))

"""Finds the largest micro-batch that fits, and the blocks to recompute where recomputing none takes
too much memory and recomputing all takes too much time.

Backward traverses the blocks from the last to the first. At block k, the memory in use consists of
the activations that blocks 1 to k - 1 have kept, and all of block k, kept or recomputed. So the
last blocks are kept before the first ones, and the memory of a set S of recomputed blocks is the
maximum over these points:

    level(S) = max over k of ( sum of kept_j for j < k, j not in S ) + kept_k

Blocks are kept in order of time per byte, or of time, whichever order is better, as long as there
is room. The memory that a subset frees is calculated from the bytes that each block keeps; the
selected subset itself is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from anybatch.planner.costs import Costs
from anybatch.plans import Choice, Recompute

_MOST_TRIES = 4
"""Maximum number of subsets of blocks that are traced for one micro-batch, each somewhat leaner
than the previous one."""


def subsets(
    ways: Sequence[Recompute],
    found: Mapping[Recompute, int],
    bar: float,
    costs: Costs,
) -> list[Choice]:
    """Choices that recompute some of the blocks, and whose steps take less than `bar` seconds, each
    traced.

    Args:
        ways: recompute methods open to the search.
        found: largest micro-batch that fits, for each method that was considered.
        bar: seconds of a step to stay below.
        costs: costs of all of them.
    """
    plain, everything = Recompute(), Recompute(blocks=costs.subject.blocks)
    if len(everything.blocks) < 2 or plain not in ways or everything not in ways:
        return []
    if found.get(plain) == costs.sizes.whole:
        return []
    low = found.get(plain, 0)
    size = found.get(everything) or min(int(costs.most(everything)), costs.sizes.whole)
    while size > low and not _may_pay(size, bar, costs):
        size = size * 3 // 4
    if size <= low:
        return []
    top = found.get(everything) or roughly_largest(everything, costs)
    if top is None:
        return []
    chosen: list[Choice] = []
    # At the largest micro-batch without recompute, recomputing one block would not save a pass.
    for size in costs.sizes.between(low, top):
        choice = leanest_subset(size, bar, costs)
        if choice is not None:
            chosen.append(choice)
            bar = costs.seconds(choice)
    return chosen


def _may_pay(size: int, bar: float, costs: Costs) -> bool:
    """Whether recomputing some blocks may be enough for micro-batch `size` in less than `bar` seconds
    per step, according to a lower bound of memory."""
    names, pace = costs.subject.blocks, costs.setting.pace
    seconds = pace.block_seconds(size)
    numbers = cheapest(pace.block_bytes(size), seconds, costs.room - costs.held_bytes(size))
    if numbers is None:
        return False
    blocks = tuple(names[number] for number in numbers or (seconds.index(min(seconds)),))
    return costs.seconds(costs.choice(Recompute(blocks=blocks), size)) < bar


def leanest_subset(size: int, bar: float, costs: Costs) -> Choice | None:
    """The choice that recomputes the blocks with which micro-batch `size` fits in the least time;
    None if that is not less than `bar` seconds per step."""
    names, pace = costs.subject.blocks, costs.setting.pace
    kept = pace.block_bytes(size)
    seconds = pace.block_seconds(size)
    none = costs.about(Recompute(), size)
    every = costs.about(Recompute(blocks=names), size)
    highest, lowest = level(kept, ()), level(kept, range(len(kept)))
    if highest <= lowest or none <= every:
        return None
    # The difference between the traces is the memory that the blocks free together.
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
    """Peak bytes during backward if the blocks with the indices `recomputed` are recomputed."""
    below = worst = 0.0
    for number, size in enumerate(kept):
        worst = max(worst, below + size)
        if number not in recomputed:
            below += size
    return worst


def cheapest(
    kept: Sequence[float], seconds: Sequence[float], most: float
) -> tuple[int, ...] | None:
    """The indices of the blocks to recompute so that `level` is at most `most`, in little time;
    None if recomputing all of them is not enough.

    Args:
        kept: bytes that each block keeps for backward, in order of forward.
        seconds: time to recompute each block.
        most: maximum of `level`, in bytes.
    """
    everything = range(len(kept))
    if level(kept, everything) > most:
        return None

    def keeping(worth: Callable[[int], float]) -> tuple[int, ...]:
        """The blocks to recompute if as many as fit are kept, those with the highest `worth` first;
        among equals the later block, which backward needs first."""
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


def largest(way: Recompute, costs: Costs, bar: float = float("inf")) -> int | None:
    """The largest micro-batch of `way` that fits; None if the smallest does not, or if no step of what
    is estimated to fit takes less than `bar` seconds."""
    sizes = costs.sizes

    def fits(size: int) -> bool:
        return costs.fits(costs.choice(way, size))

    most = roughly_largest(way, costs)
    if most is None or most == sizes.whole or most < sizes.low:
        return most
    unit, low, high, middle = sizes.smallest, sizes.low, sizes.whole, most
    while sizes.passes(low) > sizes.passes(high - unit) and high > low * _CLOSE_ENOUGH:
        about = sizes.worth_weighing(min(int(costs.most(way)), high))
        if min(costs.seconds(costs.choice(way, size)) for size in about) >= bar:
            return None
        middle = min(max(middle, low + unit), sizes.in_units(high - 1))
        if middle <= low:
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
        middle = sizes.in_units(int(costs.reach(way)))
    return low


def roughly_largest(way: Recompute, costs: Costs) -> int | None:
    """The largest micro-batch of `way` that is estimated to fit, from a trace of the smallest; None if
    that does not fit."""
    sizes = costs.sizes
    whole, low = sizes.whole, sizes.low
    if costs.fits(costs.choice(way, whole)):
        return whole
    if not costs.fits(costs.choice(way, low)):
        unit = sizes.smallest
        return unit if unit < low and costs.fits(costs.choice(way, unit)) else None
    return min(max(low, sizes.in_units(int(costs.reach(way)))), whole)

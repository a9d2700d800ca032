"""Blocks: which ones to recompute, so that enough bytes are freed for the least time.

Backward goes through the blocks from the last to the first. While it is at block k, what is alive is
what blocks 1 to k - 1 have kept, and all of block k, kept or computed anew. So the last blocks are kept
before the first ones are, and what counts of a set of blocks is the worst of these moments:

    level(S) = max over k of ( sum of kept_j for j < k, j not in S ) + kept_k

Which blocks to keep is a knapsack: the most time saved, in the bytes that there are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

_BINS = 400
"""Bytes are counted in this many parts of what there is."""


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
    """The blocks to recompute, by number, so that `level` is at most `most`, for the least time; None
    if even all of them are not enough.

    Args:
        kept: bytes that each block keeps for backward, in order of forward.
        seconds: time to compute each again.
        most: bytes.
    """
    everything = range(len(kept))
    if level(kept, everything) > most:
        return None
    capacity = most
    for _ in range(8):
        chosen = _recomputed(kept, seconds, capacity)
        over = level(kept, set(chosen)) - most
        if over <= 0:
            return chosen
        capacity -= over
        if capacity <= 0:
            break
    return tuple(everything)


def _recomputed(
    kept: Sequence[float], seconds: Sequence[float], capacity: float
) -> tuple[int, ...]:
    """A knapsack of the blocks that are kept; the others are recomputed. Among equals the later block
    is kept, since backward needs it first."""
    if sum(kept) <= capacity:
        return ()
    unit = capacity / _BINS
    sizes = [int(size / unit + 1e-9) for size in kept]  # rounded down: `level` has the last word
    best = [0.0] * (_BINS + 1)
    took: list[list[bool]] = []
    for number in range(len(kept)):  # the last one looked at is the first that is taken
        size, value, took_here = sizes[number], seconds[number], [False] * (_BINS + 1)
        for room in range(_BINS, size - 1, -1):
            # `>=`: of two equal ways the one that keeps the later block.
            if size <= room and best[room - size] + value >= best[room]:
                best[room] = best[room - size] + value
                took_here[room] = True
        took.append(took_here)
    room, keep = _BINS, set[int]()
    for number in reversed(range(len(kept))):
        if took[number][room]:
            keep.add(number)
            room -= sizes[number]
    return tuple(number for number in range(len(kept)) if number not in keep)

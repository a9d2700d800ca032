"""Where the time of a step of several ranks goes.

    rank 0   samples   computing      slower ranks   exchange   update
    rank 1   samples   computing ------------------> exchange   update

What of the exchange the last backward pass hides is a part of computing, as is all that ranks exchange
within their passes (sharded parameters).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anybatch.events import COMPUTING, EXCHANGE, SAMPLES, SLOWER, UPDATE


def parts_of(
    seconds: float,
    agreed_seconds: float,
    rank_seconds: Sequence[float],
    waited_seconds: float,
    reading_seconds: float = 0.0,
) -> dict[str, float]:
    """The seconds of one step by part. They add up to `seconds` where the device tells its time at once
    (CUDA tells that of the step before).

    Args:
        seconds: of the step, on rank 0.
        agreed_seconds: see `StepDone`.
        rank_seconds: of the passes of each rank, in which it also waits for samples.
        waited_seconds: for samples in these, on rank 0; taken to be alike on the others.
        reading_seconds: for samples before them.
    """
    slowest = max(rank_seconds)
    mean = sum(rank_seconds) / len(rank_seconds)
    exchange = max(0.0, agreed_seconds - slowest)
    return {
        COMPUTING: max(0.0, mean - waited_seconds),
        SLOWER: slowest - mean,
        EXCHANGE: exchange,
        UPDATE: max(0.0, seconds - reading_seconds - slowest - exchange),
        SAMPLES: waited_seconds + reading_seconds,
    }


def predicted_parts(parts: Mapping[str, float]) -> dict[str, float]:
    """What `Prediction.step_parts` says of these parts."""
    rest = {"exchange of gradients": EXCHANGE, "update": UPDATE}
    told = {COMPUTING: 0.0, EXCHANGE: 0.0, UPDATE: 0.0}
    for part, seconds in parts.items():
        told[rest.get(part, COMPUTING)] += seconds
    return told

"""Scaling: what keeps a step of several ranks from being shorter."""

from __future__ import annotations

from collections.abc import Mapping

from anybatch.events import COMPUTING, EXCHANGE, SAMPLES, SLOWER, UPDATE

_NOT_MUCH = 0.15
"""A smaller share of a step than this is not what limits it, whatever else it consists of."""

_SENTENCES = {
    COMPUTING: "more devices would shorten it",
    SLOWER: "the others wait for the slowest rank, which --balance measured would give less to do",
    EXCHANGE: (
        "a larger global batch has fewer exchanges for as many samples, and --compress and"
        " --local-steps send less"
    ),
    UPDATE: "more devices do not shorten it, unless they divide the model (--parallel shard)",
    SAMPLES: "more workers in the task (num_workers) would load them meanwhile",
}


def what_limits(parts: Mapping[str, float]) -> str:
    """The part that limits a step, its share, and what would help, in words.

    Args:
        parts: the seconds of a typical step; see `RunEnded`.
    """
    total = sum(parts.values())
    others = {part: seconds for part, seconds in parts.items() if part != COMPUTING}
    most = max(others, key=others.__getitem__)
    part = most if others[most] > _NOT_MUCH * total else COMPUTING
    return f"{part}, {parts[part] / total:.0%} of a step: {_SENTENCES[part]}"

"""Exchange: the seconds of a step in which ranks tell each other gradients and weights.

Ranks that hold the whole model add up their gradients once per step. Of a divided model the weights are
gathered twice in every pass, for forward and for backward, and gradients are added up in every pass:

    replicate   | forward | backward | forward | backward, all gradients |
    shard       | forward, weights | backward, weights and gradients | ...

On CUDA this goes on beside the computing, and only what is left over counts: at the least what crosses
for the first block, before which nothing can be computed, or for the last, after which nothing is left.
Then comes the vote, which is small and which everybody waits for.

How long ranks take to add up so many bytes, the link of the layout tells (`plans.Link`).
"""

from __future__ import annotations

from anybatch.compute.buckets import BUCKET_BYTES
from anybatch.estimate import Subject
from anybatch.planner.setting import Setting
from anybatch.plans import Choice, Precision


def seconds_of_exchange(subject: Subject, setting: Setting, choice: Choice, passes: int) -> float:
    """Seconds of a step of so many `passes` that no rank computes in, since it waits for others."""
    layout, device, pace = setting.layout, setting.device, setting.pace
    num_ranks = len(layout.shares)
    if num_ranks == 1:
        return 0.0
    computing = pace.micro(choice.micro_batch, choice.recompute)
    is_last = layout.parallel == "in-process" or subject.sums is not None  # after all computing
    overlaps = device.kind == "cuda" and not is_last
    link = layout.link_on(device)
    vote = 0.0 if layout.parallel == "in-process" else link.seconds(0, num_ranks)
    if subject.division is None:
        crossing = link.seconds(pace.parameter_bytes, num_ranks)
        groups = -(-pace.parameter_bytes // BUCKET_BYTES)
        behind = computing[1] + computing[2]  # the last backward
        return vote + (_left_over(crossing, behind, groups) if overlaps else crossing)
    parts = subject.division.parts
    groups = len(parts.blocks) + 1
    gathered = parts.whole * _gathered_part(choice.precision)
    # To gather, or to add up so that each keeps a part, is half of a whole exchange.
    crossing = groups * sum(
        link.seconds(size / groups, num_ranks) / 2
        for size in (gathered, gathered, pace.parameter_bytes)
    )
    return vote + passes * (_left_over(crossing, sum(computing), groups) if overlaps else crossing)


def _left_over(crossing: float, computing: float, groups: int) -> float:
    """Of what crosses in so many groups, the seconds that no computing covers."""
    return max(crossing / max(1, groups), crossing - computing)


def _gathered_part(precision: Precision) -> float:
    """The size of a gathered weight by that of the one that the model was built with."""
    return 0.5 if precision.endswith(("-weights", "-pure")) else 1.0

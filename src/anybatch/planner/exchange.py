"""Exchange: the seconds of a step in which ranks tell each other gradients and weights.

Ranks that hold the whole model add up their gradients once per step. Of a divided model the weights are
gathered twice in every pass, for forward and for backward, and gradients are added up in every pass, or
in the last one:

    replicate   | forward | backward | forward | backward, all gradients |
    shard       | forward, weights | backward, weights and gradients | ...

Where groups of ranks divide a model each, their parts of the gradients are added up over the groups
after the last pass. Parts that lie in host memory come over its bus first, and go back there.

On CUDA this goes on beside the computing, and only what is left over counts: at the least what crosses
for the first block, before which nothing can be computed, or for the last, after which nothing is left.
Then comes the vote, which is small and which everybody waits for.

How long ranks take to add up so many bytes, the link of the layout tells (`plans.Link`). An exchange
that is not exact (`plans.Exchange`) has fewer bytes, or not every step has one, or the whole next step
is there to cover it.
"""

from __future__ import annotations

from anybatch.compute.buckets import BUCKET_BYTES
from anybatch.estimate import Subject
from anybatch.estimate.seconds import bus_seconds
from anybatch.planner.setting import Setting
from anybatch.plans import Choice, Exchange, Precision


def seconds_of_exchange(subject: Subject, setting: Setting, choice: Choice, passes: int) -> float:
    """Seconds of a step of so many `passes` that no rank computes in, since it waits for others."""
    layout, device, pace = setting.layout, setting.device, setting.pace
    num_ranks = len(layout.shares)
    if num_ranks == 1:
        return 0.0
    computing = pace.micro(choice.micro_batch, choice.recompute)
    overlaps = device.kind == "cuda" and subject.sums is None  # sums cross after all computing
    link = layout.link_on(device)
    vote = link.seconds(0, num_ranks)
    if subject.division is None:
        exchange = layout.exchange
        num_bytes = _sent(pace.parameter_bytes, subject, exchange)
        crossing = link.seconds(num_bytes, num_ranks)
        if exchange.every > 1:  # with nothing in between, not even a vote
            return (vote + crossing) / exchange.every
        if exchange.stale:
            return vote + max(0.0, crossing - passes * sum(computing))
        groups = -(-num_bytes // BUCKET_BYTES)
        behind = computing[1] + computing[2]  # the last backward
        return vote + (_left_over(crossing, behind, groups) if overlaps else crossing)
    division, within = subject.division, layout.link_within(device)
    pieces = len(division.parts.blocks) + 1
    gathered = division.parts.whole * _gathered_part(choice.precision)

    def beside(*sizes: float) -> float:
        """Seconds of a pass in which so many bytes cross, piece by piece, and nothing is computed."""
        # To gather, or to add up so that each keeps a part, is half of a whole exchange.
        crossing = pieces * sum(within.seconds(s / pieces, division.ranks) / 2 for s in sizes)
        if division.offload:
            crossing += bus_seconds(sum(sizes) / division.ranks, device)
        return _left_over(crossing, sum(computing), pieces) if overlaps else crossing

    every, last = beside(gathered, gathered), beside(gathered, gathered, pace.parameter_bytes)
    if not division.reduce_at_last:
        every = last
    num_groups = num_ranks // division.ranks
    across = 0.0
    if num_groups > 1:  # nothing is computed meanwhile
        across = link.seconds(pace.parameter_bytes / division.ranks, num_groups)
    return vote + (passes - 1) * every + last + across


def _sent(parameter_bytes: int, subject: Subject, exchange: Exchange) -> int:
    """Bytes of gradients, or of weights, as they cross."""
    if exchange.compress is not None:
        return min(parameter_bytes, 2 * subject.identity.trainable_parameters)
    return parameter_bytes


def _left_over(crossing: float, computing: float, groups: int) -> float:
    """Of what crosses in so many groups, the seconds that no computing covers."""
    return max(crossing / max(1, groups), crossing - computing)


def _gathered_part(precision: Precision) -> float:
    """The size of a gathered weight by that of the one that the model was built with."""
    return 0.5 if precision.endswith(("-weights", "-pure")) else 1.0

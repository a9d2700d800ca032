"""Exchange: the seconds of a step in which ranks exchange gradients and weights.

Ranks that hold the whole model sum their gradients once per step. The weights of a divided model
are gathered twice in every pass, for forward and for backward, and gradients are summed in every
pass, or in the last one:

    replicate   | forward | backward | forward | backward, all gradients |
    shard       | forward, weights | backward, weights and gradients | ...

If several groups of ranks divide a model each, their parts of the gradients are summed over the
groups after the last pass. Parts in host memory are first transferred over the host's bus, and back
afterwards.

On CUDA the exchange overlaps with the computation, and only the remainder counts: at least the
exchange for the first block, before which nothing can be computed, or for the last block, after
which nothing is left to compute. It is followed by the vote, which is small and which all ranks
wait for.

The link of the layout determines how long ranks take to sum a number of bytes (`plans.Link`). An
exchange that is not exact (`plans.Exchange`) has fewer bytes, or does not take place in every step,
or can overlap with the whole next step.
"""

from __future__ import annotations

from anybatch.compute.buckets import BUCKET_BYTES
from anybatch.estimate import Subject
from anybatch.estimate.seconds import bus_seconds
from anybatch.planner.setting import Setting
from anybatch.plans import Choice


def seconds_of_exchange(subject: Subject, setting: Setting, choice: Choice, passes: int) -> float:
    """Seconds of a step of `passes` passes in which ranks wait for each other and do not compute."""
    layout, device, pace = setting.layout, setting.device, setting.pace
    num_ranks = len(layout.shares)
    if num_ranks == 1:
        return 0.0
    computing = pace.micro(choice.micro_batch, choice.recompute)
    overlaps = device.kind == "cuda" and subject.sums is None  # sums follow all computation
    link = layout.link_on(device)
    vote = link.seconds(0, num_ranks)
    if subject.division is None:
        exchange = layout.exchange
        num_bytes = pace.parameter_bytes
        if exchange.compress is not None:
            num_bytes = min(num_bytes, 2 * subject.identity.trainable_parameters)
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
    in_half = choice.precision.endswith(("-weights", "-pure"))
    gathered = division.parts.whole * (0.5 if in_half else 1.0)

    def beside(*sizes: float) -> float:
        """Seconds of a pass in which this many bytes are exchanged, piece by piece, and nothing is
        computed."""
        # An all-gather or a reduce-scatter takes half of the time of an all-reduce.
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


def _left_over(crossing: float, computing: float, groups: int) -> float:
    """The seconds of an exchange in `groups` groups that do not overlap with computation."""
    return max(crossing / max(1, groups), crossing - computing)

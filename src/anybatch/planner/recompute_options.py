"""How activations can be recomputed, and which choices are leaner than others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from anybatch.planner.costs import Costs
from anybatch.plans import Choice, Recompute


def ways_of(costs: Costs) -> Iterator[Recompute]:
    """Every way that a model offers as a whole, from the least recompute to the most."""
    subject, pace = costs.subject, costs.setting.pace
    yield Recompute()
    if blocks := subject.blocks:
        if any(matmuls > 0 for _, _, matmuls in pace.block_bytes(costs.sizes.smallest)):
            yield Recompute(blocks=blocks, keep="matmuls")
        yield Recompute(blocks=blocks)
    if subject.chains:
        yield Recompute(blocks=subject.chains, nested=True)
    if pace.has_host:
        yield Recompute(to_host=True)


def leaner(chosen: Choice, ways: Sequence[Recompute], costs: Costs) -> Iterator[Choice]:
    """Choices leaner than `chosen`: smaller micro-batches first, which cost least, then more
    recompute."""
    size, evaluation = chosen.micro_batch, chosen.evaluation_batch
    for size in costs.sizes.halves(chosen.micro_batch):
        evaluation = max(1, evaluation // 2)
        yield chosen.model_copy(update={"micro_batch": size, "evaluation_batch": evaluation})
    if chosen.recompute in ways:
        more = ways[ways.index(chosen.recompute) + 1 :]
    else:  # some of the blocks: then all of them
        more = [way for way in ways if way.keep == "nothing" and way.blocks]
    for way in more:
        yield chosen.model_copy(
            update={"micro_batch": size, "evaluation_batch": evaluation, "recompute": way}
        )


def order(choice: Choice) -> tuple[int, bool, str, str, int]:
    """Choices in the order in which a table shows them."""
    way = choice.recompute
    return len(way.blocks), way.nested, way.keep, choice.chunked_head, -choice.micro_batch

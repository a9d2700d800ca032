"""Memory of a sharded model on each rank, from the sizes of its blocks; sums that a rank holds.

Kept tensors (weights, gradients, optimizer state) are divided by the number of ranks, as are the
temporary tensors of the update. Gathered tensors are not: the root (parameters outside of blocks:
embeddings, the head) with its gradients at all times, and each block with its gradients while FSDP
computes it. The flat buffer of a block exists until that of the next is copied out, so its
neighbors count as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from anybatch.compute import find_blocks
from anybatch.compute.buckets import piece_of
from anybatch.data import Waiting
from anybatch.estimate.trace import Block, Timeline
from anybatch.plans import TaskIdentity


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes of the weights of a model by the group in which they are gathered: the root, and each
    block in execution order."""

    root: int
    blocks: tuple[int, ...]

    @property
    def whole(self) -> int:
        """Bytes of all weights."""
        return self.root + sum(self.blocks)


def parts_of(model: nn.Module) -> Parts:
    """Return how `model`, which may be fake, is gathered by default in `parallel.Shard`."""
    sizes: list[int] = []
    seen: set[int] = set()
    sequence = isinstance(model, nn.Sequential)
    owners: dict[int, list[int]] = {}  # parameter -> the modules that have it
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(id(param), []).append(id(module))
    for name in find_blocks(model) or [n for n, _ in model.named_children() if sequence]:
        block = model.get_submodule(name)
        inside = {id(m) for m in block.modules()}
        own = {id(p): p.nbytes for p in block.parameters()}
        if own and all(inside.issuperset(owners[key]) for key in own):
            sizes.append(sum(own.values()))
            seen |= own.keys()
    return Parts(sum(p.nbytes for p in model.parameters() if id(p) not in seen), tuple(sizes))


STATE = ("parameters", "gradients", "optimizer state")
"""The kinds of bytes that are divided over ranks."""

GATHERED = "gathered weights and gradients"


@dataclass(frozen=True, slots=True)
class Division:
    """Division of a model over ranks, applied to a trace of the whole model.

    Attributes:
        parts: bytes of its weights.
        ranks: number of ranks that divide it; if several groups replicate each other, of one group.
        by_gloo: whether the ranks are on CPUs, whose network copies what it sends.
        reduce_at_last: whether gradients are kept whole until the last pass of a step.
        offload: whether kept tensors are in host memory.
    """

    parts: Parts
    ranks: int
    by_gloo: bool
    reduce_at_last: bool = False
    offload: bool = False

    def state(self, optimizer_bytes: int) -> dict[str, int]:
        """Return the bytes of one rank's part of the state, and of what is gathered at a time, by
        kind. `optimizer_bytes`: optimizer state of the whole model. They are assumed to peak at the
        same time as the activations, so their sum is rather too high."""
        kept = 0 if self.offload else 1
        whole = self.parts.whole
        return {
            "parameters": kept * self.part(whole),
            "gradients": whole if self.reduce_at_last else kept * self.part(whole),
            "optimizer state": kept * self.part(optimizer_bytes),
            GATHERED: self._gathered(),
        }

    def without_state(self, timeline: Timeline) -> Timeline:
        """Return `timeline` as one rank executes it, without the state, and from the moment at which
        the step begins."""
        begin = timeline.released or 0
        operations = timeline.operations
        return replace(
            timeline,
            blocks=[
                replace(block, num_bytes=self.bytes_of(block)) if block.phase == "update" else block
                for block in timeline.blocks
                if block.kind not in STATE and (block.died is None or block.died > begin)
            ],
            scratch={
                moment: self.part(size) if operations[moment - 1].phase == "update" else size
                for moment, size in timeline.scratch.items()
                if moment > begin
            },
        )

    def bytes_of(self, block: Block) -> int:
        """Return the bytes that one rank has of `block`."""
        is_divided = block.kind in STATE or block.phase == "update"
        return self.part(block.num_bytes) if is_divided else block.num_bytes

    def _gathered(self) -> int:
        """Return the maximum bytes of weights and gradients that are gathered at once. Each block
        has both, and the flat buffers of its neighbors: gradients that are sent, and weights that
        CUDA prefetches. gloo copies what it sends, so there one of them exists at a time."""
        root, blocks = self.parts.root, self.parts.blocks
        sizes = [
            2 * block + (max(before, after, self.part(block)) if self.by_gloo else before + after)
            for before, block, after in zip((0, *blocks), blocks, (*blocks[1:], 0), strict=False)
        ]
        # At the end the gradients of the root are flattened, sent and reduced.
        ending = (2 if self.by_gloo else 1) * root + self.part(root)
        # In transfers to and from the host, a rank's part of the largest group is on the device.
        crossing = 2 * self.part(max(root, *blocks, 0)) if self.offload else 0
        return crossing + max(2 * root + max(sizes, default=0), ending)

    def part(self, size: int) -> int:
        """Return the bytes that one rank has of `size` bytes that are divided."""
        return -(-size // self.ranks)


@dataclass(frozen=True, slots=True)
class Sums:
    """Gradient sums on the rank that holds the most, in any step.

    Attributes:
        kept: number of sums, each as large as all gradients, that wait while others are computed.
        slots: maximum number of sums that one rank sends to the others.
        num_ranks: number of all ranks.
    """

    kept: int
    slots: int
    num_ranks: int

    def held(self, flats: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield tensors as large as those held in addition to the buckets `flats`."""
        for _ in range(self.kept):
            yield from (flat.new_empty(len(flat)) for flat in flats)
        if self.num_ranks > 1:
            for dtype in {flat.dtype for flat in flats}:
                largest = max((flat for flat in flats if flat.dtype == dtype), key=len)
                size = self.num_ranks * self.slots * piece_of(largest, self.num_ranks)
                yield from (largest.new_empty(size) for _ in ("sent", "received"))


def sums_of(identity: TaskIdentity, shares: tuple[float, ...]) -> Sums | None:
    """Return the sums of a reproducible run on ranks with `shares`, or None if it is not
    reproducible."""
    if identity.num_parts is None:
        return None
    waiting = Waiting.of(identity.num_parts, shares)
    return Sums(max(waiting.kept), waiting.slots, len(shares))

"""What a sharded model takes on each rank, from the sizes of its blocks; sums that a rank holds.

What is kept (weights, gradients, optimizer state) is divided by the number of ranks. What is gathered
is not: it is that of a few blocks at a time, and follows from the order in which FSDP takes and frees
buffers. That order is played through here, so blocks may be of any sizes:

    forward, per block    1 flat buffer, gathered     the one of the block before is still there
                          2 weights, copied out       compute
                          3 weights freed             the flat buffer stays until step 2 of the next
    backward, per block   1 flat buffer, gathered     the gradients of the block before are on their way
                          2 weights; buffer freed     compute: weights and gradients
                          3 gradients, flat           weights freed; added up; own part kept

The root (what is in no block: embeddings, the head) is gathered all the time, its gradients too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anybatch.compute import find_blocks
from anybatch.compute.buckets import piece_of
from anybatch.data import Waiting
from anybatch.plans import TaskIdentity


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes of the weights of a model, as they are gathered: with the root, and with each block in the
    order in which they run."""

    root: int
    blocks: tuple[int, ...]

    @property
    def whole(self) -> int:
        """All of them."""
        return self.root + sum(self.blocks)


@dataclass(frozen=True, slots=True)
class ShardedBytes:
    """What one rank holds, in bytes.

    Attributes:
        parameters, gradients, optimizer_state: its parts, kept.
        forward, backward: most that is gathered at any moment of a pass, beside what is kept.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    forward: int
    backward: int

    @property
    def kept(self) -> int:
        """Between two passes of a step."""
        return self.parameters + self.gradients + self.optimizer_state

    @property
    def peak(self) -> int:
        """At the worst moment of a pass, without activations."""
        return self.kept + max(self.forward, self.backward)


def parts_of(model: nn.Module) -> Parts:
    """How `model`, which may be fake, is gathered: as `parallel.Shard` does by default."""
    sizes: list[int] = []
    seen: set[int] = set()
    sequence = isinstance(model, nn.Sequential)
    for name in find_blocks(model) or [n for n, _ in model.named_children() if sequence]:
        block = model.get_submodule(name)
        inside = {id(m) for m in block.modules()}
        rest = {id(p) for m in model.modules() if id(m) not in inside for p in _own(m)}
        own = {id(p): p.nbytes for p in block.parameters()}
        if own and not own.keys() & rest:
            sizes.append(sum(own.values()))
            seen |= own.keys()
    return Parts(sum(p.nbytes for p in model.parameters() if id(p) not in seen), tuple(sizes))


def sharded_bytes(
    parts: Parts,
    ranks: int,
    optimizer_state: int,
    *,
    copies_by_network: int = 1,
    prefetch: bool = False,
    reduce_at_last: bool = False,
    offload: bool = False,
) -> ShardedBytes:
    """What each of `ranks` ranks holds of a model.

    Args:
        parts: of its weights, in the dtype in which they are kept.
        ranks: that divide the model.
        optimizer_state: bytes of it for the whole model.
        copies_by_network: of a buffer, made while it crosses the network: 1 for gloo, 0 for NCCL.
        prefetch: whether backward gathers the next block while it computes (on CUDA).
        reduce_at_last: whether gradients are kept whole until the last pass of a step.
        offload: whether what is kept lies in host memory; of whole gradients, which no pass has added
            up yet, nothing does.
    """
    gathered, root = parts.blocks, parts.root
    kept = 0 if offload else 1
    # On its way to and from the host a rank's part of the largest group is on the device.
    crossing = 0 if kept else 2 * _part(max(root, *gathered, 0), ranks)
    return ShardedBytes(
        parameters=kept * _part(parts.whole, ranks),
        gradients=root + sum(gathered) if reduce_at_last else kept * _part(parts.whole, ranks),
        optimizer_state=kept * _part(optimizer_state, ranks),
        forward=crossing + _forward(root, gathered, copies_by_network),
        backward=crossing
        + _backward(
            root, gathered, parts, ranks, copies_by_network, prefetch and len(gathered) > 1
        ),
    )


STATE = ("parameters", "gradients", "optimizer state")
"""The kinds of bytes that are divided."""

GATHERED = "gathered weights and gradients"


@dataclass(frozen=True, slots=True)
class Division:
    """A model divided over ranks, for an estimate that was made of the whole.

    Attributes:
        parts: of its weights.
        ranks: that divide it: one group of them, where several groups replicate each other.
        by_gloo: between CPU ranks, whose network copies what crosses.
        reduce_at_last: gradients are kept whole until the last pass of a step.
        offload: what is kept lies in host memory.
    """

    parts: Parts
    ranks: int
    by_gloo: bool
    reduce_at_last: bool = False
    offload: bool = False

    def divided(self, num_bytes: int, by_kind: dict[str, int]) -> tuple[int, dict[str, int]]:
        """A peak of one rank from that of the whole model: the state is a part of it, and the weights
        and gradients that are gathered at a time come to it. As if they were at their most when the
        activations are, so it is rather too much."""
        whole = sum(by_kind.get(kind, 0) for kind in STATE)
        here = sharded_bytes(
            self.parts,
            self.ranks,
            by_kind.get("optimizer state", 0),
            copies_by_network=int(self.by_gloo),
            prefetch=not self.by_gloo,
            reduce_at_last=self.reduce_at_last,
            offload=self.offload,
        )
        kinds = {
            **by_kind,
            "parameters": here.parameters,
            "gradients": here.gradients,
            "optimizer state": here.optimizer_state,
            GATHERED: max(here.forward, here.backward),
        }
        return num_bytes - whole + here.peak, kinds


def _forward(root: int, blocks: Sequence[int], copies: int) -> int:
    most = root + max(root, copies * root)
    before = root
    for block in blocks:
        gathering = before + block + copies * block
        computing = block + block
        most = max(most, root + gathering, root + computing)
        before = block
    return most


def _backward(
    root: int, blocks: Sequence[int], parts: Parts, ranks: int, copies: int, prefetch: bool
) -> int:
    held = root + root  # its weights and its gradients
    most = held
    leaving = 0  # flat gradients of the block before, until the next ones are flattened
    for number in reversed(range(len(blocks))):
        block, flat = blocks[number], parts.blocks[number]
        ahead = blocks[number - 1] if prefetch and number else 0
        gathering = leaving + block + max(block, copies * block)
        computing = leaving + block + block + ahead
        # Fetched ahead while the weights of this block are there, and nothing of its gradients.
        fetching = leaving + block + ahead + copies * ahead
        flattening = block + flat + ahead
        adding_up = flat + copies * flat + _part(flat, ranks) + ahead
        most = max(most, held + max(gathering, computing, fetching, flattening, adding_up))
        leaving = flat
    # At the end its weights are gone, and its gradients are flattened and added up.
    ending = max(root + parts.root, (1 + copies) * parts.root + _part(parts.root, ranks))
    return max(most, ending)


def _part(size: int, ranks: int) -> int:
    return -(-size // ranks)


def _own(module: nn.Module) -> list[torch.Tensor]:
    return list(module.parameters(recurse=False))


@dataclass(frozen=True, slots=True)
class Sums:
    """Of the rank that holds most, in any step.

    Attributes:
        kept: sums as large as all gradients that wait while others are computed.
        slots: sums that a rank tells the others, at the most.
        num_ranks: of all.
    """

    kept: int
    slots: int
    num_ranks: int

    def held(self, flats: Sequence[Tensor]) -> Iterator[Tensor]:
        """Tensors as large as what is held beside the buckets `flats`."""
        for _ in range(self.kept):
            yield from (flat.new_empty(len(flat)) for flat in flats)
        if self.num_ranks > 1:
            for dtype in {flat.dtype for flat in flats}:
                largest = max((flat for flat in flats if flat.dtype == dtype), key=len)
                size = self.num_ranks * self.slots * piece_of(largest, self.num_ranks)
                yield from (largest.new_empty(size) for _ in ("sent", "received"))


def sums_of(identity: TaskIdentity, shares: tuple[float, ...]) -> Sums | None:
    """Of a reproducible run on ranks with `shares`; None: it is not one."""
    if identity.num_parts is None:
        return None
    waiting = Waiting.of(identity.num_parts, shares)
    return Sums(max(waiting.kept), waiting.slots, len(shares))

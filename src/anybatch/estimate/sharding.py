"""Memory of a sharded model on each rank, from the sizes of its blocks; sums that a rank holds.

Kept tensors (weights, gradients, optimizer state) are divided by the number of ranks. Gathered
tensors are not: they belong to a few blocks at a time, and their size follows from the order in
which FSDP allocates and frees buffers. That order is simulated here, so blocks may have any size:

    forward, per block    1 flat buffer, gathered     the buffer of the previous block still exists
                          2 weights, copied out       compute
                          3 weights freed             the flat buffer stays until step 2 of the next
    backward, per block   1 flat buffer, gathered     gradients of the previous block are being sent
                          2 weights; buffer freed     compute: weights and gradients
                          3 gradients, flat           weights freed; reduced; own part kept

The root (parameters outside of blocks: embeddings, the head) is gathered all the time, with its
gradients.
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
    """Bytes of the weights of a model by the group in which they are gathered: the root, and each
    block in execution order."""

    root: int
    blocks: tuple[int, ...]

    @property
    def whole(self) -> int:
        """Bytes of all weights."""
        return self.root + sum(self.blocks)


@dataclass(frozen=True, slots=True)
class ShardedBytes:
    """Memory of one rank, in bytes.

    Attributes:
        parameters, gradients, optimizer_state: the parts that the rank keeps.
        forward, backward: maximum that is gathered at any moment of a pass, in addition to the kept
            parts.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    forward: int
    backward: int

    @property
    def kept(self) -> int:
        """Bytes held between two passes of a step."""
        return self.parameters + self.gradients + self.optimizer_state

    @property
    def peak(self) -> int:
        """Bytes held at the peak of a pass, without activations."""
        return self.kept + max(self.forward, self.backward)


def parts_of(model: nn.Module) -> Parts:
    """Return how `model`, which may be fake, is gathered by default in `parallel.Shard`."""
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
    """Return the memory of a model on each of `ranks` ranks.

    Args:
        parts: bytes of its weights, in the dtype in which they are kept.
        ranks: number of ranks that divide the model.
        optimizer_state: bytes of the optimizer state of the whole model.
        copies_by_network: number of copies of a buffer made while it is sent: 1 for gloo, 0 for
            NCCL.
        prefetch: whether backward gathers the next block while it computes (on CUDA).
        reduce_at_last: whether gradients are kept whole until the last pass of a step.
        offload: whether kept tensors are in host memory. Whole gradients, which have not been
            reduced yet, stay on the device.
    """
    gathered, root = parts.blocks, parts.root
    kept = 0 if offload else 1
    # In transfers to and from the host, a rank's part of the largest group is on the device.
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
"""The kinds of bytes that are divided over ranks."""

GATHERED = "gathered weights and gradients"


@dataclass(frozen=True, slots=True)
class Division:
    """Division of a model over ranks, applied to an estimate of the whole model.

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

    def divided(self, num_bytes: int, by_kind: dict[str, int]) -> tuple[int, dict[str, int]]:
        """Return the peak of one rank, and its bytes by kind, from those of the whole model: the
        state is divided, and the weights and gradients that are gathered at a time are added. They
        are assumed to peak at the same time as the activations, so the result is rather too high."""
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
    held = root + root  # weights and gradients of the root
    most = held
    leaving = 0  # flat gradients of the previous block, until the next are flattened
    for number in reversed(range(len(blocks))):
        block, flat = blocks[number], parts.blocks[number]
        ahead = blocks[number - 1] if prefetch and number else 0
        gathering = leaving + block + max(block, copies * block)
        computing = leaving + block + block + ahead
        # Prefetched while the weights of this block exist, but none of its gradients.
        fetching = leaving + block + ahead + copies * ahead
        flattening = block + flat + ahead
        adding_up = flat + copies * flat + _part(flat, ranks) + ahead
        most = max(most, held + max(gathering, computing, fetching, flattening, adding_up))
        leaving = flat
    # At the end the weights of the root are freed, and its gradients are flattened and reduced.
    ending = max(root + parts.root, (1 + copies) * parts.root + _part(parts.root, ranks))
    return max(most, ending)


def _part(size: int, ranks: int) -> int:
    return -(-size // ranks)


def _own(module: nn.Module) -> list[torch.Tensor]:
    return list(module.parameters(recurse=False))


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

"""Tree reduction: adds up the parts of a step in the same order wherever they are computed.

Parts 0 to n - 1 are the leaves of a binary tree that is always split at powers of two:

    parts        0   1   2   3   4   5        6 parts
    level 1      (0+1)   (2+3)   (4+5)
    level 2      ((0+1)+(2+3))     |          a node without a right half equals its left half
    root         (((0+1)+(2+3))+(4+5))

A rank with consecutive parts can add up all nodes that lie entirely within them, and the root can be
computed from such nodes, in their order. Floating-point sums are bitwise equal, since every addition
has the same two operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from anybatch.data.cut import share
from anybatch.plans import num_units

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Node:
    """Parts `number << level` up to `(number + 1) << level` (exclusive), as far as they exist."""

    level: int
    number: int


def join(
    stack: list[tuple[Node, T]], node: Node, value: T, num_parts: int, add: Callable[[T, T], T]
) -> None:
    """Pushes `node` onto a `stack` of nodes, and joins nodes that are complete.

    Args:
        stack: consecutive nodes, each with its sum; `node` follows the last one.
        node: the node to push; a part has the level 0.
        value: the sum of `node`.
        num_parts: number of parts in the step.
        add: adds two sums, the left one first. May write into either.
    """
    top = (num_parts - 1).bit_length()
    while node.level < top:
        if node.number % 2:
            left = Node(node.level, node.number - 1)
            if not stack or stack[-1][0] != left:
                break
            value = add(stack.pop()[1], value)
        elif (node.number + 1) << node.level < num_parts:
            break  # its right half is still to come
        node = Node(node.level + 1, node.number // 2)
    stack.append((node, value))


def nodes_of(parts: range, num_parts: int) -> tuple[Node, ...]:
    """Returns the nodes that remain of `parts` when all of them are joined."""
    *_, last = ((), *_growing(parts, num_parts))
    return last


def most_kept(parts: range, num_parts: int) -> int:
    """Returns the largest number of nodes on the stack while another of `parts` is computed."""
    return max(map(len, _growing(parts[:-1], num_parts)), default=0)


def _growing(parts: range, num_parts: int) -> Iterator[tuple[Node, ...]]:
    """Yields the nodes on the stack after each of `parts`."""
    stack: list[tuple[Node, None]] = []
    for part in parts:
        join(stack, Node(0, part), None, num_parts, lambda left, right: None)
        yield tuple(node for node, _ in stack)


@dataclass(frozen=True, slots=True)
class Waiting:
    """The largest number of pending sums in any step of a run, full or smaller.

    Attributes:
        kept: by rank, the sums that are held while others are computed.
        slots: the sums that one rank sends to the others.
    """

    kept: tuple[int, ...]
    slots: int

    @classmethod
    def of(cls, num_parts: int, shares: Sequence[float | int]) -> Waiting:
        """Returns the maximum over steps of up to `num_parts` parts."""
        kept, slots = [0] * len(shares), 0
        for count in range(1, num_parts + 1):
            for rank in range(len(shares)):
                parts = parts_of_rank(count, 1, shares, rank)
                kept[rank] = max(kept[rank], most_kept(parts, count))
                slots = max(slots, len(nodes_of(parts, count)))
        return cls(tuple(kept), slots)


def part_at(position: int, num_samples: int, part: int) -> int:
    """Returns the part that contains the sample at `position`, in a step of `num_samples` samples."""
    return min(position // part, num_units(num_samples, part) - 1)


def parts_of_rank(num_samples: int, part: int, shares: Sequence[float | int], rank: int) -> range:
    """Returns the parts that `rank` takes of a step of `num_samples` samples."""
    own = share(num_samples, shares, rank, part)
    if not own:
        return range(0)
    return range(own.start // part, part_at(own.stop - 1, num_samples, part) + 1)

"""Tree: the parts of a step, added up in one order wherever they were computed.

Part number 0 to n - 1 are the leaves of a binary tree whose nodes always halve at powers of two:

    parts        0   1   2   3   4   5        6 parts
    level 1      (0+1)   (2+3)   (4+5)
    level 2      ((0+1)+(2+3))     |          a node without a right half is its left one
    root         (((0+1)+(2+3))+(4+5))

Whoever has parts that follow one another can add up the nodes that lie in them whole, and from such
nodes, in their order, the root can be found. Floating-point sums are the same to the bit, since every
sum of two is made of the same two.
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
    """Parts `number << level` up to `(number + 1) << level`, as far as there are such."""

    level: int
    number: int


def join(
    stack: list[tuple[Node, T]], node: Node, value: T, num_parts: int, add: Callable[[T, T], T]
) -> None:
    """Put `node` on top of a `stack` of nodes, and join what has come to be whole.

    Args:
        stack: nodes that follow one another, each with its sum; `node` follows the last.
        node: a part has the level 0.
        value: its sum.
        num_parts: of the step.
        add: makes the sum of two, the left one first. May write into either.
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
    """The nodes that are left of `parts` when all of them are joined."""
    *_, last = ((), *_growing(parts, num_parts))
    return last


def most_kept(parts: range, num_parts: int) -> int:
    """The most nodes that are on the stack while another of `parts` is computed."""
    return max(map(len, _growing(parts[:-1], num_parts)), default=0)


def _growing(parts: range, num_parts: int) -> Iterator[tuple[Node, ...]]:
    """The nodes on the stack after each of `parts`."""
    stack: list[tuple[Node, None]] = []
    for part in parts:
        join(stack, Node(0, part), None, num_parts, lambda left, right: None)
        yield tuple(node for node, _ in stack)


@dataclass(frozen=True, slots=True)
class Waiting:
    """The most sums that wait in any step of a run, full or smaller.

    Attributes:
        kept: by rank, those that wait while others are computed.
        slots: those that one rank tells the others.
    """

    kept: tuple[int, ...]
    slots: int

    @classmethod
    def of(cls, num_parts: int, shares: Sequence[float | int]) -> Waiting:
        """Of steps of up to so many parts."""
        kept, slots = [0] * len(shares), 0
        for count in range(1, num_parts + 1):
            for rank in range(len(shares)):
                parts = parts_of_rank(count, 1, shares, rank)
                kept[rank] = max(kept[rank], most_kept(parts, count))
                slots = max(slots, len(nodes_of(parts, count)))
        return cls(tuple(kept), slots)


def part_at(position: int, num_samples: int, part: int) -> int:
    """The part of a step of so many samples that has the one at `position`."""
    return min(position // part, num_units(num_samples, part) - 1)


def parts_of_rank(num_samples: int, part: int, shares: Sequence[float | int], rank: int) -> range:
    """The parts that `rank` takes of a step of so many samples."""
    own = share(num_samples, shares, rank, part)
    if not own:
        return range(0)
    return range(own.start // part, part_at(own.stop - 1, num_samples, part) + 1)

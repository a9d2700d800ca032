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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from anybatch.data.cut import share

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Node:
    """Parts `number << level` up to `(number + 1) << level`, as far as there are such."""

    level: int
    number: int


def push(
    stack: list[tuple[Node, T]], part: int, value: T, num_parts: int, add: Callable[[T, T], T]
) -> None:
    """Put `part` on top of a `stack` of nodes, and join what has come to be whole.

    Args:
        stack: nodes that follow one another, each with its sum; the next part is `part`.
        part: its number.
        value: of the part.
        num_parts: of the step.
        add: makes the sum of two, the left one first. May write into either.
    """
    join(stack, Node(0, part), value, num_parts, add)


def join(
    stack: list[tuple[Node, T]], node: Node, value: T, num_parts: int, add: Callable[[T, T], T]
) -> None:
    """As `push`, for a node."""
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
    """The nodes that are left of `parts` when all of them are pushed."""
    stack: list[tuple[Node, None]] = []
    for part in parts:
        push(stack, part, None, num_parts, lambda left, right: None)
    return tuple(node for node, _ in stack)


def most_kept(parts: range, num_parts: int) -> int:
    """The most nodes that are on the stack while another of `parts` is computed."""
    stack: list[tuple[Node, None]] = []
    most = 0
    for part in parts[:-1]:
        push(stack, part, None, num_parts, lambda left, right: None)
        most = max(most, len(stack))
    return most


def num_parts_of(num_samples: int, part: int) -> int:
    """Parts of a step of so many samples, `part` each. A rest of one sample belongs to the part before
    it, as `share` and `ghosts` have it."""
    whole, rest = divmod(num_samples, part)
    return whole + (rest > 1 or (rest == 1 and whole == 0))


def part_at(position: int, num_samples: int, part: int) -> int:
    """The part of a step of so many samples that has the one at `position`."""
    return min(position // part, num_parts_of(num_samples, part) - 1)


def parts_of_rank(num_samples: int, part: int, shares: Sequence[float | int], rank: int) -> range:
    """The parts that `rank` takes of a step of so many samples."""
    own = share(num_samples, shares, rank, part)
    if not own:
        return range(0)
    return range(own.start // part, part_at(own.stop - 1, num_samples, part) + 1)

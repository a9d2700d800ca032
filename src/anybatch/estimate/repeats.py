"""Repeats: blocks that are alike are traced a few times, and counted as often as they occur.

A transformer runs dozens of blocks of one structure one after the other, so a trace of it repeats
itself. `shortened` removes all but the first two and the last two of such blocks from the list that
holds them, and `expanded` copies what the second one did for each block that was left out. In each
direction, a block runs from its first operation to the first operation of the next block: its
memory is allocated there, and freed there or while a neighbor runs.

The result is exact or refused: the two blocks in the middle must have done the same, and everything
else must be freed at a moment that does not depend on the number of blocks (`NotRegular`). Blocks
are only left out if the result was verified once for the model, on `VERIFIED_AT_EACH_END` blocks at
each end of a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from itertools import groupby
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn

from anybatch.estimate.trace import Block, Operation, Timeline
from anybatch.plans import Recompute

_AT_EACH_END = 2
VERIFIED_AT_EACH_END = 6
_LEAST = 8
"""Minimum number of blocks that are alike for which some are left out."""

Run = tuple[str, ...]
"""Names of consecutive blocks of a list that are alike."""


class NotRegular(Exception):
    """Raised if a trace is not that of blocks that all do the same."""


class Runs:
    """Runs of blocks of which traces need a few.

    Attributes:
        found: the runs, as far as they are known.
    """

    def __init__(self) -> None:
        self.found: list[Run] = []
        self._are_inner = False

    def refuse(self) -> None:
        """Take back runs that are not regular under some choice. The first and the last block are
        left out once: gradients may end or begin there."""
        self.found = [] if self._are_inner else [run[1:-1] for run in self.found]
        self._are_inner = True


@dataclass(frozen=True, slots=True)
class Repeat:
    """Blocks that are left out.

    Attributes:
        kept: the four blocks that run, in order. Those left out are between the second, which stands
            for them, and the third.
        left_out: names of the blocks left out, in order.
    """

    kept: tuple[str, str, str, str]
    left_out: tuple[str, ...]


def runs_of(model: nn.Module, names: Sequence[str]) -> tuple[Run, ...]:
    """Return the runs of at least `_LEAST` blocks, among the blocks `names` of `model`."""
    found: list[Run] = []
    for parent, several in groupby(names, key=lambda name: name.rpartition(".")[0]):
        holder = model.get_submodule(parent)
        if isinstance(holder, nn.Sequential | nn.ModuleList):
            found += _runs_in(holder, f"{parent}." if parent else "", set(several))
    return tuple(run for run in found if len(run) >= _LEAST)


def _runs_in(holder: nn.Module, prefix: str, names: set[str]) -> Iterator[Run]:
    run: list[str] = []
    last: nn.Module | None = None
    for key, block in holder.named_children():
        name = f"{prefix}{key}"
        if name not in names or last is None or not _are_alike(last, block):
            yield tuple(run)
            run = []
        if name in names:
            run.append(name)
        last = block
    yield tuple(run)


_DEEPEST = 16


def _are_alike(one: Any, other: Any, depth: int = 0) -> bool:
    """Return whether two values of consecutive blocks are alike: of the same structure, with equal
    settings. An integer may be one more in the second block, as the index of a layer is."""
    if type(one) is not type(other) or depth > _DEEPEST:
        return False
    if isinstance(one, Tensor):
        return one is not other and _geometry(one) == _geometry(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            _are_alike(value, other[key], depth + 1) for key, value in one.items()
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(
            _are_alike(a, b, depth + 1) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, nn.Module):
        return one is not other and _are_alike(_settings(one), _settings(other), depth + 1)
    if one is other:
        return True
    if isinstance(one, FunctionType):  # a hook, of which each module has its own
        return one.__code__ is other.__code__ and _are_alike(
            _enclosed(one), _enclosed(other), depth + 1
        )
    if type(one) is int:
        return one == other or other == one + 1
    if hasattr(one, "__dict__") and not callable(one):
        return _are_alike(vars(one), vars(other), depth + 1)
    return bool(one == other)


def _enclosed(function: FunctionType) -> list[Any]:
    """Return the values from around `function` that it uses, and its default values."""
    cells = [cell for cell in function.__closure__ or () if cell != CellType()]
    return [*(cell.cell_contents for cell in cells), *(function.__defaults__ or ())]


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of `module`, with its hooks in order (their keys count all hooks), and with
    0.5 for each rate of a dropout or of stochastic depth, which often increases from block to block.
    A rate of 0 runs other operations than the others."""
    found = {
        key: list(value.values()) if key.endswith("_hooks") and isinstance(value, dict) else value
        for key, value in vars(module).items()
    }
    name = type(module).__name__.lower()
    if "drop" in name or "stochastic" in name:
        for key, value in found.items():
            if type(value) is float and 0 < value < 1:
                found[key] = 0.5
    return found


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def repeats_of(
    runs: Sequence[Run], recompute: Recompute, at_each_end: int = _AT_EACH_END
) -> list[Repeat]:
    """Return what can be left out under `recompute`, which may apply to some of the blocks of a
    run, if `at_each_end` (2 or more) blocks at each end of a run are kept."""
    known = {name for run in runs for name in run}
    chosen = set(recompute.blocks)
    if recompute.nested or any("*" in name or name == "." for name in chosen):
        return []
    found: list[Repeat] = []
    for run in runs:
        for _, several in groupby(run, key=lambda name: name in chosen & known):
            part = tuple(several)
            if len(part) >= max(_LEAST, 2 * at_each_end + 1):
                begin, end = at_each_end, len(part) - at_each_end
                kept = part[begin - 2], part[begin - 1], part[end], part[end + 1]
                found.append(Repeat(kept, part[begin:end]))
    return found


def without(repeats: Sequence[Repeat], others: Sequence[Repeat]) -> list[Repeat]:
    """Return `repeats` without the blocks that `others` leave out."""
    gone = {name for other in others for name in other.left_out}
    return [
        Repeat(repeat.kept, tuple(name for name in repeat.left_out if name not in gone))
        for repeat in repeats
    ]


@contextmanager
def shortened(
    model: nn.Module, repeats: Sequence[Repeat], recompute: Recompute
) -> Iterator[Recompute]:
    """Context in which `model` is without the blocks that are left out. Yields `recompute` with the
    names that the other blocks have meanwhile."""
    gone = {name for repeat in repeats for name in repeat.left_out}
    parents = {name.rpartition(".")[0] for name in gone}
    renamed: dict[str, str] = {}
    before: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []
    try:
        for parent in parents:
            holder, prefix = model.get_submodule(parent), f"{parent}." if parent else ""
            children = holder._modules
            before.append((holder, children))
            kept = [key for key in children if f"{prefix}{key}" not in gone]
            holder._modules = {str(i): children[key] for i, key in enumerate(kept)}
            renamed |= {f"{prefix}{key}": f"{prefix}{i}" for i, key in enumerate(kept)}

        def now(names: Sequence[str]) -> tuple[str, ...]:
            return tuple(
                renamed_to(name, owner, renamed[owner]) if owner in renamed else name
                for name, owner in ((name, _owner(name, {*renamed, *gone})) for name in names)
                if owner not in gone
            )

        yield recompute.model_copy(
            update={"blocks": now(recompute.blocks), "tiled": now(recompute.tiled)}
        )
    finally:
        for holder, children in before:
            holder._modules = children


def _owner(name: str, blocks: set[str]) -> str:
    """Return the one of `blocks` that is or contains the module `name`, or an empty string."""
    while name and name not in blocks:
        name = name.rpartition(".")[0]
    return name


def renamed_to(name: str, block: str, other: str) -> str:
    """Return the name of the module in block `other` that `name` is in `block`."""
    return other + name[len(block) :]


def named_again(names: Sequence[str], repeats: Sequence[Repeat]) -> Iterator[tuple[str, str]]:
    """Yield each of the module `names` inside a block that stands for others, with its name in each
    of these."""
    for repeat in repeats:
        one = repeat.kept[1]
        for name in names:
            if name == one or name.startswith(f"{one}."):
                for other in repeat.left_out:
                    yield name, renamed_to(name, one, other)


# ---------------------------------------------------------------------------------------- timelines


@dataclass(frozen=True, slots=True)
class _Visit:
    """Operations of one block in a row, in one direction, and the others before the next block:
    those from the moment `begin` to the moment before `end`."""

    begin: int
    end: int
    block: str


@dataclass(frozen=True, slots=True)
class _Pass:
    """The visits of the four blocks of a `Repeat` in one direction, as indices, in the order of
    `Repeat.kept`."""

    repeat: Repeat
    visits: tuple[int, int, int, int]


def expanded(timeline: Timeline, start: int, repeats: Sequence[Repeat]) -> Timeline:
    """Return `timeline`, whose operations begin after moment `start`, with the blocks that were left
    out. Raises `NotRegular`."""
    return _Expansion(timeline, start, repeats).result()


def counted_again(
    timeline: Timeline, start: int, repeats: Sequence[Repeat]
) -> Callable[[int], Sequence[str]]:
    """Return a function that maps a moment of `timeline`, whose operations begin after moment `start`,
    to the names of the blocks for which its operation counts too. Raises `NotRegular`."""
    return _Expansion(timeline, start, repeats).counted_again


class _Expansion:
    """Puts the result together."""

    def __init__(self, timeline: Timeline, start: int, repeats: Sequence[Repeat]) -> None:
        self._old = timeline
        self._start = start
        self._blocks = {name for repeat in repeats for name in repeat.kept}
        self._owners: dict[str, str] = {}
        self._visits = list(self._found_visits())
        self._at: list[int] = []  # moment after `start` -> index of its visit, or -1
        for number, visit in enumerate(self._visits):
            self._at += [-1] * (visit.begin - start - 1 - len(self._at))
            self._at += [number] * (visit.end - visit.begin)
        self._passes = [one for repeat in repeats for one in self._found_passes(repeat)]
        self._passed = {
            visit: (one, place) for one in self._passes for place, visit in enumerate(one.visits)
        }
        # Where each visit begins in the result, and its copies, which precede or follow it.
        self._begins: dict[tuple[int, int], int] = {}
        self._new = replace(timeline, blocks=[], scratch={}, operations=[])
        self._copies: dict[tuple[int, str], list[Operation]] = {}

    # ------------------------------------------------------------------------------------- visits

    def _owner(self, module: str) -> str:
        owner = self._owners.get(module)
        if owner is None:
            owner = self._owners[module] = _owner(module, self._blocks)
        return owner

    def _found_visits(self) -> Iterator[_Visit]:
        begin, current = 0, ("", False)
        moment = self._start
        for operation in self._old.operations:
            moment += 1
            here = self._owner(operation.module), operation.backward
            if here[0] and here != current:
                if begin:
                    yield _Visit(begin, moment, current[0])
                begin, current = moment, here
        if begin:
            yield _Visit(begin, moment + 1, current[0])

    def _found_passes(self, repeat: Repeat) -> Iterator[_Pass]:
        order = [visit.block for visit in self._visits]
        inner, forward = repeat.kept[1:3], list(repeat.kept)
        number = 0
        while number < len(order):
            if order[number] not in inner:
                number += 1
                continue
            around = order[number - 1 : number + 3] if number else []
            first = number - 1
            if around == forward:
                yield _Pass(repeat, (first, first + 1, first + 2, first + 3))
            elif around == forward[::-1]:
                yield _Pass(repeat, (first + 3, first + 2, first + 1, first))
            else:
                raise NotRegular(f"blocks run in the order {around}")
            number += 2

    # ------------------------------------------------------------------------------------- result

    def result(self) -> Timeline:
        for one in self._passes:
            self._check_operations(one)
        self._lay_out()
        self._place_blocks()
        return self._new

    def counted_again(self, moment: int) -> Sequence[str]:
        one, place = self._passed.get(self._visit(moment), (None, 0))
        return one.repeat.left_out if one is not None and place == 1 else ()

    def _check_operations(self, one: _Pass) -> None:
        _, a, b, _ = (self._visits[number] for number in one.visits)
        first, second = self._operations(a), self._operations(b)
        if len(first) != len(second):
            raise NotRegular("blocks differ in their number of operations")
        for x, y in zip(first, second, strict=True):
            module = renamed_to(x.module, a.block, b.block) if self._owner(x.module) else x.module
            if (x.name, x.phase, x.backward, module) != (y.name, y.phase, y.backward, y.module):
                raise NotRegular(f"{x} is not {y}")

    def _operations(self, visit: _Visit) -> Sequence[Operation]:
        return self._old.operations[visit.begin - self._start - 1 : visit.end - self._start - 1]

    def _lay_out(self) -> None:
        """Lay out operations and scratch, the copies between the two blocks in the middle."""
        self._now = self._start
        until = self._visits[0].begin - 1 if self._visits else self._old.num_moments
        self._append(self._old.operations[: until - self._start], self._start + 1)
        for number, visit in enumerate(self._visits):
            found = self._passed.get(number)
            place = found[1] if found else 0
            if found and place == 1 and found[0].visits[0] > number:  # backward: copies come first
                self._append_copies(found[0], number, backward=True)
            self._begins[number, 0] = self._now + 1
            self._append(self._operations(visit), visit.begin)
            if found and place == 1 and found[0].visits[0] < number:
                self._append_copies(found[0], number, backward=False)
        self._new.num_moments = self._now

    def _append_copies(self, one: _Pass, number: int, backward: bool) -> None:
        numbers = range(1, len(one.repeat.left_out) + 1)
        visit = self._visits[number]
        operations = self._operations(visit)
        copies = [self._copies_of_operation(each, visit.block, one.repeat) for each in operations]
        for copy in reversed(numbers) if backward else numbers:
            self._begins[number, copy] = self._now + 1
            self._append([each[copy - 1] for each in copies], visit.begin)

    def _append(self, operations: Sequence[Operation], old: int) -> None:
        self._new.operations += operations
        if self._old.scratch:
            for number in range(len(operations)):
                if extra := self._old.scratch.get(old + number):
                    self._new.scratch[self._now + 1 + number] = extra
        self._now += len(operations)

    def _copies_of_operation(
        self, operation: Operation, block: str, repeat: Repeat
    ) -> Sequence[Operation]:
        """Return what an operation of `block` is in each of the blocks left out."""
        key = id(operation), repeat.kept[1]  # equal operations are one object
        found = self._copies.get(key)
        if found is None:
            name, phase, backward, module = astuple(operation)
            if self._owner(module) == block:
                found = [
                    Operation(name, phase, backward, renamed_to(module, block, other))
                    for other in repeat.left_out
                ]
            else:
                found = [operation] * len(repeat.left_out)
            self._copies[key] = found
        return found

    # ------------------------------------------------------------------------------------- blocks

    def _place_blocks(self) -> None:
        by_visit: dict[int, list[Block]] = {}
        for block in self._old.blocks:
            number = self._visit(block.born)
            found = self._passed.get(number)
            if found is not None and found[1] in (1, 2):
                by_visit.setdefault(number, []).append(block)
            else:
                self._new.blocks.append(self._placed(block, number))
        for one in self._passes:
            first, second = (by_visit.get(one.visits[place], []) for place in (1, 2))
            self._check_blocks(one, first, second)
            last = len(one.repeat.left_out) + 1
            for x, y in zip(first, second, strict=True):
                ends = self._relation(one, 1, x), self._relation(one, 2, y)
                # Blocks left out have two like neighbors: as `x` has after it, and `y` before it.
                inner = ends[1] if len(ends[1]) == 3 and ends[1][1] < 0 else ends[0]
                self._new.blocks += self._copies_of(x, one, 1, [0], ends[0])
                self._new.blocks += self._copies_of(x, one, 1, range(1, last), inner)
            for y in second:
                self._new.blocks += self._copies_of(y, one, 2, [last], self._relation(one, 2, y))

    def _visit(self, moment: int | None) -> int:
        if moment is None or not 0 < moment - self._start <= len(self._at):
            return -1
        return self._at[moment - self._start - 1]

    def _placed(self, block: Block, number: int) -> Block:
        """Return a block that does not belong to the two in the middle, at its new moments."""
        died = block.died
        if died is not None:
            end = self._visit(died)
            one, place = self._passed.get(end, (None, 0))
            if one is not None and place in (1, 2):
                # Only the outer neighbor may create what a middle block frees.
                neighbor = one.repeat.kept[0 if place == 1 else 3]
                if number < 0 or self._visits[number].block != neighbor:
                    raise NotRegular(f"{block} is freed by one of the blocks that repeat")
            died = self._same(died)
        return _block_at(block, self._same(block.born), died, block.module)

    def _same(self, moment: int) -> int:
        """Return the new moment of one that is not copied."""
        number = self._visit(moment)
        if number < 0:
            return moment
        return self._begins[number, 0] + moment - self._visits[number].begin

    def _relation(self, one: _Pass, place: int, block: Block) -> tuple[Any, ...]:
        """Return when a block of the middle is freed: at a moment that is the same for all, or while
        the same block or a neighbor runs, in some pass."""
        died = block.died
        end = self._visit(died)
        found = self._passed.get(end)
        if died is None or found is None:
            return (died,)
        step, offset = found[1] - place, died - self._visits[end].begin
        like = self._visits[found[0].visits[1]]
        # The last block of a pass is followed by the rest of the model.
        if found[0].repeat is one.repeat and abs(step) <= 1 and offset < like.end - like.begin:
            return found[0].visits, step, offset
        if found[1] in (1, 2):
            raise NotRegular(f"{block} is freed by one of the blocks that repeat")
        return (died,)

    def _check_blocks(self, one: _Pass, first: Sequence[Block], second: Sequence[Block]) -> None:
        if len(first) != len(second):
            raise NotRegular("blocks differ in their number of tensors")
        begins = [self._visits[one.visits[place]].begin for place in (1, 2)]
        for x, y in zip(first, second, strict=True):
            for_x = x.num_bytes, x.born - begins[0], x.kind, x.phase, x.item_bytes
            for_y = y.num_bytes, y.born - begins[1], y.kind, y.phase, y.item_bytes
            if for_x != for_y or not self._freed_alike(one, x, y):
                raise NotRegular(f"{x} is not {y}")

    def _freed_alike(self, one: _Pass, x: Block, y: Block) -> bool:
        """Return whether the second block of the middle frees `y` where the first frees `x`. An outer
        neighbor may free it in the same operation at another position: the last block that reads the
        result of an encoder has no earlier gradient to add to."""
        for_x, for_y = self._relation(one, 1, x), self._relation(one, 2, y)
        if for_x == for_y:
            return True
        if len(for_x) != 3 or for_x[:2] != for_y[:2] or for_x[1] == 0:
            return False
        ends = []
        for died in (x.died, y.died):
            assert died is not None
            done = self._old.operations[died - self._start - 1]
            owner = self._owner(done.module)
            ends.append(replace(done, module=renamed_to(done.module, owner, "") if owner else ""))
        return ends[0] == ends[1]

    def _copies_of(
        self,
        block: Block,
        one: _Pass,
        place: int,
        numbers: Sequence[int],
        relation: tuple[Any, ...],
    ) -> Iterator[Block]:
        """Yield `block`, which the block of the model at `place` creates, once for each of the
        `numbers` of blocks, counted from the first of the two in the middle. They are freed as
        `relation` says."""
        visit = one.visits[place]
        name, offset = self._visits[visit].block, block.born - self._visits[visit].begin
        is_own = self._owner(block.module) == name
        last = len(one.repeat.left_out) + 1
        died = relation[0]
        if len(relation) == 1 and died is not None:
            died = self._same(died)
        for number in numbers:
            if len(relation) == 3:
                visits, step, after = relation
                to = number + step
                where = 0 if to < 0 else 1 if to < last else 2 if to == last else 3
                died = self._begins[visits[where], to if where == 1 else 0] + after
            module = block.module
            if is_own and 0 < number < last:
                module = renamed_to(module, name, one.repeat.left_out[number - 1])
            begin = self._begins[visit, number if place == 1 else 0]
            yield _block_at(block, begin + offset, died, module)


def _block_at(block: Block, born: int, died: int | None, module: str) -> Block:
    # Not by `replace`, which takes four times as long.
    return Block(block.num_bytes, born, block.phase, died, block.kind, module, block.item_bytes)


def do_the_same(one: Timeline, other: Timeline, start: int, until: tuple[int, int]) -> bool:
    """Return whether two timelines that continue a common one from the moment `start` on have the same
    operations, each up to its moment of `until`, and allocate the same memory in each. When that is
    freed is not compared: a trace that counts work keeps tensors for longer, and detaches them."""
    return _done(one, start, until[0]) == _done(other, start, until[1])


def _done(timeline: Timeline, start: int, until: int) -> list[tuple[Any, ...]]:
    allocated: Counter[int] = Counter()
    for block in timeline.blocks:
        allocated[block.born] += block.num_bytes
    return [
        (done.name, done.backward, done.module.strip("."), allocated[moment])
        for moment, done in enumerate(timeline.operations[: until - start], start + 1)
        if done.name != "aten.detach.default"
    ]

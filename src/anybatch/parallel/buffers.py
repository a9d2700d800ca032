"""Buffers after a step: the values that a single rank would hold after seeing all samples in order.

Every rank stages a step from the same buffers and writes them in its own passes. BatchNorm's running
statistics can be merged exactly. Each ghost batch with the statistic s replaces r by

    (1 - m) r + m s

so the update of a rank is affine, `end = a * start + b` with `a = (1 - m) ** ghosts`, for any s, and
affine maps are composed in rank order. With `momentum=None` the statistics are means over all batches
so far, and sums are added. For the buffers of any other module there is no such rule: the lowest rank
that wrote them broadcasts them, as DistributedDataParallel does with the buffers of rank 0. Only
buffers that changed are sent, since masks and tables can be large; changes are detected by comparing
contents, since some kernels write a buffer without changing its version.

Every rank computes the same results from the same numbers, so buffers are bitwise identical on all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from anybatch.parallel.collectives import broadcast_object, overwrite

Held = Callable[[nn.Module, str], Tensor | None]
"""Returns the value that buffer `name` of `module` had when the step began. The result is only read."""

Broadcast = Callable[[Sequence[Tensor | None], int], list[Tensor | None]]
"""Broadcasts the tensors of one rank: (this rank's tensors, source rank) -> the source rank's tensors.
May write into the given tensors."""


_STATISTICS = ("running_mean", "running_var")
_COUNT = "num_batches_tracked"


@final
class BufferAgreement:
    """Merges the buffers of `model` across ranks. Does not communicate itself: the caller passes the
    results of `contribution` on all ranks to `settle` on every rank.

    Args:
        model: the model, the same on all ranks.
        synchronised: every norm saw whole ghost batches on each participating rank, so the rank that
            saw the most of them already has the correct statistics.

    Attributes:
        size: length of a contribution.
    """

    def __init__(self, model: nn.Module, synchronised: bool = False) -> None:
        self._synchronised = synchronised
        self._norms: list[_BatchNorm] = []
        self._others: list[tuple[nn.Module, list[str]]] = []
        self._held: Held = _not_set
        for module in model.modules():
            names = list(module._buffers)
            if isinstance(module, _BatchNorm) and _is_affine(module):
                self._norms.append(module)
                names = [name for name in names if name not in (*_STATISTICS, _COUNT)]
            if names:
                self._others.append((module, names))
        self._widths = [
            sum(_known(norm._buffers[name]).numel() for name in _STATISTICS) for norm in self._norms
        ]
        self._num_flags = sum(len(names) for _, names in self._others)
        self.size: int = 2 * len(self._norms) + sum(self._widths) + self._num_flags

    def begin(self, held: Held) -> None:
        """Set how the buffers at the start of the step are read, on a rank that may have no
        `contribution`."""
        self._held = held

    @torch.no_grad()
    def contribution(self, held: Held) -> Tensor:
        """The changes of this rank to the buffers: float64, shape [size], on the CPU. Synchronizes with
        the device.

        Contains the batches that each norm saw before and in this step, the inhomogeneous parts of its
        running statistics, and which other buffers changed.

        Args:
            held: returns the buffers at the start of the step; also used by `settle`.
        """
        self._held = held
        batches = self._batches()
        starts, ends = self._statistics(held), self._statistics(_now)
        values = [
            self._added(norm.momentum, before, seen, start, end)
            for norm, (before, seen), start, end in zip(
                self._norms, batches, starts, ends, strict=True
            )
        ]
        flags = [
            _changed(module._buffers.get(name), held(module, name))
            for module, names in self._others
            for name in names
        ]
        counts = [count for pair in batches for count in pair]
        return torch.cat([torch.tensor(counts).double(), *values, torch.tensor(flags).double()])

    @torch.no_grad()
    def settle(self, contributions: Tensor, broadcast: Broadcast) -> None:
        """Set the buffers to those of a single rank that saw everything. Called after `contribution`.

        Args:
            contributions: contributions of all ranks, in rank order; shape [R, size], on the CPU.
            broadcast: used for buffers of other modules. Called the same number of times on all ranks.
        """
        parts = [2 * len(self._norms), sum(self._widths), self._num_flags]
        counts, values, flags = contributions.split(parts, dim=1)
        if self._norms:
            self._settle_norms(counts.long(), values)
        if bool(flags.any()):
            self._settle_others(flags, broadcast)

    def changed(self, contribution: Tensor) -> list[tuple[nn.Module, list[str]]]:
        """The modules other than norms whose buffers changed according to `contribution`, each with the
        names of all its buffers."""
        flags = contribution[self.size - self._num_flags :]
        per_module = flags.split([len(names) for _, names in self._others])
        return [
            place for place, some in zip(self._others, per_module, strict=True) if bool(some.any())
        ]

    def _batches(self) -> list[tuple[int, int]]:
        """For each norm, the number of batches before the step and in it (0 if forward has reset the
        count). Synchronizes with the device once for all norms."""
        if not self._norms:
            return []
        now = [norm._buffers[_COUNT] for norm in self._norms]
        before = [self._held(norm, _COUNT) for norm in self._norms]
        both = torch.stack([_known(count) for count in (*before, *now)]).tolist()
        pairs = zip(both[: len(now)], both[len(now) :], strict=True)
        return [(first, max(0, last - first)) for first, last in pairs]

    def _statistics(self, of: Held) -> Sequence[Tensor]:
        """The running statistics of each norm as one vector: float64, on the CPU."""
        found = [_known(of(norm, name)) for norm in self._norms for name in _STATISTICS]
        flat = torch.cat([one.double().reshape(-1) for one in found]).cpu() if found else None
        return () if flat is None else flat.split(self._widths)

    def _added(
        self, momentum: float | None, before: int, seen: int, start: Tensor, end: Tensor
    ) -> Tensor:
        """The inhomogeneous part of `end`, which does not depend on `start`: see the module."""
        if self._synchronised:
            return end
        if not seen:
            return torch.zeros_like(end)
        if momentum is None:  # the sum over this step's batches
            return _times(before + seen, end) - _times(before, start)
        return end - _times(_power(1.0 - momentum, seen), start)

    def _settle_norms(self, counts: Tensor, values: Tensor) -> None:
        """`counts`: [R, 2 * norms]; `values`: [R, sum of widths]."""
        starts = self._statistics(self._held)
        columns = values.split(self._widths, dim=1)
        finals: list[Tensor] = []
        for number, norm in enumerate(self._norms):
            before, seen = int(counts[0, 2 * number]), counts[:, 2 * number + 1].tolist()
            of_start, of_rank = self._weights(norm.momentum, before, seen)
            final = _times(of_start, starts[number])
            for weight, mine in zip(of_rank, columns[number], strict=True):
                final += _times(weight, mine)
            finals.append(final)
            num_seen = max(seen) if self._synchronised else sum(seen)
            _known(norm._buffers[_COUNT]).copy_(_known(self._held(norm, _COUNT)) + num_seen)
        targets = [_known(_now(norm, name)) for norm in self._norms for name in _STATISTICS]
        results = torch.cat(finals).to(targets[0].device).split([t.numel() for t in targets])
        for target, result in zip(targets, results, strict=True):
            target.copy_(result.view_as(target))

    def _weights(
        self, momentum: float | None, before: int, seen: list[int]
    ) -> tuple[float, list[float]]:
        """The weight of the starting value, and of the contribution of each rank."""
        total = sum(seen)
        if not total:
            return 1.0, [0.0] * len(seen)
        if self._synchronised:
            source = seen.index(max(seen))
            return 0.0, [float(rank == source) for rank in range(len(seen))]
        if momentum is None:
            share = 1.0 / (before + total)
            return before * share, [share if one else 0.0 for one in seen]
        keep = 1.0 - momentum
        return _power(keep, total), [
            _power(keep, sum(seen[rank + 1 :])) if one else 0.0 for rank, one in enumerate(seen)
        ]

    def _settle_others(self, flags: Tensor, broadcast: Broadcast) -> None:
        """Broadcast the changed buffers; those of a module all come from one rank, for consistency."""
        from_rank: dict[int, list[tuple[nn.Module, str]]] = {}
        per_module = flags.split([len(names) for _, names in self._others], dim=1)
        for (module, names), changed in zip(self._others, per_module, strict=True):
            if bool(changed.any()):
                source = int(changed.any(dim=1).long().argmax())
                crossing = zip(names, changed.any(dim=0).tolist(), strict=True)
                from_rank.setdefault(source, []).extend((module, n) for n, some in crossing if some)
        for source, places in sorted(from_rank.items(), key=lambda item: item[0]):
            mine = [module._buffers.get(name) for module, name in places]
            given = broadcast(mine, source)
            for (module, name), value in zip(places, given, strict=True):
                module._buffers[name] = value


@final
class Buffers:
    """A `BufferAgreement` between the parts of a step, each of which starts from the buffers at the
    start of the step. The passes of a rank are one part; in reproducible mode a rank may have several.

        begin      an attempt begins in which ranks do not have one part each
        staged     the passes of a part are over; may run out of memory
        gather     on every rank in every attempt, before the vote
        settle     on every rank, once the step is committed

    Args:
        model: the model, the same on all ranks.
        device: device of the tensors that the group communicates.
        num_parts: number of parts of a full step, which is the maximum.
        several: whether there are other ranks.
        synchronised: see `BufferAgreement`.
        group: process group of the ranks; None: the default one.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        num_parts: int,
        *,
        several: bool = True,
        synchronised: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._agreement = BufferAgreement(model, synchronised)
        self._device = device
        self._several = several
        self._group = group
        size = num_parts, self._agreement.size
        self._mine = torch.zeros(size, dtype=torch.float64)
        self._all = torch.zeros(size, dtype=torch.float64)
        # Allocated beforehand: the exchange before the vote must not run out of memory.
        self._theirs = torch.zeros(size, dtype=torch.float64, device=device)
        self._row = torch.zeros(size[1], dtype=torch.float64, device=device)
        self._rows = list(self._theirs.unbind())
        self._is_one_each = several
        self._first: dict[nn.Module, dict[str, Tensor | None]] = {}
        self._owners: Sequence[int] = range(num_parts)

    def begin(self, owners: Sequence[int]) -> None:
        """Begin an attempt. `owners`: the rank that computes each part."""
        self._mine.zero_()
        self._first.clear()
        self._owners = owners
        self._is_one_each = False

    @torch.no_grad()
    def staged(self, part: int, held: Held) -> None:
        """Compute the contribution of `part`; the buffers are reset before the next part of this rank.
        Synchronizes with the device."""
        if not self._agreement.size:
            return
        contribution = self._agreement.contribution(held)
        self._mine[part] = contribution + 0.0  # replaces -0.0 by 0.0
        if self._owners.count(self._owners[part]) == 1:
            return
        for module, names in self._agreement.changed(contribution):
            if module not in self._first:  # only the lowest part that wrote counts
                now = {name: module._buffers.get(name) for name in names}
                self._first[module] = {
                    name: None if one is None else one.detach().clone() for name, one in now.items()
                }

    def ended(self, held: Held) -> None:
        """Called when the passes of all parts are over, also on a rank without parts."""
        self._agreement.begin(held)

    def gather(self) -> None:
        """Exchange the contributions of all parts; parts that did not reach `staged` contribute zeros.
        Each part belongs to one rank, so the sums are bitwise exact."""
        if not self._agreement.size:
            return
        if self._is_one_each:  # half the bytes of an all-reduce
            self._row.copy_(self._mine[dist.get_rank(self._group)])
            dist.all_gather(self._rows, self._row, group=self._group)
        else:
            self._theirs.copy_(self._mine)
            if self._several:
                dist.all_reduce(self._theirs, group=self._group)
        self._all.copy_(self._theirs)
        self._mine.zero_()

    @torch.no_grad()
    def settle(self) -> None:
        """Make the buffers the same on all ranks. The step must have succeeded on all of them."""
        for module, found in self._first.items():
            for name, value in found.items():
                own = module._buffers.get(name)
                if own is None or value is None or _form(own) != _form(value):
                    module._buffers[name] = value
                else:  # in place, since there may be other references to it
                    own.data.copy_(value)
        self._first.clear()
        if self._agreement.size:
            self._agreement.settle(self._all, self._broadcast)

    def _broadcast(self, mine: Sequence[Tensor | None], part: int) -> list[Tensor | None]:
        """Broadcast the tensors of the rank that computes `part`, in place where the forms agree."""
        if not self._several:
            return list(mine)
        rank, device, group = self._owners[part], self._device, self._group
        forms = broadcast_object([None if t is None else _form(t) for t in mine], rank, group)
        given: list[Tensor | None] = []
        for own, form in zip(mine, forms, strict=True):
            if form is None:
                given.append(None)
                continue
            shape, dtype, kind = form
            if own is None or _form(own) != form:
                home = device if device.type == kind else torch.device(kind)
                own = torch.empty(shape, dtype=dtype, device=home)
            overwrite(own, rank, device, group)
            given.append(own)
        return given


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype, str]:
    """The properties that must agree for one tensor to be copied into another."""
    return tensor.shape, tensor.dtype, tensor.device.type


def _is_affine(norm: _BatchNorm) -> bool:
    """Whether the running statistics of `norm` can be merged: it has them, and counts its batches."""
    return all(norm._buffers.get(name) is not None for name in (*_STATISTICS, _COUNT))


def _changed(now: Tensor | None, before: Tensor | None) -> bool:
    if now is None or before is None:
        return now is not before
    same_kind = now.shape == before.shape and now.dtype == before.dtype
    return not (same_kind and now.device == before.device and torch.equal(now, before))


def _known(buffer: Tensor | None) -> Tensor:
    assert buffer is not None, "a norm lost its running statistics in the middle of a step"
    return buffer


def _now(module: nn.Module, name: str) -> Tensor | None:
    return module._buffers[name]


def _times(weight: float, values: Tensor) -> Tensor:
    """The product; zeros if `weight` is zero, whatever the values."""
    return values * weight if weight else torch.zeros_like(values)


def _power(base: float, exponent: int) -> float:
    """`base ** exponent` by squaring: bitwise identical on every machine, which a library's `pow` does
    not guarantee."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def _not_set(module: nn.Module, name: str) -> Tensor | None:
    raise RuntimeError("a rank must contribute before it can settle")

"""NormExchange: the way between ranks for synchronised norms, which no failure can block.

A rank may run out of memory between any two norms, may have no rows in a pass, or may have fewer passes
than others, and none of this is known beforehand, least of all in the first step. So nobody counts
what is left. Every exchange begins with a small header from each rank, on the CPU, and a rank that has
nothing to say says so, again and again, until all ranks have come to their end:

    rank 0    pass 0  norm 1 | pass 0  norm 2 | pass 1  norm 1 | pass 1  norm 2 | end
    rank 1    pass 0  norm 1 | pass 0  norm 2 | pass 2         | pass 2         | end     no rows in 1
    rank 2    pass 0  norm 1 | failed         | failed         | failed         | failed

Each column is one exchange. The least pass that anybody is in is the one that it belongs to; ranks that
are ahead wait by sending headers. If all is well, values follow: those who are in the pass send theirs,
the others zeros. If a rank has failed, or two are at different norms, everybody sees it in the same
header and nothing follows: the pass is abandoned on all ranks, and they meet at the vote. `finish` is
over when every rank is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from anybatch.errors import InputError

_END = 1 << 62  # the pass after the last


class PassAbandoned(Exception):
    """Another rank failed in this step, so what this one computes is of no use. Not an error of its
    own: the rank goes on to the vote."""


class _Header(NamedTuple):
    """What each rank says first."""

    number: int  # the pass it is in, or wants to begin
    place: int = -1  # the norm and direction
    num_values: int = 0  # per channel
    width: int = 0  # numbers that it will send
    left: int = -1  # the last pass in which it met others
    failed: int = 0  # it has no part in this step any more


@final
class NormExchange:
    """See the module; an `anybatch.compute.synchronised_norm.Exchange` over torch.distributed.

    `begin` and `finish` surround the passes of an attempt on every rank, whatever happens between them;
    no other collective of the process group may be started there.

    Args:
        device: where the norms are.
        headers: a group that carries CPU tensors; None: the default one. On CUDA the values go over
            `values`, so that the host never waits for the device.
        values: a group that carries tensors of `device`.
    """

    def __init__(
        self,
        device: torch.device,
        headers: dist.ProcessGroup | None = None,
        values: dist.ProcessGroup | None = None,
    ) -> None:
        self._device = device
        self._headers = headers
        self._values = values
        self._rank = dist.get_rank(headers)
        self._size = dist.get_world_size(headers)
        self._pass = -1
        self._left = -1

    def begin(self) -> None:
        """An attempt begins."""
        self._pass = self._left = -1

    def begin_pass(self) -> None:
        self._pass += 1

    def meet(self, place: int, count: int, mine: Tensor) -> tuple[Sequence[int], Tensor]:
        """See `Exchange`.

        Raises:
            PassAbandoned: another rank has failed.
            InputError: ranks are at different norms.
        """
        header = _Header(self._pass, place, count, len(mine), self._left)
        theirs = mine.new_empty(self._size, len(mine))
        # What gloo takes for itself, taken and released: between header and values nothing may fail.
        mine.new_empty(4, *theirs.shape)
        while True:
            headers = self._announce(header)
            if any(one.failed for one in headers):
                raise PassAbandoned
            if (parted := _parted(headers)) is not None:
                raise InputError(parted)
            number = min(one.number for one in headers)
            if number == self._pass:
                dist.all_gather(list(theirs.unbind()), mine, group=self._values)
                self._left = number
                return [one.num_values if one.number == number else 0 for one in headers], theirs
            self._watch(headers)

    def finish(self, failed: bool) -> None:
        """The passes of this rank are over, or it has failed. Returns when all ranks are here."""
        header = _Header(_END, left=self._left, failed=failed)
        while True:
            headers = self._announce(header)
            if all(one.number == _END for one in headers):
                return
            if not any(one.failed for one in headers) and _parted(headers) is None:
                self._watch(headers)

    def _announce(self, header: _Header) -> list[_Header]:
        theirs = torch.empty(self._size, len(header), dtype=torch.int64)
        dist.all_gather(list(theirs.unbind()), torch.tensor(header), group=self._headers)
        return [_Header(*numbers) for numbers in theirs.tolist()]

    def _watch(self, headers: Sequence[_Header]) -> None:
        """Take part in what others exchange, with zeros."""
        width = max(one.width for one in _present(headers))
        zeros = torch.zeros(width, dtype=torch.float64, device=self._device)
        theirs = zeros.new_empty(self._size, width)
        dist.all_gather(list(theirs.unbind()), zeros, group=self._values)


def _present(headers: Sequence[_Header]) -> list[_Header]:
    """The ranks that are in the pass at hand."""
    number = min(one.number for one in headers)
    return [one for one in headers if one.number == number]


def _parted(headers: Sequence[_Header]) -> str | None:
    """The sentence for ranks that went different ways through the model, or None."""
    here = _present(headers)
    number = here[0].number
    if number == _END:
        return None
    same_place = len({(one.place, one.width) for one in here}) == 1
    ended = any(one.number > number and one.left == number for one in headers)
    if same_place and not ended:
        return None
    places = [
        f"rank {rank} {_place(one) if one.number == number else 'has ended the pass'}"
        for rank, one in enumerate(headers)
        if one.number == number or one.left == number
    ]
    return (
        f"the ranks took different ways through the model in pass {number} of the step"
        f" ({', '.join(places)}), so its BatchNorm cannot be synchronised: let the same norms run"
        " whatever the samples, or use a ghost batch that one rank can hold."
    )


def _place(header: _Header) -> str:
    norm, backward = divmod(header.place, 2)
    return f"is at norm {norm} in {'backward' if backward else 'forward'}"

"""NormExchange: communication between ranks for synchronized norms, which no failure can block.

A rank can run out of memory between any two norms, have no rows in a pass, or have fewer passes than
others, and none of this is known beforehand, least of all in the first step. Ranks therefore do not
count the exchanges that are left. Every exchange begins with a small header from each rank, on the CPU,
and a rank that has nothing to send keeps sending headers until all ranks have finished:

    rank 0    pass 0  norm 1 | pass 0  norm 2 | pass 1  norm 1 | pass 1  norm 2 | end
    rank 1    pass 0  norm 1 | pass 0  norm 2 | pass 2         | pass 2         | end     no rows in 1
    rank 2    pass 0  norm 1 | failed         | failed         | failed         | failed

Each column is one exchange. It belongs to the lowest pass that any rank is in; ranks that are ahead
wait by sending headers. If no rank has failed, values follow: ranks in that pass send theirs, the
others send zeros. If a rank has failed, or two ranks are at different norms, all ranks see it in the
same headers and no values follow: the pass is abandoned on all ranks, and they meet at the vote.
`finish` returns once every rank has called it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from anybatch.errors import InputError

_END = 1 << 62  # the pass after the last
_PARTED = (
    "the ranks took different ways through the model in a pass, so its BatchNorm cannot be"
    " synchronised: let the same norms run whatever the samples, or use a ghost batch that one rank"
    " can hold."
)


class PassAbandoned(Exception):
    """Another rank failed in this step, so the results of this rank are useless. It is not an error of
    this rank, which proceeds to the vote."""


class _Header(NamedTuple):
    """The header that each rank sends first in an exchange."""

    number: int  # the pass it is in, or wants to begin
    place: int = -1  # the norm and direction
    num_values: int = 0  # per channel
    width: int = 0  # count of numbers that it will send
    left: int = -1  # the last pass in which it exchanged values
    failed: int = 0  # it no longer takes part in this step


@final
class NormExchange:
    """An `anybatch.compute.synchronised_norm.Exchange` over torch.distributed; see the module.

    `begin` and `finish` surround the passes of an attempt on every rank, whatever happens between them;
    no other collective of the process group may be started in between.

    Args:
        device: device of the norms.
        headers: process group for CPU tensors; None: the default one, or a new one of gloo if that has
            no backend for CPU tensors; all ranks then have to create this object. On CUDA the values
            are sent over `values`, so that the host never waits for the device.
        values: process group for tensors on `device`; None: the default one.
    """

    def __init__(
        self,
        device: torch.device,
        headers: dist.ProcessGroup | None = None,
        values: dist.ProcessGroup | None = None,
    ) -> None:
        self._device = device
        self._own: Any = None  # a process group that is destroyed in `close`
        if headers is None and "cpu" not in _devices_of_default_group():
            self._own = dist.new_group(backend="gloo")
            headers = self._own
        self._headers = headers
        self._values = values
        self._rank = dist.get_rank(headers)
        self._size = dist.get_world_size(headers)
        self._pass = -1
        self._left = -1

    def close(self) -> None:
        """Destroy the process group that was created for headers, if any."""
        if self._own is not None and dist.is_initialized():
            dist.destroy_process_group(self._own)
        self._own = None

    def begin(self) -> None:
        """Begin an attempt."""
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
        # Allocate and free what gloo will need: nothing may fail between header and values.
        mine.new_empty(4, *theirs.shape)
        while True:
            headers = self._announce(header)
            if any(one.failed for one in headers):
                raise PassAbandoned
            if _have_parted(headers):
                raise InputError(_PARTED)
            number = min(one.number for one in headers)
            if number == self._pass:
                dist.all_gather(list(theirs.unbind()), mine, group=self._values)
                self._left = number
                return [one.num_values if one.number == number else 0 for one in headers], theirs
            self._watch(headers)

    def finish(self, failed: bool) -> None:
        """Called when the passes of this rank are over or have failed. Returns once all ranks have
        called it."""
        header = _Header(_END, left=self._left, failed=failed)
        while True:
            headers = self._announce(header)
            if all(one.number == _END for one in headers):
                return
            if not any(one.failed for one in headers) and not _have_parted(headers):
                self._watch(headers)

    def _announce(self, header: _Header) -> list[_Header]:
        theirs = torch.empty(self._size, len(header), dtype=torch.int64)
        dist.all_gather(list(theirs.unbind()), torch.tensor(header), group=self._headers)
        return [_Header(*numbers) for numbers in theirs.tolist()]

    def _watch(self, headers: Sequence[_Header]) -> None:
        """Participate with zeros in an exchange between other ranks."""
        width = max(one.width for one in _present(headers))
        zeros = torch.zeros(width, dtype=torch.float64, device=self._device)
        theirs = zeros.new_empty(self._size, width)
        dist.all_gather(list(theirs.unbind()), zeros, group=self._values)


def _devices_of_default_group() -> list[str]:
    """The types of devices whose tensors the default process group can send."""
    config = dist.get_backend_config()  # such as "cpu:gloo,cuda:nccl"
    return [one.partition(":")[0] for one in config.split(",")]


def _present(headers: Sequence[_Header]) -> list[_Header]:
    """The headers of the ranks that are in the current pass, the lowest of all ranks."""
    number = min(one.number for one in headers)
    return [one for one in headers if one.number == number]


def _have_parted(headers: Sequence[_Header]) -> bool:
    """Whether ranks took different paths through the model."""
    here = _present(headers)
    number = here[0].number
    if number == _END:
        return False
    same_place = len({(one.place, one.width) for one in here}) == 1
    ended = any(one.number > number and one.left == number for one in headers)
    return ended or not same_place

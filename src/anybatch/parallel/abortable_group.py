"""AbortableGroup: the process group in which sharded passes gather weights and reduce gradients.

It is separate from the default process group so that it can be aborted after a failure. A rank that
runs out of memory in the middle of a pass cannot complete its collectives, and the other ranks block
inside them. The failed rank cuts the connections of the group (its "wire"): on gloo the sockets are
shut down, and every rank blocked at the other end fails immediately (measured: 10 ms; with `abort`
they would wait until the deadline). The default group is not affected, so all ranks meet in the vote
and then create a new group.

    rank 0   pass  X out of memory, cuts      vote    new wire, step again
    rank 1   pass    waits for 0 ... wakes    vote    new wire, step again

A rank that fails this way also cuts its own connections, for the ranks that wait for it in turn.

The connections are shut down, not only closed: a connection ends when the last process that holds it
closes it, and data loading processes are forked from a rank and inherit its descriptors. Gloo does not
expose its sockets, so the sockets that appear while it connects are matched between ranks by address.

On NCCL the device blocks, in a kernel, while the host may be anywhere: far ahead, in the vote, or in a
call that synchronizes with the device. A rank that cuts its wire therefore rings an `Alarm`, and a
thread on every rank aborts the group there: its kernels end, and the work queued behind them continues.
No rank aborts before all ranks have received the alarm, since an unprepared rank would be terminated:
over a network NCCL reports an error as soon as a peer aborts, and torch's watchdog, which checks for
errors ten times a second, then terminates the process. The watchdog does not check a group whose abort
has begun.

    rank 0   X rings | hears ....... | aborts
    rank 1             looks | hears | aborts
    rank 2                looks, hears | aborts
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, final

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from anybatch.errors import PeerLost
from anybatch.parallel.norms import PassAbandoned
from anybatch.parallel.vote import calling, exchange

DEADLINE = timedelta(minutes=10)
"""Default time limit for a rank that waits for another inside a pass."""

_ALARM, _HEARD, _ALL_HEARD = "wire is cut", "have heard it", "all have heard it"
_EVERY_SECONDS = 0.1
"""Interval between checks for the key; each is one small message to the host of the store."""

_HEARING = timedelta(seconds=5)
"""How long a rank waits for the others to receive the alarm; they may have exited."""

_Ends = tuple[tuple[str, int], tuple[str, int]]
"""Address and port of the local end of a connection, and of the remote end."""

# torch 2.13 renamed these two and warns about the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@final
class AbortableGroup:
    """The process group of the ranks that share one model with this rank.

    Args:
        rings: all such groups, as ranks of the default group; each rank is in exactly one.
        deadline: how long a rank waits for another inside a pass.
        device: device of this rank.

    Attributes:
        broken: the error with which this rank found the wire broken in a pass; empty if it did not.
    """

    def __init__(
        self, rings: Sequence[Sequence[int]], deadline: timedelta, device: torch.device
    ) -> None:
        self._rings = rings
        self._deadline = deadline
        self._device = device
        self._group: dist.ProcessGroup | None = None
        self._lines: list[socket.socket] = []
        self._alarm: Alarm | None = None
        self.broken: str = ""
        self.lay()
        if device.type == "cuda":  # allocate its buffers before memory is measured
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)
            torch.cuda.synchronize(device)

    def lay(self) -> None:
        """Replace the process group by a new one. Must be called by every rank of the default group."""
        self.cut()
        self.broken = ""
        before = _connections()
        for ring in self._rings:
            group: Any = dist.new_group(list(ring), timeout=self._deadline)
            if dist.get_rank() in ring:
                self._group = group
        if self._device.type == "cuda":
            assert self._group is not None
            self._alarm = Alarm(self._group)
        else:
            new = {ends: fd for ends, fd in _connections().items() if before.get(ends) != fd}
            self._lines = _between_ranks(new)

    def cut(self) -> None:
        """Wake the ranks that wait for this one inside a pass. No pass can complete until `lay`."""
        if self._alarm is not None:
            self._alarm.ring()
        self.close()

    def close(self) -> None:
        """Shut down the process group. On gloo this wakes the other ranks; on NCCL pending collectives
        are not waited for."""
        for line in self._lines:
            with suppress(OSError):  # already cut at the other end
                line.shutdown(socket.SHUT_RDWR)
            line.close()
        self._lines = []
        if self._alarm is not None:
            self._alarm.end()
            self._alarm = None
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def connect(self, module: FSDPModule) -> None:
        """Run the collectives of `module` in this group."""
        # FSDP expects objects with `allocate` and `__call__`, and has no public type for them.
        gather: Any = _InPass(self, "while weights were gathered in a pass", _all_gather)
        scatter: Any = _InPass(self, "while gradients were added up in a pass", _reduce_scatter)
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(scatter)

    @contextmanager
    def speaking(self, when: str) -> Iterator[dist.ProcessGroup]:
        """Context manager around a collective of a pass. Raises `PassAbandoned` if this rank or another
        one has left the pass."""
        if self._group is None or (self._alarm is not None and self._alarm.has_rung):
            raise PassAbandoned("this rank has left the pass that the other ranks are in")
        try:
            with calling(when):
                yield self._group
        except PeerLost as error:
            self.broken = str(error)
        if self.broken:
            self.cut()  # outside `except`: the error keeps the group alive
            raise PassAbandoned(self.broken)


@final
class Alarm:
    """Aborts an NCCL group on all of its ranks once one of them rings. The ring sets a key in the store
    of the group, and a thread on every rank polls for it. Destroying the group without an abort would
    wait for collectives that other ranks never join.

    Args:
        group: the NCCL group of this rank.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size = dist.get_world_size(group)
        store: Any = dist.distributed_c10d._get_process_group_store(group)
        self._store = store.clone()  # a thread that waits in a store blocks its other users
        self._once = threading.Lock()
        self._ended = threading.Event()
        self._aborted = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="wire alarm", daemon=True)
        self._listener.start()

    @property
    def has_rung(self) -> bool:
        """Whether the group has been aborted on this rank, or is about to be."""
        return self._aborted.is_set()

    def ring(self) -> None:
        """Abort the group on every rank."""
        with suppress(RuntimeError):  # the store is no longer served: the run is over
            self._store.set(_ALARM, "1")
        self._abort(together=True)

    def end(self) -> None:
        """Stop listening for the alarm, and abort the group on this rank."""
        self._ended.set()
        self._listener.join()
        self._abort()

    def _listen(self) -> None:
        while not self._ended.wait(_EVERY_SECONDS):
            with suppress(RuntimeError):
                if self._store.check([_ALARM]):
                    self._abort(together=True)
                    return

    def _abort(self, together: bool = False) -> None:
        with self._once:  # a second abort would terminate the process
            if not self._aborted.is_set():
                self._aborted.set()
                if together:
                    with suppress(RuntimeError):
                        self._await_others()
                self._group.abort()

    def _await_others(self) -> None:
        """Wait until all ranks have received the alarm. Raises `RuntimeError` after `_HEARING`."""
        if self._store.add(_HEARD, 1) == self._size:
            self._store.set(_ALL_HEARD, "1")
        else:
            self._store.wait([_ALL_HEARD], _HEARING)


class _InPass:
    """A collective with the interface that FSDP expects, run in the group, with a new allocation for
    each call."""

    def __init__(self, wire: AbortableGroup, when: str, collective: Any) -> None:
        self._wire, self._when, self._collective = wire, when, collective

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: object, **options: Any
    ) -> Any:
        with self._wire.speaking(self._when) as ring:
            return self._collective(output_tensor, input_tensor, group=ring, **options)


def _connections() -> dict[_Ends, int]:
    """The descriptors of this process's established connections."""
    found = psutil.Process().net_connections("tcp")
    return {(one.laddr[:2], one.raddr[:2]): one.fd for one in found if one.raddr and one.fd >= 0}


def _between_ranks(descriptors: Mapping[_Ends, int]) -> list[socket.socket]:
    """The connections to other ranks among these, some of which may belong to another thread. Each is
    returned with a duplicated descriptor, since gloo closes its own descriptors and the system then
    reuses their numbers.

    Must be called by every rank of the default group.
    """
    everyone = exchange(list(descriptors))
    del everyone[dist.get_rank()]
    theirs = {(there, here) for ends in everyone for here, there in ends}
    lines: list[socket.socket] = []
    for ends in descriptors.keys() & theirs:
        with suppress(OSError):  # already closed
            # `socket.dup` would make the connection blocking, for gloo as well.
            lines.append(socket.socket(fileno=os.dup(descriptors[ends])))
    return lines

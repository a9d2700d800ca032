"""AbortableGroup: the process group in which sharded passes gather weights and add up gradients.

It is a group of its own, beside the default one, for the sake of failures. A rank that runs out of
memory in the middle of a pass cannot complete what it began, and the others wait for it inside a
collective. It cuts its wire: on gloo the connections are shut down, and every rank that waits at their
other end wakes at once with an error (measured: 10 ms; `abort` does not do it, they wait out the
deadline). The default group is untouched by it, so all ranks meet in the vote, and lay a new wire.

    rank 0   pass  X out of memory, cuts      vote    new wire, step again
    rank 1   pass    waits for 0 ... wakes    vote    new wire, step again

Whoever wakes so cuts its own end too, for those that wait for it in turn.

Shut down, not only closed: a connection ends when the last process that holds it has closed it, and
processes that load samples were forked from a rank and hold all that it held. Gloo does not show its
sockets, so those that appear while it connects are asked which other rank they end at.

On NCCL it is the device that waits, in a kernel, and the host may be anywhere: far ahead, in the vote,
in whatever waits for the device. So a rank that cuts its wire rings an `Alarm`, and a thread on every
rank aborts its end of the wire: kernels of it end then, and what stands behind them goes on. None does
so before all have heard the alarm, since a rank that is taken unawares ends: over a network NCCL has an
error as soon as another aborts, and torch's watchdog, which looks for errors ten times a second, then
takes the process down. It looks no more where an abort has begun.

    rank 0   X rings | hears ....... | aborts
    rank 1             looks | hears | aborts
    rank 2                looks, hears | aborts
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from anybatch.errors import PeerLost
from anybatch.parallel.norms import PassAbandoned
from anybatch.parallel.vote import calling, exchange

DEADLINE = timedelta(minutes=10)
"""How long a rank waits for another inside a pass, if nobody says otherwise."""

_ALARM, _HEARD, _ALL_HEARD = "wire is cut", "have heard it", "all have heard it"
_EVERY_SECONDS = 0.1
"""Between two looks for the key: one small message to the machine that serves the store."""

_HEARING = timedelta(seconds=5)
"""How long one waits for others to have heard the alarm, who may be gone."""

_Ends = tuple[tuple[str, int], tuple[str, int]]
"""Address and port of this end of a connection, and of the other."""

# torch 2.13 gave these two other names, and warns of the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@final
class AbortableGroup:
    """The group of this rank and of those that it shares a model with.

    Args:
        rings: all such groups, by ranks of the default group; each rank is in one of them.
        deadline: how long a rank waits inside a pass for another.
        device: of this rank.

    Attributes:
        broken: how this rank found the wire broken in a pass; empty: it did not.
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
        if device.type == "cuda":  # its buffers are there before memory counts
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)
            torch.cuda.synchronize(device)

    def lay(self) -> None:
        """A new wire in place of the old one. Every rank of the default group calls it."""
        self.cut()
        self.broken = ""
        before = _sockets()
        for ring in self._rings:
            group: Any = dist.new_group(list(ring), timeout=self._deadline)
            if dist.get_rank() in ring:
                self._group = group
        if self._device.type == "cuda":
            assert self._group is not None
            self._alarm = Alarm(self._group)
        else:
            self._lines = _between_ranks(fd for fd, _ in _sockets() - before)

    def cut(self) -> None:
        """Wake whoever waits for this rank inside a pass. No pass goes through until `lay`."""
        if self._alarm is not None:
            self._alarm.ring()
        self.close()

    def close(self) -> None:
        """No pass goes through any more. On gloo it wakes the others; over NCCL nothing under way is
        waited for."""
        for line in self._lines:
            with suppress(OSError):  # it has been cut at the other end
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
        """Let the collectives of `module` go through this wire."""
        # FSDP asks for these two methods, and has no public type for them.
        gather: Any = _InPass(self, "while weights were gathered in a pass", _all_gather)
        scatter: Any = _InPass(self, "while gradients were added up in a pass", _reduce_scatter)
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(scatter)

    @contextmanager
    def speaking(self, when: str) -> Iterator[dist.ProcessGroup]:
        """Around a collective of a pass. Raises `PassAbandoned` if another rank has left the pass."""
        if self._group is None or (self._alarm is not None and self._alarm.has_rung):
            raise PassAbandoned("this rank has left the pass that the other ranks are in")
        try:
            with calling(when):
                yield self._group
        except PeerLost as error:
            self.broken = str(error)
        if self.broken:
            self.cut()  # not inside `except`: the error holds the group
            raise PassAbandoned(self.broken)


@final
class Alarm:
    """Aborts a group over NCCL on all its ranks when one of them rings: by a key in the store of the
    group, and a thread that looks for it. To destroy the group without that would be to wait for what
    others never join.

    Args:
        group: of this rank.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size = dist.get_world_size(group)
        store: Any = dist.distributed_c10d._get_process_group_store(group)
        self._store = store.clone()  # a thread that waits in one would keep others out
        self._once = threading.Lock()
        self._ended = threading.Event()
        self._aborted = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="wire alarm", daemon=True)
        self._listener.start()

    @property
    def has_rung(self) -> bool:
        """Whether the group is aborted on this rank, or about to be."""
        return self._aborted.is_set()

    def ring(self) -> None:
        """Abort the group on every rank."""
        with suppress(RuntimeError):  # nobody serves the store any more: the run is over
            self._store.set(_ALARM, "1")
        self._abort(together=True)

    def end(self) -> None:
        """Abort the group on this rank, where nobody listens any more."""
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
        with self._once:  # a second time would end the process
            if not self._aborted.is_set():
                self._aborted.set()
                if together:
                    with suppress(RuntimeError):
                        self._await_others()
                self._group.abort()

    def _await_others(self) -> None:
        """Until all ranks have heard the alarm. Raises `RuntimeError` if they have not for long."""
        if self._store.add(_HEARD, 1) == self._size:
            self._store.set(_ALL_HEARD, "1")
        else:
            self._store.wait([_ALL_HEARD], _HEARING)


class _InPass:
    """A collective as FSDP calls it, through the wire, with memory of its own for each call."""

    def __init__(self, wire: AbortableGroup, when: str, collective: Any) -> None:
        self._wire, self._when, self._collective = wire, when, collective

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: object, **options: Any
    ) -> Any:
        with self._wire.speaking(self._when) as ring:
            return self._collective(output_tensor, input_tensor, group=ring, **options)


def _sockets() -> set[tuple[int, int]]:
    """(descriptor, inode) of the sockets of this process; none on Windows, which does not fork."""
    found: set[tuple[int, int]] = set()
    for name in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else ():
        with suppress(OSError):  # the descriptor that has just listed them is closed again
            about = os.fstat(int(name))
            if stat.S_ISSOCK(about.st_mode):
                found.add((int(name), about.st_ino))
    return found


def _between_ranks(descriptors: Iterable[int]) -> list[socket.socket]:
    """Of these sockets the connections with other ranks: some may be another thread's. Each by a
    descriptor of its own, since gloo closes, and the system gives away, those that it has.

    Every rank of the default group calls it.
    """
    mine: dict[_Ends, socket.socket] = {}
    for descriptor in descriptors:
        with suppress(OSError):  # it has been closed
            # Not by `socket.dup`, which would make the connection a blocking one, for gloo too.
            line = socket.socket(fileno=os.dup(descriptor))
            ends = _ends(line)
            if ends is None:
                line.close()
            else:
                mine[ends] = line
    everyone = exchange(list(mine))
    del everyone[dist.get_rank()]
    theirs = {(there, here) for ends in everyone for here, there in ends}
    for ends in mine.keys() - theirs:
        mine.pop(ends).close()
    return list(mine.values())


def _ends(line: socket.socket) -> _Ends | None:
    """Of a connection over a network."""
    if line.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        return line.getsockname()[:2], line.getpeername()[:2]
    except OSError:  # it listens
        return None

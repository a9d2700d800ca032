"""Two processes of this machine that meet, as ranks do, and add up a tensor by gloo.

The second is started ahead, so that it imports torch while the first does, and looks at other things.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from anybatch.doctor.facts import Pair
from anybatch.doctor.probes import AHEAD
from anybatch.doctor.probes.network import loopback_fault
from anybatch.launch.network import LOOPBACK, interface_to

if TYPE_CHECKING:
    from torch.distributed import Store

_SECONDS = 20.0

_peer: subprocess.Popen[str] | None = None


def look(when: str = "") -> Pair | None:
    """See `Pair`. `AHEAD` starts the second process and returns None."""
    global _peer
    if _peer is None:
        _peer = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    if when == AHEAD:
        return None
    peer, _peer = _peer, None
    with peer:
        try:
            return _first(peer)
        except Exception as error:
            return Pair(fault=_in_words(error))
        finally:
            peer.kill()


def _first(peer: subprocess.Popen[str]) -> Pair:
    if fault := loopback_fault():  # torch would try for long
        return Pair(fault=f"this machine does not reach itself at {LOOPBACK}: {fault}")
    from torch.distributed import TCPStore

    wait = timedelta(seconds=_SECONDS)
    store = TCPStore(LOOPBACK, 0, is_master=True, timeout=wait, wait_for_workers=False)
    assert peer.stdin is not None
    peer.stdin.write(f"{store.port}\n")
    peer.stdin.flush()
    interface = _point_to_loopback()
    found = _add_up(0, store)
    return Pair(interface, "" if found == 3.0 else f"1 and 2 came to {found:g}")


def _in_words(error: Exception) -> str:
    """The first line of what it says, without the place in the sources of gloo."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    return re.sub(r"\[enforce fail at .*?\] .*?\. ", "", text)


def _add_up(rank: int, store: Store) -> float:
    """The sum over both ranks of their number from 1."""
    import torch
    from torch import distributed

    wait = timedelta(seconds=_SECONDS)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=wait)
    try:
        number = torch.tensor([rank + 1.0])
        distributed.all_reduce(number)
        distributed.barrier()
        return number.item()
    finally:
        distributed.destroy_process_group()


def _point_to_loopback() -> str:
    """As ranks of one machine are joined (`anybatch.launch.membership.join`)."""
    name = os.environ.get("GLOO_SOCKET_IFNAME") or interface_to(LOOPBACK, 1)
    if name:
        os.environ["GLOO_SOCKET_IFNAME"] = name
    return name or ""


def _second() -> None:
    from torch.distributed import TCPStore

    _point_to_loopback()
    line = sys.stdin.readline()
    if not line:  # the first is gone
        return
    wait = timedelta(seconds=_SECONDS)
    _add_up(1, TCPStore(LOOPBACK, int(line), is_master=False, timeout=wait, wait_for_workers=False))


if __name__ == "__main__":
    _second()

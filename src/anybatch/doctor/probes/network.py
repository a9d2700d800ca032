"""The network of this machine, and what the environment says of ranks and of where they meet."""

from __future__ import annotations

import os
import socket

import psutil

from anybatch.doctor.facts import Interface, Master, Network
from anybatch.errors import InputError
from anybatch.launch.membership import Membership, find
from anybatch.launch.network import LOOPBACK, Deadline, is_free, is_here, joined

_NAME_SECONDS = 5.0
_LOOPBACK_SECONDS = 3.0


def look() -> Network:
    """See `Network`."""
    name = socket.gethostname()
    address, name_fault = _resolve(name)
    membership, launcher_fault = _membership()
    return Network(
        name=name,
        address=address,
        name_fault=name_fault,
        loopback_fault=loopback_fault(),
        interfaces=_interfaces(),
        master=_master(),
        launcher=membership.launcher if membership else "",
        rank=membership.rank if membership else None,
        world_size=membership.world_size if membership else None,
        launcher_fault=launcher_fault,
    )


def _resolve(name: str) -> tuple[str, str]:
    """The address of a name, or why there is none. A resolver may take its time."""
    try:
        found = Deadline(_NAME_SECONDS).within(lambda: socket.getaddrinfo(name, None))
    except OSError as error:
        return "", error.strerror or str(error)
    if found is None:
        return "", f"no answer within {_NAME_SECONDS:g} s"
    return str(found[0][4][0]), ""


def loopback_fault() -> str:
    """Why this machine does not reach itself; empty: it does."""
    try:
        with socket.socket() as listener:
            listener.settimeout(_LOOPBACK_SECONDS)
            listener.bind((LOOPBACK, 0))
            listener.listen(1)
            with socket.create_connection(listener.getsockname(), _LOOPBACK_SECONDS):
                listener.accept()[0].close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _interfaces() -> tuple[Interface, ...]:
    families = (socket.AF_INET, socket.AF_INET6)
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return tuple(
        Interface(name, tuple(one.address for one in addresses if one.family in families))
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
    )


def _master() -> Master:
    host, text = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    port = int(text) if text.isdecimal() and 0 < int(text) < 1 << 16 else None
    fault = _resolve(host)[1] if host else ""
    here = not host or (not fault and is_here(host))
    free = is_free(port) if here and port else None
    place = joined(host or "this machine", port) if port else host
    return Master(host, port, fault, here, free, place)


def _membership() -> tuple[Membership | None, str]:
    """What starters of ranks have left in the environment, or what is wrong with it."""
    try:
        return find(), ""
    except InputError as error:
        return None, str(error)

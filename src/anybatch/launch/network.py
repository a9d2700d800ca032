"""Where ranks meet: addresses, the way to them, and the store at one, each with a deadline.

torch's store, asked for an address where nobody is, writes pages of its own frames to standard error
and can wait for ever when something else listens there. So plain sockets look first, and what torch
does itself runs against the clock.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, TypeVar

import psutil

from anybatch.errors import InputError, LaunchError

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

T = TypeVar("T")

LOOPBACK = "127.0.0.1"

_RETRY_SECONDS = 0.2
_CONNECT_SECONDS = 5.0
_WAKING_SECONDS = 0.5
_ANSWER_SECONDS = 20.0
_BACKLOG = 2048  # as torch has it


class Deadline:
    """A moment by which something has to have happened, and how long that was from the start."""

    def __init__(self, seconds: float) -> None:
        self.seconds: float = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that remain, never below zero."""
        return max(0.0, self._end - time.monotonic())

    def within(self, function: Callable[[], T]) -> T | None:
        """What `function` returns, or None if it has not returned in time; it is then left to itself
        in a daemon thread. What it raises is raised here."""
        outcome: list[T] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(function())
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=run, name="anybatch-deadline", daemon=True)
        thread.start()
        thread.join(self.left)
        thread.join(_WAKING_SECONDS)  # this machine may have slept until now
        if failure:
            raise failure[0]
        return outcome[0] if outcome else None


def parse_address(text: str, what: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `[IPV6]:PORT`. `what` names the option in the message.

    Raises `InputError`.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InputError(
            f"{what} is {text!r}: give the name or address of one of the machines and a free port"
            " there, such as node1:29500."
        )
    return host, int(port)


def joined(host: str, port: int) -> str:
    """`HOST:PORT`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_here(host: str) -> bool:
    """Whether `host` is a name or an address of this machine: whether a socket can be bound to it."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def route_to(host: str, port: int) -> str:
    """The address of this machine from which packets to `host` leave. Nothing is sent.

    Raises `OSError` if the name is not known or no route leads there.
    """
    failure: OSError = OSError(errno.EHOSTUNREACH, f"no route to {host}")
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_DGRAM
    ):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
                return probe.getsockname()[0]
            except OSError as error:
                failure = error
    raise failure


def interface_to(host: str, port: int) -> str | None:
    """The name of the network interface that leads to `host` (`eth0`), or None if not known."""
    try:
        mine = route_to(host, port)
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == mine for address in addresses):
            return name
    return None


def literal(host: str) -> str | None:
    """`host` if it is an address, the loopback's for `localhost`; None for another name, which may mean
    one address on this machine and another elsewhere."""
    if host == "localhost":
        return LOOPBACK
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def meet(
    host: str,
    port: int,
    role: Literal["host", "guest", "first"],
    deadline: Deadline,
    *,
    listen: str | None = None,
) -> TCPStore:
    """The store at `host:port`.

    Args:
        host: a machine's name or address.
        port: 0, for a host, takes a free one.
        role: `"host"` serves the store, `"guest"` connects to it, `"first"` serves it if `host` is
            this machine and nobody serves it yet.
        deadline: by which the store has to answer.
        listen: the one address of this machine at which a host is reached; None: all of them.

    Raises:
        LaunchError: the port is taken, or nothing (or something else) answers in time.
    """
    from torch.distributed import DistError, TCPStore

    if role == "first":
        role = "host" if is_here(host) and is_free(port) else "guest"
        last_resort = role == "host"  # another one may take the port before this one does
    else:
        last_resort = False
    wait = timedelta(seconds=max(1.0, deadline.left))
    if role == "host":
        try:
            return _serve(host, port, listen, wait)
        except (DistError, OSError) as error:
            if not last_resort:
                raise LaunchError(
                    f"the ranks cannot meet at {joined(host, port)}: the port is in use. Choose"
                    " another one (MASTER_PORT, or the port of the rendezvous), or end what listens"
                    " there."
                ) from error
    _await_port(host, port, deadline)
    # A store answers as soon as it listens. torch asks what does not for as long as it may.
    answer = Deadline(min(max(1.0, deadline.left), _ANSWER_SECONDS))
    limit = timedelta(seconds=answer.seconds)
    try:
        store = answer.within(
            lambda: TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
        )
    except DistError as error:
        raise LaunchError(_not_a_store(host, port, answer)) from error
    if store is None:
        raise LaunchError(_not_a_store(host, port, answer))
    store.set_timeout(wait)
    return store


def _serve(host: str, port: int, listen: str | None, wait: timedelta) -> TCPStore:
    """A store of this process. torch's own socket would listen on all interfaces."""
    from torch.distributed import TCPStore

    if listen is None:
        if port and not is_free(port):
            raise OSError(errno.EADDRINUSE, "address in use")
        return TCPStore(host, port, is_master=True, timeout=wait, wait_for_workers=False)
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    listener = socket.create_server((listen, port), family=family, backlog=_BACKLOG)
    return TCPStore(
        listen,
        listener.getsockname()[1],
        is_master=True,
        timeout=wait,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def gather_at(store: Store, place: str, world_size: int, deadline: Deadline) -> None:
    """Wait until `world_size` ranks have called this.

    Args:
        store: where they meet; a name space that no other group uses.
        place: the store's address, for the message.
        world_size: ranks that are to come.
        deadline: by which they have to be there.

    Raises:
        LaunchError: some did not come in time, or too many did.
    """
    number = store.add("arrived", 1)
    if number > world_size:
        raise LaunchError(
            f"rank number {number} has come to {place}, where {world_size} were expected: another run"
            " uses the same address (give each its own), or it is a file that an earlier run left"
            " behind (delete it)."
        )
    if number == world_size:
        store.set("complete", "1")
    try:
        store.wait(["complete"], timedelta(seconds=max(0.1, deadline.left)))
    except RuntimeError as error:
        there = store.add("arrived", 0)
        raise LaunchError(
            f"{there} of {world_size} ranks have come to {place} within {deadline.seconds:g} s: check"
            " that the others were started, with the same address and number of ranks, and look at"
            " what they wrote."
        ) from error


def _await_port(host: str, port: int, deadline: Deadline) -> None:
    """Wait until something listens at the address."""
    place = joined(host, port)
    while True:
        try:
            wait = max(0.1, min(_CONNECT_SECONDS, deadline.left))
            socket.create_connection((host, port), timeout=wait).close()
            return
        except socket.gaierror as error:
            reason: OSError = error
            check = f"check the name {host!r}"
        except OSError as error:
            reason = error
            check = (
                "check that the run was started on the machine with this address, and that no"
                " firewall stands between"
            )
        if deadline.left == 0:
            why = reason.strerror or str(reason)
            raise LaunchError(
                f"nothing answered at {place} within {deadline.seconds:g} s ({why.lower()}): {check}."
            ) from reason
        time.sleep(min(_RETRY_SECONDS, deadline.left))


def is_free(port: int) -> bool:
    """Whether a socket can be bound to `port` of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _not_a_store(host: str, port: int, deadline: Deadline) -> str:
    return (
        f"what listens at {joined(host, port)} did not answer as ranks do within"
        f" {deadline.seconds:g} s: the port belongs to another program, so choose another one."
    )

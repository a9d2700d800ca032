"""Where ranks meet: addresses, routes, and the store at an address, each with a deadline.

torch's store client, given an address where nothing listens, writes pages of stack frames to
standard error, and it can block forever if another program listens there. So plain sockets probe
the address first, and torch's own calls run under a deadline.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
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
_BACKLOG = 2048  # as in torch


class Deadline:
    """A time limit: the point in time at which it expires, and its length in seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds: float = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Remaining seconds, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def within(self, function: Callable[[], T]) -> T | None:
        """The result of `function`, or None if it does not return in time; it then keeps running in
        a daemon thread. An exception that it raises is raised here."""
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
        thread.join(_WAKING_SECONDS)  # this machine may have been suspended until now
        if failure:
            raise failure[0]
        return outcome[0] if outcome else None


def parse_address(text: str, what: str) -> tuple[str, int]:
    """Parse `HOST:PORT` or `[IPV6]:PORT` into host and port. `what` names the option in the error
    message.

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
    """Whether `host` is a name or an address of this machine, that is, whether a socket can be
    bound to it."""
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
    """The address of this machine from which packets to `host` are sent. Nothing is sent.

    Raises `OSError` if the name is unknown or there is no route.
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
    """The name of the network interface that leads to `host` (`eth0`), or None if it is unknown."""
    try:
        mine = route_to(host, port)
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == mine for address in addresses):
            return name
    return None


def literal(host: str) -> str | None:
    """`host` if it is an address, and the loopback address for `localhost`; None for any other
    name, which may resolve to different addresses on different machines."""
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
    """Connect to the store at `host:port`, or serve it.

    Args:
        host: name or address of a machine.
        port: port number; a host selects a free port for 0.
        role: `"host"` serves the store, `"guest"` connects to it, `"first"` serves it if `host` is
            this machine and no process serves it yet.
        deadline: time limit for the store to answer.
        listen: the only address of this machine that a host listens on; None: all of them.

    Raises:
        LaunchError: the port is in use, or nothing (or another program) answers in time.
    """
    from torch.distributed import DistError, TCPStore

    wait = timedelta(seconds=max(1.0, deadline.left))
    if role == "host" or (role == "first" and is_here(host) and is_free(port)):
        try:
            return _serve(host, port, listen, wait)
        except (DistError, OSError) as error:
            if role == "host":  # otherwise another process has taken the port meanwhile
                raise LaunchError(
                    f"the ranks cannot meet at {joined(host, port)}: the port is in use. Choose"
                    " another one (MASTER_PORT, or the port of the rendezvous), or end what listens"
                    " there."
                ) from error
    _await_port(host, port, deadline)
    # A store answers as soon as it listens. torch keeps asking anything else until its timeout.
    answer = Deadline(min(max(1.0, deadline.left), _ANSWER_SECONDS))
    limit = timedelta(seconds=answer.seconds)
    store = None
    with suppress(DistError):
        store = answer.within(
            lambda: TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
        )
    if store is None:
        raise LaunchError(
            f"what listens at {joined(host, port)} did not answer as ranks do within"
            f" {answer.seconds:g} s: the port belongs to another program, so choose another one."
        )
    store.set_timeout(wait)
    return store


def _serve(host: str, port: int, listen: str | None, wait: timedelta) -> TCPStore:
    """Serve a store from this process. torch's own socket would listen on all interfaces."""
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
    """Wait until `world_size` ranks have called this function.

    Args:
        store: store where they meet, with a prefix that no other group uses.
        place: address of the store, for the error message.
        world_size: number of ranks that are expected.
        deadline: time limit for all of them to arrive.

    Raises:
        LaunchError: some did not arrive in time, or too many did.
    """
    number = store.add("arrived", 1)
    if number > world_size:
        raise LaunchError(
            f"rank number {number} has come to {place}, where {world_size} were expected: another run"
            " uses the same address, so give each its own."
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
        except OSError as error:
            if deadline.left == 0:
                why = (error.strerror or str(error)).lower()
                raise LaunchError(
                    f"nothing answered at {place} within {deadline.seconds:g} s ({why}): check the name"
                    f" {host!r}, that the run was started on that machine, and that no firewall stands"
                    " between."
                ) from error
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

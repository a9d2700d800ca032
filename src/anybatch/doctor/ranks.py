"""Several ranks: backends, two processes that meet, the network, and what the environment says of
ranks."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from anybatch.doctor.finding import Facts, Finding, first_line, problem, warning

if TYPE_CHECKING:
    from torch.distributed import Store

LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    *("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_TASK"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE"),
)
"""Variables that launchers of ranks set."""

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_NAME_SECONDS, _LOOPBACK_SECONDS, _PAIR_SECONDS = 5.0, 3.0, 20.0
_GET_STARTED = "https://pytorch.org/get-started/locally"

# ------------------------------------------------------------------------------------------- network


def look() -> Facts:
    """The network of this machine, and what the environment says of ranks and of where they meet."""
    import psutil

    from anybatch.errors import InputError
    from anybatch.launch.membership import find

    membership, launcher_fault = None, ""
    try:
        membership = find()
    except InputError as error:
        launcher_fault = str(error)
    name = socket.gethostname()
    address, name_fault = _resolve(name)
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        "name": name,
        "address": address,
        "name_fault": name_fault,
        "loopback_fault": loopback_fault(),
        "interfaces": {
            name: [one.address for one in addresses if one.family in families]
            for name, addresses in psutil.net_if_addrs().items()
            if name in up
        },
        "master": _master(),
        "launcher": membership.launcher if membership else "",
        "rank": membership.rank if membership else None,
        "world_size": membership.world_size if membership else None,
        "launcher_fault": launcher_fault,
    }


def _resolve(name: str) -> tuple[str, str]:
    """The address of a name, or why there is none. A resolver may take its time."""
    from anybatch.launch.network import Deadline

    try:
        found = Deadline(_NAME_SECONDS).within(lambda: socket.getaddrinfo(name, None))
    except OSError as error:
        return "", error.strerror or str(error)
    return (str(found[0][4][0]), "") if found else ("", f"no answer within {_NAME_SECONDS:g} s")


def loopback_fault() -> str:
    """Why this machine does not reach itself; empty: it does."""
    try:
        with socket.socket() as listener:
            listener.settimeout(_LOOPBACK_SECONDS)
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            with socket.create_connection(listener.getsockname(), _LOOPBACK_SECONDS):
                listener.accept()[0].close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _master() -> Facts:
    """The place where the environment says that ranks meet, and whether its port is free here."""
    from anybatch.launch.network import is_free, is_here, joined

    host, text = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    port = int(text) if text.isdecimal() and 0 < int(text) < 1 << 16 else None
    fault = _resolve(host)[1] if host else ""
    here = not host or (not fault and is_here(host))
    return {
        "host": host,
        "port": port,
        "host_fault": fault,
        "here": here,
        "port_free": is_free(port) if here and port else None,
        "place": joined(host or "this machine", port) if port else host,
    }


# -------------------------------------------------------------------------------------- two processes


def look_pair() -> Facts:
    """Two processes of this machine that meet, as ranks do, and add up a tensor by gloo."""
    with subprocess.Popen(
        [sys.executable, "-c", "from anybatch.doctor.ranks import second; second()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as peer:
        try:
            return _first(peer)
        except Exception as error:  # without the place in the sources of gloo
            fault = re.sub(r"\[enforce fail at .*?\] .*?\. ", "", first_line(error))
            return {"interface": "", "fault": fault}
        finally:
            peer.kill()


def _first(peer: subprocess.Popen[str]) -> Facts:
    if fault := loopback_fault():  # torch would try for long
        return {
            "interface": "",
            "fault": f"this machine does not reach itself at 127.0.0.1: {fault}",
        }
    from anybatch.launch.network import LOOPBACK, Deadline, meet

    store = meet(LOOPBACK, 0, "host", Deadline(_PAIR_SECONDS), listen=LOOPBACK)
    assert peer.stdin is not None
    peer.stdin.write(f"{store.port}\n")
    peer.stdin.flush()
    found, interface = _add_up(0, store)
    return {
        "interface": interface,
        "fault": "" if found == 3.0 else f"1 and 2 came to {found:g}",
    }


def second() -> None:
    """The second process."""
    from anybatch.launch.network import LOOPBACK, Deadline, meet

    line = sys.stdin.readline()
    if line:  # else the first is gone
        _add_up(1, meet(LOOPBACK, int(line), "guest", Deadline(_PAIR_SECONDS)))


def _add_up(rank: int, store: Store) -> tuple[float, str]:
    """The sum over both ranks of their number from 1, and the interface that they are joined by, as
    `anybatch.launch` joins ranks of one machine."""
    import torch
    from torch import distributed

    from anybatch.launch.network import LOOPBACK, interface_to

    interface = os.environ.get("GLOO_SOCKET_IFNAME") or interface_to(LOOPBACK, 1) or ""
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    wait = timedelta(seconds=_PAIR_SECONDS)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=wait)
    try:
        number = torch.tensor([rank + 1.0])
        distributed.all_reduce(number)
        distributed.barrier()
        return number.item(), interface
    finally:
        distributed.destroy_process_group()


# ------------------------------------------------------------------------------------------ findings


def check(facts: Facts) -> Iterator[Finding]:
    network, pair, environment = facts["network"], facts["pair"], facts["environment"]
    if facts["torch"] is not None and not facts["torch"]["fault"]:
        yield _backends(facts["torch"])
        if pair is not None and pair["fault"]:
            fault = pair["fault"].rstrip(".")
            meaning = f"two processes here could not meet and add up a tensor ({fault})"
            remedy = "see the rows below, and whether a firewall stands in the way of 127.0.0.1"
            yield problem("gloo", "does not work here", meaning, remedy)
        elif pair is not None:
            over = f" over {pair['interface']}" * bool(pair["interface"])
            yield Finding("gloo", f"two processes met{over} and added up a tensor")
    if network is not None:
        yield from _network(network)
        yield from _named_interfaces(list(network["interfaces"]), environment)
        yield _launcher(network, environment)
        yield from _meeting(network, environment)


def _backends(torch: Facts) -> Finding:
    names, count = torch["backends"], len(torch["devices"])
    value = ", ".join(f"nccl {torch['nccl']}" if it == "nccl" else it for it in names) or "none"
    if "gloo" not in names:
        meaning = "this build of torch has no gloo, by which ranks speak to each other"
        remedy = f"install a build from {_GET_STARTED} to train on several ranks"
        return problem("backends", value, meaning, remedy)
    if count > 1 and "nccl" not in names:
        meaning = f"this build of torch has no NCCL, by which {count} GPUs exchange gradients"
        return problem("backends", value, meaning, f"install a build for CUDA from {_GET_STARTED}")
    return Finding("backends", value)


def _network(network: Facts) -> Iterator[Finding]:
    name, fault = network["name"], network["name_fault"]
    if fault:
        meaning = f"it leads to no address ({fault}), and ranks of several machines look for it"
        remedy = (
            f"add '127.0.1.1 {name}' to /etc/hosts, or give addresses (MASTER_ADDR, --rendezvous)"
        )
        yield warning("host name", name, meaning, remedy)
    else:
        yield Finding("host name", f"{name}, {network['address']}")
    if fault := network["loopback_fault"]:
        meaning = f"ranks of this machine cannot meet at 127.0.0.1 ({fault})"
        yield problem("loopback", "does not work", meaning, "ip link set lo up, as root")
    shown = [f"{it} ({found[0]})" for it, found in network["interfaces"].items() if found]
    yield Finding("interfaces", ", ".join(shown) or "none with an address")


def _named_interfaces(there: list[str], environment: dict[str, str]) -> Iterator[Finding]:
    """Interfaces that are chosen by variables have to exist."""
    for variable in _INTERFACES:
        text = environment.get(variable, "")
        if not text or text.startswith("^"):  # all but those
            continue
        is_whole = variable.startswith("GLOO") or text.startswith("=")
        for name in text.removeprefix("=").split(","):
            if not any(one == name if is_whole else one.startswith(name) for one in there):
                meaning = (
                    f"no interface {name!r} is up here; there are {', '.join(there) or 'none'}"
                )
                remedy = "name one of them, or unset it: anybatch finds the way by itself"
                yield problem(variable, repr(text), meaning, remedy, "environment")


def _launcher(network: Facts, environment: dict[str, str]) -> Finding:
    if network["launcher_fault"]:
        meaning, _, remedy = network["launcher_fault"].rstrip(".").rpartition(": ")
        set_ = ", ".join(f"{it}={environment[it]}" for it in LAUNCHERS if it in environment)
        return problem("started as", set_, meaning, remedy, "environment")
    if network["rank"] is None:
        return Finding("started as", "a process by itself")
    place = f"rank {network['rank']} of {network['world_size']}"
    return Finding("started as", f"{place}, by {network['launcher']}")


def _meeting(network: Facts, environment: dict[str, str]) -> Iterator[Finding]:
    """Where ranks are to meet, if the environment says so."""
    master, rank = network["master"], network["rank"]
    text, port = environment.get("MASTER_PORT", ""), master["port"]
    if text and port is None:
        meaning = "a port is a number from 1 to 65535"
        yield problem("MASTER_PORT", repr(text), meaning, "correct it, or unset it", "environment")
    if master["host_fault"]:
        meaning = f"the name leads nowhere ({master['host_fault']})"
        remedy = "correct it, or give the address of rank 0's machine"
        yield problem("MASTER_ADDR", repr(master["host"]), meaning, remedy, "environment")
        return
    # Rank 0 listens there, or for it the agent behind torchrun; for others somebody has to.
    by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if master["port_free"] is False and not by_agent and not rank:
        level = warning if rank is None else problem
        meaning = f"something listens on port {port} of this machine, so rank 0 cannot"
        remedy = f"end it ('ss -ltnp sport = :{port}' shows it), or choose another port"
        yield level("MASTER_PORT", repr(text), meaning, remedy, "environment")
    elif master["place"]:
        yield Finding("ranks meet at", master["place"])

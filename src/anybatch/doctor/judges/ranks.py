"""Several ranks: backends, the network, and what the environment says of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from anybatch.doctor.facts import Facts, Network, Torch
from anybatch.doctor.finding import Finding
from anybatch.doctor.judges.environment import LAUNCHERS


def judge(facts: Facts) -> Iterator[Finding]:
    """Findings on `Facts.network`, `Facts.pair` and the backends of `Facts.torch`."""
    network = facts.network
    torch = facts.torch if facts.torch is not None and not facts.torch.fault else None
    if torch is not None:
        yield _backends(torch)
    if facts.pair is not None and torch is not None:
        if facts.pair.fault:
            yield Finding(
                "gloo",
                "does not work here",
                "problem",
                meaning="two processes of this machine could not meet and add up a tensor"
                f" ({facts.pair.fault.rstrip('.')})",
                remedy="see the rows below, and whether a firewall stands in the way of 127.0.0.1",
            )
        else:
            over = f" over {facts.pair.interface}" if facts.pair.interface else ""
            yield Finding("gloo", f"two processes met{over} and added up a tensor")
    if network is not None:
        yield from _network(network)
        yield from _named_interfaces(network, facts.environment)
        yield _launcher(network, facts.environment)
        yield from _master(network, facts.environment)


def _backends(torch: Torch) -> Finding:
    names = [f"nccl {torch.nccl}" if name == "nccl" else name for name in torch.backends]
    value = ", ".join(names) or "none"
    if "gloo" not in torch.backends:
        return Finding(
            "backends",
            value,
            "problem",
            meaning="this build of torch has no gloo, by which ranks speak to each other",
            remedy="install a build from https://pytorch.org/get-started/locally to train on"
            " several ranks",
        )
    if len(torch.devices) > 1 and "nccl" not in torch.backends:
        return Finding(
            "backends",
            value,
            "problem",
            meaning=f"this build of torch has no NCCL, by which the {len(torch.devices)} GPUs would"
            " exchange gradients",
            remedy="install a build for CUDA from https://pytorch.org/get-started/locally",
        )
    return Finding("backends", value)


def _network(network: Network) -> Iterator[Finding]:
    if network.name_fault:
        yield Finding(
            "host name",
            network.name,
            "warning",
            meaning=f"it leads to no address ({network.name_fault}): torchrun, and ranks on several"
            " machines, look for each other by it",
            remedy=f"add '127.0.1.1 {network.name}' to /etc/hosts, or name addresses (MASTER_ADDR,"
            " --rendezvous)",
        )
    else:
        yield Finding("host name", f"{network.name}, {network.address}")
    if network.loopback_fault:
        yield Finding(
            "loopback",
            "does not work",
            "problem",
            meaning=f"this machine does not reach itself at 127.0.0.1 ({network.loopback_fault}),"
            " where ranks of one machine meet",
            remedy="ip link set lo up, as root",
        )
    shown = [
        f"{one.name} ({', '.join(one.addresses[:1])})"
        for one in network.interfaces
        if one.addresses
    ]
    yield Finding("interfaces", ", ".join(shown) or "none with an address")


def _named_interfaces(network: Network, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Interfaces that are chosen by variables have to be there."""
    there = [one.name for one in network.interfaces]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        text = environment.get(variable, "")
        if not text or text.startswith("^"):  # all but those
            continue
        is_whole = variable.startswith("GLOO") or text.startswith("=")
        for name in text.removeprefix("=").split(","):
            if not any(one == name if is_whole else one.startswith(name) for one in there):
                yield Finding(
                    variable,
                    repr(text),
                    "problem",
                    place="environment",
                    meaning=f"no interface {name!r} is up here; there are {', '.join(there) or 'none'}",
                    remedy="name one of them, or unset it: anybatch finds the way by itself",
                )


def _launcher(network: Network, environment: Mapping[str, str]) -> Finding:
    if network.launcher_fault:
        meaning, _, remedy = network.launcher_fault.rstrip(".").rpartition(": ")
        return Finding(
            "started as",
            ", ".join(f"{name}={environment[name]}" for name in LAUNCHERS if name in environment),
            "problem",
            place="environment",
            meaning=meaning,
            remedy=remedy,
        )
    return Finding("started as", _in_words(network))


def _in_words(network: Network) -> str:
    if network.rank is None:
        return "a process by itself"
    return f"rank {network.rank} of {network.world_size}, by {network.launcher}"


def _master(network: Network, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Where ranks are to meet, if the environment says so."""
    master = network.master
    text = environment.get("MASTER_PORT", "")
    if text and master.port is None:
        yield Finding(
            "MASTER_PORT",
            repr(text),
            "problem",
            place="environment",
            meaning="a port is a number from 1 to 65535",
            remedy="correct it, or unset it",
        )
    if master.host_fault:
        yield Finding(
            "MASTER_ADDR",
            repr(master.host),
            "problem",
            place="environment",
            meaning=f"the name leads nowhere ({master.host_fault})",
            remedy="correct it, or give the address of rank 0's machine",
        )
        return
    # Rank 0 listens there, or for it the agent behind torchrun; for others somebody has to.
    by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if master.port_free is False and not by_agent and not network.rank:
        yield Finding(
            "MASTER_PORT",
            repr(text),
            "warning" if network.rank is None else "problem",
            place="environment",
            meaning=f"something listens on port {master.port} of this machine, so rank 0 cannot",
            remedy=f"end it ('ss -ltnp sport = :{master.port}' shows it), or choose another port",
        )
    elif master.place:
        yield Finding("ranks meet at", master.place)

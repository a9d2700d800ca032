"""Checks: what looks saw, judged. Each is a pure function from the values of all looks to findings, so
that a test can make up any broken machine."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from anybatch.doctor.finding import Facts, Finding, Level
from anybatch.doctor.look import ALLOCATORS
from anybatch.units import format_bytes

LEAST, TESTED = "2.11", "2.13"
"""The first version of torch that will do, and the last that anybatch was tested with."""

VISIBLE = "CUDA_VISIBLE_DEVICES"

_LITTLE = 0.1
"""Of memory: less is worth a warning where it is free, more where others hold it on a GPU."""

_GET_STARTED = "https://pytorch.org/get-started/locally"
_REINSTALL = f"reinstall torch ({_GET_STARTED})"


# ------------------------------------------------------------------------------- packages and torch


def packages(facts: Facts) -> Iterator[Finding]:
    python = facts["python"]
    if python is None:
        return
    yield Finding("Python", f"{python['version']}, {python['executable']}")
    yield Finding("system", ", ".join(filter(None, (python["system"], python["libc"]))))
    if python["anybatch"]:
        yield Finding("anybatch", _with_folder(python["anybatch"], python["folder"], python))
    else:
        meaning = "it is found, but not installed, so it is not known which packages it needs"
        yield Finding("anybatch", python["folder"], "note", meaning, "install it with pip")
    needed = [one for one in python["packages"] if not one["extra"]]
    faults = list(_faults(needed))
    if needed and not faults:
        yield Finding("packages", f"all {len(needed)} that anybatch needs")
    yield from faults
    for extra in dict.fromkeys(one["extra"] for one in python["packages"] if one["extra"]):
        yield _extra(extra, [one for one in python["packages"] if one["extra"] == extra])


def is_before(version: str, other: str) -> bool:
    """Whether `version` is an earlier one, if both can be read: `2.13.0+cpu` is (2, 13)."""
    found = [re.match(r"\d+(?:\.\d+)*?(?=(?:\.0+)*(?![.\d]))", one) for one in (version, other)]
    one, two = ([*map(int, it[0].split("."))] if it else [] for it in found)
    return bool(one and two) and one < two


def _with_folder(version: str, folder: str, python: Facts | None) -> str:
    """The version of a package, and its folder unless that is the interpreter's own."""
    is_own = python is not None and folder.startswith(python["prefix"])
    return version if is_own else f"{version}, {folder}"


def _faults(needed: list[Facts]) -> Iterator[Finding]:
    for one in needed:
        name, version, least = one["name"], one["version"], one["least"]
        install = f"pip install '{name}{'>=' * bool(least)}{least}'"
        if version is None:
            yield Finding(name, "not installed", "problem", "anybatch needs it", install)
        elif least and is_before(version, least):
            yield Finding(name, version, "problem", f"anybatch needs {least} or later", install)
        elif one["fault"]:
            meaning = f"it cannot be imported ({one['fault']})"
            yield Finding(
                name, version, "problem", meaning, f"pip install --force-reinstall {name}"
            )


def _extra(extra: str, packages: list[Facts]) -> Finding:
    """Optional packages that are installed together."""
    missing = [one["name"] for one in packages if one["version"] is None]
    there = [one for one in packages if one["version"] is not None]
    early = [one for one in there if is_before(one["version"], one["least"])]
    words = [*(f"{one['name']} {one['version']}" for one in there), *(f"no {it}" for it in missing)]
    name, value, remedy = f"[{extra}]", ", ".join(words), f"pip install 'anybatch[{extra}]'"
    if early:
        needs = (f"{one['least']} or later is needed of {one['name']}" for one in early)
        return Finding(name, value, "warning", " and ".join(needs), remedy)
    return Finding(name, value, "note", "", remedy) if missing else Finding(name, value)


_RAISE_LIMITS = "raise the limits of this process (ulimit -v, ulimit -d)"
_CAUSES = (
    (r"No module named 'torch'", "pip install torch"),
    (
        r"failed to map segment|[Cc]annot allocate memory|MemoryError",
        f"memory ran out while it was loaded: {_RAISE_LIMITS}",
    ),
    (
        r"lib(?:cud|cublas|nccl|nv|cufft|curand|cusolver|cusparse)[\w.-]*\.so",
        f"a library of CUDA is missing, or LD_LIBRARY_PATH is wrong: unset it, or {_REINSTALL}",
    ),
    (
        r"undefined symbol",
        f"several versions are mixed: unset LD_LIBRARY_PATH and LD_PRELOAD, or {_REINSTALL}",
    ),
)
"""What the loader of libraries says, and what to do."""


def torch(facts: Facts) -> Iterator[Finding]:
    torch, python = facts["torch"], facts["python"]
    if torch is None:
        return
    if torch["fault"]:
        yield _no_torch(torch, facts["host"])
        return
    value = _with_folder(torch["version"], torch["folder"], python)
    if is_before(torch["version"], LEAST):
        meaning = f"anybatch needs {LEAST} or later"
        yield Finding("torch", value, "problem", meaning, f"pip install 'torch>={LEAST}'")
    elif is_before(TESTED, ".".join(torch["version"].split(".")[:2])):
        meaning = f"tested are {LEAST} to {TESTED}: predictions may be further off"
        yield Finding("torch", value, "note", meaning)
    else:
        yield Finding("torch", value)
    cuda, hip, cudnn = torch["cuda"], torch["hip"], torch["cudnn"]
    target = f"for CUDA {cuda}" if cuda else f"for ROCm {hip}" if hip else "for CPUs"
    build = (target, cudnn and f"cuDNN {cudnn}", torch["cpu"], *torch["libraries"])
    yield Finding("build", ", ".join(filter(None, build)))
    if python is not None and python["compiler"]:
        yield Finding("C++ compiler", python["compiler"])
    elif python is not None:
        remedy = "if you want that, install g++, or name one in CXX"
        yield Finding("C++ compiler", "none", "note", "--compile needs one on a CPU", remedy)
    for step in facts["steps"]:
        name = f"steps on {step['device']}"
        if step["fault"]:
            meaning = f"two small steps of training failed ({step['fault']})"
            remedy = (
                "see the group GPUs; else set CUDA_LAUNCH_BLOCKING=1, look for Xid in dmesg, and"
            )
            remedy = _REINSTALL if step["device"] == "cpu" else f"{remedy} restart"
            if "no kernel image" in step["fault"]:
                remedy = f"install a build of torch for this GPU ({_GET_STARTED})"
            yield Finding(name, "wrong or failed", "problem", meaning, remedy)
        else:
            yield Finding(name, "two small ones came out right")


def _no_torch(torch: Facts, host: Facts | None) -> Finding:
    fault, folder = torch["fault"], torch["folder"]
    if folder:
        remedy = "rename that, or run anybatch from another folder"
        meaning = "another module has its name"
        return Finding("torch", "not torch", "problem", meaning, remedy, folder)
    remedy = next((it for words, it in _CAUSES if re.search(words, fault)), "")
    limits = host["limits"] if host is not None else {}
    if not remedy and any(limits.get(it, [None])[0] for it in ("RLIMIT_AS", "RLIMIT_DATA")):
        remedy = _RAISE_LIMITS
    meaning = fault.rstrip(".")
    return Finding("torch", "cannot be imported", "problem", meaning, remedy or _REINSTALL)


# --------------------------------------------------------------------------------------------- GPUs


def gpus(facts: Facts) -> Iterator[Finding]:
    gpus, environment = facts["gpus"], facts["environment"]
    torch = facts["torch"] if facts["torch"] is not None and not facts["torch"]["fault"] else None
    if gpus is not None and not (torch is not None and torch["hip"]):
        yield _driver(gpus, torch)
    if torch is not None and (torch["cuda"] or torch["hip"]):
        yield _usable(torch, gpus, VISIBLE in environment or bool(torch["allocator_fault"]))
    elif torch is not None and gpus is not None and (gpus["gpus"] or gpus["on_bus"]):
        meaning = "there are GPUs here, and torch does not use them"
        remedy = f"install its build for CUDA: {_GET_STARTED}"
        yield Finding("torch and CUDA", "built for CPUs", "warning", meaning, remedy)
    if gpus is not None:
        if VISIBLE in environment:
            yield _visible(environment[VISIBLE], gpus["gpus"])
        yield from map(_gpu, gpus["gpus"])
        order = environment.get("CUDA_DEVICE_ORDER", "") or "FASTEST_FIRST"
        if len({gpu["name"] for gpu in gpus["gpus"]}) > 1 and order != "PCI_BUS_ID":
            meaning = "they differ, and CUDA numbers them in another order than nvidia-smi"
            remedy = "set CUDA_DEVICE_ORDER=PCI_BUS_ID to have one order"
            yield Finding("order of GPUs", order, "note", meaning, remedy)


def _driver(gpus: Facts, torch: Facts | None) -> Finding:
    fault, count = gpus["fault"], gpus["on_bus"] or 0
    if gpus["driver"]:
        return Finding("driver", f"{gpus['driver']}, for CUDA up to {gpus['cuda']}")
    if torch is not None and torch["devices"]:
        meaning = f"torch sees its GPUs; their users and settings are not known ({fault})"
        return Finding("driver", "not reached by NVML", "note", meaning)
    if count:
        are = "GPUs are" if count > 1 else "GPU is"
        meaning = f"{count} {are} on the bus of this machine, and no driver answers ({fault})"
        remedy = (
            "in a container, add docker run --gpus all; else install NVIDIA's driver, or restart the "
            "machine after its update, or look for NVRM in dmesg"
        )
        return Finding("driver", "none", "problem", meaning, remedy)
    if torch is not None and torch["cuda"]:
        meaning = f"no GPU of NVIDIA is here: torch for CUDA {torch['cuda']} computes on the CPU"
        return Finding("driver", "none", "note", meaning)
    return Finding("driver", "none, and no GPU of NVIDIA")


def _usable(torch: Facts, gpus: Facts | None, is_explained: bool) -> Finding:
    """The devices that torch can use. `is_explained`: a variable that has a finding of its own hides
    them or stops torch."""
    name = "torch and CUDA" if torch["cuda"] else "torch and ROCm"
    if torch["devices"]:
        names = dict.fromkeys(device["name"] for device in torch["devices"])
        return Finding(name, f"{len(torch['devices'])} seen: {', '.join(names)}")
    if gpus is not None and gpus["gpus"] and not is_explained:
        meaning = f"the driver shows {len(gpus['gpus'])}, and torch can use none"
        meaning += f" ({torch['cuda_fault']})" * bool(torch["cuda_fault"])
        remedy = (
            f"update the driver if it is older than CUDA {torch['cuda']}; else restart the machine"
        )
        return Finding(name, "no device seen", "problem", meaning, remedy)
    return Finding(name, "no device seen")


def _visible(text: str, gpus: list[Facts]) -> Finding:
    count, names = len(gpus), [name.strip() for name in text.split(",")]
    wrong = [index for index, name in enumerate(names) if not _is_one(name, gpus)]
    level: Level = "warning"
    if text.strip() in ("", "-1"):
        if not count:
            return Finding(VISIBLE, repr(text))
        meaning = f"it hides all {count} GPUs from torch, which computes on the CPU"
        remedy = "unset it, unless that is meant"
    elif not count:
        meaning, remedy = "no GPU is to be had here under any name", "unset it"
    elif wrong:
        # CUDA takes those before the first that it does not know.
        seen = f"only the {wrong[0]} before it" if wrong[0] else "none"
        there = "GPU 0" if count == 1 else f"GPUs 0 to {count - 1}"
        level, remedy = "problem", "name those that are here, or unset it"
        meaning = f"{names[wrong[0]]!r} is none of this machine's {there}: CUDA shows {seen}"
    elif len(set(names)) < len(names):
        level, remedy = "problem", "name each once, or unset it"
        meaning = "it names a GPU twice, so CUDA shows none"
    else:
        return Finding(VISIBLE, repr(text))
    return Finding(VISIBLE, repr(text), level, meaning, remedy, "environment")


def _is_one(name: str, gpus: list[Facts]) -> bool:
    if name.isdecimal():
        return int(name) < len(gpus)
    if name.startswith("MIG"):
        return any(gpu["mig"] for gpu in gpus)
    return bool(name) and any(gpu["uuid"].startswith(name) for gpu in gpus)


def _gpu(gpu: Facts) -> Finding:
    index, mode, total = gpu["index"], gpu["compute_mode"], gpu["total_bytes"]
    held, users = total - gpu["free_bytes"], _users(gpu["users"])
    name = f"GPU {index}"
    value = f"{gpu['name']}, {format_bytes(gpu['free_bytes'])} of {format_bytes(total)} free"
    value += {None: "", True: ", ECC on", False: ", ECC off"}[gpu["ecc"]]
    value += ", divided (MIG)" * bool(gpu["mig"]) + f", {mode}" * (mode != "default")
    reset = f"nvidia-smi -i {index} -c DEFAULT, as root"
    if mode == "prohibited":
        return Finding(
            name, value, "problem", "its compute mode lets no process compute on it", reset
        )
    if gpu["errors"]:
        meaning = f"its memory had {gpu['errors']} errors since the driver was loaded that ECC left"
        remedy = f"look at nvidia-smi -q -i {index} -d ECC, and have it replaced if they go on"
        return Finding(name, value, "warning", meaning, remedy)
    if mode.startswith("exclusive") and users:
        meaning = f"it takes one process at a time, and {users} has it"
        return Finding(name, value, "problem", meaning, f"end that, or {reset}")
    if total and held > _LITTLE * total:
        meaning = (
            f"{format_bytes(held)} are held by others ({users or 'the driver does not say who'})"
        )
        remedy = "end what you no longer need; plans are made for 90% of what is free"
        return Finding(name, value, "warning", meaning, remedy)
    return Finding(name, value)


def _users(users: list[Facts], most: int = 3) -> str:
    shown = [
        f"{one['name'] or 'a process outside this container'} (pid {one['pid']})"
        + ("" if one["num_bytes"] is None else f" with {format_bytes(one['num_bytes'])}")
        for one in users[:most]
    ]
    more = len(users) - len(shown)
    return ", ".join(shown) + f", and {more} more" * bool(more)


# --------------------------------------------------------------------------- cores, memory, folders


def host(facts: Facts) -> Iterator[Finding]:
    host, limit = facts["host"], facts["enforcement"]
    if host is not None:
        yield _cores(host, facts["torch"])
        yield from _memory(host)
        yield from _limits(host)
        if host["system"] == "linux":
            yield _shm(host["shm_bytes"], host["shm_free_bytes"])
        for library in host["mallocs"]:
            meaning = (
                "it replaces malloc of the C library: on a CPU, predictions may be further off"
            )
            remedy = "take it out of LD_PRELOAD when you train on the CPU"
            yield Finding("malloc", library, "warning", meaning, remedy, "LD_PRELOAD, or linked in")
    if limit is not None and limit["fault"]:
        meaning = f"{limit['fault']}: --memory is planned with, and nothing holds a run to it"
        yield Finding("budget on the CPU", "cannot be enforced", "warning", meaning)
    elif limit is not None:
        yield Finding("budget on the CPU", "enforced: memory beyond a limit was refused")


def _cores(host: Facts, torch: Facts | None) -> Finding:
    value = f"{host['own_cores']} of {host['cores']} for this process"
    threads = torch["threads"] if torch is not None and not torch["fault"] else 0
    quota = host["quota_cores"]
    if quota is not None and quota < host["own_cores"]:
        value += f", {quota:g} at a time"
        if threads > math.ceil(quota):
            meaning = (
                f"torch's {threads} threads wait for each other when the group's time is used up"
            )
            remedy = f"set OMP_NUM_THREADS={max(1, math.floor(quota))}, or give the group more"
            return Finding("cores", value, "warning", meaning, remedy, "control group")
    return Finding("cores", value + f"; torch uses {threads}" * bool(threads))


def _memory(host: Facts) -> Iterator[Finding]:
    available, total, swap = host["available_bytes"], host["total_bytes"], host["swap_bytes"]
    value = f"{format_bytes(available)} of {format_bytes(total)} available"
    value += f", swap {format_bytes(swap)}" * bool(swap)
    if available < _LITTLE * total:
        meaning = "other processes have nearly all of it"
        yield Finding("memory", value, "warning", meaning, "end what you no longer need")
    else:
        yield Finding("memory", value)
    limit, used, kills = host["group_bytes"], host["group_used_bytes"], host["oom_kills"]
    if limit is not None and limit < total:
        value = f"{format_bytes(limit)}, {format_bytes(used)} in use"
        if limit - used < _LITTLE * limit:
            meaning = "other processes of the group have nearly all of it"
            remedy = "end what you no longer need, or give the group more"
            file = host["group_file"]
            yield Finding("limit of the group", value, "warning", meaning, remedy, file)
        else:
            yield Finding("limit of the group", value)
    if kills:
        value = f"{kills} process{'es' * (kills > 1)} of the control group"
        meaning = "since the group was made, the kernel has ended them because its memory ran out"
        remedy = "give --memory, so that runs are refused memory in good time"
        yield Finding("killed for memory", value, "note", meaning, remedy)


def _limits(host: Facts) -> Iterator[Finding]:
    limits, unlimited = host["limits"], []
    for name, flag, what in (("RLIMIT_DATA", "-d", "data"), ("RLIMIT_AS", "-v", "addresses")):
        soft = limits.get(name, (None, None))[0]
        if soft is not None:
            meaning = f"the {what} of a process may not grow beyond that"
            if name == "RLIMIT_AS":
                meaning += "; libraries reserve far more addresses than they fill, CUDA above all"
            remedy = f"ulimit {flag} unlimited, and --memory for a budget"
            yield Finding(name, format_bytes(soft), "warning", meaning, remedy)
        elif name in limits:
            unlimited.append(what)
    if unlimited:
        yield Finding("limits", f"none on {' and '.join(unlimited)}")
    soft, hard = limits.get("RLIMIT_NOFILE", (None, None))
    if soft is not None and soft < 1024:
        most = min(hard or 65536, 65536)
        meaning = "workers that load data hand over each tensor by a file"
        remedy = f"ulimit -n {most}" if most > soft else "raise the hard limit, as root"
        value = f"{soft} at a time"
        yield Finding("open files", value, "warning", meaning, remedy, "RLIMIT_NOFILE")
    elif soft is not None:
        yield Finding("open files", f"{soft} at a time")


def _shm(size: int | None, free: int | None) -> Finding:
    meaning = (
        "workers that load data pass samples through it, and end with a bus error if it is full"
    )
    remedy = "docker run --shm-size 8g, mount -o remount,size=8G /dev/shm, or load without workers"
    if size is None or free is None:
        return Finding("/dev/shm", "not there, or not to be written to", "warning", meaning, remedy)
    value = f"{format_bytes(free)} of {format_bytes(size)} free"
    if size < 256 << 20:
        return Finding("/dev/shm", value, "warning", meaning, remedy)
    if free < 64 << 20:
        remedy = "delete what ended processes have left there, or load without workers"
        return Finding("/dev/shm", value, "warning", meaning, remedy)
    return Finding("/dev/shm", value)


_NOT_KEPT = (
    "what was measured is not kept, so each plan measures anew, and no run corrects the next"
)
_BY_FILES = "ranks are started with the help of files there"
_FOLDERS: dict[str, tuple[str, int, Level, str, str]] = {
    "runs": (
        *("runs", 2 << 30, "warning", "runs go there without --out"),
        "give --out, or train elsewhere",
    ),
    "cache": ("cache", 16 << 20, "warning", _NOT_KEPT, "set XDG_CACHE_HOME to a writable folder"),
    "temporary": (
        *("temporary files", 16 << 20, "problem", _BY_FILES),
        "set TMPDIR to a writable folder",
    ),
}
"""Name, bytes that should be free, level where it cannot be written to, meaning and remedy."""


def folders(facts: Facts) -> Iterator[Finding]:
    for key, folder in (facts["folders"] or {}).items():
        name, least, unwritable, meaning, remedy = _FOLDERS[key]
        free = folder["free_bytes"]
        words = (folder["path"], "" if free is None else f"{format_bytes(free)} free")
        value = ", ".join(filter(None, words)) or "none"
        if folder["fault"]:
            meaning = f"it cannot be written to ({folder['fault']}): {meaning}"
            yield Finding(name, value, unwritable, meaning, remedy)
        elif free is not None and free < least:
            yield Finding(name, value, "warning", f"the disk is nearly full: {meaning}", remedy)
        else:
            yield Finding(name, value)


# ------------------------------------------------------------------------------------ several ranks

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


def ranks(facts: Facts) -> Iterator[Finding]:
    network, pair, environment = facts["network"], facts["pair"], facts["environment"]
    if facts["torch"] is not None and not facts["torch"]["fault"]:
        yield _backends(facts["torch"])
        if pair is not None and pair["fault"]:
            fault = pair["fault"].rstrip(".")
            meaning = f"two processes here could not meet and add up a tensor ({fault})"
            remedy = "see the rows below, and whether a firewall stands in the way of 127.0.0.1"
            yield Finding("gloo", "does not work here", "problem", meaning, remedy)
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
        return Finding("backends", value, "problem", meaning, remedy)
    if count > 1 and "nccl" not in names:
        meaning = f"this build of torch has no NCCL, by which {count} GPUs exchange gradients"
        remedy = f"install a build for CUDA from {_GET_STARTED}"
        return Finding("backends", value, "problem", meaning, remedy)
    return Finding("backends", value)


def _network(network: Facts) -> Iterator[Finding]:
    name, fault = network["name"], network["name_fault"]
    if fault:
        meaning = f"it leads to no address ({fault}), and ranks of several machines look for it"
        remedy = (
            f"add '127.0.1.1 {name}' to /etc/hosts, or give addresses (MASTER_ADDR, --rendezvous)"
        )
        yield Finding("host name", name, "warning", meaning, remedy)
    else:
        yield Finding("host name", f"{name}, {network['address']}")
    if fault := network["loopback_fault"]:
        meaning = f"ranks of this machine cannot meet at 127.0.0.1 ({fault})"
        yield Finding("loopback", "does not work", "problem", meaning, "ip link set lo up, as root")
    shown = [f"{it} ({found[0]})" for it, found in network["interfaces"].items() if found]
    yield Finding("interfaces", ", ".join(shown) or "none with an address")


def _named_interfaces(there: list[str], environment: Mapping[str, str]) -> Iterator[Finding]:
    """Interfaces that are chosen by variables have to exist."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
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
                yield Finding(variable, repr(text), "problem", meaning, remedy, "environment")


def _launcher(network: Facts, environment: Mapping[str, str]) -> Finding:
    if network["launcher_fault"]:
        meaning, _, remedy = network["launcher_fault"].rstrip(".").rpartition(": ")
        set_ = ", ".join(f"{it}={environment[it]}" for it in LAUNCHERS if it in environment)
        return Finding("started as", set_, "problem", meaning, remedy, "environment")
    if network["rank"] is None:
        return Finding("started as", "a process by itself")
    place = f"rank {network['rank']} of {network['world_size']}"
    return Finding("started as", f"{place}, by {network['launcher']}")


def _meeting(network: Facts, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Where ranks are to meet, if the environment says so."""
    master, rank = network["master"], network["rank"]
    text, port, place = environment.get("MASTER_PORT", ""), master["port"], "environment"
    if text and port is None:
        meaning, remedy = "a port is a number from 1 to 65535", "correct it, or unset it"
        yield Finding("MASTER_PORT", repr(text), "problem", meaning, remedy, place)
    if master["host_fault"]:
        meaning = f"the name leads nowhere ({master['host_fault']})"
        remedy = "correct it, or give the address of rank 0's machine"
        yield Finding("MASTER_ADDR", repr(master["host"]), "problem", meaning, remedy, place)
        return
    # Rank 0 listens there, or for it the agent behind torchrun; for others somebody has to.
    by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if master["port_free"] is False and not by_agent and not rank:
        level: Level = "warning" if rank is None else "problem"
        meaning = f"something listens on port {port} of this machine, so rank 0 cannot"
        remedy = f"end it ('ss -ltnp sport = :{port}' shows it), or choose another port"
        yield Finding("MASTER_PORT", repr(text), level, meaning, remedy, place)
    elif master["place"]:
        yield Finding("ranks meet at", master["place"])


# -------------------------------------------------------------------------------------- environment

_ON = r"(?i)(?!\s*(0|false|off|no|n)?\s*$).*"


class Rule(NamedTuple):
    """A variable and the values that lead to a finding.

    Attributes:
        values: regular expression for the whole value; by default any value that switches it on.
    """

    name: str
    level: Level
    meaning: str
    remedy: str = "unset it"
    values: str = _ON


_TF32 = "products are in TensorFloat-32 whatever precision says"
_NO_TF32 = "nothing is in TensorFloat-32, even with --precision tf32"
_USE_PRECISION = "unset it, and use --precision tf32"
_NO_COMPILER = "nothing is compiled, even with --compile"
_UNCACHED = (
    "torch's allocator, which enforces a budget on CUDA and whose bytes are predicted, is off"
)
_WORKSPACE = "torch cannot read it, and uses workspaces of its default size"
_BLOCKING = "the CPU waits for each kernel of the GPU: training is slower, often by far"
_EAGER = "all kernels are loaded at once: a process holds more of the GPU before it begins"

RULES = (
    Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", "warning", _UNCACHED),
    Rule(
        *("CUBLAS_WORKSPACE_CONFIG", "warning", _WORKSPACE, "write :4096:8 or :16:8, or unset it"),
        r"(?!(:\d+:\d+)+$).*",
    ),
    Rule(
        *("CUDA_LAUNCH_BLOCKING", "warning", _BLOCKING),
        "unset it, unless you are looking for the kernel that fails",
    ),
    Rule("NVIDIA_TF32_OVERRIDE", "warning", _TF32, _USE_PRECISION, "1"),
    Rule("NVIDIA_TF32_OVERRIDE", "warning", _NO_TF32, _USE_PRECISION, "0"),
    Rule("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "warning", _TF32, _USE_PRECISION),
    Rule("CUDA_MODULE_LOADING", "note", _EAGER, values="EAGER"),
    Rule("NCCL_P2P_DISABLE", "warning", "GPUs exchange by way of the host"),
    Rule("NCCL_SHM_DISABLE", "warning", "GPUs of one machine exchange slowly"),
    Rule("NCCL_IB_DISABLE", "note", "InfiniBand is not used between machines"),
    Rule("NCCL_DEBUG", "note", "NCCL logs what it does, and is slower", values="INFO|TRACE"),
    Rule("TORCH_DISTRIBUTED_DEBUG", "note", "each collective is checked: slow", values="DETAIL"),
    Rule("TORCHDYNAMO_DISABLE", "note", _NO_COMPILER),
    Rule("TORCH_COMPILE_DISABLE", "note", _NO_COMPILER),
)

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_OWN = (*(rule.name for rule in RULES), *ALLOCATORS, *_THREADS)
_SHOWN = (*_OWN, "NCCL_*", "TORCH_NCCL_*")
"""Variables of this group: with a judgement, and without one."""

_ELSEWHERE = (*LAUNCHERS, VISIBLE, "CUDA_DEVICE_ORDER", "GLOO_SOCKET_IFNAME")
"""Variables with findings of other groups."""


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that any finding is about. No other value is read or shown."""
    shown = sorted(environment.items())
    return {name: value for name, value in shown if _matches(name, (*_SHOWN, *_ELSEWHERE))}


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def environment(facts: Facts) -> Iterator[Finding]:
    shown = {name: value for name, value in facts["environment"].items() if _matches(name, _SHOWN)}
    for name, value in shown.items():
        level, meaning, remedy = _judged(name, value, facts)
        place = "" if level == "ok" else "environment"
        yield Finding(name, repr(value), level, meaning, remedy, place)
    if not shown:
        yield Finding("variables", "none is set that changes what is computed")


def _judged(name: str, value: str, facts: Facts) -> tuple[Level, str, str]:
    """Level, meaning and remedy of a variable."""
    if name in ALLOCATORS:
        return _allocator(facts)
    if name in _THREADS:
        return _threads(value, facts)
    for rule in RULES:
        if rule.name == name and re.fullmatch(rule.values, value):
            return rule.level, rule.meaning, rule.remedy
    return "ok", "", ""


def _allocator(facts: Facts) -> tuple[Level, str, str]:
    torch = facts["torch"] or {"fault": "unknown"}
    if torch["fault"] or not torch["allocator_fault"]:
        return "ok", "", ""
    words = torch["allocator_fault"].partition(" INTERNAL ASSERT")[0].rstrip(".")
    meaning = f"it fails where CUDA is first used ({words})"
    remedy = "write option:value,option:value as in torch's documentation, or unset it"
    return "problem" if torch["cuda"] or torch["hip"] else "warning", meaning, remedy


def _threads(value: str, facts: Facts) -> tuple[Level, str, str]:
    first = value.split(",")[0].strip()
    cores = facts["host"]["own_cores"] if facts["host"] is not None else None
    if not first.isdecimal() or int(first) == 0:
        meaning = "it is not a number of threads, and ignored"
        return "warning", meaning, "correct it, or unset it"
    if cores is not None and int(first) > cores:
        meaning = f"these threads share {cores} core{'s' * (cores > 1)}, and wait for each other"
        return "warning", meaning, f"set it to {cores}, or unset it"
    # Launchers give each rank a part of the cores.
    if cores is not None and int(first) < cores and "WORLD_SIZE" not in facts["environment"]:
        return "note", f"part of {cores} cores stays unused", ""
    return "ok", "", ""

"""GPUs: driver, torch's build for them, which can be seen, how they are set, and who holds them."""

from __future__ import annotations

from collections.abc import Iterator

from anybatch.doctor.facts import Facts, Gpu, Gpus, GpuUser, Torch
from anybatch.doctor.finding import Finding, Level
from anybatch.doctor.judges.versions import is_before, numbers_of
from anybatch.units import format_bytes

VISIBLE = "CUDA_VISIBLE_DEVICES"

_MUCH = 0.1
"""Of a GPU's memory, held by others."""

_SHOWN_USERS = 3


def judge(facts: Facts) -> Iterator[Finding]:
    """Findings on `Facts.gpus`, and on what torch makes of them."""
    gpus = facts.gpus
    torch = facts.torch if facts.torch is not None and not facts.torch.fault else None
    if gpus is not None and not (torch is not None and torch.hip):
        yield _driver(gpus, torch)
    if torch is not None and (torch.cuda or torch.hip):
        yield _seen(torch, gpus, VISIBLE in facts.environment or bool(torch.allocator_fault))
    elif torch is not None and gpus is not None and (gpus.gpus or gpus.on_bus):
        yield Finding(
            "torch and CUDA",
            "built for CPUs",
            "warning",
            meaning="there are GPUs here, and torch does not use them",
            remedy="install its build for CUDA: https://pytorch.org/get-started/locally",
        )
    if VISIBLE in facts.environment and gpus is not None:
        yield _visible(facts.environment[VISIBLE], gpus)
    for gpu in gpus.gpus if gpus is not None else ():
        yield from _gpu(gpu)
    if gpus is not None and len({gpu.name for gpu in gpus.gpus}) > 1:
        yield from _order(facts.environment.get("CUDA_DEVICE_ORDER", ""))
    if torch is not None and torch.cuda:
        yield from _architectures(torch)


def _driver(gpus: Gpus, torch: Torch | None) -> Finding:
    for_cuda = torch.cuda if torch is not None else ""
    if not gpus.driver and torch is not None and torch.devices:
        return Finding(
            "driver",
            "not reached by NVML",
            "note",
            meaning="torch sees its GPUs; who holds their memory, and how they are set, is not"
            f" known ({gpus.fault})",
        )
    if not gpus.driver:
        return _no_driver(gpus, for_cuda)
    value = f"{gpus.driver}, for CUDA up to {gpus.cuda}"
    built, spoken = numbers_of(for_cuda), numbers_of(gpus.cuda)
    if built and built[0] > spoken[0]:
        return Finding(
            "driver",
            value,
            "problem",
            meaning=f"it is too old for torch, which was built for CUDA {for_cuda}",
            remedy=f"update the driver, or install a torch that was built for CUDA {spoken[0]}",
        )
    if built and built > spoken[: len(built)]:
        # CUDA promises that minor versions go together; only what is compiled at run time does not.
        return Finding(
            "driver",
            value,
            "note",
            meaning=f"it is older than CUDA {for_cuda}, for which torch was built: kernels that are"
            " compiled while training may not load",
            remedy="update it if they do not",
        )
    return Finding("driver", value)


def _no_driver(gpus: Gpus, for_cuda: str) -> Finding:
    name, count = "driver", gpus.on_bus or 0
    here = f"{count} GPU{'s are' if count != 1 else ' is'} on the bus of this machine"
    if "mismatch" in gpus.fault:
        return Finding(
            name,
            f"module {gpus.module}" if gpus.module else "of two versions",
            "problem",
            meaning="the module in the kernel and the libraries are of different versions"
            f" ({gpus.fault})",
            remedy="restart the machine, or load the module anew, after the update of the driver",
        )
    if gpus.module:
        return Finding(
            name,
            f"module {gpus.module}",
            "problem",
            meaning=f"the module is in the kernel, but does not answer ({gpus.fault})",
            remedy="in a container, start it with its GPUs (docker run --gpus all); else look at"
            " dmesg for lines with NVRM",
        )
    if gpus.on_bus:
        return Finding(
            name,
            "none",
            "problem",
            meaning=f"{here}, and no driver ({gpus.fault})",
            remedy="install NVIDIA's driver, or start the container with its GPUs (docker run"
            " --gpus all)",
        )
    if for_cuda:
        return Finding(
            name,
            "none",
            "note",
            meaning="there is no GPU of NVIDIA here to drive, so torch, which was built for CUDA"
            f" {for_cuda}, computes on the CPU",
        )
    return Finding(name, "none, and no GPU of NVIDIA")


def _seen(torch: Torch, gpus: Gpus | None, told: bool) -> Finding:
    """The devices that torch can use. `told`: a variable hides them, or
    stops torch, and is told of by itself."""
    name = "torch and CUDA" if torch.cuda else "torch and ROCm"
    if torch.devices:
        names = dict.fromkeys(device.name for device in torch.devices)
        return Finding(name, f"{len(torch.devices)} seen: {', '.join(names)}")
    if gpus is not None and gpus.gpus and not told:
        return Finding(
            name,
            "no device seen",
            "problem",
            meaning=f"the driver shows {len(gpus.gpus)}, and torch can use none"
            + (f" ({torch.cuda_fault})" if torch.cuda_fault else ""),
            remedy="see the driver above; if it is well, restart the machine",
        )
    return Finding(name, "no device seen")


def _visible(text: str, gpus: Gpus) -> Finding:
    value = repr(text)

    def told(level: Level, meaning: str, remedy: str) -> Finding:
        return Finding(VISIBLE, value, level, "environment", meaning, remedy)

    count = len(gpus.gpus)
    names = [name.strip() for name in text.split(",")]
    if not count:
        if text.strip() in ("", "-1"):
            return Finding(VISIBLE, value)
        return told("warning", "no GPU is to be had here under any name", "unset it")
    if text.strip() in ("", "-1"):
        return told(
            "warning",
            f"it hides all {count} GPUs from torch, which computes on the CPU",
            "unset it, unless that is meant",
        )
    wrong = [name for name in names if not _is_one(name, gpus)]
    there = "GPU 0" if count == 1 else f"GPUs 0 to {count - 1}"
    if wrong:
        # CUDA takes those before the first that it does not know.
        number = names.index(wrong[0])
        seen = f"CUDA shows only the {number} before it" if number else "CUDA shows none"
        return told(
            "problem",
            f"{wrong[0]!r} is none of this machine, which has {there}, so {seen}",
            "name those that are here, or unset it",
        )
    if len(set(names)) < len(names):
        return told(
            "problem", "it names a GPU twice, so CUDA shows none", "name each once, or unset it"
        )
    return Finding(VISIBLE, value)


def _is_one(name: str, gpus: Gpus) -> bool:
    if name.isdecimal():
        return int(name) < len(gpus.gpus)
    if name.startswith("MIG"):
        return any(gpu.mig for gpu in gpus.gpus)
    return bool(name) and any(gpu.uuid.startswith(name) for gpu in gpus.gpus)


def _gpu(gpu: Gpu) -> Iterator[Finding]:
    name = f"GPU {gpu.index}"
    value = (
        f"{gpu.name}, {format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)}"
        f" free{_set(gpu)}"
    )
    if gpu.compute_mode == "prohibited":
        yield Finding(
            name,
            value,
            "problem",
            meaning="its compute mode lets no process compute on it",
            remedy=f"nvidia-smi -i {gpu.index} -c DEFAULT, as root",
        )
        return
    if gpu.errors:
        yield Finding(
            name,
            value,
            "warning",
            meaning=f"its memory had {gpu.errors} errors that could not be corrected since the"
            " driver was loaded",
            remedy=f"look at nvidia-smi -q -i {gpu.index} -d ECC, and have it replaced if they go on",
        )
        return
    if gpu.compute_mode.startswith("exclusive") and gpu.users:
        yield Finding(
            name,
            value,
            "problem",
            meaning=f"it takes one process at a time, and {_users(gpu.users)} has it",
            remedy=f"end that, or nvidia-smi -i {gpu.index} -c DEFAULT, as root",
        )
        return
    if gpu.total_bytes and gpu.total_bytes - gpu.free_bytes > _MUCH * gpu.total_bytes:
        who = _users(gpu.users) or "the driver does not say who"
        yield Finding(
            name,
            value,
            "warning",
            meaning=f"{format_bytes(gpu.total_bytes - gpu.free_bytes)} are held by others ({who})",
            remedy="end what you no longer need; plans are made for 90% of what is free",
        )
        return
    yield Finding(name, value)


def _set(gpu: Gpu) -> str:
    """How it is set, where that is known."""
    ecc = {None: "", True: ", ECC on", False: ", ECC off"}[gpu.ecc]
    mode = f", {gpu.compute_mode}" if gpu.compute_mode != "default" else ""
    return f"{ecc}{', divided (MIG)' if gpu.mig else ''}{mode}"


def _users(users: tuple[GpuUser, ...]) -> str:
    def one(user: GpuUser) -> str:
        size = "" if user.num_bytes is None else f" with {format_bytes(user.num_bytes)}"
        return f"{user.name or 'a process outside this container'} (pid {user.pid}){size}"

    more = f", and {len(users) - _SHOWN_USERS} more" if len(users) > _SHOWN_USERS else ""
    return ", ".join(map(one, users[:_SHOWN_USERS])) + more


def _order(order: str) -> Iterator[Finding]:
    if order != "PCI_BUS_ID":
        yield Finding(
            "order of GPUs",
            order or "FASTEST_FIRST",
            "note",
            meaning="they are not all alike, and CUDA numbers them otherwise than nvidia-smi and"
            " this list",
            remedy="set CUDA_DEVICE_ORDER=PCI_BUS_ID to have one order",
        )


def _architectures(torch: Torch) -> Iterator[Finding]:
    """A GPU for which torch has no kernels: none of its generation, and none to be translated."""
    for index, device in enumerate(torch.devices):
        if torch.architectures and not has_kernels(torch.architectures, device.capability):
            generation = device.capability.replace(".", "")
            yield Finding(
                f"kernels for cuda:{index}",
                f"none for sm_{generation}",
                "problem",
                meaning=f"{device.name} has capability {device.capability}, and torch was built for"
                f" {', '.join(torch.architectures)}",
                remedy="install a build of torch for it: https://pytorch.org/get-started/locally",
            )


def has_kernels(architectures: tuple[str, ...], capability: str) -> bool:
    """Whether code for `architectures` runs on a GPU of that capability: binary code on the same
    generation from its own version on, what can be translated on all that are not older."""
    for architecture in architectures:
        kind, _, text = architecture.partition("_")
        digits = text.rstrip("af")  # sm_90a runs on 9.0 alone
        if not digits.isdecimal():
            continue
        own = f"{digits[:-1]}.{digits[-1]}"
        if text != digits:
            runs = kind == "sm" and own == capability
        elif kind == "sm":
            runs = numbers_of(own)[0] == numbers_of(capability)[0] and not is_before(
                capability, own
            )
        else:
            runs = not is_before(capability, own)
        if runs:
            return True
    return False

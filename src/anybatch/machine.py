"""Machine: the devices on which a task runs, the memory budget of each, and their speeds.

A machine is detected (`Machine.here`) or, for hardware that is not present, described
(`Machine.describe`). It is plain data: planning reads it and never accesses the device.
"""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from anybatch import catalogue
from anybatch.errors import InputError, setting, worded
from anybatch.process.cuda_driver import beside_bytes
from anybatch.process.host_memory import host_memory
from anybatch.process.threads import num_cores
from anybatch.units import check_count, format_bytes, parse_bytes

DeviceKind = Literal["cpu", "cuda"]

NumberFormat = Literal["bf16", "tf32", "fp8"]
"""A number format for matrix products that not every device supports."""

# The first CUDA compute capability, and the ROCm architectures, that support each format.
_SINCE: dict[NumberFormat, tuple[int, int]] = {"bf16": (8, 0), "tf32": (8, 0), "fp8": (8, 9)}
_ON_ROCM: dict[NumberFormat, tuple[str, ...]] = {
    "bf16": ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12"),
    "tf32": ("gfx94",),
    "fp8": ("gfx94", "gfx95"),
}

USABLE = 0.9
"""Fraction of the free memory that is the budget if the user gives none. The rest is left for other
processes, whose use changes while training runs."""


_LEAST_BARE = 1 << 20
"""Smallest number of bytes accepted without a unit; for a smaller number, the unit is assumed to be
missing."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Nominal speeds of a device, used if nothing was measured.

    Attributes:
        flops: floating-point operations per second in float32; a multiply-add counts as two.
        half_flops: the same in float16, and in bfloat16 if the device supports it.
        bytes: memory bandwidth, in bytes per second.
        launch_seconds: time to launch one operation.
        tf32_flops: like `flops`, in TensorFloat-32; 0: not supported.
        link_bytes: bandwidth to other devices, in bytes per second in each direction.
    """

    flops: float
    half_flops: float
    bytes: float
    launch_seconds: float
    tf32_flops: float = 0.0
    link_bytes: float = 1e10


# Orders of magnitude for one core with 256-bit vectors, and for a mid-range GPU with tensor cores.
# Processes of one machine communicate over gloo (4 to 16 MB on two ranks: 1.2 to 1.9 GB/s).
_CPU_CORE = Rates(flops=4e10, half_flops=2e10, bytes=8e9, launch_seconds=5e-6, link_bytes=1.3e9)
_GPU = Rates(flops=3e13, half_flops=1.2e14, bytes=8e11, launch_seconds=8e-6, tf32_flops=6e13)


@dataclass(frozen=True, slots=True)
class Device:
    """One device and its memory budget.

    Attributes:
        kind: `"cpu"` or `"cuda"`.
        index: index among the devices of its kind.
        name: name for display.
        total_bytes: memory of the device; for a CPU, the part that a control group or `ulimit` allows.
        budget_bytes: memory that training may use. On CUDA, this is everything that the process holds
            on the device, including the context; on CPU, it is relative to the process at the start of
            training.
        present: False for a device that is described, not detected.
        rates: nominal speeds.
        capability: CUDA compute capability or ROCm architecture; empty if unknown.
        free_bytes: for a CPU that is present, memory that this rank can allocate now; else None.
        limit: what determines `free_bytes`, such as the limit of a control group; empty: the machine.
    """

    kind: DeviceKind
    index: int
    name: str
    total_bytes: int
    budget_bytes: int
    present: bool
    rates: Rates
    capability: str = ""
    free_bytes: int | None = field(default=None, compare=False)
    limit: str = field(default="", compare=False)

    @property
    def torch_name(self) -> str:
        """Name for `torch.device`: `"cpu"` or `"cuda:1"`."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"

    def divided(self, ranks: int, budget_bytes: int) -> Device:
        """This CPU for one of `ranks` processes that share it, with the budget `budget_bytes`."""
        free = None if self.free_bytes is None else self.free_bytes // ranks
        return replace(self, budget_bytes=budget_bytes, free_bytes=free)

    def has(self, format: NumberFormat) -> bool:
        """Whether the matrix units of this device support `format`. A GPU of which only the memory is
        known is assumed to support it."""
        if self.kind == "cpu":
            return format == "bf16" and cpu_computes_in(torch.bfloat16)
        if self.capability.startswith("gfx"):
            return self.capability.startswith(_ON_ROCM[format])
        version = tuple(int(number) for number in self.capability.split(".") if number)
        return not version or version >= _SINCE[format]

    def describe(self) -> str:
        """One-line description for display."""
        return f"{self.name}, budget {format_bytes(self.budget_bytes)}"


def cpu_computes_in(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for the half-precision `dtype` that oneDNN uses."""
    ops = torch.ops.mkldnn
    asked = {
        torch.bfloat16: ops._is_mkldnn_bf16_supported,
        torch.float16: ops._is_mkldnn_fp16_supported,
    }
    return dtype in asked and bool(asked[dtype]())


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices that a task may use, in rank order.

    Attributes:
        devices: at least one.
        is_limited: whether the user gave the budgets; otherwise they are part of the free memory.
    """

    devices: tuple[Device, ...]
    is_limited: bool = False

    @classmethod
    def here(
        cls, memory: str | int | None = None, device: str | None = None, count: int = 1
    ) -> Machine:
        """Detect this machine: its first CUDA device, or the CPU if there is none.

        Args:
            memory: budget per device, in the format of `parse_bytes`, except that a number without a
                unit must be at least 2**20 bytes. None: 90% of the memory that is free now.
            device: `"cpu"`, `"cuda"` or `"cuda:N"`; None: chosen automatically.
            count: number of devices, in order starting with that one; on a CPU, number of ranks that
                share it.

        Raises:
            InputError: if `memory` is not a size or is more than the device has, or if the device does
                not exist.
        """
        check_count(count, "the number of devices")
        first = _detect(device)
        if first.kind == "cpu":
            # Ranks on one CPU share its memory.
            machine = cls((first.divided(count, first.budget_bytes // count),) * count)
        else:
            others = [_detect(f"cuda:{first.index + i}") for i in range(1, count)]
            machine = cls((first, *others))
        return machine if memory is None else machine.with_budget(memory)

    @classmethod
    def describe(cls, text: str, count: int | None = None) -> Machine:
        """Describe hardware that is not present: a memory size (`"24GiB"`) or a name in the catalogue
        (`"rtx-4090"`), or several of one kind (`"4 x 24GiB"`, `"8 x h100-80gb"`).

        Args:
            text: see above; names may be written in any common form.
            count: number of devices, if `text` does not give one.

        Raises `InputError`, listing the closest names, if `text` is neither a size nor a name.
        """
        remedy = "write a size or a name, such as '24GiB', 'rtx-4090' or '8 x h100-80gb'"
        times = re.fullmatch(r"\s*(\d+)\s*[x*×]\s*(.*?)\s*", text)
        number, what = (int(times[1]), times[2]) if times else (None, text.strip())
        if not what:
            raise InputError(f"{worded('machine', '--device')} is {text!r}: {remedy}.")
        if number is not None and count is not None:
            raise InputError(
                f"{worded('machine', '--device')} is {text!r}, and {count} devices are asked for too:"
                " give the number once."
            )
        if number == 0:
            raise InputError(
                f"{worded('machine', '--device')} is {text!r}, which has no device: write at least"
                f" '1 x {what}'."
            )
        num_devices = number or (1 if count is None else count)
        check_count(num_devices, "the number of devices")
        if _is_size(what):
            size = _parse_memory(what, setting("device"))
            name = f"any {format_bytes(size)} GPU"
            one = Device("cuda", 0, name, size, size, False, _GPU)
        else:
            one = _of_model(catalogue.find(what))
        return cls(tuple(replace(one, index=i) for i in range(num_devices)))

    def with_budget(self, memory: str | int) -> Machine:
        """A copy of this machine with the budget `memory` for each device, in the format of
        `parse_bytes`. Raises `InputError` if that is not a size or is more than a device has."""
        budget = _parse_memory(memory, "memory")
        for device in self.devices:
            if budget > device.total_bytes:
                allowed = f" under {device.limit}" if device.limit else ""
                raise InputError(
                    f"{setting('memory')} is {memory!r}, but {device.name} has only"
                    f" {format_bytes(device.total_bytes)}{allowed}: give at most that, or leave it out"
                    " to use what is free."
                )
        devices = tuple(replace(device, budget_bytes=budget) for device in self.devices)
        return Machine(devices, is_limited=True)

    @property
    def device(self) -> Device:
        """The first device, which a plan for a single device uses."""
        return self.devices[0]


def _is_size(text: str) -> bool:
    """Whether `text` is meant as a size: a number with a byte unit, valid or not, or a number that is
    not the name of a device (as `4090` is)."""
    return not catalogue.knows(text) and bool(
        re.fullmatch(r"\s*-?[\d.]+(e\d+)?\s*([kmgt]|[a-z]?i?b)?\s*", text, re.IGNORECASE)
    )


def _parse_memory(memory: str | int, name: str) -> int:
    """Parse the memory of a device, or a budget on it, in bytes; see `parse_bytes`."""
    size = parse_bytes(memory, name)
    if size < _LEAST_BARE and str(memory).strip()[-1].isdecimal():  # no unit
        raise InputError(
            f"{name} is {memory!r}, which is {size:,} byte{'' if size == 1 else 's'}: write"
            f" '{str(memory).strip()}GiB', if you mean that, or '{str(memory).strip()}B'."
        )
    return size


def _of_model(model: catalogue.Model) -> Device:
    size = model.usable_bytes
    name = f"{model.maker_name} ({model.memory_gib} GB)"
    return Device("cuda", 0, name, size, size, False, rates_of(model), model.capability)


def rates_of(model: catalogue.Model) -> Rates:
    """The speeds from the vendor's data sheet."""
    return Rates(
        flops=model.fp32,
        half_flops=model.half,
        bytes=model.memory_bandwidth,
        launch_seconds=_GPU.launch_seconds,
        tf32_flops=model.tf32,
        link_bytes=model.link_bandwidth,
    )


def can_enforce(kind: DeviceKind) -> bool:
    """Whether a budget on this kind of device can be enforced.

    On CUDA, the caching allocator refuses allocations beyond the budget; on Linux, the peak of each
    pass is measured.
    """
    return kind == "cuda" or sys.platform == "linux"


def _detect(wanted: str | None) -> Device:
    if wanted is None:
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    match = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", wanted)
    if match is None:
        raise InputError(f"{setting('device')} is {wanted!r}: write 'cpu', 'cuda' or 'cuda:N'.")
    if match[1] == "cpu":
        return _cpu()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(match[2] or 0)
    if index >= count:
        seen = f"only {count} of them" if count else "no CUDA device at all"
        raise InputError(
            f"{setting('device')} is {wanted!r}, but torch sees {seen} here: choose another device,"
            " or check the driver and CUDA_VISIBLE_DEVICES."
        )
    return _cuda(index)


def _cpu() -> Device:
    cores = num_cores()
    memory = host_memory()
    if memory.limit:
        # The first optimizer of a process loads it, which takes some 80 MiB of what seems free.
        importlib.import_module("torch._dynamo")
        memory = host_memory()
    rates = Rates(
        flops=_CPU_CORE.flops * cores,
        half_flops=_CPU_CORE.half_flops * cores,
        bytes=_CPU_CORE.bytes * min(cores, 4),
        launch_seconds=_CPU_CORE.launch_seconds,
        link_bytes=_CPU_CORE.link_bytes,
    )
    name = f"CPU with {cores} core{'s' if cores != 1 else ''}"
    return Device(
        kind="cpu",
        index=0,
        name=name,
        total_bytes=memory.total_bytes,
        budget_bytes=int(memory.free_bytes * USABLE),
        present=True,
        rates=rates,
        free_bytes=memory.free_bytes,
        limit=memory.limit,
    )


def _cuda(index: int) -> Device:
    free, total = torch.cuda.mem_get_info(index)
    # A plan counts the context, which exists by now, and can use the memory that torch has cached.
    device = torch.device("cuda", index)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = min(total, free + unused + beside_bytes(device))
    name = torch.cuda.get_device_name(index)
    known = catalogue.recognise(name, total)
    if torch.version.hip:
        capability = str(torch.cuda.get_device_properties(index).gcnArchName).partition(":")[0]
    else:
        capability = "{}.{}".format(*torch.cuda.get_device_capability(index))
    rates = rates_of(known) if known else _GPU
    return Device("cuda", index, name, total, int(free * USABLE), True, rates, capability)

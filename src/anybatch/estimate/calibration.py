"""Calibration: device speeds, by which candidates are ordered, and corrections from earlier runs.

A device that is present is measured in at most a second or two: one matrix product per dtype, a stream
through memory, and the time to start an operation. For other devices the same figures come from the
data sheet. Measured step times of earlier runs correct later predictions.

Measurements are stored in the user's cache folder. A cache file may be missing, truncated or stale
at any time, and must never stop a plan: an unreadable file is treated as missing, and a failed
write is ignored. Files are named after everything that their content depends on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from anybatch.errors import InputError
from anybatch.machine import Device, Machine
from anybatch.plans import Plan, TaskIdentity
from anybatch.process.files import cache_folder, write_whole
from anybatch.process.threads import MOST_IDLE

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]

_SHEET_MATMUL, _SHEET_BYTES = 0.65, 0.80
"""Fractions of the data-sheet rates that a training step reaches: large products of transformers
reach 60 to 75% of the matrix rate, and streaming operations 80 to 90% of the memory bandwidth."""

SHEET_ERROR = 1.5
"""Expected error factor of step times that are predicted from a data sheet."""

_CORES_OF_MEMORY = 4
"""Approximate number of cores that use the full memory bandwidth."""

_POINT_SECONDS, _LEAST_ROUNDS = 0.03, 3
"""Measuring time for one figure, and the minimum number of rounds."""

_DEADLINE_SECONDS = 120.0

_MEASURING_BYTES = 256 << 20
"""Free memory below which a CPU is not measured, which takes 128 MiB."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of a device.

    Attributes:
        matmul: floating-point operations per second of matrix products, by dtype.
        memory: memory bandwidth in bytes per second.
        call_seconds: time to start one operation from Python and autograd, whatever the operation
            does.
        overlap: whether operations are started while earlier ones run (CUDA), so that the larger of
            the two times counts, not their sum.
        measured: False if the speeds are derived from nominal figures.
    """

    matmul: Annotated[dict[str, Rate], Field(min_length=1)]
    memory: Rate
    call_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    overlap: bool
    measured: bool = True


SPEEDS: TypeAdapter[Speeds] = TypeAdapter(Speeds)


def nominal(device: Device) -> Speeds:
    """Return speeds derived from the nominal figures of `device`."""
    rates, on_cpu = device.rates, device.kind == "cpu"
    half = rates.half_flops if on_cpu or device.has("bf16") else rates.flops
    full = {
        "float32": rates.flops,
        "float64": rates.flops / 2,
        "tf32": rates.tf32_flops or rates.flops,
        "float16": rates.half_flops,
        "bfloat16": half,
    }
    part, of_memory = (1.0, 1.0) if on_cpu else (_SHEET_MATMUL, _SHEET_BYTES)
    return Speeds(
        matmul={name: rate * part for name, rate in full.items()},
        memory=rates.bytes * of_memory,
        call_seconds=rates.launch_seconds,
        overlap=not on_cpu,
        measured=False,
    )


# ------------------------------------------------------------------------------------- measuring


def measure(device: Device) -> Speeds:
    """Measure `device`, which must be present: a CPU for half a second, CUDA for a second or two.
    PyTorch's random state is preserved.

    On a CPU a single thread is measured, in CPU time: threads that share an operation wait for each
    other while another process occupies a core, however short the operation is (docs/log.md).

    Raises whatever PyTorch raises, such as an out-of-memory error.
    """
    target = torch.device(device.torch_name)
    if target.type == "cuda":
        return _measured(target, ("float32", "tf32", "float16", "bfloat16"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one = _measured(target, ("float32", "bfloat16"))
    finally:
        torch.set_num_threads(threads)
    return replace(
        one,
        matmul={name: rate * threads for name, rate in one.matmul.items()},
        memory=one.memory * min(threads, _CORES_OF_MEMORY),
    )


def _measured(target: torch.device, dtypes: tuple[str, ...]) -> Speeds:
    is_cuda = target.type == "cuda"
    with torch.random.fork_rng(devices=[target] if is_cuda else []), torch.no_grad():
        return Speeds(
            matmul={name: _product_rate(name, target) for name in dtypes},
            memory=_stream_rate(target),
            call_seconds=_call_seconds(target),
            overlap=is_cuda,
        )


def _product_rate(name: str, target: torch.device) -> float:
    """Return the floating-point operations per second of a square matrix product."""
    side = 4096 if target.type == "cuda" else 384
    dtype = torch.float32 if name == "tf32" else getattr(torch, name)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    try:
        x = torch.ones(side, side, dtype=dtype, device=target)
        return 2.0 * side**3 / _best_seconds(lambda: torch.mm(x, x), target)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _stream_rate(target: torch.device) -> float:
    """Return the bytes per second that a memory-bound operation reads and writes."""
    size = (1 << 28 if target.type == "cuda" else 1 << 26) // 4
    x = torch.ones(size, dtype=torch.float32, device=target)
    y = torch.empty_like(x)
    return 2.0 * x.nbytes / _best_seconds(lambda: torch.add(x, 1.0, out=y), target)


def _call_seconds(target: torch.device) -> float:
    """Return the seconds per operation of a model whose operations do almost no work: forward
    through modules, backward through autograd."""
    with torch.enable_grad():
        layers = [torch.nn.Linear(4, 4, device=target) for _ in range(24)]
        model = torch.nn.Sequential(*(part for each in layers for part in (each, torch.nn.ReLU())))
        x = torch.ones(2, 4, device=target)

        def step() -> Tensor:
            model.zero_grad()
            loss = model(x).sum()
            loss.backward()
            return loss

        seconds = _best_seconds(step, target)
    # Forward: product and ReLU. Backward: two products, a sum, and the gradient of ReLU.
    return seconds / (24 * 6)


def _best_seconds(run: Callable[[], Any], target: torch.device) -> float:
    """Return the best of several timings. On CUDA the synchronization time is spread over many
    calls."""
    is_cuda = target.type == "cuda"
    clock = time.perf_counter if is_cuda else time.thread_time

    def timed(calls: int) -> float:
        begun = clock()
        for _ in range(calls):
            run()
        if is_cuda:
            torch.cuda.synchronize(target)
        return clock() - begun

    timed(1)
    once = max(timed(1), 1e-7)
    calls = max(1, int(_POINT_SECONDS / _LEAST_ROUNDS / once))
    times = [once]
    until = clock() + _POINT_SECONDS
    while len(times) < _LEAST_ROUNDS or clock() < until:
        times.append(timed(calls) / calls)
    return min(times)


def measure_aside(device: Device) -> Speeds:
    """Run `measure(device)` apart from the caller: for a CPU on another thread, so that no mode of the
    caller applies, such as autocast or a default device; for CUDA in another process, since measuring
    creates a context.

    Raises whatever `measure` raises; for CUDA, `OSError`, `subprocess.SubprocessError` or `ValueError`.
    """
    if device.kind == "cpu":
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(measure, device).result()
    code = f"import sys; from {__name__} import _print_speeds; _print_speeds(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, device.torch_name],
        capture_output=True,
        check=True,
        timeout=_DEADLINE_SECONDS,
    )
    return SPEEDS.validate_json(done.stdout)


def _print_speeds(name: str) -> None:
    with contextlib.suppress(OSError):  # no Linux: if memory runs out, end this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    sys.stdout.buffer.write(SPEEDS.dump_json(measure(Machine.here(device=name).device)))


# ----------------------------------------------------------------------------------------- files

FORMAT = 7
"""Version of the file format and of the measuring method."""


@dataclass(frozen=True, slots=True)
class Where:
    """Everything that measurements depend on. Runs for which all of it is equal can be compared.

    Attributes:
        device: name of the device.
        driver: CUDA version; on a CPU the processor model.
        torch: version of PyTorch.
        threads: number of threads of PyTorch, if the device is a CPU.
    """

    device: str
    driver: str
    torch: str
    threads: int

    def file(self, kind: str) -> Path:
        """Return the path of the file of that `kind`. The name is readable, and unique to these
        values."""
        text = json.dumps([FORMAT, self.device, self.driver, self.torch, self.threads])
        readable = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")[:40]
        name = f"{kind}-{readable}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
        return cache_folder() / name


def where(device: Device) -> Where:
    """Return everything that measurements on `device`, which must be present, depend on."""
    if device.kind == "cpu":
        return Where(device.name, _processor(), torch.__version__, torch.get_num_threads())
    driver = torch.version.cuda or torch.version.hip or ""
    return Where(device.name, driver, torch.__version__, 0)


@cache
def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def read(path: Path, adapter: TypeAdapter[Any]) -> Any | None:
    """Return the content of the file, or None if it is missing or invalid."""
    try:
        return adapter.validate_json(path.read_bytes())
    except (OSError, ValidationError, ValueError):
        return None


def write(path: Path, adapter: TypeAdapter[Any], value: Any) -> None:
    """Write the complete file, or nothing if it cannot be written."""
    with contextlib.suppress(OSError, InputError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, adapter.dump_json(value, indent=1).decode(), "the cache")


# ---------------------------------------------------------------------------------------- speeds

_memo: dict[Where, Speeds] = {}


def speeds_of(device: Device) -> Speeds:
    """Return the speeds of `device`: measured, now or earlier, if it is present; nominal if it is
    not, if too little memory is free, or if measuring fails."""
    if not device.present:
        return nominal(device)
    here = where(device)
    found = _memo.get(here) or read(here.file("speeds"), SPEEDS)
    if found is None:
        if device.free_bytes is not None and device.free_bytes < _MEASURING_BYTES:
            return nominal(device)
        try:
            found = measure_aside(device)
        except Exception:  # such as out of memory: nominal speeds suffice, and plans ask again
            found = nominal(device)
        else:
            write(here.file("speeds"), SPEEDS, found)
    _memo[here] = found
    return found


def forget_speeds(device: Device) -> None:
    """Discard the speeds of `device`, so that they are measured again when next needed."""
    here = where(device)
    _memo.pop(here, None)
    with contextlib.suppress(OSError):
        here.file("speeds").unlink(missing_ok=True)


# --------------------------------------------------------------------------------------- history

_KEPT, _COUNTED = 60, 9
"""Number of runs stored per device, and number of most recent runs used for a correction."""

_LIMITS = (0.2, 5.0)
"""Ratios outside of this range are not learned; the speeds are measured again instead."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One run: the name of its task, the number of parameters of its model (tasks with the same
    name may differ), and the ratio of the measured step time to the uncorrected prediction."""

    task: str
    parameters: int
    seconds_ratio: Annotated[float, Field(ge=_LIMITS[0], le=_LIMITS[1])]


@dataclass(frozen=True, slots=True)
class Correction:
    """Factor by which predicted times are corrected, and the number of runs that it was learned
    from."""

    seconds: float = 1.0
    num_runs: int = 0


_RUNS: TypeAdapter[tuple[Seen, ...]] = TypeAdapter(tuple[Seen, ...])


def correction(device: Device, task: TaskIdentity | None = None) -> Correction:
    """Return the correction from earlier runs on `device`: runs of the same task if there are any,
    otherwise all runs."""
    if not device.present:
        return Correction()
    runs = read(where(device).file("history"), _RUNS) or ()
    same = [
        run for run in runs if task and (run.task, run.parameters) == (task.name, task.parameters)
    ]
    ratios = [run.seconds_ratio for run in same or runs][-_COUNTED:]
    return Correction(statistics.median(ratios), len(ratios)) if ratios else Correction()


def remember(plan: Plan, measured_step_seconds: float | None, idle_seconds: float = 0.0) -> None:
    """Store the measured step time of a run that followed `plan` to its end. If it differs from the
    prediction by more than a factor of five, the device is measured again. Never fails: what cannot
    be stored is dropped.

    Args:
        plan: plan with the prediction. Nothing is stored for plans without one, or for several
            ranks.
        measured_step_seconds: median time of a step.
        idle_seconds: part of that time spent waiting for a core that other processes used.
    """
    prediction = plan.prediction
    if (
        prediction is None
        or plan.num_ranks != 1
        or not measured_step_seconds
        or prediction.step_seconds <= 0
    ):
        return
    ratio = measured_step_seconds * prediction.seconds_corrected_by / prediction.step_seconds
    if idle_seconds > MOST_IDLE * measured_step_seconds or not math.isfinite(ratio):
        return
    try:
        device = Machine.here(device=plan.device).device
    except InputError:
        return
    path = where(device).file("history")
    if not _LIMITS[0] <= ratio <= _LIMITS[1]:
        forget_speeds(device)
        write(path, _RUNS, ())
        return
    runs = (*(read(path, _RUNS) or ()), Seen(plan.task.name, plan.task.parameters, ratio))
    write(path, _RUNS, runs[-_KEPT:])

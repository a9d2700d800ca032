"""Calibration: the speeds of a device, by which candidates are ordered.

A device that is here is measured in a second or two: matrix products of a few sizes, a stream through
memory, and the time to start an operation. For one that is not here the same figures come from its
data sheet.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from anybatch.machine import Device, Rates

Curve = tuple[tuple[float, float], ...]
"""(size of the work, work per second), by size: work in floating-point operations or bytes."""

_POINT_SECONDS, _LEAST_ROUNDS, _LONG_SECONDS = 0.03, 3, 0.15
"""Measuring time for one figure, its fewest rounds, and the time of a product after which no larger one
is measured."""

_CORES_OF_MEMORY = 4
"""Cores that stream as many bytes as the memory has for all of them, about."""

# What is left of the figures on a data sheet in a training step: large products of transformers reach
# 60 to 75% of the matrix rate, streaming operations 80 to 90% of the memory's.
_SHEET_MATMUL, _SHEET_CONVOLUTION, _SHEET_BYTES = 0.65, 0.45, 0.80
_SHEET_ATTENTION = 0.60, 0.50
_HALF_LENGTH = 256.0
"""Forward and backward of attention reach 50 to 73% and 40 to 63% of the matrix rate with long
sequences, and about half of that at this length (FlashAttention-2, Dao 2023, on an A100)."""

SHEET_ERROR = 1.5
"""Factor within which step times from a data sheet are expected."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """How fast a device is.

    Attributes:
        matmul: dtype to rate of matrix products, over floating-point operations.
        memory: bytes per second, over bytes.
        call_seconds: to start one operation, from Python and autograd, whatever it does.
        overlap: operations are started while earlier ones run (CUDA), so that the larger of the two
            counts, not their sum.
        convolution: dtype to rate of convolutions; empty: that of matrix products.
        attention: dtype to rates of forward and of backward, over the length of the sequence; empty:
            those of matrix products.
        measured: False where they are drawn from nominal figures.
    """

    matmul: dict[str, Curve]
    memory: Curve
    call_seconds: float
    overlap: bool
    convolution: dict[str, Curve] = field(default_factory=dict)
    attention: dict[str, tuple[Curve, Curve]] = field(default_factory=dict)
    measured: bool = True


def rate_at(curve: Curve, work: float) -> float:
    """The rate for `work`, between the points by the logarithm of both, level beyond them."""
    sizes = [size for size, _ in curve]
    i = bisect_left(sizes, work)
    if i == 0:
        return curve[0][1]
    if i == len(curve):
        return curve[-1][1]
    (low, slow), (high, fast) = curve[i - 1], curve[i]
    part = math.log(work / low) / math.log(high / low)
    return math.exp((1 - part) * math.log(slow) + part * math.log(fast))


def nominal(device: Device) -> Speeds:
    """Speeds from the nominal figures of `device`."""
    rates = device.rates
    if device.kind == "cpu":
        return _nominal_cpu(rates)
    full = {
        "float32": rates.flops,
        "float64": rates.flops / 2,
        "tf32": rates.tf32_flops or rates.flops,
        "float16": rates.half_flops,
        "bfloat16": rates.half_flops if device.has("bf16") else rates.flops,
    }
    forward, backward = _SHEET_ATTENTION
    return Speeds(
        matmul={name: _filling(rate * _SHEET_MATMUL) for name, rate in full.items()},
        convolution={name: _filling(rate * _SHEET_CONVOLUTION) for name, rate in full.items()},
        attention={
            name: (_rising(rate * forward, _HALF_LENGTH), _rising(rate * backward, _HALF_LENGTH))
            for name, rate in full.items()
        },
        memory=_rising(rates.bytes * _SHEET_BYTES, rates.bytes * 5e-6),
        call_seconds=rates.launch_seconds,
        overlap=True,
        measured=False,
    )


def _nominal_cpu(rates: Rates) -> Speeds:
    full = dict.fromkeys(("float32", "tf32"), rates.flops)
    full |= {"float64": rates.flops / 2}
    full |= dict.fromkeys(("float16", "bfloat16"), rates.half_flops)
    return Speeds(
        matmul={name: ((1.0, rate),) for name, rate in full.items()},
        memory=((1.0, rates.bytes),),
        call_seconds=rates.launch_seconds,
        overlap=False,
        measured=False,
    )


def _filling(rate: float) -> Curve:
    """A product fills the device from about 30 microseconds of work on."""
    return _rising(rate, rate * 3e-5)


def _rising(most: float, half_full: float) -> Curve:
    """A rate that grows with the work, to `most`; half of it at `half_full`."""
    sizes = [half_full * 4**i for i in range(-5, 5)]
    return tuple((size, most * size / (size + half_full)) for size in sizes)


# ------------------------------------------------------------------------------------- measuring


def measure(device: Device) -> Speeds:
    """Measure `device`, which is here, for a second or two. Torch's random state is left as it was.

    On a CPU one thread is measured, by the time that it computes: threads that share an operation wait
    for each other while another process has a core, however short the operation is (docs/log.md).

    Raises whatever torch raises, out of memory for one.
    """
    target = torch.device(device.torch_name)
    if target.type == "cuda":
        return _measured(target, [target], ("float32", "tf32", "float16", "bfloat16"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one = _measured(target, [], ("float32", "bfloat16"))
    finally:
        torch.set_num_threads(threads)
    return replace(
        one,
        matmul={name: _times(curve, threads) for name, curve in one.matmul.items()},
        memory=_times(one.memory, min(threads, _CORES_OF_MEMORY)),
    )


def _measured(target: torch.device, devices: list[torch.device], dtypes: tuple[str, ...]) -> Speeds:
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        bench = _Bench(target)
        start = bench.start_seconds()
        return Speeds(
            matmul={name: bench.products(name, start) for name in dtypes},
            memory=bench.stream(),
            call_seconds=bench.call_seconds(),
            overlap=target.type == "cuda",
        )


def _times(curve: Curve, factor: int) -> Curve:
    return tuple((size, rate * factor) for size, rate in curve)


class _Bench:
    """Times operations on one device."""

    def __init__(self, target: torch.device) -> None:
        self._target = target
        self._is_cuda = target.type == "cuda"
        self._clock = time.perf_counter if self._is_cuda else time.thread_time

    def start_seconds(self) -> float:
        """Seconds of an operation that does next to nothing, called in a row."""
        x = torch.ones(16, device=self._target)
        return self._seconds(lambda: torch.add(x, x))

    def products(self, name: str, start: float) -> Curve:
        """Rates of square matrix products, without the time that starting them takes."""
        sides = (256, 1024, 4096) if self._is_cuda else (64, 256, 768)
        dtype = torch.float32 if name == "tf32" else getattr(torch, name)
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        found: list[tuple[float, float]] = []
        try:
            for side in sides:
                x = torch.ones(side, side, dtype=dtype, device=self._target)
                work, seconds = 2.0 * side**3, self._seconds(lambda x=x: torch.mm(x, x))
                found.append((work, work / max(seconds - start, seconds / 2)))
                if seconds > _LONG_SECONDS:
                    break
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        return tuple(found)

    def stream(self) -> Curve:
        """Bytes per second that an operation reads and writes that has to wait for memory."""
        numbers = (1 << 28 if self._is_cuda else 1 << 26) // 4
        x = torch.ones(numbers, device=self._target)
        y = torch.empty_like(x)
        seconds = self._seconds(lambda: torch.add(x, 1.0, out=y))
        return ((1.0, 2.0 * x.nbytes / seconds),)

    def call_seconds(self) -> float:
        """Seconds per operation of a model whose operations do next to nothing: forward through
        modules, backward through autograd."""
        with torch.enable_grad():
            layers = [torch.nn.Linear(4, 4, device=self._target) for _ in range(24)]
            model = torch.nn.Sequential(
                *(part for each in layers for part in (each, torch.nn.ReLU()))
            )
            x = torch.ones(2, 4, device=self._target)

            def step() -> Tensor:
                for param in model.parameters():
                    param.grad = None
                loss = model(x).sum()
                loss.backward()
                return loss

            seconds = self._seconds(step)
        # Forward: product and ReLU; backward: two products, a sum, ReLU's.
        return seconds / (24 * 6)

    def _seconds(self, run: Callable[[], Any]) -> float:
        """The best of several times. On CUDA the time of waiting is spread over many calls."""
        self._timed(run, 1)
        once = max(self._timed(run, 1), 1e-7)
        calls = max(1, int(_POINT_SECONDS / _LEAST_ROUNDS / once))
        times = [once]
        until = self._clock() + _POINT_SECONDS
        while len(times) < _LEAST_ROUNDS or self._clock() < until:
            times.append(self._timed(run, calls) / calls)
        return min(times)

    def _timed(self, run: Callable[[], Any], calls: int) -> float:
        begun = self._clock()
        for _ in range(calls):
            run()
        if self._is_cuda:
            torch.cuda.synchronize(self._target)
        return self._clock() - begun

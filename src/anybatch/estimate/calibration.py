"""Calibration: how fast this device is at each kind of work, measured once and remembered.

Data sheets say what a device could do; a step is made of products that are too small to fill it, of
operations that wait for memory, and of the time that it takes to start them. One or two seconds of
measuring tell all three, per size of work. For devices that are not here the same curves are drawn from
the catalogue.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from anybatch.estimate.seconds_operations import HEAD_DIM, Memory
from anybatch.machine import Device, Rates
from anybatch.threads import MOST_IDLE, Stopwatch

Curve = tuple[tuple[float, float], ...]
"""(size of the work, work per second), by size: work in floating-point operations or bytes."""

Products = tuple[float, Curve, Curve]
"""Rates of products: the smallest dim of the thin ones, their rates, and the rates of cubes."""

FAMILIES: tuple[Memory, ...] = get_args(Memory)
"""Of operations that are limited by memory."""

_POINT_SECONDS = 0.012
"""Measuring time for one point of a curve."""

_LONGEST_SECONDS = 4.0
"""After so long each point is measured in the fewest rounds: the machine is slow."""

_LEAST_IDLE_SECONDS = 0.1
"""Before the end it is not given up for less."""

_PARALLEL_FROM = 1 << 15
"""Numbers that one thread works on alone (`at::internal::GRAIN_SIZE`)."""

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
        convolution: the same for convolutions.
        attention: dtype to rates of forward and of backward, over the length of the sequence, with
            heads of `HEAD_DIM`.
        memory: family of operations to bytes per second, over bytes.
        call_seconds: to start one operation, from Python and autograd, whatever it does.
        overlap: operations are started while earlier ones run (CUDA), so that the larger of the two
            counts, not their sum.
        fault_seconds_per_byte: what memory costs that the system maps anew (CPU under a budget).
        measured: False where they are drawn from nominal figures.
        disturbed: other processes had the cores in between, so they are those of one core at a time,
            by the time that it computed, as if all cores were free: a rough guide.
    """

    matmul: dict[str, Products]
    convolution: dict[str, Products]
    attention: dict[str, tuple[Curve, Curve]]
    memory: dict[str, Curve]
    call_seconds: float
    overlap: bool
    fault_seconds_per_byte: float = 0.0
    measured: bool = field(default=True)
    disturbed: bool = False


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


def product_rate(products: Products, work: float, narrow: float, widest: float = math.inf) -> float:
    """The rate of a product of `work` operations whose smallest dim is `narrow`: between the thin ones
    and the cubes, by the logarithm of that dim. From `widest` on it is as fast as a cube."""
    thin, thin_curve, cubes = products
    work = max(work, 1.0)
    side = max(min((work / 2) ** (1 / 3), widest), thin * 1.001)
    if narrow <= 0:
        return rate_at(cubes, work)
    part = min(1.0, max(0.0, math.log(narrow / thin) / math.log(side / thin)))
    return rate_at(thin_curve, work) ** (1 - part) * rate_at(cubes, work) ** part


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
    # A product fills the device from about 30 microseconds of work on.
    matmul = {name: _nominal_products(rate * _SHEET_MATMUL) for name, rate in full.items()}
    convolution = {
        name: _nominal_products(rate * _SHEET_CONVOLUTION) for name, rate in full.items()
    }
    forward, backward = _SHEET_ATTENTION
    attention = {
        name: (_rising(rate * forward, _HALF_LENGTH), _rising(rate * backward, _HALF_LENGTH))
        for name, rate in full.items()
    }
    memory = _rising(rates.bytes * _SHEET_BYTES, rates.bytes * 5e-6)
    return Speeds(
        matmul=matmul,
        convolution=convolution,
        attention=attention,
        memory=dict.fromkeys(FAMILIES, memory),
        call_seconds=rates.launch_seconds,
        overlap=True,
        measured=False,
    )


def _nominal_cpu(rates: Rates) -> Speeds:
    names = {"float32": 1.0, "tf32": 1.0, "float64": 0.5}
    half = {"float16": 1.0, "bfloat16": 1.0}
    full = {name: rates.flops * part for name, part in names.items()}
    full |= {name: rates.half_flops * part for name, part in half.items()}
    compute: dict[str, Products] = {
        name: (8.0, ((1.0, rate / 2),), ((1.0, rate),)) for name, rate in full.items()
    }
    memory = ((1.0, rates.bytes),)
    slower = {"special": 0.4, "random": 0.15, "norm": 0.6, "batch_norm": 0.3}
    slower |= {"pool": 0.3, "gather": 0.5}
    return Speeds(
        matmul=compute,
        convolution=compute,
        attention={name: (cubes, cubes) for name, (_, _, cubes) in compute.items()},
        memory={
            name: tuple((size, rate * slower.get(name, 1.0)) for size, rate in memory)
            for name in FAMILIES
        },
        call_seconds=rates.launch_seconds,
        overlap=False,
        fault_seconds_per_byte=3.3e-10,
        measured=False,
    )


def _nominal_products(rate: float) -> Products:
    """A product fills the device from about 30 microseconds of work on; a thin one half as well."""
    curve = _rising(rate, rate * 3e-5)
    return 16.0, tuple((work, speed / 2) for work, speed in curve), curve


def _rising(most: float, half_full: float) -> Curve:
    """A rate that grows with the work, to `most`; half of it at `half_full`."""
    sizes = [half_full * 4**i for i in range(-5, 5)]
    return tuple((size, most * size / (size + half_full)) for size in sizes)


# ------------------------------------------------------------------------------------- measuring


def measure(device: Device) -> Speeds:
    """Measure `device`, which is here, for a second or two. Torch's random state is left as it was.

    Operations that several threads share wait for the slowest of them. Where another process has a
    core in between, that is for a time slice of its, some milliseconds, however short the operation:
    such times say nothing of the device. Then one thread is measured, by the time that it computes.

    Raises whatever torch raises, out of memory for one.
    """
    target = torch.device(device.torch_name)
    with torch.random.fork_rng(devices=[target] if target.type == "cuda" else []), torch.no_grad():
        if target.type == "cuda":  # where the host waits for a device, that it waits says nothing
            return _measured(_Bench(target), watched=False)
        try:
            return _measured(_Bench(target), watched=True)
        except _Disturbed:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                found = _measured(_Bench(target, time.thread_time), watched=False)
            finally:
                torch.set_num_threads(threads)
            return _by_all(found, threads)


def _measured(bench: _Bench, watched: bool) -> Speeds:
    bench.warm_up()
    bench.watch = Stopwatch() if watched else None
    start = bench.floor()
    found = Speeds(
        matmul={name: bench.products(name, start) for name in bench.dtypes},
        convolution={name: bench.convolutions(name, start) for name in bench.dtypes},
        attention={name: bench.attention(name, start) for name in bench.dtypes},
        memory={family: bench.streams(family, start) for family in FAMILIES},
        call_seconds=bench.calls(),
        overlap=bench.is_cuda,
        fault_seconds_per_byte=0.0 if bench.is_cuda else bench.faults(),
    )
    bench.check()
    return found


def _by_all(one: Speeds, threads: int) -> Speeds:
    """What so many threads reach that are each as fast as the one measured."""

    def products(found: Products) -> Products:
        thin, narrow, cubes = found
        return thin, _times(narrow, threads), _times(cubes, threads)

    def stream(curve: Curve) -> Curve:
        return tuple((size, rate * _sharing(size, threads)) for size, rate in curve)

    return replace(
        one,
        matmul={name: products(found) for name, found in one.matmul.items()},
        convolution={name: products(found) for name, found in one.convolution.items()},
        attention={
            name: (_times(forward, threads), _times(backward, threads))
            for name, (forward, backward) in one.attention.items()
        },
        memory={family: stream(curve) for family, curve in one.memory.items()},
        disturbed=True,
    )


def _times(curve: Curve, factor: float) -> Curve:
    return tuple((size, rate * factor) for size, rate in curve)


def _sharing(num_bytes: float, threads: int) -> float:
    """Threads that a stream of so many bytes, read and written, gains by."""
    parts = num_bytes / 8 / _PARALLEL_FROM
    return max(1.0, min(parts, threads, _CORES_OF_MEMORY))


class _Disturbed(Exception):
    """Other processes have the cores in between."""


class _Bench:
    """Times operations on one device.

    Args:
        target: the device.
        clock: seconds, by which operations are timed.

    Attributes:
        watch: tells whether other processes have the cores in between; None: that is no matter.
        is_cuda: whether it is one of CUDA's.
        dtypes: in which it is measured.

    Raises `_Disturbed` from any measurement if `watch` tells so.
    """

    def __init__(
        self,
        target: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.watch: Stopwatch | None = None
        self._target = target
        self._clock = clock
        self._begun = clock()
        self.is_cuda: bool = target.type == "cuda"
        self.dtypes: tuple[str, ...] = ("float32", "bfloat16")
        if self.is_cuda:
            self.dtypes = ("float32", "tf32", "float16", "bfloat16")

    def warm_up(self) -> None:
        """Load what is loaded at first use, and let clocks rise."""
        x = torch.ones(256, 256, device=self._target)
        until = self._clock() + 0.1
        while self._clock() < until:
            torch.mm(x, x)
            self._wait()

    def floor(self) -> float:
        """Seconds of an operation that does nothing to speak of, called in a row."""
        x = torch.ones(16, device=self._target)
        return self._seconds(lambda: torch.add(x, x))

    def products(self, name: str, start: float) -> Products:
        """Rates of matrix products: thin ones, and squares."""
        sides = (32, 64, 128, 256, 512, 1024)
        wide = (64, 256, 1024)
        if self.is_cuda:
            sides, wide = (128, 256, 512, 1024, 2048, 4096, 8192), (256, 1024, 4096, 16384)
        thin = 16
        dtype, tf32 = _arithmetic(name)
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        try:
            narrow = self._curve(self._product(thin, side, dtype) for side in wide)
            cubes = self._curve(self._product(side, side, dtype) for side in sides)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        return float(thin), _above(narrow, start), _above(cubes, start)

    def convolutions(self, name: str, start: float) -> Products:
        """Rates of 3 x 3 convolutions, forward and backward together: with few channels, and many. On a
        CPU the channels lie last: in this layout nothing is copied, and copies are priced apart."""
        many = 256 if self.is_cuda else 64
        dtype, tf32 = _arithmetic(name)
        before = torch.backends.cudnn.allow_tf32
        torch.backends.cudnn.allow_tf32 = tf32
        sizes = ((8, 32), (64, 32), (256, 32)) if self.is_cuda else ((16, 8), (16, 16), (16, 32))
        try:
            few = self._curve(self._convolution(batch, 16, side, dtype) for batch, side in sizes)
            wide = self._curve(
                self._convolution(max(1, batch // 4), many, side, dtype) for batch, side in sizes
            )
        finally:
            torch.backends.cudnn.allow_tf32 = before
        # Each of the three products has a third of the work, and of the starts.
        return 16.0, _above(few, start, parts=3), _above(wide, start, parts=3)

    def attention(self, name: str, start: float) -> tuple[Curve, Curve]:
        """Rates of attention, forward and backward, by the length of the sequence: of all tokens to
        all, from one tensor of queries, keys and values as models have it."""
        dtype, tf32 = _arithmetic(name)
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        try:
            lengths = (256, 1024, 4096) if self.is_cuda else (64, 256, 1024)
            found = [self._attention(length, dtype, start) for length in lengths]
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        forward, backward = zip(*found, strict=True)
        return forward, backward

    def _attention(
        self, length: int, dtype: torch.dtype, start: float
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """(length, rate) of forward and of backward."""
        heads = 64 if self.is_cuda else max(2048 // length, torch.get_num_threads())
        numbers = torch.ones(length, 3, heads, HEAD_DIM, dtype=dtype, device=self._target)
        q, k, v = (x[None].requires_grad_() for x in numbers.permute(1, 2, 0, 3))
        with torch.enable_grad():
            result = F.scaled_dot_product_attention(q, k, v)
        seen = torch.ones_like(result)

        def backward() -> None:
            torch.autograd.grad(result, (q, k, v), seen, retain_graph=True)

        work = 4.0 * heads * HEAD_DIM * length**2
        times = (
            (work, self._seconds(lambda: F.scaled_dot_product_attention(q, k, v))),
            (2.5 * work, self._seconds(backward)),
        )
        forward, back = (rate for _, rate in _above(list(times), start))
        return (float(length), forward), (float(length), back)

    def _product(
        self, narrow: int, side: int, dtype: torch.dtype
    ) -> tuple[float, Callable[[], Any]]:
        x = torch.ones(narrow, side, dtype=dtype, device=self._target)
        y = torch.ones(side, side, dtype=dtype, device=self._target)
        return 2.0 * narrow * side**2, lambda: x @ y

    def _convolution(
        self, batch: int, channels: int, side: int, dtype: torch.dtype
    ) -> tuple[float, Callable[[], Any]]:
        x = torch.ones(batch, channels, side, side, dtype=dtype, device=self._target)
        w = torch.ones(channels, channels, 3, 3, dtype=dtype, device=self._target)
        if not self.is_cuda:
            x, w = (t.contiguous(memory_format=torch.channels_last) for t in (x, w))

        def both() -> None:
            F.conv2d(x, w, padding=1)
            _convolution_backward(x, w)

        return 3 * 2.0 * 9 * batch * side**2 * channels**2, both

    def _curve(self, works: Iterable[tuple[float, Callable[[], Any]]]) -> list[tuple[float, float]]:
        """(work, seconds) of each, until one takes long."""
        found: list[tuple[float, float]] = []
        for work, run in works:
            found.append((work, self._seconds(run)))
            if found[-1][1] > 0.1:
                break
        return found

    def streams(self, family: str, start: float) -> Curve:
        """Bytes per second of operations that wait for memory."""
        sizes = [1 << 14, 1 << 18, 1 << 21, 1 << 24]
        if self.is_cuda:
            sizes += [1 << 27, 1 << 29]
        elif family == "plain":  # the others make their result, of pages that the system must map
            sizes += [1 << 26, 1 << 28]
        return _above(self._curve(_stream(family, size, self._target) for size in sizes), start)

    def calls(self) -> float:
        """Seconds per operation of a model whose operations do nothing to speak of: forward through
        modules, backward through autograd."""
        with torch.enable_grad():
            layers = [torch.nn.Linear(4, 4, device=self._target) for _ in range(24)]
            model = torch.nn.Sequential(
                *(part for layer in layers for part in (layer, torch.nn.ReLU()))
            )
            x = torch.ones(2, 4, device=self._target)

            def step() -> None:
                for param in model.parameters():
                    param.grad = None
                model(x).sum().backward()

            seconds = self._seconds(step)
        # Forward: product and ReLU; backward: two products, a sum, ReLU's.
        return seconds / (24 * 6)

    def faults(self) -> float:
        """Seconds per byte that the system takes to map memory and clear it. Blocks of this size glibc
        always maps by themselves."""
        numbers, piece = (48 << 20) // 4, (2 << 20) // 4
        used = torch.zeros(numbers)

        def fill(x: Tensor) -> None:  # by as many threads as tensors of a usual size have
            for part in x.split(piece):
                part.fill_(1.0)

        # The best of several times: a virtual machine takes much longer for a page that it never had.
        again = self._seconds(lambda: fill(used), best=True)
        fresh = self._seconds(lambda: fill(torch.empty(numbers)), best=True)
        return max(0.0, (fresh - again) / (numbers * 4))

    def _seconds(self, run: Callable[[], Any], least: int = 5, best: bool = False) -> float:
        """The median of several times, since what disturbs the measurement disturbs a step too; or the
        best of them."""
        self.check(_LEAST_IDLE_SECONDS)
        run()
        self._wait()
        begun = self._clock()
        run()
        self._wait()
        once = max(self._clock() - begun, 1e-7)
        # On CUDA the time of waiting is spread over many calls.
        calls = max(1, int((_POINT_SECONDS / 4) / once)) if self.is_cuda or once < 1e-4 else 1
        times: list[float] = []
        late = self._begun + _LONGEST_SECONDS
        until = min(self._clock() + _POINT_SECONDS, late)
        while self._clock() < until or len(times) < (2 if self._clock() > late else least):
            begun = self._clock()
            for _ in range(calls):
                run()
            self._wait()
            times.append((self._clock() - begun) / calls)
        return min(times) if best else sorted(times)[len(times) // 2]

    def check(self, least_idle: float = 0.0) -> None:
        """Raises `_Disturbed` if others had the cores for too much of the time until now, and for at
        least so many seconds."""
        watch = self.watch
        if watch and watch.waited() > MOST_IDLE and watch.idle_seconds() >= least_idle:
            raise _Disturbed

    def _wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self._target)


def _arithmetic(name: str) -> tuple[torch.dtype, bool]:
    return (
        (torch.float32, name == "tf32")
        if name in ("float32", "tf32")
        else (getattr(torch, name), False)
    )


def _above(measured: list[tuple[float, float]], start: float, parts: int = 1) -> Curve:
    """Rates without the time that starting takes; never more than half of the time is put to that."""
    return tuple(
        (work / parts, work / max(seconds - parts * start, seconds / 2))
        for work, seconds in measured
    )


def _convolution_backward(x: Tensor, w: Tensor) -> Any:
    return torch.ops.aten.convolution_backward(
        x, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
    )


def _stream(family: str, num_bytes: int, target: torch.device) -> tuple[float, Callable[[], Any]]:
    """The bytes that an operation of `family` moves, about so many, and the operation."""
    numbers = max(1024, num_bytes // 8)
    x = torch.ones(numbers // 256, 256, device=target)
    twice = 2.0 * x.numel() * 4
    if family == "plain":
        y = torch.empty_like(x)
        return twice, lambda: torch.add(x, 1.0, out=y)
    if family == "special":
        return twice, lambda: F.gelu(x)
    if family == "random":
        y = torch.empty_like(x)
        return twice, lambda: y.bernoulli_(0.9)  # in place: counted as read and written
    if family == "norm":
        weight = torch.ones(256, device=target)
        return twice, lambda: F.layer_norm(x, (256,), weight, weight)
    if family == "batch_norm":
        image = x.view(-1, 64, 16, 16) if x.numel() >= 1 << 14 else x.view(1, 64, -1)
        return twice, lambda: F.batch_norm(image, None, None, training=True)
    if family == "gather":
        rows = torch.arange(len(x), device=target).flip(0)
        return twice, lambda: x.index_select(0, rows)
    if family == "pool":
        side = max(8, math.isqrt(numbers // 64) // 8 * 8)
        # The same numbers everywhere would tell the processor which of them is the largest.
        image = torch.rand(1, numbers // side**2 or 1, side, side, device=target)
        return 4.0 * image.numel() * (1 + 0.25 * 3), lambda: F.max_pool2d(image, 2)
    return twice / 2, lambda: x.sum(dim=0)

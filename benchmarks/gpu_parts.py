"""The measurements of `benchmarks.gpu_check`, part by part. To run some of them in one process:

    python -m benchmarks.gpu_parts NAME ...

Needs a separate cache folder (`$XDG_CACHE_HOME`), since data learned from earlier runs is deleted
before each part. Each part prints two lines of JSON after the prefix `MARK`: one when it starts, and
one with the measurements or the error. A failure ends the process, since CUDA may be unusable after
it."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from benchmarks.memory.models import KINDS
from benchmarks.memory.run import BUDGET, VARIANTS, cells_of, measure, others, task_and_plan

import anybatch as ab
from anybatch.compute.lm_loss import Backend
from anybatch.machine import Machine
from anybatch.process.files import cache_folder

MARK = "@part "
CELL = "cell: "
CELL_STEPS = 9
"""Number of steps per cell. The first steps load kernels, which takes 0.1 to 0.3 s on an H200."""
LEFT_OUT = 10**9  # a number of steps between measurements that means never


def parts() -> dict[str, Callable[[], Any]]:
    """All measurements by name, the most informative first. Cells are sorted by variant, so that every
    model is measured before time runs out."""
    found: dict[str, Callable[[], Any]] = {
        "device": device,
        "vocabulary": vocabulary,
        "overhead": overhead,
        "choice: residual": partial(choice, "residual"),
        "choice: gpt, tied": partial(choice, "gpt, tied"),
        "host memory": host_memory,
    }
    cells = cells_of(KINDS)
    order = list(dict.fromkeys(variant for _, variant in cells))
    for name, variant in sorted(cells, key=lambda one: order.index(one[1])):
        found[f"{CELL}{name}, {variant}"] = partial(cell, name, variant)
    return found


def device() -> dict[str, Any]:
    """Device memory of the process apart from tensors, with the value assumed if no GPU is present; and
    speeds from the data sheet, with those measured in large operations."""
    from anybatch.process.cuda_driver import TYPICAL_CONTEXT_BYTES, context_bytes, process_bytes_on

    here = Machine.here(device="cuda").device
    index = torch.device("cuda", 0)
    context = context_bytes(0)
    found = {
        "name": here.name,
        "capability": here.capability,
        "total_bytes": here.total_bytes,
        "context_bytes": context,
        "process_bytes": process_bytes_on(index),
        "typical_context_bytes": TYPICAL_CONTEXT_BYTES,
        "sheet": {
            "flops": here.rates.flops,
            "tf32_flops": here.rates.tf32_flops,
            "half_flops": here.rates.half_flops,
            "bytes": here.rates.bytes,
            "launch_seconds": here.rates.launch_seconds,
        },
    }
    return {**found, "measured": _speeds()}


def _speeds(size: int = 8192) -> dict[str, float]:
    left, right = (torch.ones(size, size, device="cuda") for _ in range(2))
    half_left, half_right = left.bfloat16(), right.bfloat16()
    large, one = torch.ones(1 << 28, device="cuda"), torch.ones(1, device="cuda")
    product = 2.0 * size**3
    found = {"flops": product / _seconds(lambda: left @ right)}
    torch.set_float32_matmul_precision("high")
    found["tf32_flops"] = product / _seconds(lambda: left @ right)
    torch.set_float32_matmul_precision("highest")
    found["half_flops"] = product / _seconds(lambda: half_left @ half_right)
    found["bytes"] = 2.0 * large.nbytes / _seconds(lambda: large.add_(1))
    found["launch_seconds"] = _seconds(lambda: [one.add_(1) for _ in range(1000)]) / 1000
    return found


def _seconds(work: Callable[[], Any], rounds: int = 5) -> float:
    taken = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def vocabulary(rounds: int = 5) -> list[dict[str, Any]]:
    """Extra memory and time of the loss, forward and backward, for 8,192 tokens, a vocabulary of
    256,000 and width 2,304 in bfloat16 (as in Gemma 2). The weight's gradient is 1.18 GB of it. The
    plain loss needs about 25 GB, so nothing is measured on a device with less than 40 GB."""
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        return []
    generator = torch.Generator("cuda").manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "generator": generator, "dtype": torch.bfloat16}
    hidden = torch.randn(8_192, 2_304, **options).requires_grad_()
    weight = torch.randn(256_000, 2_304, **options).mul_(0.02).requires_grad_()
    targets = torch.randint(256_000, (8_192,), device="cuda", generator=generator)
    backends: tuple[Backend, ...] = ("plain", "auto")
    taken: dict[str, list[float]] = {backend: [] for backend in backends}
    extra: dict[str, int] = {}
    for _ in range(rounds + 1):
        for backend in backends:
            hidden.grad = weight.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, start = torch.cuda.memory_allocated(), time.perf_counter()
            ab.lm_loss(hidden, weight, targets, backend=backend).sum.backward()
            torch.cuda.synchronize()
            taken[backend].append(time.perf_counter() - start)
            extra[backend] = torch.cuda.max_memory_allocated() - before
    return [
        {
            "backend": backend,
            "extra_bytes": extra[backend],
            "seconds": statistics.median(taken[backend][1:]),
        }
        for backend in backends
    ]


def overhead(name: str = "gpt, tied", steps: int = 20, pieces: int = 4) -> dict[str, float]:
    """Time of a step of `pieces` micro-batches, in seconds: in a hand-written loop, in anybatch, and in
    anybatch without measuring the noise scale. Each reads the loss once per step."""
    from anybatch.data import schedule

    kind = KINDS[name]
    size = kind.batch // pieces
    found = {"plain": _by_hand(name, steps, size)}
    task = replace(kind.task(name), steps=steps)
    plan = ab.plan(task, memory=BUDGET, micro_batch=size, recompute="none")
    found["anybatch"] = _by_anybatch(task, plan)
    kept = schedule.ALL_MEASURED, schedule.MEASURED_EVERY
    schedule.ALL_MEASURED, schedule.MEASURED_EVERY = -1, LEFT_OUT
    try:
        found["without noise scale"] = _by_anybatch(task, plan)
    finally:
        schedule.ALL_MEASURED, schedule.MEASURED_EVERY = kept
    return found


def _by_hand(name: str, steps: int, size: int) -> float:
    kind = KINDS[name]
    torch.manual_seed(0)
    model = kind.model().cuda()
    optimizer = kind.optimizer(model.parameters())
    samples = [tensor.pin_memory() for tensor in kind.samples(kind.batch)]
    taken = []
    for _ in range(steps):
        start = time.perf_counter()
        losses, weight = [], 0.0
        for at in range(0, kind.batch, size):
            batch = [one[at : at + size].to("cuda", non_blocking=True) for one in samples]
            loss = kind.loss(model, batch)
            loss.sum.backward()
            losses.append(loss.sum.detach())
            weight += float(loss.weight)
        gradients = [param.grad for param in model.parameters() if param.grad is not None]
        torch._foreach_div_(gradients, weight)
        optimizer.step()
        optimizer.zero_grad()
        torch.stack(losses).sum().item()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[steps // 4 :])


def _by_anybatch(task: Any, plan: Any) -> float:
    with ab.Session(task, plan) as session:
        taken = [step.seconds for step in session.steps()]
    return statistics.median(taken[len(taken) // 4 :])


def choice(name: str, steps: int = 8) -> dict[str, Any]:
    """The plan chosen under `BUDGET`, and the predicted and measured step times of plans with this and
    other micro-batch sizes."""
    kind = KINDS[name]
    task = replace(kind.task(name), steps=steps)
    chosen = ab.plan(task, memory=BUDGET)
    sizes = sorted({kind.batch >> shift for shift in range(3)} | {chosen.choice.micro_batch})
    found = {}
    for size in sizes:
        plan = ab.plan(task, memory=BUDGET, micro_batch=size)
        told = plan.prediction.step_seconds if plan.prediction else None
        found[str(size)] = {
            "predicted_seconds": told,
            "measured_seconds": _by_anybatch(task, plan),
        }
    return {"chosen": chosen.choice.describe(), "of": chosen.choice.micro_batch, "sizes": found}


def host_memory(name: str = "gpt, tied", steps: int = 8) -> dict[str, Any]:
    """Peak memory and time of a step, predicted and measured: with activations kept on the device,
    recomputed, and kept in host memory."""
    kind = KINDS[name]
    task = replace(kind.task(name), steps=steps)
    ways = {"kept": "none", "recomputed": "all", "in host memory": ab.Recompute(to_host=True)}
    found = {}
    for way, recompute in ways.items():
        plan = ab.plan(task, memory=BUDGET, micro_batch=kind.batch, recompute=recompute)
        ended = ab.train(task, plan=plan, progress=False).ended
        told = plan.prediction
        found[way] = {
            "predicted_bytes": told.peak_bytes if told else None,
            "measured_bytes": ended.measured_peak_bytes,
            "predicted_seconds": told.step_seconds if told else None,
            "measured_seconds": ended.step_seconds,
        }
    return found


def cell(name: str, variant: str) -> dict[str, Any]:
    """A cell of `benchmarks/memory` on this device, with the predictions of a machine without it and
    those of other estimators."""
    found = measure(name, variant, steps=CELL_STEPS)
    here = Machine.here(device="cuda")
    absent = replace(here, devices=(replace(here.device, present=False),))
    _, plan = task_and_plan(name, variant, absent)
    if plan.prediction is not None:
        found["elsewhere_totals"] = dict(plan.prediction.totals)
        found["elsewhere_seconds"] = plan.prediction.step_seconds
    if variant in VARIANTS and variant != "recomputed":
        found |= others(name, variant, "cuda")
    return found


def _tidy() -> None:
    """Reset to the state before any run: release cached memory, and delete data learned from runs."""
    gc.collect()
    torch.cuda.empty_cache()
    for learned in cache_folder().glob("history-*"):
        learned.unlink()


def main(names: Iterable[str]) -> None:
    """Run the parts `names` in order, until one fails."""
    known = parts()
    for name in names:
        _tell(part=name)
        begun = time.perf_counter()
        try:
            _tidy()
            found = known[name]()
        except Exception as error:
            _tell(part=name, failed=f"{type(error).__name__}: {error}")
            raise
        _tell(part=name, found=found, took=time.perf_counter() - begun)


def _tell(**what: Any) -> None:
    print(f"{MARK}{json.dumps(what)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

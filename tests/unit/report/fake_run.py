"""A run that never was, as a log and a plan that look like those of a real one."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from anybatch.events import (
    Evaluated,
    Event,
    OutOfMemory,
    Overflowed,
    Replanned,
    RunEnded,
    RunStarted,
    StepDone,
)
from anybatch.plans import Candidate, Choice, Plan, Prediction, Recompute, TaskIdentity
from anybatch.report import EventLog

GIB = 1 << 30
BEGIN = 1_760_000_000.0


def make_plan(**changes: Any) -> Plan:
    blocks = Recompute(blocks=("layers.*",))
    rejected = [
        make_candidate(4096, 62.1, 1.11),
        make_candidate(4096, 21.4, 1.46, blocks),
        make_candidate(2048, 31.4, 1.12),
        make_candidate(1024, 16.2, 1.13),
        make_candidate(2048, 11.2, 1.47, blocks),
        make_candidate(1024, 6.3, 1.48, blocks),
        make_candidate(512, 3.9, 1.55, blocks),
        make_candidate(256, 4.8, 1.31),
        make_candidate(128, 2.9, 1.64),
        make_candidate(64, 1.9, 2.31),
        make_candidate(1, 1.0, 61.0),
    ]
    plan = Plan(
        task=TaskIdentity(
            name="cifar10-resnet",
            global_batch=4096,
            parameters=11_173_962,
            trainable_parameters=11_173_962,
            ghost_batch=64,
        ),
        device="cuda:0",
        device_name="NVIDIA H200, 139 GiB",
        budget_bytes=10 * GIB,
        enforced=True,
        choice=Choice(micro_batch=512, evaluation_batch=1024, precision="bf16"),
        ladder=(Choice(micro_batch=256, evaluation_batch=512, precision="bf16"),),
        prediction=Prediction(
            peak_bytes=int(8.71 * GIB),
            evaluation_peak_bytes=2 * GIB,
            step_seconds=1.18,
            by_kind={
                "activations": int(7.02 * GIB),
                "parameters": int(0.21 * GIB),
                "gradients": int(0.21 * GIB),
                "optimizer state": int(0.42 * GIB),
                "batch": int(0.11 * GIB),
                "workspace": int(0.5 * GIB),
            },
            method="traced without running; speed calibrated on the device for 2.1 s",
        ),
        rejected=tuple(rejected),
        notices=("BatchNorm sees ghost batches of 64 samples; the task says so.",),
    )
    return plan.model_copy(update=changes)


def make_candidate(
    micro_batch: int, gib: float, seconds: float, recompute: Recompute | None = None
) -> Candidate:
    over = gib - 10.0
    return Candidate(
        choice=Choice(
            micro_batch=micro_batch,
            evaluation_batch=micro_batch,
            precision="bf16",
            recompute=recompute or Recompute(),
        ),
        peak_bytes=int(gib * GIB),
        step_seconds=seconds,
        reason=f"exceeds the 10.0 GiB planned for by {over:.1f} GiB"
        if over > 0
        else "fits, but is slower",
    )


def make_start(**changes: Any) -> RunStarted:
    values: dict[str, Any] = {
        "time": BEGIN,
        "task": "cifar10-resnet",
        "device": "NVIDIA H200, 139 GiB",
        "num_samples": 50_000,
        "total_steps": 200,
        "plan": make_plan().model_dump(mode="json"),
        "versions": {"anybatch": "0.1.0", "torch": "2.13.0", "CUDA": "13.0", "Python": "3.11.7"},
        "command": "anybatch train cifar10.py --memory 10GiB -s 'name=a b'",
        "host": "node-7",
    }
    return RunStarted(**{**values, **changes})


def make_step(step: int, **changes: Any) -> StepDone:
    values: dict[str, Any] = {
        "time": BEGIN + 1.2 * step,
        "step": step,
        "epoch": 1 + step * 4096 // 50_000,
        "samples": 4096,
        "samples_seen": step * 4096,
        "loss": 0.4 + 2.0 * math.exp(-step / 50),
        "weight": 4096.0,
        "learning_rate": 0.1 * min(1.0, step / 20) * (0.5 + 0.5 * math.cos(math.pi * step / 200)),
        "grad_norm": 0.8 + 2.0 * math.exp(-step / 40),
        "loss_scale": None,
        "seconds": 1.2,
        "memory_bytes": int(8.62 * GIB),
        "micro_batch": 512,
    }
    return StepDone(**{**values, **changes})


def make_evaluation(step: int, **changes: Any) -> Evaluated:
    accuracy = 0.95 - 0.7 * math.exp(-step / 60)
    values: dict[str, Any] = {
        "time": BEGIN + 1.2 * step,
        "step": step,
        "epoch": 1 + step * 4096 // 50_000,
        "samples": 10_000,
        "loss": 0.45 + 1.9 * math.exp(-step / 50),
        "seconds": 1.6,
        "metrics": {"accuracy": accuracy, "top-5 accuracy": 1 - (1 - accuracy) / 6},
    }
    return Evaluated(**{**values, **changes})


def make_out_of_memory(step: int, **changes: Any) -> OutOfMemory:
    values: dict[str, Any] = {
        "time": BEGIN + 1.2 * step,
        "step": step,
        "rank": 0,
        "phase": "backward",
        "micro_batch": 512,
        "requested_bytes": int(1.2 * GIB),
        "in_use_bytes": int(9.1 * GIB),
        "budget_bytes": 10 * GIB,
        "message": "CUDA out of memory.",
    }
    return OutOfMemory(**{**values, **changes})


def make_replan(step: int, **changes: Any) -> Replanned:
    plan = make_plan()
    leaner = plan.leaner()
    assert leaner is not None
    values: dict[str, Any] = {
        "time": BEGIN + 1.2 * step,
        "step": step,
        "reason": "memory ran out in backward",
        "before": plan.choice.describe(),
        "after": leaner.choice.describe(),
        "plan": leaner.model_dump(mode="json"),
    }
    return Replanned(**{**values, **changes})


def make_overflow(step: int) -> Overflowed:
    return Overflowed(
        time=BEGIN + 1.2 * step, step=step, loss_scale_before=65536.0, loss_scale_after=32768.0
    )


def make_end(**changes: Any) -> RunEnded:
    values: dict[str, Any] = {
        "time": BEGIN + 262.0,
        "steps": 200,
        "samples_seen": 200 * 4096,
        "seconds": 262.0,
        "step_seconds": 1.27,
        "predicted_peak_bytes": int(8.71 * GIB),
        "measured_peak_bytes": int(8.62 * GIB),
        "predicted_step_seconds": 1.18,
        "budget_bytes": 10 * GIB,
        "finished": True,
        "samples_per_second": 3225.2,
    }
    return RunEnded(**{**values, **changes})


def make_events(num_steps: int = 200) -> list[Event]:
    """A run with noise, evaluations, an overflow, one out-of-memory and the new plan after it."""
    rng = random.Random(0)
    events: list[Event] = [make_start()]
    now = BEGIN
    for step in range(1, num_steps + 1):
        if step == 12:
            events.append(make_overflow(step))
        if step == 57:
            events += [make_out_of_memory(step, time=now), make_replan(step, time=now + 0.1)]
        seconds = (1.19 if step < 57 else 1.31) * rng.uniform(0.97, 1.04) + (
            4.0 if step == 1 else 0
        )
        now += seconds
        plain = make_step(step)
        events.append(
            make_step(
                step,
                time=now,
                seconds=seconds,
                loss=plain.loss * rng.uniform(0.85, 1.15),
                grad_norm=(plain.grad_norm or 0) * rng.uniform(0.7, 1.4),
                micro_batch=512 if step < 57 else 256,
                metrics={"accuracy": 0.97 - 0.75 * math.exp(-step / 55) * rng.uniform(0.9, 1.1)},
            )
        )
        if step % 20 == 0:
            now += 1.6
            events.append(make_evaluation(step, time=now))
    return [*events, make_end(time=now, seconds=now - BEGIN, steps=num_steps)]


def write_run(folder: Path, events: Iterable[Event], plan: Plan | None = None) -> Path:
    """The folder of a run: its plan and its log."""
    folder.mkdir(parents=True, exist_ok=True)
    (plan or make_plan()).save(folder / "plan.json")
    with EventLog(folder / "events.jsonl") as log:
        for event in events:
            log(event)
    return folder

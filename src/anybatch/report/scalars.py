"""Scalars: what of an event is drawn as a curve, by the name that the curve has in TensorBoard."""

from __future__ import annotations

from anybatch.events import CheckpointSaved, Evaluated, Event, StepDone

Scalars = dict[str, float]
"""One value for each curve, by name. TensorBoard groups names by what stands before the first `/`."""


def scalars_of(event: Event, budget_bytes: int | None = None) -> Scalars:
    """The values of `event` on the curves whose horizontal axis counts steps; none of an event that is
    not drawn. Seconds and bytes are what their names say; `budget_bytes` is what training may use."""
    match event:
        case StepDone():
            return _of_step(event, budget_bytes)
        case Evaluated():
            return {**_scores("held_out", event), "speed/evaluation_seconds": event.seconds}
        case CheckpointSaved():
            return {
                "checkpoint/bytes": event.num_bytes,
                "checkpoint/seconds": event.seconds,
                "checkpoint/held_seconds": event.held_seconds,
            }
        case _:
            return {}


def scalars_by_samples(event: Event) -> Scalars:
    """The values of `event` on the curves whose horizontal axis counts samples seen: those by which
    runs with different global batches are compared."""
    match event:
        case StepDone():
            return _scores("by_samples/train", event)
        case Evaluated():
            return _scores("by_samples/held_out", event)
        case _:
            return {}


def _scores(group: str, event: StepDone | Evaluated) -> Scalars:
    metrics = {f"{group}/{name}": value for name, value in event.metrics.items()}
    return {f"{group}/loss": event.loss, **metrics}


def _of_step(event: StepDone, budget_bytes: int | None) -> Scalars:
    told: dict[str, float | None] = {
        **_scores("train", event),
        "optimizer/learning_rate": event.learning_rate,
        "optimizer/grad_norm": event.grad_norm,
        "optimizer/loss_scale": event.loss_scale,
        "speed/samples_per_second": event.samples / event.seconds if event.seconds > 0 else None,
        "speed/step_seconds": event.seconds,
        "speed/data_seconds": event.data_seconds,
        "memory/peak_bytes": event.memory_bytes,
        "memory/part_of_budget": event.memory_bytes / budget_bytes if budget_bytes else None,
        "batch/micro_batch": event.micro_batch,
        "batch/samples": event.samples,
        "batch/samples_seen": event.samples_seen,
        "batch/epoch": event.epoch,
        "ranks/fastest_seconds": min(event.rank_seconds, default=None),
        "ranks/slowest_seconds": max(event.rank_seconds, default=None),
    }
    return {name: value for name, value in told.items() if value is not None}

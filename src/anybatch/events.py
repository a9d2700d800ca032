"""Typed records of what happened in a run. All reporting is based on these records alone.

The engine emits events and does not know their readers, such as the progress bar, the log file and the
report. A record contains plain values (numbers, strings, tuples), never tensors, so that it can be
written to a file, sent to another process and read back.

Steps are numbered from 1, in events and in all other output for users. Everything within the k-th
global step of a run, its checkpoint and the evaluation after it belong to step k; 0 means before the
first step. A step that is skipped entirely has a number too. Internally, a step is identified by its
*index*, the number of steps before it, which determines its samples and its random state; `step_number`
converts the index to the number.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from anybatch.units import format_count


def step_number(index: int) -> int:
    """The number of the step with this `index`."""
    return index + 1


IN_STEP = ("loading", "encoding", "comparison", "forward", "backward", "reduction", "update")
"""The phases of a step, in order. Any other phase is between two steps."""


def whereabouts(step: int, phase: str) -> str:
    """Position for display: in `phase` of `step`, or between that step and the next. Step 0 is before
    the first step, where passes may also be measured."""
    if step and phase in IN_STEP:
        return f"in step {format_count(step)}, {phase}"
    after = f"after step {format_count(step)}" if step else "before the first step"
    return f"{after}, {phase}" if phase else after


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base class of events. `kind` is its name in the log; `time` is in seconds since the epoch."""

    kind: ClassVar[str] = "event"
    time: float


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """Training starts.

    `plan` is the plan as plain data. `total_steps` and `total_samples` are None if unknown, for example
    for a stream. `command` is the shell command line that started the run, on the machine `host`; empty
    if unknown. `source` is what the task was loaded from, a recipe's name or `FILE.py:function`, with
    the arguments `settings`, and `source_sha256` is the checksum of the file; empty for a task created
    in Python.
    """

    kind: ClassVar[str] = "run_started"
    task: str
    device: str
    num_samples: int | None
    total_steps: int | None
    plan: Mapping[str, Any]
    versions: Mapping[str, str]
    notices: tuple[str, ...] = ()
    command: str = ""
    host: str = ""
    source: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    source_sha256: str = ""
    total_samples: int | None = None


@dataclass(frozen=True, kw_only=True)
class StepDone(Event):
    """A global step was committed.

    `samples` is the number of samples it was trained on; `samples_seen` counts all samples taken so
    far, skipped or not, and `tokens_seen` their total length if the global batch is in `Tokens`. `loss`
    is the mean over the total `weight` of the step; `grad_norm` is the norm of the gradient before
    clipping. `memory_bytes` is the peak so far on rank 0, above the baseline. `rank_seconds` is the
    computing time of each rank (on CUDA, in the previous step), if there are several. Rank 0 waited
    `data_seconds` of the `seconds` for its samples, and knew that all ranks had finished
    `agreed_seconds` after it started to compute.

    `part_grad_norm` is the gradient norm of one part of the step alone. A part is the first micro-batch
    of a rank, and `part_weight` is its weight. If samples are sorted by length, the part is the
    unsorted samples before them, on the rank that has these. Over the ranks, `part_weight` is the mean
    of the weights, and `part_grad_norm` is the root of the weighted mean of the squared norms. Both are
    None if this could not be measured. Together with `grad_norm`, they measure the gradient noise
    (`anybatch.insight`).
    """

    kind: ClassVar[str] = "step"
    step: int
    epoch: int
    samples: int
    samples_seen: int
    loss: float
    weight: float
    learning_rate: float
    grad_norm: float | None
    loss_scale: float | None
    seconds: float
    memory_bytes: int
    micro_batch: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    rank_seconds: tuple[float, ...] = ()
    data_seconds: float = 0.0
    agreed_seconds: float = 0.0
    part_weight: float | None = None
    part_grad_norm: float | None = None
    tokens_seen: int | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """The model was evaluated on the held-out samples after `step` committed steps."""

    kind: ClassVar[str] = "evaluated"
    step: int
    epoch: int
    samples: int
    loss: float
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OutOfMemory(Event):
    """Memory ran out while `step` was staged, or in an evaluation or a prediction after it; the attempt
    was completely undone.

    `requested_bytes` is None if the allocator does not report it. `fragmented_bytes` is memory that the
    allocator holds in unused pieces (None: unknown). `then` describes the choice with which the step is
    repeated (empty: there is none).
    """

    kind: ClassVar[str] = "out_of_memory"
    step: int
    rank: int
    phase: str
    micro_batch: int
    requested_bytes: int | None
    in_use_bytes: int
    budget_bytes: int | None
    message: str
    fragmented_bytes: int | None = None
    then: str = ""


@dataclass(frozen=True, kw_only=True)
class Replanned(Event):
    """The plan changed; `step` is the first step under the new plan. If only the batch size of
    evaluations changed, `step` is the one after which the first evaluation used it."""

    kind: ClassVar[str] = "replanned"
    step: int
    reason: str
    before: str
    after: str
    plan: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Rebalanced(Event):
    """The shares of the ranks changed; `step` is the first step with the new shares."""

    kind: ClassVar[str] = "rebalanced"
    step: int
    reason: str
    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Overflowed(Event):
    """Gradients exceeded the range of float16; the step is repeated with a smaller loss scale."""

    kind: ClassVar[str] = "overflow"
    step: int
    loss_scale_before: float
    loss_scale_after: float


@dataclass(frozen=True, kw_only=True)
class Skipped(Event):
    """Samples of `step` were skipped.

    `samples` are their indices in the data set (for a stream, their numbers) in `epoch`, found to be
    bad by `rank`. If all `num_samples` samples that the step had left are skipped, without an update,
    `samples` is empty and `rank` is None. `held_out`: the samples are excluded from every evaluation
    from the one after `step` on.
    """

    kind: ClassVar[str] = "skipped"
    step: int
    rank: int | None
    epoch: int
    samples: tuple[int, ...]
    num_samples: int
    reason: str
    held_out: bool = False


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """Training continues after `step` committed steps, from the checkpoint in `folder`; later steps in
    the log are repeated. `passed_over` has one sentence for each newer checkpoint that is not intact.
    If `step` is 0, `folder` has no checkpoint yet and training starts from the beginning."""

    kind: ClassVar[str] = "resumed"
    step: int
    samples_seen: int
    folder: str
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """The checkpoint of `step` is complete, with `num_bytes` of tensors in `folder`. It took `seconds`,
    of which training was blocked for `held_seconds`."""

    kind: ClassVar[str] = "checkpoint_saved"
    step: int
    folder: str
    num_bytes: int
    seconds: float
    held_seconds: float


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    """The checkpoint of `step` could not be written; earlier checkpoints are unchanged."""

    kind: ClassVar[str] = "checkpoint_failed"
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Straggler(Event):
    """`rank` is repeatedly slower than the others: its part of a step takes `seconds`, while half of
    the ranks need at most `others`. Emitted once per rank."""

    kind: ClassVar[str] = "straggler"
    step: int
    rank: int
    seconds: float
    others: float


@dataclass(frozen=True, kw_only=True)
class Stalled(Event):
    """Training made no progress for `seconds` in `phase`, of `step` or between it and the next step,
    and has continued. The stack of the thread that hung was written to standard error."""

    kind: ClassVar[str] = "stalled"
    step: int
    seconds: float
    phase: str


@dataclass(frozen=True, kw_only=True)
class Starved(Event):
    """Steps wait for their samples: on average, for `data_seconds` of `step_seconds`, up to `step`.
    `num_workers` processes load samples (0: the rank itself); `wanted_workers` would keep up, or come
    as close to it as the number of cores of this machine allows (None: more would not help). Emitted
    once."""

    kind: ClassVar[str] = "starved"
    step: int
    step_seconds: float
    data_seconds: float
    num_workers: int
    wanted_workers: int | None


COMPUTING, SLOWER, EXCHANGE = "computing", "slower ranks", "exchange"
UPDATE, SAMPLES = "update", "samples"
"""The parts of a step with several ranks."""


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """Training is over. Predicted values are given next to the measured ones.

    Memory values are those of the rank that used the most; `rank_peak_bytes` has one value per rank.
    `num_skipped` samples were left out of training. `predicted_totals` and `measured_totals` are the
    most bytes by each account of the device's memory, as in `Prediction`; on a CPU only some can be
    measured. `step_seconds` is the time of a typical step, of which it waited `data_seconds` for its
    samples and `idle_seconds` for a core that other processes used (only for a single process on a
    CPU). `step_parts` are the seconds that a typical step with several ranks spent on computing, on
    waiting for the slowest rank, on communication that computing did not hide, and on the rest.
    `samples_per_second` is the mean during training, without evaluations and pauses.
    """

    kind: ClassVar[str] = "run_ended"
    steps: int
    samples_seen: int
    seconds: float
    step_seconds: float | None
    predicted_peak_bytes: int | None
    measured_peak_bytes: int
    predicted_step_seconds: float | None
    budget_bytes: int | None
    finished: bool
    reason: str = ""
    rank_peak_bytes: tuple[int, ...] = ()
    num_skipped: int = 0
    predicted_totals: Mapping[str, int] = field(default_factory=dict)
    measured_totals: Mapping[str, int] = field(default_factory=dict)
    data_seconds: float = 0.0
    idle_seconds: float = 0.0
    step_parts: Mapping[str, float] = field(default_factory=dict)
    predicted_step_parts: Mapping[str, float] = field(default_factory=dict)
    samples_per_second: float | None = None


@dataclass(frozen=True, kw_only=True)
class Said(Event):
    """Text that the `tell` function of the task returned about the trained model."""

    kind: ClassVar[str] = "said"
    text: str


Sink = Callable[[Event], None]
"""A reader of events: called once for each event, in order, on the training thread."""

_KINDS: dict[str, type[Event]] = {cls.kind: cls for cls in Event.__subclasses__()}


def to_json(event: Event) -> str:
    """`event` as one line of JSON. Numbers that JSON cannot represent become the strings `"nan"`,
    `"inf"`, `"-inf"`."""
    return plain_json({"kind": event.kind, **dataclasses.asdict(event)})


def plain_json(record: Mapping[str, Any]) -> str:
    """`record`, of plain values, as one line of JSON. Numbers that JSON cannot represent become the
    strings `"nan"`, `"inf"`, `"-inf"`."""
    return json.dumps(_plain(record), allow_nan=False)


def from_json(line: str) -> Event:
    """The event written by `to_json`. Raises `ValueError` if `line` is not an event."""
    record = json.loads(line)
    kind = record.pop("kind", None) if isinstance(record, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"not an event of anybatch: {line[:80]!r}")
    try:
        return _reader(_KINDS[kind]).validate_python(record)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"]))
        raise ValueError(
            f"an event of kind {kind!r} cannot be read: {place}: {fault['msg']}"
        ) from None


@functools.cache
def _reader(cls: type[Event]) -> TypeAdapter[Event]:
    return TypeAdapter(with_config(ConfigDict(extra="forbid"))(cls))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value

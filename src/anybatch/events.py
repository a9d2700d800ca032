"""What happened, as typed records. Everything that tells a run's story reads these and only these.

The engine emits events and knows none of their readers; the progress bar, the log file and the
report are readers. A record holds plain values (numbers, strings, tuples), never tensors, so that it
can be written down, sent to another process and read back.

Steps are numbered from 1, in events and wherever else a person reads of one: what happens within the
k-th global step of a run, its checkpoint and the evaluation after it are all of step k, and 0 is before
the first one. A step that is left out whole has its number, too. Inside, the step that comes next goes
by its *index*, the number of steps before it, from which its samples and its random state follow;
`step_number` turns that into the number.
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
"""The phases of a step, in order; whatever has another is done between two."""


def whereabouts(step: int, phase: str) -> str:
    """In words: in `phase` of `step`, or between that and the next one. 0: before the first one, where
    passes may be measured, too."""
    if step and phase in IN_STEP:
        return f"in step {format_count(step)}, {phase}"
    after = f"after step {format_count(step)}" if step else "before the first step"
    return f"{after}, {phase}" if phase else after


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened. `kind` names it in the log; `time` is seconds since the epoch."""

    kind: ClassVar[str] = "event"
    time: float


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """Training begins. `plan` is the plan as plain data; `total_steps` and `total_samples` are None
    where they are not known, for a stream say. `command` is the line of a shell by which it was
    started, on the machine `host`; empty where not known. `source` is what the task was loaded by, a
    recipe's name or `FILE.py:function`, with these `settings`, and `source_sha256` the checksum of the
    file; empty for a task that was made in Python."""

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

    `samples` are those it learned from, `samples_seen` all that were taken so far, left out or not, and
    `tokens_seen` their total length where the global batch is in `Tokens`;
    `loss` is the mean over the total `weight` of the step; `grad_norm` is the norm of the gradient
    before clipping; `memory_bytes` is the peak measured so far on rank 0, above the baseline;
    `rank_seconds` is how long each rank computed (on CUDA in the step before), where there are several;
    of the `seconds` rank 0 waited `data_seconds` for its samples, and knew `agreed_seconds` after it
    had begun to compute that all ranks were through.

    `part_grad_norm` is the norm that the gradient of a part of the step has by itself, a part being
    the first micro-batch of a rank (where samples are in order of length: those before them, which are
    not, on the rank that has them), of the weight `part_weight`: over the ranks the mean of the
    weights, and the root of the mean of the squares, each by its weight. Both are None where that was
    not there to measure. Beside `grad_norm` it tells how noisy gradients are (`anybatch.insight`).
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
    """Memory ran out while `step` was staged, or in an evaluation or a prediction after it; nothing of
    the attempt remains.

    `requested_bytes` is None where the allocator does not say; `fragmented_bytes` are held by it in
    pieces that nobody uses (None: not known); `then` is the choice under which the step is done again,
    in words (empty: there is none).
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
    """The plan changed; `step` is the first step done under the new one. Where only the batch of
    evaluations changed, it is the step after which the first one was done with it."""

    kind: ClassVar[str] = "replanned"
    step: int
    reason: str
    before: str
    after: str
    plan: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Tried(Event):
    """Choices were tried on the first passes of `step`, in a log of an earlier release.

    `choices` are told in words, the planned one first; `pass_seconds` is what the passes of a step of
    one rank would take under each (None: it failed, or was far slower); `taken` is the one followed
    from now on; `seconds` is what the trial took.
    """

    kind: ClassVar[str] = "tried"
    step: int
    choices: tuple[str, ...]
    pass_seconds: tuple[float | None, ...]
    taken: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CompileDecided(Event):
    """Whether the run compiled the blocks of the model, from `step` on, where that was left to it, in a
    log of an earlier release.

    `reason` says why it does as it does; empty: it is faster so. `plain_seconds` and
    `compiled_seconds` are what the passes of a step of one rank take each way (None: not tried, or it
    failed); `seconds` is what trying took; `plan` is the plan that is followed, as plain data.
    """

    kind: ClassVar[str] = "compile_decided"
    step: int
    compiled: bool
    reason: str
    plain_seconds: float | None
    compiled_seconds: float | None
    seconds: float
    plan: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Rebalanced(Event):
    """The shares of the ranks changed; `step` is the first step done under the new ones."""

    kind: ClassVar[str] = "rebalanced"
    step: int
    reason: str
    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Overflowed(Event):
    """Gradients left the range of float16; the step is redone under a smaller loss scale."""

    kind: ClassVar[str] = "overflow"
    step: int
    loss_scale_before: float
    loss_scale_after: float


@dataclass(frozen=True, kw_only=True)
class Skipped(Event):
    """Samples were left out of `step`: `samples` are their indices in the data set (in a stream their
    numbers) in `epoch`, found to be bad by `rank`; or all that the step had left, `num_samples` of
    them, without an update: then `samples` is empty and `rank` None. `held_out`: left out of every
    evaluation from the one after `step` on."""

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
    """Training goes on after `step` committed steps, from the checkpoint in `folder`; what the log
    holds of later steps is done again. `passed_over` has a sentence for each newer checkpoint that is
    not intact. 0 steps: `folder` has no checkpoint yet, so training begins at its start."""

    kind: ClassVar[str] = "resumed"
    step: int
    samples_seen: int
    folder: str
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """The checkpoint of `step` is complete: `num_bytes` of tensors in `folder`, `seconds` after it was
    begun, of which training waited `held_seconds`."""

    kind: ClassVar[str] = "checkpoint_saved"
    step: int
    folder: str
    num_bytes: int
    seconds: float
    held_seconds: float


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    """The checkpoint of `step` could not be written; those before are as they were."""

    kind: ClassVar[str] = "checkpoint_failed"
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Straggler(Event):
    """`rank` takes longer than the others again and again: `seconds` for its part of a step, where
    half of them need at most `others`. Told once for each rank."""

    kind: ClassVar[str] = "straggler"
    step: int
    rank: int
    seconds: float
    others: float


@dataclass(frozen=True, kw_only=True)
class Stalled(Event):
    """Training stood still for `seconds` in `phase`, of `step` or between that and the next, and goes
    on. The stack of the thread that hung is in standard error."""

    kind: ClassVar[str] = "stalled"
    step: int
    seconds: float
    phase: str


@dataclass(frozen=True, kw_only=True)
class Starved(Event):
    """Steps wait for their samples: of `step_seconds` on average, up to `step`, `data_seconds`.
    `num_workers` processes load them (0: the rank itself); `wanted_workers` would keep up, or come as
    near to it as this machine's cores allow (None: more would not help). Told once."""

    kind: ClassVar[str] = "starved"
    step: int
    step_seconds: float
    data_seconds: float
    num_workers: int
    wanted_workers: int | None


COMPUTING, SLOWER, EXCHANGE = "computing", "slower ranks", "exchange"
UPDATE, SAMPLES = "update", "samples"
"""The parts of a step of several ranks."""


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """Training is over. Predicted figures stand beside the measured ones; those of memory are of the
    rank that used most, and `rank_peak_bytes` are of each; `num_skipped` samples were left out of
    training. Totals are the most bytes by each account of the device's memory, as `Prediction` has
    them; only some can be measured on a CPU. `step_seconds` is that of a typical step, of which it
    waited `data_seconds` for its samples, and `idle_seconds` for a core that other processes had (of
    one process on a CPU); `step_parts` are the seconds that a typical step of several ranks spent on
    computing, on waiting for the slowest of them, on what computing did not hide of the exchange, and
    on the rest; `samples_per_second` is the mean while training, without evaluations and pauses."""

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
    """What the task has to tell of the trained model."""

    kind: ClassVar[str] = "said"
    text: str


Sink = Callable[[Event], None]
"""A reader of events: called once for each, in order, on the thread that trains."""

_KINDS: dict[str, type[Event]] = {cls.kind: cls for cls in Event.__subclasses__()}


def to_json(event: Event) -> str:
    """`event` as one line of JSON. Numbers that JSON cannot hold become the strings `"nan"`,
    `"inf"`, `"-inf"`."""
    return plain_json({"kind": event.kind, **dataclasses.asdict(event)})


def plain_json(record: Mapping[str, Any]) -> str:
    """`record`, of plain values, as one line of JSON. Numbers that JSON cannot hold become the strings
    `"nan"`, `"inf"`, `"-inf"`."""
    return json.dumps(_plain(record), allow_nan=False)


def from_json(line: str) -> Event:
    """The event written by `to_json`. Raises `ValueError` for a line that is not one."""
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

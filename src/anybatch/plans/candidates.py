"""Candidates: the predicted costs of choices, and the choices that were rejected."""

from __future__ import annotations

from pydantic import Field

from anybatch.plans.choice import Choice
from anybatch.plans.frozen import Frozen
from anybatch.plans.ranks import Parallel
from anybatch.units import format_bytes, format_seconds


class Prediction(Frozen):
    """Predicted cost of a plan, for the rank with the largest share.

    Attributes:
        peak_bytes: peak memory that the run adds to the device, as counted by the budget.
        evaluation_peak_bytes: the same during evaluation alone.
        commit_bytes: peak memory that the update allocates: in the first step, which creates the
            optimizer state, and in later ones.
        step_seconds: time of one global step.
        by_kind: bytes by kind at the moment of most use, and bytes held in addition at the peak.
        totals: maximum bytes at any time by each account of the device's memory: `allocated` (in
            tensors), `active` (CUDA), `reserved` (by the allocator) and `total`. Corrections learned
            from earlier runs are not included.
        choice: the choice that was predicted; None: not recorded.
        method: how the memory was predicted, in words.
        step_parts: seconds of the step by part (forward, backward, ...); they add up to `step_seconds`.
        seconds_method: how the time was predicted, in words.
        learned_bytes: no longer written; in older plans, what earlier runs added to the peak.
        seconds_corrected_by: factor learned from earlier runs, included in the values above.
        corrected_runs: number of these runs.
        rehearsed: whether the peak and the passes were measured before the run.
    """

    peak_bytes: int = Field(ge=0)
    evaluation_peak_bytes: int = Field(ge=0)
    commit_bytes: tuple[int, int] = (0, 0)
    step_seconds: float = Field(ge=0)
    by_kind: dict[str, int] = Field(default_factory=dict)
    totals: dict[str, int] = Field(default_factory=dict)
    method: str = ""
    step_parts: dict[str, float] = Field(default_factory=dict)
    seconds_method: str = ""
    learned_bytes: int = Field(default=0, ge=0)
    seconds_corrected_by: float = Field(default=1.0, gt=0)
    choice: Choice | None = None
    corrected_runs: int = Field(default=0, ge=0)
    rehearsed: bool = False

    def __repr__(self) -> str:
        step = format_seconds(self.step_seconds)
        return f"<Prediction: peak {format_bytes(self.peak_bytes)}, step {step}>"

    def __str__(self) -> str:
        return repr(self)


class Candidate(Frozen):
    """A choice that was considered and rejected: its predicted cost and the reason.

    Attributes:
        choice: the settings.
        parallel: how the ranks would share a step; None: as in the plan.
        peak_bytes: predicted peak; None: unknown, since it could not be traced.
        step_seconds: predicted time of a step.
        possible: whether it could run at all.
        reason: why it was rejected.
    """

    choice: Choice
    parallel: Parallel | None = None
    peak_bytes: int | None = Field(ge=0)
    step_seconds: float = Field(ge=0)
    possible: bool = True
    reason: str


class FrontierPoint(Frozen):
    """A choice for which no other choice considered is better in both memory and time. See
    `Candidate`."""

    choice: Choice
    parallel: Parallel | None = None
    peak_bytes: int = Field(ge=0)
    step_seconds: float = Field(ge=0)


class Rival(Frozen):
    """Another choice that fits and is predicted to be almost as fast, so that a rehearsal decides.

    Attributes:
        choice, ladder, prediction: see `Plan`.
        kernel_bytes: no longer written; read from older plans.
    """

    choice: Choice
    ladder: tuple[Choice, ...] = ()
    prediction: Prediction
    kernel_bytes: int = Field(default=0, ge=0)

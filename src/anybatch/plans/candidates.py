"""Candidates: what choices were predicted to cost, and which of them were not taken."""

from __future__ import annotations

from pydantic import Field

from anybatch.plans.choice import Choice
from anybatch.plans.frozen import Frozen
from anybatch.plans.ranks import Parallel
from anybatch.units import format_bytes, format_seconds


class Prediction(Frozen):
    """What the plan is predicted to cost the rank with the largest share.

    Attributes:
        peak_bytes: most that the run adds to the device at any moment, as the budget counts it.
        evaluation_peak_bytes: the same during evaluation alone.
        commit_bytes: most that the update allocates: in the first step, which makes the optimizer's
            state, and in later ones.
        step_seconds: time of one global step.
        by_kind: bytes when most is in use, by kind, and what is held beyond them at the peak.
        totals: the most bytes at any time by each account of the device's memory: `allocated` (in
            tensors), `active` (CUDA), `reserved` (by the allocator) and `total`. What earlier runs
            taught is not in them.
        choice: that it is for; None: not told.
        method: how it was found, in words.
        step_parts: seconds of the step by part (forward, backward, ...); they add up to
            `step_seconds`.
        seconds_method: how the time was found, in words.
        learned_bytes: no longer written: what earlier runs added to the peak, in older plans.
        seconds_corrected_by: factor learned from earlier runs, contained in the figures above.
        corrected_runs: how many.
        rehearsed: peak and passes were measured before the run.
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
    """A choice that was weighed: what it would cost, and why it was not taken.

    Attributes:
        choice: the knobs.
        parallel: how the ranks would share a step; None: as in the plan.
        peak_bytes: predicted peak; None: not known, since it could not be traced.
        step_seconds: predicted time of a step.
        possible: whether it could be run at all.
        reason: for which it was not taken.
    """

    choice: Choice
    parallel: Parallel | None = None
    peak_bytes: int | None = Field(ge=0)
    step_seconds: float = Field(ge=0)
    possible: bool = True
    reason: str


class FrontierPoint(Frozen):
    """A choice that nothing else that was weighed beats in both bytes and time. See `Candidate`."""

    choice: Choice
    parallel: Parallel | None = None
    peak_bytes: int = Field(ge=0)
    step_seconds: float = Field(ge=0)


class Rival(Frozen):
    """Another choice that fits, and is predicted to be nearly as fast: so nearly that a rehearsal is to
    decide.

    Attributes:
        choice, ladder, prediction: as those of a plan.
        kernel_bytes: no longer written: read from older plans.
    """

    choice: Choice
    ladder: tuple[Choice, ...] = ()
    prediction: Prediction
    kernel_bytes: int = Field(default=0, ge=0)

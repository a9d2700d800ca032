"""Plan: the complete description of how a task runs on a machine."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from anybatch.batch_rule import read_rule
from anybatch.errors import InputError
from anybatch.plans.candidates import Candidate, FrontierPoint, Prediction, Rival
from anybatch.plans.checks import check
from anybatch.plans.choice import Choice, KernelChoices
from anybatch.plans.description import as_table, explained, in_one_line
from anybatch.plans.frozen import Frozen, current, faults, read
from anybatch.plans.ranks import (
    Balancing,
    Exchange,
    Link,
    Norms,
    Parallel,
    Sharding,
    check_removed,
    num_units,
)
from anybatch.process.files import write_whole

VERSION = 1

Point = TypeVar("Point", Candidate, FrontierPoint)


class TaskIdentity(Frozen):
    """The properties of a task by which a plan recognizes it."""

    name: str
    global_batch: int = Field(ge=1, description="samples of the largest step")
    batch_rule: str = Field(
        default="", description="of steps that differ in size: as --global-batch takes it"
    )
    parameters: int = Field(ge=0)
    trainable_parameters: int = Field(ge=1)
    ghost_batch: int | None = Field(default=None, ge=1)
    longest: int | None = Field(
        default=None, ge=1, description="length of the longest sample, where samples differ in it"
    )
    padded: int | None = Field(
        default=None,
        ge=1,
        description="padded size of a mean global batch in samples of the longest, where they differ",
    )
    grain: int | None = Field(
        default=None, ge=1, description="samples per forward pass of a reproducible run"
    )
    part: int | None = Field(
        default=None, ge=1, description="samples per part of its steps, which one rank takes"
    )
    dtypes: tuple[str, ...] = Field(
        default=(), description="of the floating parameters as the model has them; empty: not told"
    )

    @field_validator("batch_rule")
    @classmethod
    def _check_rule(cls, text: str) -> str:
        if text:
            read_rule(text)
        return text

    @property
    def unit(self) -> int:
        """Number of samples that is never split between micro-batches: a grain, a ghost batch of
        BatchNorm, or one."""
        return self.grain or self.ghost_batch or 1

    @property
    def num_parts(self) -> int | None:
        """Number of parts in a full step of a reproducible run; None if it is not reproducible."""
        return None if self.part is None else num_units(self.global_batch, self.part)


class Plan(Frozen):
    """How one task runs on one machine.

    Attributes:
        version: version of this format.
        task: the task that the plan is for.
        parallel: how the ranks share a step.
        shares: shares of the global batch, by rank; only their ratios count, and zero is allowed. There
            is one for each rank, so their number is the number of ranks.
        balance: `"measured"`: shares follow the measured speed of the ranks; `"fixed"`: they do not
            change.
        norms: `"ghosts"`: each ghost batch of BatchNorm is computed by one rank; `"synchronised"`: each
            is divided over the ranks, one per pass, with communication between all ranks in every norm.
        sharding: how a sharded model is divided; see `Sharding`.
        device: torch device name; `"cuda"`: each rank uses a different device.
        exchange: what the ranks communicate; see `Exchange`.
        link: the connection between the ranks that the prediction assumes; None: unknown, or one rank.
        kernels: the kernels that compute the model; see `KernelChoices`.
        device_name: device name for display.
        budget_bytes: memory that training may use on each device; None: not limited.
        reserve_bytes: the part of it that the plan leaves free for memory that is not predicted.
        enforced: whether the budget is enforced: on CUDA by the allocator, on a CPU by measuring
            passes.
        choice: the settings of each device.
        ladder: leaner choices, in order; the next one is used when memory runs out.
        prediction: predicted memory and time of `choice`.
        rivals: choices that are predicted to be almost as fast, fastest first; a rehearsal selects the
            fastest.
        rejected: the other candidates.
        frontier: the trade-off between memory and time, leanest first, including choices that exceed
            the budget.
        notices: sentences that the user should read before the run.
    """

    version: Literal[1] = VERSION
    task: TaskIdentity
    parallel: Annotated[Parallel, BeforeValidator(check_removed)] = "single"
    shares: tuple[float, ...] = Field(default=(1.0,), min_length=1)
    balance: Balancing = "fixed"
    norms: Norms = "ghosts"
    sharding: Sharding = Sharding()
    exchange: Exchange = Exchange()
    link: Link | None = None
    kernels: KernelChoices = KernelChoices()
    device: str = Field(pattern=r"^(cpu|cuda(:\d+)?)$")
    device_name: str = ""
    budget_bytes: int | None = Field(default=None, ge=1)
    reserve_bytes: int = Field(default=0, ge=0)
    enforced: bool = False
    choice: Choice
    ladder: tuple[Choice, ...] = ()
    prediction: Prediction | None = None
    rivals: tuple[Rival, ...] = ()
    rejected: tuple[Candidate, ...] = ()
    frontier: tuple[FrontierPoint, ...] = ()
    notices: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Plan:
        check(self)
        return self

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.shares)

    def predicted_seconds(self, choice: Choice) -> float | None:
        """The predicted time of a step under `choice`, or None if it was not predicted for the ranks of
        this plan."""
        prediction = self.prediction
        if prediction is not None and (prediction.choice or self.choice).trains_like(choice):
            return prediction.step_seconds
        for point in (*self.frontier, *self.rejected):
            same_ranks = point.parallel in (None, self.parallel)
            if same_ranks and choice.trains_like(point.choice):
                return point.step_seconds
        return None

    def slowed(self, factor: float) -> Plan:
        """A copy of this plan with the predicted times of all other choices multiplied by `factor`."""

        def slower(points: Sequence[Point]) -> tuple[Point, ...]:
            return tuple(
                point.model_copy(update={"step_seconds": factor * point.step_seconds})
                for point in points
            )

        return self.model_copy(
            update={"frontier": slower(self.frontier), "rejected": slower(self.rejected)}
        )

    @property
    def is_predicted(self) -> bool:
        """Whether there is a prediction, and it is for the current choice."""
        prediction = self.prediction
        return prediction is not None and prediction.choice in (None, self.choice)

    @property
    def largest_share(self) -> int:
        """Maximum number of samples of a full global batch on the rank with the largest share, in whole
        ghost batches."""
        return self._largest_part(self.task.global_batch)

    @property
    def largest_amount(self) -> int:
        """Like `largest_share`, for a mean global batch in samples of the longest length, as the
        prediction counts them: less than `largest_share` if samples differ in length."""
        task = self.task
        return self._largest_part(min(task.padded or task.global_batch, task.global_batch))

    @property
    def accumulation_steps(self) -> int:
        """Number of passes for a full global batch, on the rank with the most; an upper bound if
        samples differ in length."""
        return self.passes_for(self.task.global_batch)

    def passes_for(self, num_samples: int) -> int:
        """Like `accumulation_steps`, for a step of `num_samples` samples."""
        if self.norms == "synchronised":
            return num_units(num_samples, self.task.ghost_batch or 1)
        return -(-self._largest_part(num_samples) // self.choice.micro_batch)

    def leaner(self) -> Plan | None:
        """The plan to use after this one ran out of memory: the next rung of the ladder, or below the
        last rung half the micro-batch. None: there is no leaner plan."""
        if self.ladder:
            return self.model_copy(update={"choice": self.ladder[0], "ladder": self.ladder[1:]})
        unit = min(self.task.unit, self.task.global_batch)
        if self.choice.micro_batch <= unit or self.norms == "synchronised":
            return None
        half = max(unit, self.choice.micro_batch // 2 // unit * unit)
        choice = self.choice.model_copy(
            update={
                "micro_batch": half,
                "evaluation_batch": max(1, min(self.choice.evaluation_batch, half)),
            }
        )
        return self.model_copy(update={"choice": choice})

    def taking(self, rival: Rival) -> Plan:
        """A copy of this plan with the choice, ladder and prediction of `rival`."""
        changes = {name: getattr(rival, name) for name in ("choice", "ladder", "prediction")}
        return self.model_copy(update=changes)

    def exchanging(self, exchange: Exchange) -> Plan:
        """A copy of this plan with another `exchange` between its ranks. Raises `InputError` if this
        plan does not support it."""
        return self._with("exchange", exchange, "a plan with this exchange")

    def running(self, kernels: KernelChoices) -> Plan:
        """A copy of this plan with other `kernels`. Raises `InputError` if this plan does not support
        them."""
        return self._with("kernels", kernels, "a plan with these kernels")

    def _largest_part(self, whole: int) -> int:
        """Maximum number of `whole` samples on the rank with the largest share, in whole parts or ghost
        batches."""
        task = self.task
        unit = 1 if self.norms == "synchronised" else task.part or task.ghost_batch or 1
        units = -(-whole // unit)
        part = math.ceil(units * max(self.shares) / sum(self.shares) - 1e-9)
        return min(whole, max(1, part) * unit)

    def _with(self, name: str, value: BaseModel, source: str) -> Plan:
        data = {**self.model_dump(mode="json"), name: value.model_dump(mode="json")}
        return Plan.from_json(json.dumps(data), source=source)

    def explain(self) -> list[tuple[str, str]]:
        """The plan as (what, how) lines that give a quick overview."""
        return explained(self)

    def __repr__(self) -> str:
        return f"<Plan of {in_one_line(self)}>"

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        return as_table(self)

    def check_fits(self, identity: TaskIdentity) -> None:
        """Raises `InputError` if this plan was made for a task other than `identity`."""
        differing = [
            f"{name} is {getattr(self.task, name)!r} in the plan and {getattr(identity, name)!r} in"
            " the task"
            for name in (
                "global_batch",
                "batch_rule",
                "parameters",
                "trainable_parameters",
                "ghost_batch",
                "longest",
                "grain",
                "part",
            )
            if getattr(self.task, name) != getattr(identity, name)
        ]
        if differing:
            raise InputError(
                f"the plan was made for another task ({self.task.name!r}): {'; '.join(differing)}."
                " Plan this task anew, or pass the task that the plan is for. A run that is resumed"
                " goes on with the plan and the task that it was begun with: begin another one in a"
                " folder of its own."
            )

    def to_json(self) -> str:
        """The plan as indented JSON text; `from_json` reads it back as an equal plan."""
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "the plan") -> Plan:
        """Parse a plan from the JSON in `text`. Raises `InputError` with the location of each error."""
        text = current(text, VERSION, source)
        try:
            # JSON has no tuples, so pydantic's JSON mode is used instead of its Python mode.
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise InputError(
                f"{source} cannot be run: {faults(error)}; mend it there, or plan the task anew."
            ) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to `path` atomically. Raises `InputError` if it cannot be written."""
        remedy = "give a file in a folder that is there and has room"
        write_whole(path, self.to_json(), "the plan", remedy)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Load the plan in the file `path`. If its choice was edited, the prediction is removed and a
        notice added. Raises `InputError` if the file cannot be read or has errors."""
        plan = cls.from_json(read(path), source=f"the plan {path}")
        prediction = plan.prediction
        if prediction is None or prediction.choice in (None, plan.choice):
            return plan
        notice = (
            "The choice was changed after it was predicted"
            f" ({prediction.choice.describe()}), so nothing is predicted of it."
        )
        changes = {"prediction": None, "notices": (*plan.notices, notice)}
        return plan.model_copy(update=changes)

"""Plan: how a task runs on a machine, whole."""

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
    """The parts of a task by which a plan recognises it."""

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
        """Samples that no cut into micro-batches parts: a grain, a ghost batch of BatchNorm, or one."""
        return self.grain or self.ghost_batch or 1

    @property
    def num_parts(self) -> int | None:
        """Parts of a full step of a reproducible run; None: it is not one."""
        return None if self.part is None else num_units(self.global_batch, self.part)


class Plan(Frozen):
    """How one task runs on one machine.

    Attributes:
        version: of this format.
        task: which task it is for.
        parallel: how the ranks share a step.
        shares: parts of the global batch that the ranks take, by rank; only their ratios count, and
            zero is allowed. One for each rank, so their number is the number of ranks.
        balance: `"measured"`: shares follow the ranks' measured speed; `"fixed"`: they stay.
        norms: `"ghosts"`: each ghost batch of BatchNorm is computed by one rank; `"synchronised"`: each
            is divided over the ranks, one per pass, and the norms of all ranks meet in it.
        sharding: how a divided model is divided; see `Sharding`.
        device: as torch names it; `"cuda"`: each rank its own.
        exchange: what ranks tell each other; see `Exchange`.
        link: what joins the ranks, as the prediction reckons with it; None: not told, or one rank.
        kernels: which kernels compute the model; see `KernelChoices`.
        device_name: for people.
        budget_bytes: memory that training may use on each device; None: not limited.
        reserve_bytes: of these, what the plan keeps free for what is not predicted.
        enforced: whether the run is held to the budget: on CUDA by the allocator, on a CPU by measuring
            its passes.
        choice: the knobs.
        ladder: leaner choices, in order; the next one is taken when memory runs out.
        prediction: bytes and seconds of `choice`.
        rivals: choices that are predicted to be nearly as fast, the fastest first; a rehearsal takes
            the one that is.
        rejected: the other candidates.
        frontier: what memory buys in time, leanest first; with what does not fit the budget.
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
        """The time of a step under `choice`, as far as it was predicted on the ranks of this plan."""
        told = self.prediction
        if told is not None and (told.choice or self.choice).trains_like(choice):
            return told.step_seconds
        for point in (*self.frontier, *self.rejected):
            same_ranks = point.parallel in (None, self.parallel)
            if same_ranks and choice.trains_like(point.choice):
                return point.step_seconds
        return None

    def slowed(self, factor: float) -> Plan:
        """The same plan, with the predicted times of all other choices multiplied by `factor`."""

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
        """Whether there is a prediction, and not one of another choice."""
        told = self.prediction
        return told is not None and told.choice in (None, self.choice)

    @property
    def largest_share(self) -> int:
        """Samples of a full global batch that the rank with the largest share takes, at most; whole
        ghost batches."""
        return self._largest_part(self.task.global_batch)

    @property
    def largest_amount(self) -> int:
        """The same of a mean global batch in samples of the longest, as its prediction counts: fewer
        than `largest_share` where samples differ in length."""
        task = self.task
        return self._largest_part(min(task.padded or task.global_batch, task.global_batch))

    @property
    def accumulation_steps(self) -> int:
        """Passes for a full global batch, on the rank that has most; the most there can be, where
        samples differ in length."""
        return self.passes_for(self.task.global_batch)

    def passes_for(self, num_samples: int) -> int:
        """The same for a step of so many samples."""
        if self.norms == "synchronised":
            return num_units(num_samples, self.task.ghost_batch or 1)
        return -(-self._largest_part(num_samples) // self.choice.micro_batch)

    def leaner(self) -> Plan | None:
        """The plan to take when this one ran out of memory: the next rung of the ladder, or below the
        last rung half the micro-batch. None: there is nothing leaner."""
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
        """This plan with the choice of `rival`."""
        told = {name: getattr(rival, name) for name in ("choice", "ladder", "prediction")}
        return self.model_copy(update=told)

    def exchanging(self, exchange: Exchange) -> Plan:
        """This plan with another `exchange` between its ranks. Raises `InputError` if they cannot have
        it."""
        return self._with("exchange", exchange, "a plan with this exchange")

    def running(self, kernels: KernelChoices) -> Plan:
        """This plan with other `kernels`. Raises `InputError` if its device cannot have them."""
        return self._with("kernels", kernels, "a plan with these kernels")

    def _largest_part(self, whole: int) -> int:
        """What the rank with the largest share takes of `whole`, at most; whole ghost batches."""
        task = self.task
        unit = 1 if self.norms == "synchronised" else task.part or task.ghost_batch or 1
        units = -(-whole // unit)
        part = math.ceil(units * max(self.shares) / sum(self.shares) - 1e-9)
        return min(whole, max(1, part) * unit)

    def _with(self, name: str, value: BaseModel, source: str) -> Plan:
        data = {**self.model_dump(mode="json"), name: value.model_dump(mode="json")}
        return Plan.from_json(json.dumps(data), source=source)

    def explain(self) -> list[tuple[str, str]]:
        """The plan as (what, how) lines that a person reads in ten seconds."""
        return explained(self)

    def __repr__(self) -> str:
        return f"<Plan of {in_one_line(self)}>"

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        return as_table(self)

    def check_fits(self, identity: TaskIdentity) -> None:
        """Raises `InputError` if this plan was made for another task than `identity`."""
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
        """The plan as indented JSON text, which `from_json` reads back equal."""
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "the plan") -> Plan:
        """The plan written as `text`. Raises `InputError` with the place of every fault."""
        text = current(text, VERSION, source)
        try:
            # JSON has no tuples, so it is read by JSON's rules rather than Python's.
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise InputError(
                f"{source} cannot be run: {faults(error)}; mend it there, or plan the task anew."
            ) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to `path`, whole or not at all. Raises `InputError` if it cannot be."""
        remedy = "give a file in a folder that is there and has room"
        write_whole(path, self.to_json(), "the plan", remedy)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan in the file `path`; without its prediction, and with a notice, if the choice was
        edited. Raises `InputError` if there is none, or it has faults."""
        plan = cls.from_json(read(path), source=f"the plan {path}")
        told = plan.prediction
        if told is None or told.choice in (None, plan.choice):
            return plan
        notice = (
            "The choice was changed after it was predicted"
            f" ({told.choice.describe()}), so nothing is predicted of it."
        )
        changes = {"prediction": None, "notices": (*plan.notices, notice)}
        return plan.model_copy(update=changes)

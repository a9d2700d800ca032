"""Plan: how a task runs on a machine, as frozen data that a person can read and edit.

The planner writes plans and the engine runs them; they meet here and nowhere else. A plan says
everything that the engine needs to know: the engine has no settings of its own. What to do when
memory runs out after all is part of it too (`ladder`), so recovery needs no planner.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from anybatch.errors import InputError
from anybatch.units import format_bytes, format_seconds

VERSION = 1

Precision = Literal[
    "fp32", "tf32", "bf16", "fp16", "bf16-weights", "fp16-weights", "bf16-pure", "fp16-pure", "fp8"
]
"""How numbers are held while training:

`fp32`: everything in the dtype of the model. `tf32`: the same, matrix products in TensorFloat-32.
`bf16`, `fp16`: autocast; fp16 with loss scaling. `bf16-weights`, `fp16-weights`: half-precision
weights, norms in float32, the optimizer on float32 master copies. `bf16-pure`, `fp16-pure`:
everything in half precision, the optimizer too. `fp8`: matrix products of linear layers in float8,
where device and torchao have it.
"""

PRECISION_ALIASES: dict[str, Precision] = {
    "O0": "fp32",
    "O1": "fp16",
    "O2": "fp16-weights",
    "O3": "fp16-pure",
}
"""The names that NVIDIA Apex gave to the same four ideas."""


class _Frozen(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)


class Recompute(_Frozen):
    """Which activations are computed again in backward instead of being kept.

    Attributes:
        blocks: names of modules, `*` matching any part (`"layers.*"`); empty: none.
        keep: `"nothing"` inside a block, or the results of `"matmuls"` (and convolutions), which are
            dear to compute and cheap to keep.
        nested: a block that is an `nn.Sequential` becomes a tree of checkpoints, so a chain of n equal
            layers keeps O(log n) activations.
        to_host: what is kept is kept in host memory.
    """

    blocks: tuple[str, ...] = ()
    keep: Literal["nothing", "matmuls"] = "nothing"
    nested: bool = False
    to_host: bool = False

    def describe(self) -> str:
        """A few words for a table."""
        if not self.blocks:
            return "none, kept in host memory" if self.to_host else "none"
        names = f"{len(self.blocks)} blocks"
        if len(self.blocks) == 1:
            names = "the whole model" if self.blocks[0] == "." else self.blocks[0]
        more = [
            "nested" if self.nested else "",
            "matrix products kept" if self.keep == "matmuls" else "",
            "kept in host memory" if self.to_host else "",
        ]
        return ", ".join([names, *filter(None, more)])


Update = Literal["as given", "fused", "in parts"]
"""How the optimizer's update is run:

`as given`: as the task's optimizer does it by itself. `fused`: by one kernel that stores nothing in
between. `in parts`: some parameters at a time, so that what is stored in between is small.
"""

StatesOn = Literal["device", "host"]
"""Where the optimizer's states lie between updates."""


class Choice(_Frozen):
    """The knobs of one device. Turning any of them leaves the mathematics as it is.

    Where samples differ in length, a batch may hold as many as have, padded, the size of `micro_batch`
    (or `evaluation_batch`) samples of the longest.
    """

    micro_batch: int = Field(ge=1, description="samples per forward pass")
    evaluation_batch: int = Field(ge=1, description="samples per forward pass without gradient")
    precision: Precision = "fp32"
    recompute: Recompute = Recompute()
    update: Update = "as given"
    optimizer_states: StatesOn = "device"

    def describe(self) -> str:
        """One line for a table or an event."""
        states = ", optimizer states in host memory" if self.optimizer_states == "host" else ""
        return (
            f"micro-batch {self.micro_batch}, {self.precision},"
            f" recompute {self.recompute.describe()}{states}"
        )

    def describe_update(self) -> str:
        """How the update is run, and why, in a line; empty: as torch does by itself."""
        told = {
            "as given": "",
            "fused": "fused: one kernel that stores nothing in between",
            "in parts": "some parameters at a time, so that little is stored in between",
        }[self.update]
        host = "states in host memory, which come over for some parameters at a time"
        return "; ".join(filter(None, [told, host if self.optimizer_states == "host" else ""]))


Parallel = Literal["single", "replicate", "ddp", "shard", "in-process"]
"""How ranks share a step:

`single`: one rank. `replicate`: the whole model on every rank, gradients added up once per step; a
rank that fails leaves no other waiting. `ddp`: the same by torch's DistributedDataParallel, for models
that need it. `shard`: parameters, gradients and optimizer state divided over the ranks (FSDP2).
`in-process`: several devices from one process, the whole model on each.
"""


Norms = Literal["ghosts", "synchronised"]
"""Where a ghost batch of BatchNorm is computed: on one rank, or divided over all of them."""

Balancing = Literal["measured", "fixed"]
"""Whether shares follow the measured speed of the ranks."""


class Outer(_Frozen):
    """The optimizer that moves the common weights after a round of local steps: stochastic gradient
    descent with Nesterov momentum on the mean movement of the ranks. The defaults are those of
    Douillard et al. 2023, "DiLoCo: Distributed low-communication training of language models".

    Attributes:
        lr: 1 with no momentum is plain averaging.
        momentum: of Nesterov's kind.
    """

    lr: float = Field(default=0.7, gt=0, allow_inf_nan=False)
    momentum: float = Field(default=0.9, ge=0, lt=1)


class Exchange(_Frozen):
    """What ranks tell each other, and how often. The default is exact; everything else changes the
    mathematics of training, and is done because it was asked for.

    Attributes:
        compress: gradients (or movements) cross in `"bf16"` or `"fp16"`, or as products of thin
            matrices: `"powersgd"` (Vogels et al. 2019).
        powersgd_rank: width of those matrices.
        every: optimizer steps that each rank takes by itself before weights are averaged.
        outer: the optimizer that takes the averages; None: plain averaging.
        stale: gradients are applied one step late, and cross while the next step computes.
    """

    compress: Literal["bf16", "fp16", "powersgd"] | None = None
    powersgd_rank: int = Field(default=1, ge=1)
    every: int = Field(default=1, ge=1)
    outer: Outer | None = None
    stale: bool = False

    @model_validator(mode="after")
    def _check(self) -> Exchange:
        if self.every > 1 and self.stale:
            raise ValueError(
                f"every is {self.every} and stale is true, but local steps exchange no gradients that"
                " could be late: ask for one of the two"
            )
        if self.outer is not None and self.every == 1:
            raise ValueError(
                "outer is an optimizer for the averages of local steps, and every is 1: ask for more"
                " steps, or leave it out"
            )
        return self

    @property
    def is_exact(self) -> bool:
        """Whether the update is that of the synchronous step."""
        return self.compress is None and self.every == 1 and not self.stale

    def describe(self) -> str:
        """One line for a table."""
        told = []
        if self.every > 1:
            how = (
                "averaged"
                if self.outer is None
                else f"moved by an outer optimizer (lr {self.outer.lr:g}, Nesterov momentum"
                f" {self.outer.momentum:g})"
            )
            told.append(f"local steps, weights {how} every {self.every} steps")
        if self.stale:
            told.append("gradients applied one step late")
        if self.compress == "powersgd":
            told.append(f"gradients approximated by PowerSGD of rank {self.powersgd_rank}")
        elif self.compress is not None:
            told.append(f"{'movements' if self.every > 1 else 'gradients'} sent in {self.compress}")
        return "; ".join(told) or "exact, in every step"

    def notices(self) -> tuple[str, ...]:
        """Sentences for whoever reads the plan; none if it is exact."""
        if self.is_exact:
            return ()
        loss = ", and the loss that is reported is that of rank 0's share" if self.every > 1 else ""
        told = (
            f"The exchange between ranks is not exact, as asked for ({self.describe()}): the result"
            f" depends on it and on the number of ranks{loss}."
        )
        return (told,)


class KernelChoices(_Frozen):
    """Which kernels compute the model, and in which layout. Results differ by rounding only.

    Attributes:
        channels_last: convolutions get their images with the channels innermost.
        autotune: cuDNN times its algorithms for each shape when it first meets it, and keeps the
            fastest.
        compile: the blocks of the model are compiled by `torch.compile`.
    """

    channels_last: bool = False
    autotune: bool = False
    compile: bool = False

    def describe(self) -> str:
        """A few words for a table; empty if nothing is chosen."""
        told = [
            "channels-last convolutions" if self.channels_last else "",
            "autotuned by cuDNN" if self.autotune else "",
            "compiled blocks" if self.compile else "",
        ]
        return ", ".join(filter(None, told))


class Prediction(_Frozen):
    """What the plan is predicted to cost the rank with the largest share.

    Attributes:
        peak_bytes: most that the run adds to the device at any moment, as the budget counts it.
        evaluation_peak_bytes: the same during evaluation alone.
        commit_bytes: most that the update allocates: in the first step, which makes the optimizer's
            state, and in later ones.
        step_seconds: time of one global step.
        by_kind: bytes at that peak, by kind.
        method: how it was found, in words.
        step_parts: seconds of the step by part (forward, backward, ...); they add up to
            `step_seconds`.
        seconds_method: how the time was found, in words.
        bytes_corrected_by, seconds_corrected_by: factors learned from earlier runs, contained in
            the figures above.
        corrected_runs: how many.
    """

    peak_bytes: int = Field(ge=0)
    evaluation_peak_bytes: int = Field(ge=0)
    commit_bytes: tuple[int, int] = (0, 0)
    step_seconds: float = Field(ge=0)
    by_kind: dict[str, int] = {}
    method: str = ""
    step_parts: dict[str, float] = {}
    seconds_method: str = ""
    bytes_corrected_by: float = Field(default=1.0, ge=1)
    seconds_corrected_by: float = Field(default=1.0, gt=0)
    corrected_runs: int = Field(default=0, ge=0)


class Candidate(_Frozen):
    """A choice that was weighed: what it would cost, and why it was not taken."""

    choice: Choice
    peak_bytes: int = Field(ge=0)
    step_seconds: float = Field(ge=0)
    reason: str


class FrontierPoint(_Frozen):
    """A choice that nothing else that was weighed beats in both bytes and time."""

    choice: Choice
    peak_bytes: int = Field(ge=0)
    step_seconds: float = Field(ge=0)


class Rival(_Frozen):
    """Another choice that fits, and is predicted to be nearly as fast: so nearly that a trial on the
    device is to decide.

    Attributes:
        choice, ladder, prediction: as those of a plan.
        kernel_bytes: what a trial of it leaves in the process: kernels for its shapes.
    """

    choice: Choice
    ladder: tuple[Choice, ...] = ()
    prediction: Prediction
    kernel_bytes: int = Field(default=0, ge=0)


class TaskIdentity(_Frozen):
    """The parts of a task by which a plan recognises it."""

    name: str
    global_batch: int = Field(ge=1)
    parameters: int = Field(ge=0)
    trainable_parameters: int = Field(ge=1)
    ghost_batch: int | None = Field(default=None, ge=1)
    longest: int | None = Field(
        default=None, ge=1, description="length of the longest sample, where samples differ in it"
    )


class Plan(_Frozen):
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
        device: as torch names it; `"cuda"`: each rank its own.
        exchange: what ranks tell each other; see `Exchange`.
        kernels: which kernels compute the model; see `KernelChoices`.
        devices: of the ranks, if they are in one process.
        device_name: for people.
        budget_bytes: memory that training may use on each device; None: not limited.
        enforced: whether the allocator or the operating system holds the run to the budget.
        choice: the knobs.
        ladder: leaner choices, in order; the next one is taken when memory runs out.
        prediction: bytes and seconds of `choice`.
        rivals: choices that are predicted to be nearly as fast, the fastest first; see
            `Session.trial`.
        rejected: the other candidates.
        frontier: what memory buys in time, leanest first; with what does not fit the budget.
        notices: sentences that the user should read before the run.
    """

    version: Literal[1] = VERSION
    task: TaskIdentity
    parallel: Parallel = "single"
    shares: tuple[float, ...] = Field(default=(1.0,), min_length=1)
    balance: Balancing = "fixed"
    norms: Norms = "ghosts"
    exchange: Exchange = Exchange()
    kernels: KernelChoices = KernelChoices()
    device: str = Field(pattern=r"^(cpu|cuda(:\d+)?)$")
    devices: tuple[Annotated[str, Field(pattern=r"^(cpu|cuda:\d+)$")], ...] = ()
    device_name: str = ""
    budget_bytes: int | None = Field(default=None, ge=1)
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
        self._check_ranks()
        self._check_exchange()
        self._check_kernels()
        ghost = self.task.ghost_batch
        unit = min(ghost or 1, self.task.global_batch)
        rivals = tuple(rival.choice for rival in self.rivals)
        for place, choice in (
            ("choice", self.choice),
            *_numbered("ladder", self.ladder),
            *_numbered("rivals", rivals),
        ):
            if choice.micro_batch > self.task.global_batch:
                raise ValueError(
                    f"{place}.micro_batch is {choice.micro_batch}, more than the global batch of"
                    f" {self.task.global_batch}"
                )
            whole = choice.micro_batch % unit == 0 or choice.micro_batch == self.task.global_batch
            if not whole and self.norms == "ghosts":
                raise ValueError(
                    f"{place}.micro_batch is {choice.micro_batch}, which would cut a ghost batch of"
                    f" BatchNorm: make it a multiple of {ghost}"
                )
        return self

    def _check_ranks(self) -> None:
        if not all(math.isfinite(s) and s >= 0 for s in self.shares) or sum(self.shares) <= 0:
            raise ValueError(
                f"shares is {list(self.shares)}: give each rank a number of at least zero, and at"
                " least one of them a number above zero"
            )
        if self.parallel == "single" and self.num_ranks > 1:
            raise ValueError(
                f"shares has {self.num_ranks} numbers, but parallel is 'single', which is one rank"
            )
        if self.norms == "synchronised" and (
            self.parallel != "replicate" or self.task.ghost_batch is None
        ):
            raise ValueError(
                "norms is 'synchronised', which is for BatchNorm over several replicated ranks:"
                f" parallel is {self.parallel!r}"
            )
        if self.parallel == "shard" and any(
            choice.optimizer_states == "host" for choice in (self.choice, *self.ladder)
        ):
            raise ValueError(
                "optimizer_states is 'host' and parallel is 'shard', where states are divided over the"
                " ranks instead: leave one of them out"
            )
        if self.parallel == "in-process" and len(self.devices) != self.num_ranks:
            raise ValueError(
                f"devices names {len(self.devices)} devices for {self.num_ranks} shares: name one"
                " for each rank"
            )

    def _check_exchange(self) -> None:
        exchange, parallel = self.exchange, self.parallel
        precisions = [choice.precision for choice in (self.choice, *self.ladder)]
        masters = next((p for p in precisions if p.endswith("-weights")), None)
        if parallel == "ddp" and masters:
            raise ValueError(
                f"precision is {masters!r}, whose float32 gradients DistributedDataParallel does not"
                " see: make parallel 'replicate', or take another precision"
            )
        if self.norms == "synchronised" and not exchange.is_exact:
            raise ValueError(
                f"norms is 'synchronised' and exchange asks for {exchange.describe()}, but ranks then"
                " meet inside passes, which only the exact 'replicate' does: leave one of them out"
            )
        if exchange.is_exact:
            return
        told = exchange.describe()
        if parallel not in ("replicate", "ddp"):
            raise ValueError(
                f"exchange asks for {told}, but parallel is {parallel!r}: make it 'replicate', or"
                " leave exchange out"
            )
        if exchange.compress == "powersgd" and parallel != "ddp":
            raise ValueError(
                "exchange.compress is 'powersgd', which is a hook of DistributedDataParallel: make"
                " parallel 'ddp', or compress to 'bf16'"
            )
        if parallel == "ddp" and (exchange.every > 1 or exchange.stale):
            raise ValueError(
                f"exchange asks for {told}, but DistributedDataParallel adds up gradients in every"
                " step: make parallel 'replicate'"
            )
        if exchange.stale and (scaled := [p for p in precisions if p in ("fp16", "fp16-weights")]):
            raise ValueError(
                f"exchange.stale is true and precision is {scaled[0]!r}, whose loss scale may change"
                " before a late gradient is applied: take bf16"
            )
        if exchange.every == 1:
            return
        if masters:
            raise ValueError(
                f"exchange asks for {told}, and precision is {masters!r}, whose weights have float32"
                " copies that would have to be averaged too: take bf16 or fp16"
            )
        if self.balance == "measured":
            raise ValueError(
                f"exchange asks for {told}, and balance is 'measured', but ranks that take steps by"
                " themselves do not tell their times: make balance 'fixed'"
            )
        if min(self.shares) / sum(self.shares) * self.task.global_batch < 1:
            raise ValueError(
                f"exchange asks for {told}, and a global batch of {self.task.global_batch} with shares"
                f" {list(self.shares)} leaves a rank without samples: make the batch larger, or take"
                " fewer ranks"
            )

    def _check_kernels(self) -> None:
        kernels, is_cpu = self.kernels, self.device == "cpu"
        if kernels.autotune and is_cpu:
            raise ValueError(
                "kernels.autotune is true, but device is 'cpu', and what is tuned is cuDNN, of CUDA"
                " devices: make it false"
            )
        if kernels.compile and self.enforced and is_cpu:
            raise ValueError(
                "kernels.compile is true and enforced too, but on a CPU the compiler works in the"
                " process that trains, and what it takes would count against the budget: make one of"
                " them false"
            )

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.shares)

    @property
    def largest_share(self) -> int:
        """Samples of a full global batch that the rank with the largest share takes, at most; whole
        ghost batches."""
        unit = 1 if self.norms == "synchronised" else self.task.ghost_batch or 1
        units = -(-self.task.global_batch // unit)
        part = math.ceil(units * max(self.shares) / sum(self.shares) - 1e-9)
        return min(self.task.global_batch, max(1, part) * unit)

    @property
    def accumulation_steps(self) -> int:
        """Passes for a full global batch, on the rank that has most; the most there can be, where
        samples differ in length."""
        if self.norms == "synchronised":
            whole, rest = divmod(self.task.global_batch, self.task.ghost_batch or 1)
            # A rest of one sample joins its neighbour.
            return whole + (rest > 1 or (rest == 1 and whole == 0))
        return -(-self.largest_share // self.choice.micro_batch)

    def leaner(self) -> Plan | None:
        """The plan to take when this one ran out of memory: the next rung of the ladder, or below the
        last rung half the micro-batch. None: there is nothing leaner."""
        if self.ladder:
            return self.model_copy(update={"choice": self.ladder[0], "ladder": self.ladder[1:]})
        unit = min(self.task.ghost_batch or 1, self.task.global_batch)
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

    def _with(self, name: str, value: BaseModel, source: str) -> Plan:
        data = {**self.model_dump(mode="json"), name: value.model_dump(mode="json")}
        return Plan.from_json(json.dumps(data), source=source)

    def explain(self) -> list[tuple[str, str]]:
        """The plan as (what, how) lines that a person reads in ten seconds."""
        task, choice, told = self.task, self.choice, self.prediction
        ghost = f", BatchNorm over ghost batches of {task.ghost_batch}" if task.ghost_batch else ""
        if self.norms == "synchronised":
            ghost += ", each divided over the ranks"
        each = f"{self._told_shares()}, " if self.num_ranks > 1 else ""
        samples = f"{task.global_batch:,} samples per step"
        lines = [
            ("task", f"{task.name}, {task.trainable_parameters:,} trainable parameters"),
            ("device", self.device_name or self.device),
        ]
        if self.num_ranks > 1:
            lines.append(("ranks", f"{self.num_ranks}, {_PARALLEL[self.parallel]}"))
        if not self.exchange.is_exact:
            lines.append(("exchange", f"not exact: {self.exchange.describe()}"))
        lines += [
            ("global batch", f"{samples}: {each}{self._told_cut()}{ghost}"),
            ("precision", choice.precision),
            ("recompute", choice.recompute.describe()),
        ]
        if update := choice.describe_update():
            lines.append(("update", update))
        if kernels := self.kernels.describe():
            lines.append(("kernels", kernels))
        if self.budget_bytes is not None:
            held = "enforced" if self.enforced else "not enforced"
            lines.append(("budget", f"{format_bytes(self.budget_bytes)}, {held}"))
        if told is not None:
            part = (
                f" ({told.peak_bytes / self.budget_bytes:.0%} of the budget)"
                if self.budget_bytes
                else ""
            )
            lines.append(("predicted peak", f"{format_bytes(told.peak_bytes)}{part}"))
            spent = [f"{name} {format_seconds(time)}" for name, time in told.step_parts.items()]
            parts = f" ({', '.join(spent)})" if spent else ""
            lines.append(("predicted step", f"{format_seconds(told.step_seconds)}{parts}"))
            if told.seconds_method:
                lines.append(("times are", told.seconds_method))
        return lines

    def _told_cut(self) -> str:
        size, longest = self.choice.micro_batch, self.task.longest
        if self.accumulation_steps == 1:
            return "in one piece"
        if longest is None:
            return f"{self.accumulation_steps} micro-batches of {size}, accumulated exactly"
        return (
            f"micro-batches of a padded size of at most {size * longest:,} ({size} x {longest:,}, the"
            " longest), accumulated exactly"
        )

    def _told_shares(self) -> str:
        if len(set(self.shares)) == 1:
            return f"up to {self.largest_share:,} per rank"
        return "shares " + ":".join(f"{share:g}" for share in self.shares)

    def check_fits(self, identity: TaskIdentity) -> None:
        """Raises `InputError` if this plan was made for another task than `identity`."""
        differing = [
            f"{name} is {getattr(self.task, name)!r} in the plan and {getattr(identity, name)!r} in"
            " the task"
            for name in (
                "global_batch",
                "parameters",
                "trainable_parameters",
                "ghost_batch",
                "longest",
            )
            if getattr(self.task, name) != getattr(identity, name)
        ]
        if differing:
            raise InputError(
                f"the plan was made for another task ({self.task.name!r}): {'; '.join(differing)}."
                " Plan this task anew, or pass the task that the plan is for."
            )

    def to_json(self) -> str:
        """The plan as indented JSON text, which `from_json` reads back equal."""
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "the plan") -> Plan:
        """The plan written as `text`. Raises `InputError` with the place of every fault."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(
                f"{source} is not JSON: {error.msg} at line {error.lineno}, column {error.colno};"
                " mend it there, or plan the task anew."
            ) from None
        if not isinstance(data, dict):
            raise InputError(
                f"{source} holds {type(data).__name__} where a plan (an object) belongs: give a"
                " file that 'anybatch plan --out' wrote."
            )
        if data.get("version") != VERSION:
            raise InputError(
                f"{source} has version {data.get('version')!r}, and this anybatch reads version"
                f" {VERSION}: plan the task anew with this anybatch."
            )
        try:
            # JSON has no tuples, so it is read by JSON's rules rather than Python's.
            return cls.model_validate_json(text)
        except ValidationError as error:
            faults = "; ".join(_fault(item) for item in error.errors())
            raise InputError(
                f"{source} cannot be run: {faults}; mend it there, or plan the task anew."
            ) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to `path`, whole or not at all. Raises `InputError` if it cannot be."""
        target = Path(path)
        if target.is_dir():
            raise InputError(
                f"the plan cannot be written to {target}: it is a folder; name a file."
            )
        partial = target.with_name(f".{target.name}.partial")
        try:
            partial.write_text(self.to_json(), encoding="utf-8")
            partial.replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise InputError(
                f"the plan cannot be written to {target}: {error.strerror}; give a file in a folder"
                " that is there and has room."
            ) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan in the file `path`. Raises `InputError` if there is none, or it has faults."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not a text file"
            raise InputError(
                f"the plan {path} cannot be read: {why}; give a file that 'anybatch plan --out' wrote."
            ) from None
        return cls.from_json(text, source=f"the plan {path}")


_PARALLEL: dict[Parallel, str] = {
    "single": "one device",
    "replicate": "the whole model on each, gradients added up once per step",
    "ddp": "the whole model on each, by torch's DistributedDataParallel",
    "shard": "parameters, gradients and optimizer state divided over them",
    "in-process": "all in this process, the whole model on each",
}


def parse_precision(text: str) -> Precision:
    """The precision named `text`; O0 to O3 are understood. Raises `InputError` for another name."""
    known: tuple[str, ...] = Precision.__args__
    name = PRECISION_ALIASES.get(text.upper(), text.lower())
    if name not in known:
        raise InputError(
            f"precision is {text!r}: choose one of {', '.join(known)},"
            f" or {', '.join(PRECISION_ALIASES)}."
        )
    return name  # type: ignore[return-value]


def parse_parallel(text: str | None) -> Parallel | None:
    """The way of being parallel named `text`. Raises `InputError` for another name."""
    known: tuple[str, ...] = Parallel.__args__
    if text is not None and text not in known:
        raise InputError(f"parallel is {text!r}: choose one of {', '.join(known)}.")
    return text  # type: ignore[return-value]


def parse_norms(text: str | None) -> Norms | None:
    """The place of norms named `text`. Raises `InputError` for another name."""
    return _named("norms", text, Norms.__args__)


def parse_balance(text: str | None) -> Balancing | None:
    """The balance named `text`. Raises `InputError` for another name."""
    return _named("balance", text, Balancing.__args__)


def _named(what: str, text: str | None, known: tuple[str, ...]) -> Any:
    if text is not None and text not in known:
        raise InputError(f"{what} is {text!r}: choose one of {', '.join(known)}.")
    return text


def parse_exchange(compress: str | None, every: int, stale: bool) -> Exchange | None:
    """The exchange that options ask for; None: the exact one. Raises `InputError` for what there is
    not."""
    if compress is None and every == 1 and not stale:
        return None
    try:
        return Exchange.model_validate({"compress": compress, "every": every, "stale": stale})
    except ValidationError as error:
        faults = "; ".join(_fault(item) for item in error.errors())
        raise InputError(f"this exchange between ranks cannot be had: {faults}.") from None


def _numbered(name: str, choices: tuple[Choice, ...]) -> list[tuple[str, Choice]]:
    return [(f"{name}.{i}", choice) for i, choice in enumerate(choices)]


def _fault(item: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in item["loc"])
    message = str(item["msg"]).removeprefix("Value error, ")
    if not place:
        return message
    if item["type"] == "extra_forbidden":
        return f"{place} is not a field of a plan"
    if item["type"] == "missing":
        return f"{place} is missing"
    return f"{place} is {item['input']!r}: {message}"

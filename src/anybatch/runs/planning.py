"""Planning: makes a plan for a task and the available devices, on one rank or on several together.

A model that cannot be traced is measured instead, on the device of this process. With several ranks,
each describes its device to the others, and rank 0 makes the plan for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from anybatch.batch_rule import rule_text
from anybatch.compute.determinism import one_thread
from anybatch.compute.precision import check_available, precision_notices
from anybatch.data import is_map_style, largest_batch, num_samples_of
from anybatch.errors import InputError, NoPlanFits, setting, worded
from anybatch.estimate import Subject, allocator_notices, few_collections, subject_of
from anybatch.launch import find
from anybatch.machine import Device, Machine
from anybatch.parallel import exchange as tell
from anybatch.parallel import from_rank_0, measured_link
from anybatch.planner import (
    Remembered,
    Wishes,
    as_measured,
    budget_notices,
    default_ghost_notice,
    is_enforced,
    key_of,
    layouts_of,
    least_budget,
    make_plan,
)
from anybatch.plans import (
    Balancing,
    Choice,
    Exchange,
    Link,
    Norms,
    Parallel,
    Plan,
    Recompute,
    Sharding,
    parse_balance,
    parse_chunked_loss,
    parse_compile,
    parse_norms,
    parse_norms_of_task,
    parse_open_precision,
    parse_parallel,
    parse_recompute,
)
from anybatch.process.cuda_driver import context_bytes
from anybatch.process.process_memory import keep_freed_memory, return_freed_memory, use_one_heap
from anybatch.rank import REHEARSED_PASSES, can_rehearse
from anybatch.runs.session import Session, joined
from anybatch.task import JointLoss, Task, check_task
from anybatch.units import check_count, format_bytes

_MOST_REHEARSED_SECONDS = 30.0
"""A rehearsal that is predicted to take longer is run only on request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options that determine a plan; see `plan` for the attributes."""

    memory: str | int | None = None
    parallel: Parallel | None = None
    precision: str = "fp32"
    micro_batch: int | None = None
    recompute: str | Recompute | None = None
    chunked_loss: bool | None = None
    exchange: Exchange | None = None
    norms: Norms | None = None
    sharding: Sharding | None = None
    balance: Balancing | None = None
    compile: bool = False
    rehearsal: bool | None = None

    def given(self) -> dict[str, Any]:
        """Returns the options that differ from their defaults, by name."""
        pairs = ((field, getattr(self, field.name)) for field in fields(self))
        return {field.name: value for field, value in pairs if value != field.default}


def plan(
    task: Task,
    machine: Machine | None = None,
    *,
    memory: str | int | None = None,
    ranks: int | None = None,
    parallel: Parallel | None = None,
    precision: str = "fp32",
    micro_batch: int | None = None,
    recompute: str | Recompute | None = None,
    chunked_loss: bool | None = None,
    exchange: Exchange | None = None,
    norms: Norms | None = None,
    sharding: Sharding | None = None,
    balance: Balancing | None = None,
    compile: bool = False,
    frontier: bool = False,
    rehearsal: bool | None = None,
    watch: Callable[[str], None] | None = None,
) -> Plan:
    """Make the fastest plan for `task` that fits the memory budget.

    On this machine, the plan is rehearsed: a few passes over the first samples are run under the budget
    and undone. The plan then has the measured peak and time, and a choice that does not fit is replaced
    by the next leaner one. For a described machine, peak and time are predicted.

    The choice that a rehearsal confirmed is cached in the user's cache folder. Planning the same task
    again on the same machine only measures that choice, so it is fast and results in the same plan. If
    the choice no longer fits, or with `rehearsal=True`, the search starts again.

    If this process is one of several ranks (started by torchrun, for example) and `machine` is not
    given, all ranks must call this, and get the same plan, unless `parallel="single"`, which is for a
    process that trains by itself. The ranks measure the link between them, which takes at most about
    half a second. For ranks that are not running, tabulated link speeds are used.

    Args:
        task: task to train.
        machine: machine to plan for; None: this machine.
        memory: budget per device (`"10GiB"`, or bytes); None: most of the free memory, or the budget of
            `machine`.
        ranks: number of ranks to plan for; None: the ranks that are running, or one per device of
            `machine`.
        parallel: how the ranks share a step, see `plans.Parallel`; None: `"replicate"` or `"shard"`,
            whichever is predicted to be faster.
        precision: one of `plans.Precision`, or O0 to O3, which is never changed; or `"auto"`: whichever
            of fp32, tf32 and bf16 (fp16 if bf16 is not supported) is predicted to be fastest on the
            device, and the more exact one in case of a tie.
        micro_batch: samples per forward pass; None lets the planner choose.
        recompute: `"none"`, `"all"`, `"nested"`, module names separated by commas, or a `Recompute`;
            None lets the planner choose.
        chunked_loss: whether to compute the cross-entropy over the outputs of an `nn.Linear` in chunks,
            so that the full logits are never in memory; None lets the planner choose.
        exchange: what ranks communicate, if the exchange need not be exact; see `plans.Exchange`.
        norms: `"ghosts"`: each ghost batch of BatchNorm is computed by one rank; `"synchronised"`: each
            is divided over the ranks; None: `"ghosts"`, unless ranks would then be idle and
            `"synchronised"` is faster.
        sharding: how to divide the model over the ranks, see `Sharding`; implies a divided model. None:
            over all ranks, if the model is divided.
        balance: `"measured"`: shares follow the ranks' measured speed; `"fixed"`: they do not change;
            None: measured on GPUs, except with local steps.
        compile: compile the blocks of the model with `torch.compile`.
        frontier: also evaluate choices that cannot be the fastest, so that the plan contains the
            tradeoff between memory and time.
        rehearsal: whether to rehearse the plan. Not possible for a described `machine`, a divided
            model, a stream or a compiled model. True: also ignore the cached plan. None: rehearse if it
            is predicted to take at most 30 s, or if there is no prediction.
        watch: called with a short description of the current activity whenever it changes.

    Raises:
        NoPlanFits: not even the leanest plan fits.
        InputError: the task or an argument cannot be used.
        PeerFailed, PeerLost: another rank could not plan, or is lost.
    """
    check_task(task)
    options = PlanOptions(
        memory=memory,
        parallel=parallel,
        precision=precision,
        micro_batch=micro_batch,
        recompute=recompute,
        chunked_loss=chunked_loss,
        exchange=exchange,
        norms=norms,
        sharding=sharding,
        balance=balance,
        compile=compile,
        rehearsal=rehearsal,
    )
    if balance is None and exchange is not None and exchange.every > 1:
        # Ranks that take local steps do not communicate their times.
        options = replace(options, balance="fixed")
    _check(task, ranks, options)
    if machine is None and parallel != "single":
        check_started(ranks)
    return _Planning(task, machine, ranks, options, frontier, watch).plan()


@dataclass(eq=False)
class _Planning:
    """State of one call of `plan`; see `plan` for the arguments."""

    task: Task
    machine: Machine | None
    ranks: int | None
    options: PlanOptions
    frontier: bool
    watch: Callable[[str], None] | None
    remembered: Remembered | None = None  # on the rank that makes the plan

    def plan(self) -> Plan:
        """Returns the plan, rehearsed if possible. All ranks must call it."""
        task, options = self.task, self.options
        is_here = self.machine is None
        with joined() if is_here and options.parallel != "single" else nullcontext():
            self._together = is_here and are_several()
            self._devices = self._found_devices()
            self._link = None
            if self._together and options.parallel != "single":
                self._link = _measured_link(self.watch, held=options.memory is not None)
            # With the same number of threads as in the run, so that the prediction matches it.
            on_cpu = any(device.kind == "cpu" for device in self._devices)
            with one_thread() if task.grains is not None and on_cpu else nullcontext():
                made = self._made()
                if is_here and _is_rehearsed(task, made, options.rehearsal):
                    made = self._rehearsed(made)
                    if self.remembered is not None:
                        self.remembered.keep(made)
                else:
                    made = _returning(made)
        return made if options.exchange is None else made.exchanging(options.exchange)

    def _found_devices(self) -> Sequence[Device]:
        """Returns the devices to plan for."""
        options = self.options
        find_devices = partial(
            devices_of, self.machine, options.memory, self.ranks, options.parallel
        )
        found = find_devices()
        if self.machine is None and options.memory is None and any(one.limit for one in found):
            # What the code of the model imports is not free. Its errors are raised when planning.
            with suppress(Exception):
                subject_of(self.task)
            found = find_devices()
        return found

    def _rehearsed(self, made: Plan) -> Plan:
        """Returns `made` with measured values. A cached plan that no longer fits is made again."""
        if self.watch is not None:
            self.watch("rehearsal")
        if _is_remembered(made):
            found = _rehearsed_again(self.task, made)
            if found is not None:
                return found
            made = self._made(anew=True)
        return _rehearsed(self.task, made, is_fixed=self.options.micro_batch is not None)

    def _made(self, anew: bool = False) -> Plan:
        """Returns the plan that rank 0 makes or, unless `anew`, has cached."""
        try:
            one = partial(self._one, self._devices, anew)
            return from_rank_0(one) if self._together else one()
        except NoPlanFits as error:
            if self.machine is None and not self._together and self.options.rehearsal is not False:
                enough = partial(self._one, anew=True)
                raise _measured_refusal(error, self.task, self._devices, enough) from None
            raise

    def _one(self, devices: Sequence[Device], anew: bool) -> Plan:
        """Makes the plan for `devices` on this rank, or returns the cached one unless `anew`."""
        options, notices = self.options, self._notices(devices)
        leanest = min(devices, key=lambda device: device.budget_bytes)
        is_limited = options.memory is not None or bool(self.machine and self.machine.is_limited)
        with few_collections():
            subject = subject_of(self.task)
            wishes = self._wishes(subject)
            before: Plan | None = None
            if self.machine is None and options.rehearsal is None:
                # The budget is in `devices`; the key contains all other options.
                asked = asdict(replace(options, memory=None)) | {"vary": wishes.shapes_vary}
                if self._link is not None:  # measured anew each time: only its order of magnitude
                    asked["link"] = round(math.log10(self._link.bytes_per_second))
                key = key_of(subject, devices, is_limited, asked)
                passing = tuple(budget_notices(leanest, is_limited))
                self.remembered = Remembered(key, self.frontier, passing)
                if not anew:
                    before, is_complete = self.remembered.recall(leanest)
                    if before is not None and is_complete:
                        return before
            is_reproducible = self.task.grains is not None
            # Ranks that communicate inside passes require the exact exchange.
            exact = options.exchange is None or options.exchange.is_exact
            divisible = exact and not is_reproducible
            is_joint = isinstance(self.task.loss, JointLoss)
            made = make_plan(
                subject,
                leanest,
                wishes,
                limited=is_limited,
                layouts=layouts_of(
                    devices,
                    options.parallel,
                    "fixed" if is_reproducible else options.balance,
                    divisible=divisible,
                    link=self._link,
                    sharding=options.sharding,
                    exchange=options.exchange,
                ),
                norms=options.norms if divisible and not is_joint else "ghosts",
                notices=(
                    *default_ghost_notice(subject.identity.ghost_batch, self.task.ghost_batch),
                    *_size_notice(self.task),
                    *notices,
                    *_length_notice(subject, cut_by_size=not is_reproducible),
                    *(() if is_reproducible else subject.depends),
                ),
            )
            return made if before is None else _with_frontier(before, made)

    def _notices(self, devices: Sequence[Device]) -> Sequence[str]:
        """Returns the notices about the devices, without duplicates. Raises `InputError` if a device
        does not support the precision."""
        wanted = parse_open_precision(self.options.precision)
        found: dict[str, None] = {}
        if wanted is not None:
            for device in devices:
                check_available(wanted, device)
                found |= dict.fromkeys(precision_notices(wanted, device))
        if any(device.kind == "cuda" for device in devices):
            found |= dict.fromkeys(allocator_notices())
        return list(found)

    def _wishes(self, subject: Subject) -> Wishes:
        options, task = self.options, self.task
        chunked = False if task.grains is not None else parse_chunked_loss(options.chunked_loss)
        return Wishes(
            precision=parse_open_precision(options.precision),
            micro_batch=subject.identity.grain or options.micro_batch,
            recompute=parse_recompute(options.recompute, subject.blocks, subject.chains),
            chunked_loss=chunked,
            frontier=self.frontier,
            watch=self.watch,
            compile=options.compile,
            shapes_vary=task.lengths is not None or task.collate is not None,
        )


def _with_frontier(before: Plan, made: Plan) -> Plan:
    """Returns `before`, a cached plan, with the frontier of `made`, whose times are scaled by the
    correction factor of `before`."""
    both = ((before.predicted_seconds(p.choice), p.step_seconds) for p in made.frontier)
    made = made.slowed(next((then / now for then, now in both if then and now), 1.0))
    return before.model_copy(update={"frontier": made.frontier, "rejected": made.rejected})


def with_norms(task: Task, norms: str | None) -> tuple[Task, Norms | None]:
    """Returns `task`, with one ghost batch per step if `norms` is `"as-written"`, and where norms are
    computed, or None if that is left to the planner. Raises `InputError` for an unknown name."""
    where, as_written = parse_norms_of_task(norms)
    return replace(task, ghost_batch=largest_batch(task)) if as_written else task, where


def _check(task: Task, ranks: int | None, options: PlanOptions) -> None:
    """Raises `InputError` for an option that is invalid, or incompatible with the task."""
    parse_parallel(options.parallel)
    checked_ranks(ranks, options.parallel)
    parse_norms(options.norms)
    parse_balance(options.balance)
    parse_compile(options.compile)
    parallel = options.parallel
    if options.sharding is not None and parallel not in (None, "shard"):
        raise InputError(
            f"{setting('parallel')} is {parallel!r} and {worded('sharding', '--shard-over')} is given,"
            " which is for models that are divided over ranks: leave one of them out, or give 'shard'."
        )
    if task.grains is not None:
        _refuse(_not_reproducible(options), "the run is to be reproducible")
    if isinstance(task.loss, JointLoss):
        since = "the loss compares all samples of the global batch (JointLoss)"
        _refuse(_not_for_joint_loss(options), since)


def _refuse(options: Iterable[tuple[str, object, str]], since: str) -> None:
    """Raises `InputError` for the first of `options`, given as names, values and remedies."""
    for name, value, remedy in options:
        raise InputError(f"{name} is {value!r} and {since}, but {remedy}.")


def _not_reproducible(options: PlanOptions) -> Iterator[tuple[str, object, str]]:
    parallel, exchange = options.parallel, options.exchange
    if parallel not in (None, "single", "replicate"):
        remedy = "gradients are then added up in another order: leave it out, or take 'replicate'"
        yield "parallel", parallel, remedy
    if options.micro_batch is not None:
        remedy = f"a pass is a grain: set that of the task ({worded('anybatch.Grains', '--grain')})"
        yield "micro_batch", options.micro_batch, remedy
    if options.chunked_loss is True:
        yield "chunked_loss", True, "chunks round otherwise: leave it out"
    if exchange is not None and not exchange.is_exact:
        remedy = "the result then depends on the number of ranks: leave it out"
        yield "exchange", exchange.describe(), remedy
    if options.norms == "synchronised":
        yield "norms", options.norms, "its sums depend on the ranks: leave it out"
    if options.balance == "measured":
        yield "balance", options.balance, "ranks take whole parts: leave it out"
    if options.compile:
        yield "compile", options.compile, "compiled kernels round otherwise: leave it out"


def _not_for_joint_loss(options: PlanOptions) -> Iterator[tuple[str, object, str]]:
    exchange = options.exchange
    if exchange is not None and (exchange.every > 1 or exchange.stale):
        remedy = "samples are compared as the same weights encode them: leave it out"
        yield "exchange", exchange.describe(), remedy
    if options.norms == "synchronised":
        remedy = (
            "its ranks meet inside every pass: leave it out, ghost batches give the same result"
        )
        yield "norms", options.norms, remedy


def _is_rehearsed(task: Task, plan: Plan, wanted: bool | None) -> bool:
    """Returns whether to rehearse `plan`; for `wanted`, see `rehearsal` in `plan`. A stream is not
    rehearsed, since it may yield each sample only once."""
    elsewhere = plan.num_ranks != (dist.get_world_size() if are_several() else 1)
    if wanted is False or elsewhere:
        return False
    if not can_rehearse(plan) or not is_map_style(task.train):
        return False
    if wanted or plan.prediction is None or _is_remembered(plan):
        return True
    passes = min(REHEARSED_PASSES, plan.accumulation_steps)
    part = min(1.0, passes * plan.choice.micro_batch / plan.largest_amount)
    return plan.prediction.step_seconds * part <= _MOST_REHEARSED_SECONDS


def _returning(plan: Plan) -> Plan:
    """Returns `plan`, which is not rehearsed, with freed memory returned to the system if its budget is
    enforced on a CPU: the prediction counts memory in use, without the fragmentation that occurs if
    freed memory is kept."""
    prediction = plan.prediction
    if plan.device != "cpu" or not plan.enforced or prediction is None:
        return plan

    def returning(choice: Choice) -> Choice:
        return choice.model_copy(update={"freed_memory": "returned"})

    choice = returning(plan.choice)
    changes = {
        "choice": choice,
        "ladder": tuple(map(returning, plan.ladder)),
        "prediction": prediction.model_copy(update={"choice": choice}),
    }
    return plan.model_copy(update=changes)


def _measured_refusal(
    refused: NoPlanFits, task: Task, devices: Sequence[Device], make: Callable[..., Plan]
) -> NoPlanFits:
    """Returns `refused`, with the predicted least budget replaced by the measured one if a rehearsal
    under the predicted budget shows that more is needed."""
    least = refused.least_bytes
    if least is None or len(devices) > 1:
        return refused
    try:
        enough = make([replace(devices[0], budget_bytes=least)])
        if _is_rehearsed(task, enough, None):
            _rehearsed(task, enough, is_fixed=False)
    except NoPlanFits as measured:
        if measured.least_bytes is None:
            return refused
        needs, budget = measured.least_bytes, devices[0].budget_bytes
        _, line, predicted = str(refused).partition("\n")
        return NoPlanFits(
            f"no plan fits the budget of {format_bytes(budget)}: as measured on this device, give it at"
            f" least {least_budget(needs)}.{line}{predicted}",
            least_bytes=needs,
        )
    except Exception:  # an error of the user's code will be raised again, and reported, in the run
        return refused
    return refused


def _is_remembered(plan: Plan) -> bool:
    return plan.prediction is not None and plan.prediction.rehearsed


def _rehearsed_again(task: Task, plan: Plan) -> Plan | None:
    """Returns `plan`, a cached plan, with the time measured now and the larger of the cached and the
    measured peak, since the layout of the heap varies; None if it no longer fits."""
    with Session(replace(task, num_workers=0), plan) as session:
        found = session.rehearsed(is_fixed=True)
    if found is None or found.prediction is None or plan.prediction is None:
        return found
    now, before = found.prediction, plan.prediction
    if before.peak_bytes > now.peak_bytes:
        names = ("peak_bytes", "evaluation_peak_bytes", "by_kind")
        now = now.model_copy(update={name: getattr(before, name) for name in names})
    return found.model_copy(update={"ladder": plan.ladder, "prediction": now})


def _rehearsed(task: Task, plan: Plan, is_fixed: bool) -> Plan:
    """Returns the plan that passes over the first samples confirm. Samples are read in this process,
    since workers would take longer to start than the passes take to run.

    Raises `NoPlanFits`, and any error that the data, the model or the loss raises.
    """
    with Session(replace(task, num_workers=0), plan) as session:
        found = session.rehearsed(is_fixed)
    return _returning(plan) if found is None else as_measured(found, plan)


def serves_again(before: Plan, task: Task, ranks: int | None, options: PlanOptions) -> bool:
    """Returns whether `before`, a plan for `task`, has the same ranks, devices, budget and options as
    the one that `plan` would make with `options`. With several ranks, all of them must call it."""
    memory, compile = options.memory, options.compile
    devices = devices_of(None, memory, ranks, options.parallel)
    leanest = min(devices, key=lambda device: device.budget_bytes)
    most = leanest.budget_bytes if leanest.free_bytes is None else leanest.free_bytes
    return (
        before.task.name == task.name
        and before.task.global_batch == largest_batch(task)
        and before.task.batch_rule == rule_text(task.global_batch)
        and (before.task.grain, before.task.part) == _grains(task, before)
        and len(before.shares) == len(devices)
        and before.device_name == leanest.name
        and before.enforced == is_enforced(leanest, memory is not None)
        and (
            (before.budget_bytes or 0) <= most
            if memory is None
            else before.budget_bytes == leanest.budget_bytes
        )
        and parse_open_precision(options.precision) in (None, before.choice.precision)
        and before.kernels.compile == compile
        and (options.parallel is None or before.parallel == options.parallel)
        and before.exchange == (options.exchange or Exchange())
        and options.norms in (None, before.norms)
        and (options.sharding is None or before.sharding == options.sharding)
        and (options.balance is None or before.balance == options.balance)
        and options.micro_batch is None
        and options.recompute is None
        and options.chunked_loss in (None, bool(before.choice.chunked_head))
    )


def _grains(task: Task, before: Plan) -> tuple[int | None, int | None]:
    """Returns the sizes of grain and part of `task`, whose model is that of `before`. Raises
    `InputError` if they would cut ghost batches."""
    if task.grains is None:
        return None, None
    return task.grains.cut(largest_batch(task), before.task.ghost_batch)


def checked_ranks(ranks: int | None, parallel: Parallel | None) -> None:
    """Raises `InputError` if `ranks` is invalid, or contradicts `parallel`."""
    if ranks is None:
        return
    check_count(ranks, "ranks")
    if parallel == "single" and ranks > 1:
        raise InputError(
            f"{setting('ranks')} is {ranks}, but {setting('parallel')} is 'single', which is one rank:"
            " leave one of them out."
        )


def check_started(ranks: int | None, name: str = "ranks") -> None:
    """Raises `InputError` if a launcher other than anybatch has started a different number of ranks
    than the argument `name` requests. The number of ranks that anybatch started may have decreased."""
    member = find()
    if member is None or ranks is None or member.launcher == "anybatch":
        return
    if ranks not in (member.local_world_size, member.world_size):
        raise InputError(
            f"{name} is {ranks}, but this process is one of {member.world_size} that"
            f" {member.launcher} has started already: leave {name} out, or let {member.launcher} start"
            f" {ranks} on each machine."
        )


def default_ranks() -> int:
    """Returns the default number of ranks on this machine: one per CUDA device, or one."""
    return max(1, torch.cuda.device_count()) if torch.cuda.is_available() else 1


def devices_of(
    machine: Machine | None, memory: str | int | None, ranks: int | None, parallel: Parallel | None
) -> Sequence[Device]:
    """Returns the devices of the ranks to plan for, one per rank. If this process is one of several
    ranks and no machine is given, these are the devices of all of them, which must call it together."""
    if machine is None and are_several():
        return tell(_own_device(memory))
    if machine is not None:
        where = machine if memory is None else machine.with_budget(memory)
        if ranks is not None and len(where.devices) == 1:
            return where.devices * ranks
        if ranks is not None and ranks != len(where.devices):
            raise InputError(
                f"{setting('ranks')} is {ranks}, but the machine has {len(where.devices)} devices:"
                " leave ranks out, or describe as many devices."
            )
        if parallel == "single" and len(where.devices) > 1:
            raise InputError(
                f"the machine has {len(where.devices)} devices, but parallel is 'single', which is one"
                " rank: leave parallel out, or describe one device."
            )
        return where.devices
    here = Machine.here(memory).device
    if here.kind == "cpu":
        return _on_one_cpu(here, ranks or 1, divided=memory is None)
    count = ranks or (default_ranks() if parallel not in (None, "single") else 1)
    return [Machine.here(memory, f"cuda:{i}").device for i in range(count)]


def are_several() -> bool:
    """Returns whether this process belongs to a process group of several ranks."""
    return dist.is_initialized() and dist.get_world_size() > 1


def _on_one_cpu(device: Device, ranks: int, divided: bool) -> list[Device]:
    """Returns the CPU once per rank. If `divided`, its budget is divided among the ranks."""
    budget = device.budget_bytes // ranks if divided else device.budget_bytes
    return [device.divided(ranks, budget)] * ranks


def _own_device(memory: str | int | None) -> Device:
    """Returns this rank's device; for a CPU, with this rank's share of the free memory."""
    if torch.cuda.is_available():
        return Machine.here(memory, f"cuda:{torch.cuda.current_device()}").device
    member = find()
    neighbours = member.local_world_size if member else 1
    return _on_one_cpu(Machine.here(memory).device, neighbours, divided=memory is None)[0]


def _measured_link(watch: Callable[[str], None] | None, held: bool) -> Link | None:
    """Measures the link between the ranks; all of them must call it. `held`: a budget will be enforced
    in the run. Raises what `measured_link` raises."""
    if watch is not None:
        watch("measuring the exchange between ranks")
    if torch.cuda.is_available():
        index = torch.cuda.current_device()
        context_bytes(
            index
        )  # measured and cached before NCCL allocates its buffers, which are counted separately
        return measured_link(torch.device("cuda", index))
    if not held:
        return measured_link(torch.device("cpu"))
    # As in the run. Otherwise memory that gloo frees would stay mapped, and the run would use it in
    # addition to its budget.
    use_one_heap()
    return_freed_memory()
    try:
        return measured_link(torch.device("cpu"))
    finally:
        keep_freed_memory()


def _length_notice(subject: Subject, cut_by_size: bool) -> Iterator[str]:
    if subject.long:
        cut = (
            "Micro-batches are cut by padded size"
            if cut_by_size
            else "Grains of a reproducible run are cut by number"
        )
        yield (
            f"Samples differ in length: {subject.long}. {cut}, and bytes and seconds are predicted for"
            " the longest samples, which is the most they can be."
        )
    if subject.uneven:
        yield (
            "Samples differ in size, and no lengths are given: bytes and seconds are predicted for the"
            f" largest of {subject.uneven} that were looked at. Larger ones take more. lengths= tells"
            " them all beforehand, and less is padded."
        )


def _size_notice(task: Task) -> Iterator[str]:
    length = num_samples_of(task.train)
    size = task.global_batch
    if length is None or task.last != "keep" or not isinstance(size, int):
        return
    if length < size:
        yield (
            f"The global batch of {size:,} is larger than an epoch: each step takes all"
            f" {length:,} samples (last='wrap' would take them from several epochs)."
        )

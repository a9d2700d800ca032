"""Make: makes a plan for a task on a machine from the result of the search, with notices for the
user."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from anybatch.compute import DEFAULT_GHOST_BATCH
from anybatch.compute.joint import USES_PARAMETERS
from anybatch.compute.lm_loss import PLAIN_LOGITS
from anybatch.errors import AnybatchError, InputError, NoPlanFits, as_setting, setting, worded
from anybatch.estimate import Head, Subject, head_of, why_untraced
from anybatch.estimate.eager import eagerly
from anybatch.estimate.seconds import StepSeconds, meeting_seconds
from anybatch.machine import Device
from anybatch.planner.comparison import Option, prediction_of
from anybatch.planner.costs import Costs, Sizes, Untraceable
from anybatch.planner.kernel_rule import with_kernels
from anybatch.planner.ranks import (
    Layout,
    division_of,
    norms_that_meet,
    num_ghosts,
    num_idle,
    of_one_rank,
    pass_of,
)
from anybatch.planner.refusal import check_floor, enough, no_plan_fits
from anybatch.planner.search import Found, search
from anybatch.planner.setting import Setting, Wishes, budget_notices, is_enforced, setting_of
from anybatch.plans import LOSS_SCALED, Choice, Norms, Plan, Precision, Recompute, Rival
from anybatch.units import format_bytes, format_seconds

_PAYS = 1.05
"""Dividing ghost batches has to be predicted to be faster by this factor: the cost of synchronizing
norms is not known more precisely."""

_UNTRACED_MICRO_BATCH = 32


@eagerly()
def make_plan(
    subject: Subject,
    device: Device,
    wishes: Wishes,
    *,
    limited: bool,
    layouts: Sequence[Layout] = (Layout(),),
    norms: Norms | None = None,
    notices: tuple[str, ...] = (),
) -> Plan:
    """Make the plan for `subject` on `device`, or on several devices like it.

    Args:
        subject: the prepared task.
        device: device with its budget, which the plan respects in any case. With several ranks, the
            one with the least memory.
        wishes: what the user fixed.
        limited: whether the user named the budget, which is then to be enforced.
        layouts: layouts that the ranks may have; the first is preferred among equals.
        norms: where ghost batches of BatchNorm are computed; None: each on one rank, or divided
            over the ranks if some would have none and the step is faster so.
        notices: notices for the user from other sources.

    Raises:
        NoPlanFits: no plan fits.
        InputError: a wish cannot be met.
    """
    whole = layouts[0]

    def made(norms: Norms) -> Plan:
        # Norms are synchronized over ranks that hold the whole model each.
        open_to = layouts if norms == "ghosts" else [replace(whole, norms=norms)]
        plan = _make(subject, device, wishes, limited, open_to, notices)
        return with_kernels(plan, subject, wishes.compile, wishes.shapes_vary)

    if norms is not None:
        _check_norms(norms, subject, whole, wishes)
        return made(norms)
    refused: NoPlanFits | None = None
    plain: Plan | None = None
    try:
        plain = made("ghosts")
    except NoPlanFits as error:
        refused = error
    divided = _divided(subject, whole, wishes, plain, made)
    if divided is not None:
        return divided
    if plain is None:
        assert refused is not None
        raise refused
    return plain


def _divided(
    subject: Subject,
    layout: Layout,
    wishes: Wishes,
    plain: Plan | None,
    made: Callable[..., Plan],
) -> Plan | None:
    """The plan that divides ghost batches over the ranks, if that pays: in the plan that computes
    each on one rank (`plain`), some ranks are idle, or no rank has the memory (None)."""
    identity, idle = subject.identity, num_idle(subject, layout)
    able = layout.parallel == "replicate" and len(layout.shares) > 1 and identity.ghost_batch
    if not able or wishes.micro_batch is not None or (plain is not None and not idle):
        return None
    if plain is not None and plain.prediction is None:
        return None
    try:
        if not norms_that_meet(subject):
            return None
        divided = made("synchronised")
    except (NoPlanFits, InputError):
        return None
    if divided.prediction is None:
        return None
    seconds = divided.prediction.step_seconds
    if plain is None or plain.prediction is None:
        why = (
            "No rank has the memory for a ghost batch of BatchNorm"
            f" ({identity.ghost_batch} samples), so each is divided over the ranks, whose norms meet in"
            " every pass. The result is the same."
        )
    elif seconds * _PAYS > plain.prediction.step_seconds:
        return None
    else:
        count = num_ghosts(subject)
        why = (
            f"A global batch of {identity.global_batch} is {count}"
            f" ghost batch{'es' if count > 1 else ''} of BatchNorm ({identity.ghost_batch} samples),"
            f" fewer than there are ranks: {idle} of {len(layout.shares)} would be idle. So each ghost"
            " batch is divided over the ranks, whose norms meet in every pass: predicted"
            f" {format_seconds(seconds)} per step instead of"
            f" {format_seconds(plain.prediction.step_seconds)}. The result is the same."
        )
    return divided.model_copy(update={"notices": (*divided.notices, why)})


def _make(
    subject: Subject,
    device: Device,
    wishes: Wishes,
    limited: bool,
    layouts: Sequence[Layout],
    notices: tuple[str, ...],
) -> Plan:
    """The plan for the best of `layouts`."""
    whole, layout = subject, layouts[0]
    if layout.norms == "synchronised":
        # One ghost batch per pass: the micro-batch is a rank's part of it.
        wishes = replace(wishes, micro_batch=pass_of(whole, layout))
    else:
        _check(of_one_rank(subject, layout), wishes, subject.identity.global_batch)
    enforced = is_enforced(device, limited)
    remarks = [*notices, *budget_notices(device, limited)]
    given = {"task": whole.identity, "enforced": enforced}
    try:
        found = search(_costs(subject, device, wishes, enforced, layouts), wishes)
    except Untraceable as error:
        choice = _first_try(of_one_rank(subject, layout), wishes)
        why = why_untraced(error.cause, device.present)
        if not device.present:
            check_floor(whole, device, layouts, choice.precision, why)
        remarks += [why, unpredicted(choice.micro_batch)]
        return Plan(**given, **layout.fields(device), choice=choice, notices=tuple(remarks))
    layout = found.costs.setting.layout
    remarks += found.assumptions
    remarks += _comparison_notice(whole, found)
    remarks += faster_notice(found.choice, found.costs.sizes, found.costs.setting)
    if not found.fits and (layout.norms == "synchronised" or whole.identity.grain is not None):
        raise _no_pass_fits(found, layout)
    if not found.fits:
        remarks.append(
            f"The micro-batch of {found.choice.micro_batch} that was asked for is predicted to need"
            f" {format_bytes(found.option.footprint.peak.num_bytes)}, more than the budget of"
            f" {format_bytes(device.budget_bytes)}: expect it to be replaced when memory runs out."
        )
    if layout.parallel == "shard" and len(layouts) > 1:
        remarks.append(_why_divided(found))
    if layout.norms == "ghosts" and (idle := num_idle(whole, layout)):
        remarks.append(_idle_notice(whole, layout, idle))
    remarks += _exchange_notice(found.seconds, layout)
    return Plan(
        **given,
        **layout.fields(device),
        choice=found.choice,
        ladder=_rungs(found.option, layout),
        prediction=prediction_of(
            found.option, found.costs.setting, _meetings(whole, layout, found)
        ),
        rivals=tuple(
            Rival(
                choice=rival.choice,
                ladder=_rungs(rival, layout),
                prediction=prediction_of(rival, found.costs.setting),
            )
            for rival in (found.rivals if _can_try(layout) else ())
        ),
        rejected=found.rejected,
        frontier=found.frontier,
        notices=tuple(remarks),
    )


def _no_pass_fits(found: Found, layout: Layout) -> NoPlanFits:
    """The error for a micro-batch that follows from the task and does not fit."""
    size = found.choice.micro_batch
    if layout.norms == "synchronised":
        what = f"a pass of {size} samples, the part of a rank of one ghost batch,"
        more = ", more ranks, or a smaller ghost batch, which changes BatchNorm's result."
    else:
        what = f"a grain of {size} samples of the reproducible run"
        grains = worded("reproducible=anybatch.Grains(n)", "--grain")
        smaller = f", or smaller grains ({grains}), which change the result's bits"
        more = f"{smaller if size > 1 else ''}."
    return no_plan_fits(found.costs.setting.device, what, enough(found.costs, found.choice), more)


def _costs(
    subject: Subject,
    device: Device,
    wishes: Wishes,
    enforced: bool,
    layouts: Sequence[Layout],
) -> list[Costs]:
    """The costs of everything that the wishes leave open, in order of preference among equals: the
    more exact precision first, then states on the device before those in host memory, and a whole
    model before a divided one.

    Raises `InputError` if the model is to be divided and cannot be, and `Untraceable`.
    """
    one = of_one_rank(subject, layouts[0])
    ranks = list(_ranks(one, device, layouts))
    every: list[Costs] = []
    for precision in (wishes.precision,) if wishes.precision else precisions_of(device):
        try:
            setting = setting_of(one, device, precision, layouts[0], wishes.watch)
        except AnybatchError:
            raise
        except Exception as error:  # any exception of the user's code on fake tensors
            if every:  # only this precision fails, which was not requested
                continue
            first = Choice(micro_batch=1, evaluation_batch=1, precision=precision)
            raise Untraceable(first, error) from error
        here = [Costs(rank, replace(setting, layout=layout)) for layout, rank in ranks]
        if setting.pace.compares_parameters:
            here = [costs for costs in here if costs.subject.division is None]
            if not here:
                raise InputError(f"{USES_PARAMETERS}, or take parallel 'replicate'.")
        here += [on_host for costs in here if (on_host := _on_host(costs)) is not None]
        every += _in_chunks(here, wishes)
    return every


def _on_host(costs: Costs) -> Costs | None:
    """The same costs with the optimizer states in host memory, and for a divided model everything
    that it keeps; None if this is not supported."""
    subject, pace = costs.subject, costs.setting.pace
    if not pace.can_offload:
        return None
    if subject.division is None:
        return Costs(subject, costs.setting, "host")
    if costs.setting.precision in LOSS_SCALED:  # see `plans.checks`
        return None
    division = replace(subject.division, offload=True)
    return Costs(replace(subject, division=division), costs.setting, "host")


def _in_chunks(here: Sequence[Costs], wishes: Wishes) -> Iterator[Costs]:
    """`here`, and the same with the loss in chunks, as far as the wishes allow. Raises `InputError`
    if chunks were requested and are not possible, and `Untraceable`."""
    if wishes.chunked_loss is not True:
        yield from here
    if wishes.chunked_loss is False:
        return
    whole = [costs for costs in here if costs.subject.division is None]
    if len(whole) < len(here) and not wishes.chunked_loss:
        whole = [costs for costs in whole if costs.held_bytes(costs.sizes.smallest) <= costs.room]
    head = _head_of(whole[0], wishes) if whole else None
    if head is not None:
        for costs in whole:
            yield Costs(costs.subject, costs.setting, costs.states_on, head)
    elif wishes.chunked_loss:
        raise InputError(
            f"{worded('chunked_loss is True', '--chunked-loss is given')}, but no nn.Linear, nor the"
            " weight of an nn.Embedding, makes the"
            " logits of a large cross-entropy here (one of more than a million of them in a global"
            " batch, outside of what is compiled, of a model that each rank has whole): leave it out,"
            " or write the loss with anybatch.lm_loss."
        )


def _head_of(costs: Costs, wishes: Wishes) -> Head | None:
    """The head whose logits can be computed in chunks. Raises `Untraceable`."""
    if not costs.setting.pace.has_logits(costs.sizes.whole, PLAIN_LOGITS):
        return None
    choice = costs.choice(Recompute(), wishes.micro_batch or costs.sizes.low)
    costs.footprint(choice)
    head = head_of(costs.subject, choice, costs.setting.device)
    if head is None or not wishes.compile:
        return head
    compiled = [f"{block}." for block in costs.subject.blocks]
    is_apart = compiled and not any(f"{head.name}.".startswith(block) for block in compiled)
    return head if is_apart else None


def _ranks(
    one: Subject, device: Device, layouts: Sequence[Layout]
) -> Iterator[tuple[Layout, Subject]]:
    """Each of `layouts` that the model supports, with the part of a rank under it. Raises
    `InputError` if the only one is not supported."""
    for layout in layouts:
        if layout.parallel != "shard":
            yield layout, one
            continue
        try:
            division = division_of(one, layout, device)
        except InputError:
            if len(layouts) == 1:
                raise
        else:
            yield layout, replace(one, division=division)


def _comparison_notice(subject: Subject, found: Found) -> Iterator[str]:
    """A notice on the effect of a joint loss on a step that is split into micro-batches."""
    if subject.compared and found.choice.micro_batch < found.costs.sizes.whole:
        yield (
            f"The loss compares all {subject.compared:,} samples of a global batch, so each micro-batch"
            " is computed twice: encoded, and, once all are compared, again with gradient. Fetched"
            " samples wait in the host's memory meanwhile."
        )


def _idle_notice(subject: Subject, layout: Layout, idle: int) -> str:
    identity, ranks = subject.identity, len(layout.shares)
    units = f"{identity.global_batch:,} samples"
    if identity.num_parts is not None:
        units += f", {identity.num_parts} parts of a reproducible step (`Grains.parts`),"
    elif identity.ghost_batch:
        units += f", {num_ghosts(subject)} ghost batches of BatchNorm,"
    return (
        f"A global batch of {units} leaves {idle:,} of {ranks:,} ranks without work in every step:"
        f" {ranks - idle:,} would be as fast."
    )


def _exchange_notice(seconds: StepSeconds, layout: Layout) -> Iterator[str]:
    """A notice for whole models on ranks whose link was measured, and is so slow that one rank
    would finish a step sooner."""
    link = layout.link
    if link is None or not link.measured or layout.parallel != "replicate":
        return
    own = seconds.forward + seconds.backward + seconds.recompute
    alone = own * sum(layout.shares) / max(layout.shares) + seconds.update
    if seconds.total > alone:
        ways = worded("compression and local steps (exchange=)", "--compress and --local-steps")
        less = f"; {ways} send less, and change the result"
        yield (
            "The exchange between the ranks is predicted to take"
            f" {format_seconds(seconds.exchange)} of a step of {format_seconds(seconds.total)}, which"
            f" one rank alone would do in about {format_seconds(alone)}. A larger global batch has"
            f" fewer exchanges for as many samples{less if layout.exchange.is_exact else ''}."
        )


def _why_divided(found: Found) -> str:
    divided = "parameters, gradients and optimizer state are divided over the ranks"
    if found.otherwise is None:
        return f"The whole model with its state does not fit on each rank, so {divided}."
    return (
        "The model is divided, which is predicted to be faster than the whole of it on each rank:"
        f" {format_seconds(found.seconds.total)} per step instead of"
        f" {format_seconds(found.otherwise.total)}."
    )


def untraced_plan(
    subject: Subject, device: Device, wishes: Wishes, micro_batch: int, *, limited: bool
) -> Plan:
    """A plan on one device without traces and predictions; see `make_plan`."""
    layout = Layout()
    plan = Plan(
        task=subject.identity,
        enforced=is_enforced(device, limited),
        choice=_untraced(micro_batch, wishes),
        notices=tuple(budget_notices(device, limited)),
        **layout.fields(device),
    )
    return with_kernels(plan, subject, wishes.compile, wishes.shapes_vary)


def _first_try(subject: Subject, wishes: Wishes) -> Choice:
    """The first choice for a model that cannot be traced: a small micro-batch; the rest is left to
    the ladder."""
    identity = subject.identity
    unit = min(identity.unit, identity.global_batch)
    size = wishes.micro_batch or min(subject.whole, max(unit, _UNTRACED_MICRO_BATCH // unit * unit))
    return _untraced(size, wishes)


def _untraced(size: int, wishes: Wishes) -> Choice:
    return Choice(
        micro_batch=size,
        evaluation_batch=size,
        precision=wishes.precision or "fp32",
        recompute=wishes.recompute or Recompute(),
    )


def _rungs(option: Option, layout: Layout) -> tuple[Choice, ...]:
    """The choices of the ladder that can be run: where ghost batches are divided, a pass is one
    ghost batch."""
    if layout.norms == "ghosts":  # in a reproducible run, all have the grain
        return option.ladder
    return tuple(r for r in option.ladder if r.micro_batch == option.choice.micro_batch)


def _can_try(layout: Layout) -> bool:
    """Whether a rank can run passes without the others."""
    return layout.norms == "ghosts" and layout.parallel in ("single", "replicate")


def _meetings(subject: Subject, layout: Layout, found: Found) -> float:
    """Seconds of a step that ranks spend synchronizing norms."""
    if layout.norms == "ghosts":
        return 0.0
    count = norms_that_meet(subject) or 0
    return meeting_seconds(
        count, num_ghosts(subject), found.choice.recompute, layout.link, len(layout.shares)
    )


def default_ghost_notice(subject_ghost: int | None, asked: int | None) -> tuple[str, ...]:
    """A notice on BatchNorm, if the task does not set its batch."""
    if subject_ghost is None or asked is not None:
        return ()
    notice = (
        f"The model has BatchNorm: it normalises over ghost batches of {DEFAULT_GHOST_BATCH} samples"
        " (set ghost_batch in the task to choose), so the result does not depend on the plan."
    )
    return (notice,)


def _check(subject: Subject, wishes: Wishes, whole: int) -> None:
    """Raises `InputError` for a micro-batch that is invalid for the rank with the largest part of
    the global batch of `whole` samples."""
    size, identity = wishes.micro_batch, subject.identity
    if size is None:
        return
    unit = min(identity.ghost_batch or 1, identity.global_batch)
    if size < 1 or size > identity.global_batch:
        most = identity.global_batch
        part = "" if most == whole else f", of which a rank has {most} at most"
        raise InputError(
            f"{setting('micro_batch')} is {size}, and the global batch {whole}{part}: give a whole"
            f" number from 1 to {most}, or leave it out."
        )
    if size % unit and size != identity.global_batch:
        raise InputError(
            f"{setting('micro_batch')} is {size}, which would cut a ghost batch of BatchNorm ({unit}"
            f" samples): give a multiple of {unit}."
        )


def _check_norms(norms: Norms, subject: Subject, layout: Layout, wishes: Wishes) -> None:
    if norms == "ghosts":
        return
    if layout.parallel != "replicate" or subject.identity.ghost_batch is None:
        raise InputError(
            "norms is 'synchronised', which is for BatchNorm over several ranks that hold the whole"
            f" model each: parallel is {layout.parallel!r}, and the model has"
            f" {'BatchNorm' if subject.identity.ghost_batch else 'no BatchNorm'}. Leave norms out."
        )
    if wishes.micro_batch is not None:
        raise InputError(
            f"{setting('micro_batch')} is {wishes.micro_batch} and {setting('norms')} is"
            " 'synchronised', where a pass is one ghost batch: leave one of them out, and set"
            " ghost_batch in the task."
        )


def unpredicted(micro_batch: int) -> str:
    """The notice for a plan without predictions of bytes and seconds."""
    return f"Nothing is predicted: the run begins with a micro-batch of {micro_batch}."


def as_measured(found: Plan, before: Plan) -> Plan:
    """The plan `found`, from passes over real samples, in place of the plan `before`, which
    predicts nothing; a notice says so."""
    remark = (
        "Bytes and seconds are measured instead, in passes over the first samples on this device."
        if notice == unpredicted(before.choice.micro_batch)
        else notice
        for notice in before.notices
    )
    return found.model_copy(update={"notices": tuple(remark)})


_WORTH_SAYING = 1.5
"""Half precision has to be faster by this factor to be mentioned."""


def precisions_of(device: Device) -> tuple[Precision, ...]:
    """The precisions that `device` supports, the most exact first. Half precision means autocast;
    float16, whose loss has to be scaled, is included only if there is no bfloat16."""
    found: list[Precision] = ["fp32"]
    if device.has("tf32"):
        found.append("tf32")
    if device.has("bf16"):
        found.append("bf16")
    elif device.kind == "cuda":
        found.append("fp16")
    return tuple(found)


def faster_notice(choice: Choice, sizes: Sizes, setting: Setting) -> Iterator[str]:
    """A notice for a `choice` in float32 on a device that is much faster in bfloat16."""
    if choice.precision not in ("fp32", "tf32") or not setting.device.has("bf16"):
        return
    now, half = (
        pace.step(
            choice.micro_batch, choice.recompute, sizes.whole, states_on=choice.optimizer_states
        ).total
        for pace in (setting.pace, setting.pace.in_half())
    )
    if now > _WORTH_SAYING * half:
        yield (
            f"In bf16 a step would take about {half / now:.0%} of the time on this device, and less"
            f" memory. Ask for it with {as_setting('precision', 'bf16')}: it rounds differently, so it"
            " is never chosen unasked."
        )

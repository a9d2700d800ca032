"""Description: a plan as text or as a table."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from anybatch.batch_rule import Ramp, in_words, read_rule, tokens_of
from anybatch.plans.ranks import Parallel
from anybatch.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from anybatch.plans.plan import Plan

_PARALLEL: dict[Parallel, str] = {
    "single": "one device",
    "replicate": "replicated: the whole model on each, gradients summed once per step",
    "shard": "sharded",
}


def explained(plan: Plan) -> list[tuple[str, str]]:
    """`plan` as (what, how) lines that give a quick overview."""
    task, choice, prediction = plan.task, plan.choice, plan.prediction
    ghost = f"; BatchNorm over ghost batches of {task.ghost_batch}" if task.ghost_batch else ""
    if plan.norms == "synchronised":
        ghost += ", each divided over the ranks"
    each = f"{_shares(plan)}, " if plan.num_ranks > 1 else ""
    samples = f"{task.global_batch:,} samples per step"
    if task.batch_rule:
        rule = read_rule(task.batch_rule)
        most = f", at most {task.global_batch:,} samples" if tokens_of(rule) else ""
        samples = f"{in_words(rule)}{most}"
    lines = [
        ("task", f"{task.name}, {task.trainable_parameters:,} trainable parameters"),
        ("device", plan.device_name or plan.device),
    ]
    if plan.num_ranks > 1:
        lines.append(("ranks", f"{plan.num_ranks}, {_PARALLEL[plan.parallel]}{_divided(plan)}"))
    if not plan.exchange.is_exact:
        lines.append(("exchange", f"not exact: {plan.exchange.describe()}"))
    lines.append(("global batch", f"{samples}: {each}{_cut(plan)}{ghost}"))
    if ramp := _ramp(plan):
        lines.append(("smaller steps", ramp))
    if task.grain and task.part:
        lines.append(("reproducible", _grains(task.grain, task.part, task.num_parts or 1)))
    lines += [
        ("precision", _precision(plan)),
        ("recompute", choice.recompute.describe(named=True)),
    ]
    if choice.chunked_head:
        lines.append(
            ("loss", f"chunked: the logits of {choice.chunked_head} are never whole in memory")
        )
    if update := choice.describe_update():
        lines.append(("update", update))
    if choice.freed_memory == "returned":
        lines.append(("freed memory", "returned to the operating system: leaner and slower"))
    if kernels := plan.kernels.describe():
        lines.append(("kernels", kernels))
    if plan.budget_bytes is not None:
        held = "enforced" if plan.enforced else "not enforced"
        planned = format_bytes(plan.budget_bytes - plan.reserve_bytes)
        reserve = f"{plan.reserve_bytes / plan.budget_bytes:.1%} in reserve"
        kept = f"; {planned} planned for, {reserve}" if plan.reserve_bytes else ""
        lines.append(("budget", f"{format_bytes(plan.budget_bytes)}, {held}{kept}"))
    if prediction is not None:
        part = (
            f" ({prediction.peak_bytes / plan.budget_bytes:.0%} of the budget)"
            if plan.budget_bytes
            else ""
        )
        found = "rehearsed" if prediction.rehearsed else "predicted"
        lines.append((f"{found} peak", f"{format_bytes(prediction.peak_bytes)}{part}"))
        spent = [f"{name} {format_seconds(time)}" for name, time in prediction.step_parts.items()]
        parts = f" ({', '.join(spent)})" if spent else ""
        lines.append((f"{found} step", f"{format_seconds(prediction.step_seconds)}{parts}"))
        if prediction.seconds_method:
            lines.append(("timing", prediction.seconds_method))
        if plan.link is not None and "exchange of gradients" in prediction.step_parts:
            lines.append(("link", plan.link.describe(plan.num_ranks)))
    return lines


def in_one_line(plan: Plan) -> str:
    """One-line summary of `plan` for its `repr`: the task, the choice, and the predicted cost."""
    device = plan.device_name or plan.device
    where = f"{plan.num_ranks} ranks of {device}" if plan.num_ranks > 1 else device
    rule = plan.task.batch_rule
    batch = in_words(read_rule(rule)) if rule else f"{plan.task.global_batch:,}"
    whose = f"{plan.task.name}: global batch {batch}"
    cost = "nothing predicted"
    if plan.prediction is not None:
        budget = f" of {format_bytes(plan.budget_bytes)}" if plan.budget_bytes else ""
        step = format_seconds(plan.prediction.step_seconds)
        cost = f"predicted peak {format_bytes(plan.prediction.peak_bytes)}{budget}, step {step}"
    line = f"{whose}, {plan.choice.describe()}, on {where}; {cost}"
    return " ".join(line.split())  # names may have line breaks


def as_table(plan: Plan) -> str:
    """`plan` as an HTML table for a notebook."""
    left = "style='text-align: left; vertical-align: top'"
    rows = "".join(
        f"<tr><th scope='row' {left}>{escape(what)}</th><td {left}>{escape(how)}</td></tr>"
        for what, how in explained(plan)
    )
    return f"<table><tbody>{rows}</tbody></table>"


def _divided(plan: Plan) -> str:
    return f": {plan.sharding.describe(plan.num_ranks)}" if plan.parallel == "shard" else ""


def _cut(plan: Plan) -> str:
    size, longest = plan.choice.micro_batch, plan.task.longest
    if plan.accumulation_steps == 1:
        return "in one piece"
    if longest is None:
        return f"{plan.accumulation_steps} micro-batches of {size}, accumulated exactly"
    return (
        f"micro-batches of a padded size of at most {size * longest:,} ({size} x {longest:,}, the"
        " longest), accumulated exactly"
    )


def _ramp(plan: Plan) -> str:
    """How the steps of each size run, if the global batch is a `Ramp` in samples."""
    rule, size = read_rule(plan.task.batch_rule or "1"), plan.choice.micro_batch
    if not isinstance(rule, Ramp) or tokens_of(rule) or plan.norms == "synchronised":
        return ""
    ends = [n for n in (rule.start, rule.stop) if isinstance(n, int)]
    least = min(ends)
    each = "of the largest share" if plan.num_ranks > 1 else "of a step"
    return (
        f"a micro-batch for each {size:,} samples {each}: {plan.passes_for(least):,} at {least:,}"
        f" samples, {plan.accumulation_steps:,} at {max(ends):,}"
    )


def _grains(grain: int, part: int, parts: int) -> str:
    each = "of one grain each" if part == grain else f"of {part // grain} grains each"
    return (
        f"bitwise, on any number of ranks: grains of {grain} in {parts} parts {each}, summed in a fixed"
        " order"
    )


def _precision(plan: Plan) -> str:
    """The precision, and the dtypes of parameters that stay as the model has them, unless float32."""
    name, dtypes = plan.choice.precision, plan.task.dtypes
    if dtypes in ((), ("float32",)) or name.endswith(("-weights", "-pure")):
        return name
    return f"{name}; parameters stay as the model has them: {' and '.join(dtypes)}"


def _shares(plan: Plan) -> str:
    if len(set(plan.shares)) == 1:
        return f"up to {plan.largest_share:,} per rank"
    return "shares " + ":".join(f"{share:g}" for share in plan.shares)

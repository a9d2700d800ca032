"""The noise scale in words, as the terminal and the page tell it; and why there is none."""

from __future__ import annotations

from collections.abc import Sequence

from anybatch.insight.cost import Batch, fastest, fixed_part
from anybatch.insight.noise import LEAST_STEPS, NoiseScale, latest, mean_over, windows
from anybatch.insight.noise_series import Block, total
from anybatch.plans import Plan
from anybatch.units import format_count

ASSUMPTIONS = (
    "SGD on a nearly quadratic loss, the learning rate tuned to each batch (McCandlish et al. 2018);"
    " for Adam it is a rough guide"
)

_FAR = 10  # times the noise scale, or a part of it: then a batch is told to be far off
_WORTH_CHANGING = 0.05  # of the time


def lines(plan: Plan, blocks: Sequence[Block]) -> list[tuple[str, str]]:
    """(what, how) lines about the batch of a run under `plan`; none where nothing was measured."""
    now, course = latest(blocks), windows(blocks)
    if now is None:
        return []
    of_late = blocks[-max(1, len(blocks) // 4) :]
    size = mean_batch(plan, of_late)
    told = [
        ("noise scale", f"{described(now)}, over steps {now.first_step:,} to {now.last_step:,}")
    ]
    mean = mean_over(course, mean_batch(plan, blocks))
    if len(course) > 1 and mean is not None:
        told.append(
            ("whole run", f"about {_samples(mean)} on average; {described(course[0])} at first")
        )
    if now.samples is None or now.high is None:
        told.append((f"batch of {format_count(size)}", _at_least(size, now.low)))
    else:
        told.append((f"batch of {format_count(size)}", verdict(Batch(size, now.samples))))
        told += _others(Batch(size, now.samples), plan)
    return [*told, ("assuming", ASSUMPTIONS)]


def mean_batch(plan: Plan, blocks: Sequence[Block]) -> int:
    """Samples of a step under `plan`; where steps differ in size, of a mean one of `blocks`."""
    if not plan.task.batch_rule or not blocks:
        return plan.task.global_batch
    whole = total(blocks)
    return max(1, round(whole.samples / whole.num_steps))


def described(scale: NoiseScale) -> str:
    """`820 samples (640 to 1,100)`, or what is known of it."""
    if scale.samples is None or scale.high is None:
        if scale.low < 0.5:
            return "not known: gradient and noise cannot be told apart in so few steps"
        return f"at least {_samples(scale.low)}"
    return f"{_samples(scale.samples)} ({_figure(scale.low)} to {_figure(scale.high)})"


def verdict(batch: Batch) -> str:
    """What a batch costs, and whether a larger or a smaller one is the better."""
    cost = f"{batch.steps:.3g}x the minimum of steps, {batch.samples:.3g}x the minimum of samples"
    if batch.size > _FAR * batch.scale:
        return f"{cost}: a larger one would hardly save a step"
    if batch.size * _FAR < batch.scale:
        return f"{cost}: a larger one would save steps at hardly any cost in samples"
    return cost


def unmeasured(plan: Plan, num_steps: int) -> str:
    """Why a run of so many steps under `plan` has no noise scale, and how to get it, in a sentence."""
    ranks, exchange = plan.num_ranks, plan.exchange
    if plan.task.longest is not None:
        return (
            "The noise scale was not measured: samples of a step are in order of their length, so its"
            " first micro-batch is not like the others; without lengths in the task it is."
        )
    if plan.parallel == "shard":
        return (
            "The noise scale was not measured: no rank holds the gradient of its own samples where the"
            " model is divided; with --parallel replicate it is, if that fits."
        )
    if exchange.every > 1 or exchange.stale:
        return (
            "The noise scale was not measured: with local steps or stale gradients no step has the"
            " gradient of its global batch; with the exact exchange it is."
        )
    if plan.norms == "synchronised":
        return (
            "The noise scale was not measured: ranks share ghost batches of BatchNorm, so none has a"
            " gradient of its own; with a smaller ghost batch it is."
        )
    passes = plan.largest_amount / plan.choice.micro_batch
    if passes <= 1 and ranks == 1:
        half = max(1, plan.choice.micro_batch // 2)
        return (
            "The noise scale was not measured: a step is one micro-batch, which has nothing to be"
            f" compared with; with --micro-batch {half} it is."
        )
    if num_steps < LEAST_STEPS:
        return (
            f"The noise scale was not measured: it takes {LEAST_STEPS} steps at the least, and there"
            f" were {num_steps}."
        )
    return "The noise scale was not measured: its figures are not in the log of this run."


def _at_least(size: int, low: float) -> str:
    if low < 0.5:
        return "not known what it costs: train longer, or at a larger batch, to know"
    batch = Batch(size, low)
    return (
        f"at least {batch.steps:.3g}x the minimum of steps, at most {batch.samples:.3g}x the minimum"
        " of samples"
    )


def _others(batch: Batch, plan: Plan) -> list[tuple[str, str]]:
    """What other batches would do for the same progress."""
    told = []
    for name, factor in (("half of it", 0.5), ("twice as much", 2.0)):
        other = Batch(batch.size * factor, batch.scale)
        steps, samples = other.steps / batch.steps - 1, other.samples / batch.samples - 1
        told.append((name, f"{steps:+.0%} steps, {samples:+.0%} samples for the same progress"))
    fixed = fixed_part(plan.prediction)
    if fixed is not None:
        # Below one micro-batch of each rank a device is not kept busy, and time is not a straight line.
        least = min(batch.size, plan.choice.micro_batch * plan.num_ranks)
        best = max(least, fastest(batch, fixed))
        saved = 1 - batch.seconds(best, fixed)
        if saved > _WORTH_CHANGING:
            how = (
                f"about {format_count(_round(best))}, {saved:.0%} less time for the same progress"
                f" ({fixed:.0%} of a step is predicted to take as long at any batch)"
            )
            told.append(("fastest here", how))
    return told


def _samples(value: float) -> str:
    return f"{_figure(value)} sample{'' if _round(value) == 1 else 's'}"


def _figure(value: float) -> str:
    return format_count(_round(value)) if value >= 10 else f"{value:.2g}"


def _round(value: float) -> int:
    """To two digits: more are not known."""
    return round(float(f"{value:.2g}"))

"""Text about the noise scale for the terminal and the report, or about why it was not measured.

The cost of a batch B at a noise scale N (McCandlish et al. 2018, section 2.3):

    steps   = minimum steps   * (1 + N / B)        samples = minimum samples * (1 + B / N)

At B = N, both are twice their minimum. Far above N, a larger batch saves almost no steps; far below N,
it saves steps and costs almost no additional samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from anybatch.errors import as_setting
from anybatch.insight.noise import LEAST_STEPS, NoiseScale, latest, windows
from anybatch.insight.noise_series import Block, in_unit_of_batch, total
from anybatch.plans import Plan
from anybatch.units import format_count

ASSUMPTIONS = (
    "SGD on a nearly quadratic loss, the learning rate tuned to each batch (McCandlish et al. 2018);"
    " for Adam it is a rough guide"
)

_FAR = 10  # factor above or below the noise scale from which a batch is reported as far off


def lines(plan: Plan, blocks: Sequence[Block]) -> list[tuple[str, str]]:
    """Returns lines (label, text) about the batch of a run under `plan`, in samples, or in tokens if
    its global batch is in tokens; empty if the noise scale was not measured."""
    blocks, unit = in_unit_of_batch(blocks)
    now, course = latest(blocks), windows(blocks)
    if now is None:
        return []
    of_late = blocks[-max(1, len(blocks) // 4) :]
    size = mean_batch(plan, of_late)
    during = f"over steps {now.first_step:,} to {now.last_step:,}"
    rows = [("noise scale", f"{described(now, unit)}, {during}")]
    if len(course) > 1:
        rows.append(("at first", described(course[0], unit)))
    batch = f"batch of {format_count(size)}"
    if now.samples is None or now.high is None:
        rows.append((batch, _at_least(size, now.low, unit)))
    else:
        rows.append((batch, _verdict(size, now.samples, unit)))
        rows += _others(size, now.samples, unit)
    return [*rows, ("assuming", ASSUMPTIONS)]


def mean_batch(plan: Plan, blocks: Sequence[Block]) -> int:
    """Returns the batch size under `plan`, in the unit of `blocks`; the mean if it varies."""
    if not plan.task.batch_rule or not blocks:
        return plan.task.global_batch
    whole = total(blocks)
    return max(1, round(whole.samples / whole.num_steps))


def described(scale: NoiseScale, unit: str = "samples") -> str:
    """Returns text such as `820 samples (640 to 1,100)`, a lower bound, or that it is not known."""
    if scale.samples is None or scale.high is None:
        if scale.low < 0.5:
            return "not known: gradient and noise cannot be told apart in so few steps"
        return f"at least {_amount(scale.low, unit)}"
    return f"{_amount(scale.samples, unit)} ({_figure(scale.low)} to {_figure(scale.high)})"


def steps_of(batch: float, scale: float) -> float:
    """Returns the steps for the same progress, as a multiple of the minimum over all batch sizes."""
    return 1 + scale / batch


def samples_of(batch: float, scale: float) -> float:
    """Returns the samples for the same progress, as a multiple of the minimum; infinite without
    noise."""
    return 1 + batch / scale if scale else math.inf


def _verdict(batch: int, scale: float, unit: str) -> str:
    steps, samples = steps_of(batch, scale), samples_of(batch, scale)
    if not scale:
        return "the minimum of steps: a larger one would not save any"
    cost = f"{steps:.3g}x the minimum of steps, {samples:.3g}x the minimum of {unit}"
    if batch > _FAR * scale:
        return f"{cost}: a larger one would hardly save a step"
    if batch * _FAR < scale:
        return f"{cost}: a larger one would save steps at hardly any cost in {unit}"
    return cost


def unmeasured(plan: Plan, num_steps: int) -> str:
    """Returns a sentence on why a run of `num_steps` steps under `plan` has no noise scale, and how to
    measure it."""
    passes, half = plan.largest_amount / plan.choice.micro_batch, plan.choice.micro_batch // 2
    if plan.task.longest is not None and plan.task.grain is not None:
        why = (
            "the grains of a reproducible step are in order of the length of its samples, so the first"
            " is not like the others; without lengths in the task it is"
        )
    elif plan.parallel == "shard":
        why = (
            "no rank holds the gradient of its own samples where the model is divided; with"
            f" {as_setting('parallel', 'replicate')} it is, if that fits"
        )
    elif plan.exchange.every > 1 or plan.exchange.stale:
        why = (
            "with local steps or stale gradients no step has the gradient of its global batch; with the"
            " exact exchange it is"
        )
    elif plan.norms == "synchronised":
        why = (
            "ranks share ghost batches of BatchNorm, so none has a gradient of its own; with a smaller"
            " ghost batch it is"
        )
    elif passes <= 1 and plan.num_ranks == 1:
        why = (
            "a step is one micro-batch, which has nothing to be compared with; with"
            f" {as_setting('micro_batch', max(1, half))} it is"
        )
    elif num_steps < LEAST_STEPS:
        why = f"it takes {LEAST_STEPS} steps at the least, and there were {num_steps}"
    else:
        why = "its figures are not in the log of this run"
    return f"The noise scale was not measured: {why}."


def _at_least(size: int, low: float, unit: str) -> str:
    if low < 0.5:
        return "not known what it costs: train longer, or at a larger batch, to know"
    steps, samples = steps_of(size, low), samples_of(size, low)
    return (
        f"at least {steps:.3g}x the minimum of steps, at most {samples:.3g}x the minimum of {unit}"
    )


def _others(batch: int, scale: float, unit: str) -> list[tuple[str, str]]:
    """Returns lines (label, text) on the cost of other batches for the same progress."""
    rows = []
    for name, factor in (("half of it", 0.5), ("twice as much", 2.0)):
        steps = steps_of(batch * factor, scale) / steps_of(batch, scale) - 1
        samples = samples_of(batch * factor, scale) / samples_of(batch, scale) if scale else factor
        samples -= 1
        rows.append((name, f"{steps:+.0%} steps, {samples:+.0%} {unit} for the same progress"))
    return rows


def _amount(value: float, unit: str) -> str:
    return f"{_figure(value)} {unit.removesuffix('s') if _round(value) == 1 else unit}"


def _figure(value: float) -> str:
    return format_count(_round(value)) if value >= 10 else f"{value:.2g}"


def _round(value: float) -> int:
    """Rounds to two significant digits, as precise as the estimate."""
    return round(float(f"{value:.2g}"))

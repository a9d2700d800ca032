"""Rescale: converts training settings to another global batch size.

Gradient accumulation makes any global batch possible, but hyperparameters are tuned at one batch size
and are valid only there. When the batch changes, the rules here preserve the behavior over the same
number of *samples*. With `k` times the batch, `k` steps become one:

    SGD             k steps lr * g             =  one step (k lr) * g     while g is constant
    momentum m      half-life in samples       =  m ** k
    Adam            noise dominates v, and v decreases as 1 / batch, so a step with k times the batch
                    is sqrt(k) times as long; it has to be k times as long:  lr * sqrt(k)
    L2 in the loss  independent of the batch
    decoupled       (1 - lr * decay) ** k      =  1 - lr' * decay'
    warm-up         samples                    =  steps / k

None of this is applied automatically: the plan never changes the batch, and the batch never changes
the settings.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from anybatch.errors import InputError, listed
from anybatch.units import format_count

Averages = Literal["published", "half-life", "kept"]
"""How to convert the exponential averages, momentum and betas:

`published`: as in the source of the learning rate rule. SGD keeps its momentum, and Adam's betas become
`1 - k (1 - beta)`, which is defined only for `k (1 - beta) < 1`. `half-life`: they become `beta ** k`,
which preserves their half-life in samples. `kept`: they do not change, which preserves their half-life
in steps.
"""

_GOYAL = 'Goyal et al. (2017), "Accurate, large minibatch SGD", section 2.1, arXiv:1706.02677'
_WARMUP = 'Goyal et al. (2017), "Accurate, large minibatch SGD", section 2.2, arXiv:1706.02677'
_MALLADI = (
    'Malladi et al. (2022), "On the SDEs and scaling rules for adaptive gradient algorithms",'
    " arXiv:2205.10287"
)
_BUSBRIDGE = 'Busbridge et al. (2023), "How to scale your EMA", arXiv:2307.13813'
_WANG = (
    'Wang and Aitchison (2024), "How to set AdamW\'s weight decay as you scale model and dataset size",'
    " arXiv:2405.13698"
)
_NOISE = "McCandlish et al. (2018), arXiv:1812.06162"

_KINDS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
# Defaults of torch's optimizers.
_DEFAULTS: dict[str, dict[str, float]] = {
    "SGD": {"momentum": 0.0, "weight_decay": 0.0},
    "Adam": {"betas[0]": 0.9, "betas[1]": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    "AdamW": {"betas[0]": 0.9, "betas[1]": 0.999, "eps": 1e-8, "weight_decay": 0.01},
}
_WIDTH = 80


@dataclass(frozen=True, slots=True)
class Converted:
    """A training setting and its conversion.

    Attributes:
        name: name of the argument of torch's optimizer (`betas[0]` is the first of `betas`), or
            `warmup_steps` or `steps`.
        before, after: values at the old and the new batch.
        rule: rule as text or formula, where `k` is the new batch divided by the old one.
        source: publication of the rule; empty if there is none, such as for plain arithmetic.
    """

    name: str
    before: float
    after: float
    rule: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class BatchChange:
    """Result of `rescale`. Prints as a table.

    Attributes:
        optimizer: `"SGD"`, `"Adam"` or `"AdamW"`.
        before, after: samples per step.
        rows: all settings, including unchanged ones.
        limits: sentences on the limits of validity of the rules.
    """

    optimizer: str
    before: int
    after: int
    rows: tuple[Converted, ...]
    limits: tuple[str, ...]

    @property
    def times(self) -> float:
        """The ratio of the new batch to the old one: `k` in the rules."""
        return self.after / self.before

    @property
    def settings(self) -> dict[str, Any]:
        """The converted settings, as keyword arguments of torch's optimizer."""
        found: dict[str, Any] = {row.name: row.after for row in self.rows}
        if "betas[0]" in found:
            found["betas"] = found.pop("betas[0]"), found.pop("betas[1]")
        return {
            name: value for name, value in found.items() if name not in ("warmup_steps", "steps")
        }

    @property
    def warmup_steps(self) -> int | None:
        """Number of warm-up steps at the new batch; None if `warmup_steps` was not given."""
        return self._count("warmup_steps")

    @property
    def steps(self) -> int | None:
        """Number of training steps at the new batch; None if `steps` was not given."""
        return self._count("steps")

    def _count(self, name: str) -> int | None:
        return next((int(row.after) for row in self.rows if row.name == name), None)

    def __str__(self) -> str:
        sources = list(dict.fromkeys(row.source for row in self.rows if row.source))
        cells = [("setting", "before", "after", "rule")]
        for row in self.rows:
            note = f" [{sources.index(row.source) + 1}]" if row.source else ""
            cells.append((row.name, _figure(row.before), _figure(row.after), row.rule + note))
        widths = [max(len(line[i]) for line in cells) for i in range(3)]
        batches = f"from {format_count(self.before)} to {format_count(self.after)} samples per step"
        parts = [f"{self.optimizer}, {batches} (k = {self.times:.6g})"]
        for name, before, after, rule in cells:
            start = f"  {name:<{widths[0]}}  {before:>{widths[1]}}  {after:>{widths[2]}}  "
            parts += _wrapped(rule, start, " " * len(start))
        if self.limits:
            parts += ["", "Limits"]
            parts += [line for limit in self.limits for line in _wrapped(limit, "  * ", "    ")]
        if sources:
            parts += ["", "Sources"]
            for number, source in enumerate(sources, start=1):
                parts += _wrapped(source, f"  [{number}] ", "      ")
        return "\n".join(parts)


def rescale(
    optimizer: str | type,
    before: int,
    after: int,
    *,
    lr: float,
    momentum: float | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    warmup_steps: int | None = None,
    steps: int | None = None,
    averages: Averages = "published",
    noise_scale: float | None = None,
) -> BatchChange:
    """Convert the settings of a training that was tuned at a global batch of `before` samples to one of
    `after` samples. Nothing is applied automatically: print the result, and use the settings that you
    agree with.

        change = ab.rescale("adamw", 256, 1024, lr=3e-4, betas=(0.9, 0.95), warmup_steps=2000)
        print(change)
        optimizer = lambda params: torch.optim.AdamW(params, **change.settings)

    Args:
        optimizer: `"sgd"` (with or without Nesterov momentum), `"adam"` or `"adamw"`, or torch's class.
        before, after: samples per step.
        lr: learning rate at `before`; with a schedule, its peak.
        momentum, betas, eps, weight_decay: settings at `before`; None: torch's defaults.
        warmup_steps, steps: number of warm-up steps and of all training steps at `before`.
        averages: how to convert momentum and betas; see `Averages`.
        noise_scale: gradient noise scale in samples, if it is known; the limits are then quantified.

    Raises `InputError` for an optimizer without a known rule, for settings that the optimizer does not
    have or that are invalid, and for a batch beyond the range of the square root rule.
    """
    kind = _kind_of(optimizer)
    try:
        first, second = (None, None) if betas is None else betas
    except (TypeError, ValueError):
        raise InputError(f"betas is {betas!r}: give two numbers, such as (0.9, 0.999).") from None
    given = {"momentum": momentum, "betas[0]": first, "betas[1]": second}
    given |= {"eps": eps, "weight_decay": weight_decay}
    given = {name: value for name, value in given.items() if value is not None}
    absent = [name for name in given if name not in _DEFAULTS[kind]]
    if absent:
        raise InputError(
            f"{absent[0].partition('[')[0]} is given, and {kind} has none: leave it out, or name the"
            " optimizer that was tuned."
        )
    tuned = {**_DEFAULTS[kind], **given}
    counts = {"warmup_steps": warmup_steps, "steps": steps}
    _check(kind, before, after, lr, tuned, counts, averages, noise_scale)
    change = BatchChange(kind, before, after, (), ())
    if kind == "SGD":
        rows = _rows_of_sgd(change, averages, lr, tuned)
    else:
        rows = _rows_of_adam(change, averages, lr, tuned)
    rows += [
        Converted(name, n, -(-n * before // after), "the same samples, in whole steps", source)
        for name, n, source in (("warmup_steps", warmup_steps, _WARMUP), ("steps", steps, ""))
        if n is not None
    ]
    change = replace(change, rows=tuple(rows))
    limits = _limits_of_sgd(change) if kind == "SGD" else _limits_of_adam(change, averages)
    return replace(change, limits=(*limits, *_limits_of_noise(change, noise_scale)))


def _rows_of_sgd(
    change: BatchChange, averages: Averages, lr: float, tuned: dict[str, float]
) -> list[Converted]:
    momentum = tuned["momentum"]
    if momentum and averages == "half-life":
        average = _average(change, averages, "momentum", momentum)
        # The step length for a constant gradient, lr / (1 - momentum), becomes k times as long.
        rate = change.times * lr * (1 - average.after) / (1 - momentum)
        rule = "k * lr * (1 - momentum') / (1 - momentum): a step goes k times as far"
    else:
        average = Converted("momentum", momentum, momentum, "kept", _GOYAL)
        rate, rule = change.times * lr, "k * lr"
    decay = tuned["weight_decay"]
    return [
        Converted("lr", lr, rate, rule, _GOYAL),
        average,
        Converted("weight_decay", decay, decay, "kept: it is part of the loss", _GOYAL),
    ]


def _rows_of_adam(
    change: BatchChange, averages: Averages, lr: float, tuned: dict[str, float]
) -> list[Converted]:
    root = math.sqrt(change.times)
    rate = lr * root
    betas = [_average(change, averages, name, tuned[name]) for name in ("betas[0]", "betas[1]")]
    eps, decay = tuned["eps"], tuned["weight_decay"]
    if change.optimizer == "Adam":
        last = Converted("weight_decay", decay, decay, "kept: it is part of the loss")
    else:
        # 1 - (1 - lr * decay) ** k, without cancellation.
        shrunk = -math.expm1(change.times * math.log1p(-lr * decay))
        rule = "1 - (1 - lr * decay) ** k over the new lr: the same decay over the same samples"
        last = Converted("weight_decay", decay, shrunk / rate, rule, _WANG)
    return [
        Converted("lr", lr, rate, "lr * sqrt(k)", _MALLADI),
        *betas,
        Converted("eps", eps, eps / root, "eps / sqrt(k)", _MALLADI),
        last,
    ]


def _average(change: BatchChange, averages: Averages, name: str, beta: float) -> Converted:
    """Converts an exponential average that decays by the factor `beta` in each step."""
    if averages == "kept" or beta == 0:
        return Converted(name, beta, beta, "kept")
    if averages == "half-life":
        rule = "beta ** k: the same half-life in samples"
        return Converted(name, beta, beta**change.times, rule, _BUSBRIDGE)
    after = 1 - change.times * (1 - beta)
    if after < 1e-9:  # with a tolerance for the rounding of 1 - beta
        last = max(change.before, math.ceil(change.before / (1 - beta) - 1e-6) - 1)
        raise InputError(
            f"{name} is {beta:g}, which has no counterpart at {change.times:.4g} times the batch: the"
            f" square root rule makes it 1 - k (1 - beta), and ends before k is"
            f" {1 / (1 - beta):.4g}, {format_count(last)} samples. Give a batch up to"
            " that; or averages='half-life', which makes it beta ** k and has no end; or"
            " averages='kept'."
        )
    return Converted(name, beta, after, "1 - k * (1 - beta)", _MALLADI)


def _limits_of_sgd(change: BatchChange) -> Iterator[str]:
    rate, momentum = change.rows[:2]
    if change.times > 1:
        yield (
            "One step equals k small ones as far as the gradient is the same at all of them; what"
            " differs is of second order in lr. Early in training it is not the same, hence the"
            " warm-up."
        )
    steep = 2 * (1 + momentum.before) / rate.before, 2 * (1 + momentum.after) / rate.after
    yield (
        "Stable up to a curvature of 2 (1 + momentum) / lr:"
        f" {steep[0]:.4g} before, {steep[1]:.4g} after."
    )
    if momentum.before and change.times != 1:
        before = _half_life(momentum.before, change.before)
        after = _half_life(momentum.after, change.after)
        yield f"The half-life of a gradient in momentum: {before} samples before, {after} after."


def _limits_of_adam(change: BatchChange, averages: Averages) -> Iterator[str]:
    if change.times != 1:
        yield (
            "The square root holds where the noise of a batch outweighs its gradient in Adam's second"
            " moment, so at batches well below the gradient noise scale."
        )
    if averages == "kept" and change.times != 1:
        yield "The betas count in steps, so their averages reach over k times as many samples."
    for row in change.rows:
        if row.name.startswith("betas") and 0 < row.after < 0.5:
            yield f"{row.name} is {row.after:.3g}: hardly an average any more."


def _limits_of_noise(change: BatchChange, noise_scale: float | None) -> Iterator[str]:
    """Yields the limits that follow from the noise scale. On average, the fraction
    `1 / (1 + noise / batch)` of the squared norm of a batch's gradient is signal."""
    if change.times <= 1:
        return
    if noise_scale is None:
        if change.optimizer == "SGD":
            yield f"More rate is of no use near the gradient noise scale and above: {_NOISE}."
        return
    signal = [1 / (1 + noise_scale / batch) for batch in (change.before, change.after)]
    scale = f"At a noise scale of {noise_scale:,.6g} samples"
    if change.optimizer == "SGD":
        yield (
            f"{scale} the best rate grows by about {signal[1] / signal[0]:.3g}, not by"
            f" {change.times:.4g}: {_NOISE}."
        )
    else:
        yield (
            f"{scale} the gradient itself is {signal[0]:.0%} of the squared gradient of a batch before"
            f" and {signal[1]:.0%} after, where the rule takes it to be little: {_NOISE}."
        )


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=others)


def _figure(value: float) -> str:
    return format_count(value) if isinstance(value, int) else f"{value:.6g}"


def _half_life(beta: float, batch: int) -> str:
    """Returns the half-life of an exponential average in samples, as text."""
    return format_count(round(batch * math.log(0.5) / math.log(beta))) if beta else "0"


def _kind_of(optimizer: str | type) -> str:
    name = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", "")
    kind = _KINDS.get(name.lower())
    if kind is None:
        raise InputError(
            f"optimizer is {name or optimizer!r}, for which no rule is known here that was derived and"
            f" tried: give {listed(_KINDS, name.lower())}, or tune it at the new batch."
        )
    return kind


def _check(
    kind: str,
    before: int,
    after: int,
    lr: float,
    tuned: dict[str, float],
    counts: dict[str, int | None],
    averages: str,
    noise_scale: float | None,
) -> None:
    """Raises `InputError` that lists all invalid values."""
    faults: list[str] = []

    def check(
        name: str, value: Any, holds: Callable[[Any], bool], wanted: str, is_whole: bool = False
    ) -> None:
        kinds = int if is_whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not holds(value):
            faults.append(f"{name} is {value!r}; {wanted}")

    for name, value in (("before", before), ("after", after)):
        wanted = "it counts samples per step, so give a whole number of at least 1"
        check(name, value, lambda count: count >= 1, wanted, is_whole=True)
    for name, value in counts.items():
        if value is not None:
            wanted = "give a whole number of at least 0"
            check(name, value, lambda count: count >= 0, wanted, is_whole=True)
    check("lr", lr, lambda rate: 0 < rate < math.inf, "give a number above zero")
    for name, value in tuned.items():
        if name in ("eps", "weight_decay"):
            check(name, value, lambda one: 0 <= one < math.inf, "give a number of at least zero")
        else:
            check(name, value, lambda one: 0 <= one < 1, "give a number from 0 to below 1")
    if noise_scale is not None:
        wanted = "it counts samples, so give a number above zero"
        check("noise_scale", noise_scale, lambda one: 0 < one < math.inf, wanted)
    if averages not in get_args(Averages):
        faults.append(f"averages is {averages!r}; give {listed(get_args(Averages), str(averages))}")
    if not faults and kind == "AdamW" and lr * tuned["weight_decay"] >= 1:
        faults.append(
            f"lr * weight_decay is {lr * tuned['weight_decay']:g}; one step would leave nothing of the"
            " weights, so give less than 1"
        )
    if faults:
        raise InputError(f"the batch cannot be changed: {'; '.join(faults)}.")

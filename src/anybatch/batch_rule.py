"""Tokens and Ramp: global batches that are not a fixed number of samples.

A rule gives the target size of a step as a function of the fraction of training completed before it. A
step takes the next samples of the global order until it reaches the target, counted in samples or in
tokens (the sum of sample lengths). `data.boundaries` turns targets into steps.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from anybatch.errors import InputError
from anybatch.units import parse_count

RateRule: TypeAlias = Literal["linear", "sqrt"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """A global batch measured in tokens, or in any other unit of sample length.

    A step takes the next samples of the global order until their total length reaches `count`; the
    sample that reaches or crosses it is the last one of the step. A step therefore has at least one
    sample and exceeds the target by less than the length of its last sample. It is below the target
    only at the end of an epoch (with `last="keep"`) or of training.

    Attributes:
        count: tokens per optimizer step, over all micro-batches and ranks.
        of: length of each training sample, by index, or a function from the data set to these lengths.
            None: `Task.lengths`, or else the `lengths` attribute of the data set. A length of zero
            counts as one. Unlike `Task.lengths`, it does not change the order of samples within a
            global batch or how the batch is cut into micro-batches.

    Raises `InputError` if `count` is not an integer of at least 1.
    """

    count: int
    of: Sequence[int] | Callable[[Any], Sequence[int]] | None = None

    def __post_init__(self) -> None:
        _check_whole(self.count, "count of a Tokens", "it counts tokens per optimizer step")


@dataclass(frozen=True, slots=True)
class Ramp:
    """A global batch that grows or shrinks over the first part of training.

    If the fraction f of training is complete before a step, the step has

        round(start + (stop - start) * shape(min(1, f / until)))

    samples, or tokens if `start` and `stop` are `Tokens`. f is measured in samples (or tokens), or in
    steps if the length of the task is given in steps. The size of each step is therefore known before
    training and does not depend on ranks, plans or restarts. The plan is made for the larger of `start`
    and `stop`.

    Attributes:
        start, stop: initial and final global batch, in samples, or both as `Tokens`.
        until: fraction of training at which the batch reaches `stop`: above 0, at most 1.
        learning_rate: how the learning rate follows the batch size. The rate given by the optimizer and
            the schedule is multiplied by size / stop (`"linear"`) or by its square root (`"sqrt"`);
            None: not scaled. The rate of the optimizer is therefore the one for `stop`. A step that is
            cut short at the end of an epoch uses the rate of a full step.
        shape: fraction of the way from `start` to `stop`, as a function of the fraction of the ramp
            that is complete, both from 0 to 1; None: linear. It must not depend on anything else. For
            example, a ramp in stages: `lambda done: int(4 * done) / 4`.

    Raises `InputError` if an argument is invalid.
    """

    start: int | Tokens
    stop: int | Tokens
    until: float
    learning_rate: RateRule | None = None
    shape: Callable[[float], float] | None = None

    def __post_init__(self) -> None:
        for name in ("start", "stop"):
            if not isinstance(value := getattr(self, name), Tokens):
                _check_whole(value, f"{name} of a Ramp", "it counts samples per optimizer step")
        start, stop = tokens_of(self.start), tokens_of(self.stop)
        alike = start.of is stop.of if start and stop else start is stop
        if not alike:
            raise InputError(
                f"start of a Ramp is {as_text(self.start)} and stop {as_text(self.stop)}: give two"
                " numbers of samples, or two Tokens of the same lengths."
            )
        until = self.until
        if isinstance(until, bool) or not isinstance(until, int | float) or not 0 < until <= 1:
            raise InputError(
                f"until of a Ramp is {until!r}: give the part of training after which the batch is"
                " `stop`, above 0 and at most 1."
            )
        if self.learning_rate not in (None, "linear", "sqrt"):
            raise InputError(
                f"learning_rate of a Ramp is {self.learning_rate!r}: give 'linear', 'sqrt' or None."
            )
        if self.shape is not None and not callable(self.shape):
            raise InputError(
                f"shape of a Ramp is {self.shape!r}: give a function of the part of the ramp that is"
                " done, or None."
            )


BatchRule: TypeAlias = "int | Tokens | Ramp"
"""Types accepted as `Task.global_batch`."""


def tokens_of(rule: BatchRule) -> Tokens | None:
    """The `Tokens` in which `rule` counts, or None if it counts samples."""
    first = rule.start if isinstance(rule, Ramp) else rule
    return first if isinstance(first, Tokens) else None


def target_at(rule: BatchRule, done: float) -> int:
    """Target size of a step, in samples or tokens, if the fraction `done` of training is complete
    before it.

    Raises `InputError` if the shape of a ramp returns something other than a finite number.
    """
    if not isinstance(rule, Ramp):
        return _count(rule)
    start, stop = _count(rule.start), _count(rule.stop)
    part = min(1.0, done / rule.until)
    if rule.shape is not None:
        part = _checked_part(rule.shape(part), part)
    return round(start + (stop - start) * part)


def largest_target(rule: BatchRule) -> int:
    """The largest value that `target_at` returns for `rule`."""
    return max(_count(rule.start), _count(rule.stop)) if isinstance(rule, Ramp) else _count(rule)


def rate_factor(rule: BatchRule, done: float) -> float:
    """Factor by which the learning rate is multiplied because of the batch size; see `Ramp`."""
    if not isinstance(rule, Ramp) or rule.learning_rate is None:
        return 1.0
    part = target_at(rule, done) / _count(rule.stop)
    return part if rule.learning_rate == "linear" else math.sqrt(part)


def as_text(rule: BatchRule) -> str:
    """`rule` in the format of `parse_batch_rule`. The shape of a ramp is represented by a checksum of
    its values, which is not parsed; the lengths of samples are not included."""
    if not isinstance(rule, Ramp):
        return f"{rule.count}tokens" if isinstance(rule, Tokens) else str(rule)
    parts = [as_text(rule.start), as_text(rule.stop), str(rule.until)]
    if rule.learning_rate is not None:
        parts.append(rule.learning_rate)
    if rule.shape is not None:
        values = ",".join(str(target_at(rule, rule.until * i / 64)) for i in range(65))
        parts.append(f"shape-{hashlib.sha256(values.encode()).hexdigest()[:8]}")
    return ":".join(parts)


def rule_text(rule: BatchRule) -> str:
    """`as_text(rule)`, or an empty string if steps have a fixed number of samples."""
    return "" if isinstance(rule, int) else as_text(rule)


def read_rule(text: str) -> BatchRule:
    """The rule that `as_text` wrote as `text`, without the shape of a ramp."""
    return parse_batch_rule(text.partition(":shape-")[0])


def in_words(rule: BatchRule) -> str:
    """Description of `rule` for display: `64 to 4,096 samples per step over the first 30% of
    training`."""
    unit = "samples" if tokens_of(rule) is None else "tokens"
    if not isinstance(rule, Ramp):
        return f"{_count(rule):,} {unit} per step"
    text = f"{_count(rule.start):,} to {_count(rule.stop):,} {unit} per step over the first"
    text = f"{text} {100 * rule.until:.3g}% of training"
    if rule.learning_rate is None:
        return text
    root = "the root of " if rule.learning_rate == "sqrt" else ""
    return f"{text}, the learning rate in proportion to {root}it"


def parse_batch_rule(text: str, name: str = "global_batch") -> BatchRule:
    """Parse a batch rule: `4096`, `512Ktokens`, or a ramp as START:STOP:UNTIL[:RATE], such as
    `64:4096:0.3` or `64Ktokens:512Ktokens:0.3:linear`.

    Raises `InputError` naming `name` and the text.
    """
    if ":" not in text:
        return _parsed_size(text.strip(), name)
    parts = [part.strip() for part in text.split(":")]
    wrong = "it has not three parts, or four"
    try:
        if len(parts) in (3, 4):
            start, stop = (_parsed_size(part, name) for part in parts[:2])
            rate: Any = parts[3] if len(parts) == 4 else None
            return Ramp(start, stop, float(parts[2]), rate)
    except InputError as error:
        wrong = str(error).rstrip(".")
    except ValueError:
        wrong = f"{parts[2]!r} is no number"
    raise InputError(
        f"{name} is {text!r}, which is no ramp ({wrong}): write START:STOP:UNTIL, such as 64:4096:0.3,"
        " and :linear or :sqrt after it if the learning rate is to follow."
    )


_TOKENS = re.compile(r"\s*tok(en)?s?$", re.IGNORECASE)


def _parsed_size(text: str, name: str) -> int | Tokens:
    number = _TOKENS.sub("", text)
    count = parse_count(number, name)
    return count if number == text else Tokens(count)


def _count(size: int | Tokens) -> int:
    return size.count if isinstance(size, Tokens) else size


def _check_whole(value: object, what: str, why: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{what} is {value!r}: {why} and has to be a whole number of at least 1.")


def _checked_part(found: object, done: float) -> float:
    if isinstance(found, bool | int | float) and math.isfinite(found):
        return min(1.0, max(0.0, float(found)))
    raise InputError(
        f"shape of a Ramp returned {found!r} for {done}: return the part of the way from start to stop,"
        " a number from 0 to 1."
    )

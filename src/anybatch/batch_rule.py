"""Tokens and Ramp: global batches that are no fixed number of samples.

A rule gives the target of a step from the part of training that is done before it. A step takes the
next samples of the global order until they reach its target: their number, or their total length in
tokens. `data.boundaries` turns targets into steps.
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
    """A global batch in tokens, or in whatever else the lengths of samples count.

    A step takes the next samples of the global order until their total length reaches `count`: the
    sample that reaches or crosses it is the last one of the step. So a step has at least one sample,
    and is over the target by less than the length of its last sample. It is under the target only
    where an epoch (with `last="keep"`) or the training ends.

    Attributes:
        count: tokens per optimizer step, over all micro-batches and ranks.
        of: length of each training sample, by index, or a function from the data set to these. None:
            `Task.lengths`, or else what the data set has as its attribute `lengths`. A length of zero
            counts as one. Unlike `Task.lengths` it leaves the order inside a global batch and the cut
            into micro-batches as they are.

    Raises `InputError` if `count` is no whole number of at least 1.
    """

    count: int
    of: Sequence[int] | Callable[[Any], Sequence[int]] | None = None

    def __post_init__(self) -> None:
        _check_whole(self.count, "count of a Tokens", "it counts tokens per optimizer step")


@dataclass(frozen=True, slots=True)
class Ramp:
    """A global batch that grows, or shrinks, over the first part of training.

    Where the part f of training is done before a step, the step has

        round(start + (stop - start) * shape(min(1, f / until)))

    samples, or tokens if `start` and `stop` are `Tokens`. f counts samples (tokens), or steps where the
    length of the task is given in steps. So the size of each step is known before training, and depends
    on no rank, plan or restart. The plan is made for the larger one of `start` and `stop`.

    Attributes:
        start, stop: the first and the final global batch: samples, or both `Tokens`.
        until: the part of training after which it is `stop`: above 0, at most 1.
        learning_rate: how the learning rate follows the batch, by which the rate that the optimizer
            and the schedule give is multiplied: `"linear"`: size / stop, `"sqrt"`: its square root.
            None: it does not. So the optimizer's own rate is the one for `stop`. A step that is cut
            short at the end of an epoch has the rate of a whole one.
        shape: the part of the way from `start` to `stop`, as a function of the part of the ramp that is
            done, both from 0 to 1; None: a straight line. It must depend on nothing else. Stages, say:
            `lambda done: int(4 * done) / 4`.

    Raises `InputError` if one of them cannot be used.
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
"""What `Task.global_batch` may be."""


def tokens_of(rule: BatchRule) -> Tokens | None:
    """The `Tokens` that say what `rule` counts in; None: it counts samples."""
    first = rule.start if isinstance(rule, Ramp) else rule
    return first if isinstance(first, Tokens) else None


def target_at(rule: BatchRule, done: float) -> int:
    """Samples, or tokens, that a step is to have where the part `done` of training is done before it.

    Raises `InputError` if the shape of a ramp returns what is no number.
    """
    if not isinstance(rule, Ramp):
        return _count(rule)
    start, stop = _count(rule.start), _count(rule.stop)
    part = min(1.0, done / rule.until)
    if rule.shape is not None:
        part = _checked_part(rule.shape(part), part)
    return round(start + (stop - start) * part)


def largest_target(rule: BatchRule) -> int:
    """The most that `target_at` gives."""
    return max(_count(rule.start), _count(rule.stop)) if isinstance(rule, Ramp) else _count(rule)


def rate_factor(rule: BatchRule, done: float) -> float:
    """What the learning rate is multiplied by for the sake of the batch; see `Ramp`."""
    if not isinstance(rule, Ramp) or rule.learning_rate is None:
        return 1.0
    part = target_at(rule, done) / _count(rule.stop)
    return part if rule.learning_rate == "linear" else math.sqrt(part)


def as_text(rule: BatchRule) -> str:
    """`rule` as `parse_batch_rule` reads it. The shape of a ramp is represented by a checksum of its
    values, which is not read back; lengths do not stand in it at all."""
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
    """`as_text` of `rule`; nothing where steps are of a fixed number of samples."""
    return "" if isinstance(rule, int) else as_text(rule)


def read_rule(text: str) -> BatchRule:
    """The rule that `as_text` wrote as `text`; without the shape of a ramp."""
    return parse_batch_rule(text.partition(":shape-")[0])


def in_words(rule: BatchRule) -> str:
    """`rule` for people: `64 to 4,096 samples per step over the first 30% of training`."""
    unit = "samples" if tokens_of(rule) is None else "tokens"
    if not isinstance(rule, Ramp):
        return f"{_count(rule):,} {unit} per step"
    told = f"{_count(rule.start):,} to {_count(rule.stop):,} {unit} per step over the first"
    told = f"{told} {100 * rule.until:.3g}% of training"
    if rule.learning_rate is None:
        return told
    root = "the root of " if rule.learning_rate == "sqrt" else ""
    return f"{told}, the learning rate in proportion to {root}it"


def parse_batch_rule(text: str, name: str = "global_batch") -> BatchRule:
    """The rule written as `text`: `4096`, `512Ktokens`, or a ramp as START:STOP:UNTIL[:RATE], such as
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

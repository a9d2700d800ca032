"""Rows to samples: tokens and labels, cut to the longest that is allowed, and padded in micro-batches.

    text                    t t t t t .        every token is predicted from those before it
    prompt + completion     p p p c c .        of which those of the completion count
    text + label            t t t t t          one label for all
    input_ids (+ labels)    t t t t t          tokens that were made before

A batch has `input_ids`, `attention_mask` and `labels`, padded to its own longest sample; a label of
-100 counts nothing. The label of a token has the token's own place: the model moves labels by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from anybatch.errors import DataError, InputError, listed
from anybatch.recipes.finetune_data import Table
from anybatch.recipes.finetune_model import Kind
from anybatch.recipes.finetune_tokens import Tokens

IGNORED = -100

Form: TypeAlias = Literal["text", "pair", "label", "tokens", "labelled tokens"]
Sample: TypeAlias = "dict[str, Tensor]"

_WANTED = "'text', 'prompt' with 'completion', 'text' with 'label', or 'input_ids'"
LABELLED = ("label", "labelled tokens")
_SHOWN = 12  # names of classes in a message
_MOST_CLASSES = 100_000  # what is larger is a name that looks like a number
_MUCH_UNKNOWN = 0.1  # part of the tokens
_AT_ONCE = 1000  # texts that a tokenizer is given at once


class Samples(Dataset[Sample]):
    """Samples `{"input_ids": [tokens] int64, "labels": [tokens] or [] int64}`, held as tensors of all
    samples in a row. `lengths`: tokens of each sample."""

    def __init__(self, ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int] | int]) -> None:
        self.lengths: list[int] = [len(one) for one in ids]
        self._starts = torch.tensor([0, *self.lengths]).cumsum(0)
        self._ids = torch.tensor([token for one in ids for token in one], dtype=torch.int32)
        self._by_token = not isinstance(labels[0], int)
        flat = [x for one in labels for x in (one if isinstance(one, Sequence) else (one,))]
        self._labels = torch.tensor(flat, dtype=torch.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        number = range(len(self))[index]
        part = slice(int(self._starts[number]), int(self._starts[number + 1]))
        labels = self._labels[part] if self._by_token else self._labels[number]
        return {"input_ids": self._ids[part].long(), "labels": labels.long()}


class Encoded(NamedTuple):
    """Samples, and how many of them had to be cut."""

    samples: Samples
    num_cut: int


def padded(samples: list[Sample], pad: int) -> Sample:
    """The batch `[batch, longest]` of samples of unequal length."""
    ids = [sample["input_ids"] for sample in samples]
    labels = [sample["labels"] for sample in samples]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad),
        "attention_mask": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED)
        if labels[0].dim()
        else torch.stack(labels),
    }


def form_of(table: Table, kind: Kind | None) -> Form:
    """What the columns of the first row mean, for the task `kind`, or for the one that they imply.

    Raises `InputError` if they mean nothing, or something else.
    """
    columns = table.rows[0].keys()
    labelled = "label" in columns and kind != "causal-lm"
    found: Form
    if "input_ids" in columns:
        found = "labelled tokens" if labelled else "tokens"
    elif {"prompt", "completion"} <= columns:
        found = "pair"
    elif "text" in columns:
        found = "label" if labelled else "text"
    else:
        raise InputError(f"{table.place(0)} has {listed(columns)}: give rows with {_WANTED}.")
    if kind == "classification" and found not in LABELLED:
        raise InputError(
            f"{table.place(0)} has {listed(columns)} and no 'label': a classifier needs one in every"
            " row; give 'text' with 'label', or task=causal-lm."
        )
    return found


# ------------------------------------------------------------------------------------------- labels


def classes_of(tables: Sequence[Table]) -> list[str]:
    """The names of the classes: those that the data has, else the labels that occur, sorted, or
    counted from 0 where they are numbers.

    Raises `DataError` for a row without a label, or one that is none; `InputError` for a single class.
    """
    names = next((table.names for table in tables if table.names), None)
    if names is None:
        found: set[str] = set()
        first: type | None = None
        for table in tables:
            for number, label in enumerate(_labels(table)):
                if first is not None and type(label) is not first:
                    raise DataError(
                        f"{table.place(number)} has the label {label!r}, and those before are of"
                        " another kind: give names in every row, or whole numbers from 0."
                    )
                first = type(label)
                found.add(str(label))
        numbers = all(map(_is_number, found))
        names = list(map(str, range(max(map(int, found)) + 1))) if numbers else sorted(found)
    if len(names) < 2:
        raise InputError(
            f"every row of {tables[0].files[0]!r} has the label {names[0]!r}: a classifier needs two"
            " classes to tell apart."
        )
    return names


def _labels(table: Table) -> Iterator[int | str]:
    """Raises `DataError` for what is no label."""
    for number, row in enumerate(table.rows):
        label: Any = row.get("label")
        named = isinstance(label, str) and label != ""
        if not named and not (type(label) is int and 0 <= label < _MOST_CLASSES):
            raise DataError(
                f"{table.place(number)} has the label {label!r}: give a name, or a whole number from 0"
                f" that counts classes, below {_MOST_CLASSES:,}."
            )
        yield label


def _targets(table: Table, classes: list[str]) -> list[int]:
    """The class of each row. Raises `DataError` for a label that is none of `classes`."""
    places = {name: number for number, name in enumerate(classes)}
    found = []
    for number, label in enumerate(_labels(table)):
        place = places.get(str(label), int(label) if _is_number(str(label)) else -1)
        if isinstance(label, int):
            place = label
        if not 0 <= place < len(classes):
            raise DataError(
                f"{table.place(number)} has the label {label!r}, which is none of the"
                f" {len(classes)} classes that the model tells apart ({', '.join(classes[:_SHOWN])}):"
                " mend the row, or give a model for more."
            )
        found.append(place)
    return found


def _is_number(label: str) -> bool:
    """Whether it is one that a file without numbers (CSV) would have for a class."""
    return label.isdecimal() and int(label) < _MOST_CLASSES


# ------------------------------------------------------------------------------------------- tokens


def encoded(
    table: Table, form: Form, tokens: Tokens | None, longest: int, words: int, classes: list[str]
) -> Encoded:
    """The samples of `table`. Rows in which there is nothing to learn from (an empty text, a completion
    that is empty or does not begin before the cut) are left out, with a warning that names the first.

    Args:
        form: what their columns mean.
        tokens: of the model; None: `form` is tokens already.
        longest: tokens of a sample at most: what comes after is cut off.
        words: that the model knows: ids are below it.
        classes: names, where there are labels.

    Raises `DataError` for a row that is not as the first one, or a token that is no word; `InputError`
    if no row is left.
    """
    ids, labels = _tokens_and_labels(table, form, tokens)
    _check_words(table, "token", ids, words)
    if tokens is not None:
        _warn_of_unknown(table, ids, tokens)
    if form == "tokens" and labels is not ids:
        _check_words(table, "label", labels, words)
    if form in LABELLED:
        targets: list[Any] = _targets(table, classes)
        kept = [number for number, one in enumerate(ids) if one]
    else:
        targets = [one[:longest] for one in labels]
        kept = [number for number, one in enumerate(targets) if any(x != IGNORED for x in one[1:])]
    _warn_of_left_out(table, kept)
    if not kept:
        raise InputError(
            f"no row of {table.files[0]!r} has anything to learn from: give texts that are not empty"
            f" (and completions that begin within {longest} tokens)."
        )
    samples = Samples([ids[i][:longest] for i in kept], [targets[i] for i in kept])
    return Encoded(samples, sum(len(ids[i]) > longest for i in kept))


def _tokens_and_labels(
    table: Table, form: Form, tokens: Tokens | None
) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of each row, and the label of each token (of no use where the row has one)."""
    if form in ("tokens", "labelled tokens"):
        ids = _numbers(table, "input_ids")
        if form == "labelled tokens" or "labels" not in table.rows[0]:
            return ids, ids
        labels = _numbers(table, "labels")
        _check_labels(table, ids, labels)
        return ids, labels
    assert tokens is not None
    if form == "label":
        ids = _encoded(table, "text", tokens)
        return ids, ids
    end = tokens.end
    last = _encoded(table, "text" if form == "text" else "completion", tokens, form == "text")
    ended = [[*one, end] if one and end is not None and one[-1] != end else one for one in last]
    if form == "text":
        return ended, ended
    prompts = _encoded(table, "prompt", tokens)
    begun = [one[:-1] if one and one[-1] == end else one for one in prompts]
    labels = [[IGNORED] * len(a) + b for a, b in zip(begun, ended, strict=True)]
    return [a + b for a, b in zip(begun, ended, strict=True)], labels


def _encoded(table: Table, column: str, tokens: Tokens, whole: bool = True) -> list[list[int]]:
    """The tokens of a column of texts; none for one that is empty."""
    texts: list[str] = []
    for number, row in enumerate(table.rows):
        text = row.get(column)
        if not isinstance(text, str):
            kind = "null" if text is None else f"a value of type {type(text).__name__}"
            raise _unlike_the_first(table, number, column, kind, "a text")
        texts.append(text)
    full = [number for number, text in enumerate(texts) if text.strip()]
    found: list[list[int]] = [[] for _ in texts]
    for start in range(0, len(full), _AT_ONCE):
        some = full[start : start + _AT_ONCE]
        for number, one in zip(some, tokens.encode([texts[i] for i in some], whole), strict=True):
            found[number] = list(one)
    return found


def _numbers(table: Table, column: str) -> list[list[int]]:
    found: list[list[int]] = []
    for number, row in enumerate(table.rows):
        values = row.get(column)
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            kind = "something else than whole numbers"
            raise _unlike_the_first(table, number, column, kind, "a list of whole numbers")
        found.append(values)
    return found


def _unlike_the_first(table: Table, number: int, column: str, kind: str, wanted: str) -> DataError:
    what = f"{kind} as" if column in table.rows[number] else "no"
    return DataError(
        f"{table.place(number)} has {what} {column!r}: give {wanted} in every row, as in the first."
    )


# ------------------------------------------------------------------------------------------- checks


def _check_words(table: Table, what: str, values: list[list[int]], words: int) -> None:
    for number, some in enumerate(values):
        if not some or (min(some) >= 0 and max(some) < words):
            continue
        for place, value in enumerate(some):
            if 0 <= value < words or (what == "label" and value == IGNORED):
                continue
            raise DataError(
                f"{table.place(number)} has the {what} {value} at position {place}, and the model knows"
                f" {words} words, 0 to {words - 1}: is it from another model's tokenizer?"
            )


def _check_labels(table: Table, ids: list[list[int]], labels: list[list[int]]) -> None:
    """As many labels as tokens, and not moved by one: they would be moved by one more."""
    for number, (one, other) in enumerate(zip(ids, labels, strict=True)):
        if len(one) != len(other):
            raise DataError(
                f"{table.place(number)} has {len(one)} input_ids and {len(other)} labels: give one"
                " label for each token, -100 where it counts nothing."
            )
    counted = [
        (label == following, label == token)
        for one, other in zip(ids, labels, strict=True)
        for label, following, token in zip(other, one[1:], one, strict=False)
        if label != IGNORED
    ]
    if counted and all(moved for moved, _ in counted) and not all(same for _, same in counted):
        raise DataError(
            f"the labels of {table.files[0]!r} are moved by one already (labels[i] is input_ids[i + 1]"
            " in every row), and a causal language model moves them by itself: give labels that stand"
            " where their tokens do, or none."
        )


def _warn_of_unknown(table: Table, ids: list[list[int]], tokens: Tokens) -> None:
    """Of a text of which much is unknown, little can be learned: it is another tokenizer's."""
    counts = [0 if tokens.unknown is None else one.count(tokens.unknown) for one in ids]
    whole = sum(map(len, ids))
    if sum(counts) > _MUCH_UNKNOWN * whole:
        first = next(number for number, count in enumerate(counts) if count)
        warnings.warn(
            f"{sum(counts) / whole:.0%} of the tokens of {table.files[0]!r} are the one for what the"
            f" tokenizer does not know (first in {table.place(first)}): is the tokenizer the model's,"
            " and for this language?",
            stacklevel=4,
        )


def _warn_of_left_out(table: Table, kept: list[int]) -> None:
    missing = sorted(set(range(len(table.rows))) - set(kept))
    if missing:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        warnings.warn(
            f"left out, since there is nothing in it to learn from: {table.place(missing[0])}{more} (an"
            " empty text, or a completion that is empty or was cut off).",
            stacklevel=3,
        )

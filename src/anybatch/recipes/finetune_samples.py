"""Rows to samples: tokens and labels, cut to the longest that is allowed, and padded in micro-batches.

    text                    t t t t t .        every token is predicted from those before it
    prompt + completion     p p p c c .        of which those of the completion count
    text + label            t t t t t          one label for all
    input_ids (+ labels)    t t t t t          tokens that somebody else has made

A batch has `input_ids`, `attention_mask` and `labels`, padded to its own longest sample; a label of
-100 counts nothing. What a model wants to be given stands in `labels` where its token does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast

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
_LABELLED = ("label", "labelled tokens")
_SHOWN = 12  # names of classes in a message
_MOST_CLASSES = 100_000  # what is larger is a name that looks like a number
_MUCH_UNKNOWN = 0.1  # part of the tokens
_AT_ONCE = 1000  # texts that a tokenizer is given at once


class Samples(Dataset[Sample]):
    """Samples `{"input_ids": [tokens] int64, "labels": [tokens] or [] int64}`, held as two long
    tensors.

    Attributes:
        lengths: tokens of each sample.
    """

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
    """What the columns of the first row mean, for the task `kind`, or for that which they tell.

    Raises `InputError` if they mean nothing, or something else.
    """
    columns = table.rows[0].keys()
    labelled = "label" in columns
    if "input_ids" in columns:
        found: Form = "labelled tokens" if labelled and kind != "causal-lm" else "tokens"
    elif {"prompt", "completion"} <= columns:
        found = "pair"
    elif "text" in columns:
        found = "label" if labelled and kind != "causal-lm" else "text"
    else:
        raise InputError(f"{table.place(0)} has {listed(columns)}: give rows with {_WANTED}.")
    if kind == "classification" and found not in _LABELLED:
        raise InputError(
            f"{table.place(0)} has {listed(columns)} and no 'label': a classifier needs one in every"
            " row; give 'text' with 'label', or task=causal-lm."
        )
    return found


# ------------------------------------------------------------------------------------------- labels


def classes_of(tables: Sequence[Table]) -> list[str]:
    """The names of the classes: those that the data tells, else the labels that are there, sorted, or
    counted from 0 where they are numbers.

    Raises `DataError` for a row without a label, or one that is none; `InputError` for a single class.
    """
    names = next((table.names for table in tables if table.names), None)
    if names is None:
        found = {str(label) for label in _of_one_kind(tables)}
        numbers = all(map(_is_number, found))
        names = list(map(str, range(max(map(int, found)) + 1))) if numbers else sorted(found)
    if len(names) < 2:
        raise InputError(
            f"every row of {tables[0].files[0]!r} has the label {names[0]!r}: a classifier needs two"
            " classes to tell apart."
        )
    return names


def _of_one_kind(tables: Sequence[Table]) -> Iterator[int | str]:
    """The labels of all tables. Raises `DataError` where some are names and some are numbers."""
    first: type | None = None
    for table in tables:
        for number, label in enumerate(_labels(table)):
            if first is not None and type(label) is not first:
                raise DataError(
                    f"{table.place(number)} has the label {label!r}, and those before are of another"
                    " kind: give names in every row, or whole numbers from 0."
                )
            first = type(label)
            yield label


def _labels(table: Table) -> Iterator[int | str]:
    """Raises `DataError` for what is no label."""
    for number, row in enumerate(table.rows):
        label = row.get("label")
        named = isinstance(label, str) and label != ""
        if not named and not (type(label) is int and 0 <= label < _MOST_CLASSES):
            raise DataError(
                f"{table.place(number)} has the label {label!r}: give a name, or a whole number from 0"
                f" that counts classes, below {_MOST_CLASSES:,}."
            )
        yield cast("int | str", label)


def _targets(table: Table, classes: list[str]) -> list[int]:
    """The class of each row. Raises `DataError` for a label that is none of `classes`."""
    of_name = {name: number for number, name in enumerate(classes)}
    found = []
    for number, label in enumerate(_labels(table)):
        place = label if isinstance(label, int) else of_name.get(label, _number(label))
        if not 0 <= place < len(classes):
            raise DataError(
                f"{table.place(number)} has the label {label!r}, which is none of the"
                f" {len(classes)} classes that the model tells apart ({', '.join(classes[:_SHOWN])}):"
                " mend the row, or give a model for more."
            )
        found.append(place)
    return found


def _number(label: str) -> int:
    return int(label) if _is_number(label) else -1


def _is_number(label: str) -> bool:
    """Whether it is one that a file without numbers (CSV) would have for a class."""
    return label.isdecimal() and int(label) < _MOST_CLASSES


# ------------------------------------------------------------------------------------------- tokens


def encoded(
    table: Table, form: Form, tokens: Tokens | None, longest: int, words: int, classes: list[str]
) -> Encoded:
    """The samples of `table`. Rows in which nothing is there to learn from (an empty text, a completion
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
    ids, labels = _MAKERS[form](table, tokens)
    classes_given = _targets(table, classes) if form in _LABELLED else None
    _check_words(table, "token", ids, words)
    _tell_unknown(table, ids, tokens)
    if form == "tokens" and labels is not ids:
        _check_words(table, "label", labels, words)
    kept, made, wanted, num_cut = [], [], [], 0
    for number, (one, given) in enumerate(zip(ids, labels, strict=True)):
        cut = one[:longest]
        if classes_given is None:
            target: Any = given[:longest]
            is_empty = all(label == IGNORED for label in target[1:])
        else:
            target = classes_given[number]
            is_empty = not cut
        if is_empty:
            continue
        num_cut += len(one) > longest
        kept.append(number)
        made.append(cut)
        wanted.append(target)
    _tell_left_out(table, kept)
    if not kept:
        raise InputError(
            f"no row of {table.files[0]!r} has anything to learn from: give texts that are not empty"
            f" (and completions that begin within {longest} tokens)."
        )
    return Encoded(Samples(made, wanted), num_cut)


_Made: TypeAlias = "tuple[list[list[int]], list[list[int]]]"
"""Tokens of each row, and what each of them is as a label (nothing of use where the row has one)."""


def _from_texts(table: Table, tokens: Tokens | None) -> _Made:
    ids = _ended(_encoded(table, "text", tokens), tokens)
    return ids, ids


def _from_labelled(table: Table, tokens: Tokens | None) -> _Made:
    ids = _encoded(table, "text", tokens)
    return ids, ids


def _from_pairs(table: Table, tokens: Tokens | None) -> _Made:
    assert tokens is not None
    prompts = _encoded(table, "prompt", tokens)
    completions = _encoded(table, "completion", tokens, whole=False)
    begun = [one[:-1] if one and one[-1] == tokens.end else one for one in prompts]
    ended = _ended(completions, tokens)
    labels = [[IGNORED] * len(a) + b for a, b in zip(begun, ended, strict=True)]
    return [a + b for a, b in zip(begun, ended, strict=True)], labels


def _from_tokens(table: Table, _tokens: Tokens | None) -> _Made:
    ids = [_numbers(table, number, "input_ids") for number in range(len(table.rows))]
    if "labels" not in table.rows[0]:
        return ids, ids
    labels = [_numbers(table, number, "labels") for number in range(len(table.rows))]
    for number, (one, other) in enumerate(zip(ids, labels, strict=True)):
        if len(one) != len(other):
            raise DataError(
                f"{table.place(number)} has {len(one)} input_ids and {len(other)} labels: give one"
                " label for each token, -100 where it counts nothing."
            )
    _check_not_moved(table, ids, labels)
    return ids, labels


def _from_labelled_tokens(table: Table, _tokens: Tokens | None) -> _Made:
    ids = [_numbers(table, number, "input_ids") for number in range(len(table.rows))]
    return ids, ids


_MAKERS: dict[Form, Callable[[Table, Tokens | None], _Made]] = {
    "text": _from_texts,
    "pair": _from_pairs,
    "label": _from_labelled,
    "tokens": _from_tokens,
    "labelled tokens": _from_labelled_tokens,
}


def _encoded(
    table: Table, column: str, tokens: Tokens | None, whole: bool = True
) -> list[list[int]]:
    """The tokens of a column of texts; none for one that is empty."""
    assert tokens is not None
    texts = [_text(table, number, column) for number in range(len(table.rows))]
    full = [number for number, text in enumerate(texts) if text.strip()]
    found: list[list[int]] = [[] for _ in texts]
    for start in range(0, len(full), _AT_ONCE):
        some = full[start : start + _AT_ONCE]
        for number, one in zip(some, tokens.encode([texts[i] for i in some], whole), strict=True):
            found[number] = list(one)
    return found


def _ended(ids: list[list[int]], tokens: Tokens | None) -> list[list[int]]:
    """With the token that ends a text after each that is not empty."""
    end = None if tokens is None else tokens.end
    return [[*one, end] if one and end is not None and one[-1] != end else one for one in ids]


def _text(table: Table, number: int, column: str) -> str:
    text = table.rows[number].get(column)
    if not isinstance(text, str):
        what = "no" if column not in table.rows[number] else f"{_kind(text)} as"
        raise DataError(
            f"{table.place(number)} has {what} {column!r}: give a text in every row, as in the first."
        )
    return text


def _numbers(table: Table, number: int, column: str) -> list[int]:
    values = table.rows[number].get(column)
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        what = "no" if column not in table.rows[number] else "something else than whole numbers as"
        raise DataError(
            f"{table.place(number)} has {what} {column!r}: give a list of whole numbers in every row,"
            " as in the first."
        )
    return values


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


def _tell_unknown(table: Table, ids: list[list[int]], tokens: Tokens | None) -> None:
    """Of a text of which much is unknown, little can be learned: it is another tokenizer's."""
    if tokens is None or tokens.unknown is None:
        return
    counts = [one.count(tokens.unknown) for one in ids]
    whole = sum(map(len, ids))
    if sum(counts) > _MUCH_UNKNOWN * whole:
        first = next(number for number, count in enumerate(counts) if count)
        warnings.warn(
            f"{sum(counts) / whole:.0%} of the tokens of {table.files[0]!r} are the one for what the"
            f" tokenizer does not know (first in {table.place(first)}): is the tokenizer the model's,"
            " and for this language?",
            stacklevel=4,
        )


def _check_not_moved(table: Table, ids: list[list[int]], labels: list[list[int]]) -> None:
    """Labels that were moved by one would be moved by one more."""
    pairs = [
        (label, token, same)
        for one, other in zip(ids, labels, strict=True)
        for label, token, same in zip(other, one[1:], one, strict=False)
        if label != IGNORED
    ]
    moved = all(label == token for label, token, _ in pairs)
    if pairs and moved and not all(label == same for label, _, same in pairs):
        raise DataError(
            f"the labels of {table.files[0]!r} are moved by one already (labels[i] is input_ids[i + 1]"
            " in every row), and a causal language model moves them by itself: give labels that stand"
            " where their tokens do, or none."
        )


def _tell_left_out(table: Table, kept: list[int]) -> None:
    missing = sorted(set(range(len(table.rows))) - set(kept))
    if not missing:
        return
    more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
    warnings.warn(
        f"left out, since there is nothing in it to learn from: {table.place(missing[0])}{more} (an"
        " empty"
        " text, or a completion that is empty or was cut off).",
        stacklevel=3,
    )


def _kind(value: object) -> str:
    return "null" if value is None else f"a value of type {type(value).__name__}"

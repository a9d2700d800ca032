"""Data for fine-tuning: rows from files, and samples of tokens and labels.

    .jsonl              an object per line        .csv .tsv    with a header line
    .json               a list of objects         .txt  ...    a text per line
    a folder            of such files (train.*, and valid.*, validation.*, dev.* or test.* held out)
    a folder            written by `save_to_disk` of Hugging Face's datasets

    text                    t t t t t .        every token is predicted from the previous ones
    prompt + completion     p p p c c .        only the tokens of the completion are in the loss
    text + label            t t t t t          one label for the text

Labels are not shifted: each is at the position of its token, and the model shifts them by one. Labels
of -100 are ignored.
"""

from __future__ import annotations

import csv
import io
import json
import os
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from anybatch.errors import DataError, InputError, listed, some
from anybatch.recipes.text_data import EVERY

Kind: TypeAlias = Literal["causal-lm", "classification"]
Sample: TypeAlias = "dict[str, Tensor]"
Row: TypeAlias = Mapping[str, Any]

IGNORED = -100
HELD_OUT = ("validation", "valid", "dev", "test")
"""Names of held-out parts, in order of preference."""

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_SUFFIXES = (".jsonl", ".json", *_SEPARATORS, ".txt")
_OF_DATASETS = ("dataset_dict.json", "dataset_info.json")
_TEXTS_AT_ONCE = 1000  # batch size of tokenization
_SHOWN = 12  # names of classes in a message


class Table(NamedTuple):
    """Rows (column name to value), the location of each (`line 3 of 'data.jsonl'`), the path they were
    read from, and the class names if the data defines them."""

    rows: list[Row]
    places: list[str]
    source: str
    names: list[str] | None = None

    def take(self, numbers: Iterable[int]) -> Table:
        """Returns a table with the rows `numbers`."""
        chosen = list(numbers)
        rows, places = [self.rows[i] for i in chosen], [self.places[i] for i in chosen]
        return self._replace(rows=rows, places=places)


class Data(NamedTuple):
    """Training data, held-out data (None if there is none), and a description of the origin."""

    train: Table
    held_out: Table | None
    origin: str


def read(data: Path, held_out: Path | None) -> Data:
    """Reads the rows in `data` and `held_out`. If `held_out` is None, the held-out rows are the part of
    `data` with such a name, else one row in 16 (at least one), the same in every run.

    Raises `InputError` if there are no rows, or, with the line, if a file does not have the format of
    its suffix.
    """
    parts = _parts(data)
    train = parts["train"]
    origin = f"{len(train.rows):,} rows of {data}; held out: "
    if held_out is not None:
        parts, where = _parts(held_out), f"rows of {held_out}"
        held = parts[_held_out_name(parts) or "train"]
    elif name := _held_out_name(parts):
        held, where = parts[name], f"rows, {name}"
    else:
        size = len(train.rows)
        if size < 2:
            return Data(train, None, f"{origin}nothing")
        # Drawn at random, since rows are often sorted or alternate; the same in every run.
        drawn = set(random.Random(0).sample(range(size), max(1, size // EVERY)))
        held, where = train.take(sorted(drawn)), "of them"
        train = train.take(i for i in range(size) if i not in drawn)
    return Data(train, held, f"{origin}{len(held.rows):,} {where}")


def _held_out_name(parts: Iterable[str]) -> str | None:
    return next((name for name in HELD_OUT if name in parts), None)


def _parts(data: Path) -> dict[str, Table]:
    """Reads the parts of `data` by name; `train` is always one of them."""
    if data.is_dir() and any((data / name).exists() for name in _OF_DATASETS):
        parts = _saved(data)
    elif data.is_dir():
        files: dict[str, list[Path]] = {"train": []}
        for path in sorted(data.iterdir()):
            if path.suffix in _SUFFIXES and path.is_file() and not path.name.startswith("."):
                name = path.stem if path.stem in HELD_OUT else "train"
                files.setdefault(name, []).append(path)
        parts = {name: _table(paths, data) for name, paths in files.items()}
    elif data.is_file():
        parts = {"train": _table([data], data)}
    else:
        raise InputError(
            f"the data {str(data)!r} does not exist (looked from {os.getcwd()}): give a file"
            f" ({', '.join(_SUFFIXES)}) or a folder; nothing is downloaded."
        )
    if not parts["train"].rows:
        raise InputError(
            f"the data {str(data)!r} is empty: give a file with rows in it, or a folder with files that"
            f" end in {', '.join(_SUFFIXES)} or that save_to_disk of datasets wrote."
        )
    return parts


def _table(files: Iterable[Path], source: Path) -> Table:
    rows, places = [], []
    for path in files:
        for number, row in _rows(path):
            place = f"line {number} of {str(path)!r}"
            if not isinstance(row, dict):
                raise InputError(
                    f'{place} is no row: give an object for each row, such as {{"text": "..."}}.'
                )
            rows.append(row)
            places.append(place)
    return Table(rows, places, str(source))


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields the rows of a file with their line numbers, or positions in a JSON list, from 1."""
    number = 1
    try:
        text = path.read_text("utf-8-sig")
        if "\0" in text:
            raise ValueError("it has zero bytes, so it is no text")
        if path.suffix in _SEPARATORS:
            separator = _SEPARATORS[path.suffix]
            reader = csv.DictReader(io.StringIO(text), delimiter=separator, strict=True)
            for row in reader:
                number = reader.line_num
                if None in row or None in row.values():
                    raise ValueError("it has more or fewer fields than the first line names")
                yield number, row
        elif path.suffix == ".json" and text.lstrip().startswith("["):
            yield from enumerate(json.loads(text), start=1)
        else:
            is_json = path.suffix in (".jsonl", ".json")
            for number, line in enumerate(text.split("\n"), start=1):
                if line.strip():
                    yield number, json.loads(line) if is_json else {"text": line}
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(
            f"{str(path)!r} cannot be read from line {number} on ({error}): give a file in UTF-8, in"
            " the format that its name says."
        ) from None


def _saved(folder: Path) -> dict[str, Table]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError(
            f"the folder {str(folder)!r} was written by Hugging Face's datasets, which cannot be"
            f" imported ({error}): pip install anybatch[datasets], or give JSON lines (its to_json"
            " writes them)."
        ) from error
    try:
        found: Any = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"the folder {str(folder)!r} cannot be read by datasets ({error})."
        ) from None
    parts = dict(found) if isinstance(found, Mapping) else {"train": found}
    if "train" not in parts:
        raise InputError(
            f"the data sets in {str(folder)!r} are {listed(parts)}: one has to be called 'train', or"
            " give the folder of one."
        )
    tables = {}
    for name, one in parts.items():
        rows = list(one.with_format(None))
        places = [f"row {number} of {str(folder)!r}" for number in range(1, len(rows) + 1)]
        names = getattr(one.features.get("label"), "names", None)
        tables[name] = Table(rows, places, str(folder), names)
    return tables


# ------------------------------------------------------------------------------------------- samples


class Samples(Dataset[Sample]):
    """Dataset of samples `{"input_ids": [tokens] int64, "labels": [tokens] or [] int64}`, stored as
    concatenated tensors. `lengths`: tokens of each sample."""

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


def padded(samples: list[Sample], pad: int) -> Sample:
    """Collates samples of unequal length to a padded batch `[batch, longest]`."""
    ids = [sample["input_ids"] for sample in samples]
    labels = [sample["labels"] for sample in samples]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad),
        "attention_mask": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED)
        if labels[0].dim()
        else torch.stack(labels),
    }


def kind_of(table: Table, wanted: Kind | None) -> Kind:
    """Returns `wanted`, or if it is None, the task that the columns of the first row are for. Raises
    `InputError` if the columns do not fit it, or any task."""
    columns = table.rows[0].keys()
    fits: dict[Kind, bool] = {
        "classification": {"text", "label"} <= columns,
        "causal-lm": "text" in columns or {"prompt", "completion"} <= columns,
    }
    kind = wanted or ("classification" if fits["classification"] else "causal-lm")
    if not fits[kind]:
        raise InputError(
            f"{table.places[0]} has {listed(columns)}, which is no row for {kind}: give rows with"
            " 'text', with 'prompt' and 'completion', or for a classifier with 'text' and 'label'."
        )
    return kind


def classes_of(tables: Sequence[Table]) -> list[str]:
    """Returns the class names: those that the data defines, else the sorted labels, or for numeric
    labels all numbers from 0 to the largest.

    Raises `DataError` for a row with an invalid label, and `InputError` if there is only one class.
    """
    kind = type(tables[0].rows[0].get("label"))
    found = {str(label) for table in tables for label in _labels(table, kind)}
    names = sorted(found)
    if given := next((table.names for table in tables if table.names), None):
        names = given
    elif all(map(str.isdecimal, found)):
        last = max(map(int, found))
        if last >= 2 * len(found) + 1000:
            raise DataError(
                f"the labels of {tables[0].source!r} go up to {last}, and only {len(found)} occur: give"
                " names, or whole numbers that count the classes from 0."
            )
        names = list(map(str, range(last + 1)))
    if len(names) < 2:
        raise InputError(
            f"every row of {tables[0].source!r} has the label {names[0]!r}: a classifier needs two"
            " classes to tell apart."
        )
    return names


def _labels(table: Table, kind: type) -> list[int | str]:
    """Returns the labels. Raises `DataError` for one that is not a name or a number from 0, or not of
    type `kind`."""
    labels: list[Any] = [row.get("label") for row in table.rows]
    for label, place in zip(labels, table.places, strict=True):
        is_label = (type(label) is int and label >= 0) or (isinstance(label, str) and label != "")
        if not is_label or type(label) is not kind:
            raise DataError(
                f"{place} has the label {label!r}: give a name in every row, or in every row a whole"
                " number that counts the classes from 0."
            )
    return labels


def _targets(table: Table, classes: list[str]) -> list[int]:
    """Returns the class index of each row. Raises `DataError` for a label that is not in `classes`."""
    indices = {name: index for index, name in enumerate(classes)}
    kind = type(table.rows[0].get("label"))
    found = []
    for label, place in zip(_labels(table, kind), table.places, strict=True):
        is_index = isinstance(label, int) or (label not in indices and label.isdecimal())
        target = int(label) if is_index else indices.get(str(label), -1)
        if not 0 <= target < len(classes):
            raise DataError(
                f"{place} has the label {label!r}, which is none of the {len(classes)} classes that the"
                f" model tells apart ({', '.join(classes[:_SHOWN])}): mend the row, or give a model for"
                " more."
            )
        found.append(target)
    return found


def encoded(
    table: Table, kind: Kind, tokenizer: Any, longest: int, classes: list[str]
) -> tuple[Samples, int]:
    """Tokenizes `table`. Returns the samples and the number of truncated ones. Rows that cannot add to
    the loss (an empty text, or a completion that is empty or completely truncated) are left out, with a
    warning that names the first.

    Raises `DataError` for a row that differs in form from the first one, and `InputError` if no row is
    left.
    """
    ids, labels = _tokens_and_labels(table, kind, tokenizer)
    if kind == "classification":
        targets: list[Any] = _targets(table, classes)
        kept = [number for number, one in enumerate(ids) if one]
    else:
        targets = [one[:longest] for one in labels]
        kept = [number for number, one in enumerate(targets) if any(x != IGNORED for x in one[1:])]
    missing = [table.places[i] for i in sorted(set(range(len(ids))) - set(kept))]
    if missing:
        warnings.warn(
            f"left out, since there is nothing in it to learn from: {some(missing, 1)} (an empty text,"
            " or a completion that is empty or was cut off).",
            stacklevel=3,
        )
    if not kept:
        raise InputError(
            f"no row of {table.source!r} has anything to learn from: give texts that are not empty"
            f" (and completions that begin within {longest} tokens)."
        )
    samples = Samples([ids[i][:longest] for i in kept], [targets[i] for i in kept])
    return samples, sum(len(ids[i]) > longest for i in kept)


def _tokens_and_labels(
    table: Table, kind: Kind, tokenizer: Any
) -> tuple[list[list[int]], list[list[int]]]:
    is_pair = {"prompt", "completion"} <= table.rows[0].keys() and kind == "causal-lm"
    last = _encoded(table, "completion" if is_pair else "text", tokenizer, whole=not is_pair)
    if kind == "classification":
        return last, last
    end = tokenizer.eos_token_id
    ended = [[*one, end] if one and end is not None and one[-1] != end else one for one in last]
    if not is_pair:
        return ended, ended
    prompts = _encoded(table, "prompt", tokenizer)
    begun = [one[:-1] if one and one[-1] == end else one for one in prompts]
    labels = [[IGNORED] * len(a) + b for a, b in zip(begun, ended, strict=True)]
    return [a + b for a, b in zip(begun, ended, strict=True)], labels


def _encoded(table: Table, column: str, tokenizer: Any, whole: bool = True) -> list[list[int]]:
    """Tokenizes a column of texts; a blank text has no tokens. With `whole`, the tokenizer adds its
    special tokens for the start and end of a text, if it has any. Raises `DataError` for a row without
    a text."""
    texts: list[Any] = [row.get(column) for row in table.rows]
    for text, place in zip(texts, table.places, strict=True):
        if not isinstance(text, str):
            raise DataError(
                f"{place} has {text!r} as {column!r}: give a text in every row, as in the first."
            )
    found: list[list[int]] = []
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        batch = texts[start : start + _TEXTS_AT_ONCE]
        made = tokenizer(  # no warning of long texts, since they are truncated and counted
            batch, add_special_tokens=whole, return_attention_mask=False, verbose=False
        )["input_ids"]
        found += [one if text.strip() else [] for one, text in zip(made, batch, strict=True)]
    return found

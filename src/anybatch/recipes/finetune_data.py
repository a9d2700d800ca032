"""Rows to fine-tune on, from files, each with the place that an error names.

    .jsonl .ndjson    an object per line          .csv .tsv    with a line of names first
    .json             a list of objects, or lines             .txt  ...    a text per line
    a folder          of such files (train.*, and valid.*, validation.*, dev.* or test.* held out)
    a folder          that `save_to_disk` of Hugging Face's datasets wrote

Files are read by Python's own readers, which know the line of a fault. The library `datasets`, which
brings a hundred megabytes, is asked for its own folders only.
"""

from __future__ import annotations

import csv
import json
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from anybatch.errors import InputError, listed
from anybatch.recipes.text_data import EVERY

HELD_OUT = ("validation", "valid", "dev", "test")
"""Names of held-out parts, the likelier first."""

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_OF_LINES = (".jsonl", ".ndjson")
_SUFFIXES = (*_OF_LINES, ".json", *_SEPARATORS, ".txt")
_EXAMPLE = 'such as {"text": "..."}'

Row = Mapping[str, Any]
_Rows = Iterator[tuple[int, Row]]


class Table(NamedTuple):
    """Rows and where they are from.

    Attributes:
        rows: name of the column to value.
        at: of each row, which of the `files`, and its number in it, from 1.
        files: paths, for messages.
        unit: what the numbers count: `line` or `row`.
        names: of the classes, where the data itself has them.
    """

    rows: list[Row]
    at: list[tuple[int, int]]
    files: list[str]
    unit: str
    names: list[str] | None = None

    def place(self, number: int) -> str:
        """Of row `number`, from 0: `line 3 of 'data.jsonl'`."""
        file, line = self.at[number]
        return f"{self.unit} {line} of {self.files[file]!r}"

    def take(self, numbers: Iterable[int]) -> Table:
        """The table of these rows."""
        chosen = list(numbers)
        rows, at = [self.rows[i] for i in chosen], [self.at[i] for i in chosen]
        return self._replace(rows=rows, at=at)


class Data(NamedTuple):
    """What to train on, what is held out (None: nothing), and a sentence on where it is from."""

    train: Table
    held_out: Table | None
    origin: str


def read(data: Path, held_out: Path | None) -> Data:
    """The rows in `data`, and those in `held_out`. Without it: the part of `data` that is called so,
    else one row in 16 (one of fewer), the same ones in every run.

    Raises `InputError` if there are none, or a file is not what its name says: with the line.
    """
    parts = _parts(data)
    train, name = parts["train"], _held_out_name(parts)
    if held_out is not None:
        others = _parts(held_out)
        held = others[_held_out_name(others) or "train"]
        return Data(
            train, held, f"{_count(train)} of {data}; held out: {_count(held)} of {held_out}"
        )
    if name is not None:
        held = parts[name]
        return Data(train, held, f"{_count(train)} of {data}; held out: its {_count(held)}, {name}")
    size = len(train.rows)
    if size < 2:
        return Data(train, None, f"{_count(train)} of {data}; nothing held out")
    # Drawn, since rows often come in turns or sorted; the same ones in every run.
    drawn = set(random.Random(0).sample(range(size), max(1, size // EVERY)))
    kept, held = train.take(i for i in range(size) if i not in drawn), train.take(sorted(drawn))
    return Data(kept, held, f"{_count(train)} of {data}; held out: {_count(held)} of them")


def _held_out_name(parts: Iterable[str]) -> str | None:
    return next((name for name in HELD_OUT if name in parts), None)


def _count(table: Table) -> str:
    return f"{len(table.rows):,} {table.unit}{'s' if len(table.rows) != 1 else ''}"


def _parts(data: Path) -> dict[str, Table]:
    """By name, with `train` among them."""
    if not data.is_dir() and not data.is_file():
        what = "is neither a file nor a folder" if data.exists() else "does not exist"
        raise InputError(
            f"the data {str(data)!r} {what} (looked from {os.getcwd()}): give a file"
            f" ({', '.join(_SUFFIXES)}) or a folder; nothing is downloaded."
        )
    if data.is_file():
        parts = {"train": _table([data])}
    elif (data / "dataset_dict.json").exists() or (data / "dataset_info.json").exists():
        parts = _saved(data)
    else:
        parts = _folder(data)
    if not parts["train"].rows:
        raise InputError(f"the data {str(data)!r} is empty: give some with rows in it.")
    return parts


def _folder(folder: Path) -> dict[str, Table]:
    files = sorted(
        path
        for path in folder.iterdir()
        if path.suffix in _SUFFIXES and path.is_file() and not path.name.startswith(".")
    )
    held = _held_out_name([path.stem for path in files])
    train = [path for path in files if path.stem not in HELD_OUT]
    if not train:
        raise InputError(
            f"the folder {str(folder)!r} has nothing to train on: give one with files that end in"
            f" {', '.join(_SUFFIXES)}, or one that save_to_disk of datasets wrote."
        )
    parts = {"train": _table(train)}
    return parts if held is None else parts | {held: _table([p for p in files if p.stem == held])}


def _table(files: list[Path]) -> Table:
    found = [(file, *one) for file, path in enumerate(files) for one in _rows(path)]
    at = [(file, number) for file, number, _ in found]
    return Table([row for *_, row in found], at, [str(path) for path in files], "line")


# ------------------------------------------------------------------------------------------- files


def _rows(path: Path) -> _Rows:
    """The rows of a file and their numbers, from 1."""
    if path.suffix in _SEPARATORS:
        yield from _separated(path)
        return
    lines = [(number, line) for number, line in _lines(path) if line.strip()]
    if path.suffix == ".json" and lines and lines[0][1].lstrip().startswith("["):
        yield from _list(path)
    elif path.suffix in (*_OF_LINES, ".json"):
        for number, line in lines:
            yield number, _object(line, number, path)
    else:
        yield from ((number, {"text": line}) for number, line in lines)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbers, from 1, and lines without their ends. Raises `InputError` if it is no text."""
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if b"\0" in line:
                    raise InputError(
                        f"line {number} of {str(path)!r} has a zero byte, so it is no text: give a"
                        " file in UTF-8."
                    )
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"line {number} of {str(path)!r} is no text in UTF-8 (byte"
            f" {error.object[error.start]:#04x}): give a file in UTF-8."
        ) from None
    except OSError as error:
        raise InputError(f"the file {str(path)!r} cannot be read: {error.strerror}.") from None


def _object(line: str, number: int, path: Path) -> Row:
    try:
        found = json.loads(line)
    except ValueError as error:
        words, column = getattr(error, "msg", str(error)), getattr(error, "colno", 1)
        raise InputError(
            f"line {number} of {str(path)!r} is not JSON ({words}, column {column}): give one object"
            f" per line, {_EXAMPLE}."
        ) from None
    return _checked(found, f"line {number} of {str(path)!r}")


def _list(path: Path) -> _Rows:
    try:
        found = json.loads("\n".join(line for _, line in _lines(path)))
    except ValueError as error:
        raise InputError(
            f"line {getattr(error, 'lineno', 1)} of {str(path)!r} is not JSON"
            f" ({getattr(error, 'msg', error)}): give a list of objects, or one object per line."
        ) from None
    for number, row in enumerate(found, start=1):
        yield number, _checked(row, f"entry {number} of the list in {str(path)!r}")


def _checked(row: Any, place: str) -> Row:
    if not isinstance(row, dict):
        what = "null" if row is None else f"a value of type {type(row).__name__}"
        raise InputError(f"{place} is {what}: give an object for each row, {_EXAMPLE}.")
    return row


def _separated(path: Path) -> _Rows:
    lines = (f"{line}\n" for _, line in _lines(path))
    reader = csv.DictReader(lines, delimiter=_SEPARATORS[path.suffix], strict=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                more = "more" if None in row else "fewer"
                raise InputError(
                    f"line {reader.line_num} of {str(path)!r} has {more} than the"
                    f" {len(reader.fieldnames or ())} fields that its first line names: quote fields"
                    " that have a separator in them."
                )
            yield reader.line_num, row
    except csv.Error as error:
        raise InputError(
            f"line {reader.line_num} of {str(path)!r} is not {path.suffix[1:].upper()} ({error}): mend"
            " it, or give JSON lines."
        ) from None


# ------------------------------------------------------------------------------------------- datasets


def _saved(folder: Path) -> dict[str, Table]:
    """What `save_to_disk` wrote."""
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
            f"the folder {str(folder)!r} cannot be read by datasets ({error}): save it again with"
            " save_to_disk."
        ) from None
    if not isinstance(found, Mapping):
        return {"train": _rows_of(found, str(folder))}
    if "train" not in found:
        raise InputError(
            f"the data sets in {str(folder)!r} are {listed(found)}: one has to be called 'train', or"
            " give the folder of one."
        )
    return {name: _rows_of(one, str(folder / name)) for name, one in found.items()}


def _rows_of(found: Any, folder: str) -> Table:
    """The rows of a `datasets.Dataset`, as plain Python values."""
    names = getattr(found.features.get("label"), "names", None)
    rows = list(found.with_format(None))
    return Table(rows, [(0, i) for i in range(1, len(rows) + 1)], [folder], "row", names)

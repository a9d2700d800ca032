"""What the tests use of Hugging Face's `datasets`, which with pyarrow and pandas is 270 MB: the same
names, arguments and results. Where the library is installed the same tests run on it, too, which shows
that this is like it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(params=["stand-in", "library"])
def datasets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`datasets`, as an import finds it during the test."""
    if request.param == "library":
        return pytest.importorskip("datasets")
    module = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


class Value:
    """A kind of value."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype


class ClassLabel:
    """Whole numbers with names."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)


class Features(dict[str, Any]):
    """What the columns hold, by name."""


class Dataset:
    """Rows, held by columns."""

    def __init__(self, columns: Mapping[str, Sequence[Any]], features: Features) -> None:
        self._columns = {name: list(values) for name, values in columns.items()}
        self.features = features

    @classmethod
    def from_dict(
        cls, columns: Mapping[str, Sequence[Any]], features: Features | None = None
    ) -> Dataset:
        return cls(columns, features or Features({name: Value("null") for name in columns}))

    @classmethod
    def from_list(cls, rows: Sequence[Mapping[str, Any]]) -> Dataset:
        # Arrow has no tensors: they come back as lists.
        plain = [{n: v.tolist() if hasattr(v, "tolist") else v for n, v in r.items()} for r in rows]
        return cls.from_dict({name: [row[name] for row in plain] for name in plain[0]})

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._columns[key]
        if isinstance(key, int):
            return {name: values[key] for name, values in self._columns.items()}
        return {name: [values[i] for i in key] for name, values in self._columns.items()}

    def __getitems__(self, keys: Sequence[int]) -> list[dict[str, Any]]:
        return [self[int(key)] for key in keys]

    def with_format(self, kind: None) -> Dataset:
        assert kind is None
        return self

    def select(self, indices: Sequence[int]) -> Dataset:
        return Dataset(self[indices], self.features)

    def save_to_disk(self, path: str) -> None:
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        names = {n: f.names for n, f in self.features.items() if isinstance(f, ClassLabel)}
        (folder / "dataset_info.json").write_text(json.dumps(names))
        (folder / "state.json").write_text(json.dumps(self._columns))


class DatasetDict(dict[str, Dataset]):
    """Several of them, by name."""

    def save_to_disk(self, path: str) -> None:
        for name, one in self.items():
            one.save_to_disk(str(Path(path) / name))
        (Path(path) / "dataset_dict.json").write_text(json.dumps({"splits": list(self)}))


def load_from_disk(path: str) -> Dataset | DatasetDict:
    """What `save_to_disk` wrote."""
    folder = Path(path)
    if (folder / "dataset_dict.json").exists():
        told = json.loads((folder / "dataset_dict.json").read_text())
        return DatasetDict({n: load_from_disk(str(folder / n)) for n in told["splits"]})
    names = json.loads((folder / "dataset_info.json").read_text())
    columns = json.loads((folder / "state.json").read_text())
    kinds = {n: ClassLabel(names[n]) if n in names else Value("null") for n in columns}
    return Dataset(columns, Features(kinds))

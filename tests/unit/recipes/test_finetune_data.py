"""Rows from files, what is held out, and every file that is not what its name says."""

from __future__ import annotations

import json

import pytest
from tests.stand_in_datasets import datasets as datasets

from anybatch.errors import InputError
from anybatch.recipes.finetune_data import read

TEXTS = [{"text": f"text {i}"} for i in range(5)]


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def rows(data):
    return [*data.train.rows, *(data.held_out.rows if data.held_out else ())]


def texts(data):
    return sorted(row["text"] for row in rows(data))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", lines(TEXTS)),
        ("a.jsonl", "\n" + lines(TEXTS).replace("\n", "\n\n")),
        ("a.jsonl", b"\xef\xbb\xbf" + lines(TEXTS).encode()),
        ("a.json", json.dumps(TEXTS, indent=1)),
        ("a.json", lines(TEXTS)),
        ("a.csv", "text\n" + "".join(f"text {i}\r\n" for i in range(5))),
        ("a.tsv", "text\n" + "".join(f"text {i}\n" for i in range(5))),
        ("a.txt", "".join(f"text {i}\n\n" for i in range(5))),
        ("no-suffix", "".join(f"text {i}\n" for i in range(5))),
    ],
)
def test_every_kind_of_file_has_the_same_rows(tmp_path, name, text):
    data = read(write(tmp_path / name, text), None)
    assert texts(data) == [row["text"] for row in TEXTS]
    assert len(data.held_out.rows) == 1


def test_fields_may_have_separators_and_line_ends_in_them(tmp_path):
    path = write(tmp_path / "a.csv", 'text,label\n"a, ""b""\nc",x\nd,y\n')
    data = read(path, path)
    assert data.train.rows == [{"text": 'a, "b"\nc', "label": "x"}, {"text": "d", "label": "y"}]
    assert data.train.places[1] == f"line 4 of {str(path)!r}"


def test_a_place_is_that_in_the_file(tmp_path):
    path = write(tmp_path / "a.jsonl", "\n\n" + lines(TEXTS))
    data = read(path, None)
    for table in (data.train, data.held_out):
        for number, row in enumerate(table.rows):
            line = int(row["text"].split()[1]) + 3
            assert table.places[number] == f"line {line} of {str(path)!r}"


@pytest.mark.parametrize(("size", "held"), [(1, 0), (2, 1), (15, 1), (16, 1), (40, 2)])
def test_a_part_is_held_out(tmp_path, size, held):
    path = write(tmp_path / "a.jsonl", lines([{"text": str(i)} for i in range(size)]))
    data = read(path, None)
    assert (len(data.held_out.rows) if data.held_out else 0) == held
    assert sorted(int(row["text"]) for row in rows(data)) == list(range(size))
    assert read(path, None) == data  # the same ones in every run


def test_parts_of_a_folder_are_known_by_their_names(tmp_path):
    write(tmp_path / "train.jsonl", lines(TEXTS))
    write(tmp_path / "valid.jsonl", lines(TEXTS[:2]))
    write(tmp_path / "test.jsonl", lines(TEXTS[:1]))
    write(tmp_path / ".hidden.jsonl", "not JSON")
    write(tmp_path / "README.md", "not data")
    data = read(tmp_path, None)
    assert (len(data.train.rows), len(data.held_out.rows)) == (5, 2)
    assert "held out: 2 rows, valid" in data.origin


def test_a_folder_of_files_is_read_in_order(tmp_path):
    write(tmp_path / "b.jsonl", lines(TEXTS[3:]))
    write(tmp_path / "a.jsonl", lines(TEXTS[:3]))
    data = read(tmp_path, tmp_path)
    assert data.train.rows == TEXTS
    assert data.train.places[3] == f"line 1 of {str(tmp_path / 'b.jsonl')!r}"


def test_held_out_rows_may_be_given(tmp_path):
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    data = read(write(one, lines(TEXTS)), write(other, lines(TEXTS[:2])))
    assert (data.train.rows, data.held_out.rows) == (TEXTS, TEXTS[:2])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "a.jsonl",
            '{"text": "a"}\n{"text": oops}\n',
            "a.jsonl' cannot be read from line 2 on .*column 10",
        ),
        (
            "a.jsonl",
            '{"text": "a"}\n["b"]\n',
            "line 2 of .* is no row: give an object",
        ),
        ("a.jsonl", "null\n", "line 1 of .* is no row"),
        (
            "a.jsonl",
            b'{"text": "a"}\n\xff\n',
            "cannot be read .*byte 0xff in position 14",
        ),
        ("a.jsonl", b"a\0b", "cannot be read .*zero bytes"),
        ("a.json", '[{"text": "a"},\n {"text" "b"}]', "cannot be read .*line 2 column"),
        ("a.json", '[{"text": "a"}, 3]', "line 2 of .* is no row"),
        ("a.csv", "text,label\na,b,c\n", "from line 2 on .*more or fewer fields"),
        ("a.csv", "text,label\na\n", "from line 2 on .*more or fewer fields"),
        ("a.csv", 'text\n"a\n', "cannot be read .*unexpected end"),
        ("a.txt", b"\x89PNG\r\n", "from line 1 on .*byte 0x89"),
        ("a.jsonl", "", "is empty: give a file with rows"),
        ("a.txt", "\n \n", "is empty"),
        ("a.csv", "text\n", "is empty"),
    ],
)
def test_a_file_that_is_not_what_its_name_says(tmp_path, name, text, said):
    path = write(tmp_path / name, text)
    with pytest.raises(InputError, match=said):
        read(path, None)


def test_what_is_not_there(tmp_path):
    with pytest.raises(InputError, match=r"'some/dataset' does not exist .* nothing is downloaded"):
        read(tmp_path.joinpath("x").relative_to(tmp_path).parent / "some/dataset", None)
    with pytest.raises(InputError, match=r"is empty: give .* a folder with files that end in"):
        read(tmp_path, None)


def test_a_folder_of_datasets(tmp_path, datasets):
    label = datasets.ClassLabel(names=["no", "yes"])
    one = datasets.Dataset.from_dict(
        {"text": ["a", "b", "c"], "label": [0, 1, 0]},
        features=datasets.Features({"text": datasets.Value("string"), "label": label}),
    )
    one.save_to_disk(str(tmp_path / "one"))
    data = read(tmp_path / "one", tmp_path / "one")
    assert data.train.rows == [
        {"text": t, "label": i} for t, i in zip("abc", (0, 1, 0), strict=True)
    ]
    assert data.train.names == ["no", "yes"]
    assert data.train.places[1] == f"row 2 of {str(tmp_path / 'one')!r}"

    parts = datasets.DatasetDict({"train": one, "validation": one.select([0])})
    parts.save_to_disk(str(tmp_path / "parts"))
    data = read(tmp_path / "parts", None)
    assert (len(data.train.rows), len(data.held_out.rows)) == (3, 1)
    datasets.DatasetDict({"other": one}).save_to_disk(str(tmp_path / "none"))
    with pytest.raises(InputError, match="one has to be called 'train'"):
        read(tmp_path / "none", None)


def test_a_folder_of_datasets_without_the_library(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(InputError, match=r"pip install anybatch.datasets., or give JSON lines"):
        read(tmp_path, None)

"""Text from files: which, in which order, how it is divided and cut, and what is refused."""

from __future__ import annotations

import itertools
import os
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anybatch.errors import InputError
from anybatch.recipes.text_data import IGNORED, Windows, read, stream


def folder_of(tmp_path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path


# ----------------------------------------------------------------------------------------- windows


@given(
    texts=st.lists(st.binary(max_size=20), min_size=1, max_size=5),
    context=st.integers(1, 9),
)
def test_every_token_but_the_first_is_predicted_once(texts, context):
    tokens = stream(texts)
    if len(tokens) <= context:
        with pytest.raises(InputError, match="too few for one window"):
            Windows(texts, context, "the text")
        return
    windows = Windows(texts, context, "the text")
    samples = [windows[i] for i in range(len(windows))]
    assert {tuple(one.shape) for one, _ in samples} == {(context + 1,)}
    targets = torch.cat([one[1:] for one, _ in samples])
    assert torch.equal(targets[: len(tokens) - 1], tokens[1:])
    assert (targets[len(tokens) - 1 :] == IGNORED).all()
    assert len(targets) - (len(tokens) - 1) < context
    assert windows.lengths.tolist() == [int((one[1:] != IGNORED).sum()) for one, _ in samples]
    for (before, _), (after, _) in itertools.pairwise(samples):
        assert before[-1] == after[0]
    # The first token is predicted by nothing, and so its byte is not counted.
    assert sum(int(n) for _, n in samples) == len(b"".join(texts)) - bool(texts[0])


def test_texts_follow_each_other_with_an_end_after_each():
    assert stream([b"ab", b"", b"\xff"]).tolist() == [97, 98, 256, 256, 255, 256]


def test_windows_end_where_they_end():
    windows = Windows([b"abcdef"], 3, "the text")
    assert torch.equal(windows[-1][0], windows[1][0])
    with pytest.raises(IndexError):
        windows[2]
    assert list(windows[0][0]) == list(b"abcd")


# ------------------------------------------------------------------------------------------- files


def test_without_data_it_reads_the_library_of_python():
    small, large = read(None, 100_000), read(None, 300_000)
    texts = sorted([*large.train, *large.held_out])
    assert sum(map(len, texts)) == 300_000
    assert any(b"def " in text for text in texts)
    assert small.train[0] == large.train[0]
    assert read(None, 300_000) == large
    assert "library of Python" in large.origin


def test_files_are_read_from_the_top_down_in_order(tmp_path):
    files = {"b.txt": b"2", "a/z.md": b"3", "a.rst": b"1", "c/d/e": b"4", ".hidden": b"no"}
    files |= {".git/x": b"no", "empty": b""}
    source = read(folder_of(tmp_path, files), 1000)
    assert b"".join([*source.train, *source.held_out]) == b"1234"


def test_the_limit_ends_the_text_where_it_is_reached(tmp_path):
    folder = folder_of(tmp_path, {"a": b"xyz", "b": "éé".encode(), "c": b"no"})
    for limit in range(2, 10):
        source = read(folder, limit)
        assert b"".join([*source.train, *source.held_out]) == "xyzééno".encode()[:limit]


@pytest.mark.parametrize("num_files", [1, 5, 40])
def test_the_end_is_held_out(tmp_path, num_files):
    lines = b"line\n" * 200
    folder = folder_of(tmp_path, {str(i): lines for i in range(num_files)})
    source = read(folder, 100_000)
    assert b"".join([*source.train, *source.held_out]) == lines * num_files
    held = sum(map(len, source.held_out))
    assert held == pytest.approx(1000 * num_files / 16, abs=5)
    assert source.train[-1].endswith(b"\n")


def test_text_without_line_ends_is_cut_all_the_same(tmp_path):
    folder = folder_of(tmp_path, {"one": b"e" * 1600})
    source = read(folder / "one", 10_000)
    assert (source.train, source.held_out) == ([b"e" * 1500], [b"e" * 100])


def test_what_is_not_text_is_left_out_of_a_folder_and_named(tmp_path):
    binary = dict.fromkeys(("b.png", "c.bin", "d", "e"), b"a\0b")
    files = {"a.txt": b"words", **binary}
    os.mkfifo(tmp_path / "pipe")
    with pytest.warns(UserWarning, match=r"4 files left out of .*'b.png', 'c.bin', 'd' and 1 more"):
        source = read(folder_of(tmp_path, files), 1000)
    assert b"".join([*source.train, *source.held_out]) == b"words"
    assert "(4 files left out)" in source.origin


def test_a_link_that_leads_nowhere_is_no_text(tmp_path):
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    (tmp_path / "round").symlink_to(tmp_path)
    folder_of(tmp_path, {"a": b"words"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(tmp_path, 100).train + read(tmp_path, 100).held_out != []


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "does not exist .*looked from.*give a file with text"),
        (lambda path: path.mkdir(), "has no text in it"),
        (lambda path: path.write_bytes(b""), "has no text in it"),
        (lambda path: path.write_bytes(b"abc\0"), r"has no text in it \(1 file left out\)"),
        (os.mkfifo, "has no text in it"),
    ],
)
def test_data_that_is_no_text_is_refused_by_name(tmp_path, make, said):
    path = tmp_path / "data"
    make(path)
    with pytest.raises(InputError, match=f"data.*{said}"):
        read(path, 1000)


def test_a_python_without_its_sources_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(InputError, match="has no text in it: give a file with text"):
        read(None, 1000)


def test_too_little_text_is_refused():
    for texts, count in (([b"abcd"], 5), ([], 0)):
        with pytest.raises(InputError, match=f"has {count} tokens, too few for one window of 8"):
            Windows(texts, 8, "the text")

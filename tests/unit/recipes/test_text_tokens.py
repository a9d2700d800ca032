"""Tokens of text: every byte comes back, a token stands for a known number of bytes."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anybatch.errors import InputError
from anybatch.recipes import text_tokens
from anybatch.recipes.text_tokens import Bytes, Merges, dtype_of, stream, vocabulary_of

WORDS = [b"the cat and the hat and the mat\n" * 20, "žluťoučký kůň\n".encode() * 20]
LEARN = """
import sys
from anybatch.recipes.text_tokens import Merges, stream
words = [b"the cat and the hat and the mat\\n" * 20, "žluťoučký kůň\\n".encode() * 20]
print(stream(words, Merges(280, words)).tolist())
"""


@pytest.fixture(scope="module")
def merges() -> Merges:
    pytest.importorskip("tokenizers")
    return Merges(280, WORDS)


@settings(deadline=None, max_examples=30)
@given(text=st.text())
def test_every_text_comes_back_and_its_bytes_are_counted(merges, text):
    for vocabulary in (Bytes(), merges):
        tokens = vocabulary.encode(text.encode())
        assert vocabulary.decode(tokens.tolist()) == text
        assert vocabulary.num_bytes()[tokens.long()].sum() == len(text.encode())


def test_bytes_are_their_own_tokens():
    assert Bytes().encode(b"\x00a\xff").tolist() == [0, 97, 255]
    assert Bytes().decode([0xC3, 97, 256]) == "\N{REPLACEMENT CHARACTER}a"
    assert Bytes().num_bytes().tolist() == [1] * 256 + [0]


def test_texts_follow_each_other_with_an_end_after_each(merges):
    assert stream([b"ab", b"", b"c"], Bytes()).tolist() == [97, 98, 256, 256, 99, 256]
    tokens = stream([b"the cat", b"the"], merges)
    assert (tokens == merges.end).nonzero().flatten().tolist()[-1] == len(tokens) - 1
    assert merges.decode(tokens.tolist()) == "the catthe"


def test_merges_learn_words_of_the_text(merges):
    assert (merges.size, merges.end) == (280, 279)
    assert len(merges.encode(b" the and the")) == 3
    assert merges.num_bytes()[merges.end] == 0


def test_merges_are_the_same_in_every_process(merges):
    done = subprocess.run(
        [sys.executable, "-c", LEARN], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == str(stream(WORDS, merges).tolist())


def test_merges_can_be_sent_to_another_process(merges):
    sent = pickle.loads(pickle.dumps(merges))
    assert torch.equal(sent.encode(WORDS[0]), merges.encode(WORDS[0]))


def test_a_long_text_is_cut_after_lines(merges, monkeypatch):
    whole = merges.encode(WORDS[1])
    monkeypatch.setattr(text_tokens, "_PIECE_BYTES", 50)
    assert len(list(text_tokens._pieces(WORDS[1]))) == 7
    assert torch.equal(merges.encode(WORDS[1]), whole)


def test_merges_are_learned_from_the_beginning_of_the_text(monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(text_tokens, "_PIECE_BYTES", 1)
    monkeypatch.setattr(text_tokens, "LEARNED_BYTES", 4)
    assert Merges(258, [b"abab\n" * 9, b"cdcd\n" * 99]).decode([256]) == "ab"


def test_the_type_of_tokens_is_as_small_as_it_can_be():
    assert dtype_of(257) == dtype_of(32768) == torch.int16
    assert dtype_of(32769) == torch.int32


@pytest.mark.parametrize("size", [256, 0, -1])
def test_a_vocabulary_without_all_bytes_is_refused(size):
    with pytest.raises(InputError, match=f"vocabulary is {size}: give at least 257"):
        vocabulary_of(size, WORDS)


def test_more_tokens_than_the_text_gives_are_refused():
    pytest.importorskip("tokenizers")
    with pytest.raises(InputError, match=r"vocabulary is 9000.*gives only (\d+).*=\1 or less"):
        vocabulary_of(9000, WORDS)


def test_without_tokenizers_the_remedy_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert vocabulary_of(257, WORDS).size == 257
    with pytest.raises(InputError, match=r"pip install anybatch\[hf\]"):
        vocabulary_of(300, WORDS)

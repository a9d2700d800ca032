"""Tokens of text: bytes as they are, or byte-level BPE trained on the text itself.

Both know every byte, so no text has an unknown token, and a token stands for a known number of bytes,
which makes losses of different vocabularies comparable (bits per byte). One more token, `end`, ends a
text and stands for no byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from anybatch.errors import InputError

NUM_BYTES = 256
LEAST = NUM_BYTES + 1
"""The smallest vocabulary: the bytes and the end of a text."""

LEARNED_BYTES = 16 << 20
"""The merges of BPE are learned from this much of the text, from its beginning."""

_PIECE_BYTES = 1 << 20


class Bytes:
    """A token is a byte. `size`: number of tokens, `end` included; `end`: the token after each text."""

    size: int = LEAST
    end: int = NUM_BYTES

    def encode(self, text: bytes) -> Tensor:
        """The tokens `[n]` of `text`, without `end`, in `dtype_of(size)`."""
        values = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0)
        return values.to(dtype_of(self.size))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, without `end`; bytes that are no character become U+FFFD."""
        return bytes(token for token in tokens if token != self.end).decode(errors="replace")

    def num_bytes(self) -> Tensor:
        """How many bytes each token stands for, `[size]` int64; 0 for `end`."""
        return (torch.arange(self.size) != self.end).long()


class Merges:
    """Byte-level BPE (Radford et al. 2019, "Language models are unsupervised multitask learners",
    section 2.2), by Hugging Face's tokenizers. Attributes and methods are those of `Bytes`.

    Raises `InputError` if `texts` give fewer than `size` tokens, or the library is missing.
    """

    def __init__(self, size: int, texts: Sequence[bytes]) -> None:
        library = _tokenizers()
        byte_level = library.pre_tokenizers.ByteLevel
        self._tokenizer = library.Tokenizer(library.models.BPE())
        self._tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
        self._tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=size - 1,
            initial_alphabet=sorted(byte_level.alphabet()),  # a set, in no order of its own
            show_progress=False,
        )
        self._tokenizer.train_from_iterator(_beginning(texts), trainer)
        # The end is none of the tokenizer's tokens: no text can spell it.
        self.end: int = self._tokenizer.get_vocab_size()
        self.size: int = self.end + 1
        if self.size < size:
            raise InputError(
                f"vocabulary is {size}, but the text gives only {self.size} tokens: give"
                f" vocabulary={self.size} or less, or more text."
            )

    def encode(self, text: bytes) -> Tensor:
        found = self._tokenizer.encode_batch_fast(list(_pieces(text)), add_special_tokens=False)
        return torch.tensor([i for one in found for i in one.ids], dtype=dtype_of(self.size))

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([token for token in tokens if token != self.end])

    def num_bytes(self) -> Tensor:
        # In its own alphabet a byte is one character.
        lengths = [len(self._tokenizer.id_to_token(token)) for token in range(self.end)]
        return torch.tensor([*lengths, 0])


Vocabulary: TypeAlias = Bytes | Merges


def vocabulary_of(size: int, texts: Sequence[bytes]) -> Vocabulary:
    """Bytes where `size` is 257, else byte-level BPE learned from the first 16 MiB of `texts`. The
    same texts give the same tokens, in every process.

    Raises `InputError` if `size` is below 257 or more than the texts give, or `tokenizers` is missing.
    """
    if size < LEAST:
        raise InputError(
            f"vocabulary is {size}: give at least {LEAST}, one token for each of the {NUM_BYTES}"
            " bytes and one for the end of a text."
        )
    return Bytes() if size == LEAST else Merges(size, texts)


def dtype_of(size: int) -> torch.dtype:
    """The smallest signed type for tokens below `size`: -100, which counts nothing, fits too."""
    return torch.int16 if size <= 1 << 15 else torch.int32


def stream(texts: Iterable[bytes], vocabulary: Vocabulary) -> Tensor:
    """The tokens `[n]` of all `texts` one after the other, each followed by `end`."""
    end = torch.tensor([vocabulary.end], dtype=dtype_of(vocabulary.size))
    parts = [part for text in texts for part in (vocabulary.encode(text), end)]
    return torch.cat(parts) if parts else end[:0]


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise InputError(
            f"a vocabulary of more than {LEAST} is made by Hugging Face's tokenizers, which cannot be"
            f" imported ({error}): pip install anybatch[hf], or give vocabulary={LEAST}, bytes."
        ) from error
    return tokenizers


def _beginning(texts: Iterable[bytes]) -> Iterator[str]:
    left = LEARNED_BYTES
    for piece in (piece for text in texts for piece in _pieces(text)):
        if left <= 0:
            return
        yield piece
        left -= len(piece)


def _pieces(text: bytes) -> Iterator[str]:
    """`text` in pieces of about 1 MiB, cut after line ends, so that many can be encoded at once."""
    begin = 0
    while begin < len(text):
        end = text.find(b"\n", begin + _PIECE_BYTES - 1) + 1 or len(text)
        yield text[begin:end].decode()
        begin = end

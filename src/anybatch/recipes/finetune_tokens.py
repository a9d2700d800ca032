"""Tokens of a model: those of the tokenizer in its folder, or bytes.

Bytes are for a model without trained weights that has no tokenizer either: any model from a
configuration of at least 257 words can then be trained on any text.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

from anybatch.errors import InputError
from anybatch.recipes.finetune_model import Source, first_line, libraries
from anybatch.recipes.text_tokens import LEAST, Bytes

_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model"),
    *("sentencepiece.bpe.model", "vocab.json", "vocab.txt"),
)


class Tokenizer:
    """A tokenizer of transformers.

    Attributes:
        begin, end: the tokens before and after a text, or None.
        unknown: the token for what it has no word for, or None.
        pad: a token that fills up what is shorter; it is masked, so which one does not matter.
        longest: tokens of a text at most, or None.
        what: in words.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.begin: int | None = tokenizer.bos_token_id
        self.end: int | None = tokenizer.eos_token_id
        self.unknown: int | None = tokenizer.unk_token_id
        pad = tokenizer.pad_token_id
        self.pad: int = pad if pad is not None else self.end or 0
        given = tokenizer.model_max_length
        self.longest: int | None = int(given) if given < 1 << 30 else None  # 1e30: not known
        self.what: str = f"the tokens of its tokenizer ({len(tokenizer):,})"

    def encode(self, texts: Sequence[str], whole: bool = True) -> list[list[int]]:
        """The tokens of each text. `whole`: with those that begin (and end) a text, where the model has
        such."""
        return self._tokenizer(
            list(texts),
            add_special_tokens=whole,
            return_attention_mask=False,
            verbose=False,  # about texts that are too long: they are cut, and counted
        )["input_ids"]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, without special ones."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def save(self, folder: str) -> None:
        """Write what is needed to find the same tokens again beside the model."""
        self._tokenizer.save_pretrained(folder)


class ByteTokens:
    """A token is a byte, and one more ends a text. Attributes and methods are those of `Tokenizer`."""

    begin: int | None = None
    end: int | None = Bytes.end
    unknown: int | None = None
    pad: int = Bytes.end
    longest: int | None = None
    what: str = "bytes, since it has no tokenizer"

    def encode(self, texts: Sequence[str], whole: bool = True) -> list[list[int]]:
        return [list(text.encode(errors="replace")) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return Bytes().decode([token for token in tokens if token < Bytes.end])

    def save(self, folder: str) -> None:
        """Nothing is needed."""


Tokens: TypeAlias = Tokenizer | ByteTokens


def tokens_of(source: Source, words: int) -> Tokens:
    """The tokens of the model in `source`, which knows this number of `words`. Warns of a tokenizer
    that contradicts the configuration of trained weights.

    Raises `InputError` if the folder has weights and no tokenizer, one that cannot be read, or one that
    makes tokens which the model does not know.
    """
    folder = source.folder
    if not any((folder / name).exists() for name in _FILES):
        if source.has_weights:
            raise InputError(
                f"the folder {str(folder)!r} has weights and no tokenizer, so there is no telling what"
                " its tokens mean: add the tokenizer's files (its save_pretrained writes them), or"
                " give data with 'input_ids'."
            )
        if words < LEAST:
            raise InputError(
                f"the folder {str(folder)!r} has no tokenizer, so text is read as bytes, but the model"
                f" knows {words} words: add a tokenizer, or give vocab_size {LEAST} or more in"
                " config.json."
            )
        return ByteTokens()
    try:
        tokenizer = libraries().AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # each kind of tokenizer raises its own
        raise InputError(
            f"the tokenizer in {str(folder)!r} cannot be read: {first_line(error)}"
        ) from error
    if len(tokenizer) > words:
        raise InputError(
            f"the tokenizer in {str(folder)!r} has {len(tokenizer)} tokens, and the model's embedding"
            f" {words}: it belongs to another model, or has had tokens added to it; give the model's"
            " own, or call model.resize_token_embeddings(len(tokenizer)) and save the model again."
        )
    if source.has_weights:
        _warn_of_contradiction(tokenizer, source, words)
    return Tokenizer(tokenizer)


def _warn_of_contradiction(tokenizer: Any, source: Source, words: int) -> None:
    """Two tokenizers of one size know other words by the same numbers. They seldom begin and end texts
    by the same."""
    faults = []
    for name in ("bos_token_id", "eos_token_id"):
        here, there = getattr(tokenizer, name, None), getattr(source.config, name, None)
        ids = there if isinstance(there, list) else [there]
        known = [i for i in ids if i is not None and i < words]
        if here in known:
            return
        if here is not None and known:
            faults.append(f"{name} {here}, where config.json has {' or '.join(map(str, known))}")
    if faults:
        warnings.warn(
            f"the tokenizer in {str(source.folder)!r} has {' and '.join(faults)}: if it is another"
            " model's, the weights know its tokens as other words; give the model's own.",
            stacklevel=4,
        )

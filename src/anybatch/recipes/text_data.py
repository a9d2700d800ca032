"""Text data: read from files in a fixed order, split into training and held-out parts, and cut into
windows of tokens. A token is a byte, or `END` after each text.

    texts      a.py .................. | b.py ........ | c.py ...
    tokens     t0 t1 t2 t3 t4 t5 t6 t7 t8 t9 ...               one stream, with END after each text
    window 0   t0 t1 t2 t3 t4                                  context 4: 4 tokens, each of which
    window 1               t4 t5 t6 t7 t8                      predicts the next one
    window 2                           t8 t9 -  -  -           - is ignored

So every token but the first is predicted exactly once, and no window depends on the batch.
"""

from __future__ import annotations

import os
import platform
import sysconfig
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from anybatch.errors import InputError, some
from anybatch.units import format_bytes

END = 256
NUM_TOKENS = END + 1

IGNORED = -100
"""Fills positions of a window without a token. As a target, it is ignored."""

EVERY = 16
"""One part in `EVERY` is held out."""

_NOT_THE_LIBRARY = ("site-packages", "dist-packages", "test", "tests", "idle_test")


class Text(NamedTuple):
    """Training and held-out texts, and a description of their origin."""

    train: list[bytes]
    held_out: list[bytes]
    origin: str


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a stream of tokens; see the module.

    A sample is `(tokens [context + 1], bytes [])`: tokens in int16, with `IGNORED` after the end of the
    stream, and the number of target tokens that are bytes, in int64.

    Args:
        texts: texts of the stream, in order.
        context: number of tokens per window that have a target.
        what: name of the texts in error messages.

    Attributes:
        lengths: number of tokens with a target in each window, int64, for a global batch in tokens.

    Raises `InputError` if the stream does not fill one window.
    """

    def __init__(self, texts: Sequence[bytes], context: int, what: str) -> None:
        tokens = stream(texts)
        self.num_tokens: int = len(tokens)
        if self.num_tokens <= context:
            raise InputError(
                f"{what} has {self.num_tokens:,} tokens, too few for one window of {context} tokens"
                " and the one that follows: give more text (and a limit that lets it be read), or a"
                " smaller context."
            )
        missing = -(len(tokens) - 1) % context
        self._tokens = torch.cat([tokens, tokens.new_full((missing,), IGNORED)])
        targets = self._tokens[1:].view(-1, context)
        self._bytes = ((targets != END) & (targets != IGNORED)).sum(1)
        self._context = context
        self.lengths: Tensor = torch.full((len(self),), context)
        self.lengths[-1] -= missing

    def __len__(self) -> int:
        return len(self._bytes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number = range(len(self))[index]
        begin = number * self._context
        return self._tokens[begin : begin + self._context + 1], self._bytes[number]


def stream(texts: Iterable[bytes]) -> Tensor:
    """Returns the bytes of all `texts` as tokens `[n]` int16, with `END` after each text."""
    end = np.array([END], np.int16)
    parts = [part for text in texts for part in (np.frombuffer(text, np.uint8), end)]
    return torch.from_numpy(np.concatenate([end[:0], *parts], dtype=np.int16))


def read(data: Path | None, limit: int) -> Text:
    """Reads the first `limit` bytes of text in `data`, and splits off the held-out part.

    The files of a folder are read by depth, then by path. Hidden files are skipped; files that are not
    text (they have a zero byte) or cannot be read are skipped with a warning that names some of them.
    If `data` is None, the sources of Python's standard library are read, without its tests.

    Raises `InputError` if the file or folder does not exist or has no text.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if data is None else data
    texts: list[bytes] = []
    left_out: list[str] = []
    for path in _files(root, library=data is None):
        if limit <= 0:
            break
        try:
            with path.open("rb") as file:
                text = file.read(limit)
        except OSError:
            text = b"\0"
        if b"\0" in text:
            left_out.append(str(path.relative_to(root)) if path != root else path.name)
            continue
        limit -= len(text)
        texts += [text] if text else []
    skipped = f"{len(left_out)} file{'s' if len(left_out) > 1 else ''} left out" if left_out else ""
    if not texts:
        fault = (
            "has no text in it" if root.exists() else f"does not exist (looked from {os.getcwd()})"
        )
        raise InputError(
            f"the data {str(root)!r} {fault}{f' ({skipped})' if skipped else ''}: give a file with"
            " text, or a folder of such files (-s data=PATH); hidden files, and files with zero bytes,"
            " are left out."
        )
    if skipped and data is not None:
        warnings.warn(
            f"{skipped} of {str(root)!r}, for not being text or not to be read: {some(left_out)}.",
            stacklevel=3,
        )
    name = f"the library of Python {platform.python_version()}" if data is None else str(root)
    return _divided(texts, f"{name} ({skipped})" if skipped and data is not None else name)


def _divided(texts: list[bytes], origin: str) -> Text:
    """Splits off the last 16th, from the start of a line."""
    size = sum(map(len, texts))
    place = size - size // EVERY
    train: list[bytes] = []
    held_out: list[bytes] = []
    for text in texts:
        at = len(text) if place >= len(text) else place
        if 0 < at < len(text):
            end = text.find(b"\n", at) + 1
            at = end if 0 < end < len(text) else at
        train += [text[:at]] if at else []
        held_out += [text[at:]] if at < len(text) else []
        place = max(0, place - len(text))
    held = format_bytes(sum(map(len, held_out)))
    return Text(train, held_out, f"{format_bytes(size)} of {origin}; held out: the last {held}")


def _files(root: Path, library: bool) -> list[Path]:
    """Returns `root` if it is a file, or the files in it, by depth and then by path."""
    if root.is_file():
        return [root]
    found: list[Path] = []
    for place, folders, files in os.walk(root):
        left_out = _NOT_THE_LIBRARY if library else ()
        folders[:] = [it for it in folders if not it.startswith(".") and it not in left_out]
        named = (it for it in files if (it.endswith(".py") if library else not it.startswith(".")))
        found += filter(Path.is_file, (Path(place, it) for it in named))  # a pipe would block
    return sorted(found, key=lambda path: (len(path.parts), path.parts))

"""Packing: whole texts side by side in windows, in place of windows cut from a stream.

    window 0   end a a a a a end b b b end      each text begun by the end of the one before it
    window 1   end c c c c end d d end -  -     - counts nothing

For texts that are shorter than the context: none is cut, little is padded, and (see `same_text`) each
is seen by itself alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from anybatch.errors import InputError
from anybatch.recipes.text_data import IGNORED
from anybatch.recipes.text_tokens import Vocabulary, dtype_of


class Packed(Dataset[tuple[Tensor, Tensor]]):
    """Windows of whole texts, as many as there is room for, each begun by the `end` of the one before.

    Samples are those of `Windows`, with `IGNORED` after the last text. A text that fills more than a
    window is cut. Texts go longest first into the window with the least room that has enough for them.

    Args and attributes: see `Windows`. Raises `InputError` if there is no token.
    """

    def __init__(
        self, texts: Sequence[bytes], vocabulary: Vocabulary, context: int, what: str
    ) -> None:
        pieces = [
            piece
            for text in texts
            for piece in vocabulary.encode(text).split(max(1, context - 1))
            if len(piece)
        ]
        if not pieces or context < 2:
            raise InputError(
                f"{what} has {len(pieces)} pieces to pack into windows of {context} tokens: give text,"
                " and a context of at least 2."
            )
        lengths = vocabulary.num_bytes()
        packs = packed([1 + len(piece) for piece in pieces], context)
        dtype = dtype_of(vocabulary.size)
        end = torch.tensor([vocabulary.end], dtype=dtype)
        self._tokens = torch.full((len(packs), context + 1), IGNORED, dtype=dtype)
        self._bytes = torch.zeros(len(packs), dtype=torch.int64)
        for row, members in enumerate(packs):
            tokens = torch.cat([part for one in members for part in (end, pieces[one])] + [end])
            self._tokens[row, : len(tokens)] = tokens
            self._bytes[row] = lengths[tokens[1:].long()].sum()
        self.vocabulary = vocabulary
        self.num_tokens: int = sum(map(len, pieces)) + len(pieces)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._tokens[index], self._bytes[index]


def packed(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Which of things of `sizes`, none above `room`, go together into packs of at most `room`: best
    fit,
    the largest first (Johnson et al. 1974, "Worst-case performance bounds for simple one-dimensional
    packing algorithms": at most 11/9 of the fewest packs, and 4)."""
    packs: list[list[int]] = []
    open_packs: list[tuple[int, int]] = []  # (room left, pack), in order
    for one in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        at = bisect_left(open_packs, (sizes[one], 0))
        if at == len(open_packs):
            left, pack = room, len(packs)
            packs.append([])
        else:
            left, pack = open_packs.pop(at)
        packs[pack].append(one)
        insort(open_packs, (left - sizes[one], pack))
    return packs

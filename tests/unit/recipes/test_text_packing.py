"""Packing: every token of every text once, no text seen by another."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from anybatch.errors import InputError
from anybatch.recipes.text import loss, text
from anybatch.recipes.text_data import IGNORED
from anybatch.recipes.text_model import Decoder, Shape, same_text
from anybatch.recipes.text_packing import Packed, packed
from anybatch.recipes.text_tokens import Bytes

END = Bytes().end


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 40))
def test_packs_hold_everything_once_and_not_too_much(sizes, room):
    packs = packed(sizes, room)
    assert sorted(one for pack in packs for one in pack) == list(range(len(sizes)))
    loads = [sum(sizes[one] for one in pack) for pack in packs]
    assert max(loads, default=0) <= room
    if len(loads) > 1:  # no two could be one
        assert sum(sorted(loads)[:2]) > room


@given(
    st.lists(st.binary(max_size=30).map(lambda b: bytes(x % 128 for x in b)), min_size=1),
    st.integers(2, 24),
)
def test_every_token_is_predicted_once_from_its_own_text(texts, context):
    if not any(texts):
        return
    windows = Packed(texts, Bytes(), context, "the text")
    found = []
    for tokens, num_bytes in (windows[i] for i in range(len(windows))):
        kept = tokens[tokens != IGNORED].tolist()
        assert tokens.shape == (context + 1,)
        assert (tokens[len(kept) :] == IGNORED).all()
        assert kept[0] == kept[-1] == END
        assert num_bytes == sum(token != END for token in kept[1:])
        piece = bytearray()
        for token in kept[1:]:
            if token == END:
                found.append(bytes(piece))
                piece.clear()
            else:
                piece.append(token)
    pieces = [t[i : i + context - 1] for t in texts for i in range(0, len(t), context - 1)]
    assert sorted(found) == sorted(pieces)


def test_a_text_is_the_same_beside_any_other():
    torch.manual_seed(0)
    model = Decoder(Shape(257, 32, 16, 2, 2, apart=True)).eval()
    windows = Packed([b"abcdefgh", b"xyz"], Bytes(), 16, "the text")
    assert len(windows) == 1
    both = windows[0][0].long()[None, :-1].clamp(min=0)
    alone = torch.tensor([[END, *b"xyz"]])
    at = 1 + len(b"abcdefgh")
    hidden = {}
    model.norm.register_forward_hook(lambda module, given, out: hidden.update(last=out))
    model(both)
    beside = hidden["last"][0, at : at + 4]
    model(alone)
    torch.testing.assert_close(beside, hidden["last"][0], rtol=1e-5, atol=1e-6)


def test_places_see_their_own_text_up_to_themselves():
    seen = same_text(torch.tensor([[5, 9, 6, 9, 7]]), end=9)[0, 0].int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


def test_the_recipe_packs_and_counts_the_same_tokens(tmp_path):
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text("x" * (3 + number % 9))
    task = text(data=tmp_path, packing=True, context=16, width=8, depth=1, heads=1, global_batch=4)
    assert len(task.train) < 40
    model = task.build_model()
    batch = torch.utils.data.default_collate([task.train[0], task.train[1]])
    found = loss(model, batch)
    assert float(found.weight) == float((batch[0][:, 1:] != IGNORED).sum())


@pytest.mark.parametrize(("texts", "context"), [([b""], 8), ([b"abc"], 1)])
def test_nothing_to_pack_is_refused(texts, context):
    with pytest.raises(InputError, match="pieces to pack into windows of"):
        Packed(texts, Bytes(), context, "the text")

"""StreamLoader: steps found as the stream is read, held until they are committed."""

import pytest
import torch

from anybatch.data.schedule import Steps
from anybatch.data.stream import StreamLoader
from anybatch.errors import DataError

from .sets import Ragged, Stream, steps_of, whole


def all_steps(stream, *, start=0, micro_batch=3, seed=0, global_batch=4, last="keep", **length):
    loader = StreamLoader(stream, Steps(None, global_batch, last, **length), seed=seed)
    loader.begin(start, whole(micro_batch))
    return [
        (data, torch.cat(batches).tolist() if batches else []) for data, batches in steps_of(loader)
    ]


CASES = [
    ("keep", {"epochs": 2}, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2, [2, 5]),
    ("drop", {"epochs": 2}, [[0, 1, 2, 3], [4, 5, 6, 7]] * 2, [1, 3]),
    (
        "wrap",
        {"epochs": 2},
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5], [6, 7, 8, 9]],
        [2, 4],
    ),
    ("keep", {"samples": 11}, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0]], [2]),
    ("wrap", {"samples": 11}, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0]], [2]),
    ("drop", {"samples": 11}, [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2]], [1]),
    ("keep", {"steps": 4}, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]], [2]),
]


@pytest.mark.parametrize(("last", "length", "expected", "ends"), CASES)
def test_steps_are_those_of_an_indexed_set(last, length, expected, ends):
    found = all_steps(Stream(10), last=last, **length)
    assert [samples for _, samples in found] == expected
    assert [data.index for data, _ in found if data.epoch_end] == ends
    steps = Steps(10, 4, last, **length)
    for index, (data, _) in enumerate(found):
        assert data.index == index
        assert data.epoch == steps.epoch_of(index)
        assert data.first_sample == steps.samples_before(index)
        assert data.num_samples == steps.num_samples_of(index)
        assert data.epoch_end == steps.is_epoch_end(index)
        assert data.next_epoch == steps.epoch_of(index + 1)


@pytest.mark.parametrize("last", ["keep", "drop", "wrap"])
def test_an_epoch_that_ends_with_a_full_step(last):
    found = all_steps(Stream(8), last=last, epochs=2)
    assert [data.epoch_end for data, _ in found] == [False, True] * 2


def test_a_global_batch_larger_than_the_stream_wraps_many_times():
    found = all_steps(Stream(3), last="wrap", global_batch=8, steps=1)
    assert found[0][1] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert [data.next_epoch for data, _ in found] == [2]


def test_redo_gives_the_held_samples_and_a_later_start_the_same():
    def noisy(start=0):
        loader = StreamLoader(Stream(10, noise=True), Steps(None, 4, epochs=2), seed=1)
        loader.begin(start, whole(4))
        return loader

    reference = [repr(batches) for _, batches in steps_of(noisy())]
    before = torch.get_rng_state()
    loader = noisy()
    for step in range(6):
        next(loader.next_step().micro_batches)
        torch.rand(step)  # training draws in between
        data = loader.redo(whole(4))
        assert repr(list(data.micro_batches)) == reference[step]
        loader.commit()
    torch.set_rng_state(before)
    assert [repr(batches) for _, batches in steps_of(noisy(start=4))] == reference[4:]
    assert torch.equal(torch.get_rng_state(), before)
    loader.begin(0, whole(4))  # back to the start
    assert [repr(batches) for _, batches in steps_of(loader)] == reference


def test_describe_tells_numbers_in_the_stream():
    loader = StreamLoader(Stream(10), Steps(None, 6, "wrap", epochs=2))
    loader.begin(1, whole(6))
    assert loader.describe(range(2)) == "no samples"
    loader.next_step()
    assert loader.describe(range(2, 6)) == "samples 8, 9, 0, 1 (epochs 0 to 1)"


@pytest.mark.parametrize(
    ("stream", "last", "says"),
    [
        (Stream(0), "keep", "gave 0 samples in epoch 0"),
        (iter(range(10)), "keep", "gave 0 samples in epoch 1.*read only once"),
        (Stream(3), "drop", "gave 3 samples in epoch 0, which last='drop' drops"),
        (Stream(9, fail_at=6), "keep", r"sample 6 of the stream Stream \(epoch 0\).*disk gone"),
        (list(map(Ragged(4).__getitem__, range(4))), "keep", "samples 0, 1, 2, 3"),
    ],
)
def test_bad_streams(stream, last, says):
    with pytest.raises(DataError, match=says):
        all_steps(stream, last=last, micro_batch=4, epochs=2)

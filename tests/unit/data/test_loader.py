"""Loader in the training process: which samples, the same ones again, and what goes wrong."""

# ruff: noqa: NPY002 - the old generators are what is tested

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from anybatch.data.fetch import TensorFetch, open_fetch
from anybatch.data.generators import restore, snapshot
from anybatch.data.loader import Loader
from anybatch.data.order import permutation
from anybatch.data.schedule import Steps
from anybatch.errors import DataError, InputError
from anybatch.task import is_map_style, num_samples_of

from .sets import (
    Augmented,
    Batched,
    BatchedAugmented,
    Broken,
    Epochs,
    Numbers,
    Ragged,
    Stream,
    steps_of,
    whole,
)


@pytest.fixture(autouse=True)
def keep_generators():
    state = snapshot()
    yield
    restore(state)


def loader_of(dataset, global_batch=4, *, last="keep", epochs=1, **options):
    return Loader(dataset, Steps(len(dataset), global_batch, last, epochs=epochs), **options)


def everything(dataset, micro_batch, start=0, **options):
    loader = loader_of(dataset, **options)
    loader.begin(start, whole(micro_batch))
    steps = [default_cat(batches) for _, batches in steps_of(loader)]
    loader.close()
    return steps


def default_cat(batches):
    return [torch.cat(parts) for parts in zip(*batches, strict=True)]


def same(left, right):
    return repr(left) == repr(right)


def test_steps_follow_the_order():
    loader = loader_of(Numbers(10), epochs=2, seed=3)
    loader.begin(0, whole(3))
    found = list(steps_of(loader))
    assert [data.index for data, _ in found] == [0, 1, 2, 3, 4, 5]
    assert [data.epoch for data, _ in found] == [0, 0, 0, 1, 1, 1]
    assert [data.num_samples for data, _ in found] == [4, 4, 2, 4, 4, 2]
    assert [data.first_sample for data, _ in found] == [0, 4, 8, 10, 14, 18]
    assert [data.epoch_end for data, _ in found] == [False, False, True] * 2
    assert list(found[0][0].ranges) == [range(3), range(3, 4)]
    indices = [index for _, batches in found for index, _ in batches]
    expected = torch.cat([permutation(3, 0, 10), permutation(3, 1, 10)])
    assert torch.cat(indices).tolist() == expected.tolist()
    assert loader.next_step() is None


def test_tensors_in_memory_give_what_default_collate_gives():
    tensors = (torch.rand(20, 3), torch.arange(20), torch.rand(20, 2, 2).bool())
    for dataset in (
        TensorDataset(*tensors),
        Subset(TensorDataset(*tensors), [3, 1, 4, 15, 9, 2, 6]),
        Subset(Subset(TensorDataset(*tensors), range(5, 15)), np.array([3, 0, 7])),
    ):
        fast, plain = [], []
        for loader, into in (
            (loader_of(dataset, 5, last="wrap", epochs=3), fast),
            (
                loader_of(dataset, 5, last="wrap", epochs=3, collate=lambda s: default_collate(s)),
                plain,
            ),
        ):
            loader.begin(0, whole(2))
            into.extend(batches for _, batches in steps_of(loader))
        assert isinstance(open_fetch(dataset, None, 0), TensorFetch)
        assert type(fast[0][0]) is list
        assert same(fast, plain)


def test_nothing_is_fetched_before_it_is_asked_for():
    dataset = Numbers(10)
    loader = loader_of(dataset, shuffle=False)
    loader.begin(0, whole(2))
    data = loader.next_step()
    assert dataset.asked == []
    next(data.micro_batches)
    assert dataset.asked == [0, 1]


@pytest.mark.parametrize("kind", [Augmented, BatchedAugmented])
def test_augmentation_depends_on_the_sample_alone(kind):
    one = everything(kind(12), 4)
    assert same(everything(kind(12), 1), one)
    assert same(everything(kind(12), 3), one)
    assert same(everything(kind(12), 4, start=1), one[1:])
    assert not same(everything(kind(12), 4, seed=1), one)
    again = everything(kind(12), 4, epochs=2)
    assert not same(sorted_noise(again[:3]), sorted_noise(again[3:]))


def sorted_noise(steps):
    return sorted(noise.tolist() for _, part in steps for noise in part)


def test_redo_gives_the_same_samples_and_later_steps_keep_its_cut():
    reference = everything(Augmented(12), 4)
    loader = loader_of(Augmented(12))
    loader.begin(0, whole(4))
    list(loader.next_step().micro_batches)
    loader.commit()
    broken_off = loader.next_step().micro_batches
    again = loader.redo(whole(1))
    assert again.index == 1
    assert [len(part) for part in again.ranges] == [1, 1, 1, 1]
    with pytest.raises(InputError, match="step 2 has been begun anew"):
        next(broken_off)
    assert same(default_cat(list(again.micro_batches)), reference[1])
    last = loader.next_step()
    assert last.index == 2
    assert [len(part) for part in last.ranges] == [1, 1, 1, 1]


@pytest.mark.parametrize("kind", [Numbers, Augmented, BatchedAugmented])
def test_training_randomness_is_undisturbed(kind):
    random.seed(1), torch.manual_seed(1), np.random.seed(1)
    np.random.randn()
    before = snapshot()
    everything(kind(12), 3)
    assert same(snapshot(), before)


def test_batched_sets_are_asked_once_per_micro_batch_where_they_draw_nothing():
    dataset = Batched(8)
    everything(dataset, 4)
    assert dataset.calls == 2
    assert len(dataset.asked) == 8


def test_a_collate_function_that_draws_is_repeatable_and_warned_about():
    def mask(samples):
        return [torch.tensor([i for i, _ in samples]), torch.rand(len(samples))]

    with pytest.warns(UserWarning, match="mask draws random numbers"):
        first = everything(Numbers(8), 4, collate=mask)
    with pytest.warns(UserWarning, match="micro-batch"):
        assert same(everything(Numbers(8), 4, collate=mask), first)


def test_the_epoch_is_told_before_its_samples():
    loader = loader_of(Epochs(3), 2, last="wrap", epochs=2, shuffle=False)
    loader.begin(0, whole(2))
    assert [b[0].tolist() for _, b in steps_of(loader)] == [[0, 1], [2, 100], [101, 102]]


def test_describe_names_samples():
    loader = loader_of(Numbers(30), 20, shuffle=False, last="wrap", epochs=2)
    loader.begin(1, whole(20))
    loader.next_step()
    assert loader.describe(range(3, 4)) == "sample 23 (epoch 0)"
    assert loader.describe(range(8, 12)) == "samples 28, 29, 0, 1 (epochs 0 to 1)"
    assert loader.describe(range(20)) == (
        "samples 20, 21, 22, 23, 24, 25, 26, 27 and 12 more (epoch 0)"
    )


class LyingLength(Numbers):
    def __getitem__(self, index):
        return [0, 1, 2, 3, 4][index]


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (Broken(ValueError("bad pixel")), r"sample 7 of Broken \(epoch 0\).*ValueError: bad pixel"),
        (Broken(StopIteration()), "sample 7 .*StopIteration"),
        (Broken(KeyError("label")), "sample 7 .*KeyError: 'label'"),
        (LyingLength(10), "sample [5-9] .*IndexError.*says that it has 10 samples"),
        (
            Ragged(10),
            r"samples .* of Ragged.*float32 \[[23]\], int\).*default_collate.*collate=\.\.\.",
        ),
    ],
)
def test_bad_data_is_named(dataset, says):
    with pytest.raises(DataError, match=says) as caught:
        everything(dataset, 4)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("host"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        OSError(12, "Cannot allocate memory"),
        KeyboardInterrupt(),
    ],
)
def test_running_out_of_memory_passes_unchanged(error):
    with pytest.raises(type(error)) as caught:
        everything(Broken(error), 4)
    assert caught.value is error


def test_a_sample_that_failed_for_once_is_taken():
    dataset = Broken(ValueError("once"), length=4, at=2)

    class Once(Numbers):
        failed = False

        def __getitem__(self, index):
            if not self.failed:
                self.failed = True
                raise OSError("the network was away")
            return super().__getitem__(index)

    assert len(everything(Once(4), 4)) == 1
    with pytest.raises(DataError, match="sample 2"):
        everything(dataset, 4)


def test_map_style():
    assert is_map_style(Numbers())
    assert is_map_style([1, 2])
    assert not is_map_style(Stream())
    assert not is_map_style(iter([1]))
    assert num_samples_of([1, 2]) == 2
    assert num_samples_of(Stream()) is None


def test_the_mode_of_the_caller_does_not_matter():
    expected = everything(Augmented(12), 4)
    with torch.inference_mode():
        assert same(everything(Augmented(12), 4), expected)
    memory = TensorDataset(torch.arange(8.0))
    with torch.device("meta"):
        assert everything(memory, 4)[0][0].device.type == "cpu"

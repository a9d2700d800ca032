"""Held-out data: every sample once, in order, over any number of ranks."""

import pytest
import torch
from torch.utils.data import TensorDataset

from anybatch.data.evaluation import evaluation_batches
from anybatch.errors import DataError

from .sets import Augmented, Broken, Numbers, Ragged, Stream


@pytest.mark.parametrize("world_size", [1, 2, 3, 12])
@pytest.mark.parametrize(
    "dataset",
    [TensorDataset(torch.arange(10)), [(i,) for i in range(10)], Stream(10)],
    ids=["memory", "list", "stream"],
)
def test_ranks_together_see_every_sample_once(dataset, world_size):
    seen = []
    for rank in range(world_size):
        shares = (1.0,) * world_size
        for batch, num in evaluation_batches(dataset, None, 3, rank=rank, shares=shares):
            values = batch if isinstance(batch, torch.Tensor) else batch[0]
            assert len(values) == num <= 3
            seen += values.tolist()
    assert sorted(seen) == list(range(10))
    if world_size == 1:
        assert seen == list(range(10))


@pytest.mark.parametrize(
    "dataset", [TensorDataset(torch.arange(23)), Stream(23)], ids=["memory", "stream"]
)
def test_batches_of_one_unit_hold_the_same_samples_on_any_ranks(dataset):
    found = []
    for shares in ((1.0,), (1.0, 1.0), (3.0, 1.0, 2.0)):
        batches = [
            tuple((batch if isinstance(batch, torch.Tensor) else batch[0]).tolist())
            for rank in range(len(shares))
            for batch, _ in evaluation_batches(dataset, None, 5, rank=rank, shares=shares, unit=5)
        ]
        found.append(sorted(batches))
    assert found[0] == found[1] == found[2]
    assert [len(batch) for batch in found[0]] == [5, 5, 5, 5, 3]


def test_workers_give_the_same_and_end():
    plain = repr(list(evaluation_batches(Augmented(10), None, 4)))
    assert repr(list(evaluation_batches(Augmented(10), None, 4, num_workers=2))) == plain
    left_early = evaluation_batches(Numbers(10), None, 4, num_workers=1)
    next(left_early)
    left_early.close()


def test_augmentation_is_the_same_for_every_batch_size():
    def noise(batch):
        batches = evaluation_batches(Augmented(10), None, batch)
        return torch.cat([parts[1] for parts, _ in batches])

    assert torch.equal(noise(3), noise(10))


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (Broken(ValueError("bad")), "sample 7 of Broken"),
        (Stream(9, fail_at=6), "sample 6 of the stream.*disk gone"),
        (list(map(Ragged(4).__getitem__, range(4))), "samples 0, 1, 2, 3"),
    ],
)
def test_bad_data(dataset, says):
    with pytest.raises(DataError, match=says):
        list(evaluation_batches(dataset, None, 4))

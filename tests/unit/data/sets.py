"""Data sets that tests load: at module level, so that worker processes can have them."""

# ruff: noqa: NPY002 - the old generators are what is tested

import random

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from anybatch.data.cut import micro_batches


def whole(micro_batch):
    """The cut of a single rank."""

    def cut(extent):
        total = extent.num_samples
        return micro_batches(range(total), micro_batch, None, total)

    return cut


def steps_of(loader):
    """(StepData, list of its batches) of every step from the loader's next one on."""
    while (data := loader.next_step()) is not None:
        batches = list(data.micro_batches)
        loader.commit()
        yield data, batches


class Numbers(Dataset):
    """Sample i is (i, float i); counts how often each is asked for."""

    def __init__(self, length=10):
        self.length = length
        self.asked = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.asked.append(index)
        return index, float(index)


class Augmented(Numbers):
    """Draws from all three default generators, and from sample 5 on only: not seen at once."""

    def __getitem__(self, index):
        noise = torch.zeros(3)
        if index >= 5:
            noise += torch.rand(3) + random.random() + np.random.rand() + np.random.randn()
        return torch.tensor(index), noise


class Batched(Numbers):
    """With __getitems__, as Hugging Face data sets."""

    calls = 0

    def __getitems__(self, indices):
        self.calls += 1
        return [self[index] for index in indices]


class BatchedAugmented(Augmented):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Epochs(Numbers):
    """Sample i of epoch e is 100 * e + i."""

    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return 100 * self.epoch + index


class Broken(Numbers):
    def __init__(self, error, length=10, at=7):
        super().__init__(length)
        self.error = error
        self.at = at

    def __getitem__(self, index):
        if index == self.at:
            raise self.error
        return (index,)


class Ragged(Numbers):
    def __getitem__(self, index):
        return torch.zeros(2 + index % 2), index


class Stream(IterableDataset):
    """0 to length, with random noise if asked for; may say its length."""

    def __init__(self, length=10, noise=False, fail_at=None):
        self.length = length
        self.noise = noise
        self.fail_at = fail_at

    def __iter__(self):
        for i in range(self.length):
            if i == self.fail_at:
                raise OSError("disk gone")
            yield (i, torch.rand(2)) if self.noise else i

"""Room in /dev/shm for what worker processes hand over, looked for before they are started."""

import os
import warnings
from pathlib import Path

import pytest
import torch

from anybatch.data import shared_memory
from anybatch.data.fetch import Piece
from anybatch.data.loader import Loader
from anybatch.data.schedule import Steps
from anybatch.errors import DataError

from .sets import whole

SAMPLE_BYTES = 4 * 1000 + 8  # one row of float32, one int64


class Rows:
    def __init__(self):
        self.num_loaded = 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.num_loaded += 1
        return torch.zeros(1000), torch.tensor(index)


@pytest.fixture
def free(monkeypatch):
    """Sets what is free in /dev/shm, in bytes."""

    def set_free(num_bytes):
        values = [1, 1, num_bytes, num_bytes, num_bytes, *[0] * 5]
        found = os.statvfs_result(values)
        monkeypatch.setattr(shared_memory.os, "statvfs", lambda path: found)

    return set_free


def fetch_of(rows):
    def fetch(request):
        return torch.utils.data.default_collate([rows[int(i)] for p in request for i in p.indices])

    return fetch


def request(num=8):
    return [Piece(0, torch.arange(num // 2)), Piece(1, torch.arange(num - num // 2))]


def test_no_room_for_a_batch_of_each_worker_is_an_error(free):
    free(2 * 8 * SAMPLE_BYTES - 1)
    with pytest.raises(
        DataError, match=r"/dev/shm, of which .* are free.*--shm-size.*num_workers=0"
    ):
        shared_memory.check_shared_memory(fetch_of(Rows()), request(), num_workers=2)


def test_no_room_for_all_that_is_fetched_ahead_is_warned_of(free):
    free(4 * 8 * SAMPLE_BYTES - 1)
    with pytest.warns(UserWarning, match="2 worker processes .* bus error.*If that happens"):
        shared_memory.check_shared_memory(fetch_of(Rows()), request(), num_workers=2)


@pytest.mark.parametrize(("num_bytes", "num_loaded"), [(4 * 8 * SAMPLE_BYTES, 1), (1 << 40, 0)])
def test_room_enough_is_nothing_to_speak_of(free, num_bytes, num_loaded):
    free(num_bytes)
    rows = Rows()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shared_memory.check_shared_memory(fetch_of(rows), request(), num_workers=2)
    assert rows.num_loaded == num_loaded


def test_where_there_is_no_such_folder_nothing_is_looked_for():
    shared_memory.check_shared_memory(fetch_of(Rows()), request(), 2, Path("/nowhere/at/all"))


def test_a_loader_says_so_before_it_starts_its_workers(free):
    free(1000)
    loader = Loader(Rows(), Steps(64, 8, "wrap", epochs=1), num_workers=2)
    loader.begin(0, whole(8))
    step = loader.next_step()
    assert step is not None
    with pytest.raises(DataError, match="/dev/shm"):
        next(step.micro_batches)
    loader.close()


def test_a_worker_without_room_does_not_blame_its_samples():
    def collate(samples):
        raise RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_1>: No space left"
        )

    loader = Loader(Rows(), Steps(64, 8, "wrap", epochs=1), collate=collate)
    loader.begin(0, whole(8))
    step = loader.next_step()
    assert step is not None
    with pytest.raises(DataError, match=r"no room in /dev/shm.*--shm-size"):
        next(step.micro_batches)

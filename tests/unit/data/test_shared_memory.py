"""Batches of worker processes for which /dev/shm has no room."""

import pytest
import torch

from anybatch.data import workers
from anybatch.data.loader import Loader
from anybatch.data.schedule import Steps
from anybatch.errors import DataError

from .sets import whole

REFUSAL = "unable to allocate shared memory(shm) for file </torch_1>: No space left"


class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.zeros(1000), torch.tensor(index)


def refuse(*_):
    raise RuntimeError(REFUSAL)


def error_of(**options):
    loader = Loader(Rows(), Steps(64, 8, "wrap", epochs=1), **options)
    loader.begin(0, whole(8))
    step = loader.next_step()
    assert step is not None
    try:
        with pytest.raises(DataError, match=r"no room in /dev/shm.*--shm-size") as caught:
            next(step.micro_batches)
    finally:
        loader.close()
    return str(caught.value)


def test_a_worker_without_room_does_not_blame_its_samples():
    assert "sample 0" not in error_of(collate=refuse)


def test_a_worker_without_room_for_a_collated_batch_says_so(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "share_memory_", refuse)  # before workers are forked
    assert REFUSAL in error_of(num_workers=2, collate=list)


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo])
def test_strided_tensors_are_shared_before_they_are_sent(layout):
    leaf = torch.eye(3).to_sparse() if layout is torch.sparse_coo else torch.eye(3)
    assert workers._shared(leaf) is leaf
    assert layout is torch.sparse_coo or leaf.is_shared()

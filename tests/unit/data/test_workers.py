"""Worker processes: the same samples as without, read ahead, and their failures."""

import errno
import os
import signal

import pytest
import torch
from torch.utils.data import get_worker_info

from anybatch.data import workers
from anybatch.data.loader import Loader
from anybatch.data.schedule import Steps
from anybatch.data.workers import WorkerTraceback
from anybatch.errors import DataError

from .sets import Augmented, Broken, Epochs, Numbers, steps_of, whole


@pytest.fixture
def loader():
    """Makes loaders with two workers, and closes them."""
    made = []

    def make(dataset, num_workers=2, global_batch=4, **options):
        steps = Steps(len(dataset), global_batch, "wrap", epochs=2)
        made.append(Loader(dataset, steps, num_workers=num_workers, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_the_same_samples_with_workers_and_without_through_a_redo(loader):
    found = []
    for num_workers in (0, 2):
        each = loader(Augmented(10), num_workers)
        each.begin(0, whole(2))
        batches = list(each.next_step().micro_batches)
        each.commit()
        next(each.next_step().micro_batches)  # then memory ran out
        again = each.redo(whole(1))
        assert again.index == 1
        batches += again.micro_batches
        each.commit()
        batches += [batch for _, rest in steps_of(each) for batch in rest]
        found.append([torch.cat(parts).tolist() for parts in zip(*batches, strict=True)])
    assert found[0] == found[1]


@pytest.mark.filterwarnings("error")
def test_more_workers_than_cores_are_nothing_to_warn_of(loader, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    each = loader(Numbers(8))
    each.begin(0, whole(4))
    assert len(list(steps_of(each))) == 4


def test_epochs_reach_the_workers(loader):
    each = loader(Epochs(3), shuffle=False)
    each.begin(0, whole(4))
    assert [b[0].tolist() for _, b in steps_of(each)] == [[0, 1, 2, 100], [101, 102]]


def test_a_rank_may_have_nothing_to_do_in_some_steps(loader):
    each = loader(Numbers(10), shuffle=False)
    each.begin(0, lambda extent: [range(1, 2)] if extent.num_samples == 4 else [])
    assert [len(batches) for _, batches in steps_of(each)] == [1, 1, 1, 1, 1]
    each.begin(0, lambda extent: [])
    assert [len(batches) for _, batches in steps_of(each)] == [0] * 5


def test_a_failure_arrives_as_it_is_and_the_workers_go_on(loader):
    each = loader(Broken(ValueError("bad pixel")), shuffle=False)
    each.begin(0, whole(4))
    list(each.next_step().micro_batches)
    with pytest.raises(DataError, match=r"^sample 7 of Broken .*ValueError: bad pixel") as caught:
        list(each.next_step().micro_batches)
    assert isinstance(caught.value.__cause__, WorkerTraceback)
    assert "__getitem__" in str(caught.value.__cause__)
    each.begin(0, whole(4))
    assert next(each.next_step().micro_batches)[0].tolist() == [0, 1, 2, 3]


def test_running_out_of_memory_in_a_worker_stays_what_it_is(loader):
    each = loader(Broken(MemoryError("host"), at=0), shuffle=False, num_workers=1)
    each.begin(0, whole(4))
    with pytest.raises(
        MemoryError, match=r"^a worker process .*MemoryError: host.* fewer num_workers"
    ):
        list(each.next_step().micro_batches)


class Deadly(Numbers):
    def __getitem__(self, index):
        if index == 5 and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


@pytest.mark.slow
def test_a_worker_that_dies_is_reported_and_replaced(loader):
    each = loader(Deadly(10), shuffle=False, num_workers=1)
    each.begin(0, whole(4))
    with pytest.raises(
        DataError, match=r"has died while it loaded samples 4, 5, 6, 7 \(epoch 0\) of"
    ):
        for _ in steps_of(each):
            pass
    each.begin(0, whole(1))
    assert next(each.next_step().micro_batches).tolist() == [0]


def unpicklable(samples):
    return lambda: samples


def test_a_batch_that_is_lost_on_its_way_is_not_waited_for_without_end(loader, monkeypatch):
    monkeypatch.setattr(workers, "DEADLINE_SECONDS", 1.0)
    each = loader(Numbers(10), num_workers=1, collate=unpicklable)
    each.begin(0, whole(4))
    with pytest.raises(DataError, match=r"has not come in 1 s, and no worker .* cannot be pickled"):
        next(each.next_step().micro_batches)


@pytest.mark.parametrize(
    "error",
    [
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        RuntimeError("can't start new thread"),
    ],
)
def test_workers_that_cannot_be_started_are_no_lack_of_memory_in_training(
    loader, monkeypatch, error
):
    def refuse(loader):
        raise error

    each = loader(Numbers(8))
    each.begin(0, whole(4))
    with monkeypatch.context() as patched:
        patched.setattr(workers.DataLoader, "__iter__", refuse)
        with pytest.raises(DataError, match=r"\(2\) cannot be started .*num_workers=0"):
            list(each.next_step().micro_batches)
    each.begin(0, whole(4))
    assert len(list(each.next_step().micro_batches)) == 1


def test_starting_workers_draws_nothing_from_training(loader):
    before = torch.get_rng_state()
    each = loader(Numbers(4), num_workers=1)
    each.begin(0, whole(4))
    list(each.next_step().micro_batches)
    assert torch.equal(torch.get_rng_state(), before)

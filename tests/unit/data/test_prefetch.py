"""Copies to a CUDA device, one ahead; on the CPU nothing happens."""

import pytest
import torch

from anybatch.data.prefetch import on_device


def test_on_the_cpu_the_iterator_is_passed_along():
    batches = iter([torch.zeros(2)])
    assert on_device(batches, "cpu") is batches


def test_other_devices_get_plain_copies():
    (batch,) = on_device(iter([{"x": torch.zeros(2)}]), "meta")
    assert batch["x"].is_meta


@pytest.mark.gpu
def test_values_survive_reuse_of_memory():
    batches = [[torch.full((1 << 20,), float(i)), f"batch {i}"] for i in range(20)]
    for i, (x, name) in enumerate(on_device(iter(batches), "cuda")):
        assert x.is_cuda
        assert name == f"batch {i}"
        for _ in range(10):
            total = (x * 1.0).sum()
        assert total.item() == i * float(1 << 20)


@pytest.mark.gpu
def test_none_is_taken_before_it_is_asked_for():
    taken = []

    def batches():
        for i in range(5):
            taken.append(i)
            yield torch.zeros(4) + i

    moved = on_device(batches(), "cuda")
    next(moved)
    assert taken == [0]
    next(moved)
    assert taken == [0, 1]
    moved.close()


@pytest.mark.gpu
def test_there_is_memory_for_two_however_many_there_are():
    size = 32 << 20
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    product = torch.ones(2048, 2048, device="cuda")
    for batch in on_device((torch.zeros(size // 4) for _ in range(12)), "cuda"):
        for _ in range(20):
            product = product @ product * batch[0]
    assert torch.cuda.memory_reserved() - before < 5 * size

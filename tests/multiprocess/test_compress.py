"""Gradients in 16 bits: half the bytes, ranks alike to the bit, and training that still learns."""

from __future__ import annotations

import pytest
import torch
from tests.equivalence.worlds import World
from tests.multiprocess.relaxed import alike, as_ranks, deviation, digits, exact_digits, plainly

from anybatch.plans import Exchange

FLOAT32 = World(dtype=torch.float32, loss="weighted", optimizer="sgd")


def compressed(dtype):
    return {"parallel": "replicate", "exchange": Exchange(compress=dtype)}


def add_up(rank, size, length, dtype, rounds):
    """What `Sums` makes of a tensor on each rank, twice in a row with the same staging."""
    from anybatch.parallel.sums import Sums

    sums, results = Sums(dtype), []
    for number in range(rounds):
        draw = torch.Generator().manual_seed(10 * number + rank)
        flats = [torch.randn(n, generator=draw) for n in (length, 1, 2 * length)]
        whole = [flat.half() for flat in flats[:1]]
        for flat in (*flats, *whole):
            sums.start(flat)
        assert sums.num_started == 4
        sums.finish()
        assert sums.num_started == 0
        results.append([*flats, *whole])
    return results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_are_those_of_16_bits_and_alike_on_all_ranks(crew, size, dtype):
    ranks = crew(size, add_up, 101, dtype, 2)
    for number in range(2):
        parts = []
        for rank in range(size):
            draw = torch.Generator().manual_seed(10 * number + rank)
            parts.append([torch.randn(n, generator=draw) for n in (101, 1, 202)])
        for i in range(3):
            rounded = [part[i].to(dtype).float() for part in parts]
            wanted = torch.stack(rounded).sum(0)
            # Each addition rounds to 8 or 11 bits of numbers that are no larger than these.
            error = (size - 1) * torch.finfo(dtype).eps / 2 * torch.stack(rounded).abs().sum(0)
            assert ((ranks[0][number][i] - wanted).abs() <= error).all()
            for rank in ranks:
                assert torch.equal(rank[number][i], ranks[0][number][i])


@pytest.mark.parametrize("shares", [(1.0, 1.0), (3.0, 0.0, 2.0)])
@pytest.mark.parametrize(("dtype", "bits"), [("bf16", 8), ("fp16", 11)])
def test_a_run_stays_near_the_exact_one_and_ranks_are_alike(crew, dtype, bits, shares):
    ranks = crew(len(shares), as_ranks, FLOAT32, 3, shares, compressed(dtype))
    plain = plainly(FLOAT32)
    assert alike(ranks)
    # Rounding errors of single steps, at most 2^-bits of a gradient each, add up over 20 of them.
    distance = deviation(ranks[0].parameters, plain.parameters)
    assert 0 < distance < 4 * 2.0**-bits


def test_half_the_bytes_cross(crew):
    def bytes_of(knobs):
        first, _ = crew(2, as_ranks, FLOAT32, 4, (1.0, 1.0), knobs)
        # Without the vote, whose size is that of a step without gradients.
        return first.step_bytes[5]

    exact = bytes_of({"parallel": "replicate"})
    votes = exact - gradient_bytes()
    assert votes > 0
    for dtype in ("bf16", "fp16"):
        assert bytes_of(compressed(dtype)) - votes == gradient_bytes() / 2


def gradient_bytes():
    """What a rank of two sends of `FLOAT32`'s gradients, laid out in buckets."""
    from tests.equivalence.worlds import task_of

    from anybatch.compute.buckets import Buckets

    buckets = Buckets(list(task_of(FLOAT32).build_model().parameters()))
    return sum(flat.nbytes for flat in buckets.flats)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("knobs", "part"),
    [
        (compressed("bf16"), 0.51),
        (compressed("fp16"), 0.51),
        # The first two steps are exact, and so are vectors and matrices that are small already.
    ],
    ids=["bf16", "fp16"],
)
def test_digits_are_learned_with_fewer_bytes(crew, knobs, part):
    options = {"epochs": 6, "width": 8, "global_batch": 64}
    exact = exact_digits(crew, options)
    ranks = crew(2, digits, knobs, options)
    assert exact.evaluation.metrics["accuracy"] > 0.94
    accuracy = ranks[0].evaluation.metrics["accuracy"]
    assert accuracy >= 0.95 * exact.evaluation.metrics["accuracy"]
    assert sum(ranks[0].step_bytes) < part * sum(exact.step_bytes)

"""What holds for any data set, global batch, number of ranks and micro-batch."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from anybatch.data import Loader, Steps, ghosts, micro_batches, permutation, share
from anybatch.data.batch_slices import batch_size, split

lasts = st.sampled_from(["keep", "drop", "wrap"])
shares = st.lists(st.one_of(st.integers(0, 5), st.floats(0, 4)), min_size=1, max_size=9).filter(
    lambda weights: sum(weights) > 0
)


@given(st.integers(0, 300), shares, st.integers(1, 40))
def test_shares_cover_the_global_batch_in_order(num_samples, weights, unit):
    parts = [share(num_samples, weights, rank, unit) for rank in range(len(weights))]
    assert [p for part in parts for p in part] == list(range(num_samples))
    assert all(a.stop == b.start for a, b in pairwise(parts))
    assert all(part.start % unit == 0 or part.start == num_samples for part in parts)
    if unit == 1:
        ideal = [num_samples * weight / sum(weights) for weight in weights]
        assert all(abs(len(p) - i) < 1 + 1e-6 for p, i in zip(parts, ideal, strict=True))


@given(st.integers(1, 300), shares, st.integers(1, 20), st.integers(1, 5))
def test_no_cut_goes_through_a_ghost(num_samples, weights, ghost, multiple):
    sizes = ghosts(num_samples, ghost)
    assert sum(sizes) == num_samples
    assert ghost == 1 or 1 not in sizes or sizes == [1]
    edges = {sum(sizes[:i]) for i in range(len(sizes) + 1)}
    micro_batch = ghost * multiple
    for rank in range(len(weights)):
        part = share(num_samples, weights, rank, unit=ghost)
        pieces = micro_batches(part, micro_batch, ghost, num_samples)
        assert [p for piece in pieces for p in piece] == list(part)
        assert all(piece.start in edges and piece.stop in edges for piece in pieces)
        assert all(0 < len(piece) <= micro_batch + 1 for piece in pieces)
        assert all(len(piece) == micro_batch for piece in pieces[:-1])


def picture(n, size, last, total_epochs):
    """The steps of `total_epochs` epochs, drawn the slow way: (epoch, position) of every sample."""
    if last == "wrap":
        line = [(e, p) for e in range(total_epochs) for p in range(n)]
        return [line[i : i + size] for i in range(0, len(line), size)]
    return [
        [(e, p) for p in range(i, min(i + size, n))]
        for e in range(total_epochs)
        for i in range(0, n, size)
        if last == "keep" or i + size <= n
    ]


@given(st.integers(1, 30), st.integers(1, 40), lasts, st.integers(1, 4), st.data())
def test_steps_are_those_of_the_picture(n, size, last, epochs, data):
    if last == "drop" and n < size:
        n = size
    expected = picture(n, size, last, epochs)
    steps = Steps(n, size, last, epochs=epochs)
    drawn = [[(e, p) for e, a, b in steps.samples_of(s) for p in range(a, b)] for s in range(99)]
    assert drawn[: len(expected)] == expected[:99]
    assert steps.total_steps == len(expected)
    assert steps.total_samples == sum(map(len, expected))

    samples = data.draw(st.integers(1, steps.total_samples))
    cut_short = Steps(n, size, last, samples=samples)
    assert sum(map(cut_short.num_samples_of, range(cut_short.total_steps))) == samples
    assert cut_short.num_samples_of(cut_short.total_steps - 1) > 0
    by_steps = Steps(n, size, last, steps=data.draw(st.integers(1, len(expected))))
    endless = picture(n, size, last, epochs + size)  # with "wrap" the steps are all full
    assert by_steps.total_samples == sum(map(len, endless[: by_steps.total_steps]))


@given(
    st.integers(1, 40), st.integers(1, 50), lasts, shares, st.integers(1, 12), st.integers(0, 99)
)
def test_ranks_together_take_the_global_order(n, size, last, weights, micro_batch, seed):
    if last == "drop" and n < size:
        n = size
    steps = Steps(n, size, last, epochs=2)
    order = [permutation(seed, epoch, n).tolist() for epoch in range(2)]
    dataset = TensorDataset(torch.arange(n))
    taken: list[list[int]] = [[] for _ in range(steps.total_steps)]
    for rank in range(len(weights)):
        loader = Loader(dataset, steps, seed=seed)
        loader.begin(
            0,
            lambda extent, rank=rank: micro_batches(
                share(extent.num_samples, weights, rank), micro_batch, None, extent.num_samples
            ),
        )
        while (data := loader.next_step()) is not None:
            for (batch,), part in zip(data.micro_batches, data.ranges, strict=True):
                assert len(batch) == len(part) <= micro_batch
                taken[data.index] += batch.tolist()
    assert taken == [[order[e][p] for e, p in step] for step in picture(n, size, last, 2)]
    if last != "drop":
        flat = [index for step in taken for index in step]
        assert sorted(flat[:n]) == sorted(flat[n:]) == list(range(n))


def batches_of(size):
    """Nested batches of `size` samples."""
    tensors = st.builds(
        lambda dims, seed: torch.rand(size, *dims, generator=torch.Generator().manual_seed(seed)),
        st.lists(st.integers(0, 3), max_size=2),
        st.integers(0, 99),
    )
    names = st.just([f"sample {i}" for i in range(size)])
    rest = st.one_of(st.none(), st.integers(), st.just("text"))
    leaves = st.one_of(tensors, tensors.map(torch.Tensor.numpy), names)
    nested = st.recursive(
        leaves,
        lambda inner: st.dictionaries(st.sampled_from("abc"), st.one_of(inner, rest), min_size=1),
        max_leaves=6,
    )
    return tensors.flatmap(lambda first: nested.map(lambda more: {"first": first, "more": more}))


def joined(pieces):
    """The pieces of one node, put together again."""
    first = pieces[0]
    if isinstance(first, dict):
        return {key: joined([piece[key] for piece in pieces]) for key in first}
    if isinstance(first, list):
        return [member for piece in pieces for member in piece]
    if hasattr(first, "shape"):
        return torch.cat([torch.as_tensor(piece) for piece in pieces])
    assert all(piece == first for piece in pieces)
    return first


@given(st.data())
def test_split_and_put_together_is_the_batch(data):
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    batch = data.draw(batches_of(sum(sizes)))
    assert batch_size(batch) == sum(sizes)
    pieces = split(batch, sizes)
    assert [batch_size(piece) for piece in pieces] == sizes
    assert repr(joined(pieces)) == repr(joined([batch]))

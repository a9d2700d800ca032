"""Batches that do not have their samples in dim 0 of plain tensors: the result is that of one piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import anybatch as ab
from anybatch.errors import DataError, InputError

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(12, 6, generator=GENERATOR, dtype=torch.float64)
Y = torch.randn(12, generator=GENERATOR, dtype=torch.float64)
SEQUENCES = [torch.randn(1 + i % 3, 6, generator=GENERATOR, dtype=torch.float64) for i in range(12)]


def build() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def squares(found: Tensor, wanted: Tensor) -> ab.Loss:
    return ab.Loss((found - wanted).square().sum(), len(wanted))


def of_dense(model: nn.Module, batch: Any) -> ab.Loss:
    return squares(model(batch[0].to_dense()).squeeze(1), batch[1])


def of_sequences(model: nn.Module, batch: Any) -> ab.Loss:
    found = [model(one).sum() for one in batch[0].unbind()]
    return squares(torch.stack(found), batch[1])


def of_packed(model: nn.Module, batch: tuple[PackedSequence, Tensor]) -> ab.Loss:
    padded, lengths = nn.utils.rnn.pad_packed_sequence(batch[0])
    found = model(padded).squeeze(2)
    is_there = torch.arange(len(found))[:, None] < lengths
    return squares((found * is_there).sum(0), batch[1])


def of_graphs(model: nn.Module, batch: dict[str, Tensor]) -> ab.Loss:
    found = torch.zeros(len(batch["y"]), dtype=torch.float64)
    return squares(found.index_add(0, batch["graph"], model(batch["x"]).squeeze(1)), batch["y"])


def of_time_first(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ab.Loss:
    return squares(model(batch[0]).sum((0, 2)), batch[1])


def graphs(numbers: Iterable[int]) -> dict[str, Tensor]:
    some = [SEQUENCES[i] for i in numbers]
    number = torch.repeat_interleave(torch.tensor([len(one) for one in some]))
    return {"x": torch.cat(some), "graph": number, "y": Y[[*numbers]]}


def check(loss: Callable[[nn.Module, Any], Any], batch: Any, **options: Any) -> None:
    """Three steps cut into micro-batches of 5 against the same in one piece by hand."""
    by_hand, cut = build(), build()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (by_hand, cut)]
    with ab.Step(cut, optimizers[1], loss, micro_batch=5, verbose=False, **options) as step:
        for _ in range(3):
            optimizers[0].zero_grad()
            whole = loss(by_hand, batch)
            (whole.sum / whole.weight).backward()
            optimizers[0].step()
            assert step(batch).num_micro_batches == 3
    for a, b in zip(by_hand.parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_tensors(layout: str):
    check(of_dense, (X.to_sparse_coo() if layout == "coo" else X.to_sparse_csr(), Y))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout):
    check(of_sequences, (torch.nested.as_nested_tensor(SEQUENCES, layout=layout), Y))


def test_packed_sequences():
    check(of_packed, (pack_sequence(SEQUENCES, enforce_sorted=False), Y))


def test_graphs_by_the_scripts_own_cut():
    check(
        of_graphs,
        graphs(range(12)),
        count_samples=lambda batch: len(batch["y"]),
        slice_batch=lambda batch, start, stop: graphs(range(start, stop)),
    )


def test_a_loss_of_graphs_that_does_not_add_up_is_a_warning():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def root(model: nn.Module, batch: Any) -> ab.Loss:
        one = of_graphs(model, batch)
        return ab.Loss(one.sum.sqrt(), one.weight)

    with (
        ab.Step(
            model,
            optimizer,
            root,
            micro_batch=5,
            verbose=False,
            count_samples=lambda batch: len(batch["y"]),
            slice_batch=lambda batch, start, stop: graphs(range(start, stop)),
        ) as step,
        pytest.warns(UserWarning, match="does not add up over samples"),
    ):
        step(graphs(range(12)))


def test_metrics_of_time_first_batches_are_not_doubted(recwarn):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = X.expand(7, 12, 6)

    def last(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"last": batch[-1].square().sum()}

    with ab.Step(
        model,
        optimizer,
        lambda model, batch: ab.Loss(model(batch).square().sum(), batch.size(1)),
        verbose=False,
        count_samples=lambda batch: batch.size(1),
        slice_batch=lambda batch, start, stop: batch[:, start:stop],
    ) as step:
        step(batch)
        found = step.evaluate([batch], metrics=last)
    assert found.metrics["last"] == pytest.approx(X.square().sum().item() / 12)
    assert not recwarn.list


def test_time_first_by_the_scripts_own_cut():
    check(
        of_time_first,
        (X.T.reshape(1, 6, 12).transpose(1, 2).repeat(7, 1, 1), Y),
        count_samples=lambda batch: batch[0].size(1),
        slice_batch=lambda batch, start, stop: (batch[0][:, start:stop], batch[1][start:stop]),
    )


def test_what_cannot_be_cut_is_refused_with_the_remedy():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        ab.Step(model, optimizer, of_graphs, micro_batch=5, verbose=False) as step,
        pytest.raises(DataError, match=r"disagree on its size.* count_samples and slice_batch"),
    ):
        step(graphs(range(12)))
    with pytest.raises(InputError, match="count_samples and slice_batch go together"):
        ab.Step(model, optimizer, of_graphs, count_samples=len)


COLLATES = {
    "graphs": (of_graphs, graphs),
    "packed": (
        of_packed,
        lambda some: (pack_sequence([SEQUENCES[i] for i in some], enforce_sorted=False), Y[some]),
    ),
    "sparse": (of_dense, lambda some: (X[some].to_sparse_coo(), Y[some])),
    "nested": (
        of_sequences,
        lambda some: (
            torch.nested.as_nested_tensor([SEQUENCES[i] for i in some], layout=torch.jagged),
            Y[some],
        ),
    ),
    "an object": (lambda model, batch: of_dense(model, batch.pair), lambda some: Own(some)),
}


class Own:
    def __init__(self, some: list[int]) -> None:
        self.pair = X[some], Y[some]


@pytest.mark.parametrize("kind", COLLATES)
def test_a_task_collates_what_it_likes(kind: str):
    loss, collate = COLLATES[kind]

    def trained(micro_batch: int) -> list[Tensor]:
        task = ab.Task(
            model=build,
            loss=loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
            train=range(12),
            collate=collate,
            shuffle=False,
            global_batch=12,
            steps=3,
        )
        return [*ab.train(task, micro_batch=micro_batch, progress=False).model.parameters()]

    for a, b in zip(trained(12), trained(5), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_list_of_samples_of_one_shape_counts_as_its_samples():
    """A structure of tensors with three rows each has three samples; these were five, five and two."""

    def mean(model: nn.Module, batch: Any) -> Tensor:
        return model(torch.stack(batch)).square().mean()

    task = ab.Task(
        model=build,
        loss=mean,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=[x.expand(3, 6) for x in X],
        collate=list,
        global_batch=12,
        steps=1,
    )
    plain = build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    mean(plain, task.train).backward()
    optimizer.step()
    found = ab.train(task, micro_batch=5, progress=False).model
    for one, other in zip(found.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("micro_batch", [None, 5])
def test_an_error_over_a_part_of_a_whole_graph_tells_how_it_was_cut(micro_batch):
    links = torch.eye(12, dtype=torch.float64)

    def of_neighbours(model: nn.Module, batch: Any) -> ab.Loss:
        return squares((batch[1] @ model(batch[0])).squeeze(1), batch[2])

    model = build()
    step = ab.Step(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        of_neighbours,
        micro_batch=micro_batch,
        verbose=False,
    )
    with pytest.raises(RuntimeError) as raised:
        step((X, links, Y))
    assert "12 samples are cut along dim 0. If it is one piece" in raised.value.__notes__[0]

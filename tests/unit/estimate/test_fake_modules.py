"""Model functions that convert what they have built are traced like others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.estimate import subject_of
from anybatch.estimate.fake_modules import converting_fake_modules


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out, _ = self.lstm(self.embedding(tokens))
        return self.head(self.norm(out.transpose(1, 2)).transpose(1, 2))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten())


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "double": lambda model: model.double(),
    "to dtype": lambda model: model.to(torch.bfloat16),
    "to device": lambda model: model.to("cpu"),
    "twice": lambda model: model.half().float(),
    "channels last": lambda model: model.to(  # pyright: ignore[reportCallIssue]
        memory_format=torch.channels_last
    ),
}


@pytest.mark.parametrize("how", CONVERSIONS)
def test_a_converted_model_is_planned(how: str):
    tokens = torch.zeros(12, 3, dtype=torch.int64)
    task = ab.Task(
        model=lambda: CONVERSIONS[how](Tied()),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=torch.utils.data.TensorDataset(tokens, tokens),
        global_batch=4,
        steps=1,
    )
    plan = ab.plan(task)
    real = task.build_model()
    assert plan.task.parameters == sum(param.numel() for param in real.parameters())
    build = subject_of(task).build_model  # inside of a trace it is called like this
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build()
    assert isinstance(model, Tied)
    assert model.head.weight is model.embedding.weight
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in real.parameters()]


class Handed(nn.Module):
    """With a norm's buffers and the flat weights of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.lstm(x)[0][:, -1])


@pytest.mark.parametrize("how", [*CONVERSIONS, "to float32"])
def test_a_module_that_is_there_already_is_converted_for_the_trace_alone(how: str):
    handed = Handed()
    given = {**dict(handed.named_parameters()), **dict(handed.named_buffers())}
    values = {name: tensor.detach().clone() for name, tensor in given.items()}
    convert = CONVERSIONS.get(how, lambda model: model.to(torch.float32))

    def build() -> nn.Module:
        return convert(nn.Sequential(handed, nn.Linear(4, 3)))

    task = ab.Task(
        model=build,
        loss=lambda model, batch: model(batch[0].to(model[1].weight.dtype)).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=TensorDataset(torch.randn(12, 3, 4)),
        global_batch=4,
        steps=1,
    )
    plan = ab.plan(task)
    assert plan.prediction is not None
    kept = {**dict(handed.named_parameters()), **dict(handed.named_buffers())}
    assert kept.keys() == given.keys()
    assert all(kept[name] is tensor for name, tensor in given.items())
    assert all(torch.equal(kept[name], value) for name, value in values.items())
    weights = list(handed.lstm.parameters())
    assert all(a is b for a, b in zip(handed.lstm._flat_weights, weights, strict=True))
    assert plan.task.dtypes == ab.plan(replace(task, model=build())).task.dtypes


def test_a_module_that_is_kept_from_planning_is_not_trained():
    made = cache(Handed)
    task = ab.Task(
        model=lambda: nn.Sequential(made(), nn.Linear(4, 3)),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=TensorDataset(torch.randn(12, 3, 4)),
        global_batch=4,
        steps=1,
    )
    told = (
        r"'0\.lstm\.weight_ih_l0' of the model .* made when the task was planned.*functools\.cache"
    )
    with pytest.raises(ab.InputError, match=told):
        ab.train(task)


def test_a_module_of_another_thread_is_converted_as_ever():
    other, param = nn.Linear(2, 2), nn.Linear(2, 2).weight
    other.weight = param
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        converting_fake_modules(),
        ThreadPoolExecutor(1) as pool,
    ):
        pool.submit(other.double).result()
    assert other.weight is param
    assert param.dtype == torch.float64
    assert not isinstance(param.data, FakeTensor)


def test_modules_are_converted_as_ever_afterwards():
    before = nn.Module._apply
    with converting_fake_modules():
        assert nn.Module._apply is not before
    assert nn.Module._apply is before


def test_a_model_function_that_draws_until_all_values_fit_is_traced():
    def build() -> nn.Module:
        model = nn.Linear(4, 1)
        nn.init.trunc_normal_(model.weight, std=0.5)  # draws again what is beyond two
        return model.double()

    task = ab.Task(
        model=build,
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=torch.utils.data.TensorDataset(torch.zeros(8, 4, dtype=torch.float64)),
        global_batch=8,
        steps=1,
    )
    assert ab.plan(task).prediction is not None
    weight = task.build_model().get_parameter("weight")
    assert 0 < weight.abs().max() < 2  # real ones are drawn as ever


class Sentences(nn.Module):
    """Encodes `[batch, 6]` of tokens, those of 0 masked as padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        encoded = self.encoder(self.embedding(tokens), src_key_padding_mask=padding)
        return self.head(encoded[:, 0])


def test_an_encoder_under_a_mask_of_padding_is_traced_in_evaluation_too_without_a_warning():
    tokens = torch.arange(96).remainder(11).view(16, 6)
    data = TensorDataset(tokens, tokens == 0, tokens[:, 1] % 3)
    task = ab.Task(
        model=Sentences,
        loss=lambda model, batch: F.cross_entropy(model(*batch[:2]), batch[2]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=data,
        valid=data,
        global_batch=8,
        epochs=1,
    )
    before = torch.backends.mha.get_fastpath_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = ab.plan(task)
    assert not any("could not be traced" in notice for notice in plan.notices)
    assert torch.backends.mha.get_fastpath_enabled() is before

"""Task: what is refused, all of it at once; and the model, the parameters, the progress."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import anybatch as ab
from anybatch.errors import InputError
from anybatch.task import parameters_in

DATA = TensorDataset(torch.zeros(10, 2))


class SizedStream:
    """Can only be iterated, and has a length."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(range(self.length))


def loss(model, batch):
    return model(batch[0]).mean()


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def task_of(**changes):
    given = {
        "model": lambda: nn.Linear(2, 2),
        "loss": loss,
        "optimizer": sgd,
        "train": DATA,
        "global_batch": 4,
        "epochs": 1,
        "name": "mine",
    }
    return ab.Task(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": 3}, "model is a value of type int"),
        (
            {"model": nn.Linear},
            "the class Linear, which cannot be called with nothing",
        ),
        ({"train": "data.csv"}, "train is the text 'data.csv'"),
        ({"seed": 2**70}, "seed is 1180591620717411303424; give a whole number of at most 64 bits"),
        ({"num_workers": 10**6}, "num_workers is 1000000; give at most 1024"),
        ({"clip_norm": True}, "clip_norm is True; give a number above zero or None"),
        ({"loss": None}, "loss is a value of type NoneType; give a function"),
        ({"loss": torch.nn.functional.cross_entropy}, "loss is torch's cross_entropy, which takes"),
        ({"optimizer": "adam"}, "optimizer is a value of type str"),
        ({"schedule": 0.5}, "schedule is a value of type float; give a function or None"),
        ({"scheduler": "cosine"}, "scheduler is a value of type str"),
        ({"parameters": []}, "parameters is a value of type list"),
        ({"collate": 1}, "collate is a value of type int"),
        ({"metrics": {}}, "metrics is a value of type dict"),
        (
            {"schedule": lambda p: 1, "scheduler": lambda o: o},
            "schedule and scheduler are both given",
        ),
        ({"global_batch": 0}, "global_batch is 0"),
        ({"global_batch": 2.0}, "global_batch is 2.0"),
        ({"global_batch": True}, "global_batch is True"),
        ({"global_batch": "64"}, "global_batch is '64'"),
        ({"epochs": 0}, "epochs is 0"),
        ({"epochs": None}, "but none of them is given"),
        ({"steps": 3}, "but epochs and steps are given"),
        ({"steps": 3, "samples": 5}, "but epochs and steps and samples are given"),
        ({"epochs": None, "samples": -1}, "samples is -1"),
        ({"ghost_batch": 0}, "ghost_batch is 0"),
        ({"evaluate_every": 0}, "evaluate_every is 0"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"seed": None}, "seed is None"),
        ({"clip_norm": 0}, "clip_norm is 0"),
        ({"clip_norm": math.nan}, "clip_norm is nan"),
        ({"clip_norm": "1"}, "clip_norm is '1'"),
        ({"last": "skip"}, "last is 'skip'; give 'drop', 'keep' or 'wrap'"),
        ({"train": 5}, "train is a value of type int"),
        ({"valid": 5}, "valid is a value of type int"),
        ({"train": DataLoader([1, 2])}, "train is a DataLoader, which gives batches"),
        ({"valid": DataLoader([1, 2])}, "valid is a DataLoader, which gives batches"),
        (
            {"train": DataLoader([1, 2], sampler=WeightedRandomSampler([1.0, 1.0], 2))},
            "(where its sampler has an order of its own, an iterable data set",
        ),
        ({"train": []}, "train is an empty data set"),
        ({"train": SizedStream(0)}, "train is an empty data set"),
        ({"valid": []}, "valid is an empty data set"),
        ({"last": "drop", "global_batch": 11}, "drops every one of the 10 training samples"),
        (
            {"train": SizedStream(3), "last": "drop", "global_batch": 4},
            "drops every one of the 3 training samples",
        ),
    ],
)
def test_what_cannot_be_trained_is_named(changes, message):
    with pytest.raises(InputError) as found:
        task_of(**changes)
    assert message in str(found.value)
    assert "the task 'mine' cannot be trained" in str(found.value)


@pytest.mark.parametrize("name", ["", " ", 5])
def test_a_name_is_a_text(name):
    with pytest.raises(InputError, match=f"name is {name!r}; give a text that is not empty"):
        task_of(name=name)


def test_all_faults_are_named_at_once():
    with pytest.raises(InputError) as found:
        task_of(loss=1, global_batch=0, last="x", train=[])
    for fault in ("loss is", "global_batch is", "last is", "train is an empty"):
        assert fault in str(found.value)


def test_what_may_be_given():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    task_of(model=nn.Linear(1, 1), train=Stream(), valid=[1], clip_norm=1)
    task_of(train=iter([1]), epochs=None, steps=2)
    task_of(train=DataLoader([1, 2], batch_size=None))  # gives samples
    task_of(clip_norm=math.inf, seed=-3, num_workers=0)


def test_the_model_is_initialised_under_the_seed_and_nothing_else_is():
    state = torch.get_rng_state()
    one, same, other = (task_of(seed=s).build_model() for s in (1, 1, 2))
    assert torch.equal(one.weight, same.weight)
    assert not torch.equal(one.weight, other.weight)
    assert torch.equal(torch.get_rng_state(), state)
    given = nn.Linear(2, 2)
    assert task_of(model=given).build_model() is given


def test_a_model_function_that_returns_something_else():
    with pytest.raises(
        InputError, match="model function of task 'mine' returned a value of type int"
    ):
        task_of(model=lambda: 3).build_model()


def test_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert task_of().parameters_of(model) == list(model[1].parameters())
    groups = [{"params": [model[1].weight]}, {"params": model[1].bias, "lr": 1.0}]
    chosen = task_of(parameters=lambda m: iter(groups)).parameters_of(model)
    assert list(parameters_in(chosen)) == [model[1].weight, model[1].bias]
    assert chosen[1]["lr"] == 1.0
    assert list(parameters_in(groups)) == [model[1].weight, model[1].bias]


@pytest.mark.parametrize("chosen", [None, lambda m: [], lambda m: [{"params": []}]])
def test_nothing_to_train(chosen):
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(InputError, match="no parameter that requires a gradient"):
        task_of(parameters=chosen).parameters_of(model)


@pytest.mark.parametrize(
    ("optimizer", "given", "note"),
    [
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), None, "a list of parameters."),
        (lambda named: [p for _, p in named.items()], None, "a list of parameters."),
        (lambda groups: groups.parameters(), lambda model: [*model.parameters()], "`parameters`"),
    ],
)
def test_an_optimizer_function_is_told_what_it_is_called_with(optimizer, given, note):
    task = task_of(optimizer=optimizer, parameters=given)
    with pytest.raises((AttributeError, TypeError, ValueError)) as raised:
        ab.train(task, progress=False)
    (told,) = raised.value.__notes__
    assert told.startswith(
        "It was raised by the optimizer function of the task, which is called with"
    )
    assert note in told


def test_progress():
    def at(samples, total):
        return ab.Progress(step=0, samples=samples, epoch=0, total_steps=None, total_samples=total)

    assert at(5, 20).fraction == 0.25
    assert at(30, 20).fraction == 1.0
    with pytest.raises(InputError, match="length of the training data is unknown"):
        _ = at(5, None).fraction

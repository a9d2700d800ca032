"""What a function keeps between its calls is as before, wherever it keeps it."""

from __future__ import annotations

import functools
import queue
import random
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.compute.joint import Joint
from anybatch.side_effects import untouched, used_by

STEPS = 0
KEPT: list[int] = []
settings = types.ModuleType("settings_of_a_user")
settings.steps = 0


def call(function: Callable[[], Any], times: int = 2) -> None:
    with untouched(function):
        for _ in range(times):
            function()


# --------------------------------------------------------------------------------- where it is kept


def in_a_cell() -> tuple[Callable[[], Any], Callable[[], Any]]:
    count = 0

    def loss() -> None:
        nonlocal count
        count += 1

    return loss, lambda: count


def in_a_cell_that_was_empty() -> tuple[Callable[[], Any], Callable[[], Any]]:
    def loss() -> None:
        nonlocal mean
        mean = 1

    def told() -> Any:
        try:
            return mean
        except NameError:
            return "empty"

    if not callable(loss):
        mean = 0
    return loss, told


def in_a_global() -> tuple[Callable[[], Any], Callable[[], Any]]:
    def loss() -> None:
        global STEPS, ADDED
        STEPS += 1
        ADDED = 1

    return loss, lambda: (STEPS, "ADDED" in globals())


def in_a_global_of_a_function_that_it_calls() -> tuple[Callable[[], Any], Callable[[], Any]]:
    return lambda: _remember(), lambda: list(KEPT)


def _remember() -> None:
    (lambda: KEPT.append(1))()


def in_a_module() -> tuple[Callable[[], Any], Callable[[], Any]]:
    def loss() -> None:
        settings.steps += 1

    return loss, lambda: settings.steps


def in_an_attribute_of_the_function() -> tuple[Callable[[], Any], Callable[[], Any]]:
    def loss() -> None:
        loss.steps = getattr(loss, "steps", 0) + 1

    return loss, lambda: dict(vars(loss))


def in_a_default() -> tuple[Callable[[], Any], Callable[[], Any]]:
    def loss(kept: list[int] = [], *, named: dict[int, int] = {}) -> None:  # noqa: B006
        kept.append(1)
        named[len(kept)] = 1

    return loss, lambda: (list(loss.__defaults__[0]), dict(loss.__kwdefaults__["named"]))


def in_an_argument_of_a_partial() -> tuple[Callable[[], Any], Callable[[], Any]]:
    kept: list[int] = []
    return functools.partial(lambda a, b: (a.append(1), b.append(1)), kept, b=kept), lambda: [*kept]


class Callee:
    most = 0

    def __init__(self) -> None:
        self.me = self  # a circle
        self.center = torch.zeros(2)
        self.inner = {"a": [{"b": {1}}]}

    def loss(self) -> None:
        self.center = self.center * 0.9 + 1
        self.inner["a"][0]["b"].add(2)
        self.new = 1
        Callee.most += 1

    def told(self) -> Any:
        return self.center.tolist(), repr(self.inner), hasattr(self, "new"), Callee.most


def in_the_object_of_a_method() -> tuple[Callable[[], Any], Callable[[], Any]]:
    one = Callee()
    return one.loss, one.told


class Slotted:
    __slots__ = ("__count", "never")

    def __init__(self) -> None:
        self.__count = 0

    def __call__(self) -> None:
        self.__count += 1
        self.never = 1

    def told(self) -> Any:
        return self.__count, hasattr(self, "never")


def in_slots() -> tuple[Callable[[], Any], Callable[[], Any]]:
    one = Slotted()
    return one, one.told


@dataclass(frozen=True, slots=True)
class Frozen:
    kept: list[int] = field(default_factory=list)

    def __call__(self) -> None:
        self.kept.append(1)
        object.__setattr__(self, "kept", [*self.kept])


def in_a_frozen_dataclass() -> tuple[Callable[[], Any], Callable[[], Any]]:
    one = Frozen()
    return one, lambda: list(one.kept)


def in_containers() -> tuple[Callable[[], Any], Callable[[], Any]]:
    ordered = OrderedDict(a=1, b=2)
    ordered.move_to_end("a")
    sums: defaultdict[str, float] = defaultdict(float)
    last, long, nested = deque([1, 2], maxlen=2), list(range(20_000)), ([set()],)

    def loss() -> None:
        ordered.move_to_end("b")
        sums["x"] += 1
        last.append(3)
        long.append(0)
        nested[0][0].add(object())

    return loss, lambda: (list(ordered), dict(sums), list(last), len(long), len(nested[0][0]))


def in_random_generators() -> tuple[Callable[[], Any], Callable[[], Any]]:
    own, ours = torch.Generator().manual_seed(0), random.Random(0)
    theirs, older = np.random.default_rng(0), np.random.RandomState(0)

    def loss() -> None:
        torch.rand(1, generator=own)
        ours.random()
        theirs.random()
        older.rand()

    return loss, lambda: (
        own.get_state().tolist(),
        ours.getstate(),
        repr(theirs.bit_generator.state),
        repr(older.get_state()),
    )


def in_arrays() -> tuple[Callable[[], Any], Callable[[], Any]]:
    one, other = np.zeros(2), torch.zeros(2)

    def loss() -> None:
        one[0] += 1
        other.add_(1)

    return loss, lambda: (one.tolist(), other.tolist())


def in_a_cache() -> tuple[Callable[[], Any], Callable[[], Any]]:
    @functools.lru_cache
    def mask(size: int) -> Tensor:
        return torch.ones(size)

    return lambda: mask(3), lambda: mask.cache_info().currsize


WAYS = [
    in_a_cell,
    in_a_cell_that_was_empty,
    in_a_global,
    in_a_global_of_a_function_that_it_calls,
    in_a_module,
    in_an_attribute_of_the_function,
    in_a_default,
    in_an_argument_of_a_partial,
    in_the_object_of_a_method,
    in_slots,
    in_a_frozen_dataclass,
    in_containers,
    in_random_generators,
    in_arrays,
    in_a_cache,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_is_kept_is_as_before(way: Any) -> None:
    loss, told = way()
    before = told()
    call(loss)
    assert told() == before


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_it_is_so_behind_wrappers_and_after_an_error(way: Any) -> None:
    loss, told = way()
    before = told()

    @torch.enable_grad()
    def failing() -> None:
        loss()
        raise ZeroDivisionError

    joint = ab.JointLoss(encode=lambda _model, _batch: failing(), compare=lambda _model, _all: None)
    with pytest.raises(ZeroDivisionError), untouched([functools.partial(joint, None)]):
        joint(nn.Linear(1, 1), None)
    assert told() == before


# --------------------------------------------------------------------------------- other models


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1)).double()


def state_of(model: nn.Module) -> Any:
    gradients = [p.grad if p.grad is None else p.grad.tolist() for p in model.parameters()]
    buffers = {name: buffer.tolist() for name, buffer in model.named_buffers()}
    flags = [module.training for module in model.modules()]
    return gradients, buffers, flags, [p.requires_grad for p in model.parameters()]


@pytest.mark.parametrize("has_gradients", [False, True])
def test_a_model_in_the_closure_keeps_gradients_statistics_and_flags(has_gradients: bool) -> None:
    model = net()
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).double()
    if has_gradients:
        model(x).sum().backward()
    before = state_of(model)
    held = [p.grad for p in model.parameters()]
    with untouched(lambda: model(x), aside=True):
        model.eval()(x).sum().backward()
        model.train()(x).sum().backward()
        model.requires_grad_(False)
    assert state_of(model) == before
    assert all(p.grad is one for p, one in zip(model.parameters(), held, strict=True))


def test_a_replaced_buffer_is_the_old_one_again() -> None:
    model = net()
    old = model[1].running_mean
    with untouched(lambda: model):
        model[1].running_mean = torch.ones(4)
    assert model[1].running_mean is old


def test_what_others_see_to_is_passed_over() -> None:
    model = net()
    with untouched(lambda: model, aside=True, but=[*model.modules(), *model.parameters()]):
        model(torch.ones(2, 3).double()).sum().backward()
        assert model[0].weight.grad is not None
    assert model[0].weight.grad is not None


@dataclass
class Meter:
    count: int = 2


def test_what_modules_keep_in_containers_tensors_and_objects_is_used_by_the_model() -> None:
    model = net()
    model[0].seen, model[0].sums, model[0].meter = [1], torch.ones(1), Meter()
    with untouched(*used_by(model), but=[*model.modules(), *model.parameters()]):
        model[0].seen.append(2)
        model[0].sums += 1
        model[0].meter.count += 1
    assert (model[0].seen, model[0].sums, model[0].meter.count) == ([1], 1, 2)


def test_larger_tensors_are_not_copied_but_bound_again() -> None:
    kept = {"bank": torch.zeros(3 << 20)}
    bank = kept["bank"]
    with untouched(lambda: kept):
        kept["bank"] = kept["bank"] + 1
        bank[0] = 7
    assert kept["bank"] is bank
    assert bank[0] == 7


def test_many_objects_do_not_hide_those_that_are_near() -> None:
    far = [[] for _ in range(900)]
    for _ in range(3):
        far = [[far], [[] for _ in range(900)], [[] for _ in range(900)]]
    near: list[int] = []
    with untouched(lambda: (far, near)):
        near.append(1)
    assert not near


def test_what_threads_share_is_left_alone() -> None:
    class Writer:
        def __init__(self) -> None:
            self.queue: queue.Queue[int] = queue.Queue()
            self.sent = 0

        def __call__(self) -> None:
            self.queue.put(1)
            self.sent += 1

    writer = Writer()
    call(writer)
    assert (writer.queue.qsize(), writer.sent) == (2, 2)


def test_what_is_of_anybatch_itself_is_left_alone() -> None:
    joint = Joint(ab.JointLoss(encode=lambda m, b: m(b), compare=lambda m, z: z.mean()))
    with untouched(lambda: joint):
        joint.mark = 1
    assert joint.mark == 1

"""How updates are run: all ways give the same, and leave the optimizer as it was; torchao's, which are
compiled and keep several tensors in one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook as every_step_after
from torch.optim.optimizer import register_optimizer_step_pre_hook as every_step_before

from anybatch.compute import low_bit_optimizers, optimizer_update
from anybatch.compute.low_bit_optimizers import (
    is_compiled,
    parts_of,
    rehearse,
)
from anybatch.compute.optimizer_update import Updater, leanest_update
from anybatch.engine.limit import warm_up
from anybatch.errors import InputError

Make = Callable[[Any], Optimizer]

BY_PARAMETER: dict[str, Make] = {
    "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adamw foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "radam": partial(torch.optim.RAdam, lr=0.01),
    "adamax": partial(torch.optim.Adamax, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "adadelta": partial(torch.optim.Adadelta, lr=0.05),
    "asgd": partial(torch.optim.ASGD, lr=0.05),
}
FUSED = ("adam", "adamw", "sgd", "adagrad")


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = ((7, 5), (5,), (), (3, 4, 2), (6, 6))
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def stepped(make: Make, *ways: tuple[Any, Any], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Parameters and states after three updates in each of `ways`; one parameter has no gradient in the
    first of them."""
    given = parameters(dtype)
    optimizer = make([{"params": given[:2]}, {"params": given[2:], "weight_decay": 0.1}])
    updater = Updater(optimizer)
    draw = torch.Generator().manual_seed(1)
    for way in ways:
        updater.take(*way)
        updater.reserve()
        for number in range(3):
            for place, param in enumerate(given):
                param.grad = torch.randn(param.shape, generator=draw, dtype=dtype)
                if place == 1 and number == 0:  # its first gradient is a later one
                    param.grad = None
            updater.step()
    updater.close()
    states = [
        value
        for param in given
        for value in optimizer.state[param].values()
        if isinstance(value, Tensor)
    ]
    return [*(param.detach() for param in given), *states]


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(optimizer_update, "PART_BYTES", 300)


@pytest.mark.parametrize("way", [("in parts", "device"), ("as given", "host")])
@pytest.mark.parametrize("name", BY_PARAMETER)
def test_in_parts_and_from_the_host_to_the_bit(small_parts, name, way):
    wanted = stepped(BY_PARAMETER[name], ("as given", "device"), ("as given", "device"))
    found = stepped(BY_PARAMETER[name], way, ("as given", "device"))
    assert all(map(torch.equal, found, wanted))
    later = stepped(BY_PARAMETER[name], ("as given", "device"), way)
    assert all(map(torch.equal, later, wanted))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("states_on", ["device", "host"])
@pytest.mark.parametrize("name", FUSED)
def test_fused_is_the_same_but_for_rounding(small_parts, name, states_on, dtype, tolerance):
    plain = ("as given", "device")
    wanted = stepped(BY_PARAMETER[name], plain, plain, plain, dtype=dtype)
    found = stepped(BY_PARAMETER[name], plain, ("fused", states_on), plain, dtype=dtype)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= tolerance * other.norm().clamp_min(1e-3)


def num_hooks(optimizer: Optimizer) -> tuple[int, int]:
    return len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)


def hooked(make: Make, *way: Any) -> list[Tensor]:
    """Parameters, their moving average and what hooks saw of three updates in this way; None: by the
    optimizer itself. One hook clips by all gradients, one makes the average."""
    given = parameters()
    optimizer = make([{"params": given[:2]}, {"params": given[2:], "weight_decay": 0.1}])
    averages = [param.detach().clone() for param in given]
    seen: list[Tensor] = []

    def clip(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        bound = torch.stack([param.grad.abs().mean() for param in given]).mean()  # pyright: ignore[reportOptionalMemberAccess]
        for param in given:
            assert param.grad is not None
            param.grad.clamp_(-bound, bound)

    def follow(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        for average, param in zip(averages, given, strict=True):
            average.lerp_(param.detach(), 0.3)

    def look(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        seen.extend(param.grad.clone() for param in given if param.grad is not None)

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(follow)
    everywhere = [register(look) for register in (every_step_before, every_step_after)]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # has a wrapper for the step
    updater = Updater(optimizer)
    try:
        updater.take(*(way or ("as given",)))
        updater.reserve()
        draw = torch.Generator().manual_seed(1)
        for _ in range(3):
            for param in given:
                param.grad = torch.randn(param.shape, generator=draw, dtype=torch.float64)
            updater.step() if way else optimizer.step()
            scheduler.step()
    finally:
        for handle in everywhere:
            handle.remove()
    updater.close()
    assert num_hooks(optimizer) == (1, 1)
    assert len(seen) == 3 * 2 * len(given)
    return [*(param.detach() for param in given), *averages, *seen]


@pytest.mark.parametrize("states_on", ["device", "host"])
@pytest.mark.parametrize(
    ("name", "update"),
    [
        *product(("adamw", "adamw foreach", "momentum"), ("as given", "in parts")),
        *product(("adamw", "sgd", "adagrad"), ("fused",)),
    ],
)
def test_hooks_on_the_step_see_one_update(small_parts, name, update, states_on):
    make = BY_PARAMETER[name]
    plain = partial(make, fused=True) if update == "fused" else make
    found = hooked(make, update, states_on)
    assert all(map(torch.equal, found, hooked(plain)))


def test_a_hook_that_fails_leaves_the_gradients_and_no_hook(small_parts):
    given = parameters()
    optimizer = torch.optim.SGD(given, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    updater = Updater(optimizer)
    updater.take("in parts")
    for param in given:
        param.grad = torch.ones_like(param)
    with pytest.raises(ZeroDivisionError):
        updater.step()
    assert all(param.grad is not None for param in given)
    assert num_hooks(optimizer) == (1, 0)


def test_hooks_for_all_optimizers_do_not_see_a_rehearsal(compiled):
    seen: list[Any] = []
    handles = [
        every_step_before(lambda *_: seen.append(1)),
        every_step_after(lambda *_: seen.append(2)),
    ]
    try:
        rehearse(compiled())
    finally:
        for handle in handles:
            handle.remove()
    assert not seen


def test_options_are_given_back():
    optimizer = torch.optim.AdamW(parameters())
    before = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    updater = Updater(optimizer)
    updater.take("fused")
    assert optimizer.param_groups[0]["fused"]
    updater.close()
    after = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert after == before


class Own(torch.optim.AdamW):
    """May do anything."""


@pytest.mark.parametrize(
    ("make", "kind", "wanted"),
    [
        (torch.optim.AdamW, "cpu", "fused"),
        (torch.optim.AdamW, "cuda", "fused"),
        (partial(torch.optim.SGD, lr=0.1), "cpu", "fused"),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), "cpu", "as given"),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), "cuda", "in parts"),
        (torch.optim.Adagrad, "cpu", "fused"),
        (torch.optim.Adagrad, "cuda", "in parts"),  # torch has no kernel
        (torch.optim.RMSprop, "cpu", "as given"),
        (torch.optim.RMSprop, "cuda", "in parts"),
        (partial(torch.optim.AdamW, foreach=True), "cuda", "in parts"),
        (partial(torch.optim.AdamW, foreach=False), "cpu", "as given"),  # somebody wants that
        (partial(torch.optim.AdamW, fused=True), "cpu", "as given"),  # it is already
        (partial(torch.optim.AdamW, lr=torch.tensor(0.1)), "cpu", "as given"),
        (Own, "cpu", "as given"),
        (torch.optim.Adafactor, "cuda", "as given"),  # its states are no tensors like parameters
    ],
    ids=str,
)
def test_the_leanest_update(small_parts, make, kind, wanted):
    model = nn.Linear(20, 20)
    assert leanest_update(make(model.parameters()), model, kind) == wanted


def test_no_fused_kernel_takes_sparse_gradients():
    model = nn.Embedding(9, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert leanest_update(optimizer, model, "cpu") == "as given"


@pytest.mark.parametrize(
    ("make", "way", "told"),
    [
        (torch.optim.RMSprop, ("fused", "device"), "no such kernel for the optimizer RMSprop"),
        (
            Own,
            ("in parts", "device"),
            "update is 'in parts', and the optimizer Own may look at all",
        ),
        (
            Own,
            ("as given", "host"),
            "optimizer_states is 'host', and the optimizer Own may look at",
        ),
    ],
    ids=["fused", "in parts", "host"],
)
def test_what_an_optimizer_cannot(make, way, told):
    with pytest.raises(InputError, match=told):
        Updater(make(parameters())).take(*way)


# --------------------------------------------------------------------------------------- torchao's


@pytest.fixture
def compiled():
    """Makes an optimizer of torchao on weights that are large enough for it and on one that is not.
    Its update goes through torch's compiler, but no machine code is made, which takes long."""
    module = pytest.importorskip("torchao.optim")
    torch.manual_seed(0)
    given = [nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64))]
    with torch.compiler.set_stance("default", force_backend="eager"):
        yield partial(module.AdamW8bit, given)


def test_what_a_tensor_consists_of(compiled):
    optimizer = compiled()
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    large, small = optimizer.param_groups[0]["params"]
    state = optimizer.state[large]["exp_avg"]
    parts = parts_of(state)
    assert {name: (part.dtype, part.numel()) for name, part in parts.items()} == {
        "codes": (torch.uint8, 64 * 64),
        "scale": (torch.float32, 16),
        "qmap": (torch.float32, 256),
    }
    assert parts["codes"] is state.codes
    plain = optimizer.state[small]["exp_avg"]
    assert parts_of(plain) == {"": plain}


def test_a_rehearsal_changes_nothing_and_saves_the_compilation(compiled):
    optimizer = compiled(lr=0.1, weight_decay=0.5)
    given = optimizer.param_groups[0]["params"]
    before = copy.deepcopy(given)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(
        optimizer, 0.5
    )  # puts a step of its own there
    rehearse(optimizer)
    assert all(map(torch.equal, given, before))
    assert not optimizer.state
    counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for param in given:
        param.grad = torch.ones_like(param)
    optimizer.step()
    scheduler.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == counted
    assert optimizer.state[given[0]]["step"] == 1


def test_a_compiler_that_fails_is_told_before_the_first_step(compiled):
    def broken(*_: Any) -> Any:
        raise OSError("no such file: g++")

    torch._dynamo.reset()
    told = r"(?s)AdamW8bit.*failed.*g\+\+.*take an optimizer of torch"
    stance = torch.compiler.set_stance("default", force_backend=broken)
    with stance, pytest.raises(InputError, match=told):
        rehearse(compiled())


def test_others_are_not_compiled():
    optimizer = torch.optim.AdamW(parameters())
    assert not is_compiled(optimizer)
    rehearse(optimizer)
    assert not optimizer.state


def test_a_compiler_that_fails_concerns_those_alone_who_train_with_it(monkeypatch):
    """Who has only loaded the module may have no compiler."""
    optim = pytest.importorskip("torchao.optim")

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(low_bit_optimizers, "unhooked_step", fails)
    warm_up()
    with pytest.raises(InputError, match="AdamW8bit, whose update is compiled, and that failed"):
        rehearse(optim.AdamW8bit([nn.Parameter(torch.zeros(2, 4096))]))

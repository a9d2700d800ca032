"""Batches of any class in `ab.Step`: cut without their constructors, and given to each pass as the
script made them."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import InitVar, dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab

KIND: Any = {"dtype": torch.float64}


@dataclass
class Late:
    x: Tensor
    y: Tensor
    scale: float = field(init=False, default=1.0)


@dataclass
class Scaled:
    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        self.x = self.x / 255


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    y: Tensor


@dataclass
class Variable:
    x: Tensor
    y: Tensor
    factor: InitVar[float]

    def __post_init__(self, factor: float) -> None:
        self.x = self.x * factor


class Named(namedtuple("Named", "x y")):
    def __new__(cls, x: Tensor, y: Tensor) -> Named:
        return super().__new__(cls, 2 * x, y)


class Pair(list[Tensor]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__([x, y])

    x = property(lambda self: self[0])
    y = property(lambda self: self[1])


class Single(tuple[Tensor, ...]):
    def __new__(cls, x: Tensor, y: Tensor) -> Single:
        return super().__new__(cls, (x, y))

    x = property(lambda self: self[0])
    y = property(lambda self: self[1])


def of(kind: str, x: Tensor, y: Tensor) -> Any:
    if kind == "late":
        batch = Late(x, y)
        batch.scale = 3.0
        return batch
    if kind == "model output":
        outputs = pytest.importorskip("transformers.modeling_outputs")

        @dataclass
        class Output(outputs.ModelOutput):
            x: Tensor | None = None
            y: Tensor | None = None

        return Output(x=x, y=y)
    if kind == "named, with an attribute":
        named = Named(x / 2, y)
        named.scale = 3.0  # type: ignore[attr-defined]
        return named
    made = {
        "scaled": lambda: Scaled(255 * x, y),
        "frozen": lambda: Frozen(x, y),
        "variable": lambda: Variable(x, y, 1.0),
        "named": lambda: Named(x / 2, y),
        "pair": lambda: Pair(x, y),
        "single": lambda: Single(x, y),
    }
    return made[kind]()


def samples() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(20, 8, generator=draw, **KIND), torch.randint(3, (20,), generator=draw)


def trained(loss: Any, batches: list[Any], **options: Any) -> tuple[list[float], Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(8, 3, **KIND)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with ab.Step(model, optimizer, loss, verbose=False, **options) as step:
        losses = [step(batch).loss for batch in batches]
    return losses, model.weight.detach()


def summed(model: nn.Module, batch: Any) -> ab.Loss:
    factor = getattr(batch, "scale", 1.0)
    return ab.Loss(factor * F.cross_entropy(model(batch.x), batch.y, reduction="sum"), len(batch.y))


@pytest.mark.parametrize("options", [{"micro_batch": 6}, {"memory": "1GiB"}], ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        "late", "scaled", "frozen", "variable", "named", "named, with an attribute", "pair",
        "single", "model output",
    ],
)  # fmt: skip
def test_a_batch_of_any_class_is_as_the_script_made_it(kind: str, options: dict[str, Any]):
    x, y = samples()
    batch = of(kind, x, y)
    found, weight = trained(summed, [batch, batch], **options)
    expected, plain = trained(summed, [batch, batch], micro_batch=20)
    assert found == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(weight, plain, rtol=1e-12, atol=1e-14)
    torch.manual_seed(0)
    right = F.cross_entropy(nn.Linear(8, 3, **KIND)(x), y).item()
    assert found[0] == pytest.approx(getattr(batch, "scale", 1.0) * right, rel=1e-12)


def assigning(model: nn.Module, batch: Any) -> ab.Loss:
    batch["x"] = 2 * batch["x"] + 1
    return ab.Loss(F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), 20)


def popping(model: nn.Module, batch: Any) -> ab.Loss:
    y = batch.pop("y")
    return ab.Loss(F.cross_entropy(model(2 * batch["x"] + 1), y, reduction="sum"), len(y))


def popping_from_a_list(model: nn.Module, batch: Any) -> ab.Loss:
    y = batch["pair"].pop()
    (x,) = batch["pair"]
    return ab.Loss(F.cross_entropy(model(2 * x + 1), y, reduction="sum"), len(y))


def setting(model: nn.Module, batch: Any) -> ab.Loss:
    batch.x = 2 * batch.x + 1
    return ab.Loss(F.cross_entropy(model(batch.x), batch.y, reduction="sum"), len(batch.y))


@pytest.mark.parametrize(
    ("loss", "made"),
    [
        (assigning, lambda x, y: {"x": x, "y": y}),
        (popping, lambda x, y: {"y": y, "x": x}),
        (popping_from_a_list, lambda x, y: {"pair": [x, y]}),
        (setting, lambda x, y: Late(x, y)),
    ],
)
def test_a_loss_may_change_its_batch(loss: Any, made: Any):
    """Trial passes, and passes that are redone, do not see what earlier ones have changed; after the
    step the batch is as a plain loop leaves it."""
    x, y = samples()
    expected, plain = trained(loss, [made(x, y), made(x, y)])
    batches = [made(x, y), made(x, y)]
    found, weight = trained(loss, batches, memory="1GiB")
    assert found == expected
    assert torch.equal(weight, plain)
    assert all(str(batch) != str(made(x, y)) for batch in batches)
    if loss is not assigning:
        found, weight = trained(loss, [made(x, y), made(x, y)], micro_batch=6)
        assert found == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(weight, plain, rtol=1e-12, atol=1e-14)

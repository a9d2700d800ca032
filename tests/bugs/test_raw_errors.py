"""Models, optimizers and losses that ended in an error of torch's inside.

Symptoms (0.1): `verify` of a model with the old `weight_norm` or pruning, "Only Tensors created
explicitly by the user support the deepcopy protocol"; spectral and orthogonal parametrizations and
complex parameters in half precision, dtype mismatches from a kernel; `torch.func.grad` in a recomputed
block, "don't yet support saved tensor hooks"; an optimizer that chooses its own rate, "float() argument
must be a string or a real number"; a sum that leaves float16, "a division by zero or a logarithm of
zero"; an expanded buffer, "more than one element of the written-to tensor".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.engine.rollback import SavedBuffers
from anybatch.errors import InputError, LossError

GENERATOR = torch.Generator().manual_seed(0)
DATA = TensorDataset(torch.randn(24, 6, generator=GENERATOR), torch.randn(24, generator=GENERATOR))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ab.Loss:
    found = model(batch[0]).squeeze(1)
    return ab.Loss((found - batch[1]).square().sum(), len(found))


def task_of(model: Callable[[], nn.Module], **changes: Any) -> ab.Task:
    options: dict[str, Any] = {
        "model": model,
        "loss": loss,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.01),
        "train": DATA,
        "global_batch": 24,
        "steps": 2,
    }
    return ab.Task(**{**options, **changes})


def trained(task: ab.Task, **options: Any) -> Any:
    return ab.train(task, micro_batch=8, progress=False, **options)


def around(first: nn.Module) -> nn.Module:
    return nn.Sequential(first, nn.Tanh(), nn.Linear(8, 1))


def pruned() -> nn.Module:
    model = around(nn.Linear(6, 8))
    prune.l1_unstructured(model[0], "weight", 0.3)
    return model


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("build", [pruned, lambda: around(nn.utils.weight_norm(nn.Linear(6, 8)))])
def test_weights_that_are_computed_before_each_pass(build: Callable[[], nn.Module]):
    task = task_of(build)
    assert ab.verify(task, ab.plan(task, micro_batch=8)).exact


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).real


@pytest.mark.parametrize(
    ("build", "precision", "told"),
    [
        (
            lambda: around(parametrizations.spectral_norm(nn.Linear(6, 8))),
            "bf16-weights",
            "is a spectral norm",
        ),
        (
            lambda: around(nn.utils.spectral_norm(nn.Linear(6, 8))),
            "bf16-weights",
            "'0' is a spectral norm",
        ),
        (
            lambda: around(parametrizations.orthogonal(nn.Linear(6, 8))),
            "bf16-pure",
            "is an orthogonal parametrization",
        ),
        (Complex, "bf16-pure", "'the model' has complex parameters"),
    ],
)
def test_weights_that_cannot_be_halved(build: Any, precision: str, told: str):
    with pytest.raises(InputError, match=f"precision {precision} .*{told}.*: use bf16"):
        trained(task_of(build), precision=precision)
    assert trained(task_of(build), precision="bf16").ended.steps == 2


class Derived(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        def total(one: Tensor) -> Tensor:
            return torch.tanh(self.inner(one)).sum()

        return x + torch.vmap(torch.func.grad(total))(x)


def test_blocks_that_differentiate_themselves():
    task = task_of(lambda: nn.Sequential(Derived(), Derived(), nn.Linear(6, 1)))
    assert trained(task).ended.steps == 2
    with pytest.raises(InputError, match=r"differentiates by torch\.func.*recompute='none'"):
        trained(task, recompute="all")


def test_a_model_that_torch_jit_has_compiled():
    task = task_of(lambda: torch.jit.script(around(nn.Linear(6, 8))))
    assert trained(task).ended.steps == 2
    with pytest.raises(InputError, match=r"'the model' is compiled by torch\.jit"):
        ab.verify(task, ab.plan(task, micro_batch=8))


class Ascending(torch.optim.SGD):
    """Takes two passes per step, as SAM does."""

    def step(self, closure: Any = None) -> None:
        assert closure is not None


def test_an_optimizer_that_asserts_a_closure():
    with pytest.raises(AssertionError) as caught:
        trained(task_of(lambda: around(nn.Linear(6, 8)), optimizer=Ascending))
    [note] = caught.value.__notes__
    assert note == "raised in the update: step() of Ascending is called without a closure"


class WithoutRate(torch.optim.SGD):
    """Chooses its own, as Adafactor does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01)
        for group in self.param_groups:
            group["lr"] = None

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param -= 0.01 * param.grad


def test_an_optimizer_that_chooses_its_own_rate():
    task = task_of(lambda: around(nn.Linear(6, 8)), optimizer=WithoutRate)
    assert trained(task).ended.steps == 2
    task = task_of(
        lambda: around(nn.Linear(6, 8)), optimizer=WithoutRate, schedule=lambda progress: 1.0
    )
    with pytest.raises(InputError, match=r"WithoutRate has none \(lr=None"):
        trained(task)


def test_a_sum_that_leaves_float16():
    def far(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ab.Loss:
        return ab.Loss((300 + model(batch[0])).square().sum(), len(batch[0]))

    def far_in_half(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ab.Loss:
        return ab.Loss((300 + model(batch[0])).half().square().sum(), len(batch[0]))

    model = nn.Linear(6, 1)
    with pytest.raises(LossError, match=r"adds up in float16, whose largest number is 65,504"):
        trained(task_of(lambda: model, loss=far_in_half))
    assert trained(task_of(lambda: model, loss=far)).ended.steps == 2


def test_an_expanded_buffer_is_put_back():
    module = nn.Module()
    module.register_buffer("scale", torch.ones(1, 3).expand(4, 3))
    saved = SavedBuffers(module)
    saved.save()
    module.scale[0] = 7.0
    saved.put_back_buffers()
    assert torch.equal(module.scale, torch.ones(4, 3))


def test_a_power_iteration_is_not_blamed_on_the_gradient(recwarn: pytest.WarningsRecorder):
    trained(task_of(lambda: around(nn.utils.spectral_norm(nn.Linear(6, 8)))))
    assert not [one for one in recwarn if "not proportional" in str(one.message)]


def test_half_precision_weights_of_a_float64_model_meet_float64_batches():
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    model = nn.Linear(6, 1, dtype=torch.float64)
    weight, bias = (param.detach().clone() for param in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ab.Step(model, optimizer, loss, precision="bf16-weights") as step:
        step((x, y))
    gradient = 2 * (x @ weight[0] + bias - y) @ x / 8
    assert model.weight.dtype == torch.float64
    assert torch.allclose(weight[0] - model.weight[0], 0.1 * gradient, rtol=0.1, atol=0.01)

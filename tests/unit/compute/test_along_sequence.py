"""MLPs in tiles along the sequence: the same gradients in less memory, and only where positions are
computed by themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.compute.along_sequence import find_mlps
from anybatch.compute.recompute import install
from anybatch.estimate import seconds_work, subject_of
from anybatch.plans import Choice, Recompute

WIDTH = 8


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 16, bias=False), nn.Linear(WIDTH, 16, bias=False)
        self.down = nn.Linear(16, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Chunked(nn.Module):
    """Gate and value in one matrix, after a norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.both, self.down = nn.Linear(WIDTH, 32), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(self.norm(x)).chunk(2, dim=-1)
        return self.down(gate.sigmoid() * value)


class Attention(nn.Module):
    """One tensor in, one out, and nothing but linear layers inside, as in many small scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(x).split(WIDTH, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


class Mixer(nn.Module):
    """Mixes positions by linear layers over the other dim."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x.transpose(1, 2)))).transpose(1, 2)


class Shifted(Gated):
    """Each position sees the one before it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.roll(1, dims=1))


class Pair(Gated):
    """Two tensors out, as of a mixture of experts."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x.mean()


class Adapted(nn.Module):
    """A linear layer with an adapter: two matrices, and nothing wider than its output."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


class Counting(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Dropout(0.0), nn.Linear(24, WIDTH))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.Dropout(0.4), nn.Linear(24, WIDTH))


def dropping_features() -> nn.Module:
    """Drops the same features of all positions."""
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.Dropout1d(0.4), nn.Linear(24, WIDTH))


class Block(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), make()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        result = self.mlp(x)
        return x + (result[0] if isinstance(result, tuple) else result)


class Model(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], positions: int = 24) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(positions, WIDTH))
        self.layers = nn.ModuleList(Block(make) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return x


def gradients(model: nn.Module, given: Tensor) -> list[Tensor]:
    model.zero_grad()
    total = model(given).square().sum()
    total.backward()
    return [total.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_is_derivative(model: nn.Module, given: Tensor) -> Tensor:
    """The gradient with respect to the input is the derivative of what forward computes, with the
    masks of dropout that it draws. Returns the value of forward."""

    def total(at: Tensor) -> Tensor:
        torch.manual_seed(7)
        return model(at).square().sum()

    direction = torch.randn_like(given)
    at = given.clone().requires_grad_()
    value = total(at)
    (gradient,) = torch.autograd.grad(value, at)
    above, below = (total((given + s * direction).requires_grad_()) for s in (1e-6, -1e-6))
    torch.testing.assert_close(
        (gradient * direction).sum(), (above - below).detach() / 2e-6, rtol=1e-6, atol=0.0
    )
    return value


TILED = Recompute(blocks=("layers.*",), tiled=("layers.*.mlp",))
FEW = Recompute(tiled=("layers.0.mlp",))


@pytest.mark.parametrize("make", [Gated, Chunked, plain])
@pytest.mark.parametrize("length", [24, 19, 8, 3, 1])
@pytest.mark.parametrize("recompute", [TILED, FEW])
def test_tiles_have_the_gradients_of_the_whole(
    make: Callable[[], nn.Module], length: int, recompute: Recompute
):
    torch.manual_seed(0)
    model = Model(make).double()
    given = torch.randn(2, length, WIDTH, dtype=torch.float64)
    expected = gradients(model, given)
    undo = install(model, recompute)
    found = gradients(model, given)
    undo()
    assert len(found) == len(expected) == 1 + len(list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert "forward" not in vars(model.layers[0].mlp)


def test_tiles_are_computed_under_autocast_as_the_whole_is():
    torch.manual_seed(0)
    model, given = Model(Gated), torch.randn(2, 24, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(model, given)
        undo = install(model, TILED)
        found = gradients(model, given)
        undo()
    torch.testing.assert_close(found[0], expected[0])
    for one, other in zip(found[1:], expected[1:], strict=True):
        # Sums of eight tiles in bfloat16.
        torch.testing.assert_close(one, other, rtol=0, atol=0.02 * float(other.abs().max()))


def task_of(make: Callable[[], nn.Module], positions: int = 24, **options: object) -> ab.Task:
    draw = torch.Generator().manual_seed(0)
    given = torch.randn(2, positions, WIDTH, generator=draw)
    return ab.Task(
        model=lambda: Model(make, positions),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=TensorDataset(given),
        global_batch=2,
        steps=2,
        **options,  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.parametrize(
    ("make", "is_tileable"),
    [
        (Gated, True),
        (Chunked, True),
        (plain, True),
        (dropping, True),
        (dropping_features, False),
        (Adapted, False),
        (Counting, False),
        (Mixer, False),
        (Shifted, False),
        (Pair, False),
        (Attention, False),
    ],
)
def test_a_pass_tells_which_modules_compute_positions_by_themselves(
    make: Callable[[], nn.Module], is_tileable: bool
):
    choice = Choice(micro_batch=1, evaluation_batch=1)
    device = ab.Machine.describe("24GiB").device
    found = seconds_work.Counting(subject_of(task_of(make)), choice, device).at(1)
    assert found.tileable == (("layers.0.mlp", "layers.1.mlp") if is_tileable else ())
    assert (found.tiled_part > 0) == is_tileable


def test_frozen_weights_and_four_dims_are_taken():
    """As in a first layer of adapters, whose input has no gradient, and in an MLP over images."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"block": nn.ModuleDict({"mlp": Gated()})}).double()
    mlp = model["block"]["mlp"].requires_grad_(False)
    mlp.down.requires_grad_(True)
    given = torch.randn(2, 3, 5, WIDTH, dtype=torch.float64)
    expected = mlp(given).square().sum()
    expected.backward()
    wanted, mlp.down.weight.grad = mlp.down.weight.grad, None
    undo = install(model, Recompute(tiled=("block.mlp",)))
    found = mlp(given).square().sum()
    found.backward()
    undo()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mlp.down.weight.grad, wanted, rtol=1e-12, atol=1e-12)


def test_dropout_is_that_of_forward_in_backward_too():
    torch.manual_seed(0)
    model = Model(dropping).double()
    undo = install(model, TILED)
    assert_is_derivative(model, torch.randn(2, 24, WIDTH, dtype=torch.float64))
    undo()


def test_modules_with_buffers_are_left_out():
    model = nn.ModuleDict({"a": Counting(), "b": plain()})
    assert find_mlps(nn.ModuleDict({"block": model}), ["block"]) == ["block.b"]


def test_a_reproducible_run_has_no_tiles():
    assert subject_of(task_of(Gated)).mlps
    assert not subject_of(task_of(Gated, reproducible=True)).mlps


@pytest.mark.parametrize("make", [Attention, Shifted, Pair])
def test_a_plan_that_names_another_module_is_refused(make: Callable[[], nn.Module]):
    model = Model(make)
    undo = install(model, TILED)
    with pytest.raises(ab.InputError, match=r"'layers\.0\.mlp' in tiles .* by itself"):
        model(torch.randn(2, 24, WIDTH))
    undo()
    gradients(model, torch.randn(2, 24, WIDTH))


@pytest.mark.slow
def test_a_sample_that_its_blocks_do_not_hold_whole_is_planned_in_tiles():
    task, machine = task_of(Gated, positions=1 << 15), ab.Machine.here(device="cpu")
    peaks: list[int] = []
    for way in (Recompute(), Recompute(blocks=("layers.*",)), TILED):
        prediction = ab.plan(task, machine, micro_batch=1, recompute=way).prediction
        assert prediction is not None
        peaks.append(prediction.peak_bytes)
    none, blocks, tiled = peaks
    assert tiled < blocks < none
    memory = (tiled + blocks) // 2
    with pytest.raises(ab.NoPlanFits):
        ab.plan(task, machine, memory=memory, recompute="all")
    found = ab.plan(task, machine, memory=memory).choice
    assert found.micro_batch == 1
    assert found.recompute.tiled == ("layers.0.mlp", "layers.1.mlp")

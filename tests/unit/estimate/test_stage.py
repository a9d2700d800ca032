"""Stages and the cache of operations give what a trace from the beginning gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.planner.tasks import deep, deep_task
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.estimate import Subject, subject_of
from anybatch.estimate.fake_op_cache import CachedOps, FakeOpCache, fake_mode
from anybatch.estimate.family import Traced
from anybatch.estimate.seconds_work import Counting
from anybatch.estimate.stage import Stage, trace_evaluation, trace_step
from anybatch.machine import Device, Machine
from anybatch.plans import Choice, Recompute

CPU = Machine.here("64MiB", "cpu").device
ABSENT = Machine.describe("24GiB").device
BLOCKS = ("1", "2")
WAYS = (
    Recompute(),
    Recompute(blocks=BLOCKS, keep="matmuls"),
    Recompute(blocks=BLOCKS[:1]),
    Recompute(blocks=(".",), nested=True),
)


class Forgetful(FakeOpCache):
    """Has torch work out every result."""

    def run(self, fake: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """See `FakeOpCache`."""
        return func(*args, **(kwargs or {}))


class Table(nn.Module):
    """Keeps what its first pass has made."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(64, 1)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.ones(64).cumsum(0)
        return self.line(x * self.table)


def subject(model: Callable[[], nn.Module], **changes: Any) -> Subject:
    valid = TensorDataset(torch.zeros(64, 64), torch.zeros(64, 1))
    task: ab.Task = deep_task(model=model, valid=valid, global_batch=64, ghost_batch=8)
    return replace(subject_of(task), **changes)


def anew(before: Subject) -> Subject:
    """With nothing known of it."""
    return replace(before, families={}, stages={}, op_cache=Forgetful())


def seen(traced: Traced) -> list[Any]:
    """All of a trace, in a form that can be compared: to live on at its end is to die at it."""
    end = traced.timeline.num_moments
    blocks = [
        (
            b.num_bytes,
            b.born,
            end if b.died is None else min(end, b.died),
            b.phase,
            b.kind,
            b.module,
        )
        for b in traced.timeline.blocks
    ]
    rest = replace(traced, timeline=replace(traced.timeline, blocks=[]))
    return [blocks, rest]


def choice(size: int, way: Recompute, precision: Any = "fp32") -> Choice:
    return Choice(micro_batch=size, evaluation_batch=3, precision=precision, recompute=way)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "device", "flat", "precision"),
    [
        (False, CPU, False, "fp32"),
        (False, CPU, True, "fp32"),
        (True, ABSENT, False, "bf16-weights"),
    ],
    ids=["cpu", "in-buckets", "gpu-elsewhere"],
)
def test_what_is_put_together_is_what_is_traced(
    norm: bool, device: Device, flat: bool, precision: Any
):
    one = subject(lambda: deep(norm), flat=flat)
    for way in WAYS:
        for size in (8,) if way.blocks else (8, 64):
            asked = choice(size, way, precision)
            expected = trace_step(anew(one), asked, device)
            assert seen(trace_step(one, asked, device)) == seen(expected)
    asked = choice(8, Recompute(), precision)
    expected = trace_evaluation(anew(one), asked, device)
    assert seen(trace_evaluation(one, asked, device)) == seen(expected)
    assert [stage.reusable for stage in one.stages.values()] == [True]


class Recurrent(nn.Module):
    """An LSTM, which keeps a workspace for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.view(-1, 8, 8))[0][:, -1])


class Experts(nn.Module):
    """Each expert computes the samples that want it most."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 2)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        want = self.gate(x).softmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            weight, index = want[:, i].topk(len(x) // 2)
            out = out.index_add(0, index, expert(x[index]) * weight[:, None])
        return self.head(out)


class UNet(nn.Module):
    """What was on the way down is put beside what is on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, padding=1)
        self.deep = nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8))
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.join = nn.Sequential(nn.Conv2d(8, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
        self.head = nn.Linear(4 * 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.down(x.view(-1, 1, 8, 8)).relu()
        back = self.up(self.deep(kept).relu())
        return self.head(self.join(torch.cat([back, kept], 1)).flatten(1))


@pytest.mark.parametrize(
    ("model", "block"), [(Recurrent, "head"), (Experts, "experts.1"), (UNet, "deep")]
)
@pytest.mark.parametrize("device", [CPU, ABSENT], ids=["cpu", "gpu-elsewhere"])
def test_what_is_put_together_is_what_is_traced_of_other_kinds_of_models(
    model: Callable[[], nn.Module], block: str, device: Device
):
    one = subject(model)
    for way in (Recompute(), Recompute(blocks=(block,))):
        for size in (8, 16):
            asked, alone = choice(size, way), replace(anew(one), op_cache=FakeOpCache())
            assert seen(trace_step(one, asked, device)) == seen(trace_step(alone, asked, device))
    assert [stage.reusable for stage in one.stages.values()] == [True]


def test_the_model_is_built_once(monkeypatch: pytest.MonkeyPatch):
    built: list[int] = []
    real = Stage.__init__
    monkeypatch.setattr(Stage, "__init__", lambda *given: built.append(1) or real(*given))
    one = subject(deep)
    for way in WAYS:
        trace_step(one, choice(8, way), CPU)
    trace_evaluation(one, choice(8, Recompute()), CPU)
    assert len(built) == 1


def test_a_module_that_keeps_a_table_is_traced_from_the_beginning():
    one = subject(Table)
    for size in (4, 8, 16):
        asked = choice(size, Recompute())
        assert seen(trace_step(one, asked, CPU)) == seen(trace_step(anew(one), asked, CPU))
    assert not any(stage.reusable for stage in one.stages.values())


def test_a_step_that_fails_spoils_the_stage_and_no_other_step():
    fails: list[bool] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if fails:
            raise ValueError("no")
        return model(batch[0]).square().mean()

    one = replace(subject(deep), loss=loss)
    before = seen(trace_step(one, choice(8, Recompute()), CPU))
    fails.append(True)
    with pytest.raises(ValueError, match="no"):
        trace_step(one, choice(16, Recompute()), CPU)
    fails.clear()
    assert seen(trace_step(one, choice(8, Recompute()), CPU)) == before


def test_work_is_the_same_at_the_second_micro_batch():
    one = subject(deep)
    counting = Counting(one, choice(8, Recompute()), CPU)
    for size in (8, 16):
        assert counting.at(size) == Counting(anew(one), choice(size, Recompute()), CPU).at(size)


# ------------------------------------------------------------------------------------------- op cache


def batch_norm(x: Tensor, training: bool = True) -> Any:
    w, b, mean, variance = (x.new_ones(x.size(1)) for _ in range(4))
    norm = torch.ops.aten.native_batch_norm
    return norm(x, w, b, mean, variance, training, 0.1, 1e-5)


def batch_norm_backward(x: Tensor, **options: Any) -> Any:
    weight, mean, inverse = (x.new_ones(x.size(1), **options) for _ in range(3))
    norm = torch.ops.aten.native_batch_norm_backward
    with_all = [True, True, True]
    return norm(x + 1, x, weight, mean, inverse, mean, inverse, True, 1e-5, with_all)


def channels_last(x: Tensor) -> Tensor:
    return x.view(2, 3, 2, 2).to(memory_format=torch.channels_last)


OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "new": lambda x: x + 1,
    "another dtype": lambda x: x > 0,
    "integer or not": lambda x: (
        torch.full((2,), 1),
        torch.full((2,), 1.0),
        torch.full((2,), True),
    ),
    "in place": lambda x: x.add_(1),
    "view": lambda x: x.t()[1:],
    "unsafe view": lambda x: torch.ops.aten._unsafe_view(x, [x.numel()]),
    "several": lambda x: torch.max(x, dim=0),
    "views": lambda x: x.split(2),
    "of a list": lambda x: torch.cat([x, x.clone()]),
    "in place of a list": lambda x: torch._foreach_mul_([x, x.clone()], 2.0),
    "with itself": lambda x: x.mul_(x),
    "out": lambda x: torch.add(x, x, out=torch.empty_like(x)),
    "out is in": lambda x: torch.add(x, x, out=x),
    "resized": lambda x: x.clone().resize_(2, 2),
    "complex": lambda x: torch.view_as_real(torch.complex(x, x).conj().resolve_conj()),
    "nothing in it": lambda x: x[:0].clone(),
    "nothing among several": lambda x: torch.ops.aten.convolution_backward(
        x.view(1, 4, 6), x.view(1, 4, 6), x.new_ones(4, 4, 1), None, [1], [0], [1], False, [0], 1,
        [True, True, False],
    ),
    "norm over a batch": lambda x: batch_norm(x.view(2, 3, 4)),
    "norm that does not learn": lambda x: batch_norm(x, training=False),
    "norm of one position": lambda x: batch_norm(x.view(4, 6, 1, 1)),
    "norm of transposed": lambda x: batch_norm(x.t()),
    "norm of strided": lambda x: batch_norm(x[:, ::2]),
    "norm, channels last": lambda x: batch_norm(channels_last(x)),
    "norm in half": lambda x: batch_norm(x.bfloat16()),
    "norm's backward": lambda x: batch_norm_backward(x.view(2, 3, 4)),
    "norm's backward, channels last": lambda x: batch_norm_backward(channels_last(x)),
    "norm's backward in half": lambda x: batch_norm_backward(x.half(), dtype=torch.float32),
    "of slices": lambda x: [part + 1 for part in x.split(2)],
    "views of slices": lambda x: [part.t()[1:] for part in x.split(1)],
    "unsafe views of slices": lambda x: [
        torch.ops.aten._unsafe_view(part, [6]) for part in x.split(1)
    ],
    "strided anew": lambda x: [part.as_strided((2,), (1,), 3) for part in x.split(2)],
}  # fmt: skip


def facts(result: Any, x: Tensor) -> Any:
    """Of a result: what it is, and whose storage it has."""
    if result is None:
        return None
    if not isinstance(result, Tensor):
        return [facts(one, x) for one in result]
    storage = result.untyped_storage()
    shared = storage._cdata == x.untyped_storage()._cdata
    layout = (result.shape, result.stride(), result.storage_offset(), result.dtype)
    return (*layout, result.device, storage.nbytes(), shared, result is x)


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_what_is_cached_is_what_torch_works_out(operation: Callable[[Tensor], Any]):
    fake, op_cache = FakeTensorMode(), FakeOpCache()
    plain: TorchDispatchMode = CachedOps(fake, Forgetful())
    found: list[Any] = []
    with fake:
        for mode in (plain, CachedOps(fake, op_cache), CachedOps(fake, op_cache)):
            x = torch.ones(4, 6)
            with mode:
                result = operation(x)
            found.append((facts(result, x), facts(x, x)))
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_gradients_of_an_lstm_have_storages_of_their_own_as_when_it_runs():
    class Backward(TorchDispatchMode):
        found: Any = None

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mkldnn_rnn_layer_backward.default:
                storages = {one.untyped_storage()._cdata for one in result}
                self.found = len(storages), [(one.shape, one.stride()) for one in result]
            return result

    def run() -> Any:
        with Backward() as mode:
            nn.LSTM(8, 16)(torch.ones(5, 4, 8))[0].sum().backward()
        return mode.found

    real, fake = run(), fake_mode()
    if real is None:
        pytest.skip("this torch has no oneDNN")
    with fake, CachedOps(fake, FakeOpCache()):
        assert run() == real
        assert run() == real

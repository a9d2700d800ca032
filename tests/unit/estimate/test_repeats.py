"""A trace of a few of the blocks that are alike is, block for block, the trace of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.planner.tasks import deep_task
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.estimate import Subject, stage, subject_of
from anybatch.estimate.family import Traced
from anybatch.estimate.repeats import Runs
from anybatch.estimate.seconds_work import Counting, Work
from anybatch.estimate.stage import trace_evaluation, trace_step
from anybatch.machine import Device, Machine
from anybatch.plans import Choice, Recompute

CPU = Machine.here("64MiB", "cpu").device
ABSENT = Machine.describe("24GiB").device
NUMBER = 16
NAMES = tuple(f"blocks.{i}" for i in range(NUMBER))


class Block(nn.Module):
    """(B, 32) to (B, 32); knows its number, as blocks of language models do."""

    def __init__(self, number: int = 0, width: int = 64) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, width), nn.Linear(width, 32)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x) * scale))))


class Deep(nn.Module):
    """Blocks in a row, around which every block uses one more tensor."""

    def __init__(self, blocks: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(64, 32)
        self.blocks = nn.ModuleList(blocks(i) for i in range(NUMBER))
        self.norm = nn.LayerNorm(32)
        self.last = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.norm(self.run(x, x.detach().sigmoid())))

    def run(self, x: Tensor, scale: Tensor) -> Tensor:
        """Run the blocks."""
        for block in self.blocks:
            x = block(x, scale)
        return x


class Collecting(Deep):
    """Returns a mean over what all blocks return."""

    def run(self, x: Tensor, scale: Tensor) -> Tensor:
        """Run the blocks."""
        found = []
        for block in self.blocks:
            x = block(x, scale)
            found.append(x)
        return torch.stack(found).mean(dim=0)


class Skipping(Deep):
    """The second half of the blocks uses what the first half returned, last first."""

    def run(self, x: Tensor, scale: Tensor) -> Tensor:
        """Run the blocks."""
        kept: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            x = block(x if 2 * number < len(self.blocks) else x + kept.pop(), scale)
            kept.append(x)
        return x


class Alternating(Deep):
    """Blocks of one structure, every second of which runs twice."""

    def run(self, x: Tensor, scale: Tensor) -> Tensor:
        """Run the blocks."""
        for number, block in enumerate(self.blocks):
            for _ in range(1 + number % 2):
                x = block(x, scale)
        return x


class Crossing(Deep):
    """The tensor that every block uses has a gradient, to which all but the last block add."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.norm(self.run(x, x.sigmoid())))


class Fading(Deep):
    """Blocks whose rate of dropout increases from 0."""

    def __init__(self) -> None:
        super().__init__()
        for number, block in enumerate(self.blocks):
            setattr(block.get_submodule("drop"), "p", number / 20)  # noqa: B010


class Hooking(Deep):
    """Its first pass registers a hook in each block, which keeps what the block returns."""

    def run(self, x: Tensor, scale: Tensor) -> Tensor:
        """Run the blocks."""
        found: list[Tensor] = []
        hooks = getattr(self, "hooks", None)
        if hooks is None:
            hooks = self.hooks = [_Keeps() for _ in self.blocks]
            for block, hook in zip(self.blocks, hooks, strict=True):
                block.register_forward_hook(hook)
        for hook in hooks:
            hook.found = found
        x = super().run(x, scale)
        for hook in hooks:
            hook.found = []
        return torch.stack([x, *found]).mean(dim=0)


class _Keeps:
    found: list[Tensor]

    def __call__(self, _module: nn.Module, _args: Any, result: Tensor) -> None:
        self.found.append(result)


class Indexing(Deep):
    """Asks for each of its blocks by number."""

    def run(self, x: Tensor, scale: Tensor) -> Tensor:
        """Run the blocks."""
        for number in range(NUMBER):
            x = self.blocks[number](x, scale)
        return x


def subject(model: Callable[[], nn.Module]) -> Subject:
    valid = TensorDataset(torch.zeros(64, 64), torch.zeros(64, 1))
    task: ab.Task = deep_task(model=model, valid=valid, global_batch=64)
    return subject_of(task)


def counted(
    model: Callable[[], nn.Module], device: Device, precision: Any = "fp32", flat: bool = False
) -> Subject:
    """A subject of which the work was counted, which finds the blocks that are alike."""
    one = replace(subject(model), flat=flat)
    choice = Choice(micro_batch=8, evaluation_batch=8, precision=precision)
    one.following(device, lambda on: Counting(one, choice, on).at(8))
    return one


def without_repeats(one: Subject) -> Subject:
    return replace(one, families={}, stages={}, runs=Runs())


def told(traced: Traced) -> list[Any]:
    end = traced.timeline.num_moments
    blocks = [
        (b.born, end if b.died is None else b.died, b.num_bytes, b.phase, b.kind, b.module)
        for b in traced.timeline.blocks
    ]
    timeline = traced.timeline
    return [
        timeline.operations,
        sorted(blocks),
        timeline.scratch,
        timeline.released,
        traced.commit_bytes,
        traced.begin,
        traced.end,
        traced.shapes,
        traced.calls,
    ]


WAYS = {
    "nothing": Recompute(),
    "all": Recompute(blocks=NAMES),
    "all but products": Recompute(blocks=NAMES, keep="matmuls"),
    "the first 8": Recompute(blocks=NAMES[:8]),
    "the first 2": Recompute(blocks=NAMES[:2]),
    "some": Recompute(blocks=(*NAMES[1:4], NAMES[7])),
}


@pytest.mark.parametrize(
    "device", [pytest.param(CPU, marks=pytest.mark.nightly), ABSENT], ids=["cpu", "absent"]
)
@pytest.mark.parametrize("way", WAYS)
def test_the_trace_of_a_few_blocks_is_that_of_all(way: str, device: Device) -> None:
    one = counted(Deep, device)
    assert one.runs.found == [NAMES]
    other = without_repeats(one)
    for size in (8, 64):
        choice = Choice(micro_batch=size, evaluation_batch=size, recompute=WAYS[way])
        assert told(trace_step(one, choice, device)) == told(trace_step(other, choice, device))
    assert one.runs.found == [NAMES]


@pytest.mark.parametrize("way", ["nothing", "all", "some"])
@pytest.mark.parametrize(("model", "names"), [(Crossing, NAMES), (Fading, NAMES[1:])])
def test_a_run_may_end_unlike_its_middle(
    way: str, model: type[Deep], names: tuple[str, ...]
) -> None:
    one = counted(model, ABSENT)
    assert one.runs.found == [names]
    choice = Choice(micro_batch=8, evaluation_batch=8, recompute=WAYS[way])
    assert told(trace_step(one, choice, ABSENT)) == told(
        trace_step(without_repeats(one), choice, ABSENT)
    )
    assert one.runs.found == [names]


@pytest.mark.parametrize("device", [CPU, ABSENT], ids=["cpu", "absent"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
def test_gradients_in_buckets_are_updated_as_those_of_all_blocks(
    fused: bool, device: Device
) -> None:
    one = counted(Deep, device, flat=True)
    other = without_repeats(one)
    for way in WAYS["nothing"], WAYS["all"]:
        choice = Choice(
            micro_batch=8,
            evaluation_batch=8,
            recompute=way,
            update="fused" if fused else "as given",
        )
        assert told(trace_step(one, choice, device)) == told(trace_step(other, choice, device))
    assert one.runs.found == [NAMES]


@pytest.mark.parametrize("device", [CPU, ABSENT], ids=["cpu", "absent"])
def test_an_evaluation_of_a_few_blocks_is_that_of_all(device: Device) -> None:
    one = counted(Deep, device)
    choice = Choice(micro_batch=8, evaluation_batch=16)
    short = told(trace_evaluation(one, choice, device))
    assert short == told(trace_evaluation(without_repeats(one), choice, device))
    assert one.runs.found == [NAMES]


@pytest.mark.parametrize("precision", ["bf16", "bf16-weights"])
def test_casts_and_copies_of_weights_are_those_of_all_blocks(precision: Any) -> None:
    one = counted(Deep, ABSENT, precision)
    other = without_repeats(one)
    for recompute in WAYS["nothing"], WAYS["all"]:
        choice = Choice(micro_batch=8, evaluation_batch=8, precision=precision, recompute=recompute)
        assert told(trace_step(one, choice, ABSENT)) == told(trace_step(other, choice, ABSENT))
    assert one.runs.found == [NAMES]


@pytest.mark.parametrize("flat", [False, True], ids=["one rank", "buckets"])
@pytest.mark.parametrize(
    ("model", "device"),
    [(Deep, CPU), (Deep, ABSENT), (Crossing, ABSENT)],
    ids=["cpu", "absent", "crossing"],
)
def test_the_work_of_a_few_blocks_is_that_of_all(
    model: type[Deep], device: Device, flat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = replace(subject(model), flat=flat)
    choice = Choice(micro_batch=8, evaluation_batch=8)

    def works(of: Subject) -> list[Work]:
        def count(on: Device) -> list[Work]:
            counting = Counting(of, choice, on)
            return [counting.at(8), counting.at(32)]

        return of.following(device, count)

    short = works(one)
    assert one.runs.found == [NAMES]
    monkeypatch.setattr(stage, "VERIFIED_AT_EACH_END", NUMBER)
    monkeypatch.setattr(stage, "runs_of", lambda *_: [])
    for few, whole in zip(short, works(without_repeats(one)), strict=True):
        # The order of operations does not matter.
        assert Counter(few.operations) == Counter(whole.operations)
        assert replace(few, operations=()) == replace(whole, operations=())


def test_work_is_counted_on_a_few_blocks() -> None:
    calls: list[nn.Module] = []
    hook = register_module_forward_pre_hook(
        lambda module, _: calls.append(module) if isinstance(module, Block) else None
    )
    with hook:
        counted(Deep, ABSENT)
    assert len(calls) == 12 + 4  # to count, and to verify
    assert len(set(calls)) == 12


def test_few_blocks_run_however_many_there_are() -> None:
    one = counted(Deep, ABSENT)
    calls: list[nn.Module] = []
    hook = register_module_forward_pre_hook(
        lambda module, _: calls.append(module) if isinstance(module, Block) else None
    )
    with hook:
        trace_step(one, Choice(micro_batch=8, evaluation_batch=8), ABSENT)
    assert len(calls) == 2 * 4  # two micro-batches


def test_the_first_block_may_have_an_input_without_gradient() -> None:
    def stacked() -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(NUMBER)]
        return nn.Sequential(*blocks, nn.Linear(64, 1))

    one = counted(stacked, ABSENT)
    names = tuple(map(str, range(NUMBER)))
    assert one.runs.found == [names]
    choice = Choice(micro_batch=8, evaluation_batch=8, recompute=Recompute(blocks=names))
    assert told(trace_step(one, choice, ABSENT)) == told(
        trace_step(without_repeats(one), choice, ABSENT)
    )
    assert one.runs.found == [names]


@pytest.mark.parametrize("model", [Collecting, Skipping, Alternating, Indexing, Hooking])
def test_blocks_that_depend_on_their_number_all_run(model: type[Deep]) -> None:
    one = counted(model, ABSENT)
    assert one.runs.found == []
    choice = Choice(micro_batch=8, evaluation_batch=8)
    assert told(trace_step(one, choice, ABSENT)) == told(
        trace_step(without_repeats(one), choice, ABSENT)
    )


def test_runs_are_of_blocks_with_equal_settings() -> None:
    one = counted(lambda: Deep(lambda i: Block(i, 64 if i < 9 else 128)), ABSENT)
    assert one.runs.found == [NAMES[:9]]
    assert counted(lambda: Deep(lambda i: Block(0, 64 + 64 * (i % 2))), ABSENT).runs.found == []

    def frozen() -> nn.Module:
        model = Deep()
        for block in model.blocks[:6]:
            block.requires_grad_(False)
        return model

    assert counted(frozen, ABSENT).runs.found == [NAMES[6:]]


def test_a_block_that_occurs_several_times_is_not_a_run() -> None:
    shared = Block()
    assert counted(lambda: Deep(lambda _: shared), ABSENT).runs.found == []


def test_blocks_that_keep_what_they_computed_are_traced_as_a_whole() -> None:
    class Keeping(Block):
        """Keeps its last output."""

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            self.kept = super().forward(x, scale)
            return self.kept

    one = counted(lambda: Deep(Keeping), ABSENT)
    choice = Choice(micro_batch=8, evaluation_batch=8)
    assert told(trace_step(one, choice, ABSENT)) == told(
        trace_step(without_repeats(one), choice, ABSENT)
    )

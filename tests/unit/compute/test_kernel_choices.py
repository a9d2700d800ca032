"""Kernel choices on a model: what is compiled, what is laid out anew, and that all of it comes off."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from anybatch.compute import Replica, kernel_choices
from anybatch.compute.kernel_choices import compile_blocks, install, leave_others_cache, units_of
from anybatch.errors import InputError
from anybatch.plans import Choice, KernelChoices, Recompute

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x):
        return x + self.inner(x)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def run_by_dynamo(monkeypatch):
    """Compile down to torch's own operations, without a C++ compiler. Returns what was compiled."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    def plainly(function, **_options):
        return original(function, backend=backend)

    original = torch.compile
    monkeypatch.setattr(kernel_choices.torch, "compile", plainly)
    yield compiled
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("model", "recompute", "units"),
    [
        (Stack, Recompute(), ["blocks.0", "blocks.1", "blocks.2"]),
        (Stack, Recompute(blocks=("blocks.1",)), ["blocks.0", "blocks.1", "blocks.2"]),
        (Stack, Recompute(blocks=("blocks.1.inner",)), ["blocks.0", "blocks.2", "blocks.1.inner"]),
        (Stack, Recompute(blocks=(".",)), ["blocks.0", "blocks.1", "blocks.2"]),
        (lambda: nn.Linear(2, 2), Recompute(), ["."]),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()), Recompute(blocks=("0",)), ["0"]),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
            Recompute(blocks=(".",), nested=True),
            ["0", "1", "2"],
        ),
        (
            Stack,
            Recompute(blocks=("blocks.0.inner",), nested=True),
            ["blocks.1", "blocks.2", "blocks.0.inner.0", "blocks.0.inner.1", "blocks.0.inner.2"],
        ),
    ],
)
def test_blocks_are_compiled_and_nothing_that_has_recompute_in_it(model, recompute, units):
    assert list(units_of(model(), recompute)) == units


def test_blocks_that_are_alike_share_what_is_compiled(run_by_dynamo):
    model = Stack()
    x = torch.randn(5, 4, requires_grad=True)  # as what the later blocks are given
    plain, names = model(x), list(model.state_dict())
    undo = compile_blocks(model, Recompute())
    torch.testing.assert_close(model(x), plain)
    assert len(run_by_dynamo) == 1
    model(torch.randn(7, 4, requires_grad=True))
    model(torch.randn(9, 4, requires_grad=True))
    assert len(run_by_dynamo) == 2  # one size, then any
    assert list(model.state_dict()) == names
    undo()
    model(torch.randn(2, 3, 4))
    assert len(run_by_dynamo) == 2
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_copy_of_a_compiled_model_computes_with_its_own_weights(run_by_dynamo):
    model = Stack()
    undo = compile_blocks(model, Recompute())
    x = torch.randn(5, 4)
    before = model(x)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    assert not other(x).any()
    torch.testing.assert_close(model(x), before)
    undo()


def test_another_recompute_moves_what_is_compiled(run_by_dynamo):
    model = Stack()
    replica = Replica(
        model,
        lambda: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: (model(batch).square().sum(), len(batch)),
        Choice(micro_batch=4, evaluation_batch=4),
        CPU,
        4,
        kernels=KernelChoices(compile=True),
    )
    gradients = []
    for blocks in ((), ("blocks.0",), ("blocks.1.inner",)):
        recompute = Recompute(blocks=blocks)
        replica.switch(Choice(micro_batch=4, evaluation_batch=4, recompute=recompute))
        replica.accumulate(torch.ones(4, 4), 4)
        gradients.append(model.blocks[0].inner[0].weight.grad.clone())
        replica.drop()
    torch.testing.assert_close(gradients[1:], [gradients[0]] * 2)
    replica.close()
    assert all("forward" not in vars(module) for module in model.modules())


def test_convolutions_get_channels_last_images_and_keep_their_weights():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3), nn.Flatten())
    x = torch.randn(2, 3, 8, 8)
    plain = model(x)
    seen = []
    for module in model:
        module.register_forward_hook(lambda _m, _a, out: seen.append(out))
    undo = install(model, KernelChoices(channels_last=True))
    torch.testing.assert_close(model(x), plain)
    assert [t.is_contiguous(memory_format=torch.channels_last) for t in seen[:3]] == [True] * 3
    assert model[0].weight.is_contiguous()
    undo()
    seen.clear()
    model(x)
    assert seen[0].is_contiguous()


def test_autotuning_lasts_as_long_as_any_model_wants_it():
    before = torch.backends.cudnn.benchmark
    undos = [install(nn.Linear(1, 1), KernelChoices(autotune=True)) for _ in range(2)]
    assert torch.backends.cudnn.benchmark
    undos[0]()
    assert torch.backends.cudnn.benchmark
    undos[1]()
    assert torch.backends.cudnn.benchmark == before


def test_without_a_compiler_the_remedy_is_told(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    kernel_choices.check_available(KernelChoices(), CPU)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(InputError, match=r"no C\+\+ compiler .*install g\+\+"):
        kernel_choices.check_available(KernelChoices(compile=True), CPU)


@pytest.mark.parametrize(
    ("made", "is_used"),
    [
        (lambda folder: None, True),
        (lambda folder: folder.mkdir(mode=0o755), True),
        (lambda folder: (folder.mkdir(), folder.chmod(0o777)), False),
        (lambda folder: folder.symlink_to(folder.parent), False),
        (lambda folder: folder.write_text(""), False),
    ],
    ids=["none", "own", "open", "a link", "a file"],
)
def test_code_is_compiled_into_a_folder_to_which_nobody_else_can_write(
    made, is_used, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # as torch does itself
    folder = Path(default_cache_dir())
    made(folder)
    with config.patch(cpp_cache_precompile_headers=True):
        leave_others_cache()
        assert config.cpp_cache_precompile_headers == is_used
    own = tmp_path / "cache" / "anybatch" / "torchinductor"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder if is_used else own)
    if is_used:
        assert folder.stat().st_mode & 0o022 == 0


def test_the_users_own_folder_for_compiled_code_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o777)
    leave_others_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)

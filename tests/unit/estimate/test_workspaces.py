"""Workspaces of libraries on CUDA: where they come, how large, and that they are counted once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.estimate import ledger, subject_of, workspaces
from anybatch.estimate.footprint import footprint
from anybatch.estimate.peak import context_bytes_of
from anybatch.estimate.workspaces import communicator_bytes, workspace_bytes
from anybatch.machine import Machine
from anybatch.planner.ranks import Layout, of_one_rank
from anybatch.plans import Choice
from anybatch.process.cuda_driver import TYPICAL_CONTEXT_BYTES

MIB = 1 << 20
ABSENT = Machine.describe("24GiB").device


def _task(model: nn.Module, sample: torch.Tensor) -> ab.Task:
    return ab.Task(
        model=model,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=[sample] * 4,
        collate=torch.stack,
        global_batch=4,
        steps=1,
    )


@pytest.mark.parametrize(
    ("capability", "size", "in_2_11"),
    [
        ("7.5", 8.125, 8.125),
        ("8.9", 8.125, 8.125),
        ("9.0", 32, 32),
        ("10.3", 32, 8.125),
        ("12.0", 32, 8.125),
        ("", 32, 32),
        ("gfx90a", 32, 32),
        ("gfx942", 128, 128),
    ],
)
def test_a_workspace_has_the_size_that_torch_gives_it(
    capability: str, size: float, in_2_11: float, monkeypatch: Any
):
    for version, mib in (((2, 15), size), ((2, 12), size), ((2, 11), in_2_11)):
        monkeypatch.setattr(workspaces, "_TORCH", version)
        assert workspace_bytes(replace(ABSENT, capability=capability)) == mib * MIB


def test_what_the_environment_asks_for_holds_where_the_run_will_be(monkeypatch: Any):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert workspace_bytes(replace(ABSENT, capability="9.0")) == 32 * MIB
    assert workspace_bytes(replace(ABSENT, capability="9.0", present=True)) == 8320 << 10


@pytest.mark.parametrize(
    ("version", "mib"),
    [((2, 11), 2 * (8.125 + 1)), ((2, 12), 2 * 8.125), ((2, 15), 8.125)],
)
@pytest.mark.parametrize("model", [nn.Linear(8, 8), nn.Conv2d(3, 8, 3)])
def test_forward_and_backward_have_theirs_from_the_start_on(
    model: nn.Module, version: tuple[int, int], mib: float, monkeypatch: Any
):
    monkeypatch.setattr(workspaces, "_TORCH", version)
    monkeypatch.delenv("TORCH_CUBLAS_WORKSPACE_CACHE", raising=False)
    sample = torch.zeros(8) if isinstance(model, nn.Linear) else torch.zeros(3, 8, 8)
    task = _task(model, sample)
    device = replace(ABSENT, capability="8.6")
    found = ledger(subject_of(task), Choice(micro_batch=2, evaluation_batch=1), device)
    kind = "libraries' workspaces"
    for moment in (found.curve[0], found.curve[-1]):
        assert moment.by_kind[kind] == mib * MIB
    on_cpu = ledger(
        subject_of(task),
        Choice(micro_batch=2, evaluation_batch=1),
        Machine.here("64MiB", device="cpu").device,
    )
    assert kind not in on_cpu.by_kind


@pytest.mark.parametrize(
    ("name", "size"),
    [("rtx-4090", 48), ("a100-80gb", 576), ("h100-80gb", 832), ("24GiB", 48)],
)
def test_a_rank_has_the_buffers_of_a_communicator_over_its_links(name: str, size: int):
    assert communicator_bytes(Machine.describe(name).device) == size * MIB


def test_only_ranks_that_speak_by_nccl_have_them():
    assert communicator_bytes(Machine.here("64MiB", device="cpu").device) == 0
    assert communicator_bytes(replace(ABSENT, capability="gfx942")) == 0
    subject = subject_of(_task(nn.Linear(8, 8), torch.zeros(8)))
    choice = Choice(micro_batch=2, evaluation_batch=1)
    alone = footprint(subject, choice, ABSENT).peak.by_kind.get("libraries", 0)
    of_two = of_one_rank(subject, Layout(parallel="replicate", shares=(1.0, 1.0)))
    together = footprint(of_two, choice, ABSENT).peak.by_kind["libraries"]
    assert together - alone == communicator_bytes(ABSENT)


def test_the_context_is_measured_where_the_device_is(monkeypatch: Any):
    subject = subject_of(_task(nn.Linear(8, 8), torch.zeros(8)))
    choice = Choice(micro_batch=2, evaluation_batch=1)
    typical = footprint(subject, choice, ABSENT).peak.by_kind["device context"]
    assert typical == TYPICAL_CONTEXT_BYTES
    monkeypatch.setattr("anybatch.estimate.peak.context_bytes", lambda index: (500 + index) * MIB)
    live = replace(ABSENT, present=True, index=3)
    assert context_bytes_of(live) == 503 * MIB

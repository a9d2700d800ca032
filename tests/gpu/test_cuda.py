"""What the CPU tests prove, once more where it is meant to run."""

import contextlib
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.estimate import identify
from anybatch.events import OutOfMemory, StepDone
from anybatch.plans import Choice, KernelChoices, Plan, Recompute

pytestmark = pytest.mark.gpu


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(
            1, 16, 3, padding=1, bias=False
        ),  # of a bias the gradient would be rounding alone
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 64, 10),
    )


def loss(model, batch):
    images, labels = batch
    return ab.Loss(F.cross_entropy(model(images).float(), labels, reduction="sum"), len(labels))


def make_task(num=256, steps=5) -> ab.Task:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(num, 1, 8, 8, generator=generator)
    labels = torch.randint(10, (num,), generator=generator)
    return ab.Task(
        model=build,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        train=TensorDataset(images, labels),
        global_batch=128,
        ghost_batch=32,
        clip_norm=1.0,
        steps=steps,
    )


def trained(task, device, micro_batch, precision="fp32"):
    plan = Plan(
        task=identify(task, task.build_model()),
        device=device,
        choice=Choice(micro_batch=micro_batch, evaluation_batch=64, precision=precision),
    )
    events = []
    with ab.Session(task, plan, [events.append]) as session:
        losses = [step.loss for step in session.steps()]
        state = {k: v.detach().cpu().clone() for k, v in session.model.state_dict().items()}
    return state, losses, events


def test_cuda_and_cpu_agree_under_every_micro_batch():
    task = make_task()
    on_cpu, _, _ = trained(task, "cpu", 128)
    for micro_batch in (32, 64, 128):
        on_cuda, _, _ = trained(task, "cuda:0", micro_batch)
        for name, value in on_cpu.items():
            torch.testing.assert_close(on_cuda[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-weights", "fp16-weights", "bf16-pure"])
def test_lower_precision_follows_float32(precision):
    task = make_task()
    _, exact, _ = trained(task, "cuda:0", 64)
    _, losses, _ = trained(task, "cuda:0", 64, precision)
    assert losses == pytest.approx(exact, rel=0.05)


def test_activations_in_host_memory_change_nothing_and_leave_the_device():
    task = ab.Task(
        model=lambda: nn.Sequential(
            *[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(12)]
        ),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=TensorDataset(torch.randn(8192, 512)),
        global_batch=8192,
        steps=3,
    )
    found = []
    for to_host in (False, True):
        choice = Choice(micro_batch=8192, evaluation_batch=64, recompute=Recompute(to_host=to_host))
        plan = Plan(task=identify(task, task.build_model()), device="cuda:0", choice=choice)
        torch.manual_seed(0)
        torch.cuda.reset_peak_memory_stats()
        with ab.Session(task, plan) as session:
            losses = [step.loss for step in session.steps()]
        found.append((losses, torch.cuda.max_memory_allocated()))
    (plain, most), (moved, less) = found
    assert moved == plain
    assert less < most - 8 * 8192 * 512 * 4  # of 24 tensors that are kept


def test_out_of_memory_is_redone_under_a_leaner_plan():
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(max(0, free - (1 << 30)), dtype=torch.uint8, device="cuda")
    num = 4096
    task = ab.Task(
        model=lambda: nn.Sequential(nn.Linear(64, 65536), nn.ReLU(), nn.Linear(65536, 10)),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
        train=TensorDataset(torch.randn(num, 64), torch.randint(10, (num,))),
        global_batch=num,
        steps=2,
    )
    _, losses, events = trained(task, "cuda:0", num)
    assert any(isinstance(event, OutOfMemory) for event in events)
    del hog
    torch.cuda.empty_cache()
    _, undisturbed, _ = trained(task, "cuda:0", 256)
    assert losses == pytest.approx(undisturbed, rel=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_host_synchronisation_in_the_passes_of_a_step(precision, monkeypatch):
    """Copies, losses and the noise scale's norms included."""
    from anybatch.engine import Transactions

    task = make_task()
    original = Transactions._stage

    def watched(self, *args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    trained(task, "cuda:0", 32, precision)  # first uses may synchronise
    monkeypatch.setattr(Transactions, "_stage", watched)
    _, _, events = trained(task, "cuda:0", 32, precision)
    assert all(e.part_grad_norm is not None for e in events if isinstance(e, StepDone))


def test_the_budget_is_enforced():
    task = make_task()
    with contextlib.ExitStack() as stack:
        plan = ab.plan(task, memory="2GiB")
        stack.enter_context(ab.Session(task, plan))
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
    torch.empty(3 << 30, dtype=torch.uint8, device="cuda")


class TriesOut(nn.Linear):
    """Takes what it is told to when it first meets a batch of some size, as cuDNN may."""

    def __init__(self, size: int) -> None:
        super().__init__(64, 10)
        self.size = size
        self.met: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and len(x) not in self.met:
            self.met.add(len(x))
            torch.empty(self.size, dtype=torch.uint8, device=x.device)
        return super().forward(x)


@pytest.mark.parametrize("enforced", [False, True])
@pytest.mark.parametrize("tunes", [False, True])
def test_what_cudnn_takes_to_try_its_algorithms_is_no_part_of_the_peak(tunes, enforced):
    size = 256 << 20
    task = dataclasses.replace(
        make_task(),
        model=lambda: nn.Sequential(nn.Flatten(), TriesOut(size)),
        valid=make_task(num=48).train,  # of which a batch is smaller than others
    )
    plan = Plan(
        task=identify(task, task.build_model()),
        device="cuda:0",
        choice=Choice(micro_batch=32, evaluation_batch=32),
        kernels=KernelChoices(autotune=tunes),
        budget_bytes=3 << 30,
        enforced=enforced,
    )
    with ab.Session(task, plan) as session:
        for _ in session.steps():
            pass
        session.evaluate()
        totals = session.ended(1.0, finished=True).measured_totals
    assert (totals["allocated"] < size) == (totals["reserved"] < size) == tunes


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_after_the_second_step_no_more_is_reserved_and_nothing_is_given_back(name, monkeypatch):
    task = dataclasses.replace(
        make_task(), optimizer=lambda params: getattr(torch.optim, name)(params, lr=1e-3), steps=8
    )
    choice = Choice(micro_batch=32, evaluation_batch=32)
    plan = Plan(task=identify(task, task.build_model()), device="cuda:0", choice=choice)
    given_back = []
    empty_cache = torch.cuda.empty_cache

    def noted():
        given_back.append(1)
        empty_cache()

    reserved, emptied = [], []
    with ab.Session(task, plan) as session:
        monkeypatch.setattr(torch.cuda, "empty_cache", noted)
        for _ in session.steps():
            reserved.append(torch.cuda.memory_reserved())
            emptied.append(len(given_back))
    assert emptied == [1] + [2] * 7
    assert len(set(reserved[3:])) == 1


def test_what_a_frozen_parameter_holds_is_told_from_what_was_written_to_it():
    """Parts without rows and dtypes that torch's hash does not know included."""
    from anybatch.state.base import _fingerprint

    for value in (
        torch.randn(5, 7),
        torch.randn(5, 7).T,
        torch.empty(0, 4),
        torch.randn(4, dtype=torch.complex64),
        torch.randn(4).to(torch.float8_e4m3fn),
    ):
        tensor = value.cuda()
        before = _fingerprint(tensor)
        assert _fingerprint(value.cuda()) == before
        if tensor.numel():
            other = value + 1 if value.is_complex() else (value.float() + 1).to(value.dtype)
            assert _fingerprint(other.cuda()) != before


def test_sparse_batches_come_to_the_device_ahead():
    from anybatch.data.prefetch import on_device

    dense = torch.eye(4)
    found = list(on_device(iter([dense.to_sparse(), dense.to_sparse_csr(), dense]), "cuda"))
    for batch in found:
        assert torch.equal(batch.cpu().to_dense(), dense)


def test_an_optimizer_that_counts_on_the_device_keeps_its_states_on_the_host():
    """`capturable` is refused for parameters on a CPU."""
    task = dataclasses.replace(
        make_task(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, capturable=True),
    )
    states = []
    for where in ("device", "host"):
        plan = Plan(
            task=identify(task, task.build_model()),
            device="cuda:0",
            choice=Choice(micro_batch=64, evaluation_batch=64, optimizer_states=where),
        )
        with ab.Session(task, plan) as session:
            losses = [step.loss for step in session.steps()]
        states.append(losses)
    assert states[0] == pytest.approx(states[1], rel=1e-5)

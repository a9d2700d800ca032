"""Setup: a replica of a task on fake tensors, whose storages are known by what they hold."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.compute import Replica
from anybatch.compute.low_bit_optimizers import check_whole
from anybatch.data import ghosts
from anybatch.estimate.cuda import is_overlaid, update_together
from anybatch.estimate.cuda_kernels import CudaKernels, resident_threads
from anybatch.estimate.family import Part
from anybatch.estimate.kernels import CpuKernels, Kernels
from anybatch.estimate.subject import Subject
from anybatch.estimate.trace import Tracer
from anybatch.machine import Device
from anybatch.plans import Choice, KernelChoices
from anybatch.task import parameters_in

_MOST_GHOSTS = 4

Owners = dict[torch.Tensor, str]
"""Names of the modules that parameters belong to, the first where several share one."""


def set_up(
    subject: Subject, choice: Choice, device: Device, tracer: Tracer, layout: KernelChoices
) -> tuple[Replica, Owners, list[torch.Tensor]]:
    """The replica of `choice`, its images in `layout`, with the names of the modules that its
    parameters belong to, and the copies of its buffers that are kept for putting back. All of them are
    known to `tracer`; called while it records."""
    target = fake_device(device)
    with target:
        model: nn.Module = subject.build_model()
    tracer.watch(model)
    owners: Owners = {}
    buffers: dict[torch.Tensor, str] = {}
    for name, module in model.named_modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(param, name or ".")
        for buffer in module.buffers(recurse=False):
            buffers.setdefault(buffer, name or ".")
    for param, owner in owners.items():
        tracer.see(param, "parameters", owner)
    for buffer, owner in buffers.items():
        tracer.see(buffer, "buffers", owner)
    trained: list[nn.Parameter] = []

    def make_optimizer() -> Optimizer:
        optimizer = subject.make_optimizer(model)
        if device.kind == "cuda" and choice.update != "fused":
            update_together(optimizer)
        trained.extend(parameters_in(optimizer.param_groups))
        return optimizer

    replica = Replica(
        model,
        make_optimizer,
        subject.loss,
        choice,
        target,
        subject.whole,
        # Whether a gradient overflowed has no answer here, and the scaler's own bytes are few.
        loss_scaling=False,
        kernels=layout,
        host=torch.device("meta") if device.kind == "cuda" else None,
    )
    if subject.division is not None:
        check_whole(replica.optimizer)
    copies: list[torch.Tensor] = []  # of buffers, kept for putting back, and of gradients
    if subject.flat:
        buckets = replica.flatten()
        for flat in buckets.flats:
            tracer.see(flat, "gradients")
        for held in subject.sums.held(buckets.flats) if subject.sums else ():
            copies.append(held)
            tracer.see(held, "gradients")
        buckets.attach()
    # Where the optimizer works on float32 copies, they stand in the places of what they are copies of.
    for copied, param in zip(trained, replica.parameters, strict=True):
        owners.setdefault(param, owners.get(copied, ""))
    for param, owner in owners.items():
        tracer.see(param, "parameters", owner)
    for buffer, owner in buffers.items():
        copies.append(buffer.detach().clone())
        tracer.see(copies[-1], "buffers", owner)
    return replica, owners, copies


def parts_of_model(model: nn.Module, owners: Owners) -> dict[str, Part]:
    """The modules of `model` by name, in order of definition."""
    numbers: Counter[str] = Counter()
    for param, owner in owners.items():
        numbers[owner] += param.numel()
    return {
        name or ".": Part(type(module).__name__, numbers[name or "."])
        for name, module in model.named_modules()
    }


def bucketed_bytes(replica: Replica, owners: Owners) -> dict[str, int]:
    """Bytes of gradients by module, of a replica whose gradients are in buckets."""
    sizes: Counter[str] = Counter()
    for param in replica.parameters:
        if param.grad is not None:
            sizes[owners.get(param, "")] += param.grad.nbytes
    return dict(sizes)


def cut_of(subject: Subject, num_samples: int) -> list[int]:
    """Ghost batches for a trace: at most a few, since tracing each takes time."""
    size = subject.identity.ghost_batch
    if not size:
        return []
    cut = ghosts(num_samples, size)
    if len(cut) <= _MOST_GHOSTS:
        return cut
    return ghosts(num_samples, -(-num_samples // _MOST_GHOSTS))


def fake_device(device: Device) -> torch.device:
    """The device of the fake tensors: the real one where it is present. Fake CUDA tensors do not carry
    through a backward pass on a machine without CUDA, so there the trace is one of CPU tensors, with
    CUDA's rules laid over it."""
    return torch.device("cpu" if is_overlaid(device) else device.torch_name)


def kernels_on(device: Device) -> Kernels:
    """The memory that kernels of `device` take."""
    return CpuKernels() if device.kind == "cpu" else CudaKernels(resident_threads(device))

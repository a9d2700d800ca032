"""The same training, written in each way that is compared.

A contender is a generator function: it is made from the `Work`, trains the given model for one epoch
each time its next value is asked for, and yields the seconds that the epoch took. Setting up is not
timed. Everything imports its library by itself, so that a process needs only what it runs.

All do the same: AdamW, gradients of the mean over `micro_batch x accumulation` samples, all samples of
each epoch once, in a new order; no logging, no evaluation, no checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from time import process_time as clock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

Batch = list[Tensor]


class Sampled(TensorDataset):
    """The same samples as a data set of one's own, which nobody may index as a whole."""


@dataclass(frozen=True)
class Work:
    """What every contender does.

    Attributes:
        dataset: images and labels; its length is a multiple of the global batch.
        micro_batch: samples per forward pass.
        accumulation: forward passes per update.
        shuffle: off for the check that all contenders compute the same.
    """

    dataset: TensorDataset
    micro_batch: int
    accumulation: int
    shuffle: bool = True

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulation

    @property
    def steps(self) -> int:
        """Updates per epoch."""
        return len(self.dataset) // self.global_batch

    def loader(self, batch_size: int) -> DataLoader[Batch]:
        generator = torch.Generator().manual_seed(0)
        return DataLoader(self.dataset, batch_size, shuffle=self.shuffle, generator=generator)


Contender = Callable[[Work, nn.Module], Iterator[float]]


def summed_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """The loss as anybatch asks for it: a sum, and the number of samples that it is over."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)


def adamw(parameters: object) -> Optimizer:
    """With a rate so small that every epoch computes on like numbers: a model that has learned its
    samples by heart has gradients that vanish, and the smallest floats are slow to compute with."""
    return AdamW(parameters, lr=1e-6)  # type: ignore[arg-type]


def by_hand(work: Work, model: nn.Module) -> Iterator[float]:
    """The loop that a good engineer writes."""
    optimizer, loader = adamw(model.parameters()), work.loader(work.micro_batch)
    while True:
        begun = clock()
        for i, (images, labels) in enumerate(loader, start=1):
            loss = F.cross_entropy(model(images), labels)
            (loss / work.accumulation).backward()
            if i % work.accumulation == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        yield clock() - begun


def by_hand_sliced(work: Work, model: nn.Module) -> Iterator[float]:
    """Tighter still: no DataLoader; the tensors are indexed directly, which only tensors allow."""
    optimizer = adamw(model.parameters())
    all_images, all_labels = work.dataset.tensors
    generator = torch.Generator().manual_seed(0)
    size = len(all_images)
    while True:
        begun = clock()
        order = torch.randperm(size, generator=generator) if work.shuffle else torch.arange(size)
        for i, indices in enumerate(order.split(work.micro_batch), start=1):
            images, labels = (
                all_images.index_select(0, indices),
                all_labels.index_select(0, indices),
            )
            loss = F.cross_entropy(model(images), labels)
            (loss / work.accumulation).backward()
            if i % work.accumulation == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        yield clock() - begun


def anybatch_session(work: Work, model: nn.Module) -> Iterator[float]:
    """`anybatch.Session`, which owns data, order and steps."""
    import anybatch as ab
    from anybatch.plans import Choice, TaskIdentity

    task = ab.Task(
        model=model,
        loss=summed_loss,
        optimizer=adamw,
        train=work.dataset,
        global_batch=work.global_batch,
        epochs=1_000_000,
        shuffle=work.shuffle,
    )
    size = sum(p.numel() for p in model.parameters())
    plan = ab.Plan(
        task=TaskIdentity(
            name=task.name,
            global_batch=work.global_batch,
            parameters=size,
            trainable_parameters=size,
        ),
        device="cpu",
        choice=Choice(micro_batch=work.micro_batch, evaluation_batch=work.micro_batch),
    )
    with ab.Session(task, plan) as session:
        steps = session.steps()
        while True:
            begun = clock()
            for _ in islice(steps, work.steps):
                pass
            yield clock() - begun


def anybatch_step(work: Work, model: nn.Module) -> Iterator[float]:
    """`anybatch.Step` in the user's loop, with the user's DataLoader of global batches."""
    import anybatch as ab

    loader = work.loader(work.global_batch)
    optimizer = adamw(model.parameters())
    with ab.Step(model, optimizer, summed_loss, micro_batch=work.micro_batch) as step:
        while True:
            begun = clock()
            for batch in loader:
                step(batch)
            yield clock() - begun


def accelerate(work: Work, model: nn.Module) -> Iterator[float]:
    """Hugging Face Accelerate, as its guide to gradient accumulation has it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=work.accumulation)
    model, optimizer, loader = accelerator.prepare(
        model, adamw(model.parameters()), work.loader(work.micro_batch)
    )
    while True:
        begun = clock()
        for images, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
        yield clock() - begun


def fabric(work: Work, model: nn.Module) -> Iterator[float]:
    """Lightning Fabric. (Its `no_backward_sync` is left out: on one device it only warns.)"""
    from lightning.fabric import Fabric

    one = Fabric(accelerator="cpu", devices=1)
    model, optimizer = one.setup(model, adamw(model.parameters()))
    loader = one.setup_dataloaders(work.loader(work.micro_batch))
    while True:
        begun = clock()
        for i, (images, labels) in enumerate(loader, start=1):
            loss = F.cross_entropy(model(images), labels)
            one.backward(loss / work.accumulation)
            if i % work.accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
        yield clock() - begun


def trainer(work: Work, model: nn.Module) -> Iterator[float]:
    """Lightning Trainer with everything optional switched off. It cannot stop and go on, so each
    epoch is a `fit`, timed from `on_train_start` to `on_train_end`; the optimizer lives on."""
    from lightning.pytorch import LightningModule, Trainer

    optimizer, loader = adamw(model.parameters()), work.loader(work.micro_batch)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch, _number: int) -> Tensor:
            images, labels = batch
            return F.cross_entropy(self.model(images), labels)

        def configure_optimizers(self) -> Optimizer:
            return optimizer

        def on_train_start(self) -> None:
            self.begun = clock()

        def on_train_end(self) -> None:
            self.seconds = clock() - self.begun

    module = Module()
    while True:
        Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            accumulate_grad_batches=work.accumulation,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module, loader)
        yield module.seconds


CONTENDERS: dict[str, Contender] = {
    "by hand, DataLoader": by_hand,
    "by hand, tensors indexed": by_hand_sliced,
    "anybatch.Session": anybatch_session,
    "anybatch.Step": anybatch_step,
    "Accelerate": accelerate,
    "Lightning Fabric": fabric,
    "Lightning Trainer": trainer,
}
BASELINE, TIGHTEST = "by hand, DataLoader", "by hand, tensors indexed"

"""Lightning's Trainer with the strategy: every update is that of the whole global batch, and the rest
of the host works as it does. In processes of their own, since it leaves a process group behind."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.equivalence.test_transformers_trainer import (
    RATE,
    STEPS,
    distance,
    plainly,
    seeded_llama,
)

pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed"),
]

SCRIPT = """
import sys
from importlib.util import find_spec
from pathlib import Path
import lightning as L
import torch
from tests.equivalence.test_transformers_trainer import *
from anybatch.integrations.lightning import AnyBatch

torch.set_num_threads(1)

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner, self.told, self.evaluated = seeded_llama(), [], 0

    def training_step(self, batch, number):
        loss = self.inner(**batch).loss
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "size": len(batch["input_ids"])}

    def on_before_optimizer_step(self, optimizer):
        squares = [float(p.grad.norm()) ** 2 for p in self.inner.parameters()]
        self.told.append(sum(squares) ** 0.5)

    def on_train_batch_end(self, outputs, batch, number):
        self.told[-1] = (float(outputs["loss"]), self.told[-1])

    def validation_step(self, batch, number):
        self.evaluated += len(batch["input_ids"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=RATE)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1 - step / STEPS, 0.1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}

def count(batch):
    return batch["labels"][:, 1:].ne(-100).sum()

folder, devices, max_steps, resume = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
loaders = [
    torch.utils.data.DataLoader(sequences(num), batch_size=4, shuffle=num > 20, collate_fn=collate)
    for num in (52, 8)
]
strategy = AnyBatch(global_batch=BATCH, micro_batch=4, count_items=count)
options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
keep = L.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=STEPS, save_top_k=-1)
trainer = L.Trainer(
    strategy=strategy, accelerator="cpu", devices=devices, max_steps=max_steps, callbacks=[keep],
    gradient_clip_val=CLIP, num_sanity_val_steps=0, log_every_n_steps=1, **options,
)
module = Module()
trainer.fit(module, *loaders, ckpt_path=resume or None)
sampler = trainer.train_dataloader.batch_sampler.sampler
sampler.set_epoch(0)
found = {
    "state": module.inner.state_dict(),
    "order": list(sampler),
    "told": module.told,
    "steps": trainer.global_step,
    "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
    "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
    "evaluated": module.evaluated,
}
torch.save(found, Path(folder) / f"rank{trainer.global_rank}.pt")
"""


HOOKS = """
import sys
from importlib.util import find_spec
from pathlib import Path
import lightning as L
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import Precision
from torchmetrics.classification import BinaryAUROC
from anybatch.errors import InputError
from anybatch.integrations.lightning import AnyBatch

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(33, 3, generator=generator)
data = torch.utils.data.TensorDataset(inputs, (inputs[:, 0] > 0).float())

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.auroc, self.sizes, self.masked = torch.nn.Linear(3, 1), BinaryAUROC(), [], 0

    def training_step(self, batch, number):
        x, y = batch
        out = self.inner(x)[:, 0]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(out, y)
        self.sizes.append(len(x))
        self.auroc.update(out.detach().sigmoid(), y.long())
        self.log("loss", loss, False, True, False, True, batch_size=len(x))
        self.log("num", float(len(x)), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log("most", x.max(), on_step=False, on_epoch=True, reduce_fx="max", sync_dist=False)
        self.log("auroc", self.auroc, on_step=False, on_epoch=True)
        return loss

    def on_after_backward(self):
        self.inner.weight.grad[:, 0] = 0

    def on_before_optimizer_step(self, optimizer):
        self.masked += int((self.inner.weight.grad == 0).sum())

    def configure_gradient_clipping(self, optimizer, **options):
        self.clip_gradients(optimizer, 0.05, "value")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

def trained(strategy, size, kind=Module, samples=data, sampler=None, **more):
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_epochs=2,
        enable_checkpointing=False, **options, **more,
    )
    module = kind()
    trainer.fit(module, torch.utils.data.DataLoader(samples, batch_size=size, sampler=sampler))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return module.inner.state_dict(), logged, sum(module.sizes), module.masked, trainer.global_step

def ours(hooks=(), **options):
    return trained(AnyBatch(global_batch=16, micro_batch=3, **dict(hooks)), 4, **options)

class Engine(Precision):  # what Lightning's own needs is not installed
    precision = "transformer-engine"

def refused(**options):
    try:
        ours(**options)
    except InputError as error:
        return str(error)

class OwnBackward(Module):
    def backward(self, loss):
        (2 * loss).backward()

class SomeSteps(Module):
    def optimizer_step(self, epoch, number, optimizer, closure):
        optimizer.step(closure=closure) if number % 2 else closure()

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([data[i] for i in range(32)])

folder, devices = sys.argv[1], int(sys.argv[2])
found = {"ours": ours()}
if devices == 1:
    accumulating = [GradientAccumulationScheduler({1: 2})]
    found |= {
        "host": trained("ddp", 16),
        "stream": [trained(one, 16, samples=Stream())[0] for one in (AnyBatch(16), "ddp")],
        "refused": [
            refused(kind=OwnBackward), refused(kind=SomeSteps), refused(callbacks=accumulating),
            refused(hooks={"ddp_comm_hook": print, "find_unused_parameters": True}),
            refused(plugins=[Engine()]),
        ],
    }
else:
    sampler = torch.utils.data.DistributedSampler(data, 2, torch.distributed.get_rank())
    found |= {"refused": [refused(sampler=sampler)]}
torch.save(found, Path(folder) / f"rank{torch.distributed.get_rank()}.pt")
"""


def fit(folder: Path, devices: int, max_steps: int = STEPS, resume: str = "") -> list[Any]:
    """What each rank found."""
    return run(SCRIPT, folder, devices, str(max_steps), resume)


def run(text: str, folder: Path, devices: int, *others: str) -> list[Any]:
    script = folder / "script.py"
    script.write_text(text)
    arguments = [str(script), str(folder), str(devices), *others]
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(devices)]


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_every_update_is_that_of_the_whole_batch(devices: int, tmp_path: Path):
    found, *others = fit(tmp_path, devices)
    first = seeded_llama()
    told = plainly(wanted := copy.deepcopy(first), found["order"])
    assert distance(found["state"], wanted.state_dict(), first.state_dict()) < 1e-6
    for other in others:
        assert all(
            torch.equal(other["state"][name], value) for name, value in found["state"].items()
        )
    assert found["steps"] == STEPS
    losses = [loss for loss, _ in told]
    assert [loss for loss, _ in found["told"]] == pytest.approx(losses, rel=1e-6)
    norms = [norm for _, norm in told]  # before clipping
    assert [norm for _, norm in found["told"]] == pytest.approx(norms, rel=1e-5)
    assert found["logged"]["loss_step"] == pytest.approx(losses[-1], rel=1e-6)
    assert found["rates"] == pytest.approx([0.1 * RATE])
    assert found["evaluated"] == 8 // devices


@pytest.mark.nightly
def test_a_run_that_is_resumed_ends_as_one_that_was_not(tmp_path: Path):
    [whole] = fit(tmp_path, 1, max_steps=2 * STEPS)
    [checkpoint] = tmp_path.glob(f"*step={STEPS}.ckpt")
    [again] = fit(tmp_path, 1, max_steps=2 * STEPS, resume=str(checkpoint))
    assert again["steps"] == 2 * STEPS
    assert again["told"] == whole["told"][STEPS:]
    assert all(torch.equal(again["state"][name], value) for name, value in whole["state"].items())


@pytest.mark.nightly
def test_hooks_change_the_gradient_and_logged_values_are_those_of_the_whole_batch(tmp_path: Path):
    [found] = run(HOOKS, tmp_path, 1)
    (state, logged, *counted), (wanted, expected, *counts) = found["ours"], found["host"]
    assert all(torch.allclose(state[name], value, atol=1e-7) for name, value in wanted.items())
    assert logged == pytest.approx(expected)
    assert counted == counts
    first, second = found["stream"]
    assert all(torch.allclose(first[name], value, atol=1e-7) for name, value in second.items())
    backward, some_steps, accumulating, hooks, engine = found["refused"]
    assert "leave out backward of the module" in backward
    assert "without optimizer.step(closure=closure)" in some_steps
    assert "leave GradientAccumulationScheduler out" in accumulating
    assert "leave out ddp_comm_hook, find_unused_parameters" in hooks
    assert "take precision='bf16-mixed'" in engine

    on_two = tmp_path / "two"
    on_two.mkdir()
    for other in run(HOOKS, on_two, 2):  # one has no sample in the last batch
        state, logged, _size, *counted = other["ours"]
        assert all(torch.allclose(state[name], value, atol=1e-6) for name, value in wanted.items())
        assert logged == pytest.approx(expected | {"most": logged["most"]})  # that of the rank
        assert counted == counts[1:]
        assert "leave the sampler out" in other["refused"][0]

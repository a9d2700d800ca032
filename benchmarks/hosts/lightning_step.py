"""Seconds of a median step of Lightning's Trainer, alone or with the strategy. Called by `run.py`:

python benchmarks/hosts/lightning_step.py alone|adapted equal|unequal
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import lightning as L
import torch
import transformers
from lightning.pytorch.strategies import DDPStrategy
from tests.equivalence.test_transformers_trainer import collate

from anybatch.integrations.lightning import AnyBatch

STEPS, BATCH, MICRO_BATCH = 6, 32, 4


class Module(L.LightningModule):
    """A Llama of four layers."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=512,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
        torch.manual_seed(0)
        self.inner = transformers.LlamaForCausalLM(config)

    def training_step(self, batch: Any, _number: int) -> torch.Tensor:
        return self.inner(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Clock(L.Callback):
    """Times at which a step had ended."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._steps = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            self.times.append(time.perf_counter())


def main(way: str, lengths: str) -> None:
    """Print the median seconds of a step but for the first."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.randint(16, 129, (BATCH * STEPS,), generator=draw).tolist()
    sizes = [96] * len(sizes) if lengths == "equal" else sizes
    data = [{"input_ids": torch.randint(3, 512, (n,), generator=draw).tolist()} for n in sizes]
    loader: Any = torch.utils.data.DataLoader(
        data, batch_size=MICRO_BATCH, shuffle=True, collate_fn=collate
    )
    adapted = way == "adapted"
    strategy = (
        AnyBatch(global_batch=BATCH, micro_batch=MICRO_BATCH)
        if adapted
        else DDPStrategy(process_group_backend="gloo")
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=1,
            max_steps=STEPS,
            accumulate_grad_batches=1 if adapted else BATCH // MICRO_BATCH,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(Module(), loader)
    each = [later - before for before, later in zip(clock.times, clock.times[1:], strict=False)]
    print("seconds", statistics.median(each), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

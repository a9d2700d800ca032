"""The grid of plans behind the memory page of the documentation.

    python benchmarks/memory_grid/run.py

Models are made from a configuration, without weights, and planned for GPUs that are not here, with
all that memory buys in time. The page looks up the fastest plan in a budget. Some minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.planner.ranks import reserve_of
from anybatch.recipes.finetune import finetune

OUT = Path(__file__).parents[2] / "docs/site/memory-grid.js"
SIZES = ("8GiB", "10GiB", "12GiB", "16GiB", "24GiB", "40GiB", "48GiB", "80GiB")
LARGEST = SIZES[-1]
PRECISIONS = ("fp32", "bf16")
BATCH = 256  # of which a plan takes micro-batches: other batches take more or fewer of them
LENGTHS = (1024, 4096)


@dataclass(frozen=True)
class Model:
    """`config` of transformers: of a language model for the recipe `finetune`, or of a residual network
    for a task of one's own."""

    name: str
    config: transformers.PretrainedConfig
    lengths: tuple[int, ...] = LENGTHS
    adapters: tuple[int, ...] = (0, 16)
    precisions: tuple[str, ...] = PRECISIONS


def llama(layers: int, width: int, inner: int, heads: int, groups: int) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=8192,
        tie_word_embeddings=width <= 2048,
    )


MODELS = {
    "gpt2": Model("GPT-2, 124M", transformers.GPT2Config(), (1024,)),
    "llama-1b": Model("Llama, 1.2B", llama(16, 2048, 8192, 32, 8), precisions=("bf16",)),
    "llama-8b": Model("Llama, 8.0B", llama(32, 4096, 14336, 32, 8), (1024,), (16,), ("bf16",)),
    "resnet-50": Model(
        "ResNet-50, 224 pixels", transformers.ResNetConfig(num_labels=1000), (0,), (0,)
    ),
}


def classifying(config: transformers.ResNetConfig) -> ab.Task:
    """Images of 224 by 224 pixels."""

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]).logits, batch[1])

    return ab.Task(
        model=lambda: transformers.ResNetForImageClassification(config),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        train=TensorDataset(torch.zeros(4, 3, 224, 224), torch.zeros(4, dtype=torch.int64)),
        global_batch=BATCH,
        steps=1,
    )


def task_of(
    model: Model, folder: Path, length: int, adapter: int, precision: str
) -> tuple[ab.Task, str]:
    """The task, and what names it on the command line, with the options of the recipe."""
    if isinstance(model.config, transformers.ResNetConfig):
        return classifying(model.config), "my_task.py"
    model.config.save_pretrained(folder)
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": "x" * 2 * length}) for _ in range(64)))
    options = {"max_length": length}
    if adapter:
        options["lora_rank"] = adapter
    is_half = adapter and precision == "bf16"  # frozen weights need no float32
    if is_half:
        options["dtype"] = "bfloat16"
    words = "".join(f" -s {key}={value}" for key, value in options.items())
    made = finetune(folder, rows, global_batch=BATCH, steps=1, **options)
    return made, f"finetune -s model=FOLDER -s data=FILE{words}"


def row_of(task: ab.Task, precision: str) -> list[list[object]]:
    """What memory buys, leanest first: (peak bytes, seconds of a step, micro-batch, in words)."""
    made = ab.plan(task, ab.Machine.describe(LARGEST), precision=precision, frontier=True)
    return [
        [point.peak_bytes, point.step_seconds, point.choice.micro_batch, point.choice.describe()]
        for point in made.frontier
    ]


def room_of(size: str) -> int:
    """Bytes of a card of that size which a plan uses."""
    budget = ab.Machine.describe(size).device.budget_bytes
    return budget - reserve_of(budget, "cuda")


def kept(path: Path) -> dict[str, list[list[object]]]:
    """The rows that a file has."""
    if not path.exists():
        return {}
    return json.loads(path.read_text().partition("=")[2].strip().removesuffix(";"))["rows"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="plan rows again that the file has")
    rows = {} if parser.parse_args().fresh else kept(OUT)
    commands: dict[str, str] = {}
    for key, model in MODELS.items():
        for length, adapter, precision in product(model.lengths, model.adapters, model.precisions):
            name = f"{key} {length} {adapter} {precision}"
            with tempfile.TemporaryDirectory() as folder:
                task, commands[name] = task_of(model, Path(folder), length, adapter, precision)
                if name not in rows:
                    rows[name] = row_of(task, precision)
                    print(name, len(rows[name]), "points", flush=True)
            grid = {
                "batch": BATCH,
                "models": {key: model.name for key, model in MODELS.items()},
                "budgets": {size: room_of(size) for size in SIZES},
                "commands": commands,
                "rows": {name: rows[name] for name in commands},
            }
            OUT.write_text(f"window.anybatchGrid = {json.dumps(grid, separators=(',', ':'))};\n")


if __name__ == "__main__":
    main()

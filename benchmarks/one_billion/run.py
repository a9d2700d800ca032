"""A model of a billion parameters in 12 GiB: what does not fit, what would, and one that is trained.
One command:

    python benchmarks/one_billion/run.py [--memory 12GiB] [--steps 3] [--plan-only]

The model is a Llama from its configuration, with random weights and random tokens: what is asked is
whether it fits, and whether that was known before.
"""

from __future__ import annotations

import argparse
import platform
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.errors import NoPlanFits
from anybatch.units import format_bytes, format_seconds

RESULTS = Path(__file__).parents[1] / "results" / "one_billion.md"
LENGTH, BATCH, WORDS = 32, 8, 32_000


def model() -> nn.Module:
    """1.04 billion parameters: the shape of Llama 3.2 1B with a vocabulary of 32,000."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )


def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """Mean cross-entropy of the next token."""
    return model(input_ids=batch[0], labels=batch[0]).loss


def task(optimizer: Any, steps: int) -> ab.Task:
    """Random tokens."""
    tokens = torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    return ab.Task(
        model=model,
        loss=loss,
        optimizer=optimizer,
        train=TensorDataset(tokens),
        global_batch=BATCH,
        steps=steps,
        name="one billion",
    )


def planned(optimizer: Any, memory: str, precision: str = "fp32") -> str:
    """What planning says."""
    start = time.perf_counter()
    try:
        plan = ab.plan(task(optimizer, 1), memory=memory, precision=precision)
        assert plan.prediction is not None
        kinds = ", ".join(f"{k} {format_bytes(v)}" for k, v in plan.prediction.by_kind.items())
        told = (
            f"{plan.choice.describe()}: {format_bytes(plan.prediction.peak_bytes)} ({kinds}),"
            f" {format_seconds(plan.prediction.step_seconds)} per step"
        )
    except NoPlanFits as error:
        told = str(error)
    return f"{told}\n(planned in {time.perf_counter() - start:.1f} s)"


def main() -> None:
    """See the module."""
    options = argparse.ArgumentParser()
    options.add_argument("--memory", default="12GiB")
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--plan-only", action="store_true")
    given = options.parse_args()
    from torchao.optim import AdamW8bit

    ways = {
        "AdamW, fp32": (torch.optim.AdamW, "fp32"),
        "AdamW, pure bfloat16": (torch.optim.AdamW, "bf16-pure"),
        "SGD, fp32": (partial(torch.optim.SGD, lr=1e-2), "fp32"),
        "AdamW8bit, pure bfloat16": (partial(AdamW8bit, lr=1e-4), "bf16-pure"),
    }
    lines = [
        "# A model of a billion parameters",
        "",
        f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}.",
        f"A global batch of {BATCH} x {LENGTH} tokens in {given.memory}.",
    ]
    for name, (optimizer, precision) in ways.items():
        told = planned(optimizer, given.memory, precision)
        print(f"{name}\n{told}\n", flush=True)
        lines += ["", f"## {name}", "", "```", told, "```"]
    if not given.plan_only:
        optimizer, precision = ways["AdamW8bit, pure bfloat16"]
        ended = ab.train(
            task(optimizer, given.steps),
            memory=given.memory,
            precision=precision,
            progress=False,
        ).ended
        predicted, measured = ended.predicted_peak_bytes, ended.measured_peak_bytes
        told = (
            f"{given.steps} steps of AdamW8bit in pure bfloat16 under an enforced {given.memory}:"
            f" predicted {format_bytes(predicted)}, measured {format_bytes(measured)}"
            f" ({predicted / measured - 1:+.1%}); {format_seconds(ended.step_seconds)} per step,"
            f" predicted {format_seconds(ended.predicted_step_seconds)}."
        )
        print(told)
        lines += ["", "## Trained", "", told]
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

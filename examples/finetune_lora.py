"""Low-rank adapters on a causal language model of transformers (needs `pip install "anybatch[hf]"`).

    python examples/finetune_lora.py

The model is small and built from a configuration, so nothing is downloaded; to load your own weights,
use `AutoModelForCausalLM.from_pretrained(FOLDER, local_files_only=True)`. The model is first trained
to go up the alphabet, and saved. Then its weights are frozen, and adapters are trained to go down.
Only the adapters have gradients and optimizer states, and only they are saved.

The files that this script writes can also be used with `anybatch train finetune`; see the guide.
"""

import json
import string
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

import anybatch as ab

FOLDER = Path("runs/finetune")
LETTERS = string.ascii_letters
IGNORED = -100


def new_tokenizer() -> Any:
    """Creates a tokenizer with 257 tokens: one for each byte, and one for the end of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>")


def walks(direction: int) -> list[tuple[str, str]]:
    """Pairs of two letters, such as `ad`, and the letters that continue them at the same distance:
    `gjmpsvyBEHKNQTWZ`."""
    pairs = []
    for stride in range(1, 7):
        for start in range(len(LETTERS) - 2 * stride):
            walk = LETTERS[::direction][start::stride]
            pairs.append((walk[:2], walk[2:]))
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    return [pairs[i] for i in order]


def encoded(tokenizer: Any, pairs: list[tuple[str, str]]) -> list[dict[str, list[int]]]:
    """Tokens and labels of each pair; prompt tokens are ignored. The model shifts the labels by one."""
    samples = []
    for begin, rest in pairs:
        prompt = tokenizer(begin)["input_ids"]
        completion = [*tokenizer(rest)["input_ids"], tokenizer.eos_token_id]
        labels = [IGNORED] * len(prompt) + completion
        samples.append({"input_ids": prompt + completion, "labels": labels})
    return samples


def task(model: Any, tokenizer: Any, direction: int) -> ab.Task:
    samples = encoded(tokenizer, walks(direction))
    return ab.Task(
        model=model,
        loss=ab.causal_lm_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        train=samples[32:],
        valid=samples[:32],
        collate=DataCollatorForSeq2Seq(tokenizer),  # pads to the longest, labels with -100
        lengths=lambda data: [len(sample["input_ids"]) for sample in data],
        global_batch=32,
        epochs=12,
        schedule=ab.warmup_cosine(0.1),
        clip_norm=1.0,
        name="walks",
    )


def base() -> nn.Module:
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=256,
        eos_token_id=256,
    )
    return AutoModelForCausalLM.from_config(config)


def trained_base() -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(FOLDER / "base", local_files_only=True)


def with_adapters() -> nn.Module:
    """The saved model, frozen, with adapters of rank 8 on every linear layer except the head."""
    return get_peft_model(
        trained_base(),
        LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


if __name__ == "__main__":
    tokenizer = new_tokenizer()
    up = ab.train(task(base, tokenizer, 1), micro_batch=16)
    print(f"up, all weights trained: held-out loss {up.loss:.3f}")
    up.model.save_pretrained(FOLDER / "base")
    tokenizer.save_pretrained(FOLDER / "base")

    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "base", local_files_only=True)
    tasks = {model: task(model, tokenizer, -1) for model in (trained_base, with_adapters)}
    plans = {model: ab.plan(one, micro_batch=16) for model, one in tasks.items()}
    for model, plan in plans.items():
        print(
            f"{model.__name__}: {plan.task.trainable_parameters:,} of {plan.task.parameters:,} trained,"
            f" optimizer states {plan.prediction.by_kind['optimizer state']:,} bytes"
        )
    down = ab.train(tasks[with_adapters], plan=plans[with_adapters])
    print(f"down, adapters trained: held-out loss {down.loss:.3f}")
    ab.save_adapters(down.model, FOLDER / "adapters")

    again = PeftModel.from_pretrained(trained_base(), FOLDER / "adapters").eval()
    begin = tokenizer("zx", return_tensors="pt")
    made = again.generate(**begin, max_new_tokens=20, do_sample=False)
    print(f"read again by peft, it writes {tokenizer.decode(made[0], skip_special_tokens=True)}")

    with (FOLDER / "walks.jsonl").open("w") as file:  # in the format of `anybatch train finetune`
        for prompt, completion in walks(-1):
            file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")

"""What is told, and written, of a model that was fine-tuned: where it began, what it makes of text that
was held out, and the model itself in a folder that from_pretrained reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import anybatch as ab
from anybatch.recipes.finetune_model import libraries
from anybatch.recipes.finetune_samples import IGNORED, Samples
from anybatch.recipes.finetune_tokens import Tokens

TOKENS_TOLD = 100
_FIRST_TOKENS = 8  # of a held-out text, which the model goes on from
_SAMPLES_TOLD = 3
_CHARACTERS = 60


@dataclass(frozen=True)
class Told:
    """A function of the trained model, for `Task.tell`.

    Attributes:
        origin: of model and data, in words.
        tokens: of the model, or None.
        samples: held out, or those that were trained on where none are.
        classes: names, for a classifier.
        prompt: what the text begins with; None: a sample says it.
        longest: tokens that the model is given at most.
        save: folder for the model, or None.
    """

    origin: str
    tokens: Tokens | None
    samples: Samples
    classes: list[str]
    prompt: str | None
    longest: int
    save: Path | None

    def __call__(self, model: nn.Module) -> str:
        parts = [f"{self.origin} {_trained(model)}"]
        if self.save is not None:
            parts.append(save(model, self.save, self.tokens))
        if self.tokens is not None:
            parts.append(self._classified(model) if self.classes else self._written(model))
        return "\n".join(parts) + "\n"

    def _written(self, model: nn.Module) -> str:
        assert self.tokens is not None
        begin = self._begin()
        made = generated(model, begin, self.tokens, self.longest)
        before, after = self.tokens.decode(begin), self.tokens.decode(made)
        return f"What the model writes after {_shown(before)!r}:\n\n{_shown(after)}"

    def _begin(self) -> list[int]:
        """The tokens of the prompt; of a sample, those before its first label, or the first few."""
        assert self.tokens is not None
        if self.prompt is not None:
            return self.tokens.encode([self.prompt])[0] or [self.tokens.pad]
        sample = self.samples[0]
        ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
        first = next(i for i, label in enumerate(labels) if label != IGNORED)
        return ids[: first or min(_FIRST_TOKENS, len(ids) - 1)]

    @torch.no_grad()
    def _classified(self, model: nn.Module) -> str:
        assert self.tokens is not None
        lines: list[str] = []
        for number in range(min(_SAMPLES_TOLD, len(self.samples))):
            sample = self.samples[number]
            ids = sample["input_ids"][None].to(_device(model))
            found = int(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.argmax())
            text = _shown(self.tokens.decode(ids[0].tolist()))
            more = "..." * (len(text) > _CHARACTERS)
            right = self.classes[int(sample["labels"])]
            lines.append(f"{text[:_CHARACTERS]}{more}: {self.classes[found]} (it is {right})")
        return "\n".join(lines)


@torch.no_grad()
def generated(model: Any, begin: list[int], tokens: Tokens, longest: int) -> list[int]:
    """The likeliest tokens after `begin`, one after the other, until the end of a text: at most 100,
    and as many as the model takes."""
    begin = begin[: longest - 1]
    options = libraries().GenerationConfig(
        max_new_tokens=min(TOKENS_TOLD, longest - len(begin)),
        do_sample=False,
        pad_token_id=tokens.pad,
        eos_token_id=tokens.end,
    )
    ids = torch.tensor([begin], device=_device(model))
    made = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=options
    )
    return made[0, len(begin) :].tolist()


def save(model: Any, folder: Path, tokens: Tokens | None) -> str:
    """Write the model, or its adapters alone where it has some, and its tokenizer: where to."""
    has_adapters = hasattr(model, "peft_config")
    if has_adapters:
        ab.save_adapters(model, folder)
    else:
        model.save_pretrained(folder)
    if tokens is not None:
        tokens.save(str(folder))
    return f"{'The adapters are' if has_adapters else 'The model is'} in {folder}."


def _trained(model: nn.Module) -> str:
    total = sum(param.numel() for param in model.parameters())
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    return f"Trained: {trained:,} of {total:,} parameters."


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _shown(text: str) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text).strip()

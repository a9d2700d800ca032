"""A BERT classifier of sentences, fine-tuned with a warm-up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import anybatch as ab


def make(cuttable: bool) -> Any:
    """Model, optimizer, schedule, and batches padded to the longest sentence of each."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        get_linear_schedule_with_warmup,
    )

    rate = 0.0 if cuttable else 0.1
    config = BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        hidden_dropout_prob=rate,
        attention_probs_dropout_prob=rate,
        num_labels=3,
    )
    model = BertForSequenceClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    batches = []
    for _ in range(10):
        lengths = torch.randint(4, 17, (12, 1))
        mask = (torch.arange(int(lengths.max())) < lengths).long()
        words = torch.randint(1, 60, mask.shape) * mask
        labels = torch.randint(3, (12,))
        batches.append({"input_ids": words, "attention_mask": mask, "labels": labels})
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        scheduler=get_linear_schedule_with_warmup(optimizer, 3, 10),
        batches=batches,
        trained=[model],
    )


def by_hand(work: Any) -> None:
    model, optimizer = work.model, work.optimizer
    for batch in work.batches:
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        work.scheduler.step()
        optimizer.zero_grad()


def by_step(work: Any, **options: Any) -> None:
    model, optimizer = work.model, work.optimizer
    step = ab.Step(model, optimizer, lambda model, batch: model(**batch).loss, **options)
    for batch in work.batches:
        step(batch)
        work.scheduler.step()
    step.close()

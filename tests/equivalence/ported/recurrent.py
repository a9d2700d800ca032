"""A word language model by an LSTM, whose state goes from one batch to the next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab

WORDS, WIDTH = 40, 24


class RNN(nn.Module):
    """Words (T, B) and the state, two of (2, B, WIDTH), to logits (T * B, WORDS) and the next state."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder, self.rnn = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, 2)
        self.decoder = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, state: Any) -> tuple[Tensor, Any]:
        output, state = self.rnn(self.drop(self.encoder(words)), state)
        return self.decoder(self.drop(output)).flatten(0, 1), state


def make(cuttable: bool) -> Any:
    """Model and batches of eight words of twelve texts."""
    model = RNN(0.0 if cuttable else 0.2)
    text = torch.randint(WORDS, (81, 12))
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=2.0),
        batches=[(text[i : i + 8], text[i + 1 : i + 9]) for i in range(0, 80, 8)],
        trained=[model],
    )


def by_hand(work: Any) -> None:
    model, optimizer = work.model, work.optimizer
    state = (torch.zeros(2, 12, WIDTH), torch.zeros(2, 12, WIDTH))
    for data, targets in work.batches:
        state = tuple(one.detach() for one in state)
        optimizer.zero_grad()
        output, state = model(data, state)
        loss = F.cross_entropy(output, targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()


def by_step(work: Any, **options: Any) -> None:
    model, optimizer = work.model, work.optimizer

    def loss(model: Any, batch: Any) -> ab.Loss:
        data, targets, *state = batch
        output, state = model(data, state)
        total = F.cross_entropy(output, targets.flatten(), reduction="sum")
        return ab.Loss(
            total, targets.numel(), outputs=[one.detach().movedim(1, 0) for one in state]
        )

    step = ab.Step(
        model,
        optimizer,
        loss,
        clip_norm=0.25,
        count_samples=lambda batch: batch[0].size(1),
        slice_batch=lambda batch, start, stop: [one[:, start:stop].contiguous() for one in batch],
        **options,
    )
    state = (torch.zeros(2, 12, WIDTH), torch.zeros(2, 12, WIDTH))
    for data, targets in work.batches:
        outcome = step([data, targets, *state])
        state = tuple(one.movedim(0, 1) for one in outcome.outputs)
    step.close()

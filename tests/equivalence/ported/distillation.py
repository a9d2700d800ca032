"""A student that learns from a teacher and from labels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab

TEMPERATURE, SHARE = 2.0, 0.3


def make(cuttable: bool) -> Any:
    """Teacher, student, optimizer and batches."""
    del cuttable  # it draws nothing, and looks at no other sample
    teacher = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10)).eval()
    student = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 10))
    return SimpleNamespace(
        teacher=teacher,
        student=student,
        optimizer=torch.optim.Adam(student.parameters(), lr=1e-2),
        batches=[(torch.randn(24, 20), torch.randint(10, (24,))) for _ in range(10)],
        trained=[student],
    )


def by_hand(work: Any) -> None:
    teacher, student, optimizer = work.teacher, work.student, work.optimizer
    for inputs, labels in work.batches:
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = F.softmax(teacher(inputs) / TEMPERATURE, 1)
        logits = student(inputs)
        soft = F.kl_div(F.log_softmax(logits / TEMPERATURE, 1), wanted, reduction="batchmean")
        loss = SHARE * TEMPERATURE**2 * soft + (1 - SHARE) * F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()


def by_step(work: Any, **options: Any) -> None:
    teacher, student, optimizer = work.teacher, work.student, work.optimizer

    def loss(student: Any, batch: Any) -> Tensor:
        inputs, labels = batch
        with torch.no_grad():
            wanted = F.softmax(teacher(inputs) / TEMPERATURE, 1)
        logits = student(inputs)
        soft = F.kl_div(F.log_softmax(logits / TEMPERATURE, 1), wanted, reduction="batchmean")
        return SHARE * TEMPERATURE**2 * soft + (1 - SHARE) * F.cross_entropy(logits, labels)

    step = ab.Step(student, optimizer, loss, **options)
    for inputs, labels in work.batches:
        step((inputs, labels))
    step.close()

"""Times in a table are compared as they were predicted, or not at all."""

from __future__ import annotations

import torch
from torch import nn

import anybatch as ab
from anybatch.report.choice_table import table_of, with_plan


def test_the_row_of_a_plan_that_was_measured_is_equal_to_itself():
    task = ab.Task(
        model=lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=list(torch.randn(512, 64)),
        global_batch=512,
        steps=2,
    )
    plan = ab.plan(task, memory="64MiB", frontier=True)
    plan = plan.model_copy(update={"choice": plan.frontier[0].choice})
    assert plan.prediction is not None
    slower = plan.prediction.model_copy(
        update={"step_seconds": 3 * plan.prediction.step_seconds, "rehearsed": True}
    )
    measured = plan.model_copy(update={"prediction": slower})
    tables = [table_of(one, with_plan(one)) for one in (plan, measured)]
    told = [[row[-2] for row in table.rows] for table in tables]
    assert [row[-1] for row in tables[0].rows].count("plan") == 1
    assert "=" in told[0]
    assert told[1] == told[0]

    found = plan.choice.model_copy(update={"micro_batch": 77})
    unpredicted = measured.model_copy(update={"choice": found})
    table = table_of(unpredicted, plan.frontier)
    assert [title for title, _ in table.columns][-2:] == ["budget", "step"]

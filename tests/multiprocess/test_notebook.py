"""Training on several ranks from a notebook's cell, run by a real kernel."""

from __future__ import annotations

import json

import nbformat
import pytest
from nbclient import NotebookClient

SETUP = """
import torch, torch.nn.functional as F
from torch import nn
import anybatch as ab

# The notebook has used torch before, with threads and gradients.
weights = torch.randn(300, 300, requires_grad=True)
(weights @ weights).sum().backward()

draw = torch.Generator().manual_seed(0)
inputs = torch.randn(101, 6, generator=draw)
targets = (inputs.sum(dim=1) > 0).long()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    def forward(self, x):
        return self.body(x)

def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)

task = ab.Task(
    model=Model, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.5),
    train=torch.utils.data.TensorDataset(inputs, targets),
    valid=torch.utils.data.TensorDataset(inputs, targets),
    global_batch=17, epochs=3,
)
"""

TRAIN = """
seen = []
alone = ab.train(task, ranks=1)
several = ab.train(task, ranks=2, sinks=[lambda event: seen.append(event.kind)])
assert len(several.plan.shares) == 2
distance = max(
    float((a - b).detach().abs().max())
    for a, b in zip(alone.model.parameters(), several.model.parameters())
)
import json
print(json.dumps({"distance": distance, "loss": several.loss, "first": seen[0], "last": seen[-1],
                  "steps": seen.count("step")}))
"""


@pytest.mark.nightly
def test_a_cell_trains_on_two_ranks(tmp_path):
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in (SETUP, TRAIN)]
    )
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})

    client.execute()

    outputs = notebook.cells[1].outputs
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    told = json.loads(printed.splitlines()[-1])
    assert told["distance"] < 1e-5
    assert told["loss"] < 0.4
    assert (told["first"], told["last"], told["steps"]) == ("run_started", "run_ended", 18)
    # One display for each call, which is updated.
    shown = [output.data for output in outputs if output.output_type == "display_data"]
    assert len(shown) == 2
    for one in shown:
        words = [line.split()[0] for line in one["text/plain"].splitlines() if line.strip()]
        assert (words[0], words[-1]) == ("Plan", "Training")
        assert "step 18/18" in one["text/plain"]
        assert one["text/html"].startswith("<pre")
    assert "ranks" not in shown[0]["text/plain"]
    assert "ranks" in shown[1]["text/plain"]

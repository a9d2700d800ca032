"""Any global batch, from one sample to a million, runs in the same enforced budget."""

import pytest

pytestmark = pytest.mark.faults

SCRIPT = """
import sys
import torch
import anybatch as ab

inputs = torch.randn(1000, 16)
task = ab.Task(
    model=lambda: torch.nn.Linear(16, 1),
    loss=lambda model, batch: ab.Loss((model(batch[0]) - batch[1]).square().sum(), len(batch[0])),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    train=torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)),
    global_batch=int(sys.argv[1]),
    last="wrap",
    steps=2,
)
result = ab.train(task, memory="64MiB")
assert result.plan.enforced
print(result.ended.samples_seen, result.plan.accumulation_steps)
"""


@pytest.mark.slow
@pytest.mark.parametrize("global_batch", [1, pytest.param(997, marks=pytest.mark.slow), 1_000_000])
def test_the_budget_does_not_grow_with_the_global_batch(global_batch, warm, tmp_path):
    done = warm(["python", "-c", SCRIPT, global_batch], tmp_path)
    assert done.returncode == 0, done.stderr
    seen, accumulation_steps = map(int, done.stdout.split())
    assert seen == 2 * global_batch
    # A million samples of 17 numbers are 68 MB in one piece: they cannot have been.
    assert accumulation_steps > 1 or global_batch < 1_000_000

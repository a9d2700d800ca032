"""The device is not waited for once per micro-batch: numbers are read once, at the end of a step."""

import dataclasses

import pytest
import torch
from tests.equivalence.reference import plan_for
from tests.equivalence.test_batch_norm import Images, task_of
from tests.equivalence.worlds import World
from tests.equivalence.worlds import task_of as token_task
from torch.utils._python_dispatch import TorchDispatchMode

import anybatch as ab
from anybatch.engine.totals import _Series
from anybatch.plans import Recompute

READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
}


class Reads(TorchDispatchMode):
    """Counts the operations that wait for a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in READS
        return func(*args, **(kwargs or {}))


def as_on_a_device(series, value, part, add=_Series.add):
    """Numbers on the CPU are read at once, which costs nothing there: look away from that."""
    if isinstance(value, torch.Tensor):
        series._gather(value.detach(), part)
    else:
        add(series, value, part)


def reads_of_a_step(task, micro_batch, **knobs):
    """Reads in the third step, when all is warm. `tolist` reads outside of the dispatcher: counted
    by the calls of `Tensor.tolist`."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(_Series, "add", as_on_a_device)
        with ab.Session(task, plan_for(task, micro_batch, **knobs)) as session:
            steps = session.steps()
            next(steps)
            next(steps)
            counter = Reads()
            lists = []
            tolist = torch.Tensor.tolist

            def listed(tensor):
                if tensor.is_floating_point():  # indices of samples are on the host
                    lists.append(tensor)
                return tolist(tensor)

            monkeypatch.setattr(torch.Tensor, "tolist", listed)
            with counter:
                next(steps)
    return counter.count + len(lists)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("way", [Recompute(), Recompute(blocks=("body.*",))])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16-weights"])
def test_reads_do_not_grow_with_the_micro_batches(clip_norm, way, precision):
    task = task_of(lambda: Images().float(), num_samples=96, global_batch=32, ghost_batch=4)
    x, y = task.train.tensors
    task = dataclasses.replace(
        task, train=torch.utils.data.TensorDataset(x.float(), y), clip_norm=clip_norm
    )
    knobs = {"recompute": way, "precision": precision}
    one, eight = (reads_of_a_step(task, size, **knobs) for size in (32, 4))
    assert one == eight
    assert one <= 8


def test_weights_on_the_device_are_read_once():
    task = token_task(World(loss="counted on device", num_samples=96, global_batch=32))
    assert reads_of_a_step(task, 4) == reads_of_a_step(task, 32) <= 5


@pytest.mark.parametrize(("precision", "reads"), [("fp32", 2), ("fp16", 4)])
def test_a_step_waits_for_its_totals_its_norm_and_what_a_loss_scale_asks(precision, reads):
    """Whether the scaled gradients left the range, and what the scale is then: each once."""
    task = token_task(World(num_samples=96, global_batch=32))
    assert reads_of_a_step(task, 8, precision=precision) == reads

"""One refused kernel, and every new kernel of the thread fails (oneDNN 3.12, torch 2.13, CPU).

Symptom: under a memory limit a convolution raises "could not create a primitive". With the limit
lifted, convolutions over shapes that this thread has computed with before still work, but every new
shape fails with the same message, for as long as the thread lives.

Mechanism: Xbyak, the generator of oneDNN's kernels, is built without exceptions. When it is refused
memory for code it notes the error in a thread-local variable, and every later generator of that thread
reads it and gives up; nothing clears it. A thread that was never marked computes on: hence
`StepThread.renew`.

In processes of their own, since a marked thread is of no use to other tests.
"""

import json
import subprocess
import sys
import textwrap

import pytest

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is held by Linux only"),
]

MARKING = """
    import json, resource, threading
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(1)

    def convolve(size):
        return F.conv2d(torch.randn(2, 16, 9 + size, 9 + size), torch.randn(16, 16, 3, 3))

    def attempt(work, *args):
        try:
            work(*args)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return "done"

    def under_limit(work, *args):
        with open("/proc/self/status") as file:
            used = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData"))
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + (200 << 10), hard))
        try:
            return work(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
"""


def run(code):
    """What a script prints as JSON."""
    script = textwrap.dedent(MARKING) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def supports_onednn():
    import torch

    return torch.backends.mkldnn.is_available()


@pytest.mark.skipif(not supports_onednn(), reason="torch is built without oneDNN")
def test_a_refused_kernel_marks_its_thread_for_good():
    """If this fails, oneDNN forgets the error itself: `MemoryFailure.marks_thread` can go."""
    found = run("""
        convolve(0)
        refused = under_limit(attempt, convolve, 1)
        after = [attempt(convolve, 2), attempt(convolve, 0)]
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(attempt(convolve, 3)))
        thread.start()
        thread.join()
        print(json.dumps([refused, *after, *elsewhere]))
    """)
    mark = "could not create a primitive"
    assert found == [mark, mark, "done", "done"]


@pytest.mark.slow
@pytest.mark.skipif(not supports_onednn(), reason="torch is built without oneDNN")
def test_training_and_evaluation_go_on_in_a_fresh_thread():
    training = """
        import anybatch as ab
        from anybatch.estimate import identify
        from anybatch.plans import Choice, Plan
        from torch import nn
        from torch.utils.data import TensorDataset

        armed = []

        def loss(model, batch):
            if armed:
                armed.pop()
                under_limit(model, batch[0])
            return model(batch[0]).square().mean()

        def task_of():
            torch.manual_seed(0)
            data = TensorDataset(torch.randn(24, 16, 11, 11))
            return ab.Task(
                model=lambda: nn.Conv2d(16, 16, 3), loss=loss, train=data, valid=data,
                optimizer=lambda p: torch.optim.SGD(p, lr=0.1), global_batch=12, steps=4,
            )

        def train(arm):
            task, events = task_of(), []
            choice = Choice(micro_batch=12, evaluation_batch=24)
            plan = Plan(task=identify(task, task.build_model()), device="cpu", choice=choice)
            with ab.Session(task, plan, [events.append]) as session:
                steps = session.steps()
                if arm:
                    armed.append(True)
                for _ in steps:
                    pass
                evaluated = session.evaluate()
                batch = session.plan.choice.evaluation_batch
            failures = [(e.phase, e.message) for e in events if e.kind == "out_of_memory"]
            return failures, evaluated.loss, batch

        print(json.dumps(train({arm})))
    """
    none, expected, _ = run(training.replace("{arm}", "False"))
    failures, loss, evaluation_batch = run(training.replace("{arm}", "True"))
    assert failures == [["forward", "could not create a primitive"]]
    assert none == []
    assert loss == pytest.approx(expected, rel=1e-5)
    assert evaluation_batch == 6  # as the training step left it: half its micro-batch

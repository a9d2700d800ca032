"""One refused kernel, and every new kernel of the thread fails (oneDNN 3.12, torch 2.13, CPU).

Symptom: under a memory limit a convolution raises "could not create a primitive". With the limit
lifted, convolutions over shapes that this thread has computed with before still work, but every new
shape fails with the same message, for as long as the thread lives.

Mechanism: Xbyak, the generator of oneDNN's kernels, is built without exceptions. When it is refused
memory for code it notes the error in a thread-local variable, and every later generator of that thread
reads it and gives up; nothing clears it. So `StepThread.recover` ends the rank, with the weights of the
last whole step.

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


@pytest.mark.nightly
@pytest.mark.skipif(not supports_onednn(), reason="torch is built without oneDNN")
def test_a_step_ends_with_the_weights_of_the_last_one():
    weights, error = run("""
        import anybatch as ab
        from torch import nn

        armed = []

        def loss(model, batch):
            if armed:
                armed.pop()
                under_limit(model, batch)
            return model(batch).square().mean()

        model = nn.Conv2d(16, 16, 3)
        with ab.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss) as step:
            step(torch.randn(12, 16, 11, 11))
            before = model.weight.detach().clone()
            armed.append(True)
            try:
                step(torch.randn(12, 16, 13, 13))
            except ab.AnybatchError as raised:
                error = f"{type(raised).__name__}: {raised}"
        print(json.dumps([torch.equal(model.weight, before), error]))
    """)
    assert error.startswith("RankLost: oneDNN cannot go on in this process")
    assert weights is True

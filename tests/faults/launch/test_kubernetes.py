"""The PyTorchJob of docs/howto/kubernetes.md, as far as it can be tried without a cluster: each pod is
a process here, with the command of its container and the environment that the operator gives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.docs.reading import blocks
from tests.ports import free_port

import anybatch as ab
from anybatch.errors import Stopped

yaml = pytest.importorskip("yaml")

pytestmark = [pytest.mark.faults, pytest.mark.slow]

SECONDS = 200.0

TASK = """
import os, signal, time
from pathlib import Path
import torch
import anybatch as ab

FOLDER = Path(__file__).parent
X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))

class Rows(torch.utils.data.Dataset):
    '''Once, in rank 0 and some steps into the run, a sample waits until its process was told to end.'''

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        log, waiting = FOLDER / "mine" / "events.jsonl", FOLDER / "waiting"
        if (
            os.environ.get("RANK") == "0"
            and not waiting.exists()
            and log.exists()
            and log.read_text().count('"step"') > 2
        ):
            handler = signal.getsignal(signal.SIGTERM)
            waiting.touch()
            deadline = time.monotonic() + 100
            while signal.getsignal(signal.SIGTERM) == handler and time.monotonic() < deadline:
                time.sleep(0.01)
        return X[index], X[index].sum().sin()

def task():
    return ab.Task(
        model=lambda: torch.nn.Linear(3, 1).double(),
        loss=lambda model, batch: ((model(batch[0].double())[:, 0] - batch[1]) ** 2).mean(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.05),
        train=Rows(),
        global_batch=6,
        epochs=4,
    )
"""


def manifests() -> dict[str, dict[str, Any]]:
    """The objects of the page by kind."""
    texts = [block.text for block in blocks("docs/howto/kubernetes.md") if block.language == "yaml"]
    return {found["kind"]: found for text in texts for found in yaml.safe_load_all(text)}


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    [container] = pod["spec"]["containers"]
    return container


class Pods:
    """Processes that stand for pods of one job; all are ended in the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.running: list[subprocess.Popen[str]] = []

    def start(self, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        """A pod with `command`; /shared is the folder."""
        program, *words = command
        assert program == "anybatch"
        words = [word.replace("/shared", str(self._folder)) for word in words]
        words = [str(self._folder / word) if word == "my_task.py" else word for word in words]
        clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        process = subprocess.Popen(
            [sys.executable, "-m", "anybatch", *words],
            env={**clean, "OMP_NUM_THREADS": "1", **environment},
            cwd=self._folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.running.append(process)
        return process

    def ends(self) -> list[tuple[int, str]]:
        """Exit status and output of each, once all have ended."""
        told = [process.communicate(timeout=SECONDS)[0] for process in self.running]
        found = [
            (process.returncode, text) for process, text in zip(self.running, told, strict=True)
        ]
        self.running.clear()
        return found


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    (tmp_path / "my_task.py").write_text(TASK)
    pods = Pods(tmp_path)
    yield pods
    for process in pods.running:
        process.kill()
        process.communicate()


def of_operator(rank: int, size: int, port: int) -> dict[str, str]:
    """What Kubeflow's training operator sets in a pod of `size`, with nprocPerNode of 1."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "RANK": str(rank),
        "PET_NODE_RANK": str(rank),
        "PET_NPROC_PER_NODE": "1",
        "PET_NNODES": str(size),
        "PYTHONUNBUFFERED": "1",
    }


def check(pods: Pods, folder: Path) -> None:
    """The run of the pods has the weights of one process that nobody stopped."""
    pods.start(["anybatch", "train", "my_task.py", "--out", "/shared/alone"], {})
    [(status, text)] = pods.ends()
    assert status == 0, text
    both = [torch.nn.Linear(3, 1).double() for _ in range(2)]
    for model, run in zip(both, ("mine", "alone"), strict=True):
        ab.load_weights(model, folder / run / "model.safetensors")
    wanted = both[1].state_dict()
    for name, value in both[0].state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-12)


def evict(pods: Pods, folder: Path) -> list[tuple[int, str]]:
    """SIGTERM to the first pod, amid training; what becomes of all."""
    deadline = time.monotonic() + SECONDS
    while not (folder / "waiting").exists():
        assert time.monotonic() < deadline, "no pod came as far as training"
        time.sleep(0.02)
    pods.running[0].send_signal(signal.SIGTERM)
    return pods.ends()


@pytest.mark.nightly
def test_pods_of_the_training_operator_save_and_go_on_in_another_number(pods: Pods, tmp_path: Path):
    job = manifests()["PyTorchJob"]["spec"]
    specs = job["pytorchReplicaSpecs"]
    assert job["nprocPerNode"] == "1"
    assert specs["Master"]["template"] == specs["Worker"]["template"]
    command = container_of(specs["Master"]["template"])["command"]
    port = free_port()
    for rank in range(2):
        pods.start(command, of_operator(rank, 2, port))
    ends = evict(pods, tmp_path)
    assert [status for status, _ in ends] == [Stopped.exit_status] * 2, ends
    assert list((tmp_path / "mine" / "checkpoints").glob("step-*"))
    pods.start(command, of_operator(0, 1, free_port()))
    [(status, text)] = pods.ends()
    assert status == 0, text
    check(pods, tmp_path)

"""A run of Ray Train, for `test_ray`.

python -m tests.equivalence.ray_run FOLDER WORKERS MAX_FAILURES
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import anybatch as ab

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)).double()
KILLED = "killed"


class Rows(Dataset[Any]):
    """Once a checkpoint is in Ray's storage, loading a sample kills the worker of rank 1, one time."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        folder = self._folder
        if (
            folder is not None
            and os.environ.get("RANK") == "1"
            and not (folder / KILLED).exists()
            and list((folder / "storage").glob("run/checkpoint_*/step-*"))
        ):
            (folder / KILLED).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return X[index], X[index].sum().sin()


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return ((model(batch[0])[:, 0] - batch[1]) ** 2).mean()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def task(folder: Path | None = None) -> ab.Task:
    return ab.Task(
        model=network,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.02),
        train=Rows(folder),
        valid=TensorDataset(X, X.sum(dim=1).sin()),
        global_batch=14,  # and of the last step of an epoch 4
        epochs=4,
        clip_norm=0.5,
    )


def loop(config: dict[str, str]) -> None:
    from anybatch.integrations.ray import train

    folder = Path(config["folder"])
    model = train(task(folder), micro_batch=3, checkpoint_every=2)
    if os.environ["RANK"] == "0":
        torch.save(model.state_dict(), folder / "weights.pt")


def main(folder: Path, workers: int, max_failures: int) -> None:
    ray: Any = import_module("ray")
    ray_train: Any = import_module("ray.train")
    by_name: Any = import_module("tests.equivalence.ray_run")  # not as __main__, which is pickled
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True)
    trainer = import_module("ray.train.torch").TorchTrainer(
        by_name.loop,
        train_loop_config={"folder": str(folder)},
        scaling_config=ray_train.ScalingConfig(num_workers=workers),
        run_config=ray_train.RunConfig(
            name="run",
            storage_path=str(folder / "storage"),
            failure_config=ray_train.FailureConfig(max_failures=max_failures),
        ),
    )
    result = trainer.fit()
    print("METRICS", sorted(result.metrics), result.metrics["step"], result.checkpoint is not None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

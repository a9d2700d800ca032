"""Train at any batch size on the GPUs you have.

    task = anybatch.Task(model=..., loss=..., optimizer=..., train=..., global_batch=4096, epochs=3)
    result = anybatch.train(task, memory="10GiB")

Public names are imported on first use, so importing the package is fast and does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anybatch.batch_rule import Ramp as Ramp
    from anybatch.batch_rule import Tokens as Tokens
    from anybatch.compute.causal_lm import causal_lm_loss as causal_lm_loss
    from anybatch.compute.lm_loss import lm_loss as lm_loss
    from anybatch.compute.model_loss import model_loss as model_loss
    from anybatch.errors import AnybatchError as AnybatchError
    from anybatch.errors import DataError as DataError
    from anybatch.errors import InputError as InputError
    from anybatch.errors import LaunchError as LaunchError
    from anybatch.errors import LossError as LossError
    from anybatch.errors import NoPlanFits as NoPlanFits
    from anybatch.errors import PeerFailed as PeerFailed
    from anybatch.errors import PeerLost as PeerLost
    from anybatch.errors import Stopped as Stopped
    from anybatch.errors import StopTraining as StopTraining
    from anybatch.insight.rescale import BatchChange as BatchChange
    from anybatch.insight.rescale import rescale as rescale
    from anybatch.machine import Machine as Machine
    from anybatch.metrics import Metrics as Metrics
    from anybatch.parallel.data_parallel import BalancedDataParallel as BalancedDataParallel
    from anybatch.parallel.data_parallel import DataParallelCriterion as DataParallelCriterion
    from anybatch.parallel.data_parallel import DataParallelModel as DataParallelModel
    from anybatch.parallel.data_parallel import gather as gather
    from anybatch.parallel.group import Wish as Wish
    from anybatch.plans import Exchange as Exchange
    from anybatch.plans import KernelChoices as KernelChoices
    from anybatch.plans import Outer as Outer
    from anybatch.plans import Plan as Plan
    from anybatch.plans import Recompute as Recompute
    from anybatch.plans import Sharding as Sharding
    from anybatch.proof import Verdict as Verdict
    from anybatch.proof import verify as verify
    from anybatch.recipes.schedules import warmup_constant as warmup_constant
    from anybatch.recipes.schedules import warmup_cosine as warmup_cosine
    from anybatch.recipes.schedules import warmup_linear as warmup_linear
    from anybatch.runs.evaluate import Evaluation as Evaluation
    from anybatch.runs.evaluate import evaluate as evaluate
    from anybatch.runs.export import Exported as Exported
    from anybatch.runs.export import export as export
    from anybatch.runs.planning import plan as plan
    from anybatch.runs.scale import scale as scale
    from anybatch.runs.session import Session as Session
    from anybatch.runs.train import Result as Result
    from anybatch.runs.train import train as train
    from anybatch.state import load_weights as load_weights
    from anybatch.state import save_adapters as save_adapters
    from anybatch.state import save_weights as save_weights
    from anybatch.step import Outcome as Outcome
    from anybatch.step import Step as Step
    from anybatch.task import Grains as Grains
    from anybatch.task import JointLoss as JointLoss
    from anybatch.task import Loss as Loss
    from anybatch.task import Progress as Progress
    from anybatch.task import Task as Task

_HOMES = {
    "batch_rule": ("Ramp", "Tokens"),
    "compute.causal_lm": ("causal_lm_loss",),
    "compute.lm_loss": ("lm_loss",),
    "compute.model_loss": ("model_loss",),
    "errors": (
        "AnybatchError",
        "DataError",
        "InputError",
        "LaunchError",
        "LossError",
        "NoPlanFits",
        "PeerFailed",
        "PeerLost",
        "StopTraining",
        "Stopped",
    ),
    "runs.evaluate": ("Evaluation", "evaluate"),
    "runs.export": ("Exported", "export"),
    "insight.rescale": ("BatchChange", "rescale"),
    "machine": ("Machine",),
    "metrics": ("Metrics",),
    "parallel.data_parallel": (
        "BalancedDataParallel",
        "DataParallelCriterion",
        "DataParallelModel",
        "gather",
    ),
    "parallel.group": ("Wish",),
    "plans": ("Exchange", "KernelChoices", "Outer", "Plan", "Recompute", "Sharding"),
    "recipes.schedules": ("warmup_constant", "warmup_cosine", "warmup_linear"),
    "runs.planning": ("plan",),
    "runs.train": ("Result", "train"),
    "runs.scale": ("scale",),
    "runs.session": ("Session",),
    "state": ("load_weights", "save_adapters", "save_weights"),
    "step": ("Outcome", "Step"),
    "task": ("Grains", "JointLoss", "Loss", "Progress", "Task"),
    "proof": ("Verdict", "verify"),
}
_WHERE = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_WHERE)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "__version__":
        from importlib.metadata import version

        return version("anybatch")
    if name not in _WHERE:
        raise AttributeError(f"module 'anybatch' has no attribute {name!r}")
    from anybatch.process import libraries

    with libraries.loading():
        value = getattr(import_module(f"anybatch.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})

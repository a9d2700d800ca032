"""Metrics: objects that gather what they need over the held-out samples and then compute a figure.

Means are better given as sums (see `Task.metrics`): they need no state. What is not a mean (F1, area
under a curve, correlation) is what this is for. The objects are torchmetrics', or any that work
alike; torchmetrics itself is not needed here and not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from anybatch.errors import InputError

_METHODS = ("update", "compute", "reset")


@dataclass(frozen=True)
class Metrics:
    """Metric objects and what they are updated with.

        metrics=ab.Metrics(
            {"f1": MulticlassF1Score(10, average="macro"), "auroc": MulticlassAUROC(10)},
            lambda model, batch: (model(batch[0]), batch[1]),
        )

    Every evaluation begins with them reset, in copies of its own: the objects given here stay as they
    are. States are merged exactly over all ranks, by the reduction that each state declares, and not by
    torchmetrics' own synchronisation. An object that is not torchmetrics' needs
    `merge_state(others)` for that, as torcheval's have.

    Attributes:
        objects: by name; a `MetricCollection` is taken as the metrics in it.
        inputs: `(model, batch)` to the arguments of `update`: a tuple, or a dict of keywords. Called
            without gradient, the model in evaluation mode.

    Raises `InputError` if something in it is no metric.
    """

    objects: Mapping[str, Any]
    inputs: Callable[[nn.Module, Any], Any]

    def __post_init__(self) -> None:
        items = getattr(self.objects, "items", None)
        if not callable(items) or not callable(self.inputs):
            raise InputError(
                "Metrics takes a dict from names to metric objects, and a function (model, batch) that"
                f" returns the arguments of their update: not {_kind(self.objects)} and"
                f" {_kind(self.inputs)}."
            )
        objects = {str(name): value for name, value in dict(items()).items()}  # type: ignore[call-overload]
        for name, value in objects.items():
            if isinstance(value, type) or not all(
                callable(getattr(value, method, None)) for method in _METHODS
            ):
                raise InputError(
                    f"the metric {name!r} is {_kind(value)}: give an object with update, compute and"
                    " reset, as torchmetrics' are."
                )
            if callable(getattr(value, "items", None)):
                raise InputError(
                    f"the metric {name!r} is a collection of metrics: give it in place of the dict, or"
                    " its metrics one by one."
                )
        object.__setattr__(self, "objects", objects)


def _kind(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}, not an object of it"
    return f"a value of type {type(value).__name__}"

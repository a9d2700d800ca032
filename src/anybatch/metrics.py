"""Metrics: objects that accumulate state over the held-out samples and then compute a value.

Means are better given as sums (see `Task.metrics`), which need no state. `Metrics` is for values that
are not means (F1, area under a curve, correlation). The objects are torchmetrics metrics or any others
with the same interface; torchmetrics itself is not required and not imported.
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
    """Metric objects and the function that computes their inputs.

        metrics=ab.Metrics(
            {"f1": MulticlassF1Score(10, average="macro"), "auroc": MulticlassAUROC(10)},
            lambda model, batch: (model(batch[0]), batch[1]),
        )

    Each evaluation uses copies of the objects, which it resets first; the objects given here are not
    modified. States are merged exactly over all ranks, by the reduction declared for each state and not
    by torchmetrics' synchronization. For this, an object that is not a torchmetrics metric needs a
    method `merge_state(others)`, as torcheval metrics have.

    Attributes:
        objects: by name; a `MetricCollection` is treated as the metrics in it.
        inputs: function from `(model, batch)` to the arguments of `update`: a tuple, or a dict of
            keyword arguments. Called without gradients, with the model in evaluation mode.

    Raises `InputError` if an entry is not a metric.
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

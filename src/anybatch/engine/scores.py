"""Scores: the metric objects of one rank in one evaluation, and how they are merged over all ranks.

torchmetrics would synchronize by itself, over torch.distributed's default group and in the middle of
`compute`. Here states are exchanged once, after the vote. This works with every kind of parallelism, no
rank waits for one that failed, and an evaluation that is redone starts from reset states. Ranks without
samples have nothing to add and are left out: some states (for example, of a correlation) cannot be
merged with empty ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.errors import InputError
from anybatch.metrics import Metrics
from anybatch.parallel import Group
from anybatch.parallel.failures import RankReport, first_error

_NUMBERED = 1000  # a vector may have a value for each class


class Scores:
    """Copies of the metric objects in `given`, for the evaluations of one rank.

    Raises `InputError` for a metric that cannot be merged over the ranks of `group`.
    """

    def __init__(self, given: Sequence[Metrics], device: torch.device, group: Group) -> None:
        self._group = group
        self._sets: list[tuple[list[_Score], Callable[[nn.Module, Any], Any]]] = [
            (
                [_Score(n, metric, device, group.size) for n, metric in one.objects.items()],
                one.inputs,
            )
            for one in given
        ]
        self._updated = False

    def reset(self) -> None:
        self._updated = False
        for score in self._all():
            score.reset()

    def inputs(self, model: nn.Module, batch: Any) -> list[Any]:
        """Returns the arguments for the updates with `batch`."""
        return [inputs(model, batch) for _, inputs in self._sets]

    def update(self, inputs: Sequence[Any]) -> None:
        """Update with one batch. `inputs`: the return value of `inputs()`."""
        self._updated = True
        for (scores, _), one in zip(self._sets, inputs, strict=True):
            for score in scores:
                score.update(one)

    def states(self) -> list[Any]:
        """Returns the states that the other ranks need, on the host; empty for a single rank or without
        samples."""
        if self._group.size == 1 or not self._updated:
            return []
        return [score.state() for score in self._all()]

    def results(self, states: list[Any]) -> dict[str, float]:
        """Returns the values over all ranks. Every rank must call it. `states`: result of `states()`.

        Raises the errors of `compute`, and `PeerFailed` on the other ranks.
        """
        if not self._sets:
            return {}
        wrong: Exception | None = None
        values: dict[str, float] | None = None
        everyone = [one for one in self._group.exchange(states) if one]
        try:
            # Only ranks that had samples know what a metric learned from them besides its states.
            if self._updated or not everyone:
                values = self._values(everyone)
        except Exception as error:
            wrong = error
        gathered = self._group.exchange((values, RankReport() if wrong is None else _plain(wrong)))
        first_error(wrong, [one for _, one in gathered], None)
        self.reset()
        return next(found for found, _ in gathered if found is not None)

    def _values(self, everyone: Sequence[list[Any]]) -> dict[str, float]:
        values: dict[str, float] = {}
        for number, score in enumerate(self._all()):
            if everyone:
                score.merge([states[number] for states in everyone])
            values.update(score.value())
        return values

    def _all(self) -> Iterator[_Score]:
        return (score for scores, _ in self._sets for score in scores)


class _Score:
    """One metric object under its name."""

    def __init__(self, name: str, metric: Any, device: torch.device, num_ranks: int) -> None:
        self._name = name
        self._metric: Any = copy.deepcopy(metric)
        self._parts = _with_states(self._metric)
        self._device = device
        for part in self._parts:
            part.distributed_available_fn = _never
        if not self._parts and num_ranks > 1 and not hasattr(metric, "merge_state"):
            raise InputError(
                f"the metric {name!r} ({type(metric).__name__}) cannot be merged over"
                f" {num_ranks} ranks: give it merge_state(others), or give sums in its place."
            )
        self._place()

    def reset(self) -> None:
        self._metric.reset()

    def update(self, inputs: Any) -> None:
        if isinstance(inputs, Mapping):
            self._metric.update(**inputs)
        elif isinstance(inputs, tuple | list):
            self._metric.update(*inputs)
        else:
            self._metric.update(inputs)

    def state(self) -> Any:
        """Returns the update count and the states of each object that has states; or a copy of the
        metric if it manages its states by itself."""
        if self._parts:
            return [
                (part._update_count, {name: _sent(getattr(part, name)) for name in part._defaults})
                for part in self._parts
            ]
        mine = copy.deepcopy(self._metric)
        return mine.to("cpu") if callable(getattr(mine, "to", None)) else mine

    def merge(self, everyone: Sequence[Any]) -> None:
        """Become the metric over all ranks. `everyone`: the `state` of each rank."""
        if not self._parts:
            first, *rest = everyone
            self._metric = copy.deepcopy(first)
            self._metric.merge_state(rest)
            self._place()
            return
        for number, part in enumerate(self._parts):
            updated = [one[number] for one in everyone if one[number][0]]
            if not updated:
                continue
            for name, reduction in part._reductions.items():
                values = [self._received(states[name]) for _, states in updated]
                setattr(part, name, self._merged(name, reduction, values))
            part._update_count = sum(count for count, _ in updated)
            part._computed = None

    def value(self) -> dict[str, float]:
        """Returns the values: one, or several under names that begin with that of the metric."""
        return dict(self._figures(self._name, self._metric.compute()))

    def _place(self) -> None:
        if callable(getattr(self._metric, "to", None)):
            self._metric = self._metric.to(self._device)

    def _merged(self, state: str, reduction: Any, values: list[Any]) -> Any:
        kind = getattr(reduction, "__name__", "")
        if any(isinstance(value, list) for value in values):
            joined = [item for value in values for item in value]
            return joined if reduction is None or kind == "dim_zero_cat" else reduction(joined)
        if len(values) == 1:
            return values[0]
        if kind == "dim_zero_cat":
            return reduction(values)
        if kind == "dim_zero_mean":
            # A mean of means is correct only if all counts are equal; a constant can be kept.
            if all(torch.equal(value, values[0]) for value in values):
                return values[0]
            raise InputError(
                f"the metric {self._name!r} cannot be merged over ranks: its state {state!r} is a mean,"
                " which does not say over how many samples; use a metric that keeps sums."
            )
        if len({value.shape for value in values}) > 1:
            shapes = " and ".join(str(tuple(value.shape)) for value in values[:2])
            raise InputError(
                f"the metric {self._name!r} cannot be merged over ranks: its state {state!r} has the"
                f" shapes {shapes} on two of them; give the state a reduction that joins them ('cat')."
            )
        stacked = torch.stack(values)
        return stacked if reduction is None else reduction(stacked)

    def _received(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._received(item) for item in value]
        return value.to(self._device) if isinstance(value, Tensor) else value

    def _figures(self, name: str, value: Any) -> Iterator[tuple[str, float]]:
        if isinstance(value, Mapping):
            for key, part in value.items():
                yield from self._figures(f"{name}/{key}", part)
            return
        flat = value.detach().reshape(-1) if isinstance(value, Tensor) and value.dim() < 2 else None
        if flat is not None and value.dim() == 1 and len(flat) <= _NUMBERED:
            for number, one in enumerate(flat.tolist()):
                yield f"{name}/{number}", float(one)
        elif flat is not None and value.dim() == 0:
            yield name, float(flat)
        else:
            try:
                yield name, float(value)
            except (TypeError, ValueError, RuntimeError):
                what = (
                    f"a tensor of shape {tuple(value.shape)}"
                    if isinstance(value, Tensor)
                    else f"a value of type {type(value).__name__}"
                )
                raise InputError(
                    f"the metric {name!r} computes {what}: give one that computes a number, a"
                    " vector, or a dict of these."
                ) from None


def _with_states(metric: Any) -> list[Any]:
    """Returns the objects in `metric`, including itself, that declare states as torchmetrics' do."""
    modules = metric.modules() if isinstance(metric, nn.Module) else [metric]
    return [one for one in modules if hasattr(one, "_reductions") and hasattr(one, "_defaults")]


def _never() -> bool:
    return False


def _plain(error: Exception) -> RankReport:
    """Returns a report for an error that a smaller batch cannot fix, such as one from `compute`."""
    report = RankReport.of(error)
    return RankReport(error=report.error, exit_status=report.exit_status)


def _sent(value: Any) -> Any:
    if isinstance(value, list):
        return [_sent(item) for item in value]
    return value.detach().cpu() if isinstance(value, Tensor) else value

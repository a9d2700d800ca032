"""Evaluation: sums of losses and metrics without gradient, over held-out samples, each counted once.

Every rank runs its own part and then takes part in one vote. If all ranks succeeded, the sums and the
states of metrics are merged. If memory ran out on any rank, all ranks start over with half the batch,
so that no sample is counted twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from anybatch.compute import Replica
from anybatch.compute.joint import tensors_in, with_tensors
from anybatch.compute.loss_check import check_metrics, rounding
from anybatch.compute.modes import evaluating
from anybatch.data import Bad, BadSamples, to_device
from anybatch.data.evaluation import join, turns
from anybatch.engine.ladder import Waits, nothing_leaner
from anybatch.engine.limit import Limit
from anybatch.engine.meter import Meter
from anybatch.engine.outcome import by_rank
from anybatch.engine.scores import Scores
from anybatch.engine.step_thread import StepThread
from anybatch.engine.totals import Means, Names, Totals
from anybatch.errors import AnybatchError, LossError, NoPlanFits
from anybatch.events import Replanned, Sink
from anybatch.metrics import Metrics
from anybatch.parallel import Agreed, Group, PassAbandoned
from anybatch.parallel.failures import RankReport, first_error, memory_events
from anybatch.plans import Plan
from anybatch.task import Loss, LossFunction, MetricFunction, MetricsOfTask, several

T = TypeVar("T")

Batches = Callable[[int], Iterator[tuple[Any, int]]]
"""Maps the largest batch size to the rank's part of the held-out samples, as (batch, number of
samples). The number is 0 for a batch that is run only because other ranks run one."""

BatchesFrom = Callable[[int, int], Iterator[tuple[Any, int]]]
"""Like `Batches`, but starts from a given sample."""

Output = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of an evaluation over all ranks.

    Attributes:
        loss: mean loss; NaN if the total weight is zero.
        metrics: values by name.
        samples: number of samples.
    """

    loss: float
    metrics: dict[str, float]
    samples: int


@dataclass(frozen=True, slots=True)
class Together:
    """How the encodings of a joint loss are grouped for comparison, independent of the batches in which
    they were computed.

    Attributes:
        samples: number of samples compared at a time, in order; the last group may be smaller.
        interleaved: see `Evaluation.gathered`.
    """

    samples: int
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class _Part:
    """Result of one rank.

    Attributes:
        totals: sums, float64.
        samples: number of samples.
        more: what is exchanged once all ranks have succeeded.
    """

    totals: Tensor
    samples: int
    more: Any
    names: tuple[str, ...] = ()


class Evaluation:
    """Runs passes without gradient on one replica, with the evaluation batch of a plan.

    Args:
        leave_out: called with bad samples, which `batches` omits from then on; None: bad samples are
            errors.
    """

    def __init__(
        self,
        replica: Replica,
        group: Group,
        *,
        device: torch.device,
        thread: StepThread,
        limit: Limit,
        meter: Meter,
        sink: Sink,
        leave_out: Callable[[int, Sequence[tuple[int, Bad]]], None] | None = None,
    ) -> None:
        self._leave_out = leave_out
        self._replica = replica
        self._group = group
        self._device = device
        self._thread = thread
        self._limit = limit
        self._meter = meter
        self._sink = sink
        self._waits = Waits()
        self._names = Names(group)
        self._scores: tuple[list[int], Scores] | None = None
        self._are_checked = False  # the functions among the metrics

    def means(
        self,
        plan: Plan,
        step: int,
        batches: Batches,
        loss: LossFunction,
        metrics: MetricsOfTask | None,
        together: Together | None = None,
    ) -> tuple[Measured, Plan]:
        """Returns loss and metrics over all held-out samples of all ranks, and the plan, leaner if
        memory ran out. Every rank must call it. `together`: for a joint loss.

        Raises:
            NoPlanFits: there is no room to evaluate a single sample.
            DataError: a sample is bad and may not be left out, or too many samples are bad.
            PeerFailed: another rank raised an error.
        """
        functions, scores = self._split(metrics)
        while True:
            work = partial(self._add_up, batches, plan, loss, functions, scores)
            found = self._attempt(work, skips=self._leave_out is not None)
            if isinstance(found, list):
                bad = by_rank(report.bad for report in found)
                if bad and self._leave_out is not None:
                    self._leave_out(step, bad)
                if any(report.failure for report in found):
                    plan = self._make_room(plan, step, found)
                continue
            part, agreed = found
            states, encodings = part.more
            names = self._names.common(part.names, agreed)
            figures = scores.results(states)
            means = Means(agreed.totals, names)
            named = [means.metrics, figures]
            if together is not None and self._replica.is_joint:
                compared = self._compared(encodings, together)
                if isinstance(compared, list):
                    plan = self._make_room(plan, step, compared)
                    continue
                means = compared
                named.append(means.metrics)
            self._waits.succeeded()
            return Measured(means.loss, _merged(named), int(sum(agreed.notes))), plan

    def _compared(self, mine: Any, together: Together) -> Means | list[RankReport]:
        """Returns the means of a joint loss over the samples of all ranks, where `mine` holds the
        encodings of this rank; or the reports of all ranks if memory ran out on one."""
        everyone, failed = self._joined(mine, together.interleaved)
        if failed:
            return failed
        found = self._attempt(partial(self._compare, everyone, together.samples))
        if isinstance(found, list):
            return found
        part, agreed = found
        return Means(agreed.totals, self._names.common(part.names, agreed))

    def _compare(self, encoded: Any, size: int) -> _Part:
        """Run this rank's share of the comparisons over all samples, `size` samples at a time."""
        totals, tensors = Totals(self._device), tensors_in(encoded)
        starts = range(0, len(tensors[0]), size)
        with evaluating(self._replica.model):
            for start in starts[self._group.rank :: self._group.size]:
                rows = [one[start : start + size].to(self._device) for one in tensors]
                there = with_tensors(encoded, rows)
                totals.add(self._replica.compare_held_out(there, len(rows[0])))
        return _Part(totals.tensor(), 0, None, totals.names)

    def gathered(
        self, plan: Plan, step: int, batches: Batches, output: Output, interleaved: bool
    ) -> tuple[Any, Plan]:
        """Returns what `output(model, batch)` returns for the samples of all ranks, in order, as if for
        one batch, on the host of every rank; and the plan, leaner if memory ran out. All ranks call it.

        Args:
            interleaved: the ranks have interleaved blocks (as in a stream), not consecutive parts.

        Raises:
            NoPlanFits: there is no room for a single sample.
            InputError: the outputs for batches cannot be joined.
            PeerFailed: another rank raised an error.
        """
        while True:
            work = partial(self._collect, batches, plan, output)
            found = self._attempt(work, phase="prediction")
            if isinstance(found, tuple):
                joined, found = self._joined(found[0].more, interleaved)
                if not found:
                    self._waits.succeeded()
                    return joined, plan
            plan = self._make_room(plan, step, found)

    def _joined(self, mine: Any, interleaved: bool) -> tuple[Any, list[RankReport]]:
        """Returns the joined outputs of all ranks, and the reports of all ranks if memory ran out on
        one (else an empty list)."""
        joined: Any = None
        report = RankReport()
        wrong: Exception | None = None
        everyone = self._group.exchange(mine)
        try:
            pieces = list(
                _in_turn(everyone, self._group.shares)
                if interleaved
                else chain.from_iterable(everyone)
            )
            joined = join([piece for piece, _ in pieces], [size for _, size in pieces])
        except Exception as error:
            report = self._report_of(error, "prediction")
            wrong = None if report.can_be_mended else error
        reports = self._group.exchange(report)
        first_error(wrong, reports, None)
        return joined, reports if any(one.failure for one in reports) else []

    def outputs(
        self, plan: Plan, step: int, batches: BatchesFrom, output: Output
    ) -> Iterator[tuple[Any, Plan]]:
        """Yields what `output(model, batch)` returns for each batch, on the host, with the plan. Runs
        on this rank alone.

        When memory runs out, the batch size is halved, and the next batch starts where the last one
        ended. With several ranks the plan that is yielded does not change, since it must be the same on
        all ranks. Raises `NoPlanFits` if there is no room for a single sample.
        """
        done, given = 0, plan
        waits = self._waits if self._group.size == 1 else Waits()
        while True:
            report = RankReport()
            try:
                for batch, num_samples in batches(plan.choice.evaluation_batch, done):
                    result = self._output(output, batch)
                    done += num_samples
                    del batch
                    yield result, plan if self._group.size == 1 else given
                return
            except Exception as error:
                report = self._report_of(error, "prediction")
                if report.failure is None:
                    raise
            plan = self._make_room(plan, step, [report], waits)

    def _attempt(
        self, work: Callable[[], _Part], skips: bool = False, phase: str = "evaluation"
    ) -> tuple[_Part, Agreed] | list[RankReport]:
        """Run `work` once on all ranks. Returns this rank's part and what the ranks agreed on; or the
        reports of all ranks, at least one of which ran out of memory or, if it `skips` them, found bad
        samples.

        Raises this rank's own error, or `PeerFailed`, if neither of these recovers from it.
        """
        group = self._group
        part: _Part | None = None
        report = RankReport()
        wrong: Exception | None = None
        if group.lockstep:
            group.begin()
        try:
            part = work()
        except PassAbandoned:  # another rank failed, and reports it in the vote
            pass
        except Exception as error:
            report = self._report_of(error, phase)
            if skips and isinstance(error, BadSamples):
                report = replace(report, bad=error.bad)
            wrong = None if report.can_be_mended else error
            if wrong is not None and phase == "evaluation" and not isinstance(error, AnybatchError):
                error.add_note(
                    "It was raised in evaluation, where the model is in evaluation mode and the loss is"
                    " the same function: models that return something else in that mode (detectors, for"
                    " one) need a loss that knows both, or no valid=."
                )
        # The error has been dropped, so the tensors that its traceback kept alive are freed.
        if group.lockstep:  # the other ranks may wait for this one inside a pass
            group.gather(report.failed)
        agreed = group.agree(part.totals if part else None, part.samples if part else 0)
        if part is not None and agreed is not None:
            return part, agreed
        everyone = group.exchange(report)
        first_error(wrong, everyone, None)
        return everyone

    def _add_up(
        self,
        batches: Batches,
        plan: Plan,
        loss: LossFunction,
        functions: Sequence[MetricFunction],
        scores: Scores,
    ) -> _Part:
        model, totals, samples = self._replica.model, Totals(self._device), 0
        encodings: list[tuple[Any, int]] = []
        scores.reset()
        with evaluating(model), torch.no_grad():
            for batch, num_samples in batches(plan.choice.evaluation_batch):
                with self._limit.watched("evaluation", batch):
                    with self._replica.region():
                        one = self._evaluate(loss, batch, num_samples, encodings)
                        sums = _sums(functions, model, batch)
                        inputs = scores.inputs(model, batch)
                        self._check(functions, sums, batch, num_samples)
                    if num_samples:
                        totals.add(one, sums)
                        scores.update(inputs)
                        samples += num_samples
                del batch, one, sums, inputs
        return _Part(totals.tensor(), samples, (scores.states(), encodings), totals.names)

    def _check(
        self,
        functions: Sequence[MetricFunction],
        sums: Mapping[str, Any],
        batch: Any,
        num_samples: int,
    ) -> None:
        """Check, once, metrics that are single numbers. Skipped where ranks synchronize inside passes,
        since the other ranks would wait there."""
        if self._are_checked or num_samples < 2 or self._group.lockstep:
            return
        self._are_checked = True
        is_named = isinstance(sums, Mapping)  # otherwise adding them up raises an error
        if not is_named or all(isinstance(value, tuple) for value in sums.values()):
            return
        model = self._replica.model
        for function in functions:
            check_metrics(function, model, batch, num_samples, rounding(model, self._device))

    def _evaluate(
        self, loss: LossFunction, batch: Any, num_samples: int, encodings: list[tuple[Any, int]]
    ) -> Loss:
        """Returns the loss of a batch. For a joint loss, appends the encodings to `encodings` and
        returns zero."""
        replica = self._replica
        if not replica.is_joint:
            return replica.evaluate(loss, batch, num_samples)
        encoded = replica.encode(batch, num_samples)
        if num_samples:
            encodings.append((to_device(encoded, "cpu"), num_samples))
        return Loss(torch.zeros((), device=self._device), 0)

    def _collect(self, batches: Batches, plan: Plan, output: Output) -> _Part:
        kept: list[tuple[Any, int]] = []
        for batch, num_samples in batches(plan.choice.evaluation_batch):
            result = self._output(output, batch)
            if num_samples:
                kept.append((result, num_samples))
            del batch, result
        return _Part(torch.zeros(1, dtype=torch.float64), len(kept), kept)

    def _output(self, output: Output, batch: Any) -> Any:
        model = self._replica.model
        with (
            evaluating(model),
            torch.no_grad(),
            self._limit.watched("prediction", batch),
            self._replica.region(),
        ):
            return to_device(output(model, batch), "cpu")

    def _split(self, asked: MetricsOfTask | None) -> tuple[list[MetricFunction], Scores]:
        """Split metrics into functions that return sums and metric objects. The copies of the objects
        are kept for the next evaluation."""
        given = several(asked)
        objects = [one for one in given if isinstance(one, Metrics)]
        if self._scores is None or self._scores[0] != list(map(id, objects)):
            self._scores = list(map(id, objects)), Scores(objects, self._device, self._group)
        return [one for one in given if not isinstance(one, Metrics)], self._scores[1]

    def _report_of(self, error: Exception, phase: str) -> RankReport:
        return RankReport.of(error, phase, self._meter)

    def _make_room(
        self,
        plan: Plan,
        step: int,
        everyone: Sequence[RankReport],
        waits: Waits | None = None,
    ) -> Plan:
        """Returns the plan with half the evaluation batch. `everyone`: reports of all ranks, or of this
        rank alone."""
        size = plan.choice.evaluation_batch
        mine = everyone[self._group.rank if len(everyone) > 1 else 0].failure
        if mine is not None:
            self._thread.recover(mine)
        waits = waits or self._waits
        seconds = waits.seconds() if size == 1 else 0.0
        then = "" if seconds is None else f"evaluation batch {max(1, size // 2)}"
        for event in memory_events(everyone, step, size, plan, then):
            self._sink(event)
        worst = next(report for report in everyone if report.failure)
        assert worst.failure is not None
        if seconds is None:
            raise NoPlanFits(nothing_leaner(plan, worst.phase, worst.failure))
        if size == 1:
            time.sleep(seconds)
            return plan
        waits.worked = False
        choice = plan.choice.model_copy(update={"evaluation_batch": size // 2})
        changed = plan.model_copy(update={"choice": choice})
        self._sink(
            Replanned(
                time=time.time(),
                step=step,
                reason=f"memory ran out in {worst.phase}",
                before=f"evaluation batch {size}",
                after=then,
                plan=changed.model_dump(mode="json"),
            )
        )
        return changed


def _merged(named: Iterable[Mapping[str, T]]) -> dict[str, T]:
    """Merge metrics from several sources. Raises `LossError` if two have the same name."""
    merged: dict[str, T] = {}
    for metrics in named:
        for name in merged.keys() & metrics.keys():
            raise LossError(f"two metrics are called {name!r}: give each a name of its own.")
        merged |= metrics
    return merged


def _sums(functions: Sequence[MetricFunction], model: nn.Module, batch: Any) -> Mapping[str, Any]:
    if len(functions) == 1:
        return functions[0](model, batch)
    return _merged(function(model, batch) for function in functions)


def _in_turn(
    everyone: Sequence[Sequence[tuple[Any, int]]], shares: Sequence[float]
) -> Iterator[tuple[Any, int]]:
    """Returns the blocks of a stream in order, from those that each rank had."""
    left = [iter(mine) for mine in everyone]
    return (next(left[rank]) for rank in islice(turns(shares), sum(map(len, everyone))))

"""Evaluating: a plan for an evaluation alone, of a run that has its own.

What decides the numbers (precision, kernels, the loss in chunks, samples per pass) is as the run had
it, so that they come out as the run told them. Nothing is trained, so there is room where gradients and
the optimizer's state were; what is traced is an evaluation on a model that has just been built.
"""

from __future__ import annotations

from dataclasses import dataclass

from anybatch.errors import AnybatchError, NoPlanFits
from anybatch.estimate import Peak, Subject, evaluation_peak
from anybatch.estimate.eager import eagerly
from anybatch.estimate.peak import method_on
from anybatch.machine import Device
from anybatch.planner.kernel_rule import with_kernels
from anybatch.planner.ranks import Layout, budget_for, rank_of, reserve_of
from anybatch.planner.setting import Wishes, budget_notices, is_enforced
from anybatch.plans import Choice, Plan, Precision, Prediction, Recompute, StatesOn
from anybatch.units import check_count, format_bytes


@dataclass(frozen=True, slots=True)
class _Weighed:
    """A choice, and the peak that it leads to; None: the model cannot be traced."""

    choice: Choice
    peak: Peak | None


@eagerly()
def make_evaluation_plan(
    before: Plan,
    subject: Subject,
    device: Device,
    layout: Layout,
    *,
    precision: Precision | None = None,
    batch: int | None = None,
    limited: bool = False,
    shapes_vary: bool = False,
) -> Plan:
    """The plan to evaluate `subject` under.

    Args:
        before: that the run followed last.
        subject: of a task with hardly anything to train; see `evaluating`.
        device: one of the devices, all alike, with its budget.
        layout: of the ranks.
        precision: to compute in; None: as the run did.
        batch: samples per pass; None: as many as the run took, or fewer where these do not fit.
        limited: whether somebody named the budget, which is then held to.
        shapes_vary: whether samples may differ in shape.

    Raises:
        NoPlanFits: not even one sample at a time does.
        InputError: `batch` cannot be.
    """
    # A divided model that was kept in host memory may fit only so.
    is_kept_so = layout.parallel == "shard" and device.kind == "cuda"
    states_on: StatesOn = before.choice.optimizer_states if is_kept_so else "device"
    one = rank_of(subject, layout, device, states_on)
    identity = subject.identity
    if batch is not None:
        check_count(batch, "micro_batch")
    choice = Choice(
        micro_batch=identity.grain or min(identity.ghost_batch or 1, identity.global_batch),
        evaluation_batch=batch or before.choice.evaluation_batch,
        precision=precision or before.choice.precision,
        recompute=Recompute(),
        optimizer_states=states_on,
        # Planned for whole models only.
        chunked_head="" if layout.parallel == "shard" else before.choice.chunked_head,
    )
    found = _fitting(one, choice, device, fixed=batch is not None)
    enforced = is_enforced(subject, device, Wishes(), limited)
    told = list(budget_notices(subject, device, limited))
    if found.peak is None:
        told.append("The model cannot be traced, so nothing is predicted.")
    plan = Plan(
        task=identity,
        enforced=enforced,
        **layout.fields(device),
        choice=found.choice,
        prediction=_prediction(found, subject, device),
        notices=tuple(told),
    )
    if before.device.partition(":")[0] != device.kind:
        return with_kernels(plan, subject, False, shapes_vary)
    # A compiler would take from a budget that a CPU is held to.
    held = enforced and device.kind == "cpu"
    kernels = before.kernels.model_copy(update={"compile": before.kernels.compile and not held})
    return plan.running(kernels)


def _fitting(subject: Subject, choice: Choice, device: Device, fixed: bool) -> _Weighed:
    """`choice`, or where it does not fit the same with the first half of its batch that does, unless it
    is `fixed`."""
    budget = device.budget_bytes
    room = budget - reserve_of(budget, device.kind)
    size = choice.evaluation_batch
    while True:
        here = choice.model_copy(update={"evaluation_batch": size})
        try:
            peak = evaluation_peak(subject, here, device)
        except AnybatchError:
            raise
        except Exception:  # whatever the user's code raises on fake tensors
            return _Weighed(choice, None)
        if subject.division is not None:
            peak = peak.divided(subject.division)
        if fixed or peak.num_bytes <= room:
            return _Weighed(here, peak)
        if size == 1:
            needed = peak.num_bytes
            least = budget_for(needed, device.kind)
            raise NoPlanFits(
                f"no plan fits the budget of {format_bytes(budget)}: to evaluate one sample at a time"
                f" is predicted to need {format_bytes(needed)}. Give it at least {format_bytes(least)}"
                f" (--memory {-(-least // (1 << 20))}MiB), or divide the model over ranks.",
                least_bytes=least,
            )
        size //= 2


def _prediction(found: _Weighed, subject: Subject, device: Device) -> Prediction | None:
    if found.peak is None:
        return None
    return Prediction(
        peak_bytes=found.peak.num_bytes,
        evaluation_peak_bytes=found.peak.num_bytes,
        step_seconds=0.0,
        by_kind=dict(found.peak.by_kind),
        totals=found.peak.totals,
        choice=found.choice,
        method=method_on(subject.as_traced(device)),
    )

"""Evaluating: a plan only for evaluation, for a run that has a plan for training.

Everything that affects the results (precision, kernels, the loss in chunks, samples per pass) is
taken from the run, so that they match those that the run reported. Nothing is trained, so the
memory of gradients and optimizer states is free; the trace is of an evaluation of a newly built
model.
"""

from __future__ import annotations

from anybatch.errors import AnybatchError
from anybatch.estimate import Peak, Subject, evaluation_peak
from anybatch.estimate.eager import eagerly
from anybatch.estimate.peak import method_on
from anybatch.machine import Device
from anybatch.planner.kernel_rule import with_kernels
from anybatch.planner.ranks import Layout, rank_of, reserve_of
from anybatch.planner.refusal import no_plan_fits
from anybatch.planner.setting import budget_notices, is_enforced
from anybatch.plans import Choice, Plan, Precision, Prediction, Recompute, StatesOn
from anybatch.units import check_count


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
    """Make the plan for evaluating `subject`.

    Args:
        before: last plan of the run.
        subject: a task with hardly anything to train; see `evaluating`.
        device: one of the devices, which are all alike, with its budget.
        layout: layout of the ranks.
        precision: precision of the computation; None: that of the run.
        batch: samples per pass; None: as many as in the run, or fewer if these do not fit.
        limited: whether the user named the budget, which is then enforced.
        shapes_vary: whether samples may differ in shape.

    Raises:
        NoPlanFits: not even one sample at a time fits.
        InputError: `batch` is invalid.
    """
    # A divided model that was kept in host memory may only fit there.
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
        # The loss in chunks is planned only for models that are not divided.
        chunked_head="" if layout.parallel == "shard" else before.choice.chunked_head,
    )
    choice, peak = _fitting(one, choice, device, fixed=batch is not None)
    notices = list(budget_notices(device, limited))
    prediction = None
    if peak is None:
        notices.append("The model cannot be traced, so nothing is predicted.")
    else:
        prediction = Prediction(
            peak_bytes=peak.num_bytes,
            evaluation_peak_bytes=peak.num_bytes,
            step_seconds=0.0,
            by_kind=dict(peak.by_kind),
            totals=peak.totals,
            choice=choice,
            method=method_on(subject.as_traced(device)),
        )
    plan = Plan(
        task=identity,
        enforced=is_enforced(device, limited),
        **layout.fields(device),
        choice=choice,
        prediction=prediction,
        notices=tuple(notices),
    )
    if before.device.partition(":")[0] != device.kind:
        return with_kernels(plan, subject, False, shapes_vary)
    return plan.running(before.kernels)


def _fitting(
    subject: Subject, choice: Choice, device: Device, fixed: bool
) -> tuple[Choice, Peak | None]:
    """`choice` if it fits or is `fixed`, otherwise with its batch halved until it fits; and its
    peak, or None if the model cannot be traced."""
    budget = device.budget_bytes
    room = budget - reserve_of(budget, device.kind)
    size = choice.evaluation_batch
    while True:
        here = choice.model_copy(update={"evaluation_batch": size})
        try:
            peak = evaluation_peak(subject, here, device)
        except AnybatchError:
            raise
        except Exception:  # any exception of the user's code on fake tensors
            return choice, None
        if fixed or peak.num_bytes <= room:
            return here, peak
        if size == 1:
            what, more = "to evaluate one sample at a time", ", or divide the model over ranks."
            raise no_plan_fits(device, what, peak.num_bytes, more)
        size //= 2

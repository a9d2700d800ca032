"""Plans: the plans of one rank for the batches that `Step` is given, and for larger ones later.

A batch that fits in one piece is not traced: passes over a part of it, then over all of it, show that
it fits. Otherwise a plan that cuts it is made from traces and rehearsed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from anybatch.compute import Replica, find_chains, find_mlps, find_recomputable, kernel_choices
from anybatch.data import BatchCopies
from anybatch.data.generators import Borrowed
from anybatch.engine import Transactions, uncounted
from anybatch.engine.meter import Meter
from anybatch.errors import InputError, NoPlanFits
from anybatch.estimate import Outline, Subject, dtypes_of, optimizer_options
from anybatch.events import step_number
from anybatch.machine import Device
from anybatch.parallel import Group, SingleDevice
from anybatch.parallel.failures import together
from anybatch.planner import Remembered, Wishes, key_of, make_plan, untraced_plan
from anybatch.plans import Choice, Plan, TaskIdentity
from anybatch.side_effects import used_by
from anybatch.step.batches import Cutting, Pieces
from anybatch.step.checks import warn
from anybatch.step.norms import Norms
from anybatch.step.trials import Trials
from anybatch.task import JointLoss, LossFunction, parameters_in


@final
class StepPlans:
    """The plans for the batches of `Step`, and how these batches are cut.

    Args:
        where: the device, with its budget.
        limited: whether the user gave the budget.

    Attributes:
        planned_for: number of samples of this rank that its plan is for.
        largest: size of the largest batch of this rank so far.
        is_outgrown: whether a batch was larger than the plan of some rank is for.
        written: names of the buffers that traced passes wrote to.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: LossFunction,
        wishes: Wishes,
        where: Device,
        *,
        limited: bool,
        clip_norm: float | None,
        cutting: Cutting,
        norms: Norms,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._loss = loss
        self._is_joint = isinstance(loss, JointLoss)
        self._wishes = wishes
        self._where = where
        self._limited = limited
        self._clip_norm = clip_norm
        self._cutting = cutting
        self._norms = norms
        self._copies = BatchCopies()
        self._device = next(model.parameters()).device
        self._group: Group = SingleDevice()
        self.written: dict[str, None] = {}
        self.largest: int = 0
        self.forget()

    def forget(self) -> None:
        """Plan anew for the next batch."""
        self._own: Plan | None = None  # made from this rank's samples
        self._everyone: Sequence[Plan | None] = ()  # by rank
        self.planned_for: int = 0
        self.is_outgrown: bool = False

    def begin(self, batch: Any, group: Group) -> tuple[Plan, int]:
        """Plan for the first batch, on all ranks of `group`. Returns the plan of this rank, and the
        number of samples over all ranks."""
        self._group = group
        self._outline = Outline(self._model, self._optimizer)

        def first() -> Plan | None:
            size = 0 if batch is None else self._cutting.count(batch)
            if size:
                self._own, self.planned_for = self._untraced(batch, size), size
            return self._own

        with uncounted():  # planning does not count against the budget of another Step
            found = together(group, first)
        self._everyone = group.exchange(found)
        return self._agreed()

    def run_on(self, engine: Transactions, replica: Replica, meter: Meter) -> None:
        """Measure and follow plans with these from now on."""
        self._engine, self._replica, self._meter = engine, replica, meter

    def pieces(self, batch: Any, ghost: int | None = None) -> Pieces:
        """This rank's `batch`, cut into pieces; with ghost batches of `ghost` samples, or of the usual
        size if None."""
        norms = self._norms
        return Pieces(
            batch,
            self._device,
            ghost or norms.ghost,
            norms.is_whole and ghost is None,
            norms.check,
            self._copies,
            self._cutting,
            norms.is_synchronised,
        )

    def source(self, batch: Any, index: int) -> Pieces:
        """The pieces of the batch of step `index`, for which a plan is made if it is too large for the
        current one. All ranks call it."""
        source = self.pieces(batch)
        self.largest = max(self.largest, source.size)
        is_larger = self._group.size == 1 and self.largest > self.planned_for
        if not (self.is_outgrown or is_larger):
            self._engine.grow()
            return source
        self._plan_anew(batch if source.size else None, index)
        return self.pieces(batch)  # the plan may have changed the ghost batch

    def confirm(self, batch: Any, index: int, fits: bool = True) -> None:
        """Before step `index`: follow the plan for one piece if passes show that it fits on every rank,
        and otherwise a plan that cuts. All ranks call it. `fits`: whether it may fit on this rank."""
        group, tells, size = self._group, index > 0, self.planned_for
        what = "a batch that is larger than those before" if tells else "the batch"
        remembered = self._remembered(batch, size) if fits else None
        known = remembered.recall(self._where)[0] if remembered is not None else None
        trials = Trials(
            self._engine,
            self._replica,
            self._meter,
            self._norms,
            lambda ghost: self.pieces(batch, ghost),
            size,
            index,
            self._where,
        )

        def fits_whole() -> bool:
            if self._own is None:  # this rank has no samples
                return fits
            if not fits or known is not None:
                return False
            found = trials.whole(self._own)
            self._own = found or self._own
            return found is not None

        def follow(own: Plan | None, reason: str) -> None:
            self._own, self._everyone = own, group.exchange(own)
            plan, total = self._agreed()
            self._engine.follow(plan, step_number(index), reason, tells)
            self._replica.expect(total)

        if all(group.exchange(together(group, fits_whole))):
            follow(self._own, f"{what} fits in one piece")
            return
        if self._norms.is_whole:
            self._cut_norms(trials)

        def planned() -> Plan | None:
            if self._own is None:
                return None
            with uncounted(), self._meter.aside():  # planning does not count as training
                return self._planned(batch, size)

        def rehearsed(is_fixed: bool = False) -> Plan | None:
            return None if self._own is None else trials.rehearsed(self._own, is_fixed)

        reason = f"{what} does not fit in one piece"
        follow(known or together(group, planned), reason)
        found = together(group, lambda: rehearsed(is_fixed=known is not None))
        if found is None and known is not None:  # the remembered plan does not fit any more
            follow(together(group, planned), reason)
            found = together(group, rehearsed)
        follow(found, "it was rehearsed")
        if remembered is not None and found is not None:
            remembered.keep(found)

    def cut_from_now_on(self, batch: Any, index: int) -> None:
        """Switch to a plan that cuts, after memory ran out in a batch that BatchNorm normalizes as a
        whole. All ranks call it."""
        self.planned_for = max(self.largest, 2)
        is_empty = batch is None or not self._cutting.count(batch)

        def planned() -> Plan | None:
            return None if is_empty else self._untraced(batch, self.planned_for)

        self._own = together(self._group, planned)
        self.confirm(batch, index, fits=False)

    def _cut_norms(self, trials: Trials) -> None:
        """Choose the ghost batch of BatchNorm for a batch that does not fit in one piece."""
        group, own, norms = self._group, self._own, self._norms
        whole = max(group.exchange(0 if own is None else self.planned_for))
        found = together(group, lambda: whole if own is None else trials.largest_ghost(own, whole))
        norms.ghost = min(group.exchange(found))
        whose = " of each rank" if norms.is_synchronised else ""
        if group.rank == 0:
            warn(
                f"a batch of {whole} samples does not fit the memory in one piece, so it is cut, and"
                f" BatchNorm normalises over ghost batches of {norms.ghost} samples{whose} from now on."
                " Give ghost_batch to choose their size, or more memory.",
            )

    def _agreed(self) -> tuple[Plan, int]:
        """See `_agreed_plan`. If norms are synchronised, they are also when blocks are recomputed."""
        return _agreed_plan(self._group, self._everyone, alike=self._norms.is_synchronised)

    def _remembered(self, batch: Any, size: int) -> Remembered | None:
        """The storage of a plan for `size` samples like those in `batch`, which do not fit in one piece
        under this budget. None where plans are not remembered: several ranks would have to agree,
        and without a budget the free memory is another one each time."""
        if self._group.size > 1 or not self._limited or self._norms.is_whole:
            return None
        asked = asdict(replace(self._wishes, watch=None)) | {"joint": self._is_joint}
        subject = self._subject(batch, size)
        key = key_of(subject, [self._where], self._limited, asked)
        return Remembered(key, frontier=False, passing=())

    def _untraced(self, batch: Any, num_samples: int) -> Plan:
        """A plan for `num_samples` samples in one piece, or in micro-batches of the requested size. A
        trace is made only if needed: to find the layer whose logits a chunked loss omits, or for the
        passes of a loss over all samples."""
        if self._wishes.chunked_loss or self._is_joint:
            return self._planned(batch, num_samples)
        size = min(self._wishes.micro_batch or num_samples, num_samples)
        subject = self._subject(batch, num_samples)
        with Borrowed():
            return untraced_plan(subject, self._where, self._wishes, size, limited=self._limited)

    def _planned(self, batch: Any, num_samples: int) -> Plan:
        """A plan for `num_samples` samples like those in `batch`."""
        # A pass of norms that are synchronised is one ghost batch.
        most = self._norms.ghost if self._norms.is_synchronised else self._wishes.micro_batch
        wishes = replace(self._wishes, micro_batch=most and min(most, num_samples))
        subject = self._subject(batch, num_samples)
        with Borrowed():  # a traced loss may use random numbers
            plan = make_plan(subject, self._where, wishes, limited=self._limited)
        self.written |= subject.written
        return plan

    def _plan_anew(self, batch: Any, index: int) -> None:
        """Plan for larger batches, and follow that plan; all ranks call it. `batch`: that of this rank,
        or None if it is empty."""
        group = self._group
        if group.size == 1:
            self._plan_larger(batch, index)
            return
        plans = group.exchange(together(group, lambda: self._larger_plan(batch)))
        if plans != self._everyone:  # else the ranks that should plan have no samples now
            self._everyone = plans
            plan, total = self._agreed()
            reason = "a batch was larger than what was planned for"
            self._engine.follow(plan, step_number(index), reason)
            self._replica.expect(total)

    def _plan_larger(self, batch: Any, index: int) -> None:
        """On a single rank: follow a plan for a batch that is larger than all before. A batch that was
        cut gets more pieces of the same size; whether one piece still fits is tried again."""
        own, size = self._own, self.largest
        assert own is not None
        before, self.planned_for = own.task.global_batch, size
        wished = self._wishes.micro_batch
        if own.choice.micro_batch >= before and wished is None:
            self._own = self._untraced(batch, size)
            self.confirm(batch, index)
        else:
            task = own.task.model_copy(update={"global_batch": size})
            choice = own.choice
            if wished is not None:
                choice = choice.model_copy(update={"micro_batch": min(wished, size)})
            plan = own.model_copy(update={"task": task, "choice": choice})
            self._own, self._everyone = plan, (plan,)
            reason = "a batch was larger than what was planned for"
            self._engine.follow(plan, step_number(index), reason)
        self._replica.expect(size)

    def _larger_plan(self, batch: Any) -> Plan | None:
        """A plan for this rank's largest part, made from `batch`, if it has outgrown the current plan;
        else the current plan."""
        is_old = self._replica.is_outdated or self._norms.have_changed  # planned by `_begin_anew`
        if batch is None or is_old or self.largest <= self.planned_for:
            return self._own
        # Plan for twice the size, so that gradually growing batches do not need a new plan each time.
        self.planned_for = max(self.largest, 2 * self.planned_for)
        try:
            with uncounted(), self._meter.aside():  # planning does not count as training
                plan = self._planned(batch, self.planned_for)
        except (NoPlanFits, InputError):  # the current plan has worked so far
            return self._own
        if self._own is None or self._own.prediction is None or plan.prediction is not None:
            self._own = plan
        return self._own

    def _subject(self, batch: Any, num_samples: int) -> Subject:
        outline = self._outline
        model = outline.model
        blocks = tuple(find_recomputable(model))
        trained = parameters_in(self._optimizer.param_groups)
        return Subject(
            identity=TaskIdentity(
                name="step",
                global_batch=num_samples,
                parameters=sum(p.numel() for p in model.parameters()),
                trainable_parameters=sum(p.numel() for p in trained),
                ghost_batch=num_samples if self._norms.is_whole else self._norms.ghost,
                dtypes=dtypes_of(model),
            ),
            build_model=outline.build,
            make_optimizer=outline.optimizer_on,
            loss=self._loss,
            users=tuple(used_by(self._model)),
            optimizer=optimizer_options(self._optimizer),
            template=batch,
            num_valid=0,
            clip_norm=self._clip_norm,
            blocks=blocks,
            chains=tuple(find_chains(model)),
            mlps=tuple(find_mlps(model, blocks)),
            compiled=kernel_choices.is_compiled(self._model),
            # The sizes of the other ranks' parts are unknown here, and assumed to be the same.
            compared=num_samples * self._group.size if self._is_joint else 0,
        )


def _agreed_plan(group: Group, plans: Sequence[Plan | None], alike: bool) -> tuple[Plan, int]:
    """The plan for this rank, and the number of samples over all ranks. `plans`: by rank, each made
    from the samples of that rank, or None. `alike`: whether all ranks run a step in the same way, that
    of the rank with the most samples.

    Ranks may run a step differently, but must be able to repeat it the same number of times: when
    memory runs out on one, all move to their next rung, and all ladders must end at the same time. So
    every ladder is written out in full, and a shorter one repeats its leanest choice.

    Raises `InputError` if no rank has samples.
    """
    first = next((plan for plan in plans if plan is not None), None)
    if first is None:
        where = "the batch" if group.size == 1 else "the batch of every rank"
        raise InputError(
            f"{where} is empty in the first call: the plan is made by it, so give some samples."
        )
    sizes = [0 if plan is None else plan.task.global_batch for plan in plans]
    plan = plans[group.rank] or first
    if group.size == 1:
        return plan, sizes[0]
    if alike:
        largest = max(filter(None, plans), key=lambda one: one.task.global_batch)
        taken = {name: getattr(largest, name) for name in ("task", "choice", "ladder")}
        plan = plan.model_copy(update=taken)  # the budget stays that of this rank
    ladders = [_ladder(one) for one in plans if one is not None]
    own = _ladder(plan)
    own += [(own or [plan.choice])[-1]] * (max(map(len, ladders)) - len(own))
    changes = {"parallel": "replicate", "shares": tuple(map(float, sizes)), "ladder": tuple(own)}
    task = plan.task.model_copy(update={"global_batch": sum(sizes)})
    return plan.model_copy(update={**changes, "task": task}), sum(sizes)


def _ladder(plan: Plan) -> list[Choice]:
    """All choices that would follow that of `plan`, down to the leanest."""
    choices: list[Choice] = []
    while (leaner := plan.leaner()) is not None:
        plan = leaner
        choices.append(plan.choice)
    return choices

"""Account: where the bytes of a plan go, and what would make them fewer."""

from __future__ import annotations

from dataclasses import dataclass

from anybatch.estimate import Subject
from anybatch.estimate.ledger import Ledger, ledger
from anybatch.machine import Machine
from anybatch.planner.knobs import Knob, knobs
from anybatch.planner.make import setting_of
from anybatch.planner.ranks import Layout, of_one_rank
from anybatch.planner.setting import Wishes
from anybatch.planner.sizes import Sizes
from anybatch.plans import Plan


@dataclass(frozen=True, slots=True)
class Account:
    """The ledger of a plan's choice, and what turning one knob of it would do."""

    ledger: Ledger
    knobs: tuple[Knob, ...]


def account(subject: Subject, machine: Machine, plan: Plan) -> Account:
    """Account for the bytes of `plan`, made for `subject` on `machine`.

    Raises whatever the model or loss raises on fake tensors.
    """
    device = machine.device
    wishes = Wishes(precision=plan.choice.precision)
    layout = Layout(plan.parallel, plan.shares, plan.balance, plan.devices, plan.norms)
    subject = of_one_rank(subject, layout, device)
    setting = setting_of(subject, device, wishes, plan.enforced, plan.num_ranks)
    return Account(ledger(subject, plan.choice, device), knobs(subject, setting, plan.choice))


def smallest_micro_batch(subject: Subject) -> int:
    """The smallest micro-batch that a plan may have: one sample, or one ghost batch."""
    return Sizes.of(subject).smallest

"""Account: where the bytes of a plan go, and what would make them fewer."""

from __future__ import annotations

from dataclasses import dataclass

from anybatch.estimate import Subject, head_of
from anybatch.estimate.ledger import Ledger, ledger
from anybatch.machine import Machine
from anybatch.planner.costs import Costs, Untraceable
from anybatch.planner.knobs import Knob, in_use, knobs
from anybatch.planner.ranks import Layout, rank_of
from anybatch.planner.setting import setting_of
from anybatch.planner.sizes import Sizes
from anybatch.plans import Plan


@dataclass(frozen=True, slots=True)
class Account:
    """The ledger of a plan's choice, what turning one knob of it would do, and what turning one back
    would that is in use."""

    ledger: Ledger
    knobs: tuple[Knob, ...]
    in_use: tuple[Knob, ...]


def account(subject: Subject, machine: Machine, plan: Plan) -> Account:
    """Account for the bytes of `plan`, made for `subject` on `machine`.

    Raises whatever the model or loss raises on fake tensors.
    """
    device, choice = machine.device, plan.choice
    layout = Layout.of(plan)
    subject = rank_of(subject, layout, device, choice.optimizer_states)
    setting = setting_of(subject, device, choice.precision, layout)
    whole = choice.model_copy(update={"chunked_head": ""})
    head = head_of(subject, whole, device) if choice.chunked_head else None
    costs = Costs(subject, setting, choice.optimizer_states, head)
    try:
        return Account(ledger(subject, choice, device), knobs(costs, choice), in_use(costs, choice))
    except Untraceable as error:
        raise error.cause from None


def smallest_micro_batch(subject: Subject) -> int:
    """The smallest micro-batch that a plan may have: one sample, or one ghost batch."""
    return Sizes.of(subject).smallest

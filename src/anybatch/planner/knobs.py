"""Knobs: how much memory each memory-saving measure frees, and what it costs in time.

For users who examine where the memory goes, or for whom nothing fits: one knob at a time is turned,
starting from one choice. Some knobs are not turned by any plan, since they change what is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec

from anybatch.errors import AnybatchError, InputError
from anybatch.estimate import Peak, Subject, head_of
from anybatch.estimate.ledger import Ledger, ledger
from anybatch.estimate.sharding import Division
from anybatch.machine import Machine
from anybatch.planner.costs import Costs, Sizes, Untraceable
from anybatch.planner.ranks import WHOLLY, Layout, division_of, half_of, rank_of
from anybatch.planner.setting import setting_of
from anybatch.plans import Choice, Plan, Precision, Recompute

_MOST_BYTES = 0.995
"""A knob that leaves more than this fraction of the peak is not listed."""

_LOWER: dict[Precision, tuple[Precision, ...]] = {
    "fp32": ("bf16", "bf16-weights", "bf16-pure"),
    "tf32": ("bf16", "bf16-weights", "bf16-pure"),
    "bf16": ("bf16-weights", "bf16-pure"),
    "bf16-weights": ("bf16-pure",),
    "fp16": ("fp16-weights", "fp16-pure"),
    "fp16-weights": ("fp16-pure",),
}
"""Precisions that need less memory than the given one."""

_ADAPTED = 0.01
"""Size of small adapters as a fraction of the weights."""


@dataclass(frozen=True, slots=True)
class Knob:
    """One memory-saving measure.

    Attributes:
        what: short description.
        peak_bytes: predicted peak with it.
        step_seconds: predicted time of a step with it.
        remark: its other effects; empty: none, the result stays the same.
    """

    what: str
    peak_bytes: int
    step_seconds: float
    remark: str = ""


def knobs(costs: Costs, choice: Choice) -> tuple[Knob, ...]:
    """The effects of turning one knob of `choice`; the one that frees the most memory comes first."""
    here = _Here(costs, choice)
    most = _MOST_BYTES * here.peak.num_bytes
    found = [knob for knob in here.to_turn() if knob.peak_bytes < most]
    return tuple(sorted(found, key=lambda knob: (knob.peak_bytes, knob.step_seconds, knob.what)))


class _Here:
    """The choice that knobs are turned from."""

    def __init__(self, costs: Costs, choice: Choice) -> None:
        self._costs = costs
        self._subject, self._setting = costs.subject, costs.setting
        self._choice = choice
        self._num_ranks = len(costs.setting.layout.shares)
        self.peak: Peak = costs.footprint(choice).peak

    def to_turn(self) -> Iterator[Knob]:
        """All available knobs."""
        for turned in (
            self._micro_batches,
            self._ways,
            self._loss,
            self._precisions,
            self._optimizers,
            self._on_host,
            self._in_backward,
            self._over_ranks,
        ):
            with suppress(Untraceable):
                yield from turned()

    # ------------------------------------------------------------------------------------- to turn

    def _micro_batches(self) -> Iterator[Knob]:
        size, sizes = self._choice.micro_batch, self._costs.sizes
        if sizes.smallest < size // 2:
            half = sizes.in_units(size // 2)
            yield self._turned(f"micro-batch {half}", {"micro_batch": half})
        if sizes.smallest < size:
            yield self._turned(f"micro-batch {sizes.smallest}", {"micro_batch": sizes.smallest})

    def _ways(self) -> Iterator[Knob]:
        now = self._choice.recompute
        ways: dict[str, Recompute] = {}
        if blocks := self._subject.blocks:
            ways["recompute every block, keep matrix products"] = Recompute(
                blocks=blocks, keep="matmuls"
            )
            ways["recompute every block"] = Recompute(blocks=blocks)
        if chains := self._subject.chains:
            ways["recompute nested"] = Recompute(blocks=chains, nested=True)
        if self._setting.pace.has_host and not now.nested:
            ways["activations in host memory"] = now.model_copy(update={"to_host": True})
        for what, way in ways.items():
            if way != now:
                yield self._turned(what, {"recompute": way})

    def _loss(self) -> Iterator[Knob]:
        costs = self._costs
        if costs.head is None and self._subject.division is None:
            head = head_of(self._subject, self._choice, self._setting.device)
            if head is not None:
                other = Costs(costs.subject, costs.setting, costs.states_on, head)
                choice = self._choice.model_copy(update={"chunked_head": head.name})
                yield self._knob("loss in chunks", other.peak(choice), other.seconds(choice))

    def _precisions(self) -> Iterator[Knob]:
        remarks = {
            "": "activations in half precision: rounds differently",
            "weights": "weights in half precision: rounds differently",
            "pure": "weights and optimizer in half precision: small updates are lost",
        }
        for precision in _LOWER.get(self._choice.precision, ()):
            with suppress(AnybatchError):  # not supported by the task or the device
                yield self._in_precision(precision, remarks[precision.partition("-")[2]])

    def _in_precision(self, precision: Precision, remark: str) -> Knob:
        now = self._setting
        setting = setting_of(self._subject, now.device, precision, now.layout, now.watch)
        setting = replace(setting, correction=now.correction)
        other = Costs(self._subject, setting, self._costs.states_on, self._costs.head)
        choice = self._choice.model_copy(update={"precision": precision})
        return self._knob(
            f"precision {precision}", other.peak(choice), other.seconds(choice), remark
        )

    def _optimizers(self) -> Iterator[Knob]:
        """Other optimizers, and training so few weights that the optimizer states are negligible."""
        here, seconds = self.peak.num_bytes, self._costs.seconds(self._choice)
        states = self.peak.by_kind.get("optimizer state", 0)
        if states:
            remark = "give the task another optimizer, which learns differently"
            yield self._knob("SGD without momentum", here - states, seconds, remark)
        if states and self._subject.division is None and find_spec("torchao") is not None:
            # One byte instead of four (or two), and a scale for each block of 256.
            saved = states * (0.49 if self._choice.precision.endswith("pure") else 0.74)
            yield self._knob(
                "8-bit optimizer (torchao)",
                here - saved,
                seconds,
                "give the task another optimizer",
            )
        trained = states + self.peak.by_kind.get("gradients", 0)
        yield self._knob(
            "small adapters on frozen weights (LoRA)",
            here - (1 - _ADAPTED) * trained,
            seconds,
            "for fine-tuning: only the adapters learn",
        )

    def _on_host(self) -> Iterator[Knob]:
        on_device = self._choice.optimizer_states == "device"
        if self._setting.pace.can_offload and on_device and self._subject.division is None:
            yield self._turned("optimizer states in host memory", {"optimizer_states": "host"})

    def _in_backward(self) -> Iterator[Knob]:
        """Updating each parameter as soon as its gradient is available, which is then freed, with a
        single pass and all blocks recomputed. No plan does that, since an update that has begun
        could not be undone."""
        blocks = self._subject.blocks
        if self._subject.clip_norm is not None or self._num_ranks > 1 or not blocks:
            return
        choice = self._choice.model_copy(
            update={"micro_batch": self._costs.sizes.whole, "recompute": Recompute(blocks=blocks)}
        )
        peak = self._costs.footprint(choice).peak
        gradients = peak.by_kind.get("gradients", 0)
        yield self._knob(
            "one micro-batch, every block recomputed, update in backward",
            peak.num_bytes - gradients * (1 - 1 / len(blocks)),
            self._costs.seconds(choice),
            "by hand: a failure leaves half an update",
        )

    def _over_ranks(self) -> Iterator[Knob]:
        """The model divided over the available devices, and over twice as many."""
        division = self._division
        if division is None:
            return
        if self._subject.division is None and self._num_ranks > 1:
            count = self._num_ranks
            yield self._divided(
                f"state divided over the {count} devices", replace(division, ranks=count), ""
            )
        count = 2 * self._num_ranks
        yield self._divided(
            f"{count} devices, state divided", replace(division, ranks=count), "more hardware"
        )

    @cached_property
    def _division(self) -> Division | None:
        if self._subject.division is not None:
            return self._subject.division
        try:
            layout = replace(self._setting.layout, sharding=WHOLLY)
            return division_of(self._subject, layout, self._setting.device)
        except InputError:
            return None

    def _divided(self, what: str, division: Division, remark: str) -> Knob:
        """The knob of a model that is divided over as many ranks as `division` has."""
        subject, smallest = self._subject, self._costs.sizes.smallest
        if division.ranks > self._num_ranks:  # each has half of the work
            identity = subject.identity
            changes = {
                "global_batch": half_of(identity.global_batch, smallest),
                "padded": identity.padded and half_of(identity.padded, smallest),
            }
            subject = replace(subject, identity=identity.model_copy(update=changes))
        link = self._setting.layout.link
        layout = Layout("shard", (1.0,) * division.ranks, link=link)
        other = Costs(replace(subject, division=division), replace(self._setting, layout=layout))
        size = min(self._choice.micro_batch, other.sizes.whole)
        choice = other.choice(self._choice.recompute, size)
        return self._knob(what, other.peak(choice), other.seconds(choice), remark)

    # --------------------------------------------------------------------------------------- parts

    def _turned(self, what: str, changes: dict[str, object], remark: str = "") -> Knob:
        choice = self._choice.model_copy(update=changes)
        return self._knob(what, self._costs.peak(choice), self._costs.seconds(choice), remark)

    def _knob(self, what: str, peak_bytes: float, seconds: float, remark: str = "") -> Knob:
        return Knob(what, int(peak_bytes), seconds, remark)


@dataclass(frozen=True, slots=True)
class Account:
    """The ledger of a plan's choice, and the effects of turning one knob of it."""

    ledger: Ledger
    knobs: tuple[Knob, ...]


def account(subject: Subject, machine: Machine, plan: Plan) -> Account:
    """Account for the bytes of `plan`, made for `subject` on `machine`.

    Raises any exception that the model or loss raises on fake tensors.
    """
    device, choice = machine.device, plan.choice
    layout = Layout.of(plan)
    subject = rank_of(subject, layout, device, choice.optimizer_states)
    setting = setting_of(subject, device, choice.precision, layout)
    whole = choice.model_copy(update={"chunked_head": ""})
    head = head_of(subject, whole, device) if choice.chunked_head else None
    costs = Costs(subject, setting, choice.optimizer_states, head)
    try:
        return Account(ledger(subject, choice, device), knobs(costs, choice))
    except Untraceable as error:
        raise error.cause from None


def smallest_micro_batch(subject: Subject) -> int:
    """The smallest micro-batch that a plan may have: one sample, or one ghost batch."""
    return Sizes.of(subject).smallest

"""Knobs: what each way to need less memory buys, and what it costs in time.

For people who look at where the bytes go, or to whom nothing fits: one knob is turned at a time, from
one choice on. Some of them no plan turns by itself, since they change what is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from anybatch.errors import AnybatchError
from anybatch.estimate import Peak, Subject, footprint
from anybatch.estimate.calibration_store import speeds_of
from anybatch.estimate.seconds import Pace, exchange_seconds
from anybatch.planner.ranks import half_of
from anybatch.planner.setting import Setting
from anybatch.planner.sizes import Sizes
from anybatch.plans import Choice, Precision, Recompute

_MOST_BYTES = 0.995
"""A knob that leaves more than this part of the peak is not worth a line."""


@dataclass(frozen=True, slots=True)
class Knob:
    """One thing to turn.

    Attributes:
        what: in a few words.
        peak_bytes: predicted peak with it.
        step_seconds: predicted time of a step with it.
        remark: what else it does; empty: nothing, the result stays the same.
    """

    what: str
    peak_bytes: int
    step_seconds: float
    remark: str


def knobs(subject: Subject, setting: Setting, choice: Choice) -> tuple[Knob, ...]:
    """What turning one knob of `choice` would do; what frees most comes first.

    Raises whatever the model or loss raises on fake tensors.
    """
    here = _Here(subject, setting, choice)
    found = [knob for knob in here.all() if knob.peak_bytes < _MOST_BYTES * here.peak.num_bytes]
    return tuple(sorted(found, key=lambda knob: (knob.peak_bytes, knob.step_seconds, knob.what)))


class _Here:
    """The choice that is started from."""

    def __init__(self, subject: Subject, setting: Setting, choice: Choice) -> None:
        self._subject = subject
        self._setting = setting
        self._choice = choice
        self._sizes = Sizes.of(subject)
        self.peak: Peak = footprint(subject, choice, setting.device).peak

    def all(self) -> Iterator[Knob]:
        """Every knob that there is."""
        size = self._choice.micro_batch
        smallest = self._sizes.smallest
        if smallest < size // 2:
            half = self._sizes.in_units(size // 2)
            yield self._turned(f"micro-batch {half}", {"micro_batch": half})
        if smallest < size:
            yield self._turned(f"micro-batch {smallest}", {"micro_batch": smallest})
        for what, way in self._ways():
            if way != self._choice.recompute:
                yield self._turned(what, {"recompute": way})
        yield from self._precisions()
        yield from self._eight_bit()
        yield from self._on_host()
        yield from self._in_backward()
        yield self._sharded()

    def _ways(self) -> Iterator[tuple[str, Recompute]]:
        if blocks := self._subject.blocks:
            yield (
                "recompute every block, keep matrix products",
                Recompute(blocks=blocks, keep="matmuls"),
            )
            yield "recompute every block", Recompute(blocks=blocks)
        if chains := self._subject.chains:
            yield "recompute nested", Recompute(blocks=chains, nested=True)

    def _turned(self, what: str, changes: dict[str, object], remark: str = "") -> Knob:
        choice = self._choice.model_copy(update=changes)
        peak = footprint(self._subject, choice, self._setting.device).peak.num_bytes
        return self._knob(what, peak, self._seconds(choice), remark)

    def _knob(self, what: str, peak_bytes: float, seconds: float, remark: str) -> Knob:
        learned = self._setting.correction
        return Knob(what, int(peak_bytes * learned.bytes), seconds * learned.seconds, remark)

    def _seconds(self, choice: Choice) -> float:
        pace = self._setting.pace
        if choice.precision != self._choice.precision:
            device = self._setting.device
            speeds, mapped = speeds_of(device), self._setting.mapped
            pace = Pace(self._subject, device, speeds, choice.precision, mapped)
        return pace.step(
            choice.micro_batch,
            choice.recompute,
            self._sizes.whole,
            states_on=choice.optimizer_states,
        ).total

    def _precisions(self) -> Iterator[Knob]:
        if self._choice.precision not in ("fp32", "tf32"):
            return
        wanted: tuple[tuple[Precision, str], ...] = (
            ("bf16", "activations in bfloat16: rounds differently"),
            ("bf16-weights", "weights in bfloat16: rounds differently"),
            ("bf16-pure", "weights and optimizer in bfloat16: small updates are lost"),
        )
        for precision, remark in wanted:
            try:
                yield self._turned(f"precision {precision}", {"precision": precision}, remark)
            except AnybatchError:  # the task or the device cannot
                continue

    def _eight_bit(self) -> Iterator[Knob]:
        states = self.peak.by_kind.get("optimizer state", 0)
        if not states or find_spec("torchao") is None:
            return
        # One byte for four (or two), and a scale for each block of 256.
        saved = states * (0.49 if self._choice.precision.endswith("pure") else 0.74)
        yield self._knob(
            "8-bit optimizer (torchao)",
            self.peak.num_bytes - saved,
            self._seconds(self._choice),
            "give the task another optimizer",
        )

    def _on_host(self) -> Iterator[Knob]:
        if self._setting.pace.can_offload and self._choice.optimizer_states == "device":
            yield self._turned("optimizer states in host memory", {"optimizer_states": "host"})

    def _in_backward(self) -> Iterator[Knob]:
        """The update of each parameter as soon as its gradient is there, which then goes: with a single
        pass, and what it keeps recomputed. No plan does that, since an update that has begun could
        not be undone."""
        blocks = self._subject.blocks
        if self._subject.clip_norm is not None or self._setting.num_ranks > 1 or not blocks:
            return
        choice = self._choice.model_copy(
            update={"micro_batch": self._sizes.whole, "recompute": Recompute(blocks=blocks)}
        )
        peak = footprint(self._subject, choice, self._setting.device).peak
        gradients = peak.by_kind.get("gradients", 0)
        yield self._knob(
            "one micro-batch, every block recomputed, update in backward",
            peak.num_bytes - gradients * (1 - 1 / len(blocks)),
            self._seconds(choice),
            "by hand: a failure leaves half an update",
        )

    def _sharded(self) -> Knob:
        """Twice the devices, state divided among them: half of it, gathered block by block."""
        kinds = ("parameters", "gradients", "optimizer state")
        state = sum(self.peak.by_kind.get(kind, 0) for kind in kinds)
        part = half_of(self._sizes.whole, self._sizes.smallest)
        size = min(self._choice.micro_batch, part)
        pace, device = self._setting.pace, self._setting.device
        exchange = exchange_seconds(pace.parameter_bytes, device, 2 * self._setting.num_ranks)
        # Parameters are gathered for forward and again for backward: half as much again each.
        seconds = pace.step(size, self._choice.recompute, part, 1.5 * exchange).total
        return self._knob(
            f"{2 * self._setting.num_ranks} devices, state divided",
            self.peak.num_bytes - state / 2,
            seconds,
            "more hardware",
        )

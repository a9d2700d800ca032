"""Crew: the ranks of one process, seen as one. What `Session` runs where the plan is in-process.

Every method does what the same method of `Rank` does, on all ranks together, and gives what it gives
on rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, final

from torch import nn

from anybatch.engine import Pulse, Watchdog
from anybatch.errors import InputError
from anybatch.events import Evaluated, Event, Resumed, RunEnded, RunStarted, Sink, StepDone
from anybatch.parallel import Wish
from anybatch.parallel.in_process import InProcess, InProcessRanks
from anybatch.plans import Plan
from anybatch.rank import Rank
from anybatch.state import Checkpoints
from anybatch.task import Task


@final
class Crew:
    """The ranks of a run of `task` under `plan`, from its construction to `close`.

    Args:
        task: what to train.
        plan: how; its `devices` are those of the ranks.
        sink: gets the events of rank 0.
        watchdog: watches the ranks.
        open_checkpoints: makes those of one rank; see `Rank`.

    Attributes:
        model: that of rank 0; the others hold the same weights.

    Raises what `Rank` raises, and `InputError` for a plan that ranks of one process cannot keep to.
    """

    def __init__(
        self,
        task: Task,
        plan: Plan,
        sink: Sink,
        watchdog: Watchdog | None = None,
        open_checkpoints: Callable[[], Checkpoints | None] = lambda: None,
    ) -> None:
        if plan.enforced and len(set(plan.devices) - {"cpu"}) < len(plan.devices):
            raise InputError(
                f"the plan holds each rank to a budget, but the ranks of one process on"
                f" {', '.join(plan.devices)} have memory in common: name each GPU once, or make"
                " enforced false."
            )
        self._ranks: dict[int, Rank] = {}
        self._threads = InProcessRanks(plan.devices, plan.shares)
        tasks = [group.own(task) for group in self._threads.groups]

        pulses = [
            watchdog.pulse(group.rank) if watchdog else Pulse(group.rank)
            for group in self._threads.groups
        ]

        def build(group: InProcess) -> None:
            reader = sink if group.rank == 0 else _nobody
            pulse = pulses[group.rank]
            with pulse.at_work("set-up"):
                self._ranks[group.rank] = Rank(
                    tasks[group.rank], plan, group, group.device, reader, pulse, open_checkpoints()
                )

        try:
            self._threads.run(build)
        except BaseException:
            self.close()
            raise
        self.model: nn.Module = self._ranks[0].model

    def close(self) -> None:
        """Leave the model and the process as they were found, but for the training."""
        try:
            self._threads.run(self._close)
        finally:
            self._threads.close()

    @contextmanager
    def to_be_evaluated(self) -> Iterator[None]:
        """See `Replica`."""
        with ExitStack() as stack:
            for rank in self._ranks.values():
                stack.enter_context(rank.to_be_evaluated())
            yield

    def save(self, at_once: bool = False) -> None:
        """See `Rank`."""
        self._threads.run(lambda group: self._ranks[group.rank].save(at_once))

    def saved(self, wait: bool = False) -> None:
        """See `Rank`: rank 0 saves for all."""
        self._ranks[0].saved(wait)

    def resume(self) -> Resumed | None:
        """See `Rank`."""
        return self._threads.run(lambda group: self._ranks[group.rank].resume())

    def begin(self) -> None:
        """See `Rank`."""
        self._threads.run(lambda group: self._ranks[group.rank].begin())

    def step(self) -> StepDone | None:
        """See `Rank`."""
        return self._threads.run(lambda group: self._ranks[group.rank].step())

    def take_checkpoint(self, step: int | None) -> Path:
        """See `Rank`."""
        return self._threads.run(lambda group: self._ranks[group.rank].take_checkpoint(step))

    def take_weights(self, path: Path, step: int, epoch: int) -> None:
        """See `Rank`."""
        self._threads.run(lambda group: self._ranks[group.rank].take_weights(path, step, epoch))

    def evaluate(self) -> Evaluated:
        """See `Rank`."""
        return self._threads.run(lambda group: self._ranks[group.rank].evaluate())

    def predict(self, data: Any, output: Callable[[nn.Module, Any], Any]) -> Iterator[Any]:
        """See `Rank`: rank 0 by itself."""
        return self._ranks[0].predict(data, output)

    def predict_all(self, data: Any, output: Callable[[nn.Module, Any], Any]) -> Any:
        """See `Rank`."""
        return self._threads.run(lambda group: self._ranks[group.rank].predict_all(data, output))

    def started(self) -> RunStarted:
        """See `Rank`."""
        return self._ranks[0].started()

    def ended(self, seconds: float, finished: bool, reason: str = "") -> RunEnded:
        """See `Rank`."""
        if not finished:
            return self._ranks[0].ended(seconds, finished, reason)
        return self._threads.run(
            lambda group: self._ranks[group.rank].ended(seconds, finished, reason)
        )

    @property
    def plan(self) -> Plan:
        """See `Rank`."""
        return self._ranks[0].plan

    @property
    def wish(self) -> Wish:
        """See `Rank`."""
        return self._ranks[0].wish

    @wish.setter
    def wish(self, wish: Wish) -> None:
        self._ranks[0].wish = wish

    @property
    def stops(self) -> bool:
        """See `Rank`."""
        return self._ranks[0].stops

    @stops.setter
    def stops(self, stops: bool) -> None:
        self._ranks[0].stops = stops

    @property
    def wished(self) -> Wish:
        """See `Rank`."""
        return self._ranks[0].wished

    @property
    def failed_together(self) -> bool:
        """See `Rank`."""
        return self._ranks[0].failed_together

    @property
    def num_steps(self) -> int:
        """See `Rank`."""
        return self._ranks[0].num_steps

    @property
    def total_steps(self) -> int | None:
        """See `Rank`."""
        return self._ranks[0].total_steps

    @property
    def evaluated_now(self) -> bool:
        """See `Rank`."""
        return self._ranks[0].evaluated_now

    @property
    def last_evaluation(self) -> Evaluated | None:
        """See `Rank`."""
        return self._ranks[0].last_evaluation

    @property
    def peak_bytes(self) -> int:
        """See `Rank`: of the device that used most."""
        return max(rank.peak_bytes for rank in self._ranks.values())

    def _close(self, group: InProcess) -> None:
        rank = self._ranks.pop(group.rank, None)
        if rank is not None:
            rank.close()


def _nobody(event: Event) -> None:
    """Only rank 0 has readers."""

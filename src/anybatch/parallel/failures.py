"""Failures: what a rank reports to the others after a failed attempt, and how all ranks react to it.

Every rank receives the same reports, so all ranks reach the same decision: a leaner plan if memory ran
out on a rank, a step without the bad samples if these are to be skipped, and an error if anything else
went wrong, since neither of the two would fix that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from anybatch.data.failure import Bad
from anybatch.errors import AnybatchError, InputError, PeerFailed, name_of
from anybatch.events import OutOfMemory
from anybatch.oom import MemoryFailure, as_memory_failure
from anybatch.plans import Plan

if TYPE_CHECKING:
    from anybatch.parallel.group import Group

T = TypeVar("T")

_LONG = 80  # characters


class Outdated(InputError):
    """This rank no longer trains what the ranks were set up for. No rank has kept anything of the step,
    and no rank has failed in another way, so all ranks can be set up again."""


class PeerOutdated(PeerFailed):
    """Another rank is `Outdated`."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """The report of one rank. Holds plain values only, since it is sent over the network.

    Attributes:
        failure: how memory ran out, or None.
        phase: what the rank was doing.
        in_use_bytes: memory in use on the device at the time of the failure.
        fragmented_bytes: part of it that the allocator holds in unused fragments; None: unknown.
        error: type and first line of an error of any kind, and its notes; empty: no error.
        exit_status: exit status of a command that ends with the error.
        bad: samples that caused the error, if the step can be done without them.
        outdated: whether the error is `Outdated`.
    """

    failure: MemoryFailure | None = None
    phase: str = ""
    in_use_bytes: int = 0
    fragmented_bytes: int | None = None
    error: str = ""
    exit_status: int = 1
    bad: tuple[Bad, ...] = ()
    outdated: bool = False

    @classmethod
    def of(cls, error: Exception, phase: str = "", meter: Any = None) -> RankReport:
        """The report on `error`. `meter`: the engine's meter of the memory of this rank."""
        status = error.exit_status if isinstance(error, AnybatchError) else 1
        failure = as_memory_failure(error)
        used, pieces = (meter.used_bytes(), meter.fragmented_bytes()) if meter else (0, None)
        sentences = (first_line(error), *getattr(error, "__notes__", ()))
        what = " ".join(f"{sentence.rstrip('.')}." for sentence in sentences)
        outdated = isinstance(error, Outdated)
        return cls(failure, phase, used, pieces, what, status, outdated=outdated)

    @property
    def failed(self) -> bool:
        """Whether the rank has nothing to contribute."""
        return bool(self.error)

    @property
    def can_be_mended(self) -> bool:
        """Whether a leaner plan or other samples could fix the failure."""
        return self.failure is not None or bool(self.bad)


def first_line(error: BaseException) -> str:
    """`error` in one line, with its type."""
    text = str(error)
    return f"{name_of(error)}: {text.splitlines()[0]}" if text else name_of(error)


def first_error(mine: Exception | None, everyone: Sequence[RankReport], step: int | None) -> None:
    """Raise an error that no plan can fix, if a rank has one: the rank's own error on that rank, and
    `PeerFailed` on the others. `Outdated` and `PeerOutdated` are raised only if no rank failed in
    another way, and then on all ranks."""
    grave = [
        rank for rank, report in enumerate(everyone) if report.failed and not report.can_be_mended
    ]
    failed = [rank for rank in grave if not everyone[rank].outdated]
    if mine is not None and not (failed and isinstance(mine, Outdated)):
        raise mine
    if not grave:
        return
    rank = (failed or grave)[0]
    report = everyone[rank]
    where = "" if step is None else f" in step {step}"
    kept = "" if step is None else " Nothing of the step was kept on any rank."
    kind = PeerFailed if failed else PeerOutdated
    raise kind(
        f"rank {rank} failed{where} with {report.error.rstrip('.')}.{kept}", report.exit_status
    )


def together(group: Group, work: Callable[[], T]) -> T:
    """Return the result of `work()` if it succeeds on all ranks.

    Raises the error of `work` on a rank where it fails, and `PeerFailed` on the others.
    """
    if group.size == 1:
        return work()
    wrong: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as error:
        wrong = error
    report = RankReport() if wrong is None else replace(RankReport.of(wrong), failure=None)
    everyone = group.exchange(report)
    first_error(wrong, everyone, None)
    return result


def same_on_all(group: Group, mine: Mapping[str, str], remedy: str) -> None:
    """Raise `InputError` with `remedy`, on all ranks, if a value of `mine` is not the same on all. The
    keys describe the values and are the same on all ranks; short values are shown."""
    everyone = group.exchange(mine)
    for what, value in everyone[0].items():
        for rank, other in enumerate(everyone):
            if other[what] != value:
                values = f" ({value} and {other[what]})" if len(value) < _LONG else ""
                raise InputError(f"{what} of rank 0 and rank {rank} differ{values}: {remedy}.")


def memory_events(
    everyone: Sequence[RankReport], step: int, micro_batch: int, plan: Plan, then: str = ""
) -> Iterator[OutOfMemory]:
    """An event for each rank that ran out of memory. `then`: describes the choice for the retry."""
    for rank, report in enumerate(everyone):
        if report.failure is not None:
            yield OutOfMemory(
                time=time.time(),
                step=step,
                rank=rank,
                phase=report.phase,
                micro_batch=micro_batch,
                requested_bytes=report.failure.requested_bytes,
                in_use_bytes=report.in_use_bytes,
                fragmented_bytes=report.fragmented_bytes,
                budget_bytes=plan.budget_bytes,
                message=report.failure.message,
                then=then,
            )

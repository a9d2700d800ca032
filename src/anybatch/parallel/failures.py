"""What a rank tells the others after an attempt that failed, and what all of them make of it.

Every rank gets the same list, so every rank comes to the same end: a leaner plan if memory ran out
somewhere, a step without the samples that turned out bad where these are to be skipped, and an error if
anything else went wrong, since that would not be mended by either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
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


class Outdated(InputError):
    """What this rank trains is no longer what the ranks have set up for. Nothing of the step was kept
    anywhere, and no rank has failed in another way: all of them may set up anew."""


class PeerOutdated(PeerFailed):
    """The same, of another rank."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank's word. Holds text only: it crosses the network.

    Attributes:
        failure: how memory ran out, or None.
        phase: what was being done.
        in_use_bytes: on the device, when it failed.
        fragmented_bytes: of these, held by the allocator in pieces that nobody uses; None: unknown.
        error: type and first line of an error of any kind, and its notes; empty: none.
        exit_status: of a command that ends with the error.
        bad: samples that the error is about, if the step can be done without them.
        outdated: the error is `Outdated`.
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
        """What there is to tell of `error`. `meter`: the engine's, of the memory of this rank."""
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
        """Whether a leaner plan or other samples would do."""
        return self.failure is not None or bool(self.bad)


def first_line(error: BaseException) -> str:
    """`error` in one line, with its type."""
    text = str(error)
    return f"{name_of(error)}: {text.splitlines()[0]}" if text else name_of(error)


def first_error(mine: Exception | None, everyone: Sequence[RankReport], step: int | None) -> None:
    """Raises the error that no plan mends, if a rank has one: on that rank its own, on the others
    `PeerFailed`. `Outdated` and `PeerOutdated` only where they are raised on all ranks."""
    grave = [rank for rank, told in enumerate(everyone) if told.failed and not told.can_be_mended]
    failed = [rank for rank in grave if not everyone[rank].outdated]
    if mine is not None and not (failed and isinstance(mine, Outdated)):
        raise mine
    if not grave:
        return
    rank = (failed or grave)[0]
    told = everyone[rank]
    where = "" if step is None else f" in step {step}"
    kept = "" if step is None else " Nothing of the step was kept on any rank."
    kind = PeerFailed if failed else PeerOutdated
    raise kind(f"rank {rank} failed{where} with {told.error.rstrip('.')}.{kept}", told.exit_status)


def together(group: Group, work: Callable[[], T]) -> T:
    """The result of `work()`, if it succeeds on all ranks.

    Raises its own error on a rank where it does not, and `PeerFailed` on the others.
    """
    if group.size == 1:
        return work()
    wrong: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as error:
        wrong = error
    told = RankReport() if wrong is None else replace(RankReport.of(wrong), failure=None)
    everyone = group.exchange(told)
    first_error(wrong, everyone, None)
    return result


def memory_events(
    everyone: Sequence[RankReport], step: int, micro_batch: int, plan: Plan, then: str = ""
) -> Iterator[OutOfMemory]:
    """An event for each rank that ran out of memory. `then`: under what it is done again."""
    for rank, told in enumerate(everyone):
        if told.failure is not None:
            yield OutOfMemory(
                time=time.time(),
                step=step,
                rank=rank,
                phase=told.phase,
                micro_batch=micro_batch,
                requested_bytes=told.failure.requested_bytes,
                in_use_bytes=told.in_use_bytes,
                fragmented_bytes=told.fragmented_bytes,
                budget_bytes=plan.budget_bytes,
                message=told.failure.message,
                then=then,
            )

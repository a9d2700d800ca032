"""Checkpoints: saved while training continues, verified, and loaded.

A save must neither stop nor end training. The state is copied (or, without room for a copy, written
directly), and a thread writes the copy while the next steps run. A checkpoint gets its name when every
byte of every rank is on the disk (see `folder.py`), and every byte is compared with its checksum before
a run uses it. Threads do not use collectives, in which others would wait for a rank that fails: the
result of a save is communicated by files, and by the next call that all ranks make together.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from anybatch.errors import AnybatchError, InputError, PeerFailed
from anybatch.oom import is_memory_error
from anybatch.parallel import Group, from_rank_0
from anybatch.process.threads import begin
from anybatch.state.checksummed_blocks import DTYPES, DataFile
from anybatch.state.folder import Folder, describe_os_error
from anybatch.state.manifest import Manifest, data_name, read_manifest

if TYPE_CHECKING:
    from anybatch.state.storage import Writer

_VERIFY_THREADS = 4  # one file each


@dataclass(frozen=True, slots=True)
class Content:
    """The contents of a checkpoint, as seen by one rank.

    Attributes:
        tensors: by name. A DTensor is this rank's part of a tensor; a plain one is the same on all
            ranks, unless its name begins with `rank-N.`, in which case only rank N has it.
        facts: values that JSON can represent (tuples are read back as lists), the same on all ranks.
    """

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Saved:
    """A completed checkpoint.

    Attributes:
        num_bytes: size of its tensors, over all ranks.
        seconds: time from the call of `save` until it was complete.
        held_seconds: part of this time during which `save` blocked training.
    """

    step: int
    folder: Path
    num_bytes: int
    seconds: float
    held_seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A checkpoint that could not be written; none of its files remain. `reason` is a sentence."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """An intact checkpoint.

    Attributes:
        tensors: shape and dtype of each of its tensors (whole, not a rank's part), by name.
        passed_over: sentences about newer checkpoints that are not intact.
    """

    step: int
    folder: Path
    facts: Mapping[str, Any]
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    passed_over: tuple[str, ...]
    manifest: Manifest = field(repr=False)


@final
class Checkpoints:
    """The checkpoints of a run, in one folder that all ranks can access.

    Args:
        folder: created when it is needed.
        group: the ranks.
        keep: number of most recent checkpoints to keep, in addition to the one with the best score.
    """

    def __init__(self, folder: Path, group: Group, *, keep: int = 3) -> None:
        # Half a second, for runs with checkpoints alone, and here, not in a save: it takes memory.
        from anybatch.state import storage

        self._folder = Folder(Path(folder))
        self._group = group
        self._keep = keep
        self._storage = storage
        self._job: Writer | None = None
        self._is_unseen = False
        self._outcomes: list[Saved | Failed] = []
        self._passed_over: set[Path] = set()

    def save(
        self, content: Content, step: int, *, score: float | None = None, stage: bool = True
    ) -> None:
        """Saves `content` as the checkpoint of `step`. All ranks must call it, at the same step.

        Waits for the previous save if it is still in progress. Disk errors and lack of memory result in
        `Failed`, and training continues.

        Args:
            content: what to save; may be modified after this returns.
            step: number of committed steps, from 0. A checkpoint of the same step is replaced.
            score: lower is better; the checkpoint with the best known score is kept. None: not known.
            stage: whether to copy the state and write the copy in the background. If not, or if there
                is no room for the copy, the state is written before this returns, one block at a time.

        Raises `PeerLost` if a rank is gone.
        """
        from torch.distributed.checkpoint import CheckpointException

        self._settle()
        group = self._group
        job = self._storage.Writer(
            self._folder,
            content.tensors,
            content.facts,
            step,
            None if score is None else float(score),
            rank=group.rank,
            stage=stage,
            is_unseen=self._is_unseen,
        )
        try:
            try:
                job.run(alone=group.size == 1)
            finally:
                self._is_unseen = job.is_unseen
        except CheckpointException as error:
            reason = None
            try:
                reason = _first_failure(error, group.rank)
            finally:
                self._drop(job, reason)
            return
        except BaseException:
            self._drop(job, None)
            raise
        self._job = job
        job.held_seconds = time.monotonic() - job.started
        if stage:
            job.ended = begin(lambda: self._carry_out(job))
        if job.ended is None:  # no thread: its stack would count in a budget, or has no room
            self._carry_out(job)

    def finished(self) -> list[Saved | Failed]:
        """Returns, on rank 0, the saves that have ended since the last call, in order. Never blocks. On
        the other ranks the list is empty."""
        count = len(self._outcomes)  # a thread may append meanwhile
        ended, self._outcomes[:count] = self._outcomes[:count], []
        return ended

    def wait(self) -> None:
        """Waits until no save of this rank (on rank 0: of any rank) is in progress."""
        if self._job is not None and self._job.ended is not None:
            self._job.ended.wait()

    def newest(self, step: int | None = None, *, reads_only: str = "") -> Found | None:
        """Returns the newest intact checkpoint, with every byte read and checked; None if there are no
        checkpoints. All ranks must call it, and get the same result.

        Args:
            step: consider only the checkpoint of this step.
            reads_only: read and check only the tensors whose names begin with this prefix, and leave
                the folder as it is. Otherwise what killed writers left is deleted.

        Raises:
            InputError: there are checkpoints but none is intact, or none is of `step`; or a rank cannot
                access the folder.
            PeerLost: a rank is gone.
        """
        self._settle()
        search = partial(self._search, step, reads_only)
        manifest, name, passed_over = from_rank_0(search, self._group)
        if manifest is None:
            return None
        folder = self._folder.path / name
        blind = self._group.exchange(_unseen(folder, manifest, self._group.rank))
        if wrong := next(filter(None, blind), ""):
            raise InputError(wrong)
        return Found(
            manifest.step,
            folder,
            manifest.facts,
            {
                name: (tuple(record.shape), DTYPES[record.dtype])
                for name, record in manifest.tensors.items()
            },
            tuple(passed_over),
            manifest,
        )

    def load(self, found: Found, tensors: Mapping[str, Tensor]) -> None:
        """Fills `tensors` with the data that `found` holds under their names. All ranks must call it;
        each rank may request different names.

        Plain tensors are filled completely, DTensors with this rank's part, however the parts were cut
        when they were saved. Floating point numbers are converted to the dtype of the tensor.

        Raises:
            InputError: a tensor is missing or has a different shape or kind, in which case none is
                modified; or a byte differs from what was written, in which case their contents are
                undefined.
            PeerFailed: another rank failed.
            PeerLost: another rank is gone.
        """
        from torch.distributed.checkpoint import CheckpointException

        reader = self._storage.Reader(found.folder, found.manifest, tensors)
        try:
            reader.run(alone=self._group.size == 1)
        except CheckpointException as error:
            failures = {rank: pair[0] for rank, pair in error.failures.items()}
            own = failures.get(self._group.rank)
            if own is not None and not isinstance(own, InputError):
                raise own from None
            rank = min(failures)
            first = own or failures[rank]
            if isinstance(first, InputError):
                raise InputError(
                    f"the checkpoint {found.folder} cannot be loaded: {str(first).rstrip('.')}."
                ) from None
            raise PeerFailed(
                f"rank {rank} could not load {found.folder}: {_sentence(first)}"
            ) from None

    def close(self, lost: str = "") -> None:
        """Waits for the save in progress. No thread remains.

        Args:
            lost: sentence about a rank that is lost, whose part of the save is not waited for.
        """
        if self._job is not None:
            self._job.failure = self._job.failure or lost
        self.wait()
        if self._group.rank == 0:
            self._folder.leave()

    # -------------------------------------------------------------------------------------- saving

    def _settle(self) -> None:
        """Waits until the previous save has ended on all ranks."""
        job = self._job
        if job is None:
            return
        job.written.wait()
        faults = self._group.exchange(job.wrong)
        job.failure = next(filter(None, faults), "")
        self.wait()
        self._job = None

    def _carry_out(self, job: Writer) -> None:
        """Does the remaining work of a save after all ranks have agreed on it; runs in a thread."""
        rank = self._group.rank
        try:
            job.write_pending()
        except BaseException as error:
            job.pending = None
            job.wrong = f"rank {rank}: {_sentence(error)}" if rank else _sentence(error)
            if rank:
                with contextlib.suppress(OSError):
                    job.tell_failure(job.wrong)
            else:
                self._drop(job, job.wrong)
            if not isinstance(error, Exception):
                raise
        finally:
            job.written.set()
        if rank or job.wrong:
            return
        try:
            folder, manifest = job.complete()
        except BaseException as error:
            self._drop(job, _sentence(error))
            if not isinstance(error, Exception):
                raise
            return
        seconds = time.monotonic() - job.started
        held = seconds if job.ended is None else job.held_seconds
        saved = Saved(job.step, folder, manifest.num_bytes, seconds, held)
        self._passed_over.discard(folder)
        with contextlib.suppress(Exception):  # the next save tries again
            self._prune(job.step)
        job.release()
        self._outcomes.append(saved)

    def _drop(self, job: Writer, reason: str | None) -> None:
        """Discards a save that failed. Rank 0 deletes its files, and reports a `reason`."""
        job.pending = None
        if self._group.rank == 0:
            if job.partial is not None:
                shutil.rmtree(job.partial, ignore_errors=True)
            job.release()
            if reason is not None:
                self._outcomes.append(
                    Failed(
                        job.step,
                        f"the checkpoint of step {job.step} could not be written to"
                        f" {self._folder.path}: {reason.rstrip('.')}.",
                    )
                )

    def _prune(self, newest: int) -> None:
        """Deletes checkpoints older than `newest`, except for the last ones and the best."""
        scores: dict[Path, float] = {}
        good: list[Path] = []
        others: list[tuple[int, Path]] = []
        for step, path in self._folder.complete():
            try:
                manifest = None if path in self._passed_over else read_manifest(path)
            except InputError:
                manifest = None
            if manifest is not None:
                good.append(path)
                if manifest.score is not None and not math.isnan(manifest.score):
                    scores[path] = manifest.score
            others.append((step, path))
        kept = set(good[: self._keep])
        if scores:
            kept.add(min(scores, key=lambda path: scores[path]))  # the newest of several
        for step, path in others:
            if step < newest and path not in kept:
                self._folder.remove(path, step)

    # ----------------------------------------------------------------------------------- searching

    def _search(self, wanted: int | None, only: str) -> tuple[Manifest | None, str, list[str]]:
        if not only and self._folder.path.exists():
            with contextlib.suppress(InputError, OSError), self._folder.locked(seconds=0.0):
                self._folder.clear()
        faults: list[str] = []
        try:
            there = self._folder.complete()
        except OSError as error:
            raise InputError(describe_os_error(error)) from None
        if wanted is not None:
            steps = ", ".join(f"{step:,}" for step, _ in reversed(there)) or "none is there"
            there = [(step, path) for step, path in there if step == wanted]
            if not there:
                raise InputError(
                    f"there is no checkpoint of step {wanted:,} in {self._folder.path}: give one of"
                    f" step {steps}."
                )
        for step, path in there:
            try:
                manifest = read_manifest(path)
                _verify(path, manifest, step, only)
                return manifest, path.name, faults
            except InputError as error:
                self._passed_over.add(path)
                faults.append(f"the checkpoint {path} is not intact: {str(error).rstrip('.')}.")
        if faults and wanted is not None:
            raise InputError(f"{faults[0]} Name another step, or bring back a copy of it.")
        if faults:
            raise InputError(
                f"none of the {len(faults)} checkpoints in {self._folder.path} is intact:"
                f" {' '.join(faults)} Bring back a copy of one, or name another folder to start anew."
            )
        return None, "", []


def _verify(folder: Path, manifest: Manifest, step: int, only: str = "") -> None:
    """Reads and checks the tensors whose names begin with `only`. Raises `InputError`."""
    if manifest.step != step:
        raise InputError(f"its manifest is of step {manifest.step}")
    blocks: list[list[tuple[int, int, int, str]]] = [[] for _ in manifest.files]
    for name, record in manifest.tensors.items():
        if not name.startswith(only):
            continue
        for part in record.slices:
            num_bytes = math.prod(part.sizes) * DTYPES[record.dtype].itemsize
            for number, checksum in enumerate(part.checksums):
                begin = number * manifest.block_bytes
                size = min(manifest.block_bytes, num_bytes - begin)
                blocks[part.file].append((part.start + begin, size, checksum, name))

    def verify(number: int) -> None:
        buffer = memoryview(bytearray(max((size for _, size, *_ in blocks[number]), default=0)))
        with closing(DataFile(folder / data_name(number), manifest.files[number])) as file:
            for start, size, checksum, name in sorted(blocks[number]):
                try:
                    file.read(buffer[:size], start, checksum)
                except InputError as error:
                    raise InputError(f"{error} (in {name[:100]!r})") from None

    if len(blocks) < 2:  # without a thread, whose stack would count in a budget
        list(map(verify, range(len(blocks))))
        return
    with ThreadPoolExecutor(_VERIFY_THREADS) as pool:
        list(pool.map(verify, range(len(blocks))))


def _unseen(folder: Path, manifest: Manifest, rank: int) -> str:
    """Returns why this rank cannot read the checkpoint that rank 0 found; empty if it can."""
    try:
        if read_manifest(folder) == manifest:
            return ""
        reason = "another checkpoint is there"
    except InputError as error:
        reason = str(error)
    return (
        f"rank {rank} does not see the checkpoint {folder} that rank 0 found ({reason}): checkpoints"
        " need a folder that all machines share."
    )


def _first_failure(error: Any, rank: int) -> str:
    """Describes the failure of the lowest rank that failed. Raises that of this rank if it was
    interrupted."""
    failures = {number: pair[0] for number, pair in error.failures.items()}
    own = failures.get(rank)
    if own is not None and not isinstance(own, Exception):
        raise own from None
    first = min(failures)
    sentence = _sentence(failures[first])
    return sentence if len(failures) == 1 and not first else f"rank {first}: {sentence}"


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError):
        return describe_os_error(error)
    if isinstance(error, AnybatchError):
        return str(error)
    text = (str(error).splitlines() or [""])[0]
    if is_memory_error(error):
        return f"memory ran out ({text or type(error).__name__})"
    return f"{type(error).__name__}: {text}"

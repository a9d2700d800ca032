"""Storage for `torch.distributed.checkpoint`: writes and reads what its planners plan.

torch's planners are used unchanged. Its own storage is not used: it pickles, writes from within
collectives, and checks nothing that it reads. Here the collective part is short: all ranks agree on who
writes what, and rank 0 collects where each slice begins. Writing needs no agreement, so a rank that
fails cannot leave another one in a collective: each rank writes its file, then a small sealed part with
lengths and checksums, and rank 0 writes the manifest once it sees all parts.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast, final

import torch
from pydantic import Field
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
    load,
    save,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from anybatch.compute.dtensor import local_part
from anybatch.errors import InputError
from anybatch.parallel.vote import calling
from anybatch.state.checksummed_blocks import (
    DTYPES,
    DataFile,
    dtype_name,
    read_box,
    staged,
    write_tensor,
)
from anybatch.state.folder import Folder, describe_os_error, sync
from anybatch.state.manifest import (
    NAME,
    Checksum,
    Count,
    Manifest,
    Record,
    Slice,
    TensorRecord,
    data_name,
    read_small,
)

UNSEEN_SECONDS = 10.0
"""How long a rank waits for the folder that rank 0 created: shared file systems may show it late."""

UNSEEN_AGAIN_SECONDS = 0.5
"""The same after a save whose folder the rank has not seen."""

STALL_SECONDS = 120.0
"""How long rank 0 waits for the parts of the other ranks while none of their files grows."""

_MOST_PART_BYTES = 256 << 20


class Part(Record):
    """What seals the file of a rank: its length and the checksums of each slice, by the slice's start;
    or why it could not be written."""

    num_bytes: Count = 0
    checksums: dict[str, list[Checksum]] = Field(default_factory=dict)
    wrong: str = ""


# ------------------------------------------------------------------------------------------ writing


@final
@dataclass(eq=False)
class Writer(StorageWriter):
    """One save, as seen by one rank.

    Attributes:
        tensors, facts, step, score, stage: see `Checkpoints.save`.
        started: start time, by the monotonic clock.
        held_seconds: how long the save blocked training.
        partial: the hidden folder to write in, once it is known.
        pending: copies of this rank's slices that are not written yet; None: all are written.
        release: on rank 0, releases the lock of the folder.
        written: set when the bytes of this rank are written, or will not be.
        wrong: why they are not written.
        is_unseen: whether this rank does not see the folder; before it looks, that of the last save.
        failure: failure of another rank, if any: nothing more comes from it.
        ended: set when its thread has ended; None: it has no thread.
        metadata, results: on rank 0, torch's plan, and where each rank's slices begin in its file.
    """

    folder: Folder
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]
    step: int
    score: float | None
    rank: int
    stage: bool
    started: float = field(default_factory=time.monotonic)
    held_seconds: float = 0.0
    ended: threading.Event | None = None
    written: threading.Event = field(default_factory=threading.Event)
    wrong: str = ""
    partial: Path | None = None
    pending: list[Tensor] | None = None
    release: Callable[[], object] = lambda: None
    is_unseen: bool = False
    failure: str = ""
    metadata: Metadata | None = None
    results: Sequence[Sequence[WriteResult]] = ()

    def run(self, alone: bool) -> None:
        """Plans and lays out the save, on all ranks together.

        Raises `CheckpointException` on all ranks if it fails on any, `PeerLost` if one is gone.
        """
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with calling("while a checkpoint was planned"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save(_detached(self.tensors), storage_writer=self, planner=planner, no_dist=alone)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Checks the content. Raises `InputError` if it cannot be saved."""
        for name, tensor in self.tensors.items():
            if fault := _strange(tensor):
                raise InputError(f"{name!r} {fault}")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: creates the folder, and adds its name to the plans."""
        try:
            self.release = self.folder.lock()
            self.folder.clear()
            self.partial = self.folder.begin(self.step)
        except OSError as error:
            raise InputError(describe_os_error(error)) from None
        return [replace(plan, storage_data=self.partial.name) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Lays out the slices of this rank; copies them to be written later, or writes them now."""
        self.partial = self.folder.path / str(plan.storage_data)
        seconds = UNSEEN_AGAIN_SECONDS if self.is_unseen else UNSEEN_SECONDS
        self.is_unseen = True
        _await_folder(self.partial, self.rank, seconds)
        self.is_unseen = False
        tensors, results, start = [], [], 0
        for item in plan.items:
            assert item.tensor_data is not None
            tensor = cast(Tensor, planner.resolve_data(item)).detach()
            if tensor.shape != item.tensor_data.chunk.sizes:
                raise InputError(
                    f"{item.index.fqn!r} has a part of shape {tuple(tensor.shape)} on rank"
                    f" {self.rank} where {tuple(item.tensor_data.chunk.sizes)} was planned"
                )
            num_bytes = tensor.numel() * tensor.element_size()
            results.append(WriteResult(item.index, num_bytes, storage_data=start))
            if num_bytes:
                tensors.append(tensor)
                start += num_bytes
        if self.stage:
            self.pending = _staged(tensors)
        if self.pending is None:
            try:
                write_part(self.partial, self.rank, tensors)
            except OSError as error:
                raise InputError(describe_os_error(error)) from None
        return _ready(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.metadata, self.results = metadata, results

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def write_pending(self) -> None:
        """Writes and seals the copies, if there are any. Raises `OSError`."""
        assert self.partial is not None
        if self.pending is not None:
            write_part(self.partial, self.rank, self.pending)

    def tell_failure(self, reason: str) -> None:
        """Informs rank 0 that the part of this rank will not be written. Raises `OSError`."""
        assert self.partial is not None
        _seal(self.partial, self.rank, Part(wrong=reason))

    def complete(self) -> tuple[Path, Manifest]:
        """On rank 0, once its own part is sealed: waits for the parts of the other ranks, and publishes
        the checkpoint.

        Raises `InputError` or `OSError`, in which case the partial folder still exists.
        """
        assert self.partial is not None
        manifest = self._manifest(self._await_parts(self.partial))
        _write_synced(self.partial / NAME, manifest.to_bytes())
        for rank in range(len(self.results)):
            _part_path(self.partial, rank).unlink()
        return self.folder.publish(self.partial, self.step), manifest

    def _await_parts(self, partial: Path) -> list[Part]:
        num_files = len(self.results)
        parts: dict[int, Part] = {}
        grown_at, grown = time.monotonic(), -1
        pause = 0.005
        while True:
            failure = self.failure  # before parts are read, which may be complete
            for rank in range(num_files):
                if rank not in parts and _part_path(partial, rank).exists():
                    parts[rank] = _read_part(partial, rank)
            if len(parts) == num_files:
                return [parts[rank] for rank in range(num_files)]
            if failure:
                raise InputError(failure)
            now = sum(_size(partial / data_name(rank)) for rank in range(num_files))
            if now != grown:
                grown_at, grown = time.monotonic(), now
            first = min(set(range(num_files)) - parts.keys())
            if time.monotonic() - grown_at > STALL_SECONDS:
                raise InputError(
                    f"nothing came from rank {first} for {STALL_SECONDS:.0f} s: it is gone, its disk"
                    " hangs, or its folder of this name is another one"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def _manifest(self, parts: Sequence[Part]) -> Manifest:
        assert self.metadata is not None
        places = {
            (result.index.fqn, _offset(result.index)): (rank, result)
            for rank, of_rank in enumerate(self.results)
            for result in of_rank
        }
        tensors = {}
        for name, record in self.metadata.state_dict_metadata.items():
            assert isinstance(record, TensorStorageMetadata)
            slices = []
            for chunk in record.chunks:
                rank, written = places[name, tuple(chunk.offsets)]
                if written.size_in_bytes:
                    slices.append(
                        Slice(
                            offsets=list(chunk.offsets),
                            sizes=list(chunk.sizes),
                            file=rank,
                            start=written.storage_data,
                            checksums=parts[rank].checksums[str(written.storage_data)],
                        )
                    )
            tensors[name] = TensorRecord(
                dtype=dtype_name(record.properties.dtype), shape=list(record.size), slices=slices
            )
        return Manifest(
            step=self.step,
            score=self.score,
            files=[part.num_bytes for part in parts],
            tensors=tensors,
            facts=dict(self.facts),
        )


def write_part(partial: Path, rank: int, tensors: list[Tensor]) -> None:
    """Writes and seals the file of `rank`, and empties `tensors`. Raises `OSError`."""
    checksums: dict[str, list[int]] = {}
    start = 0
    descriptor = os.open(partial / data_name(rank), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        tensors.reverse()
        while tensors:
            tensor = tensors.pop()
            checksums[str(start)] = write_tensor(descriptor, tensor)
            start += tensor.numel() * tensor.element_size()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    _seal(partial, rank, Part(num_bytes=start, checksums=checksums))


def _seal(partial: Path, rank: int, part: Part) -> None:
    path = _part_path(partial, rank)
    draft = path.with_suffix(".draft")
    _write_synced(draft, part.model_dump_json().encode())
    draft.rename(path)
    sync(partial)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _staged(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """Returns copies in host memory; None if there is no room for them."""
    copies: list[Tensor] = []
    try:
        for tensor in tensors:
            copies.append(staged(tensor))
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
    except (RuntimeError, MemoryError):  # running out of pinned memory raises other errors
        return None
    return copies


def _await_folder(partial: Path, rank: int, seconds: float) -> None:
    """Waits until this rank sees the folder, while all ranks can still be told that it does not."""
    deadline = time.monotonic() + seconds
    while not partial.exists():
        if time.monotonic() > deadline:
            raise InputError(
                f"rank {rank} does not see {partial}, which rank 0 made: checkpoints need a folder that"
                " all machines share"
            )
        time.sleep(0.1)


def _part_path(partial: Path, rank: int) -> Path:
    return partial / f"rank-{rank}.sealed"


def _read_part(partial: Path, rank: int) -> Part:
    part = Part.model_validate_json(read_small(_part_path(partial, rank), _MOST_PART_BYTES))
    if part.wrong:
        raise InputError(part.wrong)
    if (size := _size(partial / data_name(rank))) != part.num_bytes:
        raise InputError(
            f"{data_name(rank)} has {size:,} bytes where rank {rank} wrote {part.num_bytes:,}"
        )
    return part


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _ready(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


# ------------------------------------------------------------------------------------------ reading


@final
@dataclass(eq=False)
class Reader(StorageReader):
    """One load, as seen by one rank: fills `tensors` from the checkpoint in `folder`, whose `manifest`
    has been checked."""

    folder: Path
    manifest: Manifest
    tensors: Mapping[str, Tensor]

    def run(self, alone: bool) -> None:
        """Fills the tensors, on all ranks together.

        Raises `CheckpointException` on all ranks if it fails on any, `PeerLost` if one is gone.
        """
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with calling("while a checkpoint was loaded"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(_detached(self.tensors), storage_reader=self, planner=planner, no_dist=alone)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        # Also called before the tensors are checked, so it contains only requested ones.
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=DTYPES[record.dtype]),
                    torch.Size(record.shape),
                    [
                        ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
                        for part in record.slices
                    ],
                )
                for name, record in self.manifest.tensors.items()
                if name in self.tensors
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Checks the tensors. Raises `InputError` if one does not fit, before any is modified."""
        faults = []
        for name, tensor in self.tensors.items():
            record = self.manifest.tensors.get(name)
            if record is None:
                faults.append(f"{name!r} is not in it")
            elif fault := _misfit(tensor, record):
                faults.append(f"{name!r} {fault}")
        if faults:
            more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
            raise InputError(f"it is of something else: {'; '.join(faults[:3])}{more}")

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads and checks slice by slice, in the order in which they are stored in the files."""
        manifest = self.manifest
        found: dict[tuple[str, tuple[int, ...]], Slice] = {
            (name, tuple(part.offsets)): part
            for name in {item.dest_index.fqn for item in plan.items}
            for part in manifest.tensors[name].slices
        }
        wanted: dict[int, list[tuple[Slice, ReadItem]]] = {}
        for item in plan.items:
            part = found[item.storage_index.fqn, _offset(item.storage_index)]
            wanted.setdefault(part.file, []).append((part, item))
        for number, of_file in wanted.items():
            path = self.folder / data_name(number)
            with closing(DataFile(path, manifest.files[number])) as file:
                for part, item in sorted(of_file, key=lambda pair: pair[0].start):
                    self._read_item(file, part, item, planner)
        return _ready(None)

    def _read_item(self, file: DataFile, part: Slice, item: ReadItem, planner: LoadPlanner) -> None:
        target = cast(Tensor, planner.resolve_tensor(item)).detach()
        dtype = DTYPES[self.manifest.tensors[item.storage_index.fqn].dtype]
        ends = zip(item.storage_offsets, item.lengths, strict=True)
        box = tuple(slice(start, start + size) for start, size in ends)
        blocks = self.manifest.block_bytes
        read_box(file, part.start, part.sizes, dtype, blocks, part.checksums, box, target)
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _detached(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the tensors in the form that planners take. Meta tensors, which planners would give
    values, are replaced by a placeholder, and refused later, where all ranks are informed."""
    return {name: "" if one.is_meta else one.detach() for name, one in tensors.items()}


def _offset(index: MetadataIndex) -> tuple[int, ...]:
    return tuple(index.offset or ())


# ----------------------------------------------------------------------------------------- checking


def _strange(tensor: Tensor) -> str:
    tensor = local_part(tensor)
    if is_traceable_wrapper_subclass(tensor):
        return f"is a {type(tensor).__name__}: give the plain tensors that it is made of"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}: give it dense, or its parts by name"
    if tensor.is_meta:
        return "has no values (it is on the meta device)"
    if dtype_name(tensor.dtype) not in DTYPES:
        return f"is of dtype {tensor.dtype}, which is more than its numbers: give it dequantised"
    return ""


def _misfit(tensor: Tensor, record: TensorRecord) -> str:
    """Returns why `tensor` cannot be filled from `record`; empty if it can."""
    if fault := _strange(tensor):
        return fault
    if list(tensor.shape) != record.shape:
        return f"has the shape {tuple(record.shape)} there and {tuple(tensor.shape)} here"
    saved = DTYPES[record.dtype]
    if saved != tensor.dtype and not (saved.is_floating_point and tensor.is_floating_point()):
        return f"is {record.dtype} there and {dtype_name(tensor.dtype)} here"
    return ""

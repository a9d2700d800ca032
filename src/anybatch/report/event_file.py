"""One file as TensorBoard reads it, written record by record.

torch's `SummaryWriter` hands records to a thread and a queue. Where the disk is full that thread dies
with a traceback, and what it had not written is lost without a word; and a process that is killed
loses up to two minutes. Here a record is on its way to the disk when the call returns, and a failure
is raised where it can be told. The records themselves are made by tensorboard's own code.
"""

from __future__ import annotations

import io
import socket
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, final

from anybatch.errors import InputError
from anybatch.files import Records

_PREFIX = "events.out.tfevents."


class _Tensorboard(NamedTuple):
    """What is used of tensorboard. It makes its classes when it is imported, so they have no types."""

    event: Any
    summary: Any
    record_writer: Any
    text: Any
    hparams: Any


@cache
def _tensorboard() -> _Tensorboard:
    return _Tensorboard(
        import_module("tensorboard.compat.proto.event_pb2"),
        import_module("tensorboard.compat.proto.summary_pb2"),
        import_module("tensorboard.summary.writer.record_writer"),
        import_module("tensorboard.plugins.text.summary_v2"),
        import_module("tensorboard.plugins.hparams.summary_v2"),
    )


def check_tensorboard() -> None:
    """Import tensorboard: here, so that what that takes of memory is not counted as training's. Raises
    `InputError` if it cannot be."""
    try:
        _tensorboard()
    except ImportError as error:
        raise InputError(
            f"a log for TensorBoard needs tensorboard, which cannot be imported ({error}): pip install"
            " 'anybatch[tensorboard]'. Of a run without such a log, `anybatch report RUN --tensorboard`"
            " writes it later."
        ) from None


def event_files(folder: Path) -> list[Path]:
    """The files of a log in `folder`, in the order in which TensorBoard reads them."""
    return sorted(folder.glob(f"{_PREFIX}*"))


@final
class EventFile:
    """A new file in `folder`, which TensorBoard reads after those that are there.

    Args:
        folder: made if it is not there.
        time: seconds since the epoch, when what it tells begins.

    Raises `OSError` if it cannot be written, and so do the methods.
    """

    def __init__(self, folder: Path, time: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._records = Records(folder / f"{_PREFIX}{_number(folder, time)}.{socket.gethostname()}")
        self._append(time, file_version="brain.Event:2")

    def forget(self, step: int, time: float) -> None:
        """Tell the reader that what it has read of `step` and of later steps does not count."""
        log = _tensorboard().event.SessionLog
        self._append(time, step=step, session_log=log(status=log.START))

    def add_scalars(self, values: Mapping[str, float], step: int, time: float) -> None:
        """One value for each curve, by its name."""
        summary = _tensorboard().summary.Summary
        told = [summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._append(time, step=step, summary=summary(value=told))

    def add_text(self, name: str, markdown: str, step: int, time: float) -> None:
        """A text, which is shown as Markdown."""
        self._append(time, step=step, summary=_tensorboard().text.text_pb(name, markdown))

    def add_settings(self, settings: Mapping[str, bool | float | str], time: float) -> None:
        """What the run was told, for the table by which runs are compared."""
        told = _tensorboard().hparams.hparams_pb(dict(settings), start_time_secs=time)
        self._append(time, summary=told)

    def close(self) -> None:
        """Close the file. Closing twice does no harm."""
        self._records.close()

    def _append(self, time: float, **content: Any) -> None:
        record = io.BytesIO()
        event = _tensorboard().event.Event(wall_time=time, **content)
        _tensorboard().record_writer.RecordWriter(record).write(event.SerializeToString())
        self._records.append(record.getvalue())


def _number(folder: Path, time: float) -> str:
    """Ten digits by which the file stands behind those in `folder`: the time, as TensorBoard has it."""
    taken = [
        name.removeprefix(_PREFIX)[:10] for name in (file.name for file in event_files(folder))
    ]
    later = [int(digits) + 1 for digits in taken if digits.isdecimal()]
    return f"{max([int(time), *later]):010d}"

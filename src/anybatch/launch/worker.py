"""The process of one rank: attached to its agent, registered, with its output redirected.

    python -m anybatch.launch.worker FOLDER AGENT LOGS call
    python -m anybatch.launch.worker FOLDER AGENT LOGS command MODULE ARGUMENT...

Started by the elastic agent with torchrun's variables in the environment. No slow module is
imported before the rank is attached to its agent, by a file `PID.pid` in FOLDER.

Other files in FOLDER are named by attempt and local rank: `0-1.result` or `0-1.failure` (of a
call), `0-1.noted` (the first failure, written before the rank ends) and finally `0-1.word` (how it
ended); see `exits`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from anybatch.errors import name_of
from anybatch.launch import exits
from anybatch.launch.exits import prepare, write_whole, write_word
from anybatch.launch.membership import ATTEMPT
from anybatch.process import early_stop_signal, libraries
from anybatch.process.early_stop_signal import MARK

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run one rank."""
    os.environ[MARK] = "1"
    with early_stop_signal.ending_at_once():
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, {signal.SIGINT}
        )  # blocked by the agent (`elastic`)
        work = _prepared(*sys.argv[1:])
    work()


def _prepared(folder: str, agent: str, logs: str, kind: str, *arguments: str) -> Callable[[], None]:
    """Set up the process, and return the work of the rank."""
    _tie_to(int(agent), Path(folder))
    libraries.stay()
    path = Path(folder) / f"{os.environ[ATTEMPT]}-{os.environ['LOCAL_RANK']}"
    _place_output(Path(folder), Path(logs), int(os.environ["RANK"]))
    exits.listener = partial(_note, path.with_suffix(".noted"))
    faulthandler.enable()
    if kind == "call":
        return _loaded(Path(folder) / "call", path)
    return partial(_command, arguments[0], arguments[1:], path)


def _note(path: Path, failure: exits.Failure | None) -> None:
    with suppress(OSError, MemoryError):  # the earlier failure is the one to report
        if failure is None:
            path.unlink(missing_ok=True)
        else:
            write_word(path, 1, failure)


def _tie_to(agent: int, folder: Path) -> None:
    """Make this rank end when its agent does: Linux kills it, and the agent's shell kills its
    process group, whose number is the name of a file."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(FileNotFoundError):  # the shell has already deleted it
        (folder / f"{os.getpid()}.pid").touch()
    if os.getppid() != agent:  # the agent ended before the lines above
        os._exit(1)


def _place_output(folder: Path, logs: Path, rank: int) -> None:
    """Make rank 0 write where the agent writes, or into pipes that the agent reads, and the other
    ranks into files. Output that the agent has closed is discarded."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        pipe, is_closed = folder / name, getattr(sys, name) is None
        if rank:
            target = logs / f"rank-{rank}.log"
            opened = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        elif pipe.exists():
            opened = os.open(pipe, os.O_WRONLY)
        elif is_closed:
            opened = os.open(os.devnull, os.O_WRONLY)
        else:
            continue
        if opened != number:  # the lowest free number
            os.dup2(opened, number)
            os.close(opened)
        if is_closed:
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _loaded(payload: Path, path: Path) -> Callable[[], None]:
    import cloudpickle

    prepare(partial(_write_failure, path))
    with _failures_written(path):
        import_path, home, data = cloudpickle.loads(payload.read_bytes())
        sys.path[:] = import_path
        if home.startswith("anybatch."):  # before the user's code in the data
            with libraries.loading():
                import_module(home)
        function, args = cloudpickle.loads(data)
    return partial(_call, partial(function, *args), path)


def _call(function: Callable[[], Any], path: Path) -> None:
    import cloudpickle

    with _failures_written(path):
        result = function()
        try:
            packed = cloudpickle.dumps(result)
        except Exception as error:
            error.add_note(f"the return value, a {type(result).__qualname__}, cannot be pickled")
            raise
    write_whole(path.with_suffix(".result"), packed)
    write_word(path.with_suffix(".word"), 0, exits.note())


@contextmanager
def _failures_written(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        _write_failure(path, error)
        sys.exit(1)


def _write_failure(path: Path, error: BaseException) -> None:
    import cloudpickle

    noted = exits.note(error)
    try:
        packed = cloudpickle.dumps(error)
    except Exception:
        packed = None
    what = f"{name_of(error)}: {error}"
    failure = (packed, what, "".join(traceback.format_exception(error)))
    write_whole(path.with_suffix(".failure"), cloudpickle.dumps(failure))
    # The error caught here may have been caused by another one, noted before.
    write_word(path.with_suffix(".word"), 1, replace(noted, what=what))


def _command(module: str, arguments: Sequence[str], path: Path) -> None:
    sys.argv[1:] = arguments
    word = path.with_suffix(".word")
    prepare(lambda error: write_word(word, error.exit_status, exits.note(error)))
    status, failed = 1, None
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as leaving:
        code = leaving.code
        status = code if isinstance(code, int) else 0 if code is None else 1
        raise
    except KeyboardInterrupt:
        status = early_stop_signal.STOPPED_BY_HAND
        sys.exit(status)  # its agent reports it
    except BaseException as error:
        failed = error
        raise
    finally:
        # The agent assumes that a recorded error was printed, so let the interpreter print it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        write_word(word, status, exits.note(failed))


if __name__ == "__main__":
    main()

"""Starts ranks on this machine: a command of anybatch (`run_command`) or a function (`call`).

Both delegate to torch's elastic agent (`elastic`), which runs in the calling process. Ranks are
fresh interpreters, never forks, so the state of torch in the calling process does not affect them.
On several machines, the same call is made on each, with one rendezvous.

The environment of a rank is that of the calling process plus torchrun's variables, and
`ANYBATCH_LAUNCHED` and `ANYBATCH_ATTEMPT`, from which `find` determines the launcher and the number
of the attempt, which `TORCHELASTIC_RESTART_COUNT` equals.
"""

from __future__ import annotations

import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypedDict, TypeVar, Unpack

from anybatch.errors import InputError, LaunchError, PeerLost, Stopped, setting, worded
from anybatch.launch.exits import SAID_BY_STATUS, End, first
from anybatch.launch.membership import find
from anybatch.launch.network import parse_address
from anybatch.process import early_stop_signal
from anybatch.process.host_memory import host_memory
from anybatch.process.signing import SECRET
from anybatch.units import check_count, format_bytes

if TYPE_CHECKING:
    from anybatch.launch.elastic import Ending, Orders

T = TypeVar("T")

TIMEOUT_SECONDS = 300.0
"""Time limit for several machines to meet, some of which may still be starting."""

GRACE_SECONDS = 30.0
"""Time that ranks have to end after a signal, or after one of them failed, before they are killed.
After a failure, torch allows no more than this."""

ELASTIC_RESTARTS = 3
"""Default number of restarts if the number of machines may change. A machine that leaves takes its
ranks with it, which costs one restart."""

RANK_BYTES = 200 * 2**20
"""Memory of a process that has imported torch, before it does anything: 220 MB with torch 2.13."""

_LAST_LINES = 40  # a stack is shown with its innermost call first
_SECRET_LENGTH = 16

_CLEANUP = """
trap '' INT TERM HUP USR1
read -r done && exit
cd "$1" && for rank in *.pid; do kill -KILL "-${rank%.pid}"; done
rm -rf "$@"; sleep 1; rm -rf "$@"
"""
_CLEANUP_SECONDS = 10.0


class Options(TypedDict, total=False):
    """Options for starting ranks, in addition to their number on this machine. On several machines
    the same call is made on each.

    Keys:
        nodes: number of machines (default: 1), or a pair of the minimum and the maximum number.
            With a pair, the remaining machines continue if one is lost, and a machine that joins or
            rejoins is admitted: the ranks get SIGTERM, and are restarted together.
        rendezvous: `HOST:PORT`, a port of one of the machines; required for several machines,
            unused for one. The other machines cannot continue without that machine.
        secret: shared secret of several machines, the same on each. Default: the value of the
            environment variable named by `SECRET`.
        timeout_seconds: time limit for the machines to meet.
        grace_seconds: see `GRACE_SECONDS`.
        restarts: maximum number of restarts of all ranks after one died without reporting an error
            (killed, or its machine lost power), lost its peer, was stuck, or ran out of memory
            where no step could be undone. An outcome that a rank reports itself ends the run: a
            status of 2, 3 or 75, or an exception of the user's code. Default: 0, or
            `ELASTIC_RESTARTS` if the number of machines may change. Restarts because a machine
            joined do not count. Each restart is reported in a line on standard error.
    """

    nodes: int | tuple[int, int]
    rendezvous: str | None
    secret: str | None
    timeout_seconds: float
    grace_seconds: float
    restarts: int | None


def run_command(
    arguments: Sequence[str], ranks: int, *, module: str = "anybatch", **options: Unpack[Options]
) -> int:
    """Run `python -m MODULE ARGUMENTS` as ranks, and wait for them to end.

    Rank 0 writes to the stdout and stderr of this process. The other ranks write to files; if one
    fails, its last lines are written to standard error. SIGINT and SIGTERM are forwarded.

    Args:
        arguments: arguments of the command.
        ranks: number of processes on this machine.
        module: module that implements the command.
        options: see `Options`.

    Returns:
        The exit status: 0, or that of the rank that failed first on any machine, or 128 plus the
        signal number if a signal killed that rank.

    Raises:
        InputError: an argument is invalid, or this process is itself a rank.
        LaunchError: the machines did not meet.
    """
    with _prepared(ranks, silence_fails=False, **options) as orders:
        from anybatch.launch import elastic

        ending = elastic.run(orders, ["command", module, *arguments], _tell)
        ends = [ending.ends[local] for local in sorted(ending.ends)]
        if ending.signal is not None:
            status = _status_after(ending.signal, ends)
            if status and not _tell_of_stop(ends) and status == Stopped.exit_status:
                _tell(early_stop_signal.BEFORE_THE_FIRST_STEP)
            if {end.status for end in ends} == {Stopped.exit_status}:
                _delete(orders.logs)  # each log repeats the message above
            return status
        cause = ending.cause or first(ends)
        if ending.silent or ending.lost is not None:
            _tell(_gone(orders, ending))
            saved = all(end.status == 75 for end in ends) and bool(ends)
            return 75 if saved else 1
        if cause is None:
            _delete(orders.logs)
            return 0
        zero = next((end for end in ends if end.rank == 0), None)
        is_reported = (
            zero is not None and not zero.is_reported_by_agent and zero.status == cause.status
        )
        if is_reported or _tell_of_stop([cause]):
            _delete(orders.logs)  # rank 0 has already printed their content
        else:
            shown = _tail(orders, cause) if ending.here and not cause.stack else ""
            sentence = cause.failed_first(ending.world_size, orders.most > 1)
            _tell(f"{sentence}.{shown or _below(cause)}")
        return cause.status if cause.status > 0 else 128 - cause.status


def parse_nodes(text: str) -> int | tuple[int, int]:
    """Parse the number of machines: `4`, or `2:4` for the minimum and the maximum.

    Raises `InputError`.
    """
    parts = text.split(":")
    if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
        raise InputError(
            f"the number of machines is {text!r}: write one, such as 4, or the least and the most that"
            " there may be, such as 2:4."
        )
    numbers = [int(part) for part in parts]
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def call(function: Callable[..., T], *args: Any, ranks: int, **options: Unpack[Options]) -> list[T]:
    """Run `function(*args)` in each of several processes, and return the results.

    The function may be a lambda, and may be defined in a script or a notebook cell: it is pickled
    by value if it cannot be imported. It has to join the other ranks itself (`find`, `join`). Rank
    0 writes to this process's `sys.stdout` and `sys.stderr`, the other ranks to files.

    Args:
        function: function that each rank runs.
        args: arguments of the function.
        ranks: number of processes on this machine.
        options: see `Options`.

    Returns:
        The results of the ranks on this machine, in order of rank, from the last attempt.

    Raises:
        InputError: an argument is invalid, or this process is itself a rank.
        LaunchError: the machines did not meet, or a rank ended without a result.
        KeyboardInterrupt: SIGINT was received; the ranks have ended.

    An exception raised in a rank is raised here with its own type, with the rank in a note and the
    rank's traceback as the cause. If several ranks failed, the first failure is raised; if it
    occurred on another machine, it is raised as a `LaunchError`.
    """
    import cloudpickle

    with _prepared(ranks, silence_fails=True, **options) as orders:
        try:
            data = cloudpickle.dumps((function, args))
        except Exception as error:
            name = getattr(function, "__qualname__", repr(function))
            raise InputError(
                f"{name} or what it is given cannot be handed to the ranks, since it cannot be"
                f" pickled ({error}): create what holds files, locks or threads inside the function."
            ) from error
        home = getattr(function, "__module__", None) or ""
        (orders.folder / "call").write_bytes(cloudpickle.dumps((sys.path, home, data)))
        from anybatch.launch import elastic

        with _forwarded(orders.folder):
            ending = elastic.run(orders, ["call"], _tell)
        error = _error(orders, ending)
        if ending.signal is not None and isinstance(error, Stopped):
            _delete(orders.logs)
            raise error
        if ending.signal == signal.SIGINT:
            raise KeyboardInterrupt
        if ending.signal is not None:
            raise LaunchError(
                f"this process was sent {ending.signal.name}, and its {ranks} ranks were ended."
            )
        if error is not None:
            if any(log.stat().st_size for log in orders.logs.iterdir()):
                error.add_note(f"what ranks wrote: {orders.logs}")
            raise error
        paths = [_stem(orders, ending, local) for local in sorted(ending.ends)]
        results = [cloudpickle.loads(one.with_suffix(".result").read_bytes()) for one in paths]
        _delete(orders.logs)
        return results


# ------------------------------------------------------------------------------------------ preparing


def _check_memory(ranks: int) -> None:
    free = host_memory(limits=False).free_bytes
    if ranks > 1 and ranks * RANK_BYTES > free:
        raise InputError(
            f"{setting('ranks')} is {ranks:,}, and as many processes that have imported torch take"
            f" {format_bytes(ranks * RANK_BYTES)}, where {format_bytes(free)} are free: start at most"
            f" {max(1, free // RANK_BYTES)} on this machine."
        )


@contextmanager
def _prepared(
    ranks: int,
    silence_fails: bool,
    nodes: int | tuple[int, int] = 1,
    rendezvous: str | None = None,
    secret: str | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    grace_seconds: float = GRACE_SECONDS,
    restarts: int | None = None,
) -> Iterator[Orders]:
    """Validate the options, and yield the orders. The folder that they name exists until the block
    ends."""
    check_count(ranks, "ranks")
    _check_memory(ranks)
    least, most = _checked_nodes(nodes)
    if restarts is None:
        restarts = 0 if least == most else ELASTIC_RESTARTS
    check_count(restarts, "restarts", 0)
    for name, value in (("timeout_seconds", timeout_seconds), ("grace_seconds", grace_seconds)):
        if not value > 0:
            raise InputError(f"{setting(name)} is {value}: give a number of seconds above 0.")
    if most > 1 and rendezvous is None:
        raise InputError(
            f"{_shown_nodes(nodes)}, but there is no rendezvous: name one of the machines and a free"
            " port there, such as node1:29500, in the same words on each machine."
        )
    meeting = None
    if rendezvous is not None:
        meeting = parse_address(rendezvous.removeprefix("tcp://"), "rendezvous")
    if most == 1:
        meeting = None  # no other machine joins, so no port has to be opened
        secret = secrets.token_hex(_SECRET_LENGTH)
    else:
        secret = _checked_secret(secret)
    already = find()
    if already is not None:
        raise InputError(
            f"this process is rank {already.rank} of {already.world_size} already (started by"
            f" {already.launcher}), so it cannot start {ranks} more: leave out the number of ranks"
            " here, or start this process by itself."
        )
    if not hasattr(os, "mkfifo"):
        raise InputError(
            f"{sys.platform} cannot start ranks: run on Linux or macOS, or in one process."
        )
    from anybatch.launch.elastic import Orders

    folder = Path(tempfile.mkdtemp(prefix="anybatch-ranks-"))
    logs = Path(tempfile.mkdtemp(prefix="anybatch-logs-")).absolute()
    # Includes the deletions below: a second signal may end this process while it cleans up.
    with _cleanup_if_killed(folder, logs):
        try:
            yield Orders(
                ranks=ranks,
                least=least,
                most=most,
                meeting=meeting,
                secret=secret,
                timeout_seconds=timeout_seconds,
                grace_seconds=grace_seconds,
                restarts=restarts,
                folder=folder,
                logs=logs,
                silence_fails=silence_fails,
            )
        finally:
            _delete(folder)
            if logs.exists() and not any(log.stat().st_size for log in logs.iterdir()):
                _delete(logs)  # all logs are empty


@contextmanager
def _cleanup_if_killed(*folders: Path) -> Iterator[None]:
    """Start a shell that cleans up if this process is killed, which it notices by the end of a
    pipe. It kills the process groups of the ranks, which are registered in the first of `folders`
    (`worker`), and deletes all `folders`."""
    shell = subprocess.Popen(
        ["sh", "-c", _CLEANUP, "sh", *map(str, folders)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        try:
            shell.communicate(b"done\n", timeout=_CLEANUP_SECONDS)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            shell.kill()
            shell.wait(_CLEANUP_SECONDS)


def _checked_nodes(nodes: int | tuple[int, int]) -> tuple[int, int]:
    """The minimum and the maximum number of machines. Raises `InputError`."""
    least, most = (nodes, nodes) if isinstance(nodes, int) else nodes
    if not 1 <= least <= most:
        rule = "give a whole number of at least 1, or a pair of them, the least and the most"
        raise InputError(f"{_shown_nodes(nodes)}: {rule}.")
    return least, most


def _shown_nodes(nodes: int | tuple[int, int]) -> str:
    if isinstance(nodes, int):
        return f"{setting('nodes')} is {nodes}"
    return f"{setting('nodes')} is {worded(str(nodes), ':'.join(map(str, nodes)))}"


def read_secret(path: Path) -> str:
    """Read the secret that the machines of a run share from a file. Raises `InputError`."""
    try:
        return path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"the secret of the rendezvous cannot be read from {str(path)!r} ({error}): name a text"
            " file that this user can read, with the same content on each machine."
        ) from error


def _checked_secret(secret: str | None) -> str:
    """The secret, or the value of the environment variable named by `SECRET` if it is None. Raises
    `InputError`."""
    secret = secret if secret is not None else os.environ.get(SECRET, "")
    if len(secret) < _SECRET_LENGTH:
        state = f"has {len(secret)} characters" if secret else "is missing"
        raise InputError(
            f"the secret of the rendezvous {state}: set the environment variable {SECRET} (or"
            f" --rendezvous-secret FILE) to the same {_SECRET_LENGTH} or more random characters on"
            " each machine, such as `openssl rand -hex 16` writes."
        )
    return secret


def _delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _forwarded(folder: Path) -> Iterator[None]:
    """Forward the output of rank 0 to `sys.stdout` and `sys.stderr`. If these are not this
    process's own streams (in a notebook cell, for example), the output passes through a pipe and a
    thread."""
    with ExitStack() as stack:
        for name, number in (("stdout", 1), ("stderr", 2)):
            stream: TextIO | None = getattr(sys, name)
            if stream is None:  # closed
                continue
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
                if stream.fileno() == number:
                    continue
            os.mkfifo(folder / name, 0o600)
            stack.enter_context(_pump(folder / name, stream))
        yield


@contextmanager
def _pump(pipe: Path, stream: TextIO) -> Iterator[None]:
    import codecs

    # Opened for reading and writing, so that the pipe exists before rank 0 and outlives it.
    source = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    waker, wake = os.pipe()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def pump() -> None:
        while True:
            ready, _, _ = select.select([source, waker], [], [])
            if source in ready:
                stream.write(decoder.decode(os.read(source, 1 << 16)))
                stream.flush()
            elif waker in ready:  # and the pipe is empty
                return

    thread = threading.Thread(target=pump, name="anybatch-output", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(wake, b".")
        thread.join()
        for descriptor in (source, waker, wake):
            os.close(descriptor)


# --------------------------------------------------------------------------------------- how it ended


def _error(orders: Orders, ending: Ending) -> Exception | None:
    """The exception that a call raises, with its notes and its cause; None if all ranks returned."""
    ends = [ending.ends[local] for local in sorted(ending.ends)]
    failed = sorted((end for end in ends if not end.is_good), key=lambda end: (end.when, end.rank))
    later = failed
    if ending.silent or ending.lost is not None or not ends:
        error: Exception = LaunchError(_gone(orders, ending))
    elif ending.cause is not None and not ending.here:
        sentence = ending.cause.failed_first(ending.world_size, several=True)
        error = LaunchError(f"{sentence}.{_below(ending.cause)}")
    elif failed:
        cause = ending.cause or failed[0]
        error = _raised(orders, ending, cause)
        later = [end for end in failed if end.local_rank != cause.local_rank]
    else:
        return None
    for end in later:
        error.add_note(f"later, rank {end.rank} (process {end.pid}): {end.sentence}.")
    return error


def _raised(orders: Orders, ending: Ending, end: End) -> Exception:
    """The exception that a rank of a call raised, with its own type if it can be unpickled."""
    import cloudpickle

    who = end.who(ending.world_size, several=False)
    path = _stem(orders, ending, end.local_rank).with_suffix(".failure")
    if not end.spoke or not path.exists():
        return LaunchError(
            f"{who} ended without returning from its function: {end.sentence}.{_tail(orders, end)}"
        )
    packed, what, trace = cloudpickle.loads(path.read_bytes())
    error: Any = None
    if packed is not None:
        with suppress(Exception):  # exceptions of the user's code may not survive pickling
            error = cloudpickle.loads(packed)
    if not isinstance(error, Exception):
        error = LaunchError(f"{who} raised {what}\n\n{trace}")
    if not end.stack:  # otherwise the error message shows it
        error.__cause__ = LaunchError(f"on {who}:\n\n{trace}")
    error.add_note(f"on {who}")
    return error


def _stem(orders: Orders, ending: Ending, local: int) -> Path:
    return orders.folder / f"{ending.attempt}-{local}"


def _tail(orders: Orders, end: End) -> str:
    """The last lines of a rank's log, with an introduction; empty if there are none."""
    path = orders.logs / f"rank-{end.rank}.log"
    lines = path.read_text("utf-8", "replace").splitlines()[-_LAST_LINES:] if path.exists() else ()
    if not lines:
        return ""
    quoted = "\n".join(f"    {line}" for line in lines)
    return f" Its last lines (all of them: {path}):\n{quoted}"


def _tell(sentence: str) -> None:
    if sys.stderr is not None:  # closed
        sys.stderr.write(f"anybatch: {sentence}\n")
        sys.stderr.flush()


def _status_after(number: signal.Signals, ends: Sequence[End]) -> int:
    """Exit status of a command that received the signal `number`."""
    if all(end.status == 0 for end in ends):
        return 0
    said = [end for end in ends if end.spoke or end.status in SAID_BY_STATUS]
    statuses = [end.status for end in said if end.status and not end.raised(PeerLost)]
    if statuses:
        return statuses[0]
    # Ranks that the signal killed had not yet installed their handlers.
    unbegun = number != signal.SIGINT and any(end.status == -number for end in ends)
    return Stopped.exit_status if unbegun else 128 + number


def _tell_of_stop(ends: Sequence[End]) -> bool:
    """Report that the ranks stopped as requested, if one of `ends` says so. Returns whether it
    does."""
    sentence = next((end.was_stopped for end in ends if end.was_stopped), "")
    if sentence:
        _tell(sentence)
    return bool(sentence)


def _below(end: End) -> str:
    return f"\n{end.stack}" if end.stack else ""


def _gone(orders: Orders, ending: Ending) -> str:
    """Error message for machines that were lost, or to which the connection was lost."""
    from anybatch.launch.network import joined

    place = joined(*orders.meeting) if orders.meeting else "this machine"
    if ending.silent:
        names = " and ".join(ending.silent)
        return f"nothing is heard from {names} any more: look at what was written there."
    if not ending.ends:
        return f"this machine took no part in the run that met at {place}: {ending.lost}."
    return (
        f"the connection to the rendezvous at {place} was lost while the ranks were running"
        f" ({ending.lost}): look at what the machine there wrote."
    )

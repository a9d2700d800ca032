"""The command line interface, one file per command. A command parses its options, calls the library
and prints the result.

Commands import what they need when they run, so `anybatch --help` is fast and does not import torch.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from anybatch.cli.doctor import doctor
from anybatch.cli.evaluate import evaluate
from anybatch.cli.export import export
from anybatch.cli.memory import memory
from anybatch.cli.options import BareOptions, with_groups
from anybatch.cli.plan import plan
from anybatch.cli.recipes import recipes
from anybatch.cli.report import report
from anybatch.cli.scale import scale
from anybatch.cli.submit import submit
from anybatch.cli.train import train
from anybatch.cli.verify import verify
from anybatch.errors import AnybatchError, PeerLost, Stopped, worded_for_command_line
from anybatch.process import libraries
from anybatch.process.early_stop_signal import (
    BEFORE_THE_FIRST_STEP,
    MARK,
    STOPPED,
    STOPPED_BY_HAND,
    StoppedEarly,
)

_app = typer.Typer(
    name="anybatch",
    help="Train PyTorch models at any batch size on the GPUs you have.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_app.command(cls=BareOptions)(with_groups(train))
_app.command()(with_groups(plan))
_app.command()(scale)
_app.command()(submit)
_app.command(cls=BareOptions)(with_groups(memory))
_app.command()(verify)
_app.command()(evaluate)
_app.command()(export)
_app.command(cls=BareOptions)(report)
_app.command()(recipes)
_app.command(cls=BareOptions)(doctor)

_NO_MEMORY = (
    "memory ran out where there was no step to do again: see what else runs on this machine, and the"
    " limits of this process (`ulimit -v`, `ulimit -d`, the container's)."
)

_GONE = {
    "--trial": "a rehearsal measures the plan and its rivals before the run: give --rehearsal",
    "--no-trial": "choices are tried in the rehearsal alone: give --no-rehearsal",
    "--compile-if-faster": "no run tries any more whether that is faster: give --compile, or nothing",
}
"""Removed options, and what to use instead."""

# typer depends on click or bundles a copy of it, depending on its version; this works for both.
_UsageError: Any = typer.BadParameter.__base__


@_app.callback(invoke_without_command=True)
def _before_commands(
    version: bool = typer.Option(False, "--version", help="Show the version and exit."),
    local_rank: int | None = typer.Option(None, "--local-rank", "--local_rank", hidden=True),
) -> None:
    # `python -m torch.distributed.launch` passes --local-rank, and also sets LOCAL_RANK, which is used.
    if version:
        from importlib.metadata import version as version_of

        print(version_of("anybatch"))
        raise typer.Exit


def main() -> None:
    """Run the command line and exit with a status: 0 success, 2 invalid input, 3 no plan fits, 75
    stopped on request, 130 interrupted (Ctrl-C), 1 any other failure."""
    libraries.stay()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif callable(reconfigure := getattr(getattr(sys, name), "reconfigure", None)):
            reconfigure(errors="replace")  # where the encoding is not UTF-8
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit status.

    Expected failures are printed as one sentence on standard error; for an exception raised in the
    task's own code, the part of the traceback in the user's files follows. Any other exception
    propagates.
    """
    try:
        with worded_for_command_line():
            result = _app(arguments, standalone_mode=False, prog_name="anybatch", obj=arguments)
    except AnybatchError as error:
        if type(error) in (PeerLost, Stopped) and _is_rank():
            return error.exit_status  # told by the agent, which knows whether ranks are restarted
        return _tell(str(error), error.exit_status)
    except StoppedEarly:
        status = Stopped.exit_status
        return status if _is_rank() else _tell(BEFORE_THE_FIRST_STEP, status)
    except _UsageError as error:
        return _tell_usage(error)
    except (typer.Abort, KeyboardInterrupt):
        # Clears an interrupt that CPython recorded in an earlier `exec` and would die of at exit.
        exec("")
        return STOPPED_BY_HAND if _is_rank() else _tell(STOPPED, STOPPED_BY_HAND)
    except BrokenPipeError:  # the reader of the output has exited (`anybatch plan ... | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1  # same as rich, which handles this error itself while printing a table
    except MemoryError:
        if _is_rank():
            raise  # the agent may restart this rank
        return _tell(_NO_MEMORY, 1)
    except Exception as error:
        from anybatch.recipes import own_traceback

        trace = own_traceback(error)
        if not trace and _is_memory_failure(error) and not _is_rank():
            return _tell(_NO_MEMORY, 1)
        if not trace:
            raise  # a bug in anybatch
        what = f"{type(error).__name__} was raised in the task's own code"
        return _tell(f"{what}: see the traceback below and correct the file.\n{trace}", 2)
    # Some versions of typer return this status after an interrupt instead of raising.
    if result == STOPPED_BY_HAND and not _is_rank():
        return _tell(STOPPED, STOPPED_BY_HAND)
    return result if isinstance(result, int) else 0


def _is_memory_failure(error: Exception) -> bool:
    """Whether `error` is an out-of-memory error raised by a library."""
    if "torch" not in sys.modules:
        return False
    from anybatch.oom import is_memory_error

    return is_memory_error(error)


def _is_rank() -> bool:
    """Whether this process is a rank that another anybatch process started."""
    return MARK in os.environ


def _tell(sentence: str, status: int) -> int:
    print(f"anybatch: {sentence}", file=sys.stderr)
    return status


def _tell_usage(error: Any) -> int:
    """Report a command line that cannot be parsed: the fault, and the command whose --help to read.
    Returns the exit status."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return error.exit_code
    where = error.ctx.command_path if error.ctx else "anybatch"
    message = " ".join(error.format_message().split()).rstrip(".")
    option = getattr(error, "option_name", "")
    if option in _GONE:
        return _tell(f"there is no option {option} any more, since {_GONE[option]}.", 2)
    # If typer validates values with pydantic, its message does not contain the value.
    faults = error.__cause__.errors() if hasattr(error.__cause__, "errors") else []
    if faults and repr(faults[0]["input"]) not in message:
        wanted = faults[0]["msg"].partition(",")[0].replace("Input should", "it should")
        message = f"{message.partition(': ')[0]}: {faults[0]['input']!r} is not valid, {wanted}"
    end = " " if message.endswith("?") else "; "
    return _tell(f"{message[:1].lower()}{message[1:]}{end}'{where} --help' shows what there is.", 2)

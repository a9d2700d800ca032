"""The command line: one file per command, each parses, calls and prints.

Commands import what they need when they run, so `anybatch --help` answers at once and never loads
torch.
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
from anybatch.errors import AnybatchError, PeerLost, Stopped
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
"""Options that there were, and what to use."""

# typer stands on click, or carries a copy of it, by version; this is the class of either.
_UsageError: Any = typer.BadParameter.__base__


@_app.callback(invoke_without_command=True)
def _before_commands(
    version: bool = typer.Option(False, "--version", help="Show the version and exit."),
    local_rank: int | None = typer.Option(None, "--local-rank", "--local_rank", hidden=True),
) -> None:
    # `python -m torch.distributed.launch` passes it, and sets LOCAL_RANK, which is what counts.
    if version:
        from importlib.metadata import version as version_of

        print(version_of("anybatch"))
        raise typer.Exit


def main() -> None:
    """Run the command line and exit: 0 done, 2 bad input, 3 no plan fits, 1 anything else."""
    libraries.stay()
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit status. Failures that a user can meet become one sentence
    on standard error, with the lines of the user's own file where those raised; others keep their
    traceback."""
    try:
        result = _app(arguments, standalone_mode=False, prog_name="anybatch", obj=arguments)
    except AnybatchError as error:
        return _tell(str(error), error.exit_status) if _is_news(error) else error.exit_status
    except StoppedEarly:
        status = Stopped.exit_status
        return status if _is_rank() else _tell(BEFORE_THE_FIRST_STEP, status)
    except _UsageError as error:
        return _tell_usage(error)
    except (typer.Abort, KeyboardInterrupt):
        exec(
            ""
        )  # forgets an interrupt that came within such a call: CPython would die of it at its end
        return STOPPED_BY_HAND if _is_rank() else _tell(STOPPED, STOPPED_BY_HAND)
    except BrokenPipeError:  # whoever read the output has gone (`anybatch plan ... | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1  # as rich, which meets it first where a table is printed
    except MemoryError:
        if _is_rank():
            raise  # its agent may start it again
        return _tell(_NO_MEMORY, 1)
    except Exception as error:
        from anybatch.recipes import own_traceback

        trace = own_traceback(error)
        if not trace and _is_memory_failure(error) and not _is_rank():
            return _tell(_NO_MEMORY, 1)
        if not trace:
            raise  # a fault of anybatch
        what = f"{type(error).__name__} was raised in the task's own code"
        return _tell(f"{what}: see the traceback below and correct the file.\n{trace}", 2)
    if (
        result == STOPPED_BY_HAND and not _is_rank()
    ):  # so some versions of typer report the interrupt
        return _tell(STOPPED, STOPPED_BY_HAND)
    return result if isinstance(result, int) else 0


def _is_news(error: AnybatchError) -> bool:
    """Whether nobody else tells of `error`: where a rank was stopped, or has felt that another is lost,
    the process that started it says what has happened, and whether ranks are started again."""
    return not (type(error) in (PeerLost, Stopped) and _is_rank())


def _is_memory_failure(error: Exception) -> bool:
    """Whether a library says in its own words that it was refused memory."""
    if "torch" not in sys.modules:
        return False
    from anybatch.oom import is_memory_error

    return is_memory_error(error)


def _is_rank() -> bool:
    """Whether this process was started by another one of anybatch."""
    return MARK in os.environ


def _tell(sentence: str, status: int) -> int:
    print(f"anybatch: {sentence}", file=sys.stderr)
    return status


def _tell_usage(error: Any) -> int:
    """A word on the command line that cannot be read: what and where, and how to see what can be."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return error.exit_code
    where = error.ctx.command_path if error.ctx else "anybatch"
    message = " ".join(error.format_message().split()).rstrip(".")
    option = getattr(error, "option_name", "")
    if option in _GONE:
        return _tell(f"there is no option {option} any more, since {_GONE[option]}.", 2)
    # Where typer reads values with pydantic, its sentence leaves out the value.
    faults = error.__cause__.errors() if hasattr(error.__cause__, "errors") else []
    if faults and repr(faults[0]["input"]) not in message:
        wanted = faults[0]["msg"].partition(",")[0].replace("Input should", "it should")
        message = f"{message.partition(': ')[0]}: {faults[0]['input']!r} is not valid, {wanted}"
    end = " " if message.endswith("?") else "; "
    return _tell(f"{message[:1].lower()}{message[1:]}{end}'{where} --help' shows what there is.", 2)

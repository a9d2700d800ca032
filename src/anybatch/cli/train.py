"""The `anybatch train` command."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anybatch.cli.options import (
    NormsName,
    PlanningOptions,
    Rehearsal,
    TaskName,
    Why,
    check_backend,
    option,
)
from anybatch.process import early_stop_signal, libraries

if TYPE_CHECKING:
    from anybatch.events import Sink
    from anybatch.runs.planning import PlanOptions


def train(
    context: typer.Context,
    task: TaskName,
    planning: PlanningOptions,
    rehearsal: Rehearsal = None,
    ranks: Annotated[
        int | None, option("--ranks", "Processes on this machine. Default: one for each GPU.", "N")
    ] = None,
    norms: NormsName = None,
    balance: Annotated[
        str | None,
        option(
            "--balance", "measured: shares follow speed; fixed. Default: measured on GPUs.", "HOW"
        ),
    ] = None,
    nodes: Annotated[
        str, option("--nodes", "Machines, or the least and the most (2:4); start it on each.", "N")
    ] = "1",
    rendezvous: Annotated[
        str | None,
        option("--rendezvous", "Where machines meet: one of them, and a free port.", "HOST:PORT"),
    ] = None,
    rendezvous_secret: Annotated[
        Path | None,
        option(
            "--rendezvous-secret",
            "With their secret. Default: $ANYBATCH_RENDEZVOUS_SECRET.",
            "FILE",
        ),
    ] = None,
    backend: Annotated[
        str | None,
        option("--backend", "nccl for GPUs, gloo for CPUs: as the device says by itself.", "NAME"),
    ] = None,
    compress: Annotated[
        str | None,
        option("--compress", "Send gradients in bf16 or fp16. Changes the result.", "HOW"),
    ] = None,
    local_steps: Annotated[
        int, option("--local-steps", "Average every N steps. Changes the result.", "N")
    ] = 1,
    stale: Annotated[
        bool, option("--stale", "Apply gradients one step late. Changes the result.")
    ] = False,
    plan_file: Annotated[Path | None, option("--plan", "Run this plan.", "FILE")] = None,
    out: Annotated[
        Path | None, option("--out", "Run folder. Default: a new one in runs/.", "DIR")
    ] = None,
    resume: Annotated[
        bool, option("--resume", "Go on with the run in --out, from its newest checkpoint.")
    ] = False,
    checkpoint_every: Annotated[
        str, option("--checkpoint-every", "Steps (500) or time (10min), or never.", "N|TIME")
    ] = "10min",
    keep: Annotated[int, option("--keep", "Checkpoints to keep in addition to the best.", "N")] = 3,
    restarts: Annotated[
        int, option("--restarts", "How often killed or lost ranks are started again.", "N")
    ] = 3,
    stall_seconds: Annotated[
        float | None,
        option("--stall-seconds", "Without progress, after which a rank is ended.", "S"),
    ] = None,
    tensorboard: Annotated[
        str | None,
        option(
            "--tensorboard", "Write a log for TensorBoard, by default in the run folder.", "[DIR]"
        ),
    ] = None,
    track: Annotated[
        str | None, option("--track", "Send the curves to wandb, mlflow or trackio.", "TRACKER")
    ] = None,
    why: Why = False,
) -> None:
    """Plan a task, show the plan, and train it to the end."""
    early_stop_signal.end_with_status_75()  # before anything slow

    with libraries.loading():
        from rich.console import Console

        from anybatch.insight.noise_text import lines, unmeasured
        from anybatch.integrations.trackers import check_tracker
        from anybatch.launch import find, parse_nodes, read_secret, run_command
        from anybatch.parallel import exchange as tell
        from anybatch.parallel import leads
        from anybatch.plans import Plan, parse_balance, parse_exchange, parse_norms_of_task
        from anybatch.report import (
            Progress,
            last_plan,
            new_folder,
            next_folder,
            print_plan,
            print_result,
            run_files,
            run_folder,
            tensorboard_folder,
        )
        from anybatch.runs.planning import PlanOptions, check_started, checked_ranks, with_norms
        from anybatch.runs.session import joined
        from anybatch.runs.train import Keeping, choose_plan, num_processes
        from anybatch.runs.train import train as run_training

    check_backend(backend)
    options = PlanOptions(
        **planning.of_plan(),
        exchange=parse_exchange(compress, local_steps, stale),
        norms=parse_norms_of_task(norms)[0],
        balance=parse_balance(balance),
        rehearsal=rehearsal,
    )
    machines = parse_nodes(nodes)
    if plan_file is not None:
        _check_alone(options)
    checked_ranks(ranks, options.parallel)
    keeping = Keeping(resume, checkpoint_every, keep, restarts, stall_seconds)
    keeping.check(out)
    # Raises an error if the log cannot be written.
    tensorboard_folder(tensorboard, out or Path("runs"), keeping.resumes)
    tracker = None if track is None else check_tracker(track)
    given = None if plan_file is None else Plan.load(plan_file)
    processes = num_processes(given, ranks, options.parallel)
    check_started(ranks, "--ranks")
    if find() is None and (processes > 1 or machines != 1):
        # An error in the task is reported here, once.
        loaded, _ = with_norms(planning.load(task), norms)
        arguments = context.find_root().obj
        with contextlib.ExitStack() as stack:
            if out is None:  # named here, so that restarted ranks find it
                runs = Path("runs")
                named = (
                    stack.enter_context(new_folder(runs, loaded.name))
                    if machines == 1
                    else next_folder(runs, loaded.name)  # other machines may choose the same name
                )
                arguments = [*arguments, "--out", str(named)]
            raise typer.Exit(
                run_command(
                    arguments,
                    processes,
                    nodes=machines,
                    rendezvous=rendezvous,
                    secret=None if rendezvous_secret is None else read_secret(rendezvous_secret),
                    restarts=restarts,
                )
            )
    with joined(), contextlib.ExitStack() as stack:
        console = Console(quiet=not leads())
        loaded, _ = with_norms(planning.load(task), norms)
        if out is None and leads():
            out = stack.enter_context(new_folder(Path("runs"), loaded.name))
        folder = Path(tell(str(out))[0])  # the folder chosen by rank 0
        again = keeping.goes_on
        if leads():
            stack.enter_context(run_folder(folder, keeping.resumes, again))
        chosen = given or choose_plan(loaded, folder, keeping.resumes, ranks, options)
        # Restarted ranks continue with the plan that was already printed, unless it has changed.
        if not again or (leads() and chosen != last_plan(folder)):
            print_plan(console, chosen, why)
        with Progress(console) as progress:
            sinks: list[Sink] = [progress]
            if tracker is not None and leads():
                sinks.append(stack.enter_context(tracker(name=loaded.name)))
            result = run_training(
                loaded,
                plan=chosen,
                out=folder,
                resume=resume,
                checkpoint_every=checkpoint_every,
                keep=keep,
                stall_seconds=stall_seconds,
                tensorboard=tensorboard,
                progress=False,  # `progress` is in `sinks`, and prints to standard output
                sinks=sinks,
            )
        print_result(
            console,
            result.started,
            result.ended,
            result.evaluation,
            run_files(folder),
            lines(result.plan, result.noise),
            unmeasured(result.plan, result.ended.steps),
        )


def _check_alone(options: PlanOptions) -> None:
    """Raises `InputError` if any of `options` is given together with a plan, which determines them."""
    from anybatch.errors import InputError

    given = [_as_given(name, value) for name, value in options.given().items()]
    if given:
        raise InputError(
            f"--plan and {' and '.join(given)} are both given, but the plan says all of it: leave"
            " one of them out, or change the plan's file."
        )


def _as_given(name: str, value: object) -> str:
    """An option that a plan determines, as written on the command line."""
    from anybatch.plans import Exchange, Sharding

    if isinstance(value, Exchange):  # set by several options
        return f"an exchange ({value.describe()})"
    if isinstance(value, Sharding):
        return f"--shard-over {value.over}"
    flag = f"--{name.replace('_', '-')}"
    if value is False:
        return f"--no-{flag[2:]}"
    return flag if value is True else f"{flag} {value}"

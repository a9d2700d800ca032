"""anybatch train"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anybatch.cli.options import (
    ChunkedLoss,
    Compile,
    CompileIfFaster,
    GlobalBatch,
    Grain,
    Memory,
    MicroBatch,
    NormsName,
    ParallelName,
    PrecisionName,
    Ranks,
    RecomputeNames,
    Rehearsal,
    Reproducible,
    Settings,
    ShardOver,
    TaskName,
    Why,
    check_backend,
    compile_of,
    load_task,
)
from anybatch.process import early_stop_signal, libraries

if TYPE_CHECKING:
    from anybatch.events import Sink
    from anybatch.runs.planning import PlanOptions


def train(
    context: typer.Context,
    task: TaskName,
    global_batch: GlobalBatch = None,
    memory: Memory = None,
    precision: PrecisionName = "fp32",
    micro_batch: MicroBatch = None,
    recompute: RecomputeNames = None,
    chunked_loss: ChunkedLoss = None,
    compile: Compile = False,
    compile_if_faster: CompileIfFaster = False,
    reproducible: Reproducible = False,
    grain: Grain = None,
    rehearsal: Rehearsal = None,
    ranks: Ranks = None,
    parallel: ParallelName = None,
    shard_over: ShardOver = None,
    norms: NormsName = None,
    balance: Annotated[
        str | None,
        typer.Option(
            "--balance",
            metavar="HOW",
            help="measured: shares follow the speed of the ranks; fixed. Default: measured on GPUs.",
        ),
    ] = None,
    nodes: Annotated[
        str,
        typer.Option(
            "--nodes",
            metavar="N",
            help="Machines, or the least and the most (2:4); the same command is given on each.",
        ),
    ] = "1",
    rendezvous: Annotated[
        str | None,
        typer.Option(
            "--rendezvous",
            metavar="HOST:PORT",
            help="Where several machines meet: one of them, and a free port of it.",
        ),
    ] = None,
    rendezvous_secret: Annotated[
        Path | None,
        typer.Option(
            "--rendezvous-secret",
            metavar="FILE",
            help="With the secret of several machines. Default: ANYBATCH_RENDEZVOUS_SECRET.",
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            metavar="NAME",
            help="nccl for GPUs, gloo for CPUs: as the device says by itself.",
        ),
    ] = None,
    compress: Annotated[
        str | None,
        typer.Option(
            "--compress",
            metavar="HOW",
            help="Send gradients in bf16 or fp16. Changes the result.",
        ),
    ] = None,
    local_steps: Annotated[
        int,
        typer.Option(
            "--local-steps",
            metavar="N",
            help="Let ranks take N steps by themselves, then average. Changes the result.",
        ),
    ] = 1,
    stale: Annotated[
        bool,
        typer.Option("--stale", help="Apply gradients one step late. Changes the result."),
    ] = False,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="Run this plan.")
    ] = None,
    trial: Annotated[
        bool,
        typer.Option(
            "--trial/--no-trial",
            help="Try choices that are predicted to be nearly as fast, and follow the fastest.",
        ),
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Run folder. Default: a new one in runs/."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the run in --out, from its newest checkpoint."),
    ] = False,
    checkpoint_every: Annotated[
        str,
        typer.Option(
            "--checkpoint-every",
            metavar="N|TIME",
            help="Steps (500) or time (10min) between checkpoints, or never.",
        ),
    ] = "10min",
    keep: Annotated[
        int, typer.Option("--keep", metavar="N", help="Checkpoints that stay, beside the best.")
    ] = 3,
    restarts: Annotated[
        int,
        typer.Option(
            "--restarts", metavar="N", help="How often killed or lost ranks are started again."
        ),
    ] = 3,
    stall_seconds: Annotated[
        float | None,
        typer.Option(
            "--stall-seconds",
            metavar="S",
            help="Without progress, after which a rank is named, shown and ended.",
        ),
    ] = None,
    tensorboard: Annotated[
        str | None,
        typer.Option(
            "--tensorboard",
            metavar="[DIR]",
            help="Write a log for TensorBoard too; without DIR, into the run folder.",
        ),
    ] = None,
    track: Annotated[
        str | None,
        typer.Option(
            "--track",
            metavar="TRACKER",
            help="Send the curves to an experiment tracker: wandb, mlflow or trackio.",
        ),
    ] = None,
    settings: Settings = None,
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
        from anybatch.plans import (
            Plan,
            parse_balance,
            parse_exchange,
            parse_norms_of_task,
            parse_parallel,
            parse_sharding,
        )
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
    way = parse_parallel(parallel)
    options = PlanOptions(
        memory=memory,
        parallel=way,
        precision=precision,
        micro_batch=micro_batch,
        recompute=recompute,
        chunked_loss=chunked_loss,
        exchange=parse_exchange(compress, local_steps, stale),
        norms=parse_norms_of_task(norms)[0],
        sharding=parse_sharding(shard_over),
        balance=parse_balance(balance),
        compile=compile_of(compile, compile_if_faster),
        rehearsal=rehearsal,
    )
    machines = parse_nodes(nodes)
    if plan_file is not None:
        _check_alone(options)
    checked_ranks(ranks, way)
    keeping = Keeping(resume, checkpoint_every, keep, restarts, stall_seconds)
    keeping.check(out)
    # Or it says why there can be no log.
    tensorboard_folder(tensorboard, out or Path("runs"), keeping.resumes)
    tracker = None if track is None else check_tracker(track)
    given = None if plan_file is None else Plan.load(plan_file)
    processes = num_processes(given, ranks, way)
    check_started(ranks, "--ranks")
    if find() is None and (processes > 1 or machines != 1):
        # Or it says here, once, what is wrong with it.
        loaded, _ = with_norms(load_task(task, settings, global_batch, reproducible, grain), norms)
        arguments = context.find_root().obj
        with contextlib.ExitStack() as stack:
            if out is None:  # named here, since ranks that are started again must find it
                runs = Path("runs")
                named = (
                    stack.enter_context(new_folder(runs, loaded.name))
                    if machines == 1
                    else next_folder(runs, loaded.name)  # which other machines may name alike
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
        loaded, _ = with_norms(load_task(task, settings, global_batch, reproducible, grain), norms)
        if out is None and leads():
            out = stack.enter_context(new_folder(Path("runs"), loaded.name))
        folder = Path(tell(str(out))[0])  # that of rank 0
        again = keeping.goes_on
        if leads():
            stack.enter_context(run_folder(folder, keeping.resumes, again))
        chosen = given or choose_plan(loaded, folder, keeping.resumes, ranks, options)
        # Ranks that were started again go on under the plan that is to be read above.
        if not again or (leads() and chosen != last_plan(folder)):
            print_plan(console, chosen, why)
        with Progress(console) as progress:
            sinks: list[Sink] = [progress]
            if tracker is not None and leads():
                sinks.append(stack.enter_context(tracker(name=loaded.name)))
            result = run_training(
                loaded,
                plan=chosen,
                trial=trial and given is None,
                out=folder,
                resume=resume,
                checkpoint_every=checkpoint_every,
                keep=keep,
                stall_seconds=stall_seconds,
                tensorboard=tensorboard,
                progress=False,  # here it is, on standard output
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
    """Raises `InputError` if one of `options` is given beside a plan, which has settled it."""
    from anybatch.errors import InputError

    given = [_as_given(name, value) for name, value in options.given().items()]
    if given:
        raise InputError(
            f"--plan and {' and '.join(given)} are both given, but the plan says all of it: leave"
            " one of them out, or change the plan's file."
        )


def _as_given(name: str, value: object) -> str:
    """An option that a plan settles, as it stands on the command line."""
    from anybatch.plans import Exchange, Sharding

    if isinstance(value, Exchange):  # made of several options
        return f"an exchange ({value.describe()})"
    if isinstance(value, Sharding):
        return f"--shard-over {value.over}"
    if name == "compile" and value == "if-faster":
        return "--compile-if-faster"
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"

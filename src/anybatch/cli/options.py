"""The options that several commands share, and what they mean together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from anybatch.errors import InputError

if TYPE_CHECKING:
    from anybatch.machine import Machine
    from anybatch.plans import Compile as Compiling
    from anybatch.task import Task

TaskName: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="TASK",
        help="A recipe's name, or FILE.py[:function], a function that returns an anybatch.Task.",
    ),
]
GlobalBatch: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--global-batch",
        metavar="N",
        help="Samples per optimizer step; or tokens (512Ktokens); or a ramp (64:4096:0.3).",
    ),
]
Memory: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="Memory that training may use, such as 10GiB; enforced. Default: what is free.",
    ),
]
PrecisionName: TypeAlias = Annotated[
    str,
    typer.Option(
        "--precision",
        metavar="P",
        help="fp32, tf32, bf16, fp16, bf16-weights, fp16-weights, bf16-pure, fp16-pure, fp8;"
        " or O0 to O3; auto: the fastest that the device has.",
    ),
]
MicroBatch: TypeAlias = Annotated[
    int | None,
    typer.Option("--micro-batch", metavar="N", help="Samples per forward pass. Default: chosen."),
]
RecomputeNames: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--recompute",
        metavar="WHAT",
        help="none, all, nested, or names of modules separated by commas. Default: chosen.",
    ),
]
ChunkedLoss: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--chunked-loss/--whole-loss",
        help="Cross-entropy in chunks, the logits never all there; or as written. Default: chosen.",
    ),
]
Compile: TypeAlias = Annotated[
    bool, typer.Option("--compile", help="Compile the blocks of the model (torch.compile).")
]
CompileIfFaster: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--compile-if-faster",
        help="Compile them if passes before the first step show that it is faster.",
    ),
]
Ranks: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        metavar="N",
        help="Processes to train with on this machine, one per device. Default: one for each GPU.",
    ),
]
ParallelName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--parallel",
        metavar="HOW",
        help="single, replicate or shard. Default: chosen.",
    ),
]
ShardOver: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--shard-over",
        metavar="N",
        help="Divide the model over N ranks (those of a machine, say); such groups replicate it.",
    ),
]
NormsName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--norms",
        metavar="HOW",
        help="BatchNorm: ghosts, synchronised, or as-written (over the whole batch). Default: chosen.",
    ),
]
Reproducible: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--reproducible",
        help="The same bits on any number of ranks, under any plan, after any restart.",
    ),
]
Grain: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--grain",
        metavar="N",
        help="Samples per pass of a reproducible run. Default: by the global batch, at most 32.",
    ),
]
RunFolder: TypeAlias = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder, as 'anybatch train' writes it.")
]
TaskOfRun: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--task",
        metavar="TASK",
        help="The task, where the run does not tell it or it has moved. Default: that of the run.",
    ),
]
Step: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--step",
        metavar="N",
        help="Weights of the checkpoint of that step. Default: the run's end, or its newest one.",
    ),
]
Settings: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("-s", "--set", metavar="KEY=VALUE", help="An argument of the task's function."),
]
DeviceName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="D",
        help="A GPU that is not here, by name (rtx-4090, h100-80gb) or memory (24GiB);"
        " or cpu, cuda, cuda:N of this machine.",
    ),
]
Devices: TypeAlias = Annotated[
    int | None,
    typer.Option("--devices", metavar="N", help="Devices, or processes on a CPU. Default: 1."),
]
Rehearsal: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--rehearsal/--no-rehearsal",
        help="Run passes of the plan here, undone, and plan by what they take. Default: where it takes"
        " seconds.",
    ),
]

Why: TypeAlias = Annotated[bool, typer.Option("--why", help="Show every plan that was rejected.")]


def compile_of(compile: bool, if_faster: bool) -> Compiling:
    """What `--compile` and `--compile-if-faster` mean. Raises `InputError` if both are given."""
    if compile and if_faster:
        raise InputError(
            "--compile and --compile-if-faster are both given, but the one compiles in any case and the"
            " other only where it proves faster: leave one of them out."
        )
    return "if-faster" if if_faster else compile


def check_backend(name: str | None) -> None:
    """Raises `InputError` if `name` is not the backend of torch.distributed that ranks use here."""
    import torch

    if name is None:
        return
    used, device = ("nccl", "GPUs") if torch.cuda.is_available() else ("gloo", "CPUs")
    if name.lower() == used:
        return
    remedy = f"leave it out, or give {used}"
    if name.lower() == "mpi":
        remedy += "; ranks that mpirun starts are recognised (mpirun -n 4 anybatch train ...)"
    raise InputError(f"--backend is {name!r}, and on {device} ranks exchange by {used}: {remedy}.")


def machine_of(device: str | None, devices: int | None) -> Machine | None:
    """What `--device` and `--devices` mean; None: this machine, as it is.

    Raises `InputError` if there is no such device.
    """
    from anybatch.machine import Machine

    if device is None and devices is None:
        return None
    if device is None or device.partition(":")[0] in ("cpu", "cuda"):
        return Machine.here(device=device, count=1 if devices is None else devices)
    return Machine.describe(device, count=devices)


def load_task(
    name: str,
    settings: Sequence[str] | None,
    global_batch: str | None,
    reproducible: bool = False,
    grain: int | None = None,
) -> Task:
    """The task named `name`. The global batch is passed to the task's function where that takes one,
    since other settings (the learning rate, say) may follow from it: where steps differ in size, a mean
    number of samples, of the larger end of a ramp. Else it is set in the task. That it is to be
    `reproducible`, in such a `grain`, is set in the task.

    Raises `InputError` for anything that is not as it should be.
    """
    from dataclasses import replace

    from anybatch.task import Grains

    task = _of_size(name, settings, global_batch)
    if grain is not None and not (reproducible or task.grains):
        raise InputError(
            f"--grain is {grain} and the run is not to be reproducible: give --reproducible too, or"
            " leave it out."
        )
    if grain is not None:
        return replace(task, reproducible=replace(task.grains or Grains(), samples=grain))
    return replace(task, reproducible=task.grains or True) if reproducible else task


def settings_of(settings: Sequence[str] | None) -> dict[str, str]:
    """What `-s` means, by name. Raises `InputError` for what is not of the form KEY=VALUE."""
    options: dict[str, str] = {}
    for setting in settings or ():
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise InputError(
                f"-s {setting!r} is not of the form KEY=VALUE: write -s epochs=3, say."
            )
        options[key.strip()] = value
    return options


def _of_size(name: str, settings: Sequence[str] | None, global_batch: str | None) -> Task:
    from dataclasses import replace

    from anybatch.batch_rule import parse_batch_rule
    from anybatch.data import mean_batch
    from anybatch.recipes import options_of, resolve

    options = settings_of(settings)
    if global_batch is None:
        return resolve(name, options)
    batch = parse_batch_rule(global_batch, "--global-batch")
    if not any(option.name == "global_batch" for option in options_of(name)):
        return replace(resolve(name, options), global_batch=batch)
    options.pop("global-batch", None)
    if isinstance(batch, int):
        return resolve(name, {**options, "global_batch": str(batch)})
    size = mean_batch(replace(resolve(name, options), global_batch=batch))
    task = resolve(name, {**options, "global_batch": str(size)})
    return replace(task, global_batch=batch)

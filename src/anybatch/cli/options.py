"""Options shared by several commands, and how they are parsed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, final, get_type_hints

import typer
from typer.core import TyperCommand

from anybatch.errors import InputError

if TYPE_CHECKING:
    from anybatch.machine import Machine
    from anybatch.task import Task


def option(flag: str, help: str, metavar: str | None = None) -> Any:
    """A command-line option, for `Annotated`. `metavar`: placeholder for its value in the help."""
    return typer.Option(flag, metavar=metavar, help=help)


_TASK = "A recipe's name, or FILE.py[:function], a function that returns an anybatch.Task."
_BATCH = "Samples per optimizer step; or tokens (512Ktokens); or a ramp (64:4096:0.3)."
_MEMORY = "Memory that training may use, such as 10GiB; enforced. Default: what is free."
_PRECISION = (
    "fp32, tf32, bf16, fp16, bf16-weights, fp16-weights, bf16-pure, fp16-pure, fp8; or O0 to O3; auto:"
    " the fastest that the device has."
)
_RECOMPUTE = "none, all, nested, or names of modules separated by commas. Default: chosen."
_LOSS = "Cross-entropy in chunks, the logits never all there; or as written. Default: chosen."
_SHARD = "Divide the model over N ranks (those of a machine, say); such groups replicate it."
_NORMS = "BatchNorm: ghosts, synchronised, or as-written (over the whole batch). Default: chosen."
_REPRODUCIBLE = "The same bits on any number of ranks, under any plan, after any restart."
_GRAIN = "Samples per pass of a reproducible run. Default: by the global batch, at most 32."
_REHEARSAL = (
    "Run passes of the plan here, undone, and plan by them. Default: where it takes seconds."
)
_TASK_OF_RUN = "The task, where the run does not tell it or it has moved. Default: that of the run."
_STEP = "Weights of the checkpoint of that step. Default: the run's end, or its newest one."
_DEVICE = (
    "A GPU that is not here, by name (rtx-4090, h100-80gb) or memory (24GiB); or cpu, cuda, cuda:N of"
    " this machine."
)
_JSON_FILE = "Save all of it as JSON; without FILE, print that and nothing else."
_SETTING = "An argument of the task's function."

TaskName: TypeAlias = Annotated[str, typer.Argument(metavar="TASK", help=_TASK)]
GlobalBatch: TypeAlias = Annotated[str | None, option("--global-batch", _BATCH, "N")]
Memory: TypeAlias = Annotated[str | None, option("--memory", _MEMORY, "SIZE")]
PrecisionName: TypeAlias = Annotated[str, option("--precision", _PRECISION, "P")]
MicroBatch: TypeAlias = Annotated[
    int | None, option("--micro-batch", "Samples per forward pass. Default: chosen.", "N")
]
RecomputeNames: TypeAlias = Annotated[str | None, option("--recompute", _RECOMPUTE, "WHAT")]
ChunkedLoss: TypeAlias = Annotated[bool | None, option("--chunked-loss/--whole-loss", _LOSS)]
ParallelName: TypeAlias = Annotated[
    str | None, option("--parallel", "single, replicate or shard. Default: chosen.", "HOW")
]
NormsName: TypeAlias = Annotated[str | None, option("--norms", _NORMS, "HOW")]
Rehearsal: TypeAlias = Annotated[bool | None, option("--rehearsal/--no-rehearsal", _REHEARSAL)]
RunFolder: TypeAlias = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder, as 'anybatch train' writes it.")
]
TaskOfRun: TypeAlias = Annotated[str | None, option("--task", _TASK_OF_RUN, "TASK")]
Step: TypeAlias = Annotated[int | None, option("--step", _STEP, "N")]
Settings: TypeAlias = Annotated[
    list[str] | None, typer.Option("-s", "--set", metavar="KEY=VALUE", help=_SETTING)
]
DeviceName: TypeAlias = Annotated[str | None, option("--device", _DEVICE, "D")]
Devices: TypeAlias = Annotated[
    int | None, option("--devices", "Devices, or processes on a CPU. Default: 1.", "N")
]
Why: TypeAlias = Annotated[bool, option("--why", "Show every plan that was rejected.")]
JsonFile: TypeAlias = Annotated[str | None, option("--json", _JSON_FILE, "[FILE]")]


@dataclass(frozen=True)
class PlanningOptions:
    """Planning options shared by `train`, `plan` and `memory`. `with_groups` adds them to a command."""

    global_batch: GlobalBatch = None
    memory: Memory = None
    precision: PrecisionName = "fp32"
    micro_batch: MicroBatch = None
    recompute: RecomputeNames = None
    chunked_loss: ChunkedLoss = None
    compile: Annotated[
        bool, option("--compile", "Compile the blocks of the model (torch.compile).")
    ] = False
    reproducible: Annotated[bool, option("--reproducible", _REPRODUCIBLE)] = False
    grain: Annotated[int | None, option("--grain", _GRAIN, "N")] = None
    parallel: ParallelName = None
    shard_over: Annotated[int | None, option("--shard-over", _SHARD, "N")] = None
    settings: Settings = None

    def load(self, task: str) -> Task:
        """Load the task named `task`, see `load_task`."""
        given = self.settings, self.global_batch, self.reproducible, self.grain
        return load_task(task, *given)

    def of_plan(self) -> dict[str, Any]:
        """Keyword arguments of `anybatch.plan`. Raises `InputError` if one is invalid."""
        from anybatch.plans import parse_parallel, parse_sharding

        return {
            "memory": self.memory,
            "precision": self.precision,
            "micro_batch": self.micro_batch,
            "recompute": self.recompute,
            "chunked_loss": self.chunked_loss,
            "parallel": parse_parallel(self.parallel),
            "sharding": parse_sharding(self.shard_over),
            "compile": self.compile,
        }


def with_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return `command` with each dataclass parameter replaced by one option per field, since typer does
    not support groups of options."""
    groups: dict[str, Any] = {}
    options: list[inspect.Parameter] = []
    signature = inspect.signature(command, eval_str=True)
    for name, parameter in signature.parameters.items():
        if is_dataclass(parameter.annotation):
            groups[name] = kind = parameter.annotation
            hints = get_type_hints(kind, include_extras=True)
            options += [
                parameter.replace(name=it.name, annotation=hints[it.name], default=it.default)
                for it in fields(kind)
            ]
        else:
            options.append(parameter)

    def called(**values: Any) -> Any:
        made = {
            name: kind(**{it.name: values.pop(it.name) for it in fields(kind)})
            for name, kind in groups.items()
        }
        return command(**made, **values)

    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__annotations__ = {it.name: it.annotation for it in options}
    called.__dict__["__signature__"] = signature.replace(parameters=options)
    return called


STANDARD_OUTPUT = "-"

_MEANT = {"--json": STANDARD_OUTPUT, "--tensorboard": ""}
"""Values of options given without one: as the last word, or followed by another option."""


@final
class BareOptions(TyperCommand):
    """A command whose `--json` and `--tensorboard` do not require a value. The default for `--json` is
    standard output, as in `anybatch plan --json`; for `--tensorboard`, the folder of the run."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(_with_values(args)))


def _with_values(words: list[str]) -> Iterator[str]:
    for word, following in pairwise([*words, "--"]):
        is_bare = following.startswith("-") and following != STANDARD_OUTPUT
        yield f"{word}={_MEANT[word]}" if is_bare and word in _MEANT else word


def check_backend(name: str | None) -> None:
    """Raises `InputError` if `name` is not the torch.distributed backend used on this machine."""
    import torch

    used, device = ("nccl", "GPUs") if torch.cuda.is_available() else ("gloo", "CPUs")
    if name is not None and name.lower() != used:
        raise InputError(
            f"--backend is {name!r}, and on {device} ranks exchange by {used}: leave it out, or give"
            f" {used}. Ranks that mpirun starts are recognised (mpirun -n 4 anybatch train ...)."
        )


def machine_of(device: str | None, devices: int | None) -> Machine | None:
    """The machine specified by `--device` and `--devices`; None if neither is given.

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
    """Load the task named `name`.

    If the task's function has an argument `global_batch`, the global batch is passed to it, since other
    settings (such as the learning rate) may depend on it. If steps differ in size, the function gets
    the mean number of samples in a step (of the largest batch of a ramp), and the batch rule is set in
    the task. If the function has no such argument, the global batch is only set in the task, as are
    `reproducible` and `grain`.

    Raises `InputError` if an argument is invalid.
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
    """Parse `-s` options into a dict. Raises `InputError` if one is not of the form KEY=VALUE, or a key
    is given with two values."""
    options: dict[str, str] = {}
    for setting in settings or ():
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise InputError(
                f"-s {setting!r} is not of the form KEY=VALUE: write -s epochs=3, say."
            )
        if options.get(key.strip(), value) != value:
            raise InputError(
                f"-s {key.strip()} is given twice, as {options[key.strip()]!r} and {value!r}: give it"
                " once."
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
    if "global_batch" in options:
        raise InputError(
            f"--global-batch is {global_batch!r} and -s global_batch={options['global_batch']} is given"
            " too: leave one of them out."
        )
    batch = parse_batch_rule(global_batch, "--global-batch")
    if not any(option.name == "global_batch" for option in options_of(name)):
        return replace(resolve(name, options), global_batch=batch)
    options.pop("global-batch", None)
    size = batch
    if not isinstance(batch, int):
        size = mean_batch(replace(resolve(name, options), global_batch=batch))
    task = resolve(name, {**options, "global_batch": str(size)})
    return replace(task, global_batch=batch)  # also if the function ignores its argument

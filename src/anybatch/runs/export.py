"""Export of a run's weights for other programs.

    safetensors    one file, with the names of the model's `state_dict`
    torch          the same weights, for `torch.load(path, weights_only=True)`
    huggingface    a folder for `from_pretrained` of transformers or, for adapters, of peft

Export needs no data, optimizer or GPU, and a single process, however many ranks the run had. The model
is built only if something is needed that the run folder does not contain, such as the base model of
adapters.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from anybatch.errors import InputError, as_setting, listed, setting
from anybatch.parallel import SingleDevice
from anybatch.process.files import whole_folder
from anybatch.recipes.quantized import dequantize
from anybatch.report import PastRun, read_run
from anybatch.report.folder import ADAPTERS, PRETRAINED
from anybatch.runs.reload_run import check_has_weights, checked_step, task_of
from anybatch.state import (
    TORCH_SUFFIXES,
    Checkpoints,
    converted,
    has_adapters,
    load_state,
    save_adapters,
    weights_of_checkpoint,
    weights_of_file,
    write_state,
)
from anybatch.state.pretrained import (
    ADAPTER_WEIGHTS,
    WEIGHTS,
    check_pretrained,
    is_kept,
    set_dtype,
    write_beside,
)
from anybatch.task import Task

Format = Literal["safetensors", "torch", "huggingface"]
"""Format of the exported weights; see the module."""

Dtype = Literal["fp32", "bf16", "fp16"]

_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_SAFETENSORS = ".safetensors"
_ENDING = {"safetensors": _SAFETENSORS, "torch": ".pt", "huggingface": "-huggingface"}
_OF_FOLDERS = (
    "config.json",
    "adapter_config.json",
)  # every exported folder contains one of them


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of `export`.

    Attributes:
        path: file or folder that was written.
        format: see `export`.
        step: step at which the weights were saved.
        source: file, folder of adapters or checkpoint that the weights were read from.
        num_tensors: number of tensors; tied ones are counted once.
        num_bytes: size of the file, or of all files in the folder.
    """

    path: Path
    format: Format
    step: int
    source: Path
    num_tensors: int
    num_bytes: int


def export(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    step: int | None = None,
    format: Format | None = None,
    dtype: Dtype | None = None,
    merge: bool = False,
    force: bool = False,
    task: Task | str | None = None,
    settings: Mapping[str, str] | None = None,
) -> Exported:
    """Write the weights of a run to a file or folder, either completely or not at all. The run folder
    is not modified. A single process exports the weights, however many ranks the run had; if there are
    several processes, only one may call this.

    Args:
        run: folder written by `train`.
        out: file or folder to write; None: in the current folder, named after the run.
        step: step of the checkpoint to export, whose weights have the precision in which they were
            trained; None: the final weights, or those of the newest intact checkpoint if the run has
            not finished.
        format: `"safetensors"`; `"torch"`, a `state_dict` for `torch.load(path, weights_only=True)`; or
            `"huggingface"`, a folder for `from_pretrained` of transformers or, for a model with
            adapters, of which only the adapters are written, of peft. None: determined by the suffix of
            `out` (`.pt`, `.pth`, `.bin` and `.ckpt` mean `"torch"`), or safetensors without `out`.
        dtype: dtype for floating-point tensors, `"fp32"`, `"bf16"` or `"fp16"`; None: unchanged.
        merge: merge peft's adapters into the base weights, and write the model without adapters.
        force: replace existing files.
        task, settings: see `evaluate`. Used only if the model has to be built: to merge, for weights
            that were not trained and that a checkpoint therefore omits, and for the adapters of a
            checkpoint.

    Raises `InputError` if `run` is not a run folder or does not have these weights; the weights are
    damaged; the model is not a transformers model or has no adapters, where the arguments require it;
    the target exists; or it cannot be written.
    """
    checked_step(step)
    if dtype is not None and dtype not in _DTYPES:
        raise InputError(f"{setting('dtype')} is {dtype!r}: give {listed(_DTYPES, str(dtype))}.")
    found = read_run(run)
    form, target = _target(found, out, format, step)
    _check_free(found, target, form, force)
    if step is None and not found.has_final_weights:
        check_has_weights(found)

    @cache
    def build() -> nn.Module:
        return task_of(found, task, settings).build_model()

    job = _Job(found, step, None if dtype is None else _DTYPES[dtype], merge, build)
    if form == "huggingface":
        taken, num_tensors = job.to_folder(target, force)
    else:
        taken = job.taken()
        state = job.merged(taken).state_dict() if merge else taken.state
        num_tensors = _num_tensors(state)
        _make_folder(target.parent)
        write_state(job.in_dtype(state), target, as_torch=form == "torch")
    files = [target] if target.is_file() else [f for f in target.rglob("*") if f.is_file()]
    num_bytes = sum(file.stat().st_size for file in files)
    return Exported(target, form, taken.step, taken.source, num_tensors, num_bytes)


@dataclass(frozen=True, slots=True)
class _Taken:
    """Weights by the names of the plain model's `state_dict`, their step, and the path they were read
    from."""

    state: Mapping[str, Any]
    step: int
    source: Path


@dataclass(frozen=True)
class _Job:
    """Arguments of `export`, with methods that read, convert and write the weights. `build` builds the
    task's model, once."""

    run: PastRun
    step: int | None
    dtype: torch.dtype | None
    merge: bool
    build: Callable[[], nn.Module]

    def taken(self) -> _Taken:
        """Returns all weights. Raises `InputError` as `export` does."""
        run = self.run
        if self.step is None and run.has_final_weights:
            return _Taken(weights_of_file(run.weights), run.step, run.weights)
        checkpoints = Checkpoints(run.checkpoints, SingleDevice())
        found = checkpoints.newest(self.step, reads_only="weights/")
        assert found is not None  # checked by `export`
        state = weights_of_checkpoint(checkpoints, found, self.build)
        return _Taken(state, found.step, found.folder)

    def merged(self, taken: _Taken) -> nn.Module:
        """Returns the model with the adapters merged into its weights."""
        model: Any = self._with_weights(taken)
        if not has_adapters(model):
            raise InputError(
                f"merge is asked for, but the model of {self.run.task!r} has no adapters of peft: leave"
                " it out."
            )
        try:
            dequantize(model)
            return model.merge_and_unload()
        except Exception as error:  # the type depends on the kind of adapters
            raise InputError(
                f"peft cannot merge the adapters of {self.run.task!r} ({type(error).__name__}:"
                f" {error}): leave merge out, and they are written by themselves."
            ) from error

    def to_folder(self, target: Path, force: bool) -> tuple[_Taken, int]:
        """Write a folder for `from_pretrained`. Returns the weights that were read for it, and the
        number of tensors in the folder."""
        run = self.run
        adapters, kept = run.folder / ADAPTERS, run.folder / PRETRAINED
        copy = partial(shutil.copytree, dirs_exist_ok=True)
        write_rest: Callable[[Path], object]  # everything but the weights; adapters with theirs
        if self.merge:
            taken = self.taken()
            model = self.merged(taken)
            check_pretrained(model, run.task)
            write_rest, state = partial(write_beside, model), model.state_dict()
        elif self.step is None and run.has_final_weights and adapters.is_dir():
            taken = _Taken({}, run.step, adapters)
            write_rest, state = partial(copy, adapters), None
        elif is_kept(kept):
            taken = self.taken()
            write_rest, state = partial(copy, kept), taken.state
        elif has_adapters(self.build()):
            taken = self.taken()
            write_rest, state = partial(save_adapters, self._with_weights(taken)), None
        else:
            check_pretrained(self.build(), run.task)
            taken = self.taken()
            write_rest, state = partial(write_beside, self.build()), taken.state
        with whole_folder(target, "the model", replaces=force) as folder:
            write_rest(folder)
            if state is None:
                return taken, self._convert_adapters(folder)
            return taken, self._write_weights(state, folder)

    def in_dtype(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `state` in the requested dtype."""
        return dict(state) if self.dtype is None else converted(state, self.dtype)

    def _write_weights(self, taken: Mapping[str, Any], folder: Path) -> int:
        """Write all weights of a model to `folder`. Returns the number of tensors."""
        state = self.in_dtype(taken)
        values = [value for value in state.values() if isinstance(value, Tensor)]
        dtypes = {value.dtype for value in values if value.is_floating_point()}
        set_dtype(folder, dtypes.pop() if len(dtypes) == 1 else None)
        write_state(state, folder / WEIGHTS)
        return _num_tensors(state)

    def _convert_adapters(self, folder: Path) -> int:
        """Convert the adapters in `folder` to the requested dtype. Returns the number of tensors."""
        count = 0
        for path in sorted(folder.rglob(ADAPTER_WEIGHTS)):
            state = weights_of_file(path)
            count += _num_tensors(state)
            if self.dtype is not None:
                write_state(self.in_dtype(state), path)
        return count

    def _with_weights(self, taken: _Taken) -> nn.Module:
        model = self.build()
        load_state(model, taken.state, taken.source)
        return model.eval()


def _target(
    run: PastRun, out: str | os.PathLike[str] | None, format: Format | None, step: int | None
) -> tuple[Format, Path]:
    """Returns the format and the path to write to. Raises `InputError` if they contradict each
    other."""
    if format is not None and format not in get_args(Format):
        choices = listed(get_args(Format), str(format))
        raise InputError(f"{setting('format')} is {format!r}: give {choices}.")
    if out is None:
        form = format or "safetensors"
        name = run.folder.resolve().name + ("" if step is None else f"-step-{step}")
        return form, Path(f"{name}{_ENDING[form]}")
    target = Path(out)
    named: Format | None = None
    if target.suffix in TORCH_SUFFIXES:
        named = "torch"
    elif target.suffix == _SAFETENSORS:
        named = "safetensors"
    if format is None and named is None:
        raise InputError(
            f"{target} does not tell what is to be written: end its name in .safetensors or .pt, or"
            f" give {as_setting('format')}, {listed(get_args(Format))}."
        )
    if format is not None and named is not None and format != named:
        raise InputError(
            f"{setting('format')} is {format!r}, and {target} is named as {named} is: leave one of them"
            " out."
        )
    form = format or named
    assert form is not None
    return form, target


def _check_free(run: PastRun, target: Path, form: Format, force: bool) -> None:
    """Raises `InputError` if `target` exists and must not be replaced."""
    is_folder = form == "huggingface"
    is_empty = target.is_dir() and not any(target.iterdir())
    if not os.path.lexists(target) or (is_folder and is_empty):
        return
    if target.resolve().is_relative_to(run.folder.resolve()):
        raise InputError(
            f"{target} is a part of the run itself, which stays as it is: name another."
        )
    if target.is_dir() != is_folder:
        what, wanted = ("a folder", "a file") if target.is_dir() else ("a file", "a folder")
        raise InputError(f"{target} is {what}, and {form} is {wanted}: name another.")
    if is_folder and not any((target / name).is_file() for name in _OF_FOLDERS):
        raise InputError(
            f"the folder {target} is not empty, and holds no model: name another one, or one that is"
            " not there."
        )
    if not force:
        raise InputError(
            f"{target} is there already: name another, or replace it with"
            f" {as_setting('force', True)}."
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "Not a directory" if folder.exists() else error.strerror
        raise InputError(
            f"the folder {folder} for the weights cannot be made: {reason}; name another."
        ) from None


def _num_tensors(state: Mapping[str, Any]) -> int:
    return len({id(value) for value in state.values() if isinstance(value, Tensor)})

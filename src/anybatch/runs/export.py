"""Exporting: the weights of a run, taken out of its folder for other programs.

    safetensors    one file, by the names of the model's `state_dict`
    torch          the same, as `torch.load(path, weights_only=True)` reads it
    huggingface    a folder that `from_pretrained` of transformers reads; of adapters, that of peft

Neither data nor optimizer nor GPU is needed, and one process is enough, whatever the run was. The model
is made only where something of it is wanted that the folder does not hold: a base under adapters, say.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from anybatch.errors import InputError, listed
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
"""What is written; see the module."""

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
)  # one of them is in every folder that is written


@dataclass(frozen=True, slots=True)
class Exported:
    """What `export` wrote.

    Attributes:
        path: the file or folder.
        format: see `export`.
        step: of the weights.
        source: the file that they are from, the folder of adapters, or the checkpoint.
        num_tensors: tied ones counted once.
        num_bytes: of the file, or of all files of the folder.
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
    """Write the weights of a run to a file or folder, whole or not at all. The run's own folder stays
    as it is. One process does it, whatever ranks the run had: of several that are there, one is to call
    it.

    Args:
        run: the folder that `train` wrote.
        out: where to; None: in the current folder, named after the run.
        step: of a checkpoint, in which weights are as precise as they were trained; None: the weights
            of the run's end, or if it has not finished, of its newest intact checkpoint.
        format: `"safetensors"`; `"torch"`, a `state_dict` for `torch.load(path, weights_only=True)`; or
            `"huggingface"`, a folder for `from_pretrained`: of transformers, or of peft for a model
            with adapters of which only these are written. None: by the name of `out` (`.pt`, `.pth`,
            `.bin`, `.ckpt` are torch's), else safetensors.
        dtype: of floating point numbers, `"fp32"`, `"bf16"` or `"fp16"`; None: as they are.
        merge: add the adapters of peft to the weights below them, and write the model without adapters.
        force: replace what is there.
        task, settings: as for `evaluate`; of use only where the model has to be made: to merge, for
            weights that nothing trained and a checkpoint has left out, and for the adapters of a
            checkpoint.

    Raises `InputError` if it is no run folder, or has no such weights; they are damaged; the model is
    none of transformers, or has no adapters, where that is asked for; something is there already; or
    nothing can be written there.
    """
    checked_step(step)
    _check_dtype(dtype)
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
        state = job.merged(taken).state if merge else taken.state
        num_tensors = _num_tensors(state)
        _make_folder(target.parent)
        write_state(job.in_dtype(state), target, as_torch=form == "torch")
    files = [target] if target.is_file() else [f for f in target.rglob("*") if f.is_file()]
    num_bytes = sum(file.stat().st_size for file in files)
    return Exported(target, form, taken.step, taken.source, num_tensors, num_bytes)


@dataclass(frozen=True, slots=True)
class _Taken:
    """Weights by the names of the `state_dict` of the plain model, the step that they are of, and where
    they are from."""

    state: Mapping[str, Any]
    step: int
    source: Path


@dataclass(frozen=True, slots=True)
class _Merged:
    """A model without its adapters, and its weights."""

    model: nn.Module
    state: Mapping[str, Any]


@dataclass(frozen=True)
class _Job:
    """What is to be taken out, and how. `build` makes the model of the task, once."""

    run: PastRun
    step: int | None
    dtype: torch.dtype | None
    merge: bool
    build: Callable[[], nn.Module]

    def taken(self) -> _Taken:
        """All weights. Raises `InputError` as `export` does."""
        run = self.run
        if self.step is None and run.has_final_weights:
            return _Taken(weights_of_file(run.weights), run.step, run.weights)
        checkpoints = Checkpoints(run.checkpoints, SingleDevice())
        found = checkpoints.newest(self.step, only="weights/", touches=False)
        assert found is not None  # that there is none was told before
        state = weights_of_checkpoint(checkpoints, found, self.build)
        return _Taken(state, found.step, found.folder)

    def merged(self, taken: _Taken) -> _Merged:
        """The weights with the adapters added to them."""
        model = self._with_weights(taken)
        if not has_adapters(model):
            raise InputError(
                f"merge is asked for, but the model of {self.run.task!r} has no adapters of peft: leave"
                " it out."
            )
        try:
            plain: Any = dequantize(model)
            plain = plain.merge_and_unload()
        except Exception as error:  # of every kind of adapters that cannot be
            raise InputError(
                f"peft cannot merge the adapters of {self.run.task!r} ({type(error).__name__}:"
                f" {error}): leave merge out, and they are written by themselves."
            ) from error
        return _Merged(plain, plain.state_dict())

    def to_folder(self, target: Path, force: bool) -> tuple[_Taken, int]:
        """Write a folder for `from_pretrained`: the weights that were taken for it, and how many
        tensors it has."""
        adapters = self.run.folder / ADAPTERS
        if self.merge:
            taken = self.taken()
            write = self._writer_of(self.merged(taken))
        elif self.step is None and self.run.has_final_weights and adapters.is_dir():
            taken = _Taken({}, self.run.step, adapters)
            write = self._writer_of_adapters(
                lambda folder: shutil.copytree(adapters, folder, dirs_exist_ok=True)
            )
        elif is_kept(kept := self.run.folder / PRETRAINED):
            taken = self.taken()
            write = self._writer(
                lambda folder: shutil.copytree(kept, folder, dirs_exist_ok=True), taken.state
            )
        elif has_adapters(self.build()):
            taken = self.taken()
            model = self._with_weights(taken)
            write = self._writer_of_adapters(lambda folder: save_adapters(model, folder))
        else:
            check_pretrained(self.build(), self.run.task)
            taken = self.taken()
            write = self._writer_of(_Merged(self.build(), taken.state))
        with whole_folder(target, "the model", replaces=force) as partial:
            return taken, write(partial)

    def in_dtype(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """`state` in the dtype that is asked for."""
        return dict(state) if self.dtype is None else converted(state, self.dtype)

    def _writer_of(self, made: _Merged) -> Callable[[Path], int]:
        check_pretrained(made.model, self.run.task)
        return self._writer(lambda folder: write_beside(made.model, folder), made.state)

    def _writer(
        self, write_rest: Callable[[Path], object], taken: Mapping[str, Any]
    ) -> Callable[[Path], int]:
        """Writes a whole model into a folder; `write_rest` writes all but the weights."""
        state = self.in_dtype(taken)
        values = [value for value in state.values() if isinstance(value, Tensor)]
        dtypes = {value.dtype for value in values if value.is_floating_point()}

        def write(folder: Path) -> int:
            write_rest(folder)
            set_dtype(folder, dtypes.pop() if len(dtypes) == 1 else None)
            write_state(state, folder / WEIGHTS)
            return _num_tensors(state)

        return write

    def _writer_of_adapters(self, write_all: Callable[[Path], object]) -> Callable[[Path], int]:
        """Writes adapters into a folder; `write_all` writes them as they are."""

        def write(folder: Path) -> int:
            write_all(folder)
            count = 0
            for path in sorted(folder.rglob(ADAPTER_WEIGHTS)):
                state = weights_of_file(path)
                count += _num_tensors(state)
                if self.dtype is not None:
                    write_state(self.in_dtype(state), path)
            return count

        return write

    def _with_weights(self, taken: _Taken) -> nn.Module:
        model = self.build()
        load_state(model, taken.state, taken.source)
        return model.eval()


def _target(
    run: PastRun, out: str | os.PathLike[str] | None, format: Format | None, step: int | None
) -> tuple[Format, Path]:
    """What is written, and where. Raises `InputError` if they do not go together."""
    if format is not None and format not in get_args(Format):
        raise InputError(f"format is {format!r}: give {listed(get_args(Format), str(format))}.")
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
            f" give a format, {listed(get_args(Format))}."
        )
    if format is not None and named is not None and format != named:
        raise InputError(
            f"format is {format!r}, and {target} is named as {named} is: leave one of them out."
        )
    form = format or named
    assert form is not None
    return form, target


def _check_free(run: PastRun, target: Path, form: Format, force: bool) -> None:
    """Raises `InputError` if what is at `target` is not to be replaced."""
    is_folder = form == "huggingface"
    if not os.path.lexists(target) or (is_folder and _is_empty(target)):
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
            f"{target} is there already: name another, or replace it with --force (in Python,"
            " force=True)."
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "Not a directory" if folder.exists() else error.strerror
        raise InputError(
            f"the folder {folder} for the weights cannot be made: {reason}; name another."
        ) from None


def _is_empty(target: Path) -> bool:
    return target.is_dir() and not any(target.iterdir())


def _check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in _DTYPES:
        raise InputError(f"dtype is {dtype!r}: give {listed(_DTYPES, str(dtype))}.")


def _num_tensors(state: Mapping[str, Any]) -> int:
    return len({id(value) for value in state.values() if isinstance(value, Tensor)})

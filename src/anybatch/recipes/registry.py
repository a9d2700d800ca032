"""Resolution of a specification to a `Task`: a recipe's name, or the user's `FILE.py[:function]`.

The table below holds names, not functions, because listing the recipes must not import torch, and a
recipe whose library is not installed must not hide the others. A user's file is executed as by `python
FILE.py`: its folder is prepended to `sys.path` permanently, so that the file can import neighboring
files during training too. Errors are reported with the frames of the user's files only, without those
of the import system.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from anybatch.errors import AnybatchError, InputError, listed
from anybatch.recipes.options import Option, bind, options_in

if TYPE_CHECKING:
    from anybatch.task import Task


_RECIPES = {
    "digits": "Handwritten digits (scikit-learn's, or MNIST's files): a small residual network.",
    "finetune": "A language model or a classifier of transformers, from a folder, on data of your own.",
    "images": "Images in folders, one per class: a residual network, or a model of torchvision.",
    "text": "Text (the sources of Python's library, or any files): a transformer language model.",
}
"""Descriptions of the recipes. Each recipe is a function in the module of the same name."""

_DEFAULT_FUNCTION = "task"
_UNNAMED = "task"  # default name of a Task


def names() -> dict[str, str]:
    """Returns recipe names with one-line descriptions. Imports neither torch nor any recipe."""
    return dict(_RECIPES)


def resolve(spec: str, options: Mapping[str, str] | None = None) -> Task:
    """Returns the task for `spec`: a recipe's name, or `FILE.py[:function]` (default `task`).

    `options` are the `key=value` strings of the command line, converted by the function's annotations.
    A task without a name is named after the recipe or file. `Task.origin` is set, so that the task can
    be resolved again.

    Raises:
        InputError: with one sentence that names the spec, the fault and the remedy, followed by the
            traceback if the user's code raised. An `AnybatchError` raised by that code (for example,
            for a task that cannot be trained) propagates unchanged.
    """
    from anybatch.task import Origin, Task  # imports torch, so not at module level

    found = _find(spec)
    bound = bind(found.function, options or {}, found.place)
    try:
        task = found.function(*bound.args, **bound.kwargs)
    except AnybatchError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{found.place} raised {type(error).__name__}: see the traceback below and correct the"
            f" function or its options.\n{_short_traceback(error, found.file)}"
        ) from error
    if not isinstance(task, Task):
        what = "None" if task is None else f"a value of type {type(task).__name__}"
        raise InputError(f"{found.place} returned {what}: return an anybatch.Task.")
    origin = Origin(found.origin, _whole_paths(options or {}, bound.arguments), found.sha256)
    name = found.name if task.name == _UNNAMED else task.name
    return replace(task, name=name, origin=origin)


def options_of(spec: str) -> list[Option]:
    """Returns the options that `resolve(spec, ...)` accepts: name, type, default, documentation.

    Imports the recipe or executes the file, but does not call its function. Raises `InputError` like
    `resolve`.
    """
    return options_in(_find(spec).function)


# ------------------------------------------------------------------------------- find the function


class _Found(NamedTuple):
    function: Callable[..., Any]
    place: str  # for messages: "the recipe 'digits'"
    name: str  # for a task without a name
    file: Path  # its frames are shown in tracebacks
    origin: str  # spec that is valid from any folder
    sha256: str = ""  # of the user's file


def _find(spec: str) -> _Found:
    if spec in _RECIPES:
        recipes = importlib.import_module(f"anybatch.recipes.{spec}")
        file = Path(str(recipes.__file__))
        return _Found(getattr(recipes, spec), f"the recipe {spec!r}", spec, file, spec)
    path, function = _split(spec)
    if os.sep not in path and not path.endswith(".py") and not os.path.lexists(path):
        own = f"{path}.py" if os.path.isfile(f"{path}.py") else "FILE.py"
        raise InputError(
            f"there is no recipe {spec!r}: give {listed(_RECIPES, path.lower())}, or a file of your own"
            f" as {own} or {own}:function."
        )
    file = _checked_file(spec, path)
    module = _load(file, spec)
    name = _DEFAULT_FUNCTION if function is None else function
    return _Found(
        _function_in(module, name, spec),
        f"the function {name!r} of {path!r}",
        file.stem,
        file,
        f"{file}:{name}",
        sha256_of(file),
    )


def file_of(spec: str) -> Path | None:
    """Returns the file that `spec` names, whether or not it exists; None for the name of a recipe."""
    path, _ = _split(spec)
    return None if spec in _RECIPES else Path(os.path.expanduser(path)).resolve()


def sha256_of(file: Path) -> str:
    """Returns the SHA-256 of a file's content, in hexadecimal."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _whole_paths(options: Mapping[str, str], arguments: Mapping[str, Any]) -> dict[str, str]:
    """Returns `options` keyed by the names of the function's arguments, with absolute paths."""
    texts = {}
    for key, text in options.items():
        name = key if key in arguments else key.replace("-", "_")
        value = arguments.get(name)
        texts[name] = str(value.absolute()) if isinstance(value, Path) else text
    return texts


def _split(spec: str) -> tuple[str, str | None]:
    """Splits `spec` into file and function. A colon inside a folder's name is not a separator."""
    path, colon, function = spec.rpartition(":")
    if colon and (path.endswith(".py") or os.sep not in function):
        return path, function
    return spec, None


def _checked_file(spec: str, path: str) -> Path:
    expanded = os.path.expanduser(path)
    remedy = "give a Python file as FILE.py or FILE.py:function"
    if not os.path.exists(expanded):
        files = sorted(Path(os.path.dirname(expanded) or os.curdir).glob("*.py"))
        there = f", such as {listed(map(str, files), path)}" if files else ""
        raise InputError(
            f"the file {path!r} of the task {spec!r} does not exist (looked from {os.getcwd()}):"
            f" {remedy}{there}."
        )
    if not path.endswith(".py") or not os.path.isfile(expanded):
        raise InputError(f"the task {spec!r} is not a .py file: {remedy}.")
    return Path(expanded).resolve()


def _function_in(module: ModuleType, name: str, spec: str) -> Callable[..., Any]:
    functions = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not key.startswith("_")
    ]
    function = getattr(module, name, None)
    if not callable(function):
        remedy = (
            f"name one of its functions as FILE.py:function, {listed(functions, name)}"
            if functions
            else "it has none at all; write one that returns an anybatch.Task"
        )
        raise InputError(f"the file of the task {spec!r} has no function {name!r}: {remedy}.")
    return function


# ----------------------------------------------------------------------------- run the user's file


_loaded: dict[Path, tuple[ModuleType, tuple[int, int]]] = {}
"""Modules by file, with the modification time and size that the file had when it was executed."""


def _load(file: Path, spec: str) -> ModuleType:
    """Returns the module of `file`. The file is executed once, and again if it has changed since."""
    known, before = _loaded.get(file, (None, None))
    status = file.stat()
    state = (status.st_mtime_ns, status.st_size)
    if known is not None and before == state:
        return known
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    name = known.__name__ if known is not None else _module_name(file)
    module = _run(file, name, spec)
    _loaded[file] = module, state
    return module


def _run(file: Path, name: str, spec: str) -> ModuleType:
    # Compiled each time, as by `python FILE.py`: no cache is written next to the file or can be stale.
    module = ModuleType(name)
    module.__file__ = str(file)
    before = sys.modules.get(name)
    # Registered before execution, since dataclasses and pickle look up a class's module by name.
    sys.modules[name] = module
    try:
        exec(compile(file.read_bytes(), str(file), "exec", dont_inherit=True), vars(module))
    except BaseException as error:
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before
        if isinstance(error, AnybatchError) or not isinstance(error, Exception | SystemExit):
            raise
        raise InputError(
            f"the file of the task {spec!r} cannot be imported, since it raised"
            f" {type(error).__name__}: see the traceback below and correct the file.\n"
            f"{_short_traceback(error, file)}"
        ) from error
    return module


def _module_name(file: Path) -> str:
    """Returns the name under which a plain `import` finds this file, or else a unique name.

    With its import name, a neighboring file that imports it gets the same module, not a second copy of
    its classes, and a spawned process (which inherits `sys.path`) can unpickle them. A file with the
    name of another module (`json.py`, or a second `train.py`) must not replace that module.
    """
    if file.stem.isidentifier() and file.stem not in sys.modules:
        importlib.invalidate_caches()
        spec = importlib.util.find_spec(file.stem)
        if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file:
            return file.stem
    digest = hashlib.sha256(str(file).encode(errors="surrogateescape")).hexdigest()[:8]
    return f"anybatch_task_{digest}_{file.stem}"


def _short_traceback(error: BaseException, file: Path) -> str:
    summary = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in summary.stack if _is_own(Path(frame.filename), file)]
    lines = ["Traceback (the frames of your files only):\n"] if frames else []
    lines += traceback.StackSummary.from_list(frames).format()
    lines += summary.format_exception_only()
    return "".join(lines).rstrip("\n")


def own_traceback(error: BaseException) -> str:
    """Formats the traceback of `error` with only the frames of files that were executed as tasks and of
    their neighboring files. Returns an empty string if there are no such frames."""
    frames = traceback.extract_tb(error.__traceback__)
    for file in _loaded:
        if any(Path(frame.filename) == file for frame in frames):
            return _short_traceback(error, file)
    return ""


def _is_own(frame: Path, file: Path) -> bool:
    if frame == file:
        return True
    package = Path(__file__).resolve().parents[1]
    installed = "site-packages" in frame.parts or frame.is_relative_to(package)
    return frame.is_relative_to(file.parent) and not installed

"""Plain: the weights of a run as the `state_dict` of the plain model, without the model, its optimizer,
its ranks or its data.

Of a finished run they lie in a file; a checkpoint has them divided over as many files as there were
ranks, beside what the optimizer remembers, which is not read. What a checkpoint leaves out, since
nothing trains it, is the task's to build.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.errors import InputError
from anybatch.state.base import check_same, checksums_of
from anybatch.state.checkpoints import Checkpoints, Found
from anybatch.state.training import Facts
from anybatch.state.weights import read_weights, without_wrappers

_PREFIX = "weights/"


def weights_of_file(path: Path) -> dict[str, Any]:
    """What `save_weights` wrote to `path`, by all names of the model's `state_dict`; tied weights are
    one tensor.

    Raises `InputError` if there is no such file, or it is damaged.
    """
    state = dict(read_weights(path))
    for name, first in _tied_in(path).items():
        if name not in state and first in state:
            state[name] = state[first]
    return state


def weights_of_checkpoint(
    checkpoints: Checkpoints, found: Found, build: Callable[[], nn.Module]
) -> dict[str, Any]:
    """The weights in the checkpoint `found`, whole and on the host, by all names of the model's
    `state_dict`, in the dtypes in which they were trained.

    Args:
        checkpoints: of one process.
        found: by them.
        build: makes the task's model; called if something was left out, since nothing trains it.

    Raises `InputError` if a byte is not the one that was written, or the task builds another base.
    """
    facts = Facts.of(found)
    hidden = set(facts.transient) - set(facts.aliases.values())
    tensors = {
        name: torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in found.tensors.items()
        if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in hidden
    }
    checkpoints.load(found, tensors)
    state: dict[str, Any] = {name.removeprefix(_PREFIX): one for name, one in tensors.items()}
    if facts.base:
        state |= _base(facts, found, build())
    state |= {name: state[first] for name, first in facts.aliases.items() if first in state}
    return {
        without_wrappers(name): value
        for name, value in state.items()
        if name not in facts.transient
    }


def converted(state: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """`state` with its floating point numbers in `dtype`; what is one tensor stays one."""
    made: dict[int, Tensor] = {}

    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if id(value) not in made:
            made[id(value)] = value.to(dtype)
        return made[id(value)]

    return {name: convert(value) for name, value in state.items()}


def _base(facts: Facts, found: Found, model: nn.Module) -> dict[str, Tensor]:
    """The parameters of `model` that the checkpoint has left out."""
    own = {name: param.detach() for name, param in model.named_parameters()}
    missing = [name for name in facts.base if name not in own]
    if missing:
        raise InputError(
            f"the checkpoint {found.folder} is of another model: it leaves {missing[0]!r} to the task,"
            " whose model has nothing of that name. Give the task and the settings that it was trained"
            " with."
        )
    check_same(checksums_of(model, facts.base), facts.base, found.folder, facts.versions)
    return {name: own[name] for name in facts.base}


def _tied_in(path: Path) -> dict[str, str]:
    """Names of a safetensors file that stand for the weights of other ones."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    told = header.get("__metadata__", {})
    return {name: first for name, first in told.items() if first in header}

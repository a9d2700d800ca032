"""Reads the weights of a run as the `state_dict` of the plain model, from its weights file or from a
checkpoint, without its optimizer, its ranks or its data. Parameters that a checkpoint leaves out, since
they are not trained, are built by the task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from anybatch.errors import InputError
from anybatch.state.base import check_same, checksums_of
from anybatch.state.checkpoints import Checkpoints, Found
from anybatch.state.training import Facts
from anybatch.state.weights import read_weights, without_wrappers

_PREFIX = "weights/"


def weights_of_file(path: Path) -> dict[str, Any]:
    """Returns the weights that `save_weights` wrote to `path` as safetensors, under all names of the
    model's `state_dict`; tied weights are one tensor.

    Raises `InputError` if the file does not exist, or is damaged.
    """
    state = dict(read_weights(path))
    with safe_open(path, framework="pt") as file:
        tied = file.metadata() or {}  # by the names that refer to weights of other names
    others = {name: first for name, first in tied.items() if name not in state and first in state}
    return state | {name: state[first] for name, first in others.items()}


def weights_of_checkpoint(
    checkpoints: Checkpoints, found: Found, build: Callable[[], nn.Module]
) -> dict[str, Any]:
    """Returns the weights in the checkpoint `found`, unsharded and on the host, under all names of the
    model's `state_dict`, in the dtypes in which they were trained.

    Args:
        checkpoints: checkpoints of a single process.
        found: a checkpoint that they have found.
        build: builds the task's model; called if parameters are left out, since they are not trained.

    Raises `InputError` if a byte differs from what was written, or the task builds a different base.
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
    """Returns `state` with its floating point numbers in `dtype`; a tensor with several names stays one
    tensor."""
    made: dict[int, Tensor] = {}

    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if id(value) not in made:
            made[id(value)] = value.to(dtype)
        return made[id(value)]

    return {name: convert(value) for name, value in state.items()}


def _base(facts: Facts, found: Found, model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters of `model` that the checkpoint leaves out."""
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

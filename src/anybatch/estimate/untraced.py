"""Untraced: messages about models that cannot be traced on fake tensors, and where the error
occurred."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import torch

from anybatch.data.batch_slices import NoSizes
from anybatch.estimate.data_dependent_shapes import UNKNOWN

_NOT_THE_USER_S = tuple(
    str(Path(place).resolve())
    for place in (
        Path(torch.__file__).parent,
        Path(__file__).parents[1],
    )
)
_STANDARD = str(Path(sysconfig.get_paths()["stdlib"]).resolve())


class NoOptimizer(RuntimeError):
    """An optimizer could not be recreated for a trace; its cause has the reason.

    Attributes:
        name: name of its class.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name: str = name


def why_untraced(error: BaseException, here: bool) -> str:
    """Return sentences on `error`, which was raised on fake tensors: what happened, where, and what
    to do. `here`: whether the device is present, so that passes can be run instead."""
    cause = error.__cause__
    if isinstance(error, NoOptimizer) and cause is not None:
        return (
            f"The optimizer {error.name} could not be made anew for the estimate ({_what(cause)}): let"
            " its class be called with parameter groups alone, or with what stands in its `defaults`"
            " under the names of its arguments."
        )
    place = place_of(error)
    reason = (
        f"The model could not be traced on fake tensors ({_what(error)}"
        f"{f', at {place}' if place else ''})."
    )
    if isinstance(error, NoSizes):
        said = str(error).partition("; ")[0].removesuffix(".")
        reason = f"Batches of other sizes could not be made for the estimate: {said}."
    if isinstance(error, UNKNOWN):
        reason += " A size there depends on data that no estimate has."
    if here:
        return reason
    return (
        f"{reason} If the model runs on real tensors, plan on the device itself, where passes are"
        " measured."
    )


def _what(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return type(error).__name__ + (f": {lines[0].removesuffix('.')}" if lines else "")


def place_of(error: BaseException) -> str:
    """Return file, line and function that raised `error`: the innermost frame outside of PyTorch,
    this library and the standard library; empty if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = str(Path(frame.filename).resolve())
        if frame.filename.startswith("<") or file.startswith(_NOT_THE_USER_S):
            continue
        if file.startswith(_STANDARD) and "site-packages" not in file:
            continue
        return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""

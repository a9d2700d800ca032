"""Untraced: what to say of a model that cannot be traced on fake tensors, and where it went wrong."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import torch

from anybatch.estimate.values import UNKNOWN

_NOT_THE_USER_S = tuple(
    str(Path(place).resolve())
    for place in (
        Path(torch.__file__).parent,
        Path(__file__).parents[1],
    )
)
_STANDARD = str(Path(sysconfig.get_paths()["stdlib"]).resolve())


def why_untraced(error: BaseException) -> str:
    """Sentences on `error`, which was raised on fake tensors: what, where, and what to do."""
    lines = str(error).strip().splitlines()
    what = type(error).__name__ + (f": {lines[0].removesuffix('.')}" if lines else "")
    place = place_of(error)
    remedy = (
        "A size there depends on data that no estimate has: write it for fixed sizes (each expert a"
        " fixed number of tokens, say), or plan on the device itself, where passes are measured."
        if isinstance(error, UNKNOWN)
        else "If the model runs on real tensors, plan on the device itself, where passes are measured."
    )
    return (
        f"The model could not be traced on fake tensors ({what}"
        f"{f', at {place}' if place else ''}). {remedy}"
    )


def place_of(error: BaseException) -> str:
    """File, line and function that raised `error`: the innermost that are neither torch's nor ours; or
    nothing."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = str(Path(frame.filename).resolve())
        if frame.filename.startswith("<") or file.startswith(_NOT_THE_USER_S):
            continue
        if file.startswith(_STANDARD) and "site-packages" not in file:
            continue
        return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""

"""Replacing the `forward` of one module: the one way in which a plan reaches into a model.

The module stays itself: its name, parameters and `state_dict` keys are untouched, so nothing has to be
unwrapped when weights are saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Let `module` run `forward` from now on; the function returned puts back what it ran before.

    Undo in the reverse order of replacing.
    """
    before = vars(module).get("forward")
    module.forward = forward

    def undo() -> None:
        del module.forward
        if before is not None:
            module.forward = before

    return undo

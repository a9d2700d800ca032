"""No cache: models that keep keys and values for the next token do not while they are trained.

Models of transformers do by default (`config.use_cache`), for generation. In training nobody reads what
is kept: it takes memory, and a block that is recomputed would add to it a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def install(model: nn.Module) -> Callable[[], None]:
    """Let `model` keep nothing. Returns what puts its configuration back as it was."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            configs[id(config)] = config
    for config in configs.values():
        config.use_cache = False

    def undo() -> None:
        for config in configs.values():
            config.use_cache = True

    return undo

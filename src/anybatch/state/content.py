"""What a checkpoint holds, in words that know neither ranks nor files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Content:
    """Everything that outlives a step, seen from one rank.

    Attributes:
        tensors: by name. A DTensor is this rank's part of a tensor; a plain one is the same on all
            ranks, unless its name begins with `rank-N.`, which only rank N has.
        facts: what JSON can hold (tuples come back as lists), the same on all ranks.
    """

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)

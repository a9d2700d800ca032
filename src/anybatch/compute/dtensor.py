"""DTensors: whether a tensor is one, without importing them.

`torch.distributed.tensor` takes half a second to import, and most processes have no sharded tensor.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Whether `value` is a DTensor. There is none where nobody has imported their module."""
    module = sys.modules.get("torch.distributed.tensor")
    return isinstance(value, getattr(module, "DTensor", ()))


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of `tensor` if it is a DTensor, else `tensor` itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor

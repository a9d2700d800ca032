"""Host memory: what forward keeps for backward lies there in between.

torch's `save_on_cpu` moves everything that is saved. Here parameters and buffers stay, which are on the
device anyway, and so does what is small: it would cost the start of a copy and free next to nothing.
Copies are queued behind the kernels that write and before those that read, so the host never waits.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

LEAST_BYTES = 64 << 10
"""What is smaller stays on the device."""


class InHostMemory(saved_tensors_hooks):
    """What is saved inside lies in host memory.

    Args:
        staying: tensors that are not moved, nor views of them.
        host: where to. The device `meta` stands for the host's memory in a trace, which counts only
            the device's.
    """

    def __init__(self, staying: Iterable[Tensor], host: torch.device) -> None:
        self._staying = {tensor.untyped_storage()._cdata for tensor in staying}
        self._host = host
        super().__init__(self._put, self._fetch)

    def _put(self, tensor: Tensor) -> tuple[torch.device, Tensor]:
        stays = (
            tensor.device == self._host
            or tensor.nbytes < LEAST_BYTES
            or tensor.untyped_storage()._cdata in self._staying
        )
        if stays:
            return tensor.device, tensor
        pinned = tensor.is_cuda and self._host.type == "cpu"
        held = torch.empty_like(tensor, device=self._host, pin_memory=pinned)
        return tensor.device, held.copy_(tensor, non_blocking=pinned)

    def _fetch(self, held: tuple[torch.device, Tensor]) -> Tensor:
        device, tensor = held
        if tensor.device == device:
            return tensor
        return torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True)

"""Rollback: restores the buffers, attributes and generators that forward changes in a step.

Forward writes BatchNorm's running statistics and whatever else a module keeps in buffers. Buffers are
copied before each step and restored when the step is redone. All of them are copied every time, since
some kernels write a buffer without changing its version, so there is no safe way to know which ones
changed. The same is done for plain attributes of modules (such as a counter), for random number
generators that the model or the loss owns, and for frozen parameters that forward writes to (such as a
momentum encoder).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.compute.module_state import ModuleState
from anybatch.compute.parameter_writes import ParameterWrites
from anybatch.data.batch_copies import without_repeats
from anybatch.side_effects import generators_in


class SavedBuffers:
    """Saves and restores the buffers of `model`, and other state that it and `loss` keep."""

    def __init__(
        self, model: nn.Module, loss: object = None, writes: ParameterWrites | None = None
    ) -> None:
        self._modules = list(model.modules())
        self._users = model, loss
        self._writes = writes
        self._generators: Sequence[Any] | None = None
        self._state: ModuleState | None = None
        # By `items`, since nothing else iterates over the buffers of modules compiled by torch.jit.
        self._places = [
            (module, name) for module in model.modules() for name, _ in module._buffers.items()
        ]
        self._index = {place: i for i, place in enumerate(self._places)}
        self._copies: list[tuple[Tensor, Tensor] | None] = []  # reused by the next `save`
        self._saved: list[tuple[Tensor, Tensor] | None] = []  # empty: nothing to restore

    def forget(self) -> None:
        """Discard the saved state, which belongs to an earlier step: there is nothing to restore."""
        self._saved = []
        self._state = None

    def save(self) -> None:
        if self._generators is None:
            self._generators = generators_in(*self._users)
        if self._places:
            self._save()
        self._state = ModuleState(self._modules, self._generators)
        if self._writes is not None:
            self._writes.save()

    def held(self, module: nn.Module, name: str) -> Tensor | None:
        """Returns the value of buffer `name` of `module` at `save`. Read-only."""
        saved = self._saved[self._index[module, name]]
        return None if saved is None else saved[1]

    @torch.no_grad()
    def _save(self) -> None:
        known = self._copies or [None] * len(self._places)
        self.forget()  # if memory runs out here, the earlier copies must not be restored
        now: list[tuple[Tensor, Tensor] | None] = []
        sources: list[Tensor] = []
        copies: list[Tensor] = []
        for (module, name), saved in zip(self._places, known, strict=True):
            buffer = module._buffers[name]
            if buffer is None:
                now.append(None)
            elif saved is not None and saved[0] is buffer and saved[1].shape == buffer.shape:
                sources.append(buffer)
                copies.append(saved[1])
                now.append(saved)
            else:
                now.append((buffer, buffer.detach().clone()))
        if sources:
            torch._foreach_copy_(copies, sources)
        self._saved = self._copies = now

    def put_back(self) -> None:
        """Restore everything to its state at `save`."""
        self.put_back_buffers()
        if self._state is not None:
            self._state.put_back()
            if self._writes is not None:
                self._writes.put_back()

    @torch.no_grad()
    def put_back_buffers(self) -> None:
        """Restore the buffers to their values at `save`, including any that a module replaced."""
        for (module, name), saved in zip(self._places, self._saved, strict=False):
            if saved is None:
                module._buffers[name] = None
            else:
                buffer, copy = saved
                # Through .data: a graph that is about to be dropped may have saved this version.
                without_repeats(buffer.data, buffer).copy_(without_repeats(copy, buffer))
                module._buffers[name] = buffer

"""What torch keeps per thread, not per process: a thread that works for another takes it over."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar, final

import torch

T = TypeVar("T")


@final
class ThreadState:
    """The state of the thread that makes it: gradient and inference mode, autocast, the current stream
    of each device in `devices`, context variables."""

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in sorted({"cpu", *(device.type for device in devices)})
            if torch.is_autocast_enabled(kind)
        ]
        self._autocast_cache = torch.is_autocast_cache_enabled()
        self._streams = {
            device: torch.cuda.current_stream(device) for device in devices if device.type == "cuda"
        }
        self._variables = contextvars.copy_context()

    def run(self, work: Callable[[], T], device: torch.device) -> T:
        """The result of `work()`, in the thread that calls, under this state and on `device`."""
        return self._variables.copy().run(self._entered, work, device)

    def _entered(self, work: Callable[[], T], device: torch.device) -> T:
        with ExitStack() as stack:
            if self._inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, cache_enabled=self._autocast_cache)
                )
            for stream in self._streams.values():
                stack.enter_context(torch.cuda.stream(stream))
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            return work()

"""Step thread: how the thread that computes steps is cleaned up after a failure.

A step that fails leaves two things behind in its thread:

1. Autograd's queue. On CPU the engine keeps the tasks of a backward pass in a per-thread queue. Tasks
   that were pending when the pass failed stay there, and keep their graph and its activations alive,
   until the next backward pass of the thread. That is too late, since the redone step needs the memory
   in forward. So an empty backward pass is run at once. Its graph is older than that of any step, and
   tasks of newer graphs run first.
2. oneDNN's error mark (see `anybatch.oom`): new kernels fail in this thread from then on, so the rank
   ends.
"""

from __future__ import annotations

import gc
import threading

import torch

from anybatch.errors import RankLost
from anybatch.oom import MemoryFailure
from anybatch.process.process_memory import trim


class StepThread:
    """The current thread, in which steps are computed."""

    def __init__(self) -> None:
        self._home = threading.get_ident()
        with torch.enable_grad():
            self._leaf = torch.zeros((), requires_grad=True)
            self._oldest = self._leaf * 1.0  # older than any graph of a step

    def clear(self) -> None:
        """Discard what a failed backward pass left in the queue of this thread."""
        if threading.get_ident() == self._home:
            torch.autograd.grad(self._oldest, self._leaf, retain_graph=True)

    def recover(self, failure: MemoryFailure) -> None:
        """Free the memory of the failed work. Raises `RankLost` if oneDNN marked this thread.

        Memory that the heap keeps free is returned, since it would count against the leaner plan."""
        if failure.marks_thread:
            raise RankLost(
                "oneDNN cannot go on in this process after a refused allocation"
                f" ({failure.message}): the run goes on from its last checkpoint when it is started"
                " again; a smaller micro-batch, or a higher limit on memory (ulimit), keeps this from"
                " happening."
            )
        gc.collect()
        trim()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

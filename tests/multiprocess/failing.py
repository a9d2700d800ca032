"""Ranks that fail: one that runs out of memory once in the middle of training, and, run as a module,
a command whose ranks end in the way that its argument says."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anybatch.launch import find, join


class RunsOut:
    """Memory that runs out once on this rank, in a pass of step 4.

    Args:
        model: of the worlds of the tests; its `body` fails.
        where: `"forward"`, `"backward"` (in the middle), or `"end of backward"`: when the last
            parameter has got its gradient.
        here: whether it is this rank.

    Attributes:
        num_steps: that are done; to be counted by whoever takes them.
    """

    def __init__(self, model: nn.Module, where: str, here: bool) -> None:
        self.num_steps = 0
        self._left = 1 if here else 0
        fail = self._fail

        class Pass(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                if where == "forward":
                    fail()
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                if where == "backward":
                    fail()
                return gradient

        model.body.register_forward_hook(lambda _module, _inputs, output: Pass.apply(output))
        if where == "end of backward":
            self._node = torch.autograd.graph.get_gradient_edge(model.embed.weight).node
            self._node.register_hook(fail)

    def _fail(self, *_: Any) -> None:
        if self.num_steps == 3 and self._left:
            self._left -= 1
            raise torch.OutOfMemoryError("tried to allocate more than there is")


def main() -> None:
    """End."""
    rank, how = os.environ["RANK"], sys.argv[1]
    if how == "terminal":
        print("a terminal:", sys.stdout.isatty())
        sys.exit(0)
    if how == "at first":
        again_after_a_failure()
        return
    if how == "all 2":
        told = Path(sys.argv[2], "told")
        while rank != "0" and not told.exists():  # else rank 0 may be ended before it can speak
            time.sleep(0.02)
        print(f"said by rank {rank}", file=sys.stderr)
        told.touch()
        sys.exit(2)
    if rank != "1":
        signal.pause()
    print("last words")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(how))


def again_after_a_failure() -> None:
    """Meet twice; rank 1 fails in between, the first time."""
    import torch
    from torch import distributed

    membership = find()
    assert membership is not None
    with join(membership, "cpu", timeout_seconds=60):
        distributed.barrier()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if membership.rank == 1:
                os._exit(9)
            signal.pause()
        number = torch.ones(1)
        distributed.all_reduce(number)
        assert number.item() == 2


if __name__ == "__main__":
    main()

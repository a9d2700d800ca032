"""Outside gradients: those of what a loss uses, and neither the model nor the optimizer has.

A discriminator in a generator's loss, a temperature that the script moves by hand, the images of an
attack: backward adds to their gradients too. There they are sums over micro-batches, times whatever
factor the plan scales sums by, and a step that is done again adds to them twice. So what a script finds
after a step is what a plain loop would have left: what was there before, and the gradient of the mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_LEAF: Any = torch._C._functions.AccumulateGrad  # pyright: ignore[reportAttributeAccessIssue]


@final
class OutsideGradients:
    """See the module.

    Args:
        own: what has its gradients from elsewhere.
    """

    def __init__(self, own: Iterable[Tensor]) -> None:
        self._own = set(own)
        # Weak: what the loss makes itself is gone with its pass.
        self._before = WeakTensorKeyDictionary()

    def note(self, loss: Tensor) -> None:
        """Before the backward of a pass: begin anew with what it will reach."""
        for leaf in _leaves_of(loss):
            if leaf not in self._own and leaf not in self._before:
                self._before[leaf] = leaf.grad
                leaf.grad = None

    @torch.no_grad()
    def divide(self, divisor: Tensor) -> None:
        """The sums become those of the mean. `divisor`: a scalar tensor."""
        for leaf in list(self._before):
            if leaf.grad is not None:
                leaf.grad.div_(divisor)

    @torch.no_grad()
    def keep(self) -> None:
        """The step is done: add them to what was there before."""
        for leaf, before in list(self._before.items()):
            if before is not None:
                if leaf.grad is not None:
                    before.add_(leaf.grad)
                leaf.grad = before
        self._before.clear()

    def drop(self) -> None:
        """The step is undone, or was kept."""
        for leaf, before in list(self._before.items()):
            leaf.grad = before
        self._before.clear()


def _leaves_of(result: Tensor) -> Iterator[Tensor]:
    """What `backward` of `result`, which has a graph, adds gradients to."""
    found: set[Any] = {result.grad_fn}
    nodes: list[Any] = [result.grad_fn]
    while nodes:
        node = nodes.pop()
        if type(node) is _LEAF:
            yield node.variable
        for before, _ in node.next_functions:
            if before is not None and before not in found:
                found.add(before)
                nodes.append(before)

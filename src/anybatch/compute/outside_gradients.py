"""Outside gradients: gradients of tensors that a loss uses and neither the model nor the optimizer has.

Examples are a discriminator in a generator's loss, a temperature that the script updates itself, and
the images of an adversarial attack. Backward accumulates into their gradients too. These are sums over
micro-batches, multiplied by the plan's scaling factor, and a repeated step adds to them twice. This
module corrects them, so that after a step a script finds what a plain loop would have left: the
previous gradient plus the gradient of the mean.

The leaves of a graph are found by walking through it, which takes a tenth of the time of a pass with
small batches. Most losses have no other leaves, so a pass that records as many operations as an earlier
one, from a batch without gradients, is taken to have the same leaves; once a pass had others, every
graph is walked. A leaf that comes later and adds no operation (a weight of a convolution that the loss
uses, unfrozen in the middle of training) is missed.
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
    """Tracks and corrects outside gradients during a step; see the module docstring.

    Args:
        own: tensors whose gradients are handled elsewhere.
    """

    def __init__(self, own: Iterable[Tensor]) -> None:
        self._own = set(own)
        # Weak, so that tensors created by the loss are freed with their pass.
        self._before = WeakTensorKeyDictionary()
        self._has_others = False  # whether any pass so far had other leaves
        self._lengths: set[int] = set()  # operations of the passes that had none

    def __bool__(self) -> bool:
        return len(self._before) > 0

    def note(self, loss: Tensor, num_operations: int, from_gradients: bool) -> None:
        """Set aside the gradients of the leaves that backward of `loss` will reach. Called before each
        backward; in a step, each leaf is recorded once.

        Args:
            loss: has a graph.
            num_operations: number of operations that were recorded for the pass.
            from_gradients: whether the batch of the pass requires gradients.
        """
        if not (self._has_others or from_gradients) and num_operations in self._lengths:
            return
        others = [leaf for leaf in _leaves_of(loss) if leaf not in self._own]
        if not others:
            self._lengths.add(num_operations)
            return
        self._has_others = True
        for leaf in others:
            if leaf not in self._before:
                self._before[leaf] = leaf.grad
                leaf.grad = None

    @torch.no_grad()
    def divide(self, divisor: Tensor) -> None:
        """Divide the summed gradients to get those of the mean. `divisor`: a scalar tensor."""
        for leaf in list(self._before):
            if leaf.grad is not None:
                leaf.grad.div_(divisor)

    @torch.no_grad()
    def keep(self) -> None:
        """Add the gradients to those from before the step, at the end of the step."""
        for leaf, before in list(self._before.items()):
            if before is not None:
                if leaf.grad is not None:
                    before.add_(leaf.grad)
                leaf.grad = before
        self._before.clear()

    def drop(self) -> None:
        """Restore the gradients from before the step, if it is undone. Does nothing after `keep`."""
        for leaf, before in list(self._before.items()):
            leaf.grad = before
        self._before.clear()


def _leaves_of(result: Tensor) -> Iterator[Tensor]:
    """Yield the leaves that `backward` of `result` accumulates gradients into. `result` has a graph."""
    found: set[Any] = {None, result.grad_fn}
    nodes: list[Any] = [result.grad_fn]
    while nodes:
        for node, _ in nodes.pop().next_functions:
            if node not in found:
                found.add(node)
                if type(node) is _LEAF:
                    yield node.variable
                else:
                    nodes.append(node)

"""Tensors of a failed backward pass stay alive (torch 2.13, CPU).

Symptom: after an error in backward, an out-of-memory error say, activations of the pass are not freed,
though nothing refers to them: not when the error is gone, nor by `gc.collect()`, nor while the step is
tried again with a smaller batch, which has less memory than before and runs out again.

Mechanism: on CPU, autograd's engine keeps the tasks of a pass in a queue that belongs to the calling
thread. A failed pass leaves those that were waiting there, and a task holds its node, so all of the
graph behind it. The next backward pass of the same thread finds them ahead of its own and drops them,
but it comes after the forward pass that needs the memory. `anybatch.engine.step_thread` makes a pass
over nothing.
"""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from anybatch.engine.step_thread import StepThread


class Holds(torch.autograd.Function):
    """The identity; keeps a large tensor for backward."""

    @staticmethod
    def forward(ctx, x, held):
        ctx.save_for_backward(held)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Fails(torch.autograd.Function):
    """The identity; fails in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError


def failed_pass():
    """A backward pass that fails while another task waits; the mark of what that task holds."""
    held = torch.zeros(1 << 18)
    mark = StorageWeakRef(held.untyped_storage())
    x = torch.ones((), requires_grad=True)
    waits = Holds.apply(x, held)  # older, so it comes after the one that fails
    with pytest.raises(MemoryError):
        (waits + Fails.apply(x)).backward()
    return mark


def test_torch_keeps_the_tensors_of_a_failed_pass_until_the_next_one():
    """If this fails, torch drops them itself: `StepThread.clear` can go."""
    mark = failed_pass()
    gc.collect()
    x = torch.ones((), requires_grad=True)
    loss = (x * 2).exp()  # forward of the step that is tried again
    kept = not mark.expired()
    loss.backward()
    assert kept
    assert mark.expired()


def test_clearing_drops_them_at_once():
    thread = StepThread()
    marks = [failed_pass() for _ in range(3)]
    assert not marks[-1].expired()
    thread.clear()
    assert all(mark.expired() for mark in marks)
    x = torch.ones((), requires_grad=True)
    (x * 2).backward()  # and the thread is good for more
    assert float(x.grad) == 2.0

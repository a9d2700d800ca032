"""Recurrent layers, recomputed in pieces of time.

What a recurrent layer keeps for backward grows with the length T of its sequences. Cut into pieces of
sqrt(T) steps, each a checkpoint, it keeps the states between pieces, and of one piece at a time what
backward needs: O(sqrt(T)) in place of O(T), for one more forward pass (Chen et al. 2016, "Training Deep
Nets with Sublinear Memory Cost").

    x    |  x1  |  x2  |  x3  |        each piece starts from the state at the end of the last one
    state 0 --> 1 ---> 2 ---> 3
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

Checkpoint = Callable[..., Any]
"""(function, *arguments) -> result of the function, which backward runs again."""


def find_recurrent(model: nn.Module) -> Iterator[str]:
    """The names of the layers of `model` that can be cut along time."""
    for name, module in model.named_modules():
        if is_cut_along_time(module):
            yield name or "."


def is_cut_along_time(module: nn.Module) -> bool:
    """Whether `module` is a recurrent layer of torch whose pieces compute what the whole does: not one
    that reads sequences backwards, too. Where it drops at random between layers, pieces would draw in
    another order."""
    return (
        isinstance(module, nn.RNNBase)
        and not module.bidirectional
        and (module.num_layers == 1 or not module.dropout)
    )


def run_along_time(
    layer: nn.RNNBase, run: Callable[..., Any], recomputed: Checkpoint, args: Any, kwargs: Any
) -> Any:
    """`run(*args, **kwargs)`, the forward of `layer`, in pieces that are each `recomputed`.

    Args:
        layer: see `is_cut_along_time`.
        run: (input, state) -> (output, state).
        recomputed: makes a checkpoint of one piece.
        args, kwargs: sequences of shape (T, B, F), (B, T, F) or (T, F), and a state. A packed sequence
            is one piece.
    """
    given = dict(zip(("input", "hx"), args, strict=False)) | kwargs
    sequence, state = given["input"], given.get("hx")
    if not isinstance(sequence, Tensor) or not is_cut_along_time(layer):
        return recomputed(run, sequence, state)
    dim = 1 if layer.batch_first and sequence.dim() == 3 else 0
    outputs: list[Tensor] = []
    for piece in sequence.split(max(1, isqrt(sequence.shape[dim])), dim):
        output, state = recomputed(run, piece, state)
        outputs.append(output)
    return torch.cat(outputs, dim), state

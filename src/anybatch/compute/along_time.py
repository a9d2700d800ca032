"""Recomputation of recurrent layers in pieces along time.

The activations that a recurrent layer saves for backward grow with the sequence length T. If sequences
are split into pieces of sqrt(T) steps, each checkpointed, the layer saves only the states between
pieces and, in backward, the activations of one piece at a time: O(sqrt(T)) memory instead of O(T), at
the cost of one more forward pass (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").

    x    |  x1  |  x2  |  x3  |        each piece starts from the final state of the previous one
    state 0 --> 1 ---> 2 ---> 3
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

Checkpoint = Callable[..., Any]
"""(function, *arguments) -> result of the function, which is run again in backward."""


def find_recurrent(model: nn.Module) -> Iterator[str]:
    """Yield the names of the layers of `model` that can be split along time."""
    for name, module in model.named_modules():
        if is_cut_along_time(module):
            yield name or "."


def is_cut_along_time(module: nn.Module) -> bool:
    """Whether `module` is a recurrent layer of torch that computes the same result in pieces.

    Bidirectional layers do not, since they also read sequences backwards. Neither do layers with
    dropout between them, since pieces would draw random numbers in a different order."""
    return (
        isinstance(module, nn.RNNBase)
        and not module.bidirectional
        and (module.num_layers == 1 or not module.dropout)
    )


def run_along_time(
    layer: nn.RNNBase, run: Callable[..., Any], recomputed: Checkpoint, args: Any, kwargs: Any
) -> Any:
    """Call `run(*args, **kwargs)`, the forward of `layer`, in pieces along time, each `recomputed`.

    Args:
        layer: see `is_cut_along_time`; any other layer runs in one piece.
        run: (input, state) -> (output, state).
        recomputed: runs one piece as a checkpoint.
        args, kwargs: sequences of shape (T, B, F), (B, T, F) or (T, F), and optionally a state. A
            packed sequence runs in one piece.
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

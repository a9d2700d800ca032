"""Checks: what `Step` refuses or warns of, in the model, the optimizer and the ranks of a script."""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from anybatch.compute.multi_optimizer import parts_of
from anybatch.errors import InputError
from anybatch.events import step_number
from anybatch.launch import find
from anybatch.parallel import Group
from anybatch.task import parameters_in

_INSIDE = (str(Path(__file__).parents[1]), contextlib.__file__)
"""Files that are skipped when a warning is located: the user's code is outside of them."""


def num_joined() -> int:
    """Number of ranks in torch's process group; 1 if there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def warn(sentence: str) -> None:
    """Issue a warning, located at the line of the user's code that led to it."""
    frame, level = sys._getframe(1), 2
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(sentence, stacklevel=level)


def warn_of_ranks_apart() -> None:
    """Warn if several processes were started but not joined, since this Step then trains on its own."""
    with suppress(InputError):  # contradictory variables, which are not used
        member = find()
        if member is not None and member.world_size > 1 and member.rank == 0:
            warn(
                f"{member.launcher} has started {member.world_size} ranks, but there is no process"
                " group of torch, so each of them trains by itself: if they are to train one model,"
                " call torch.distributed.init_process_group before the first call of Step.",
            )


def check_unwrapped(model: nn.Module) -> None:
    """Raises `InputError` for a model that sums its gradients itself, or that is sharded."""
    if isinstance(model, nn.DataParallel | DistributedDataParallel):
        raise InputError(
            f"the model is wrapped in {type(model).__name__}, which divides batches or adds up"
            " gradients itself, and Step does both: pass model.module."
        )
    for name, part in model.named_modules():
        if isinstance(part, DistributedDataParallel):
            raise InputError(
                f"the module {name!r} of the model is wrapped in DistributedDataParallel, which divides"
                " the gradients of its part by the number of ranks, and Step adds them up: put"
                " its .module in its place, or pass the model as it was before that (before setup of"
                " Lightning's Fabric, say)."
            )
    if any(hasattr(p, "full_tensor") for p in model.parameters()):
        raise InputError(
            "the model is sharded (its parameters are DTensors), and Step keeps a whole model on each"
            " rank: pass the plain model, or train it by anybatch.train with parallel='shard'."
        )


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Raises `InputError` if `optimizer` trains no parameter of `model`. It may train others too: those
    of the loss, or of another model."""
    trained = list(parameters_in(optimizer.param_groups))
    if len(other_parameters(model, optimizer)) == len(trained):
        raise InputError(
            f"none of the {len(trained)} parameters of the optimizer ({type(optimizer).__name__}) is"
            f" one of the model's ({type(model).__name__}), so no step would change the model: make the"
            " optimizer on model.parameters() of this very model, after whatever replaces its"
            " parameters."
        )


def other_parameters(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters that `optimizer` trains and that are not parameters of `model`."""
    own = set(model.parameters())
    return [param for param in parameters_in(optimizer.param_groups) if param not in own]


def check_updates(optimizer: Optimizer) -> None:
    """Raises `InputError` for an optimizer prepared by accelerate that would skip this update, or
    divide its gradients by a scale."""
    for part in parts_of(optimizer):
        state: Any = getattr(part, "gradient_state", None)
        if state is not None and not state.sync_gradients:
            raise InputError(
                "the optimizer is prepared by an Accelerator that accumulates gradients here, and would"
                " skip this update: leave out gradient_accumulation_steps, since each call of Step is"
                " an update."
            )
        if state is not None and getattr(part, "scaler", None) is not None:
            raise InputError(
                "the optimizer is prepared by an Accelerator that scales gradients: leave out its"
                " mixed_precision, and give precision='fp16' to Step."
            )


@contextmanager
def refused(wrappers: Sequence[nn.Module], model: nn.Module) -> Iterator[None]:
    """Context manager in which a pass through one of `wrappers` that would reduce gradients of `model`
    raises `InputError`."""

    def refuse(wrapper: Any, _: Any) -> None:
        if torch.is_grad_enabled() and wrapper.require_backward_grad_sync:
            raise InputError(
                "the loss calls a DistributedDataParallel around the model, which divides the gradients"
                " by the number of ranks, and Step adds them up: call the model that the loss is given."
            )

    own = set(model.parameters()) if wrappers else set()
    with ExitStack() as undo:
        for wrapper in wrappers:
            if not own.isdisjoint(wrapper.parameters()):
                undo.callback(wrapper.register_forward_pre_hook(refuse).remove)
        yield


def check_same_course(group: Group, optimizer: Optimizer, num_steps: int) -> None:
    """Raises `InputError` if the script has changed learning rates or weights on some ranks only,
    or optimizer states were not the same at the beginning. Checked before the first step, and after
    steps 1, 2, 4, 8, ..."""
    if group.size == 1 or num_steps & (num_steps - 1):
        return
    groups = optimizer.param_groups
    rates = [float(one["lr"]) for one in groups if one.get("lr") is not None]
    params = [p for p in parameters_in(groups) if not is_traceable_wrapper_subclass(p)]
    norms = [_norm(param) for param in params]
    everyone = group.exchange((rates, norms))
    for rank, (theirs, lengths) in enumerate(everyone):
        where = f"of rank 0 and rank {rank} differ before step {step_number(num_steps)}"
        for one, other in zip(everyone[0][0], theirs, strict=False):
            if one != other:
                raise InputError(
                    f"the learning rates {where} ({one:g} and {other:g}): let each scheduler step"
                    " on all ranks, by a value that is the same on all, as from step.evaluate."
                )
        if not all(map(_is_close, everyone[0][1], lengths)):
            raise InputError(
                f"the weights {where}: change and load them on all ranks alike, and so the state of"
                " the optimizer."
            )


def _norm(param: torch.Tensor) -> float:
    """The 2-norm of `param`, summed in float32 at least."""
    dtype = torch.promote_types(param.dtype, torch.float32)
    return float(torch.linalg.vector_norm(param.detach(), dtype=dtype))


def _is_close(one: float, other: float) -> bool:
    """Whether two norms agree as far as those of ranks with different devices do."""
    return math.isclose(one, other, rel_tol=1e-3) or (math.isnan(one) and math.isnan(other))

"""Whole: the full state of a sharded model, as a single rank would hold it.

State is gathered and loaded tensor by tensor, so that no rank ever holds more than one full tensor in
addition to what it keeps. Names and shapes are those of the plain model: a gathered state can be loaded
by plain torch code, and a state to load can come from there, or from another number of ranks.

Every function here is called by all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from anybatch.parallel.collectives import overwrite
from anybatch.parallel.vote import calling


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The full state dict of `model` in host memory on rank 0; empty on the other ranks. Tensors that
    are tied in the model are tied in the state dict."""
    reshard(model)
    found: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen[id(value)] = _gathered(value)
        if dist.get_rank() == 0:
            found[name] = seen[id(value)]
    return found


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor] | None) -> None:
    """Load the `state` of rank 0, with the names and shapes of `model`; the other ranks pass None."""
    reshard(model)
    places = cast(dict[str, Tensor], model.state_dict(keep_vars=True))
    with calling("while the weights were sent"):
        for name, place in {id(one): (name, one) for name, one in places.items()}.values():
            fill(place, None if state is None else state[name])


@torch.no_grad()
def fill(place: Tensor, whole: Tensor | None) -> None:
    """Fill `place`, sharded or not, with the values of `whole` on rank 0."""
    if not isinstance(place, DTensor):
        if whole is not None and whole is not place:
            place.copy_(whole)
        overwrite(place, 0)
        return
    mesh = place.device_mesh
    if whole is None:
        whole = torch.empty(place.shape, dtype=place.dtype, device=mesh.device_type)
    else:
        whole = whole.to(mesh.device_type, place.dtype)
    overwrite(whole, 0)
    part = distribute_tensor(whole, mesh, place.placements, src_data_rank=None)
    place.to_local().copy_(part.to_local())


def reshard(model: nn.Module) -> None:
    """Free gathered weights: after a pass without gradient those of the root are still gathered, and
    would be used again although the shards have changed."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _gathered(value: Tensor) -> Tensor:
    """The full `value` in host memory on rank 0; the other ranks keep nothing of it."""
    value = value.detach()
    if isinstance(value, DTensor):
        with calling("while the state was gathered"):
            value = cast(DTensor, value.to(value.device_mesh.device_type)).full_tensor()
    if dist.get_rank() != 0:
        return torch.empty(0)
    return value.to("cpu", copy=True)

"""Base: the parameters that a run does not train, which its checkpoints leave out.

Of adapters over a large model nearly all is the model below them, which the task's own function builds
again to the bit: it would only be copied to the disk, every ten minutes. So a checkpoint holds the
checksum of each such parameter instead, and a run is not resumed over another base.

What counts are the values, not `requires_grad`: a parameter that no optimizer has but that was written
to since (a teacher that follows the model, say) is saved. So is everything where the task was given a
module: nobody knows how that was made.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from anybatch.compute import Replica
from anybatch.compute.low_bit_optimizers import parts_of
from anybatch.errors import InputError, some
from anybatch.parallel import Group
from anybatch.state.blocks import bytes_of
from anybatch.task import Task, parameters_in


def frozen_checksums(task: Task, model: nn.Module) -> dict[str, int]:
    """Checksums of the parameters of `model` that `task` does not train, by name, as it was built: not
    yet in the precision of a plan, nor divided over ranks."""
    trained = {id(param) for param in parameters_in(task.parameters_of(model))}
    frozen = [
        name
        for name, param in model.named_parameters()
        if id(param) not in trained and param.layout is torch.strided
    ]
    return checksums_of(model, frozen)


def checksums_of(model: nn.Module, names: Iterable[str]) -> dict[str, int]:
    """Checksums of the parameters of `model` that are called so."""
    parameters = dict(model.named_parameters())
    return {name: _checksum(parameters[name]) for name in names}


@final
class Base:
    """The frozen parameters of one rank's model.

    Args:
        task: that builds the model.
        replica: of the model, adopted by `group`.
        group: the ranks. All of them make this, and call `left_out`, at the same time.
        built: `frozen_checksums`, on rank 0, whose values all ranks have.

    Attributes:
        checksums: `built`, on all ranks.
    """

    def __init__(
        self, task: Task, replica: Replica, group: Group, built: Mapping[str, int]
    ) -> None:
        self.checksums: dict[str, int] = group.exchange(dict(built))[0]
        self._group = group
        self._names = replica.weights.keys()
        self._frozen: dict[str, Tensor] = {}
        if not isinstance(task.model, nn.Module):
            trained = {id(param) for param in replica.parameters}
            self._frozen = {
                name: tensor
                for name, tensor in replica.weights.items()
                if name in self.checksums and id(tensor) not in trained
            }
        # In the precision of the plan, and this rank's part: what it can be compared with later.
        self._begun = {name: _fingerprint(tensor) for name, tensor in self._frozen.items()}

    def left_out(self) -> dict[str, int]:
        """Checksums of those that are on all ranks as they were built. Reads them all."""
        if not self._frozen:
            return {}
        changed = {
            name for name, was in self._begun.items() if _fingerprint(self._frozen[name]) != was
        }
        everyone = self._group.exchange(changed)
        return {
            name: self.checksums[name] for name in self._begun if name not in set().union(*everyone)
        }

    def check(self, left_out: Mapping[str, int], folder: Path, versions: Mapping[str, str]) -> None:
        """Raises `InputError` if what the checkpoint in `folder` has left out is not here to the bit.
        Names that the model does not have are not looked at."""
        trained = [name for name in left_out if name in self._names and name not in self.checksums]
        if trained:
            raise InputError(
                f"the checkpoint {folder} does not hold {some(trained)}: nothing trained that when it"
                " was written, and now the task does. Train what was trained before, or begin anew from"
                " the weights of the run in another folder."
            )
        check_same(self.checksums, left_out, folder, versions)


def check_same(
    built: Mapping[str, int], left_out: Mapping[str, int], folder: Path, versions: Mapping[str, str]
) -> None:
    """Raises `InputError` if what the checkpoint in `folder` has left out differs from what the task
    has `built`, by their checksums. Names that are in one of them alone are not looked at."""
    differing = [name for name, was in left_out.items() if built.get(name, was) != was]
    if differing:
        made = " and ".join(f"{name} {number}" for name, number in versions.items())
        made = f" under {made}" if made else ""
        raise InputError(
            f"the checkpoint {folder} is of another base: nothing trains {some(differing)}, so it is"
            " not held, and the task builds other values than when it was written. Let it build those"
            f" again: from the same file, or by the same code and seed{made}."
        )


def _checksum(tensor: Tensor) -> int:
    """Of the bytes of `tensor`: of this rank's part, where it is divided over ranks."""
    found = 0
    for part in _parts(tensor):
        found = zlib.crc32(bytes_of(part), found)
    return found


def _fingerprint(tensor: Tensor) -> int:
    """What tells whether `tensor` was written to: its checksum, or on a device, from which billions of
    bytes would have to come over at each save, torch's hash of its bits."""
    if tensor.device.type == "cpu":
        return _checksum(tensor)
    found = 0
    for part in _parts(tensor):
        if not part.numel():  # of a parameter with fewer rows than there are ranks
            continue
        if part.is_complex() or (part.is_floating_point() and part.itemsize == 1):
            part = part.contiguous().view(-1).view(torch.uint8)
        # `int` would refuse what does not fit into 63 bits.
        found = hash((found, torch.hash_tensor(part).item()))
    return found


@torch.no_grad()
def _parts(tensor: Tensor) -> list[Tensor]:
    own = tensor.detach()
    own = own.to_local() if isinstance(own, DTensor) else own
    return list(parts_of(own).values())

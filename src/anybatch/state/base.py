"""Base: the parameters that a run does not train, which its checkpoints leave out.

The task's own function rebuilds them with identical bits, so a checkpoint holds their checksums only,
and a run is not resumed with a different base. A parameter that no optimizer holds but that has been
modified (a teacher that follows the model, for example) is saved. If the task was given a module,
everything is saved, since it is unknown how the module was built.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from anybatch.compute import Replica
from anybatch.compute.dtensor import local_part
from anybatch.compute.low_bit_optimizers import parts_of
from anybatch.errors import InputError, some
from anybatch.parallel import Group
from anybatch.state.checksummed_blocks import bytes_of
from anybatch.task import Task, parameters_in


def frozen_checksums(task: Task, model: nn.Module) -> dict[str, int]:
    """Returns the checksums, by name, of the parameters of `model` that `task` does not train. `model`
    must be as built: not yet in the precision of a plan, nor sharded over ranks."""
    trained = {id(param) for param in parameters_in(task.parameters_of(model))}
    frozen = [
        name
        for name, param in model.named_parameters()
        if id(param) not in trained and param.layout is torch.strided
    ]
    return checksums_of(model, frozen)


def checksums_of(model: nn.Module, names: Iterable[str]) -> dict[str, int]:
    """Returns the checksums of the parameters of `model` with the given names."""
    parameters = dict(model.named_parameters())
    return {name: _checksum(parameters[name]) for name in names}


@final
class Base:
    """The frozen parameters of one rank's model.

    Args:
        task: builds the model.
        replica: replica of the model, adopted by `group`.
        group: the ranks. All of them must create this object, and call `left_out`, at the same time.
        built: `frozen_checksums` on rank 0, whose values all ranks have.

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
        # Of this rank's part, in the precision of the plan, for later comparison.
        self._begun = {name: _fingerprint(tensor) for name, tensor in self._frozen.items()}

    def left_out(self) -> dict[str, int]:
        """Returns the checksums of the parameters that are unchanged on all ranks since they were
        built. Reads all of them."""
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
        """Raises `InputError` if a parameter that the checkpoint in `folder` leaves out does not have
        the same bits here, or is trained here. Names that the model does not have are ignored."""
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
    """Raises `InputError` if a parameter that the checkpoint in `folder` leaves out differs, by its
    checksum, from the one that the task has `built`. Names that only one of them has are ignored."""
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
    """Returns the checksum of the bytes of `tensor`, or of this rank's part if it is sharded."""
    found = 0
    for part in _parts(tensor):
        found = zlib.crc32(bytes_of(part), found)
    return found


def _fingerprint(tensor: Tensor) -> int:
    """Returns a value that changes when `tensor` is modified: its checksum or, on a device, from which
    billions of bytes would have to be copied at each save, torch's hash of its bits."""
    if tensor.device.type == "cpu":
        return _checksum(tensor)
    found = 0
    for part in _parts(tensor):
        if not part.numel():  # a parameter with fewer rows than there are ranks
            continue
        if part.is_complex() or (part.is_floating_point() and part.itemsize == 1):
            part = part.contiguous().view(-1).view(torch.uint8)
        # `int` would refuse values that do not fit into 63 bits.
        found = hash((found, torch.hash_tensor(part).item()))
    return found


@torch.no_grad()
def _parts(tensor: Tensor) -> list[Tensor]:
    return list(parts_of(local_part(tensor.detach())).values())

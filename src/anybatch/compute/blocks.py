"""Finds the blocks of a model: the repeated parts that recompute and sharding operate on.

A plan refers to blocks by name, so that a person can read and edit it. Names are those of
`named_modules`; `*` matches any characters, and `"."` is the model itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn

from anybatch.compute.along_time import find_recurrent
from anybatch.errors import InputError, listed

ROOT = "."
_CONTAINERS = (nn.Sequential, nn.ModuleList)


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return all modules of `model` by name; the name of the model itself is `"."`."""
    return {name or ROOT: module for name, module in model.named_modules()}


def find_blocks(model: nn.Module) -> list[str]:
    """Return the names of the blocks of `model`, in order of definition.

    A block is the largest module that repeats: a child of a module list (the layers of a transformer,
    including the experts of a mixture; the residual blocks of a convolutional network), or a sequence
    of plain layers. The model itself is never a block. Neither is a single layer, since checkpointing
    it saves nothing.
    """
    return list(_blocks(model, prefix=""))


def find_recomputable(model: nn.Module) -> list[str]:
    """Return the names of the blocks of `model`, followed by those of recurrent layers outside of
    blocks, which are recomputed in pieces along time."""
    blocks = find_blocks(model)
    return blocks + [
        name
        for name in find_recurrent(model)
        if not any(f"{name}.".startswith(f"{block}.") for block in blocks)
    ]


def find_chains(model: nn.Module) -> list[str]:
    """Return the names of the outermost `nn.Sequential` modules with more than two children. These can
    be recomputed as a tree."""
    if isinstance(model, nn.Sequential) and len(model) > 2:
        return [ROOT]
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.Sequential) and len(module) > 2 and not inside:
            found.append(name)
    return found


def match_blocks(model: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Module]:
    """Return the modules that match `patterns`, by name, without those inside another match.

    Raises `InputError` for a pattern that matches no module, or that matches a list of modules, which
    has no forward pass.
    """
    modules = modules_of(model)
    matched: dict[str, nn.Module] = {}
    for pattern in patterns:
        names = [name for name in modules if fnmatchcase(name, pattern)]
        # `*` also matches dots in fnmatch: keep the names at the depth of the pattern.
        names = [n for n in names if n == pattern or n.count(".") == pattern.count(".")]
        if not names:
            known = find_blocks(model) or [name for name, _ in model.named_children()] or [ROOT]
            raise InputError(
                f"recompute names {pattern!r}, but the model has no such module: name"
                f" {listed(known, pattern)}, say."
            )
        for name in names:
            if isinstance(modules[name], nn.ModuleList | nn.ModuleDict):
                raise InputError(
                    f"recompute names {pattern!r}, but {name!r} is a list of modules, which is never"
                    f" run itself: name its modules, {name + '.*'!r}."
                )
            matched[name] = modules[name]
    if ROOT in matched:
        return {ROOT: model}
    return {
        name: module
        for name, module in matched.items()
        if not any(name.startswith(f"{outer}.") for outer in matched)
    }


def _blocks(module: nn.Module, prefix: str) -> Iterator[str]:
    repeats = isinstance(module, _CONTAINERS)
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        if _is_leaf(child):
            continue
        is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
        holds = _is_stage(child) if repeats else _holds_blocks(child)
        if holds or (is_list and not _are_experts(name)):
            yield from _blocks(child, prefix=f"{full}.")
        elif not is_list:
            yield full


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _are_experts(name: str) -> bool:
    """Whether a list with this name holds the experts of a mixture, which belong to a single block."""
    return "expert" in name.lower()


def _holds_blocks(module: nn.Module) -> bool:
    """Whether `module` is or contains a list of blocks."""
    return any(
        _is_list_of_blocks(part) and not _are_experts(name.rpartition(".")[2])
        for name, part in module.named_modules()
    )


def _is_stage(module: nn.Module) -> bool:
    """Whether the repeated `module` is a stage of a hierarchical transformer or a residual network: a
    list of blocks, or a module with such a list as a direct child, next to the layer that leads to the
    next stage. A list at a deeper level belongs to a block."""
    return _is_list_of_blocks(module) or any(
        _is_list_of_blocks(child) and not _are_experts(name)
        for name, child in module.named_children()
    )


def _is_list_of_blocks(module: nn.Module) -> bool:
    """Whether `module` is a list in which at least two modules have children."""
    return (
        isinstance(module, _CONTAINERS)
        and sum(not _is_leaf(child) for child in module.children()) > 1
    )

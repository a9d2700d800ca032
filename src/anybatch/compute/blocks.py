"""Which modules of a model are its blocks: the repeated parts that recompute and sharding work on.

A plan names blocks, so that a person can read and edit it. Names are those of `named_modules`; `*`
matches any characters, and `"."` is the model itself.
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
    """Every module of `model` by its name, which is `"."` for the model itself."""
    return {name or ROOT: module for name, module in model.named_modules()}


def find_blocks(model: nn.Module) -> list[str]:
    """The names of the blocks of `model`, in order of definition.

    A block is the largest module that repeats: a child of a list of modules (the layers of a
    transformer, with the experts of a mixture inside, the residual blocks of a convolutional network),
    or a sequence of plain layers. The model itself is never one; a single layer is not either, since
    checkpointing it saves nothing.
    """
    return list(_blocks(model, prefix=""))


def find_recomputable(model: nn.Module) -> list[str]:
    """The blocks of `model`, and recurrent layers outside of them, which are recomputed in pieces of
    time."""
    blocks = find_blocks(model)
    return blocks + [
        name
        for name in find_recurrent(model)
        if not any(f"{name}.".startswith(f"{block}.") for block in blocks)
    ]


def find_chains(model: nn.Module) -> list[str]:
    """The names of the longest `nn.Sequential` modules, none inside another: what can be recomputed
    as a tree."""
    if isinstance(model, nn.Sequential) and len(model) > 2:
        return [ROOT]
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.Sequential) and len(module) > 2 and not inside:
            found.append(name)
    return found


def match_blocks(model: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Module]:
    """The modules that `patterns` name, by name, none of them inside another.

    Raises `InputError` for a pattern that matches no module, or a list of modules, which has no
    forward pass of its own.
    """
    modules = modules_of(model)
    matched: dict[str, nn.Module] = {}
    for pattern in patterns:
        names = [name for name in modules if fnmatchcase(name, pattern)]
        # `*` crosses dots in fnmatch: of a module and the modules inside it, the outer one is meant.
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
    """Whether a list of this name holds the experts of a mixture, which run side by side in a block."""
    return "expert" in name.lower()


def _holds_blocks(module: nn.Module) -> bool:
    """Whether `module` is, or has inside, a list of blocks."""
    return any(
        _is_list_of_blocks(part) and not _are_experts(name.rpartition(".")[2])
        for name, part in module.named_modules()
    )


def _is_stage(module: nn.Module) -> bool:
    """Whether `module`, which repeats, is a stage (of a hierarchical transformer, of a residual
    network): a list of blocks, or one beside what joins it to the next. A list that lies deeper belongs
    to a block."""
    return _is_list_of_blocks(module) or any(
        _is_list_of_blocks(child) and not _are_experts(name)
        for name, child in module.named_children()
    )


def _is_list_of_blocks(module: nn.Module) -> bool:
    """Whether it is a list of modules that have parts of their own."""
    return (
        isinstance(module, _CONTAINERS)
        and sum(not _is_leaf(child) for child in module.children()) > 1
    )

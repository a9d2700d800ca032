"""Kernel choices: which kernels compute a model, and in which memory format. The arithmetic stays the
same, up to the order in which sums are rounded.

**Channels-last** converts only the inputs of convolutions. Outputs keep the format, so in a sequence of
convolutions one input is copied; weights, gradients, states and checkpoints keep theirs.

**Compiling** compiles each block separately, inside the wrappers of recompute and sharding, which the
compiler need not support. Identical blocks share compiled code, and module names do not change. Random
numbers are drawn by torch's eager kernels, so dropout masks are the same. A second micro-batch size
makes torch compile the block once more, for any size.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.compute.blocks import ROOT, find_blocks, match_blocks, modules_of
from anybatch.compute.patch import replace_forward
from anybatch.errors import InputError, as_setting
from anybatch.plans import KernelChoices, Recompute
from anybatch.process import compilation
from anybatch.process.files import cache_folder

CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
"""Layers with dedicated kernels for channels-last tensors."""

_COMPILERS = ("c++", "g++", "clang++")
_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_VARIANTS = 8
"""Variants of a block: training or evaluation, with or without gradient, for one size or for any."""


def install(model: nn.Module, kernels: KernelChoices) -> Callable[[], None]:
    """Apply `kernels` to `model`, except for compilation (see `compile_blocks`). Returns a function
    that undoes it."""
    with ExitStack() as undo:
        if kernels.channels_last:
            for convolution in model.modules():
                if isinstance(convolution, CONVOLUTIONS):
                    undo.callback(convolution.register_forward_pre_hook(_channels_last).remove)
        if kernels.autotune:
            undo.callback(_AUTOTUNING.hold(lambda _: True))
        return undo.pop_all().close


def compile_blocks(model: nn.Module, recompute: Recompute) -> Callable[[], None]:
    """Compile the blocks of `model`, each on its first call. Returns a function that undoes it. To be
    called before recompute is installed."""
    compilation.load()
    units = units_of(model, recompute)
    with ExitStack() as undo:
        # Different blocks of one class share torch's recompile limit, beyond which it stops compiling.
        undo.callback(_RECOMPILE_LIMIT.hold(lambda before: max(before, _VARIANTS * len(units))))
        for unit in units.values():
            undo.callback(replace_forward(unit, _Compiled))
        return undo.pop_all().close


def units_of(model: nn.Module, recompute: Recompute) -> dict[str, nn.Module]:
    """Return the modules that are compiled separately: the blocks, or the whole model if it has none.
    If a part of a block is recomputed, that part is compiled instead."""
    recomputed: list[str] = []
    for name, block in match_blocks(model, recompute.blocks).items():
        if recompute.nested and isinstance(block, nn.Sequential):
            # Nested recompute runs the layers of a chain, never the chain itself.
            prefix = "" if name == ROOT else f"{name}."
            recomputed += [f"{prefix}{child}" for child, _ in block.named_children()]
        else:
            recomputed.append(name)
    blocks = find_blocks(model) or [ROOT]
    units = [name for name in blocks if not any(_inside(part, name) for part in recomputed)]
    # A part inside a unit is compiled with it, and one that contains units, unit by unit.
    units += [
        part
        for part in recomputed
        if not any(part == name or _inside(part, name) or _inside(name, part) for name in units)
    ]
    modules = modules_of(model)
    return {name: modules[name] for name in units}


def is_compiled(model: nn.Module) -> bool:
    """Whether the user has compiled `model`, or a part of it, with `torch.compile`."""
    return any(
        module._compiled_call_impl is not None
        or any(name == "_orig_mod" for name, _ in module.named_children())
        for module in model.modules()
    )


def check_available(kernels: KernelChoices, device: torch.device) -> None:
    """Raises `InputError` if `kernels` are not available on `device`, naming what is missing."""
    if kernels.compile and (reason := missing(device)):
        raise InputError(
            f"the plan compiles the model, and {reason}, or plan without {as_setting('compile', True)}."
        )


def missing(device: torch.device) -> str:
    """Describe what compiling for `device` requires that is not installed, and how to install it; empty
    if nothing is missing."""
    compiler = os.environ.get("CXX")
    if not any(shutil.which(name) for name in ((compiler,) if compiler else _COMPILERS)):
        names = compiler or ", ".join(_COMPILERS)
        return f"there is no C++ compiler ({names}): install g++"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "there is no triton, which compiling for CUDA needs: pip install triton"
    return ""


def _inside(name: str, outer: str) -> bool:
    return name != outer and (outer == ROOT or name.startswith(f"{outer}."))


def _channels_last(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if not args or not isinstance(args[0], Tensor) or args[0].dim() != 4:
        return None
    return args[0].contiguous(memory_format=torch.channels_last), *args[1:]


class _Compiled:
    """The `forward` of a block, compiled on its first call."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._run: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._run is None:
            leave_others_cache()
            self._run = torch.compile(self._forward, options={"fallback_random": True})
        return self._run(*args, **kwargs)


def leave_others_cache() -> None:
    """Move torch's compile cache to this user's cache folder if another user may have written to it.

    torch stores compiled code, which it then runs, in a temporary folder with a known name. Another
    user may have created that folder, or may have write access to it."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    shared = Path(default_cache_dir()).absolute()
    if Path(os.environ.get(_CACHE, shared)).absolute() != shared or not hasattr(os, "getuid"):
        return  # the user has chosen a folder
    with suppress(OSError):
        shared.mkdir(mode=0o700, exist_ok=True)
        found = shared.lstat()
        theirs = stat.S_IWGRP | stat.S_IWOTH
        if (
            stat.S_ISDIR(found.st_mode)
            and found.st_uid == os.getuid()
            and not found.st_mode & theirs
        ):
            return
    os.environ[_CACHE] = str(cache_folder() / "torchinductor")
    config.cpp_cache_precompile_headers = (
        False  # they are stored in the default folder despite the setting
    )


class _Setting:
    """A process-wide setting, held by any number of models. The last release restores the old value."""

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self._name = name
        self._holders = 0
        self._before: Any = None

    def hold(self, value: Callable[[Any], Any]) -> Callable[[], None]:
        """Set the setting to `value(current)`. Returns a function that releases it."""
        owner = importlib.import_module(self._module)
        now = getattr(owner, self._name)
        if self._holders == 0:
            self._before = now
        self._holders += 1
        setattr(owner, self._name, value(now))

        def let_go() -> None:
            self._holders -= 1
            if self._holders == 0:
                setattr(owner, self._name, self._before)

        return let_go


_AUTOTUNING = _Setting("torch.backends.cudnn", "benchmark")
_RECOMPILE_LIMIT = _Setting("torch._dynamo.config", "recompile_limit")

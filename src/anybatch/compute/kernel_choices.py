"""Kernel choices: which kernels compute a model, and in which layout. The arithmetic stays the same, up
to the order in which sums are rounded.

**Channels-last.** Only the inputs of convolutions are laid out anew, each right before its convolution.
What comes out has the layout of what went in, so in a row of convolutions one input is copied. Weights
stay as they are, and with them gradients, optimizer states and checkpoints: a convolution takes its
kernel to the layout of its input by itself.

**Autotuning.** cuDNN times its algorithms the first time that it meets a shape.

**Compiling.** Each block is compiled by itself, inside of what recompute and sharding put around it:

    gather weights ( checkpoint ( compiled forward of the block ) )

so neither has to be understood by the compiler, blocks that are alike share what is compiled, and
names stay plain. Random numbers are drawn by torch's own kernels, so dropout has the masks that it has
without the compiler. The first size of a micro-batch is compiled for just this size; a second one
makes torch compile the block once more, for any size. What has been compiled stays in the process: a
model whose blocks are taken out of the compiler and put back into it goes on with that.
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
from anybatch.errors import InputError
from anybatch.plans import KernelChoices, Recompute
from anybatch.process.files import cache_folder

CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
"""Layers that have kernels of their own for channels-last tensors."""

_COMPILERS = ("c++", "g++", "clang++")
_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_VARIANTS = 8
"""Of a block: in training and in evaluation, with gradient and without, for one size and for any."""


def install(model: nn.Module, kernels: KernelChoices) -> Callable[[], None]:
    """Make `model` run as the plan says, but for what `compile_blocks` does; the function returned
    undoes it."""
    with ExitStack() as undo:
        if kernels.channels_last:
            for convolution in model.modules():
                if isinstance(convolution, CONVOLUTIONS):
                    undo.callback(convolution.register_forward_pre_hook(_channels_last).remove)
        if kernels.autotune:
            undo.callback(_AUTOTUNING.hold(lambda _: True))
        return undo.pop_all().close


def compile_blocks(model: nn.Module, recompute: Recompute) -> Callable[[], None]:
    """Compile the blocks of `model`, when each runs for the first time; the function returned undoes
    it. To be called before recompute is installed."""
    units = units_of(model, recompute)
    with ExitStack() as undo:
        # Unlike blocks of one class share torch's count of variants, beyond which it compiles no more.
        undo.callback(_RECOMPILE_LIMIT.hold(lambda before: max(before, _VARIANTS * len(units))))
        for unit in units.values():
            undo.callback(replace_forward(unit, _Compiled))
        return undo.pop_all().close


def units_of(model: nn.Module, recompute: Recompute) -> dict[str, nn.Module]:
    """What is compiled, each by itself: the blocks, or the whole model if it has none; where a part of
    one is recomputed, that part instead."""
    recomputed: list[str] = []
    for name, block in match_blocks(model, recompute.blocks).items():
        if recompute.nested and isinstance(block, nn.Sequential):
            # A tree runs the layers of a chain, never the chain itself.
            prefix = "" if name == ROOT else f"{name}."
            recomputed += [f"{prefix}{child}" for child, _ in block.named_children()]
        else:
            recomputed.append(name)
    blocks = find_blocks(model) or [ROOT]
    units = [name for name in blocks if not any(_inside(part, name) for part in recomputed)]
    # What lies inside of a unit, or around some, is compiled with it, or piece by piece.
    units += [
        part
        for part in recomputed
        if not any(part == name or _inside(part, name) or _inside(name, part) for name in units)
    ]
    modules = modules_of(model)
    return {name: modules[name] for name in units}


def is_compiled(model: nn.Module) -> bool:
    """Whether its user has compiled it, or a part of it, by `torch.compile`."""
    return any(
        module._compiled_call_impl is not None
        or any(name == "_orig_mod" for name, _ in module.named_children())
        for module in model.modules()
    )


def check_available(kernels: KernelChoices, device: torch.device) -> None:
    """Raises `InputError` if `kernels` cannot be had on `device`, saying what is missing."""
    if kernels.compile and (told := missing(device)):
        raise InputError(f"the plan compiles the model, and {told}, or plan without --compile.")


def missing(device: torch.device) -> str:
    """What compiling for `device` needs and is not there, and what helps; empty if nothing is
    missing."""
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
    """The `forward` of a block, compiled when it is first run."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._run: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._run is None:
            leave_others_cache()
            self._run = torch.compile(self._forward, options={"fallback_random": True})
        return self._run(*args, **kwargs)


def leave_others_cache() -> None:
    """torch keeps what it has compiled, and runs it, in a folder of a known name among the temporary
    files. Where another user was first to make it, or may write to it, this user's cache is used."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    shared = Path(default_cache_dir()).absolute()
    if Path(os.environ.get(_CACHE, shared)).absolute() != shared or not hasattr(os, "getuid"):
        return  # where the user has said
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
        False  # they are kept in the other folder whatever is said
    )


class _Setting:
    """A setting of the process, held by any number of models: whoever lets go last puts it back."""

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self._name = name
        self._holders = 0
        self._before: Any = None

    def hold(self, value: Callable[[Any], Any]) -> Callable[[], None]:
        """Set it to `value` of what it is; the function returned lets go."""
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

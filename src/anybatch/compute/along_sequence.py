"""Tiled MLPs: MLPs that run in tiles along the sequence dimension.

The activations that an MLP saves for backward are several times as wide as its input. An MLP applies
the same computation to each position of a sequence independently, so it can run on a few positions at a
time, with each tile checkpointed: backward then holds the activations of one tile. The technique is
known as a tiled MLP (Bekman et al. 2025, "Arctic Long Sequence Training").

    x    |  x1  |  x2  |  x3  |  x4  |
            |      |      |      |          each tile runs separately
    y    |  y1  |  y2  |  y3  |  y4  |

Dropout draws in a different order. Attention is not independent by position; see `chunked_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from anybatch.errors import InputError

NUM_TILES = 8

_aten = torch.ops.aten
PRODUCTS = {_aten.mm.default, _aten.addmm.default}
"""With a weight, after the leading dims have been flattened into one."""
_ALIKE = {
    *PRODUCTS,
    torch.ops.prim.device.default,
    _aten.t.default,
    _aten.view.default,
    _aten._unsafe_view.default,
    # Copies.
    _aten._to_copy.default,
    _aten.copy_.default,
    _aten.detach.default,
    _aten.alias.default,
    _aten.empty_like.default,
    # Dropout. That of whole features creates its noise in another shape.
    _aten.bernoulli_.float,
    _aten.native_dropout.default,
    _aten.native_layer_norm.default,
    _aten.glu.default,
}
_BY_DIM = {_aten.split.Tensor: 2, _aten.slice.Tensor: 1}
"""Index of the argument `dim`: positions are independent if it is the last dim."""


def find_mlps(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Return the names of the modules inside `blocks` that may be MLPs.

    These have at least two layers with a matrix, and neither buffers nor forward hooks.
    Whether they compute positions independently is known only after a forward pass."""
    found: list[str] = []
    for block in blocks:
        prefix = "" if block == "." else f"{block}."
        for name, module in model.get_submodule(prefix.removesuffix(".")).named_modules():
            if name and _may_be_mlp(module):
                found.append(f"{prefix}{name}")
    return found


def _may_be_mlp(module: nn.Module) -> bool:
    matrices = sum(any(p.dim() == 2 for p in child.parameters()) for child in module.children())
    return (
        matrices > 1
        and next(module.buffers(), None) is None
        and not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    )


def treats_alike(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operation computes each position of a sequence independently and in the same way."""
    if func in _BY_DIM:
        place = _BY_DIM[func]
        dim = args[place] if len(args) > place else 0
        return dim % args[0].dim() == args[0].dim() - 1
    draws = torch.Tag.nondeterministic_seeded in func.tags
    return func in _ALIKE or (torch.Tag.pointwise in func.tags and not draws)


def is_sequence(args: Sequence[Any], kwargs: Any) -> bool:
    """Whether a module was called with a single argument, a tensor of shape (..., T, features) with at
    least one leading dim."""
    return len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].dim() > 2


class NotTileable(InputError):
    """Raised for a module that is run in tiles and does not compute positions independently."""


@final
class Tiled:
    """The `forward` of an MLP, run in tiles over the positions of all samples.

    A call raises `NotTileable` if the module does not compute each position independently.
    """

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        self._name = name
        self._run = run
        self._is_checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_sequence(args, kwargs) or not args[0].numel():
            return self._run(*args, **kwargs)
        (whole,) = args
        rows = whole.flatten(0, -2)
        # The number of dims is kept, since the module may unpack the shape. Tiles are contiguous, so
        # that products with a weight are products of two matrices.
        dims = [1] * (whole.dim() - 2)
        given = [tile.view(*dims, *tile.shape) for tile in rows.split(-(-len(rows) // NUM_TILES))]
        tiles = list(self._tiles(given))
        joined = torch.cat(tiles, -2) if len(tiles) > 1 else tiles[0]
        return joined.reshape(*whole.shape[:-1], joined.shape[-1])

    def _tiles(self, given: Sequence[Tensor]) -> Iterator[Tensor]:
        run = self._run
        if torch.is_grad_enabled():
            run = partial(checkpoint, run, use_reentrant=False)
        for tile in given:
            if self._is_checked or torch.compiler.is_compiling():
                yield run(tile)
                continue
            with _Checking() as checking:
                result = run(tile)
            if checking.found:
                raise self._refused(f"calls {checking.found}")
            if not isinstance(result, Tensor) or result.shape[:-1] != tile.shape[:-1]:
                raise self._refused("returns something else than a row for each position")
            self._is_checked = True
            yield result

    def _refused(self, why: str) -> NotTileable:
        return NotTileable(
            f"the plan runs {self._name!r} in tiles along the sequence, which needs a module that"
            f" computes each position by itself, and this one {why}: take it out of"
            " recompute.tiled, or plan with recompute='all'."
        )


class _Checking(TorchDispatchMode):
    """Runs operations, and records the first one that does not compute positions independently."""

    def __init__(self) -> None:
        super().__init__()
        self.found: str = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not treats_alike(func, args):
            self.found = self.found or str(func)
        return func(*args, **(kwargs or {}))

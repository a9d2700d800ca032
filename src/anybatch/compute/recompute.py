"""Recompute: activations of chosen blocks are dropped after forward and computed again in backward.

torch's non-reentrant `checkpoint` does the work. What stands here is the way from a plan to the
modules: each chosen block gets a new `forward` on the instance, so names, parameters and
`state_dict` stay as they are, and `undo` leaves the model as it was found.

A module that counts (running statistics, a step counter, the vectors of a spectral norm) must not count
twice when its block runs a second time, and must compute what it computed the first time. So the
second run finds the buffers as the first one found them, and leaves them as it found them itself.

Nested recompute is a tree over the layers of a sequence (Chen et al. 2016, "Training Deep Nets with
Sublinear Memory Cost", section 4.3). For layers a b c d:

    checkpoint( checkpoint(a b)  checkpoint(c d) )

Forward keeps the inputs of the two halves. Backward runs the right half again, keeping the inputs of
its halves, and so on: at any time O(log n) inputs are alive, for O(n log n) layer runs. A layer that
works in place would spoil an input that is kept, so it stays in one piece with the layer before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from anybatch.compute.blocks import match_blocks
from anybatch.compute.host_memory import InHostMemory
from anybatch.compute.patch import replace_forward
from anybatch.errors import InputError, listed
from anybatch.plans import Recompute

_HELD_NAMES = ("tensor", "is_output", "is_inplace_on_view")
"""Arguments of C++ that a checkpoint calls for each tensor it keeps. Each call interns their names; if
nobody holds them they are dropped again, and CPython makes its table of names anew after some 75,000
checkpoints, 7 MiB at a time."""

_KEPT_BYTES = 64 << 10
"""Copies of buffers up to this size are kept for the second run in any case."""

_aten = torch.ops.aten
_MATMULS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def install(model: nn.Module, recompute: Recompute) -> Callable[[], None]:
    """Make `model` recompute as the plan says; the function returned undoes it.

    Raises `InputError` if a name matches no module, or `nested` is asked for and no block named is
    an `nn.Sequential`.
    """
    blocks = match_blocks(model, recompute.blocks)
    chains = [name for name, block in blocks.items() if isinstance(block, nn.Sequential)]
    if recompute.nested and not chains:
        raise InputError(
            f"nested recompute needs an nn.Sequential, and {listed(blocks)} is none:"
            " name a sequence of layers, or leave 'nested' out."
        )
    undos: list[Callable[[], None]] = []
    for block in blocks.values():
        if recompute.nested and isinstance(block, nn.Sequential):
            tree = _Tree(block)  # runs the layers, not the forward of their chain
            undos.append(replace_forward(block, lambda _, tree=tree: tree))
        else:
            undos.append(replace_forward(block, partial(_Checkpointed, block, recompute.keep)))

    def undo() -> None:
        for one in undos:
            one()

    return undo


def keeping(
    recompute: Recompute, model: nn.Module, host: torch.device
) -> AbstractContextManager[Any]:
    """Where forward keeps what it keeps: on the device, or (`to_host`) on `host`."""
    if not recompute.to_host:
        return nullcontext()
    return InHostMemory(chain(model.parameters(), model.buffers()), host)


class _Checkpointed:
    """The `forward` of a block that is recomputed whole."""

    def __init__(self, block: nn.Module, keep: str, run: Callable[..., Any]) -> None:
        self._block = block
        self._run = run
        self._buffers = _CountingBuffers()
        self._keep = keep

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._run(*args, **kwargs)
        run = partial(self._run, **kwargs)
        result = checkpoint(run, *args, use_reentrant=False, context_fn=self._contexts)
        _drop_casts()
        return result

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, second = self._buffers.contexts([self._block])
        if self._keep != "matmuls":
            return first, second
        keeping = _KeepMatmuls()
        return _Both(first, keeping), _Both(second, _ReuseMatmuls(keeping.results))


class _Tree:
    """The `forward` of an `nn.Sequential` that is recomputed as a tree of checkpoints."""

    def __init__(self, chain: nn.Sequential) -> None:
        self._chain = chain
        self._buffers = _CountingBuffers()

    def __call__(self, value: Any) -> Any:
        layers = list(self._chain)
        if not torch.is_grad_enabled():
            return _in_turn(layers, value)
        first, pieces = _pieces(layers)
        value = _in_turn(first, value)
        return self._tree(pieces, value) if pieces else value

    def _tree(self, pieces: Sequence[Sequence[nn.Module]], value: Any) -> Any:
        if len(pieces) == 1:
            return _in_turn(pieces[0], value)
        half = (len(pieces) + 1) // 2
        for part in (pieces[:half], pieces[half:]):
            value = checkpoint(
                partial(self._tree, part),
                value,
                use_reentrant=False,
                context_fn=partial(self._buffers.contexts, list(chain.from_iterable(part))),
            )
            _drop_casts()
        return value


def _drop_casts() -> None:
    """Let go of autocast's copies of weights in half precision, which else stay until forward ends.

    Those of a block that is recomputed are made again in backward, so keeping them is of no use to it.
    Others are kept by what needs them in backward. A weight that is used once more in the same forward
    is copied once more, with the same values.
    """
    torch.clear_autocast_cache()


def _pieces(layers: Sequence[nn.Module]) -> tuple[list[nn.Module], list[list[nn.Module]]]:
    """Where a chain may be cut: never right before a layer that works in place. Those that it begins
    with come apart: they write to what is not the chain's own, and are run once."""
    first: list[nn.Module] = []
    pieces: list[list[nn.Module]] = []
    for layer in layers:
        if not _works_in_place(layer):
            pieces.append([layer])
        else:
            (pieces[-1] if pieces else first).append(layer)
    return first, pieces


def _works_in_place(layer: nn.Module) -> bool:
    """Whether `layer` writes to its input, as far as modules tell."""
    if isinstance(layer, nn.Sequential):
        return len(layer) > 0 and _works_in_place(layer[0])
    return bool(getattr(layer, "inplace", False))


Place = tuple[nn.Module, str]


class _CountingBuffers:
    """The buffers that forward changes, for both runs of a block.

    Which ones change may differ from run to run (observers that are enabled later, codebooks after
    their warm-up), so all are copied whenever a block runs. Copies of large ones (masks, rotary
    tables) are let go at the end of a first run that has not changed them.
    """

    def contexts(
        self, modules: Iterable[nn.Module]
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """What surrounds the first run of `modules`, which begins now, and the second."""
        found = _Snapshot(
            (module, name)
            for outer in modules
            for module in outer.modules()
            for name in module._buffers
        )
        return self._watching(found), _AsThen(found)

    @contextmanager
    def _watching(self, found: _Snapshot) -> Iterator[None]:
        yield
        found.drop_unchanged()


class _Snapshot:
    """Buffers and what they held at one moment."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._held: dict[Place, tuple[Tensor | None, int, Tensor | None]] = {}
        for module, name in dict.fromkeys(places):
            buffer, version, value = module._buffers.get(name), 0, None
            if buffer is not None:
                version = buffer._version
                if not _is_expanded(buffer):  # torch writes to no tensor whose elements are one
                    value = buffer.detach().clone()
            self._held[module, name] = buffer, version, value

    @property
    def places(self) -> list[Place]:
        """Where the buffers are."""
        return list(self._held)

    def drop_unchanged(self) -> None:
        """Let go of large buffers that were neither written nor replaced since. Some writes give no new
        version: those of the kernels of norms, and those by way of `.data`."""
        for (module, name), (buffer, version, _) in list(self._held.items()):
            if (
                buffer is not None
                and buffer.numel() * buffer.itemsize > _KEPT_BYTES
                and not isinstance(module, nn.modules.batchnorm._NormBase)
                and module._buffers.get(name) is buffer
                and buffer._version == version
            ):
                del self._held[module, name]

    def put_back(self) -> None:
        """Make every place hold what it held."""
        for (module, name), (buffer, _, value) in self._held.items():
            if buffer is not None and value is not None:
                # Through .data: the version stays, since backward may have saved this buffer.
                buffer.data.copy_(value)
            module._buffers[name] = buffer


def _is_expanded(buffer: Tensor) -> bool:
    is_strided = buffer.layout == torch.strided
    return is_strided and any(
        size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
    )


class _AsThen(AbstractContextManager[None]):
    """Buffers as at the moment of `found`; afterwards again as they are now. Any number of times: a
    graph that is kept may run backward more than once."""

    def __init__(self, found: _Snapshot) -> None:
        self._found = found
        self._now: list[_Snapshot] = []

    def __enter__(self) -> None:
        self._now.append(_Snapshot(self._found.places))
        self._found.put_back()

    def __exit__(self, *error: object) -> None:
        self._now.pop().put_back()


class _KeepMatmuls(TorchDispatchMode):
    """First run of a block: holds the results of its matrix products, in order.

    torch's own selective contexts fail where a module works in place on a kept result (ReLU after a
    convolution, as in most convolutional networks). Here such a result is let go: None in `results`,
    and computed again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.results: deque[Any] = deque()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation; keep or let go."""
        result = func(*args, **(kwargs or {}))
        if func in _MATMULS:
            self.results.append(tree_map_only(Tensor, Tensor.detach, result))
        elif func._schema.is_mutable:
            written = {t.untyped_storage() for t in _written(func, args, kwargs or {})}
            for i, kept in enumerate(self.results):
                if any(t.untyped_storage() in written for t in _tensors_in(kept)):
                    self.results[i] = None
        return result


class _ReuseMatmuls(TorchDispatchMode):
    """Second run of a block: matrix products give what they gave in the first."""

    def __init__(self, results: deque[Any]) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, or take its result from the first run."""
        kept = self._results.popleft() if func in _MATMULS and self._results else None
        return func(*args, **(kwargs or {})) if kept is None else kept


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes to."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return _tensors_in(
        [
            given.get(argument.name)
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    )


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class _Both(AbstractContextManager[None]):
    """`first`, and `second` in it; as often as they can be entered."""

    def __init__(
        self, first: AbstractContextManager[Any], second: AbstractContextManager[Any]
    ) -> None:
        self._contexts = first, second
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def _in_turn(layers: Sequence[nn.Module], value: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value

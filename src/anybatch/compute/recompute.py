"""Recompute: drops the activations of chosen blocks after forward and recomputes them in backward.

Each chosen block gets a new `forward` on the instance, which runs torch's non-reentrant `checkpoint`.
Names, parameters and `state_dict` are unchanged, and `undo` restores the model.

Buffers, plain attributes and random number generators that advance in forward must not advance twice.
So the second run of a block starts from the state before the first run, and on exit restores the state
from before the second run. Any other difference between the two runs raises an error.

Recurrent layers are split along time (`along_time`), MLPs along the sequence (`along_sequence`) and
attention in chunks of queries (`chunked_attention`).

Nested recompute is a tree over the layers of a sequence (Chen et al. 2016, "Training Deep Nets with
Sublinear Memory Cost", section 4.3): `checkpoint(checkpoint(a b) checkpoint(c d))`. Forward keeps the
inputs of the two halves, and backward does the same with each half: at any time O(log n) inputs are
alive, for O(n log n) layer runs. An in-place layer, which would overwrite a kept input, stays in one
piece with the layer before it.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from types import FunctionType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from anybatch.compute.along_sequence import Tiled
from anybatch.compute.along_time import run_along_time
from anybatch.compute.blocks import match_blocks
from anybatch.compute.chunked_attention import ChunkedAttention
from anybatch.compute.module_state import ModuleState
from anybatch.compute.parameter_writes import written_tensors
from anybatch.compute.patch import replace_forward
from anybatch.data.generators import PythonAndNumpy
from anybatch.errors import InputError, listed
from anybatch.plans import Recompute
from anybatch.side_effects import generators_in, names_in

_LEAST_BYTES = 64 << 10
"""Smaller tensors stay on the device."""

_KEPT_BYTES = 64 << 10
"""Copies of buffers up to this size are always kept for the second run."""

_COMPARED, _TOLERANCE = 64, 0.05
"""Number of output values by which the two runs of a block are compared, once, and the tolerance
relative to the largest value: kernels without a fixed order of summation round differently."""

# The compiler of a model that its user compiles would trace it, and loses the object of `context_fn`.
checkpoint: Callable[..., Any] = torch._disable_dynamo(torch_checkpoint)

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


class NotRepeated(InputError):
    """Raised if a block does not compute the same in its second run as in its first."""


def install(model: nn.Module, recompute: Recompute) -> Callable[[], None]:
    """Apply the recompute settings of a plan to `model`. Returns a function that undoes this.

    Raises `InputError` if a name matches no module, or if `nested` is set and none of the named blocks
    is an `nn.Sequential`.
    """
    blocks = match_blocks(model, recompute.blocks)
    tiled = match_blocks(model, recompute.tiled)
    chains = [name for name, block in blocks.items() if isinstance(block, nn.Sequential)]
    if recompute.nested and not chains:
        raise InputError(
            f"nested recompute needs an nn.Sequential, and {listed(blocks)} is none:"
            " name a sequence of layers, or leave 'nested' out."
        )
    undos: list[Callable[[], None]] = []
    generators = _Generators(blocks.values())
    for name, block in blocks.items():
        kept = _KeptState(name, generators)
        tree = None
        if recompute.nested and isinstance(block, nn.Sequential):
            tree = _Tree(block, kept)
        if recompute.chunked_attention:
            layers = [block] if tree is None else block.children()
            undos += [replace_forward(layer, ChunkedAttention) for layer in layers]
        if tree is None:
            checkpointed = partial(_Checkpointed, block, recompute.keep, kept)
            undos.append(replace_forward(block, checkpointed))
        else:  # runs the layers instead of the forward of the sequence
            undos.append(replace_forward(block, lambda _, tree=tree: tree))
    for name, mlp in tiled.items():
        undos.append(replace_forward(mlp, partial(Tiled, name)))

    def undo() -> None:
        for one in undos:
            one()

    return undo


def keeping(
    recompute: Recompute, model: nn.Module, host: torch.device
) -> AbstractContextManager[Any]:
    """Context manager that selects where tensors saved in forward are stored: on the device, or
    (`to_host`) on `host`."""
    if not recompute.to_host:
        return nullcontext()
    return _InHostMemory(chain(model.parameters(), model.buffers()), host)


class _InHostMemory(saved_tensors_hooks):
    """Stores saved tensors in host memory.

    torch's `save_on_cpu` moves all tensors. Here small tensors stay on the device, and so do parameters
    and buffers, which are there anyway. Copies are enqueued after the kernels that write the tensors
    and before those that read them, so the host does not block.

    Args:
        staying: tensors that are not moved, including views of them.
        host: device to move tensors to. In a trace, which counts only the memory of the device, it is
            `meta`, which stands for host memory.
    """

    def __init__(self, staying: Iterable[Tensor], host: torch.device) -> None:
        self._staying = {tensor.untyped_storage()._cdata for tensor in staying}
        self._host = host
        super().__init__(self._put, self._fetch)

    def _put(self, tensor: Tensor) -> tuple[torch.device, Tensor]:
        stays = (
            tensor.device == self._host
            or tensor.nbytes < _LEAST_BYTES
            or tensor.untyped_storage()._cdata in self._staying
        )
        if stays:
            return tensor.device, tensor
        pinned = tensor.is_cuda and self._host.type == "cpu"
        held = torch.empty_like(tensor, device=self._host, pin_memory=pinned)
        return tensor.device, held.copy_(tensor, non_blocking=pinned)

    def _fetch(self, held: tuple[torch.device, Tensor]) -> Tensor:
        device, tensor = held
        if tensor.device == device:
            return tensor
        return torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True)


@contextmanager
def naming_blocks() -> Iterator[None]:
    """Context manager around a pass (forward and backward) that names the block in recompute errors:
    torch reports that a second run saved different tensors, but not in which block.

    Raises `NotRepeated` in place of torch's error, and `InputError` for a block that differentiates
    with torch.func, which cannot be recomputed.
    """
    _latest.clear()
    try:
        yield
    except RuntimeError as error:
        if "don't yet support saved tensor hooks" in str(error) and detect_fake_mode() is None:
            raise InputError(
                "a block that is recomputed differentiates by torch.func (grad, vjp, jacrev, hessian),"
                " and torch cannot do both: train without recompute (recompute='none'), or name other"
                " blocks."
            ) from error
        if not isinstance(error, CheckpointError):
            raise
        if not _latest:  # the model itself uses checkpoint
            raise
        raise NotRepeated(_sentence(_latest[-1])) from error


_latest: list[str] = []  # name of the block whose second run started last


def _sentence(name: str) -> str:
    return (
        f"the block {name!r}, which is computed again in backward (recompute), did not compute the same"
        " as before: it draws random numbers from a source whose state cannot be put back (the"
        " operating system, a generator that it makes anew), or follows something else that changes"
        " from call to call. Train without recompute (recompute='none'), or draw from torch's"
        " generators."
    )


class _Checkpointed:
    """The `forward` of a block that is recomputed as a whole."""

    def __init__(
        self, block: nn.Module, keep: str, kept: _KeptState, run: Callable[..., Any]
    ) -> None:
        self._block = block
        self._run = run
        self._kept = kept
        self._keep = keep
        self._is_compared = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._run(*args, **kwargs)
        compares = not self._is_compared and detect_fake_mode() is None
        self._is_compared |= compares

        def recomputed(run: Callable[..., Any], *inputs: Any) -> Any:
            return checkpoint(
                _Compared(self._kept.name, run) if compares else run,
                *inputs,
                use_reentrant=False,
                context_fn=self._contexts,
                early_stop=not compares,
            )

        if isinstance(self._block, nn.RNNBase):
            result = run_along_time(self._block, self._run, recomputed, args, kwargs)
        else:
            result = recomputed(partial(self._run, **kwargs), *args)
        _drop_casts()
        return result

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if self._keep != "matmuls":
            return self._kept.contexts([self._block])
        keeping = _KeepMatmuls()
        return self._kept.contexts([self._block], keeping, _ReuseMatmuls(keeping.results))


@final
class _Compared:
    """Wraps `run` and compares a few values of its second result with the first. Raises `NotRepeated`
    if they differ."""

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        self._name = name
        self._run = run
        self._first: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._run(*args, **kwargs)
        found = _some_of(result)
        if self._first is None:
            self._first = found
        elif found is not None and found.shape == self._first.shape:
            apart, largest = (found - self._first).abs().max(), self._first.abs().max()
            if apart > _TOLERANCE * largest:  # False if values of the first run are not finite
                raise NotRepeated(_sentence(self._name))
        return result


@torch.no_grad()
def _some_of(result: Any) -> Tensor | None:
    """Some values of the first non-empty floating-point tensor in `result`."""
    for leaf in tree_leaves(result):
        if type(leaf) is Tensor and leaf.is_floating_point() and leaf.numel():
            count = min(leaf.numel(), _COMPARED)
            places = torch.linspace(0, leaf.numel() - 1, count).long().to(leaf.device)
            return leaf[torch.unravel_index(places, leaf.shape)].double()
    return None


class _Tree:
    """The `forward` of an `nn.Sequential` that is recomputed as a tree of checkpoints."""

    def __init__(self, chain: nn.Sequential, kept: _KeptState) -> None:
        self._chain = chain
        self._kept = kept

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
                context_fn=partial(self._kept.contexts, list(chain.from_iterable(part))),
            )
            _drop_casts()
        return value


def _drop_casts() -> None:
    """Clear autocast's cache of half-precision weights, which would otherwise stay until forward ends.

    The cached weights of a recomputed block are cast again in backward, so there is no use in keeping
    them. Others are kept alive by the operations that need them in backward. A weight that is used
    again in the same forward is cast again, with the same values.
    """
    torch.clear_autocast_cache()


def _pieces(layers: Sequence[nn.Module]) -> tuple[list[nn.Module], list[list[nn.Module]]]:
    """Split a sequence of layers into pieces, never right before an in-place layer. In-place layers at
    the start are returned separately: they write to a tensor from outside, and run only once."""
    first: list[nn.Module] = []
    pieces: list[list[nn.Module]] = []
    for layer in layers:
        if not _works_in_place(layer):
            pieces.append([layer])
        else:
            (pieces[-1] if pieces else first).append(layer)
    return first, pieces


def _works_in_place(layer: nn.Module) -> bool:
    """Whether `layer` writes to its input, according to its `inplace` attribute."""
    if isinstance(layer, nn.Sequential):
        return len(layer) > 0 and _works_in_place(layer[0])
    return bool(getattr(layer, "inplace", False))


Place = tuple[nn.Module, str]


@final
class _Generators:
    """Random number generators reachable from some blocks, which are searched for on first use."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self._blocks = tuple(blocks)
        self._found: list[Any] | None = None

    def found(self) -> list[Any]:
        """Return the generators. Empty in a trace, where random numbers do not matter."""
        if self._found is None:
            if detect_fake_mode() is not None:
                return []
            self._found = generators_in(*self._blocks)
        return self._found


class _KeptState:
    """Keeps the buffers, attributes and generators that forward changes, for both runs of the block
    `name`.

    Which buffers change may differ from run to run (observers that are enabled later, codebooks after
    their warm-up), so all are copied whenever a block runs. Copies of large buffers (masks, rotary
    tables) are released at the end of a first run that has not changed them.
    """

    def __init__(self, name: str, generators: _Generators) -> None:
        self.name = name
        self._generators = generators

    def contexts(
        self,
        modules: Iterable[nn.Module],
        first: AbstractContextManager[Any] | None = None,
        second: AbstractContextManager[Any] | None = None,
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return context managers for the first run of `modules`, which starts now, and the second.
        Each of them also enters that of the run that is given."""
        inner = [module for outer in modules for module in outer.modules()]
        buffers = _Snapshot((module, name) for module in inner for name in module._buffers)
        found = _Kept(buffers, ModuleState(inner, self._generators.found()), PythonAndNumpy())
        return self._watching(found, inner, first), _AsThen(self.name, found, second)

    @contextmanager
    def _watching(
        self, found: _Kept, modules: list[nn.Module], inner: AbstractContextManager[Any] | None
    ) -> Iterator[None]:
        with inner or nullcontext():
            yield
        found.buffers.drop_unchanged(modules)
        for one in (found.attributes, found.numbers):
            one.drop_unchanged()


@final
@dataclass(frozen=True)
class _Kept:
    """Snapshot of buffers, attributes and random number generators."""

    buffers: _Snapshot
    attributes: ModuleState
    numbers: PythonAndNumpy

    def now(self) -> _Kept:
        return _Kept(_Snapshot(self.buffers.places), self.attributes.now(), PythonAndNumpy())

    def put_back(self) -> None:
        for one in (self.buffers, self.attributes, self.numbers):
            one.put_back()


class _Snapshot:
    def __init__(self, places: Iterable[Place]) -> None:
        self._held: dict[Place, tuple[Tensor | None, int, Tensor | None]] = {}
        for module, name in dict.fromkeys(places):
            buffer, version, value = module._buffers.get(name), 0, None
            if buffer is not None:
                version = buffer._version
                if not _is_expanded(buffer):  # torch does not write to tensors with shared elements
                    value = buffer.detach().clone()
            self._held[module, name] = buffer, version, value

    @property
    def places(self) -> list[Place]:
        return list(self._held)

    def drop_unchanged(self, modules: Iterable[nn.Module]) -> None:
        """Release large buffers that were neither written to nor replaced since, in a run of `modules`.
        Some writes do not increase the version: those by the kernels of norms, and those through
        `.data`."""
        unchanged = [
            (module, name)
            for (module, name), (buffer, version, _) in self._held.items()
            if buffer is not None
            and buffer.numel() * buffer.itemsize > _KEPT_BYTES
            and not isinstance(module, nn.modules.batchnorm._NormBase)
            and module._buffers.get(name) is buffer
            and buffer._version == version
        ]
        if unchanged and not any(_may_write_through_data(type(module)) for module in modules):
            for place in unchanged:
                del self._held[place]

    def put_back(self) -> None:
        for (module, name), (buffer, _, value) in self._held.items():
            if buffer is not None and value is not None:
                # Through .data, which keeps the version: backward may have saved this buffer.
                buffer.data.copy_(value)
            module._buffers[name] = buffer


@cache
def _may_write_through_data(kind: type) -> bool:
    """Whether a method of the module class `kind`, or a function that is called from one, has the name
    `data` in its code, as in `self.codebook.data.copy_(values)`."""
    homes = [base for base in kind.__mro__ if not _is_of_torch(base)]
    following = [value for home in homes for value in vars(home).values()]
    seen: set[FunctionType] = set()
    while following:
        one = following.pop()
        one = one.fget if isinstance(one, property) else getattr(one, "__func__", one)
        if isinstance(one, FunctionType):
            one = inspect.unwrap(one)  # torch.no_grad() and others wrap functions
        if not isinstance(one, FunctionType) or one in seen or _is_of_torch(one):
            continue
        seen.add(one)
        names = set(names_in(one.__code__))
        if "data" in names:
            return True
        following += [one.__globals__.get(name) for name in names]
    return False


def _is_of_torch(one: type | FunctionType) -> bool:
    return str(one.__module__).partition(".")[0] == "torch"


def _is_expanded(buffer: Tensor) -> bool:
    is_strided = buffer.layout == torch.strided
    return is_strided and any(
        size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
    )


class _AsThen(AbstractContextManager[None]):
    """Context manager that restores the snapshot `found`, and on exit the state from before entering.
    It can be entered repeatedly, since a retained graph may run backward more than once."""

    def __init__(self, name: str, found: _Kept, inner: AbstractContextManager[Any] | None) -> None:
        self._name = name
        self._found = found
        self._inner = inner or nullcontext()
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        _latest[:] = [self._name]
        with ExitStack() as stack:
            stack.callback(self._found.now().put_back)
            self._found.put_back()
            stack.enter_context(self._inner)
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


class _KeepMatmuls(TorchDispatchMode):
    """First run of a block: keeps the results of its matrix products, in order.

    torch's own selective contexts fail if a module modifies a kept result in place (ReLU after a
    convolution, as in most convolutional networks). Here such a result is released: its entry in
    `results` is None, and it is recomputed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.results: deque[Any] = deque()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation. Keep its result, or release kept results that it overwrites."""
        result = func(*args, **(kwargs or {}))
        if func in _MATMULS:
            self.results.append(tree_map_only(Tensor, Tensor.detach, result))
        elif func._schema.is_mutable:
            written = {t.untyped_storage() for t in written_tensors(func, args, kwargs or {})}
            for i, kept in enumerate(self.results):
                leaves = (leaf for leaf in tree_leaves(kept) if isinstance(leaf, Tensor))
                if any(leaf.untyped_storage() in written for leaf in leaves):
                    self.results[i] = None
        return result


class _ReuseMatmuls(TorchDispatchMode):
    """Second run of a block: matrix products return the results of the first run."""

    def __init__(self, results: deque[Any]) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kept = self._results.popleft() if func in _MATMULS and self._results else None
        return func(*args, **(kwargs or {})) if kept is None else kept


def _in_turn(layers: Sequence[nn.Module], value: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value

"""Computing: on the device that computes nothing, each operation is done once more by the CPU.

The device's memory is memory of this process. So an operation is run there first, for its allocations
and what torch decides on the host; then on the CPU, on views of the same memory:

    torch     x + y on cuda     memory for the result is taken, a kernel that does nothing is launched
    here      x + y on cpu      the same numbers, written into that memory

What is random is drawn on the CPU, by the seed and the offset of the device's generator: repeatable,
and other numbers than a GPU would draw. Kernels that a CPU does not have are in `_ELSEWHERE`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

_aten = torch.ops.aten
_ONLY_THERE = frozenset(
    (
        *(
            "empty",
            "empty_like",
            "empty_strided",
            "new_empty",
            "new_empty_strided",
            "resize_",
            "set_",
        ),
        *("record_stream", "is_pinned", "_pin_memory", "_local_scalar_dense", "detach", "alias"),
        *("lift_fresh", "_record_function_enter_new"),
    )
)
"""Operations that compute nothing, or read numbers that are there."""

_BY_MASK = frozenset(("index", "index_put", "index_put_", "_index_put_impl_"))
_HALVES = torch.half, torch.bfloat16
_NCCL = "libnccl_null.so"


class Computing(TorchDispatchMode):
    """While it is active, operations on CUDA tensors compute."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves, _ = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any(isinstance(t, FakeTensor) or t.is_meta for t in tensors):
            return func(*args, **kwargs)
        if any(type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__ for t in tensors):
            return NotImplemented  # of DTensor: what it does on its local tensors comes here again
        there = [t for t in tensors if t.is_cuda]
        device = next((t.device for t in there), None) or _device_in(leaves)
        passed_on = (
            func.namespace not in ("aten", "fsdp") or _name(func) in _ONLY_THERE or func.is_view
        )
        if device is None or passed_on or any(t.layout is not torch.strided for t in tensors):
            return func(*args, **kwargs)
        _wait_for_collectives({t.device.index for t in there})
        if _depends_on_values(func, args):  # a kernel that does nothing would tell a wrong size
            found = _on_cpu(func, args, kwargs, None)
            return (
                args[0]
                if _name(func).endswith("_")
                else tree_map(lambda e: _sent(e, device), found)
            )
        inputs = {_address(t) for t in there}
        seed = _seed_of(func, kwargs.get("generator"), device)
        made = func(*args, **kwargs)
        return _filled(made, _on_cpu(func, args, kwargs, seed), inputs)


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """`Computing`, in the threads that begin inside it too."""
    plain, told = threading.Thread.run, torch._tensor_str._str

    def tell(tensor: Tensor, **options: Any) -> str:  # which is done without any mode
        plain_cuda = tensor.is_cuda and type(tensor) in (Tensor, torch.nn.Parameter)
        return told(tensor.detach().cpu() if plain_cuda else tensor, **options)

    def run(thread: threading.Thread) -> None:
        with Computing():
            plain(thread)

    threading.Thread.run, torch._tensor_str._str = run, tell
    try:
        with Computing():
            yield
    finally:
        threading.Thread.run, torch._tensor_str._str = plain, told


def _name(func: Any) -> str:
    return func._schema.name.partition("::")[2]


def _device_in(leaves: list[Any]) -> torch.device | None:
    """The CUDA device that is named, by a function that makes tensors or moves them."""
    devices = (leaf for leaf in leaves if isinstance(leaf, torch.device) and leaf.type == "cuda")
    return next(devices, None)


def _depends_on_values(func: Any, args: tuple[Any, ...]) -> bool:
    if torch.Tag.dynamic_output_shape in func.tags:
        return True
    masks = args[1] or () if _name(func) in _BY_MASK else ()
    return any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in masks)


def _seed_of(func: Any, given: Any, device: torch.device) -> int | None:
    """What stands for the state of the device's generator; None: nothing is drawn."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = given if given is not None else torch.cuda.default_generators[index]
    state = f"{generator.initial_seed()}/{generator.get_offset()}"
    return int.from_bytes(hashlib.sha256(state.encode()).digest()[:7], "big")


def _on_cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int | None) -> Any:
    """The result of `func` on the CPU. What it writes to, it writes to on the device."""
    args, kwargs = tree_map(_view, (args, kwargs))
    if seed is not None and kwargs.get("generator") is not None:
        kwargs["generator"] = torch.Generator().manual_seed(seed)
    before = torch.default_generator.get_state()
    if seed is not None:
        torch.default_generator.manual_seed(seed)
    try:
        elsewhere = _ELSEWHERE.get(_name(func))
        if elsewhere is not None:
            return elsewhere(func, _named(func, args, kwargs))
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if "not implemented" not in str(error) and "not supported" not in str(error):
                raise
            args, kwargs = tree_map(
                _widened, (args, kwargs)
            )  # the CPU has fewer kernels for halves
            return func(*args, **kwargs)
    finally:
        if seed is not None:
            torch.default_generator.set_state(before)


def _view(leaf: Any) -> Any:
    """A CPU tensor in the memory of a CUDA tensor; the CPU in place of a CUDA device."""
    if isinstance(leaf, torch.device) and leaf.type == "cuda":
        return torch.device("cpu")
    if not isinstance(leaf, Tensor) or not leaf.is_cuda:
        return leaf
    storage = leaf.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    raw = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    view = torch.empty(0, dtype=leaf.dtype)
    view.set_(raw, leaf.storage_offset(), leaf.shape, leaf.stride())
    return torch._neg_view(view) if leaf.is_neg() else view


def _sent(leaf: Any, device: torch.device) -> Any:
    """What was computed on the CPU, in new memory of `device`."""
    if not isinstance(leaf, Tensor):
        return leaf
    made = _aten.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)
    _view(made).copy_(leaf)
    return made


def _filled(made: Any, found: Any, inputs: set[int]) -> Any:
    """`made` on the device, with the values `found` on the CPU; what lies in `inputs` has them."""
    results, shape = tree_flatten(made)
    values, _ = tree_flatten(found)
    values += [None] * (len(results) - len(values))
    return tree_unflatten(
        [_one_filled(*pair, inputs) for pair in zip(results, values, strict=False)], shape
    )


def _one_filled(result: Any, value: Any, inputs: set[int]) -> Any:
    if isinstance(result, bool | int | float) and isinstance(value, bool | int | float):
        return value  # of torch.equal
    if not isinstance(result, Tensor) or not isinstance(value, Tensor):
        return result
    if result.is_cuda and _address(result) in inputs - {0}:
        return result
    if result.shape != value.shape:
        return _sent(value, result.device)
    if result.data_ptr() != value.data_ptr():  # on the CPU: a copy that went through a kernel
        _view(result).copy_(value)
    return result


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _widened(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in _HALVES else leaf


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _wait_for_collectives(devices: set[int]) -> None:
    """They write from threads of their own."""
    wait = _wait_in_nccl()
    if wait is not None:
        for index in devices or {torch.cuda.current_device()}:
            wait(torch._C._cuda_getCurrentRawStream(index))


@functools.cache
def _wait_in_nccl() -> Any:
    """The function of the stand-in for NCCL that waits for a stream; None where it is not loaded."""
    libraries = os.environ.get("LD_PRELOAD", "").split(":")
    path = next((path for path in libraries if path.endswith(_NCCL)), None)
    if path is None:
        return None
    wait = ctypes.CDLL(path).null_wait
    wait.argtypes = [ctypes.c_void_p]
    return wait


# ------------------------------------------------------------------ what a CPU has no kernel for


def _softmax(func: Any, given: dict[str, Any]) -> Any:
    rows = given["self"].float() if given["half_to_float"] else given["self"]
    return func(rows, given["dim"], False)


def _softmax_backward(func: Any, given: dict[str, Any]) -> Any:
    dy = given["grad_output"]
    return func(dy, given["output"], given["dim"], dy.dtype).to(given["input_dtype"])


def _batch_norm(_func: Any, given: dict[str, Any]) -> Any:
    names = "input weight bias running_mean running_var training exponential_average_factor epsilon"
    found = _aten.native_batch_norm(*(given[name] for name in names.split()))
    return (*found, None)


def _batch_norm_backward(_func: Any, given: dict[str, Any]) -> Any:
    names = "grad_output input weight running_mean running_var save_mean save_var"
    values = [given[name] for name in names.split()]
    return _aten.native_batch_norm_backward(*values, True, given["epsilon"], [True, True, True])


def _attention(_func: Any, given: dict[str, Any]) -> Any:
    if given.get("dropout_p"):
        raise NotImplementedError("attention with dropout on the device that computes nothing")
    scores = _scores(given)
    sums = scores.logsumexp(-1)
    result = (scores - sums[..., None]).exp() @ given["value"].float()
    return result.to(given["query"].dtype), sums


def _attention_backward(_func: Any, given: dict[str, Any]) -> Any:
    dy = given.get("grad_out_", given.get("grad_out")).float()
    query, key, value = (given[name].float() for name in ("query", "key", "value"))
    scale = given.get("scale") or query.shape[-1] ** -0.5
    weights = _scores(given).softmax(-1)
    dweights = dy @ value.mT
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdim=True))
    return dscores @ key * scale, dscores.mT @ query * scale, weights.mT @ dy, dscores


def _scores(given: dict[str, Any]) -> Tensor:
    query, key = given["query"].float(), given["key"].float()
    scores = query @ key.mT * (given.get("scale") or query.shape[-1] ** -0.5)
    if given.get("attn_bias") is not None:
        scores = scores + given["attn_bias"]
    if given.get("is_causal"):
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).tril().logical_not()
        scores = scores.masked_fill(later, float("-inf"))
    return scores


_ELSEWHERE: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _softmax_backward,
    "cudnn_batch_norm": _batch_norm,
    "cudnn_batch_norm_backward": _batch_norm_backward,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
}

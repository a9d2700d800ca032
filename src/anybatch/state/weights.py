"""Exchange of weights between anybatch, plain torch and programs that read safetensors.

Names are those of the plain model's `state_dict`, regardless of wrappers: `module.` of DataParallel and
DistributedDataParallel, `_orig_mod.` of torch.compile and the like are accepted in files and never
written. A sharded model is written whole, and a file of a whole model can be loaded into a sharded one.

No file is trusted: torch's own files are read with `weights_only=True`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from anybatch.errors import InputError, kind_of, some
from anybatch.oom import is_memory_error
from anybatch.parallel import from_rank_0, leads

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""File name suffixes that select torch's own format."""

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"  # safetensors begins with an 8-byte number, then a brace


def save_weights(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Writes the parameters and buffers of `model` to `path`, completely or not at all.

    The suffix determines the format: `.pt`, `.pth`, `.bin` and `.ckpt` select torch's (`torch.load`
    returns the state dict), anything else safetensors. Tied weights are stored once in either format.

    With several ranks, all may call it, and rank 0 writes. With a sharded model, all ranks must call
    it, and none returns before the file is written.

    Raises `InputError` if the file cannot be written, on all ranks if the model is sharded.
    """
    target = Path(path)
    write_whole(model, lambda state: write_state(state, target))
    return target


def check_can_be_written(model: nn.Module) -> None:
    """Raises `InputError` if weights of `model` have a dtype that safetensors does not support. Called
    before they are trained."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype in (torch.complex128, torch.complex32):
            raise InputError(
                f"{name!r} of the model is of {str(tensor.dtype).removeprefix('torch.')}, which a file"
                " of safetensors cannot hold, so its weights could not be written: train without out,"
                " or make it complex64."
            )


def write_whole(model: nn.Module, write: Callable[[dict[str, Any]], None]) -> None:
    """Calls `write` on rank 0 with the state of the plain model. With a sharded model, all ranks must
    call it, none returns before that is done, and an `InputError` that it raises is raised on all
    ranks."""
    if _is_sharded(model):
        state = whole_state(model)
        from_rank_0(lambda: write(state))
    elif leads():
        write(_plain_state(model))


def whole_state(model: nn.Module) -> dict[str, Any]:
    """Returns the state of `model` under the names of the plain model. With a sharded model, all ranks
    must call it; rank 0 gets the state, on the host, and the others get an empty one."""
    if not _is_sharded(model):
        return _plain_state(model)
    from anybatch.parallel.whole import full_state_dict  # FSDP takes half a second to import

    state = full_state_dict(model)
    return {_name_in(model, name): value for name, value in state.items()}


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Loads the weights in the file `path` into `model`, converted to its dtypes.

    Accepts safetensors and state dicts that `torch.save` wrote, also inside a checkpoint
    (`{"state_dict": ...}`, `{"model": ...}`), with or without the prefixes of wrappers.

    With several ranks, every rank reads the file. With a sharded model, all ranks must call it, and
    rank 0 reads.

    Raises `InputError` if the file does not exist, is damaged or is something else, or is for another
    model. The model is then unchanged.
    """
    if not _is_sharded(model):
        load_state(model, read_weights(Path(path)), path)
        return
    from anybatch.parallel.whole import load_full_state_dict

    state: dict[str, Tensor] = {}

    def read() -> None:
        state.update(_matched(model, read_weights(Path(path)), path))

    from_rank_0(read)
    load_full_state_dict(model, state if leads() else None)


def load_state(model: nn.Module, state: Mapping[str, Any], source: str | os.PathLike[str]) -> None:
    """Loads `state`, which comes from `source`, into `model`, which is not sharded, converted to its
    dtypes. Raises `InputError` if the state is for another model; the model is then unchanged."""
    model.load_state_dict(_matched(model, state, source), strict=False)


# ------------------------------------------------------------------------------------------ writing


def write_state(state: dict[str, Any], target: Path, as_torch: bool | None = None) -> None:
    """Writes `state` to `target`, completely or not at all, in torch's format or as safetensors
    (`as_torch`; None: determined by the suffix). Raises `InputError` if it cannot be written."""
    partial = target.with_name(f".{target.name}.partial")
    if as_torch is None:
        as_torch = target.suffix in TORCH_SUFFIXES
    try:
        if as_torch:
            with partial.open("wb") as file:
                torch.save(state, file)
        else:
            _write_safetensors(state, partial)
        partial.replace(target)
    except (OSError, SafetensorError, RuntimeError) as error:
        if is_memory_error(error):
            raise
        raise InputError(
            f"the weights cannot be written to {target} ({error}): is there room, and may you write"
            " there?"
        ) from None
    finally:  # if it was not renamed
        with contextlib.suppress(OSError):
            partial.unlink()


def _write_safetensors(state: dict[str, Any], path: Path) -> None:
    kept: dict[str, Tensor] = {}
    first: dict[Any, str] = {}
    storages: set[int] = set()
    metadata = {"format": "pt"}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"{name!r} is {kind_of(value)}, and safetensors holds tensors only: save to a file"
                f" whose name ends in {TORCH_SUFFIXES[0]}."
            )
        if value.layout is not torch.strided:
            value = value.to_dense()
        if (same := first.get(_place(value))) is not None:
            metadata[name] = same  # other readers of the format look here for tied weights
            continue
        if value.numel():
            first[_place(value)] = name
        storage = value.untyped_storage().data_ptr()
        # Views of one storage (an RNN's weights on a GPU) are not the same tensor.
        shared = value.numel() > 0 and storage in storages
        storages.add(storage)
        kept[name] = (
            value.clone(memory_format=torch.contiguous_format) if shared else value.contiguous()
        )
    path.touch()
    permissions = path.stat().st_mode
    try:
        save_file(kept, path, metadata)
    except KeyError as error:
        name = next(name for name, value in kept.items() if value.dtype == error.args[0])
        raise InputError(
            f"{name!r} is {error.args[0]}, which safetensors cannot hold: save to a file whose name"
            f" ends in {TORCH_SUFFIXES[0]}; of a run, 'anybatch export' does so from its checkpoints."
        ) from None
    _put_in_order(path)
    path.chmod(permissions)  # safetensors writes files that only the owner can read


def _put_in_order(path: Path) -> None:
    """Sorts the metadata of a safetensors file: the library writes it in random order, and equal
    weights should give equal files."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= length:  # otherwise json escapes differently, and the file is left as is
            file.seek(8)
            file.write(text.ljust(length))


def _plain_state(model: nn.Module) -> dict[str, Any]:
    state = {}
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and value.is_meta:
            raise InputError(
                f"{name!r} has no values (it is on the meta device): give the model its weights before"
                " they are saved."
            )
        state[_name_in(model, name)] = value
    return state


# ------------------------------------------------------------------------------------------ reading


def read_weights(path: Path) -> Mapping[str, Any]:
    """Returns the contents of the file: a state dict, or a checkpoint that contains one. Raises
    `InputError` if the file does not exist, is damaged or is something else."""
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise InputError(
            f"there are no weights at {path} ({error.strerror}): give a .safetensors file, or one that"
            " torch.save wrote."
        ) from None
    try:
        if head[8:9] != b"{" and (head[:4] == _ZIP or head[:1] == _PICKLE):
            zipped = head[:4] == _ZIP
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped or None)
        else:
            found = load_file(path)
    except Exception as error:
        if is_memory_error(error):
            raise
        raise InputError(f"the weights {path} cannot be read: {_why(error)}.") from None
    if not isinstance(found, Mapping):
        raise InputError(
            f"the weights {path} cannot be read: the file holds {kind_of(found)} where a state dict"
            " belongs; save model.state_dict()."
        )
    return found


def _why(error: Exception) -> str:
    text = str(error)
    if any(sign in text.lower() for sign in ("global", "unsupported class", "torchscript")):
        return (
            "it holds Python objects beside weights, and unpacking these could run any code; where you"
            " trust it, load it with torch and save its state_dict() alone"
        )
    return (
        f"it is no file of weights, or is damaged ({type(error).__name__}:"
        f" {(text.splitlines() or [''])[0].rstrip('.')}); a web page, a pointer of Git LFS or the index"
        " of several files is often found in place of one"
    )


# ------------------------------------------------------------------------------------------ matching


def _matched(
    model: nn.Module, found: Mapping[str, Any], path: str | os.PathLike[str]
) -> dict[str, Any]:
    """Returns the value in `found` for each name of the model's own `state_dict`.

    Raises `InputError`, with all mismatches, if it is for another model.
    """
    places = model.state_dict(keep_vars=True)
    own = {_name_in(model, name): name for name in places}
    plain = {_bare(name): name for name in own} | {name: name for name in own}

    def known(name: str) -> str | None:
        return plain.get(name) or plain.get(_bare(name))

    candidates = [one for one in (found, *found.values()) if isinstance(one, Mapping)]
    states = [one for one in candidates if any(isinstance(it, Tensor) for it in one.values())]
    state = max(states, key=lambda one: sum(bool(known(str(name))) for name in one), default={})
    values: dict[str, Any] = {}
    faults: list[str] = []
    strange = [str(name) for name in state if known(str(name)) is None]
    for name, value in state.items():
        here = known(str(name))
        if here is not None and own[here] in values:
            faults.append(f"{here!r} comes twice, once as {name!r}")
        elif here is not None:
            values[own[here]] = value
    for name, value in values.items():
        faults += _misfit(_name_in(model, name), value, places[name])
    missing = [_name_in(model, name) for name in _fill_in(places, values)]
    if missing:
        faults.insert(0, f"{_are(missing)} missing")
    if strange:
        faults.append(f"{_are(strange)} not in the model")
    if not state:
        faults = [
            f"there is no state dict in it, only {', '.join(repr(str(key)) for key in found)}"
        ]
    if faults:
        raise InputError(f"the weights {path} are for another model: {'; '.join(faults)}.")
    return values


def _bare(name: str) -> str:
    """Returns `name` without the components of wrappers, and without any `module`, which may be one."""
    return ".".join(part for part in name.split(".") if part not in (*_WRAPPERS, "module"))


def without_wrappers(name: str) -> str:
    """Returns `name` without the components that torch's wrapper modules insert. Used without a model
    to inspect, so only components are removed that are never names of other modules."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _name_in(model: nn.Module, name: str) -> str:
    """Returns the name that the entry `name` of `model.state_dict()` has in the plain model."""
    here: Any = model
    kept = []
    for part in name.split("."):
        wraps = part in _WRAPPERS or (
            part == "module" and isinstance(here, nn.DataParallel | DistributedDataParallel)
        )
        if not wraps:
            kept.append(part)
        here = getattr(here, part, None)
    return ".".join(kept)


def _fill_in(places: Mapping[str, Any], values: dict[str, Any]) -> list[str]:
    """Adds what a file may lack to `values`: tied weights under each of their names, and the counters
    of BatchNorm, which old files do not have. Returns the names that are still missing."""
    tensors = {name: place for name, place in places.items() if isinstance(place, Tensor)}
    there = {_place(tensors[name]): value for name, value in values.items() if name in tensors}
    missing = []
    for name, place in places.items():
        if name in values:
            continue
        if name in tensors and _place(place) in there:
            values[name] = there[_place(place)]
        elif name.rpartition(".")[2] == "num_batches_tracked":
            values[name] = place
        else:
            missing.append(name)
    return missing


def _misfit(name: str, value: Any, place: Any) -> Iterator[str]:
    if not isinstance(place, Tensor):
        return  # extra state, which only its module understands
    if not isinstance(value, Tensor):
        yield f"{name!r} is {kind_of(value)} in the file"
    elif value.shape != place.shape:
        yield (
            f"{name!r} has the shape {tuple(value.shape)} in the file and {tuple(place.shape)} in the"
            " model"
        )
    elif _number_kind(value) != _number_kind(place):
        yield f"{name!r} is {value.dtype} in the file and {place.dtype} in the model"
    elif place.is_meta:
        yield f"{name!r} of the model has no room for values (it is on the meta device)"


# ------------------------------------------------------------------------------------------ in words


def _are(names: list[str]) -> str:
    return f"{some(names)} {'is' if len(names) == 1 else 'are'}"


def _number_kind(tensor: Tensor) -> str:
    if tensor.is_complex():
        return "complex"
    return "real" if tensor.is_floating_point() else "whole"


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Returns a key that is equal for tensors that are the same memory."""
    if hasattr(tensor, "full_tensor"):
        return (id(tensor),)
    memory = tensor.data_ptr() if not tensor.is_meta and tensor.numel() else id(tensor)
    return tensor.device, memory, tuple(tensor.shape), tensor.stride(), tensor.dtype


def _is_sharded(model: nn.Module) -> bool:
    return any(hasattr(param, "full_tensor") for param in model.parameters())

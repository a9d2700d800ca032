"""Folders that `from_pretrained` of transformers and of peft reads.

    FOLDER/config.json                  what the model is
    FOLDER/generation_config.json       how it writes text, if it does
    FOLDER/tokenizer.json, ...          its tokens, if it came from a folder that has them
    FOLDER/adapter_config.json          of a model with adapters of peft: what they are
    FOLDER/adapter_model.safetensors    their weights, and those of modules that are trained whole
    FOLDER/NAME/...                     further adapters, if there are several

A run keeps what is beside the weights when it begins: then these can be given to others without the
model, which may need the data of the task to be made.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anybatch.errors import InputError
from anybatch.process.files import whole_folder
from anybatch.state.weights import write_state, write_whole

CONFIG, WEIGHTS = "config.json", "model.safetensors"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_FIRST = "default"  # peft's name of an adapter that was not given one: it has no folder of its own

_OF_TOKENS = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("*.model", "chat_template*", "preprocessor_config.json", "processor_config.json"),
)


def is_pretrained(model: nn.Module) -> bool:
    """Whether `model` is one of transformers."""
    # Where this has not been imported nobody has made such a model; asked for, it would be now.
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def keep_pretrained(model: nn.Module, folder: Path) -> None:
    """Write to `folder`, in place of what is there, all but the weights of `model`, which is one of
    transformers. What cannot be written is warned of: no training ends for it."""
    try:
        with whole_folder(folder, "what the model is", replaces=True) as partial:
            write_beside(model, partial)
    except Exception as error:  # of writing, and of whatever a configuration may hold
        warnings.warn(
            f"the configuration of the model could not be kept in {folder} ({error}): 'anybatch export"
            " --format huggingface' will make the model anew from its task.",
            stacklevel=2,
        )


def write_beside(model: Any, folder: Path) -> None:
    """Write all but the weights of `model` into `folder`. Raises `OSError`."""
    config = copy.deepcopy(model.config)
    # A divided model is of a class that is called so.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(folder)
    if model.can_generate():
        # What the user set for generating may be what transformers only warns of.
        with contextlib.suppress(ValueError):
            model.generation_config.save_pretrained(folder)
    for file in _files_of_tokens(getattr(model.config, "_name_or_path", "")):
        shutil.copy(file, folder / file.name)


def set_dtype(folder: Path, dtype: torch.dtype | None) -> None:
    """Let the configuration in `folder` tell the `dtype` of the weights beside it; None: it tells none.
    Raises `OSError`."""
    path = folder / CONFIG
    told = json.loads(path.read_text(encoding="utf-8"))
    for key in {"dtype", "torch_dtype"} & told.keys():
        told[key] = None if dtype is None else str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def is_kept(folder: Path) -> bool:
    """Whether `keep_pretrained` has written `folder`."""
    return (folder / CONFIG).is_file()


def check_pretrained(model: nn.Module, task: str) -> None:
    """Raises `InputError` if `model`, that of `task`, is none of transformers."""
    if not is_pretrained(model):
        raise InputError(
            f"the model of {task!r} is a {type(model).__name__}, which is none of transformers, so"
            " from_pretrained does not read it: export it as safetensors or torch."
        )


# ------------------------------------------------------------------------------------------ adapters


def has_adapters(model: nn.Module) -> bool:
    """Whether peft has put adapters into `model`."""
    return isinstance(getattr(model, "peft_config", None), dict)


def save_adapters(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write the adapters of `model` to `folder`, which is created if need be, in peft's own layout.

    With several ranks all may call it, and rank 0 writes; of a sharded model all must call it, and none
    returns before the files are there.

    Args:
        model: what `peft.get_peft_model` returned.
        folder: what `PeftModel.from_pretrained(base, folder)` is to read.

    Raises `InputError` if the model has no adapters, or the folder cannot be written.
    """
    if not has_adapters(model):
        raise InputError(
            f"{type(model).__name__} has no adapters of peft: save all of it with"
            " anybatch.save_weights, or train what peft.get_peft_model returned."
        )
    target = Path(folder)
    write_whole(model, lambda state: _write(model, state, target))
    return target


def _write(model: Any, state: dict[str, Any], folder: Path) -> None:
    from peft import get_peft_model_state_dict

    for name, config in model.peft_config.items():
        place = folder if name == _FIRST else folder / name
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"the adapters cannot be written to {place} ({error.strerror}): name a folder where you"
                " may write."
            ) from None
        # Whether embeddings were enlarged is not looked up: peft would ask the network for it.
        adapter = get_peft_model_state_dict(
            model, state_dict=dict(state), adapter_name=name, save_embedding_layers=False
        )
        write_state(adapter, place / ADAPTER_WEIGHTS)
        told = copy.copy(config)
        told.inference_mode = True
        told.save_pretrained(str(place))


def _files_of_tokens(source: Any) -> Iterator[Path]:
    """Those in the folder `source` that a model came from; of one that is no folder, none."""
    if not isinstance(source, str) or not source or not Path(source).is_dir():
        return
    seen: set[Path] = set()
    for pattern in _OF_TOKENS:
        for file in sorted(Path(source).glob(pattern)):
            if file.is_file() and file not in seen:
                seen.add(file)
                yield file

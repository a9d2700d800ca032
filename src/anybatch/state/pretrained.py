"""Folders that `from_pretrained` of transformers and of peft can read.

    FOLDER/config.json                  configuration of the model
    FOLDER/generation_config.json       how the model generates text, if it does
    FOLDER/tokenizer.json, ...          its tokenizer, if it came from a folder that has one
    FOLDER/adapter_config.json          configuration of the adapters of a model with peft adapters
    FOLDER/adapter_model.safetensors    their weights, and those of modules that are trained whole
    FOLDER/NAME/...                     further adapters, if there are several

A run saves everything except the weights when it begins, so that the weights can be exported later
without building the model, which may require the data of the task.
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
_FIRST = "default"  # peft's default name of an adapter, which is written without a subfolder

_OF_TOKENS = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("*.model", "chat_template*", "preprocessor_config.json", "processor_config.json"),
)


def is_pretrained(model: nn.Module) -> bool:
    """Returns whether `model` is a transformers model."""
    # If this has not been imported, there is no such model; an import statement would import it now.
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def keep_pretrained(model: nn.Module, folder: Path) -> None:
    """Writes everything except the weights of `model`, a transformers model, to `folder`, replacing its
    contents. Warns if this fails: training does not end because of it."""
    try:
        with whole_folder(folder, "what the model is", replaces=True) as partial:
            write_beside(model, partial)
    except Exception as error:  # from writing, or from whatever a configuration contains
        warnings.warn(
            f"the configuration of the model could not be kept in {folder} ({error}): 'anybatch export"
            " --format huggingface' will make the model anew from its task.",
            stacklevel=2,
        )


def write_beside(model: Any, folder: Path) -> None:
    """Writes everything except the weights of `model` to `folder`. Raises `OSError`."""
    config = copy.deepcopy(model.config)
    # The class of a sharded model has this prefix.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(folder)
    if model.can_generate():
        # The user's settings for generation may be ones that transformers only warns about.
        with contextlib.suppress(ValueError):
            model.generation_config.save_pretrained(folder)
    for file in _files_of_tokens(getattr(model.config, "_name_or_path", "")):
        shutil.copy(file, folder / file.name)


def set_dtype(folder: Path, dtype: torch.dtype | None) -> None:
    """Sets the dtype in the configuration in `folder` to the `dtype` of the weights next to it; None:
    none is stated. Raises `OSError`."""
    path = folder / CONFIG
    settings = json.loads(path.read_text(encoding="utf-8"))
    for key in {"dtype", "torch_dtype"} & settings.keys():
        settings[key] = None if dtype is None else str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def is_kept(folder: Path) -> bool:
    """Returns whether `keep_pretrained` has written `folder`."""
    return (folder / CONFIG).is_file()


def check_pretrained(model: nn.Module, task: str) -> None:
    """Raises `InputError` if `model`, the model of `task`, is not a transformers model."""
    if not is_pretrained(model):
        raise InputError(
            f"the model of {task!r} is a {type(model).__name__}, which is none of transformers, so"
            " from_pretrained does not read it: export it as safetensors or torch."
        )


# ------------------------------------------------------------------------------------------ adapters


def has_adapters(model: nn.Module) -> bool:
    """Returns whether `model` has peft adapters."""
    return isinstance(getattr(model, "peft_config", None), dict)


def save_adapters(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Writes the adapters of `model` to `folder`, which is created if it does not exist, in peft's
    layout.

    With several ranks, all may call it, and rank 0 writes. With a sharded model, all ranks must call
    it, and none returns before the files are written.

    Args:
        model: the model that `peft.get_peft_model` returned.
        folder: the folder for `PeftModel.from_pretrained(base, folder)` to read.

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
        # Does not check whether embeddings were resized: peft would access the network for it.
        adapter = get_peft_model_state_dict(
            model, state_dict=dict(state), adapter_name=name, save_embedding_layers=False
        )
        write_state(adapter, place / ADAPTER_WEIGHTS)
        written = copy.copy(config)
        written.inference_mode = True
        written.save_pretrained(str(place))


def _files_of_tokens(source: Any) -> Iterator[Path]:
    """Yields the tokenizer files in the folder `source` that a model came from; none if it is not a
    folder."""
    if not isinstance(source, str) or not source or not Path(source).is_dir():
        return
    seen: set[Path] = set()
    for pattern in _OF_TOKENS:
        for file in sorted(Path(source).glob(pattern)):
            if file.is_file() and file not in seen:
                seen.add(file)
                yield file

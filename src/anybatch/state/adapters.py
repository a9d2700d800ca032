"""Adapters out: of a model with those of peft, the adapters alone, as peft itself lays them out.

    FOLDER/adapter_config.json          what they are, and of which model
    FOLDER/adapter_model.safetensors    their weights, and those of modules that are trained whole
    FOLDER/NAME/...                     further adapters, if there are several

`PeftModel.from_pretrained(base, FOLDER)` reads it. What belongs to an adapter is peft's to say; here
the weights come together from several ranks, and are written whole or not at all.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from torch import nn

from anybatch.errors import InputError
from anybatch.state.weights import write_state, write_whole

WEIGHTS = "adapter_model.safetensors"
_FIRST = "default"  # peft's name of an adapter that was not given one: it has no folder of its own


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
        write_state(adapter, place / WEIGHTS)
        told = copy.copy(config)
        told.inference_mode = True
        told.save_pretrained(str(place))

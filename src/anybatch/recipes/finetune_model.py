"""A model from a folder, as transformers saves it: with its weights, or from its configuration alone.

    FOLDER/config.json            what it is; alone, it gives a model with random weights
    FOLDER/*.safetensors, *.bin   its weights
    FOLDER/tokenizer.json, ...    its tokens; see `finetune_tokens`

Nothing is ever fetched from anywhere, and no code that lies in the folder is run.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from anybatch.errors import InputError, listed

Kind: TypeAlias = Literal["causal-lm", "classification"]

ALL_LINEAR = "all-linear"
"""peft's name for every linear layer but the head."""

LONGEST = 1024
"""Tokens of a sample at most, unless more are asked for."""

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_SHOWN = 12  # names of layers in a message


class Source(NamedTuple):
    """A folder with a model: its configuration (transformers'), and whether weights are there."""

    folder: Path
    config: Any
    has_weights: bool


class Lora(NamedTuple):
    """Low-rank adapters (Hu et al. 2022, "LoRA", section 4): `W + (alpha / rank) * B A` for each matrix
    that `targets` name, with A and B trained and W as it is."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]


class Shape(NamedTuple):
    """What `build` makes: a model of `kind` from `source`, in `dtype`, with adapters if there are any.
    The configuration of the source says how many labels there are."""

    source: Source
    kind: Kind
    dtype: torch.dtype
    lora: Lora | None


def find(folder: Path) -> Source:
    """The model in `folder`.

    Raises `InputError` if it is no folder, or none with a model that transformers knows.
    """
    auto = libraries().AutoConfig
    if not folder.is_dir():
        raise InputError(
            f"the model {str(folder)!r} is no folder (looked from {os.getcwd()}), and nothing is"
            " downloaded: give a folder that save_pretrained wrote, or fetch the model into one first"
            f" ('hf download {folder} --local-dir FOLDER')."
        )
    if not (folder / "config.json").is_file():
        what = "holds adapters without the model that they belong to"
        if not (folder / "adapter_config.json").is_file():
            what = "has no config.json"
        raise InputError(
            f"the folder {str(folder)!r} {what}: give one that save_pretrained of the whole model"
            " wrote."
        )
    try:
        config = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{str(folder / 'config.json')!r} is no configuration that this version of transformers"
            f" can use: {first_line(error)}"
        ) from None
    return Source(folder, config, any(any(folder.glob(name)) for name in _WEIGHTS))


def build(shape: Shape) -> nn.Module:
    """The model, with the weights of its folder or, where there are none, random ones.

    On fake tensors (while a run is planned) the weights are not read: only their shapes matter.

    Raises `InputError` if the weights cannot be read or are for another model.
    """
    from safetensors import SafetensorError

    auto, source = _auto(shape.kind), shape.source
    options = {"dtype": shape.dtype, "trust_remote_code": False}
    if not source.has_weights or isinstance(torch.empty(0), FakeTensor):
        model = auto.from_config(source.config, **options)
    else:
        try:
            with _quiet():
                model = auto.from_pretrained(
                    source.folder, config=source.config, local_files_only=True, **options
                )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise InputError(
                f"the weights in {str(source.folder)!r} cannot be read as a model of type"
                f" {source.config.model_type!r}: {first_line(error)}"
            ) from error
    return model if shape.lora is None else _adapted(model, shape.lora, shape.kind)


def checked(shape: Shape) -> int:
    """The number of words that the model knows: ids are below it. Nothing is allocated.

    Raises `InputError` if transformers has no such model, it does not read tokens, or an adapter is
    asked for where there is no linear layer.
    """
    config = shape.source.config
    try:
        with torch.device("meta"):
            model = _auto(shape.kind).from_config(config, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        raise InputError(
            f"the model in {str(shape.source.folder)!r}, of type {config.model_type!r}, cannot be made"
            f" for the task {shape.kind!r}: {first_line(error)}"
        ) from None
    embedding = model.get_input_embeddings()
    if not hasattr(embedding, "weight"):
        raise InputError(
            f"the model in {str(shape.source.folder)!r}, of type {config.model_type!r}, has no"
            " embedding of tokens: give a model of text."
        )
    if shape.lora is not None:
        _check_targets(model, shape.lora.targets)
    return int(embedding.weight.shape[0])


def num_positions(config: Any) -> int | None:
    """How many tokens the model can tell apart by their place, or None if it sets no limit."""
    reading = config.get_text_config()
    found = getattr(reading, "max_position_embeddings", None)
    if not isinstance(found, int) or found < 1:
        return None
    # RoBERTa and its kin begin to count after the padding token.
    shifted = reading.model_type in ("roberta", "xlm-roberta", "camembert")
    return found - 1 - (reading.pad_token_id or 0) if shifted else found


def libraries() -> Any:
    """transformers. Raises `InputError` if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            f"the recipe 'finetune' needs Hugging Face's transformers, which cannot be imported"
            f" ({error}): pip install anybatch[hf]."
        ) from error
    return transformers


def first_line(error: BaseException) -> str:
    """What a library says of its error, in one line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))


# ------------------------------------------------------------------------------------- adapters


def _adapted(model: nn.Module, lora: Lora, kind: Kind) -> nn.Module:
    try:
        peft: Any = import_module("peft")
    except ImportError as error:
        raise InputError(
            f"adapters (lora_rank) need Hugging Face's peft, which cannot be imported ({error}):"
            " pip install anybatch[hf], or give lora_rank=0, which trains all weights."
        ) from error
    linear = _linear_layers(model)
    targets: Any = ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets)
    config = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM if kind == "causal-lm" else peft.TaskType.SEQ_CLS,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        # transformers' Conv1D, a linear layer with its weight transposed
        fan_in_fan_out=any(type(layer).__name__ == "Conv1D" for layer in linear.values()),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of what peft asks of transformers
        return peft.get_peft_model(model, config)


def _check_targets(model: nn.Module, targets: Iterable[str]) -> None:
    if tuple(targets) == (ALL_LINEAR,):
        return
    linear = _linear_layers(model)
    names = {name: None for path in linear if (name := path.rpartition(".")[2])}  # each once
    strange = [
        target
        for target in targets
        if not any(path == target or path.endswith(f".{target}") for path in linear)
    ]
    if strange:
        some = listed(list(names)[:_SHOWN])
        raise InputError(
            f"lora_targets names {listed(strange)}, which no linear layer of {type(model).__name__} is"
            f" called: give some of {some}, separated by commas, or {ALL_LINEAR}."
        )


def _linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Those that may have adapters, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }


# ------------------------------------------------------------------------------------- transformers


def _auto(kind: Kind) -> Any:
    found = libraries()
    is_causal = kind == "causal-lm"
    return found.AutoModelForCausalLM if is_causal else found.AutoModelForSequenceClassification


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the bar that shows how weights are read: a run builds its model several times."""
    logging = libraries().utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()

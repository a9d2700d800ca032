"""Loading of a model and its tokenizer from a folder in the format of transformers.

    FOLDER/config.json            configuration; without weights, the model gets random ones
    FOLDER/*.safetensors, *.bin   weights
    FOLDER/tokenizer.json, ...    tokenizer; optional without weights: then tokens are bytes

Nothing is downloaded, and no code from the folder is executed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from anybatch.errors import InputError, listed, worded
from anybatch.recipes.finetune_data import Kind
from anybatch.recipes.quantized import Base, quantize_frozen

ALL_LINEAR = "all-linear"
"""peft's name for all linear layers except the head."""

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZERS = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model"),
    *("sentencepiece.bpe.model", "vocab.json", "vocab.txt"),
)
_NUM_BYTES = 256
_SHOWN = 12  # names of layers in a message


class Source(NamedTuple):
    """A model folder: its path, its transformers configuration, and whether it contains weights."""

    folder: Path
    config: Any
    has_weights: bool


class Shape(NamedTuple):
    """Specification of a model for `build`: a model of `kind` from `source`, in `dtype`. If `lora` is
    not None, the model gets adapters (Hu et al. 2022, "LoRA"); `lora` has the options of peft's
    `LoraConfig`, and `base` is the format of the frozen weights."""

    source: Source
    kind: Kind
    dtype: torch.dtype
    lora: Mapping[str, Any] | None
    base: Base | None = None


def find(folder: Path) -> Source:
    """Reads the configuration of the model in `folder`.

    Raises `InputError` if `folder` is not a folder, or has no model that transformers supports.
    """
    auto = libraries().AutoConfig
    if not folder.is_dir():
        raise InputError(
            f"the model {str(folder)!r} is no folder (looked from {os.getcwd()}), and nothing is"
            " downloaded: give a folder that save_pretrained wrote, or fetch the model into one first"
            f" ('hf download {folder} --local-dir FOLDER')."
        )
    if not (folder / "config.json").is_file():
        raise InputError(
            f"the folder {str(folder)!r} has no config.json: give one that save_pretrained of the"
            " whole model wrote (a folder of adapters alone is none)."
        )
    try:
        config = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{str(folder / 'config.json')!r} is no configuration that this version of transformers"
            f" can use: {_first_line(error)}"
        ) from None
    return Source(folder, config, any(any(folder.glob(name)) for name in _WEIGHTS))


def build(shape: Shape) -> nn.Module:
    """Builds the model with the weights in its folder, or with random weights if there are none.

    With fake tensors (during planning), the weights are not read, since only their shapes matter.

    Raises `InputError` if the weights cannot be read or belong to another model.
    """
    from safetensors import SafetensorError

    auto, source = _auto(shape.kind), shape.source
    options = {"dtype": shape.dtype, "trust_remote_code": False}
    is_fake = isinstance(torch.empty(0), FakeTensor)
    if is_fake and getattr(source.config, "quantization_config", None) is not None:
        raise NotImplementedError("only transformers knows what the quantized weights consist of")
    if not source.has_weights or is_fake:
        model = auto.from_config(source.config, **options)
    else:
        logging = libraries().utils.logging
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # a run builds its model several times
        try:
            model = auto.from_pretrained(
                source.folder, config=source.config, local_files_only=True, **options
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise InputError(
                f"the weights in {str(source.folder)!r} cannot be read as a model of type"
                f" {source.config.model_type!r}: {_first_line(error)}"
            ) from error
        finally:
            if shown:
                logging.enable_progress_bar()
    if shape.lora is not None:
        model = _adapted(model, shape.lora, shape.kind)
    return model if shape.base is None else quantize_frozen(model, shape.base)


def checked(shape: Shape) -> int:
    """Checks that the model can be built. Returns its vocabulary size. Nothing is allocated.

    Raises `InputError` if transformers has no such model, its input is not tokens, or an adapter
    target is not a linear layer.
    """
    config = shape.source.config
    try:
        with torch.device("meta"):
            model = _auto(shape.kind).from_config(config, trust_remote_code=False)
        num_words = int(model.get_input_embeddings().weight.shape[0])
    except (ValueError, KeyError, AttributeError) as error:
        raise InputError(
            f"the model in {str(shape.source.folder)!r}, of type {config.model_type!r}, cannot be made"
            f" for the task {shape.kind!r}, or reads no tokens: {_first_line(error)}"
        ) from None
    if shape.lora is not None:
        _check_targets(model, shape.lora["target_modules"])
    return num_words


def num_positions(config: Any) -> int | None:
    """Returns the maximum number of positions of the model, or None if it has no limit."""
    reading = config.get_text_config()
    found = getattr(reading, "max_position_embeddings", None)
    if not isinstance(found, int) or found < 1:
        return None
    # RoBERTa and related models number positions from after the padding token.
    shifted = reading.model_type in ("roberta", "xlm-roberta", "camembert")
    return found - 1 - (reading.pad_token_id or 0) if shifted else found


def tokenizer_of(source: Source, words: int) -> Any:
    """Loads the tokenizer in the folder of `source`, whose model has a vocabulary of `words` tokens.
    For a model without weights and tokenizer, returns a byte tokenizer.

    Raises `InputError` if the folder has weights but no tokenizer, if the tokenizer cannot be read, or
    if its vocabulary exceeds the model's.
    """
    folder = source.folder
    if not any((folder / name).exists() for name in _TOKENIZERS):
        if source.has_weights:
            raise InputError(
                f"the folder {str(folder)!r} has weights and no tokenizer, so there is no telling what"
                " its tokens mean: add the tokenizer's files (its save_pretrained writes them)."
            )
        if words <= _NUM_BYTES:
            raise InputError(
                f"the folder {str(folder)!r} has no tokenizer, so text is read as bytes, but the model"
                f" knows {words} words: add a tokenizer, or give vocab_size {_NUM_BYTES + 1} or more in"
                " config.json."
            )
        return _byte_tokenizer()
    try:
        tokenizer = libraries().AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # exceptions differ between tokenizers
        raise InputError(
            f"the tokenizer in {str(folder)!r} cannot be read: {_first_line(error)}"
        ) from error
    if len(tokenizer) > words:
        raise InputError(
            f"the tokenizer in {str(folder)!r} has {len(tokenizer)} tokens, and the model's embedding"
            f" {words}: it belongs to another model, or has had tokens added to it; give the model's"
            " own, or call model.resize_token_embeddings(len(tokenizer)) and save the model again."
        )
    return tokenizer


def _byte_tokenizer() -> Any:
    """Creates a tokenizer whose tokens are bytes; token 256 ends a text."""
    import tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    words = {character: byte for byte, character in bytes_to_unicode().items()}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(words, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    inner.decoder = tokenizers.decoders.ByteLevel()
    end = "<|endoftext|>"
    return libraries().PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=end, pad_token=end, split_special_tokens=True
    )


def libraries() -> Any:
    """Imports transformers. Raises `InputError` if it cannot be imported."""
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            f"the recipe 'finetune' needs Hugging Face's transformers, which cannot be imported"
            f" ({error}): pip install anybatch[hf]."
        ) from error
    return transformers


def _first_line(error: BaseException) -> str:
    """Returns the first line of a library's error message that is not blank."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))


def _auto(kind: Kind) -> Any:
    found = libraries()
    is_causal = kind == "causal-lm"
    return found.AutoModelForCausalLM if is_causal else found.AutoModelForSequenceClassification


def _adapted(model: nn.Module, lora: Mapping[str, Any], kind: Kind) -> nn.Module:
    try:
        peft: Any = import_module("peft")
    except ImportError as error:
        raise InputError(
            f"adapters (lora_rank) need Hugging Face's peft, which cannot be imported ({error}):"
            " pip install anybatch[hf], or give"
            f" {worded('lora_rank=0', '-s lora_rank=0')}, which trains all weights."
        ) from error
    kinds = peft.TaskType
    config = peft.LoraConfig(
        task_type=kinds.CAUSAL_LM if kind == "causal-lm" else kinds.SEQ_CLS, **lora
    )
    with warnings.catch_warnings():
        # Warnings of peft about transformers and about the transposed layers of GPT-2.
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, config)


def _check_targets(model: nn.Module, targets: str | Sequence[str]) -> None:
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    ]
    strange = [
        target
        for target in (targets if targets != ALL_LINEAR else ())
        if not any(f".{name}".endswith(f".{target}") for name in linear)
    ]
    if strange:
        names = dict.fromkeys(name.rpartition(".")[2] for name in linear)  # each once
        raise InputError(
            f"lora_targets names {listed(strange)}, which no linear layer of {type(model).__name__} is"
            f" called: give some of {listed(list(names)[:_SHOWN])}, separated by commas, or"
            f" {ALL_LINEAR}."
        )

"""Training scripts as people write them, each twice: with its own loop, and with `Step` in it.

`by_hand` and `by_step` of a module differ in the block that `Step` replaces, and in nothing else.
`make` builds what both need: with `cuttable`, without what draws numbers in the model (dropout) or
looks at other samples (BatchNorm), which no cut can leave as it is.
"""

from __future__ import annotations

import difflib
import inspect
from types import ModuleType
from typing import Any

import torch
from tests.equivalence.ported import (
    classifier,
    diffusion,
    distillation,
    gan,
    images,
    language_model,
    mnist,
    recurrent,
    siamese,
    vae,
)

SCRIPTS: dict[str, ModuleType] = {
    "digits (dropout, Adadelta, StepLR)": mnist,
    "GPT (accumulation, clipping, cosine)": language_model,
    "VAE (sum of two losses)": vae,
    "LSTM words (state carried over, clipping)": recurrent,
    "ResNet (BatchNorm, momentum, StepLR)": images,
    "BERT classifier (masks, warm-up)": classifier,
    "siamese network (pairs)": siamese,
    "DCGAN (two optimizers)": gan,
    "diffusion (noise, EMA of the weights)": diffusion,
    "distillation (teacher, two losses)": distillation,
}


def parameters_of(work: Any) -> torch.Tensor:
    """What was trained, and the buffers of it, as one vector in float64."""
    tensors = [t for model in work.trained for t in model.state_dict().values()]
    return torch.cat([t.detach().double().flatten() for t in tensors])


def changed_lines(script: ModuleType) -> tuple[int, int]:
    """Lines of the script's own loop that go, and lines that come in their place."""
    loops = [
        inspect.getsource(getattr(script, name)).splitlines()[1:] for name in ("by_hand", "by_step")
    ]
    marks = [line[:1] for line in difflib.ndiff(*loops)]
    return marks.count("-"), marks.count("+")

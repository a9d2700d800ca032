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


def trained(script: ModuleType, cuttable: bool, **options: Any) -> torch.Tensor:
    """Parameters and buffers after ten steps, as one vector in float64: by `Step` with `options`, or
    without any by the script's own loop."""
    torch.manual_seed(0)
    work = script.make(cuttable)
    if options:
        script.by_step(work, verbose=False, **options)
    else:
        script.by_hand(work)
    tensors = [t for model in work.trained for t in model.state_dict().values()]
    return torch.cat([t.detach().double().flatten() for t in tensors])


def as_written(script: ModuleType) -> dict[str, Any]:
    """Options of `Step` under which a step is cut as in the script's own loop. GPT's accumulates: in
    float32 AdamW makes much of how gradients that are nearly 0 are rounded."""
    return {"micro_batch": 4} if script is language_model else {"memory": "1GiB"}


def changed_lines(script: ModuleType) -> tuple[int, int]:
    """Lines of the script's own loop that go, and lines that come in their place."""
    loops = [
        inspect.getsource(getattr(script, name)).splitlines()[1:] for name in ("by_hand", "by_step")
    ]
    marks = [line[:1] for line in difflib.ndiff(*loops)]
    return marks.count("-"), marks.count("+")

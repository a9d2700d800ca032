"""Which models can be sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from anybatch.compute.buckets import check_dense
from anybatch.errors import InputError


def check_divisible(model: nn.Module) -> None:
    """Raises `InputError` if the parameters of `model`, which may be fake, cannot be divided."""
    check_dense(model)
    for name, param in model.named_parameters():
        if param.dim() == 0:
            raise InputError(
                f"the parameter {name!r} is a single number without a dim, which cannot be divided over"
                " ranks: give it the shape (1,), or replicate the model."
            )
    dtypes = _dtypes(model.parameters())
    if len(dtypes) > 1:
        raise InputError(
            f"the model has trainable parameters in {' and '.join(dtypes)}, and those of a sharded one"
            " must be in one dtype: build it in one, and choose how it computes by the precision."
        )


def _dtypes(params: Iterable[nn.Parameter]) -> list[str]:
    return sorted({str(p.dtype).removeprefix("torch.") for p in params if p.requires_grad})

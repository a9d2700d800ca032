"""Processor: the instructions of a CPU, as far as kernels of torch and oneDNN differ by them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Processor:
    """One with the instructions of AVX-512, unless it is said otherwise.

    Attributes:
        vector_bytes: of its widest vectors.
        halves: dtypes of half precision in which oneDNN computes on it. In others, and in float64,
            torch does without: products by MKL, convolutions as products of images that are unfolded.
        tiles: it multiplies whole tiles (AMX).
    """

    vector_bytes: int = 64
    halves: frozenset[torch.dtype] = frozenset(_HALF)
    tiles: bool = False

    def computes(self, dtype: torch.dtype) -> bool:
        """Whether oneDNN computes in `dtype`."""
        return dtype == torch.float32 or dtype in self.halves


@cache
def this_processor() -> Processor:
    """That of this machine."""
    asks = (torch.ops.mkldnn._is_mkldnn_bf16_supported, torch.ops.mkldnn._is_mkldnn_fp16_supported)
    return Processor(
        vector_bytes=32 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 64,
        halves=frozenset(dtype for dtype, ask in zip(_HALF, asks, strict=True) if ask()),
        tiles=getattr(torch.cpu, "_is_amx_tile_supported", bool)(),
    )

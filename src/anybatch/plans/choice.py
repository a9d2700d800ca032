"""Choice: the settings of one device, and the kernels that compute the model.

None of these settings changes the mathematics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Literal

from pydantic import Field

from anybatch.plans.frozen import Frozen

Precision = Literal[
    "fp32", "tf32", "bf16", "fp16", "bf16-weights", "fp16-weights", "bf16-pure", "fp16-pure", "fp8"
]
"""Number formats used for training:

`fp32`: everything in the dtype of the model. `tf32`: the same, with matrix products in TensorFloat-32.
`bf16`, `fp16`: autocast; fp16 with loss scaling. `bf16-weights`, `fp16-weights`: half-precision
weights, norms in float32, the optimizer on float32 master copies. `bf16-pure`, `fp16-pure`: everything
in half precision, including the optimizer. `fp8`: matrix products of linear layers in float8, if the
device and torchao support it.
"""

LOSS_SCALED: frozenset[Precision] = frozenset({"fp16", "fp16-weights"})
"""Precisions with loss scaling, which prevents underflow of float16 gradients."""

PRECISION_ALIASES: dict[str, Precision] = {
    "O0": "fp32",
    "O1": "fp16",
    "O2": "fp16-weights",
    "O3": "fp16-pure",
}
"""NVIDIA Apex names of the corresponding precisions."""


class Recompute(Frozen):
    """Which activations are recomputed in the backward pass instead of being stored.

    Attributes:
        blocks: names of modules, where `*` matches any part (`"layers.*"`); empty: none.
        keep: what is stored inside a block: `"nothing"`, or the results of `"matmuls"` (and
            convolutions), which are expensive to compute and cheap to store.
        nested: a block that is an `nn.Sequential` becomes a tree of checkpoints, so that a chain of n
            equal layers stores O(log n) activations.
        to_host: whether stored activations are in host memory.
        tiled: names of MLPs inside the blocks that run in tiles along the sequence, each of which is
            recomputed separately.
        chunked_attention: whether attention inside the blocks runs in chunks of queries, each of which
            is recomputed separately.
    """

    blocks: tuple[str, ...] = ()
    keep: Literal["nothing", "matmuls"] = "nothing"
    nested: bool = False
    to_host: bool = False
    tiled: tuple[str, ...] = ()
    chunked_attention: bool = False

    def describe(self, named: bool = False) -> str:
        """Short description for a table; with the names of several blocks if `named`."""
        if not self.blocks:
            return "none, kept in host memory" if self.to_host else "none"
        names = f"{len(self.blocks)} blocks"
        if len(self.blocks) == 1:
            names = "the whole model" if self.blocks[0] == "." else self.blocks[0]
        elif named:
            names += f" ({', '.join(_joined(self.blocks))})"
        more = [
            "nested" if self.nested else "",
            "matrix products kept" if self.keep == "matmuls" else "",
            "MLPs in tiles" if self.tiled else "",
            "attention in chunks" if self.chunked_attention else "",
            "kept in host memory" if self.to_host else "",
        ]
        return ", ".join([names, *filter(None, more)])


def _joined(names: Iterable[str]) -> Iterator[str]:
    """`names`, with consecutive numbers merged: `layers.0`, `layers.1`, `layers.2` become
    `layers.0-2`."""
    parts = [(*name.rpartition("."), name) for name in names]
    for _, run in groupby(
        enumerate(parts),
        lambda item: (item[1][0], int(item[1][2]) - item[0]) if item[1][2].isdecimal() else item[0],
    ):
        inside = [part for _, part in run]
        first, last = inside[0], inside[-1]
        yield first[3] if len(inside) == 1 else f"{first[3]}-{last[2]}"


Update = Literal["as given", "fused", "in parts"]
"""How the optimizer update runs:

`as given`: as the task's optimizer does by default. `fused`: in one kernel, without temporary tensors.
`in parts`: for some parameters at a time, so that temporary tensors are small.
"""

StatesOn = Literal["device", "host"]
"""Where the optimizer states are stored between updates."""


FreedMemory = Literal["kept", "returned"]
"""How the C library handles freed memory on a CPU under an enforced budget:

`kept`: it is kept for reuse, which is fast, but holes between blocks still count as used. `returned`:
it is returned to the kernel, so that only memory in use counts, but each large block costs a page fault
per page.
"""


class Choice(Frozen):
    """The settings of one device.

    If samples differ in length, a batch may contain more samples, up to the padded size of
    `micro_batch` (or `evaluation_batch`) samples of the longest length.
    """

    micro_batch: int = Field(ge=1, description="samples per forward pass")
    evaluation_batch: int = Field(ge=1, description="samples per forward pass without gradient")
    precision: Precision = "fp32"
    recompute: Recompute = Recompute()
    update: Update = "as given"
    optimizer_states: StatesOn = "device"
    freed_memory: FreedMemory = "kept"
    chunked_head: str = Field(
        default="",
        description="name of the nn.Linear whose outputs, the logits, are never all there: the loss"
        " takes them in chunks; empty: the loss is computed as it is written",
    )

    def trains_like(self, other: Choice) -> bool:
        """Whether both choices train the same way; evaluation may differ."""
        return self == other.model_copy(update={"evaluation_batch": self.evaluation_batch})

    def describe(self) -> str:
        """One-line description for a table or an event."""
        chunks = ", loss in chunks" if self.chunked_head else ""
        states = ", optimizer states in host memory" if self.optimizer_states == "host" else ""
        freed = ", freed memory returned" if self.freed_memory == "returned" else ""
        return (
            f"micro-batch {self.micro_batch}, {self.precision},"
            f" recompute {self.recompute.describe()}{chunks}{states}{freed}"
        )

    @property
    def kind(self) -> tuple[Recompute, str, FreedMemory]:
        """The settings that passes of the same kind share, regardless of their size."""
        return self.recompute, self.chunked_head, self.freed_memory

    def describe_update(self) -> str:
        """One-line description of how the update runs and why; empty: as torch does by default."""
        words = {
            "as given": "",
            "fused": "fused: one kernel, no temporary tensors",
            "in parts": "some parameters at a time, so that temporary tensors stay small",
        }[self.update]
        host = "states in host memory, brought over for some parameters at a time"
        return "; ".join(filter(None, [words, host if self.optimizer_states == "host" else ""]))


class KernelChoices(Frozen):
    """The kernels that compute the model, and their memory layout. Results differ only by rounding.

    Attributes:
        channels_last: convolutions get images in the channels-last layout.
        autotune: cuDNN times its algorithms for each new shape and uses the fastest.
        compile: the blocks of the model are compiled by `torch.compile`.
    """

    channels_last: bool = False
    autotune: bool = False
    compile: bool = False

    def describe(self) -> str:
        """Short description for a table; empty if nothing is chosen."""
        parts = [
            "channels-last convolutions" if self.channels_last else "",
            "autotuned by cuDNN" if self.autotune else "",
            "compiled blocks" if self.compile else "",
        ]
        return ", ".join(filter(None, parts))

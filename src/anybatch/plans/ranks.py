"""Ranks: how they share a step, what they communicate, and how long that takes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from anybatch.plans.frozen import Frozen
from anybatch.units import format_rate, format_seconds

Parallel = Literal["single", "replicate", "shard"]
"""How ranks share a step:

`single`: one rank. `replicate`: the whole model on every rank, gradients summed once per step; if a
rank fails, no other rank hangs. `shard`: parameters, gradients and optimizer state sharded over the
ranks (FSDP2).
"""


def num_units(num_samples: int, unit: int) -> int:
    """Number of units of `unit` samples (ghost batches or parts) in a step of `num_samples` samples. A
    remainder of one sample belongs to the unit before it."""
    whole, rest = divmod(num_samples, unit)
    return whole + (rest > 1 or (rest == 1 and whole == 0))


Norms = Literal["ghosts", "synchronised"]
"""Where a ghost batch of BatchNorm is computed: on one rank, or divided over all of them."""

Balancing = Literal["measured", "fixed"]
"""Whether shares follow the measured speed of the ranks."""

Compression = Literal["bf16", "fp16"]
"""Dtype to which gradients, or movements of weights, are converted for communication; see
`Exchange`."""

_REMOVED = {
    "ddp": "runs use no DistributedDataParallel; choose 'replicate', which gives the same result",
    "in-process": "ranks are processes; choose 'replicate', for any number of ranks",
    "powersgd": "there is no PowerSGD; choose 'bf16' or 'fp16'",
}


def check_removed(value: object) -> object:
    """Return `value`. Raises `ValueError` if it names something that anybatch no longer supports."""
    if isinstance(value, str) and value in _REMOVED:
        raise ValueError(_REMOVED[value])
    return value


Reduce = Literal["every pass", "last pass"]
"""When the ranks of a sharded model sum their gradients."""


class Sharding(Frozen):
    """How a model is divided if `parallel` is `"shard"`.

    Attributes:
        over: number of ranks that divide one model among them, such as those of one machine; groups of
            this size replicate each other and sum their gradients once per step (hybrid sharding, Zhao
            et al. 2023, "PyTorch FSDP", section 3.2.2). None: all ranks divide one model.
        reduce: `"every pass"`: each rank stores only its part of the gradients; `"last pass"`: it
            stores whole gradients until the last pass of a step, so that they are communicated once,
            regardless of the number of passes. Gradients of half-precision weights with float32 masters
            are summed in every pass.
    """

    over: int | None = Field(default=None, ge=1)
    reduce: Reduce = "every pass"

    def group_size(self, num_ranks: int) -> int:
        """Number of ranks that divide one model among them, out of `num_ranks`."""
        return self.over or num_ranks

    def describe(self, num_ranks: int) -> str:
        """Short description for a table, for `num_ranks` ranks."""
        size = self.group_size(num_ranks)
        among = "them" if size == num_ranks else f"groups of {size}, which replicate each other"
        more = ", gradients kept whole until the last pass" if self.reduce == "last pass" else ""
        return f"parameters, gradients and optimizer state divided among {among}{more}"


class Outer(Frozen):
    """The optimizer that updates the shared weights after a round of local steps: stochastic gradient
    descent with Nesterov momentum on the mean movement of the ranks. The defaults are those of
    Douillard et al. 2023, "DiLoCo: Distributed low-communication training of language models".

    Attributes:
        lr: learning rate; 1 without momentum is plain averaging.
        momentum: Nesterov momentum.
    """

    lr: float = Field(default=0.7, gt=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)


class Exchange(Frozen):
    """What the ranks communicate, and how often. The default is exact; every other setting changes the
    mathematics of training and is used only on request.

    Attributes:
        compress: send gradients (or movements) in `"bf16"` or `"fp16"`.
        every: number of optimizer steps that each rank takes independently before weights are averaged.
        outer: the optimizer that applies the averages; None: plain averaging.
        stale: apply gradients one step late, and communicate them while the next step computes.
    """

    compress: Annotated[Compression | None, BeforeValidator(check_removed)] = None
    every: int = Field(default=1, ge=1)
    outer: Outer | None = None
    stale: bool = False

    @model_validator(mode="after")
    def _check(self) -> Exchange:
        if self.every > 1 and self.stale:
            raise ValueError(
                f"every is {self.every} and stale is true, but local steps exchange no gradients that"
                " could be late: ask for one of the two"
            )
        if self.outer is not None and self.every == 1:
            raise ValueError(
                "outer is an optimizer for the averages of local steps, and every is 1: ask for more"
                " steps, or leave it out"
            )
        return self

    @property
    def is_exact(self) -> bool:
        """Whether the update equals that of a synchronous step."""
        return self.compress is None and self.every == 1 and not self.stale

    def describe(self) -> str:
        """One-line description for a table."""
        parts = []
        if self.every > 1:
            how = (
                "averaged"
                if self.outer is None
                else f"moved by an outer optimizer (lr {self.outer.lr:g}, Nesterov momentum"
                f" {self.outer.momentum:g})"
            )
            parts.append(f"local steps, weights {how} every {self.every} steps")
        if self.stale:
            parts.append("gradients applied one step late")
        if self.compress is not None:
            parts.append(
                f"{'movements' if self.every > 1 else 'gradients'} sent in {self.compress}"
            )
        return "; ".join(parts) or "exact, in every step"

    def notices(self) -> tuple[str, ...]:
        """Sentences for readers of the plan; none if the exchange is exact."""
        if self.is_exact:
            return ()
        loss = ", and the loss that is reported is that of rank 0's share" if self.every > 1 else ""
        notice = (
            f"The exchange between ranks is not exact, as asked for ({self.describe()}): the result"
            f" depends on it and on the number of ranks{loss}."
        )
        return (notice,)


class Link(Frozen):
    """Speed of the connection between ranks, as two numbers (the alpha-beta model, Thakur et al. 2005,
    "Optimization of collective communication operations in MPICH"). A sum of B bytes over n ranks is
    computed in a ring (Patarasuk and Yuan 2009), in 2 (n - 1) consecutive hops, each with 1/n of the
    bytes:

        seconds = 2 (n - 1) (hop_seconds + B / n / bytes_per_second)

    Attributes:
        bytes_per_second: rate at which a rank sends while it receives at the same rate.
        hop_seconds: fixed time per hop, regardless of its size.
        measured: whether the ranks measured the link; otherwise it is from a table.
    """

    bytes_per_second: float = Field(gt=0)
    hop_seconds: float = Field(ge=0)
    measured: bool = False

    @classmethod
    def through(
        cls, least: tuple[int, float], most: tuple[int, float], num_ranks: int
    ) -> Link | None:
        """The link that matches two measured sums.

        Args:
            least, most: (bytes, seconds) of a sum so small that the fixed time of hops dominates, and
                of a larger sum.
            num_ranks: at least 2.

        Returns None if the larger sum was not slower, so that no speed can be derived.
        """
        hops = 2 * (num_ranks - 1)
        (few, least_seconds), (many, most_seconds) = least, most
        if most_seconds <= least_seconds or many <= few:
            return None
        per_byte = (most_seconds - least_seconds) / (many - few)
        return cls(
            bytes_per_second=hops / num_ranks / per_byte,
            hop_seconds=max(0.0, least_seconds - per_byte * few) / hops,
            measured=True,
        )

    def seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Seconds that `num_ranks` ranks need to sum `num_bytes` each."""
        hops = 2 * (num_ranks - 1)
        return hops * (self.hop_seconds + num_bytes / num_ranks / self.bytes_per_second)

    def describe(self, num_ranks: int) -> str:
        """One-line description for a table: the source of the figures and their values."""
        what = (
            f"{format_rate(self.bytes_per_second)},"
            f" {format_seconds(self.seconds(0, num_ranks))} a collective"
        )
        if self.measured:
            return f"measured when the ranks joined: {what}"
        return f"as tabulated for ranks of one machine, not measured: {what}"

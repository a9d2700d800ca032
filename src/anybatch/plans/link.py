"""Link: how long the ranks of a plan take to add up what each of them has."""

from __future__ import annotations

from pydantic import Field

from anybatch.plans.frozen import Frozen
from anybatch.units import format_rate, format_seconds


class Link(Frozen):
    """What joins several ranks, as two numbers (the alpha-beta model, Thakur et al. 2005, "Optimization
    of collective communication operations in MPICH"). A sum of B bytes over n ranks is made in a ring
    (Patarasuk and Yuan 2009), of 2 (n - 1) hops one after the other, each with an n-th of the bytes:

        seconds = 2 (n - 1) (hop_seconds + B / n / bytes_per_second)

    Attributes:
        bytes_per_second: that a rank sends, while it receives as many.
        hop_seconds: of a hop, however little it carries.
        measured: whether the ranks have measured it; else it is tabulated.
    """

    bytes_per_second: float = Field(gt=0, allow_inf_nan=False)
    hop_seconds: float = Field(ge=0, allow_inf_nan=False)
    measured: bool = False

    @classmethod
    def through(
        cls, least: tuple[int, float], most: tuple[int, float], num_ranks: int
    ) -> Link | None:
        """The link on which two sums take what was measured.

        Args:
            least, most: (bytes, seconds) of a sum so small that hops are most of it, and of a larger
                one.
            num_ranks: at least 2.

        Returns None if the larger one was not slower, so that they tell no speed.
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
        """Seconds until `num_ranks` ranks have added up `num_bytes` each."""
        hops = 2 * (num_ranks - 1)
        return hops * (self.hop_seconds + num_bytes / num_ranks / self.bytes_per_second)

    def describe(self, num_ranks: int) -> str:
        """Where it comes from, and what it is, for a line of a table."""
        what = (
            f"{format_rate(self.bytes_per_second)},"
            f" {format_seconds(self.seconds(0, num_ranks))} a collective"
        )
        if self.measured:
            return f"measured when the ranks joined: {what}"
        return f"as tabulated for ranks of one machine, not measured: {what}"

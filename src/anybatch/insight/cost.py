"""Batch: what a batch size costs, given the noise scale N: in steps, in samples, in time.

    steps   = fewest steps   * (1 + N / B)        samples = fewest samples * (1 + B / N)

(McCandlish et al. 2018, section 2.3.) At B = N either is twice its least. Far above N a larger batch
saves hardly a step; far below it saves steps and costs hardly a sample more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from anybatch.plans import Prediction

_BY_SAMPLES = ("forward", "backward", "recompute", "forward and backward", "norms over ranks")
"""Parts of a predicted step that grow with its samples; the others are the same for any batch."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch size under a noise scale, both in samples.

    Attributes:
        size: the batch.
        scale: the noise scale.
    """

    size: float
    scale: float

    @property
    def steps(self) -> float:
        """Steps for the same progress, in times the fewest that any batch takes."""
        return 1 + self.scale / self.size

    @property
    def samples(self) -> float:
        """Samples for the same progress, in times the fewest; infinite without noise."""
        return 1 + self.size / self.scale if self.scale else math.inf

    def seconds(self, other: float, fixed: float) -> float:
        """Time for the same progress at the batch `other`, in times that at this one, where the part
        `fixed` of a step at this one would take as long at any batch."""
        step = fixed + (1 - fixed) * other / self.size
        return step * Batch(other, self.scale).steps / self.steps


def fastest(batch: Batch, fixed: float) -> float:
    """The batch, in samples, that takes least time for the same progress, see `Batch.seconds`: the
    least of (1 + N / B) (a + b B) is at B = sqrt(N a / b)."""
    return math.sqrt(batch.scale * batch.size * fixed / (1 - fixed))


def fixed_part(prediction: Prediction | None) -> float | None:
    """The part of a predicted step that is the same for any batch: the update, and the exchange of
    gradients. None: not told."""
    parts = prediction.step_parts if prediction is not None else {}
    same = sum(seconds for name, seconds in parts.items() if name not in _BY_SAMPLES)
    whole = sum(parts.values())
    return same / whole if 0 < same < whole else None

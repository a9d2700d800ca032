"""Script bytes: what the script of a process has taken between two steps, and keeps.

Of what a process holds one sum is known. So what it grows by while the script has it is the
script's. That is not the whole truth, since either side may free what the other took: a batch that is
made between two steps and dropped in one, activations that a hook saved and the script throws away. A
plain sum would drift by so much with each step, without an end. So what was the script's once stays so,
but it is never more than the process has grown by since the beginning.
"""

from __future__ import annotations

from typing import final


@final
class ScriptBytes:
    """See the module.

    Args:
        start: what the process holds when its budget begins to count.

    Attributes:
        num_bytes: that the script keeps.
    """

    def __init__(self, start: int) -> None:
        self.num_bytes: int = 0
        self._start = start
        self._now = self._most = 0
        self._begun: int | None = None

    @property
    def rests(self) -> bool:
        """Whether the process is the script's now."""
        return self._begun is not None

    def rest(self, there: int) -> None:
        """The process, which holds so many bytes, is the script's from now on."""
        self._begun = there

    def resume(self, there: int) -> None:
        """It is the script's no more, if it was, and holds so many."""
        if self._begun is None:
            return
        grown = max(0, there - self._start)
        self._now = min(max(0, self._now + there - self._begun), grown)
        self._most = max(self._most, self._now)
        self.num_bytes = min(self._most, grown)
        self._begun = None

"""Board: messages of each rank that the other ranks can read, whatever its main thread is doing.

The messages are kept in the store where the ranks met, which outlives any single rank if the agent
serves it. A store that does not answer blocks its client, so a separate thread queries it through a
separate connection. The last messages received are cached here, and can be read without blocking.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from torch.distributed import Store

_ANSWER_SECONDS = 30.0
_CLOSE_SECONDS = 2.0

_NUM_TRIALS = 3
"""Number of consecutive failures after which the store is considered lost: torch writes to standard
error at each of them."""

_num_boards = 0
"""Number of boards opened by this process. It is the same on all ranks, since they open boards
together."""


@final
class Board:
    """Messages of `size` ranks, as seen from `rank`. `close` ends its thread.

    Args:
        open_store: creates a connection to the store that all ranks share; called in the board's
            thread.
        rank: this rank.
        size: number of ranks.

    Attributes:
        words: last message received from each rank; empty for a rank that has not sent one yet.
        verdict: message of the first rank that announced why it is ended; empty if none has.
        answered: time of the store's last answer, on the monotonic clock.
    """

    def __init__(self, open_store: Callable[[], Store], rank: int, size: int) -> None:
        self.rank: int = rank
        self.size: int = size
        self.words: Sequence[str] = ("",) * size
        self.verdict: str = ""
        self.answered: float = time.monotonic()
        self._open = open_store
        self._changed = threading.Condition()
        self._own: str | None = None
        self._announced: str | None = None
        self._asked = self._closing = False
        self._num_asked = self._num_answered = 0
        self._thread = threading.Thread(target=self._serve, name="anybatch-board", daemon=True)
        self._thread.start()

    def tell(self, word: str, ask: bool = False) -> None:
        """Publish `word` as the message of this rank, and fetch those of the others if `ask`. Does
        not block."""
        with self._changed:
            self._own = word
            self._asked = self._asked or ask
            self._num_asked += 1
            self._changed.notify_all()

    def announce(self, verdict: str, seconds: float) -> None:
        """Announce to all ranks why this one is ended, unless another rank has made an
        announcement. Blocks for at most `seconds`."""
        with self._changed:
            self._announced = verdict
        self.refresh(seconds)

    def refresh(self, seconds: float) -> None:
        """Fetch the messages of the other ranks now. Blocks for at most `seconds`."""
        with self._changed:
            self._asked = True
            self._num_asked += 1
            number = self._num_asked
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_answered >= number, seconds)

    def close(self) -> None:
        """End the thread, after it has published the last message if the store answers in time."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_SECONDS)

    def _serve(self) -> None:
        store: Store | None = None
        num_failures = 0
        while num_failures < _NUM_TRIALS:
            with self._changed:
                while self._num_asked == self._num_answered and not self._closing:
                    self._changed.wait(_ANSWER_SECONDS)
                number, own, announced = self._num_asked, self._own, self._announced
                asked, self._asked = self._asked, False
                last = self._closing
            try:
                store = store or self._open()
                self._speak(store, own, announced)
                if asked:
                    self._hear(store)
                self.answered, num_failures = time.monotonic(), 0
            except (RuntimeError, ValueError):
                num_failures += 1
            with self._changed:
                self._num_answered = number
                self._changed.notify_all()
            if last:
                return

    def _speak(self, store: Store, own: str | None, announced: str | None) -> None:
        if own is not None:
            store.set(f"word/{self.rank}", own)
        if announced is not None:
            store.compare_set("verdict", "", announced)

    def _hear(self, store: Store) -> None:
        names = [f"word/{rank}" for rank in range(self.size)]
        if store.check(names):  # otherwise `multi_get` would block
            self.words = [word.decode(errors="replace") for word in store.multi_get(names)]
        else:
            there = [store.check([name]) for name in names]
            self.words = [
                store.get(name).decode(errors="replace") if said else ""
                for name, said in zip(names, there, strict=True)
            ]
        if store.check(["verdict"]):
            self.verdict = store.get("verdict").decode(errors="replace")


def open_board(rank: int, size: int) -> Board | None:
    """Open a new board for the ranks of the process group; None if there is no group. Every rank
    has to call this equally often."""
    global _num_boards
    from torch import distributed

    if size == 1 or not distributed.is_initialized():
        return None
    _num_boards += 1
    name = f"board/{_num_boards}"
    shared: Any = distributed.distributed_c10d._get_default_store()

    def connect() -> Store:
        # A connection handles one request at a time, so the thread needs a separate one.
        store = distributed.PrefixStore(name, shared.clone())
        store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
        return store

    return Board(connect, rank, size)

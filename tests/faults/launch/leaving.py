"""A command whose ranks, told to end, finish what they do and leave with the status of a run that was
stopped early."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from anybatch.errors import Stopped
from anybatch.launch import exits

heard: list[int] = []


def main() -> None:
    """Wait for a signal."""
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: heard.append(number))
    (folder / f"{rank}.ready").touch()
    while not heard:
        time.sleep(0.05)
    (folder / f"{rank}.saved").write_text(signal.Signals(heard[0]).name)
    # As it is on the way out of a group.
    exits.note(Stopped("the run has stopped after step 4."))
    sys.exit(75)


main()

"""A command of two ranks: rank 1 fails, and rank 0, which has felt it, is ended before it has told
anybody."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from anybatch.errors import PeerLost
from anybatch.launch import exits


def main() -> None:
    """Fail, or feel it and wait for ever."""
    noted = [Path(sys.argv[1], f"{rank}.noted") for rank in (0, 1)]
    if os.environ["RANK"] == "1":
        error = ValueError("the cause")
        exits.note(error)
        noted[1].touch()
        wait_for(noted[0])
        raise error
    wait_for(noted[1])
    exits.note(PeerLost("rank 1 is gone"))
    noted[0].touch()
    while True:
        time.sleep(1)


def wait_for(path: Path) -> None:
    """Until it is there."""
    while not path.exists():
        time.sleep(0.02)


main()

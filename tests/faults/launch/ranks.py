"""What ranks do in the tests of restarts: they say that they are there, and end as they are told.

Nothing is timed: each writes what it sees into a folder, and peers wait for each other in collectives.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from anybatch.errors import PeerLost
from anybatch.launch import Membership, find, join

SECONDS = 120.0
"""Deadline of whatever is waited for."""


def note(folder: str) -> Membership:
    """Say that this rank is there."""
    me = find()
    assert me is not None
    text = json.dumps({"world_size": me.world_size, "pid": os.getpid()})
    half = Path(folder, f"{me.attempt}-{me.rank}.half")
    half.write_text(text)
    half.replace(half.with_suffix(".seen"))
    return me


def seen(folder: Path) -> dict[tuple[int, int], dict[str, int]]:
    """What ranks have said, by attempt and rank."""
    found: dict[tuple[int, int], dict[str, int]] = {}
    for path in sorted(folder.glob("*.seen")):
        attempt, rank = path.stem.split("-")
        found[int(attempt), int(rank)] = json.loads(path.read_text())
    return found


def add_up(folder: str, ends: Mapping[int, Mapping[int, str]]) -> tuple[int, int]:
    """Meet, end as `ends` says for this attempt and rank, add up ones; (attempt, sum)."""
    import torch
    from torch import distributed

    me = note(folder)
    how = ends.get(me.attempt, {}).get(me.rank, "")
    if how == "killed at once":
        os.kill(os.getpid(), signal.SIGKILL)
    with join(me, "cpu", timeout_seconds=SECONDS):
        distributed.barrier()
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raised":
            raise ArithmeticError("of the user's own")
        number = torch.ones(1)
        try:
            distributed.all_reduce(number)
        except RuntimeError as error:
            raise PeerLost("a rank does not answer") from error
        return me.attempt, int(number.item())


def until_finished(folder: str) -> tuple[int, int]:
    """Step until a file says that it is enough; leave together with status 75 when one of the ranks is
    told to end. (attempt, world size)."""
    import torch
    from torch import distributed

    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    me = find()
    assert me is not None
    with join(me, "cpu", timeout_seconds=SECONDS):
        distributed.barrier()
        note(folder)
        while True:
            wishes = torch.tensor([len(heard), int(Path(folder, "finish").exists())])
            distributed.all_reduce(wishes)
            told, finish = wishes.tolist()
            if told:
                break
            if finish:
                return me.attempt, me.world_size
    sys.exit(75)


def main() -> None:
    """As a command: FOLDER STATUS; the last rank ends with the status, the others wait for it."""
    folder, status = sys.argv[1:]
    me = note(folder)
    if me.rank < me.world_size - 1:
        signal.pause()
    sys.exit(int(status))


if __name__ == "__main__":
    main()

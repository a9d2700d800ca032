"""Runs a command on CUDA devices that are not there; see README.md:

python tests/standin/run.py [--devices 2] [--compute] COMMAND ..."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.standin.build import build


def main() -> None:
    """Build the libraries, and let the command take the place of this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1, help="how many there seem to be")
    parser.add_argument("--compute", action="store_true", help="operations compute, on the CPU")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    libraries = build(Path(tempfile.mkdtemp(prefix="standin-")))
    path = [str(Path(__file__).parent / "startup"), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {"PYTHONPATH": os.pathsep.join(path), "NULL_CUDA_COMPUTES": "1"} if given.compute else {}
    os.environ.update(
        LD_PRELOAD=os.pathsep.join(map(str, libraries)),
        NULL_CUDA_DEVICES=str(given.devices),
        **more,
    )
    os.execvp(given.command[0], given.command)


if __name__ == "__main__":
    main()

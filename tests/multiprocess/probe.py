"""A rank of whatever started it: finds itself, joins the others, adds up the rank numbers, and writes
what it saw into a folder.

    python probe.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from anybatch.launch import find, join


def probe() -> dict[str, object]:
    """What this rank sees."""
    membership = find()
    assert membership is not None
    with join(membership, "cpu", timeout_seconds=60):
        import torch
        from torch import distributed

        number = torch.tensor([membership.rank], dtype=torch.int64)
        distributed.all_reduce(number)
        return {
            **asdict(membership),
            "sum": number.item(),
            "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
            "master": os.environ.get("MASTER_ADDR"),
        }


def task() -> None:
    """For a command of anybatch that is given this file: leaves like one that was stopped early."""
    seen = {**probe(), "restart": os.environ.get("SLURM_RESTART_COUNT", "0"), "argv": sys.argv[1:]}
    folder = Path(os.environ["PROBE_FOLDER"])
    (folder / f"{seen['restart']}-{seen['rank']}.json").write_text(json.dumps(seen))
    sys.stdout.flush()
    os._exit(0 if seen["restart"] != "0" else int(os.environ["PROBE_STATUS"]))


if __name__ == "__main__":
    seen = probe()
    (Path(sys.argv[1]) / f"{seen['rank']}.json").write_text(json.dumps(seen))

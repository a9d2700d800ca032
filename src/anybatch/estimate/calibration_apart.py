"""Measuring speeds in a process of its own.

Measuring leaves memory of libraries behind, and on CUDA a context: neither may be part of the process
that plans or trains.
"""

from __future__ import annotations

import subprocess
import sys

from pydantic import TypeAdapter

from anybatch.estimate.calibration import Speeds, measure
from anybatch.machine import Device, Machine

SPEEDS: TypeAdapter[Speeds] = TypeAdapter(Speeds)

_DEADLINE_SECONDS = 120.0


def measure_apart(device: Device, threads: int) -> Speeds:
    """`measure(device)`, elsewhere.

    Args:
        device: which is here.
        threads: of torch, where the device is a CPU.

    Raises `OSError`, `subprocess.SubprocessError` or `ValueError` if it cannot be done.
    """
    done = subprocess.run(
        [sys.executable, "-m", __name__, device.torch_name, str(threads)],
        capture_output=True,
        check=True,
        timeout=_DEADLINE_SECONDS,
    )
    return SPEEDS.validate_json(done.stdout)


def _main(name: str, threads: str) -> None:
    import torch

    torch.set_num_threads(int(threads))
    sys.stdout.buffer.write(SPEEDS.dump_json(measure(Machine.here(device=name).device)))


if __name__ == "__main__":
    _main(*sys.argv[1:])

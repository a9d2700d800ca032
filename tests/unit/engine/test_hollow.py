"""Addresses that a first pass leaves mapped and empty are no part of a budget; what is filled is."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMMON = """
import mmap, torch
from anybatch.engine.limit import ProcessLimit
from anybatch.oom import is_memory_error

MIB = 1 << 20


def fits(num_mib):
    try:
        torch.ones(num_mib * MIB, dtype=torch.uint8)
        return True
    except RuntimeError as error:
        assert is_memory_error(error), error
        return False


torch.set_num_threads(1)
limit = ProcessLimit(64 * MIB)
limit.enter()
assert fits(48) and not fits(80)
"""

KEPT = """
with limit.first_pass("kept", [torch.zeros(1)]):
    held = mmap.mmap(-1, 128 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
assert fits(48) and not fits(80)
held.close()
"""

FAILED = """
try:
    with limit.first_pass("failed", [torch.zeros(1)]):
        held = mmap.mmap(-1, 32 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raise MemoryError
except MemoryError:
    pass
assert fits(24) and not fits(48)
held.close()
assert fits(48) and not fits(80)
"""

PASSING = """
mmap.mmap(-1, 512 * MIB, prot=0).close()  # the most addresses of this process are of before
for _ in range(2):
    with limit.first_pass("passing", [torch.zeros(1)]):
        mmap.mmap(-1, 128 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a budget is enforced on Linux")
@pytest.mark.parametrize("pass_", [KEPT, FAILED, PASSING], ids=["kept", "failed", "passing"])
def test_empty_addresses_and_the_budget(pass_: str):
    done = subprocess.run(
        [sys.executable, "-c", COMMON + pass_], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

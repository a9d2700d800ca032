"""Memory that was set aside cannot be refused, wherever in the heap it was taken."""

import subprocess
import sys

import pytest

from anybatch.machine import can_enforce

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not can_enforce("cpu"), reason="no memory limit is held on this system"),
]

SCRIPT = """
import resource, sys, threading
import torch
from anybatch.engine.process import return_freed_memory, status
from anybatch.engine.headroom import Headroom

MIB = 1 << 20
if sys.argv[1] == "given back":
    return_freed_memory()
holes = [torch.empty(MIB // 8 * (i % 9 + 1), dtype=torch.uint8) for i in range(200)]
del holes[::2]  # the heap is in pieces

def refused(size):
    try:
        torch.empty(size, dtype=torch.uint8)
    except RuntimeError:
        return True
    return False

def work():
    room = Headroom(torch.device("cpu"))
    for _ in range(3):
        room.take(0, 40 * MIB)
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + MIB // 4, hard))
        with room.opened():
            held = [torch.empty(4 * MIB, dtype=torch.uint8) for _ in range(9)]
            del held  # small blocks that stay make what is free fall into pieces
            held = [torch.empty(3 * MIB, dtype=torch.uint8) for _ in range(9)]
        del held
        assert refused(400 * MIB)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    room.take(0, 8 * MIB)
    room.give_back()
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + MIB // 4, hard))
    try:
        room.take(512 * MIB)
    except MemoryError as error:
        told.append(str(error))
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    told.append("done")

told = []
one = threading.Thread(target=work)
one.start()
one.join()
work()
assert told == ["you tried to allocate 536870912 bytes for the update", "done"] * 2, told
"""


@pytest.mark.parametrize("heap", ["given back", "as it is"])
def test_room_is_there_when_the_kernel_refuses(heap):
    """In another thread, and then in the main one."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, heap],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]

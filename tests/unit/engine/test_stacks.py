"""Looking where threads stand must not change what they do."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from anybatch.engine.watchdog import stacks, waits_for_others


class Batch:
    """Something large that a pass has in a local variable."""


@pytest.mark.parametrize("look", [waits_for_others, stacks])
def test_what_a_thread_held_is_gone_with_its_function(look: Callable[[int], object]):
    def one_pass() -> weakref.ref[Batch]:
        batch = Batch()
        here = threading.get_ident()
        with ThreadPoolExecutor(1) as watching:
            watching.submit(look, here).result(60)
        return weakref.ref(batch)

    gc.collect()
    gc.disable()  # a cycle would go with the next collection, some hundred passes later
    try:
        assert one_pass()() is None
    finally:
        gc.enable()

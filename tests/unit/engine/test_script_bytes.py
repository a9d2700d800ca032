"""What the script of a process has taken, told from what the whole process holds."""

from __future__ import annotations

from anybatch.engine.meter import ScriptBytes
from anybatch.process.process_memory import InUse


def rounds(kept: ScriptBytes, there: int, script: int, step: int, num: int) -> int:
    """So many rests in which the script takes so much, and steps that do."""
    for _ in range(num):
        kept.rest(InUse(there))
        there += script
        kept.resume(InUse(there))
        there += step
    return there


def test_what_the_script_takes_is_the_scripts_and_what_steps_take_is_not():
    kept = ScriptBytes(start=InUse(100))
    there = rounds(kept, 100, script=10, step=3, num=5)
    assert (kept.num_bytes, there) == (50, 165)
    kept.resume(InUse(there + 1000))  # it did not rest
    assert kept.num_bytes == 50


def test_what_is_made_between_steps_and_dropped_in_them_does_not_add_up():
    kept = ScriptBytes(start=InUse(100))
    rounds(kept, 100, script=10, step=-10, num=100)
    assert kept.num_bytes == 10


def test_what_steps_leave_and_the_script_drops_takes_nothing_from_what_it_keeps():
    kept = ScriptBytes(start=InUse(100))
    there = rounds(kept, 100, script=50, step=0, num=1) + 10
    rounds(kept, there, script=-10, step=10, num=100)
    assert kept.num_bytes == 50


def test_what_the_script_gives_back_is_not_its_own_any_more():
    kept = ScriptBytes(start=InUse(100))
    there = rounds(kept, 100, script=50, step=0, num=1)
    rounds(kept, there, script=-45, step=0, num=1)
    assert kept.num_bytes == 5


def test_other_mappings_count_as_far_as_they_must_be_resident():
    before = InUse(100, others=10, free=40, resident=240)
    stacks_or_code = InUse(100, others=90, free=40, resident=275)  # free pages were touched
    assert stacks_or_code.since(before) == 0
    objects_of_python = InUse(100, others=210, free=40, resident=440)
    assert objects_of_python.since(before) == 160
    tensor_and_stacks = InUse(130, others=90, free=10, resident=270)
    assert tensor_and_stacks.since(before) == 30
    returned = InUse(90, others=5, free=40, resident=225)
    assert returned.since(before) == -15

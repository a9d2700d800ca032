"""What the script of a process has taken, told from what the whole process holds."""

from __future__ import annotations

from anybatch.engine.meter import ScriptBytes


def rounds(kept: ScriptBytes, there: int, script: int, step: int, num: int) -> int:
    """So many rests in which the script takes so much, and steps that do."""
    for _ in range(num):
        kept.rest(there)
        there += script
        kept.resume(there)
        there += step
    return there


def test_what_the_script_takes_is_the_scripts_and_what_steps_take_is_not():
    kept = ScriptBytes(start=100)
    there = rounds(kept, 100, script=10, step=3, num=5)
    assert (kept.num_bytes, there) == (50, 165)
    kept.resume(there + 1000)  # it did not rest
    assert kept.num_bytes == 50


def test_what_is_made_between_steps_and_dropped_in_them_does_not_add_up():
    kept = ScriptBytes(start=100)
    rounds(kept, 100, script=10, step=-10, num=100)
    assert kept.num_bytes == 10


def test_what_steps_leave_and_the_script_drops_takes_nothing_from_what_it_keeps():
    kept = ScriptBytes(start=100)
    there = rounds(kept, 100, script=50, step=0, num=1) + 10
    rounds(kept, there, script=-10, step=10, num=100)
    assert kept.num_bytes == 50


def test_what_the_script_gives_back_is_not_its_own_any_more():
    kept = ScriptBytes(start=100)
    there = rounds(kept, 100, script=50, step=0, num=1)
    rounds(kept, there, script=-45, step=0, num=1)
    assert kept.num_bytes == 5

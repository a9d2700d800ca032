"""The log reads back what was written, and survives kills and full disks."""

from __future__ import annotations

import json
import math
import random
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from tests.unit.report.fake_run import (
    make_end,
    make_evaluation,
    make_events,
    make_start,
    make_step,
    write_run,
)
from tests.unit.report.nearly_full import NearlyFull

from anybatch.errors import InputError, StopTraining
from anybatch.events import Event, from_json, to_json
from anybatch.report import EventLog, follow, read
from anybatch.report.folder import last_plan, run_folder
from anybatch.report.log import Ending, iterate
from anybatch.report.record import Record


def test_what_was_written_is_read_back(tmp_path: Path):
    events = make_events()
    with EventLog(tmp_path / "events.jsonl") as log:
        for event in events:
            log(event)
    assert same(read(tmp_path / "events.jsonl"), events)


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path):
    with EventLog(tmp_path / "events.jsonl") as log:
        for step in range(1, 4):
            log(make_step(step))
            assert len(read(log.path)) == step


def test_figures_that_json_lacks_are_kept(tmp_path: Path):
    with EventLog(tmp_path / "events.jsonl") as log:
        log(make_step(1, loss=math.nan, grad_norm=math.inf))
    (event,) = read(tmp_path / "events.jsonl")
    assert math.isnan(event.loss)
    assert event.grad_norm == math.inf


def test_a_follower_is_given_all_events_by_the_end_of_the_block(tmp_path: Path):
    given: list[Event] = []
    with EventLog(tmp_path / "events.jsonl") as log, follow(log.path, [given.append]):
        for step in range(1, 4):
            log(make_step(step))
    assert same(given, [make_step(step) for step in range(1, 4)])


def test_a_follower_passes_over_a_torn_line_that_is_cut_off_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As by ranks that are started again after one was killed in the middle of a line."""
    monkeypatch.setattr("anybatch.report.log._LOOK_SECONDS", 0.01)
    path, given = written(tmp_path, b'{"kind": "evaluated", "ti'), list[Event]()
    with follow(path, [given.append]):
        deadline = time.monotonic() + 30
        while len(given) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        with EventLog(path) as log:
            log(make_step(2))
    assert same(given, [make_start(), make_step(1), make_step(2)])


def test_a_sink_that_fails_ends_the_run_that_it_follows(tmp_path: Path):
    def fail(event: Event) -> None:
        raise ValueError("broken")

    def train(log: EventLog, steps: int) -> None:
        for step in range(1, steps):
            log(make_step(step))
            Ending(log.path)(make_step(step))
            time.sleep(0.01)

    with (
        EventLog(tmp_path / "events.jsonl") as log,
        pytest.raises(ValueError, match="broken"),
        follow(log.path, [fail]),
        pytest.raises(StopTraining),
    ):
        train(log, steps=3000)


def test_a_torn_last_line_is_dropped(tmp_path: Path):
    path = written(tmp_path, b'{"kind": "step", "ti')
    assert same(read(path), [make_start(), make_step(1)])


def test_a_last_line_that_lacks_only_its_end_is_kept(tmp_path: Path):
    path = written(tmp_path)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert same(read(path), [make_start(), make_step(1)])
    with EventLog(path) as log:
        log(make_step(2))
    assert same(read(path), [make_start(), make_step(1), make_step(2)])


def test_of_steps_that_follow_each_other_the_last_is_enough(tmp_path: Path):
    path = written(tmp_path)
    with EventLog(path) as log:
        for event in (make_step(2), make_evaluation(2), make_step(3), make_step(4)):
            log(event)
    with path.open("ab") as file:
        file.write(b'{"kind": "step", "ti')
    found = list(iterate(path, every_step=False))
    assert same(found, [make_start(), make_step(2), make_evaluation(2), make_step(4)])


@pytest.mark.parametrize("torn", [b'{"kind": "step", "ti', b"\0" * 70_000, b'{"\xc3'])
def test_a_resumed_run_does_not_append_to_a_torn_line(tmp_path: Path, torn: bytes):
    path = written(tmp_path, torn)
    with EventLog(path) as log:
        log(make_step(2))
    assert same(read(path), [make_start(), make_step(1), make_step(2)])


@pytest.mark.parametrize("torn", [b'{"kind": "step"', b"x" * 200_000])
def test_a_torn_line_that_is_all_there_is_leaves_an_empty_log(tmp_path: Path, torn: bytes):
    path = tmp_path / "events.jsonl"
    path.write_bytes(torn)
    EventLog(path).close()
    assert read(path) == []


@pytest.mark.parametrize(
    "line",
    [b"nonsense", b"[]", b'{"kind": "dance"}', b'{"kind": "step", "time": 1.0}', b"", b"\xff"],
)
def test_a_damaged_line_is_left_out_and_named(tmp_path: Path, line: bytes):
    path = written(tmp_path, line + b"\n")
    with EventLog(path) as log:
        log(make_step(2))
    with pytest.warns(UserWarning, match=r"1 line is damaged in .*events\.jsonl .* line 3 \("):
        assert same(read(path), [make_start(), make_step(1), make_step(2)])


def test_a_log_that_is_not_there_is_an_input_error(tmp_path: Path):
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read(tmp_path / "events.jsonl")


def test_a_folder_that_is_not_there_is_an_input_error(tmp_path: Path):
    with pytest.raises(InputError, match="cannot be written: No such file"):
        EventLog(tmp_path / "absent" / "events.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_a_full_disk_is_an_input_error():
    with (
        EventLog("/dev/full") as log,
        pytest.raises(InputError, match="cannot be written: No space left"),
    ):
        log(make_step(1))


def test_a_line_that_did_not_fit_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = written(tmp_path)
    with EventLog(path) as log:
        monkeypatch.setattr(log, "_file", NearlyFull(log._file))
        with pytest.raises(InputError, match="No space left"):
            log(make_end())
    assert path.read_bytes().endswith(b"\n")
    assert same(read(path), [make_start(), make_step(1)])


def test_lines_follow_those_before_after_others_that_did_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = written(tmp_path)
    with EventLog(path) as log:
        file = log._file
        monkeypatch.setattr(log, "_file", NearlyFull(file))
        for _ in range(2):  # the first in part, the second not at all
            with pytest.raises(InputError, match="No space left"):
                log(make_step(2))
        monkeypatch.setattr(log, "_file", file)
        log(make_step(3))
    assert same(read(path), [make_start(), make_step(1), make_step(3)])


def same(events: list[Event], others: list[Event]) -> bool:
    """JSON has no tuples, so the plan within an event is compared as JSON."""
    return [to_json(event) for event in events] == [to_json(event) for event in others]


def written(folder: Path, tail: bytes = b"") -> Path:
    path = folder / "events.jsonl"
    with EventLog(path) as log:
        log(make_start())
        log(make_step(1))
    with path.open("ab") as file:
        file.write(tail)
    return path


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["tried", "compile_decided"])
def test_events_of_earlier_releases_are_skipped(tmp_path: Path, kind: str):
    path, given = written(tmp_path, b'{"kind": "%s", "time": 1.0}\n' % kind.encode()), list[Event]()
    with follow(path, [given.append]), EventLog(path) as log:
        log(make_step(2))
    whole = [make_start(), make_step(1), make_step(2)]
    assert same(read(path), whole)
    assert same(given, whole)
    assert same([*iterate(path, every_step=False)], whole)


# ------------------------------------------------------------------------------------- damage


def damaged(content: bytes, seed: int) -> bytes:
    """`content` with one of the things that happen to files."""
    rng = random.Random(seed)
    at = rng.randrange(len(content))
    match seed % 5:
        case 0:  # a bit has flipped
            return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
        case 1:
            return content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]
        case 2:  # a block was never written
            return content[:at] + bytes(64) + content[at + 64 :]
        case 3:
            return content[:at] + content[at + rng.randrange(1, 200) :]
        case _:
            return content[:at] + rng.randbytes(20) + content[at:]


def test_no_damage_to_its_log_keeps_a_run_from_being_resumed(tmp_path: Path):
    write_run(tmp_path, make_events(20))
    path = tmp_path / "events.jsonl"
    whole = path.read_bytes()
    start = whole[: whole.index(b"\n") + 1]
    contents = [whole, start]  # half of the damage is done to the line with the plan
    num_damaged = 0
    for seed in range(200):
        content = damaged(contents[seed % 2], seed)
        path.write_bytes(content)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with run_folder(tmp_path, resume=True):
                last_plan(tmp_path)
                with EventLog(path) as log:
                    log(make_start())
                    log(make_end())
            assert same(read(path)[-2:], [make_start(), make_end()])
            record = Record(read(path))
        assert np.isfinite(record.column("step")).all()
        num_damaged += any("damaged" in str(one.message) for one in told)
    assert num_damaged > 100


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", "1x"), ("step", 1.5), ("metrics", 3), ("metrics", {"a": "b"}), ("loss", None)],
)
def test_a_line_with_a_value_of_another_kind_is_no_event(field: str, value: object):
    record = json.loads(to_json(make_step(1)))
    with pytest.raises(ValueError, match=field):
        from_json(json.dumps({**record, field: value}))


def test_a_damaged_log_does_not_give_checkpoints_up(tmp_path: Path):
    path = written(tmp_path, b"nonsense\n")
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    for content in (path.read_bytes(), b"nothing of it is left\n", None):
        path.unlink() if content is None else path.write_bytes(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(InputError, match=r"step 1\).*resume=True"), run_folder(tmp_path):
                pass

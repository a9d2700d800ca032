"""Progress says what matters, where it can be read, and costs next to nothing."""

from __future__ import annotations

import math
import re
from io import StringIO

import pytest
from rich.console import Console
from tests.unit.report.fake_run import (
    make_end,
    make_evaluation,
    make_events,
    make_out_of_memory,
    make_overflow,
    make_replan,
    make_start,
    make_step,
)

from anybatch.events import Event, Resumed
from anybatch.report import Progress


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def told(events: list[Event], seconds_per_event: float = 10.0, width: int = 80, **options) -> str:
    """What a console is told, with that much time between the events."""
    file, clock = StringIO(), Clock()
    with Progress(Console(file=file, width=width, **options), clock=clock) as progress:
        for event in events:
            progress(event)
            clock.now += seconds_per_event
    return file.getvalue()


def in_terminal(events: list[Event], seconds_per_event: float = 10.0, width: int = 80) -> str:
    terminal = {"force_terminal": True, "force_interactive": True, "_environ": {}}
    text = told(events, seconds_per_event, width=width, **terminal)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_a_plain_line_holds_the_figures():
    lines = told([make_start(), make_step(1), make_step(2), make_step(50, loss=0.5)]).splitlines()
    assert lines[0].startswith("Training cifar10-resnet on NVIDIA H200")
    assert lines[-1] == (
        "step 50/200  epoch 5  loss 1.695  samples/s 3,413  memory 8.62 GiB of 10.0 GiB"
        "  3 min 00 s left"
    )


def test_a_run_that_is_past_its_end_says_so():
    def resumed(step: int) -> str:
        event = Resumed(time=1.0, step=step, samples_seen=0, folder="runs/one/checkpoints")
        return told([make_start(), event])

    said = "This training ends after 200 steps: nothing is trained."
    assert said in resumed(201)
    assert said not in resumed(200)


def test_plain_lines_are_at_least_two_seconds_apart():
    steps = [make_step(step) for step in range(1, 101)]
    lines = told([make_start(), *steps], seconds_per_event=0.1).splitlines()
    assert 5 <= sum(line.startswith("step ") for line in lines) <= 6


def test_plain_lines_grow_rarer_in_a_long_run():
    steps = [make_step(step) for step in range(1, 3601)]
    lines = told([make_start(total_steps=3600), *steps], seconds_per_event=1.0).splitlines()
    assert 100 < len(lines) < 1000


def test_the_last_step_is_always_told():
    events = [make_start(), *(make_step(step) for step in range(1, 201)), make_end()]
    lines = told(events, seconds_per_event=1e-6).splitlines()
    assert lines[-2].startswith("step 200/200")
    assert "left" not in lines[-2]
    assert lines[-1] == "Training finished after 200 steps and 4 min 22 s."


def test_a_step_is_told_before_its_evaluation():
    events = [make_start(), make_step(1), make_step(2), make_evaluation(2), make_end()]
    lines = told(events, seconds_per_event=1e-6).splitlines()
    assert [line[:18] for line in lines[1:4]] == [
        "step 1/200  epoch ",
        "step 2/200  epoch ",
        "Evaluation after s",
    ]


def test_plain_text_has_no_escapes_and_is_not_wrapped():
    text = told([make_start(task="[bold]x[/bold] " * 10), *make_events()])
    assert "\x1b" not in text
    assert "[bold]x[/bold]" in text
    assert "of 10.0 GiB in use; the step was undone.\n" in text


@pytest.mark.parametrize("tell", [told, in_terminal])
def test_incidents_are_told_however_fast_they_come(tell):
    events = [
        make_start(),
        make_step(1),
        make_overflow(2),
        make_out_of_memory(2),
        make_replan(2),
        make_step(2),
        make_evaluation(2),
        make_evaluation(2),
    ]
    text = " ".join(tell(events, seconds_per_event=1e-6).split())
    assert "Gradients overflowed in step 2: it is redone with loss scale 32,768" in text
    assert "Out of memory in step 2 (backward, micro-batch 512): 1.20 GiB requested" in text
    assert "New plan from step 2 on (memory ran out in backward): micro-batch 256" in text
    assert text.count("Evaluation after step 2: loss") == 2


def test_the_bar_holds_the_figures():
    text = in_terminal(make_events())
    assert "step 200/200" in text
    assert "samples/s" in text
    assert "memory 8.62 GiB of 10.0 GiB" in text
    assert re.search(r"held-out loss 0\.48\d\d  accuracy 0\.9250 .* after step 200", text)
    assert text.rstrip().endswith("Training finished after 200 steps and 4 min 37 s.")


def test_the_bar_is_drawn_ten_times_a_second_at_most():
    steps = [make_step(step) for step in range(1, 1001)]
    text = in_terminal([make_start(), *steps], seconds_per_event=1e-3)
    assert text.count("samples/s") <= 12


def test_the_bar_stays_within_the_width():
    metrics = {f"metric number {i}": 0.5 for i in range(9)}
    text = in_terminal(
        [make_start(), make_step(1), make_evaluation(1, metrics=metrics), make_step(2)]
    )
    assert max(map(len, text.replace("\r", "\n").splitlines())) <= 80


def test_on_a_narrow_terminal_no_figure_is_cut():
    text = in_terminal(make_events(), width=44)
    assert "memory 8.62 GiB of 10.0 GiB" in text
    assert "…" not in text


def test_the_bar_below_an_evaluation_is_of_that_evaluation():
    first, second = make_evaluation(1, loss=1.0), make_evaluation(2, loss=2.0)
    text = in_terminal([make_start(), make_step(1), first, make_step(2), second])
    after = text[text.index("Evaluation after step 2") :]
    assert "held-out loss 2.000" in after
    assert "held-out loss 1.000" not in after


def test_what_is_free_is_no_budget():
    start = make_start(plan={"budget_bytes": 10 << 30, "enforced": False})
    assert "memory 8.62 GiB  3 min 58 s left" in told([start, make_step(1), make_step(2)])


def test_a_stream_has_no_end():
    text = told([make_start(total_steps=None), make_step(1), make_step(2)])
    assert "step 2  epoch" in text
    assert "left" not in text
    assert "step 2 " in in_terminal([make_start(total_steps=None), make_step(1), make_step(2)])


def test_no_budget_no_limit():
    start = make_start(plan={})
    assert "memory 8.62 GiB  3 min 58 s left" in told([start, make_step(1), make_step(2)])


def test_a_loss_that_is_not_finite_shows_at_once_and_goes_again():
    events = [make_start(), make_step(1), make_step(2, loss=math.nan), make_step(3)]
    losses = re.findall(r"loss (\S+)", told(events))
    assert losses[1] == "nan"
    assert losses[0] != "nan" != losses[2]
    assert "loss inf" in told([make_start(), make_step(1, loss=math.inf)])


def test_time_left_follows_the_pace_after_a_resume():
    steps = [make_step(step, time=1000.0 + 3.0 * step) for step in (101, 102, 103)]
    assert "4 min 51 s left" in told([make_start(), *steps])


def test_a_run_that_stopped_leaves_it_to_the_error_to_say_why():
    end = make_end(finished=False, reason="the time limit was reached", steps=3)
    text = told([make_start(), end])
    assert text.endswith("Training stopped after 3 steps and 4 min 22 s.\n")


def test_an_error_gives_the_terminal_back():
    file = StringIO()
    console = Console(file=file, force_terminal=True, force_interactive=True, _environ={})

    def broken_run() -> None:
        with Progress(console) as progress:
            progress(make_start())
            raise KeyError

    with pytest.raises(KeyError):
        broken_run()
    assert file.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is shown again


def test_a_second_run_begins_anew():
    text = told([make_start(), *(make_step(s) for s in range(1, 9)), make_start(task="other"),
                 make_step(1, loss=7.0)])  # fmt: skip
    assert text.splitlines()[-1].startswith("step 1/200  epoch 1  loss 7.000")

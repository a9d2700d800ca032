"""The tables say what they must at 80 columns, without colour."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.unit.report.fake_run import (
    GIB,
    make_candidate,
    make_end,
    make_evaluation,
    make_plan,
    make_start,
)

from anybatch.events import Evaluated
from anybatch.plans import Candidate, Choice, Recompute
from anybatch.report import print_plan, print_result


def printed(function: Any, *args: Any, width: int = 80) -> str:
    file = StringIO()
    function(Console(file=file, width=width), *args)
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_plan_is_titled_aligned_and_complete():
    text = printed(print_plan, make_plan())
    assert text.startswith("Plan\n")
    for what, how in make_plan().explain():
        assert f"  {what} " in text
        assert words(how) in words(text)
    assert "at the peak activations 7.02 GiB, workspace 512 MiB," in words(text)
    assert "* BatchNorm sees ghost batches of 64 samples" in text


def test_the_whole_batch_in_one_piece_is_what_was_not_taken():
    text = words(printed(print_plan, make_plan()))
    assert (
        "* The whole batch of 4,096 in one piece: predicted peak 62.1 GiB, 52.1 GiB over the budget."
        " (1 of 11; `anybatch plan --why` lists all.)"
    ) in text


def test_without_the_whole_batch_the_fastest_is_told():
    rejected = (make_candidate(256, 4.0, 2.0), make_candidate(512, 4.0, 1.0))
    text = words(printed(print_plan, make_plan(rejected=rejected)))
    assert "* Micro-batch 512, bf16, recompute none: fits, but is slower." in text


def test_the_whole_batch_under_recompute_says_so():
    rejected = (make_candidate(4096, 30.0, 2.0, Recompute(blocks=("layers.*",))),)
    text = words(printed(print_plan, make_plan(rejected=rejected)))
    assert "The whole batch of 4,096 in one piece with recompute layers.*: predicted peak" in text
    assert "(1 of" not in text


def test_a_plan_written_by_hand_has_little_to_tell():
    plan = make_plan(prediction=None, rejected=(), notices=(), budget_bytes=None)
    text = printed(print_plan, plan, True)
    assert "Rejected" not in text
    assert "Notices" not in text
    assert "predicted" not in text


@pytest.mark.parametrize("width", [66, 80, 200])
def test_why_lists_every_candidate(width: int):
    plan = make_plan()
    text = printed(print_plan, plan, True, width=width)
    rows, reasons = text[text.index("Rejected") :].split("Reasons")
    found = words(reasons)
    assert all(f"{c.choice.describe().capitalize()}: {c.reason}." in found for c in plan.rejected)
    assert all(
        heading in rows
        for heading in ("micro-batch", "recompute", "peak", "budget", "step", "vs plan")
    )
    assert rows.count("GiB") >= len(plan.rejected)
    assert "bf16" not in rows


def test_why_shows_precision_where_it_differs():
    choice = Choice(micro_batch=8, evaluation_batch=8, precision="fp32")
    candidate = make_candidate(8, 1.0, 1.0).model_copy(update={"choice": choice})
    text = printed(print_plan, make_plan(rejected=(candidate,)), True)
    assert "fp32, recompute none" in text[text.index("Rejected") :]


def test_choices_that_differ_in_much_lose_no_number():
    def candidate(precision: Any, parallel: Any) -> Candidate:
        choice = Choice(
            micro_batch=8,
            evaluation_batch=8,
            precision=precision,
            recompute=Recompute(blocks=("blocks.0", "blocks.1"), keep="matmuls", to_host=True),
            optimizer_states="host",
        )
        changes = {"choice": choice, "parallel": parallel}
        return make_candidate(8, 1.0, 1.0).model_copy(update=changes)

    plan = make_plan(rejected=(candidate("bf16", "shard"), candidate("tf32", "replicate")))
    for width in (76, 140):
        text = printed(print_plan, plan, True, width=width)
        lines = text[text.index("Rejected") :].splitlines()
        assert lines[1].split() == ["micro-batch", "choice", "peak", "budget", "step", "vs", "plan"]
        assert [line.split()[-1] for line in lines if "GiB" in line] == ["-15.3%", "-15.3%"]
        told = words("\n".join(lines))
        assert "shard, recompute" in told
        assert "states on host" in told


def test_markup_in_names_is_printed_as_it_is():
    plan = make_plan(notices=("[red]not red[/red]",))
    assert "[red]not red[/red]" in printed(print_plan, plan)


def test_a_result_tells_figures_predicted_and_measured():
    text = words(result())
    assert "steps 200, finished" in text
    assert "samples 819,200" in text
    assert "samples/s 3,225 while training" in text
    assert "held-out loss 0.4848, accuracy 0.9250, top-5 accuracy 0.9875 (10,000 samples)" in text
    assert "peak memory 8.71 GiB 8.62 GiB +1.0% 10.0 GiB" in text
    assert "step time 1.18 s 1.27 s -7.1% -" in text


def test_a_result_tells_how_many_samples_were_left_out():
    assert "samples 819,200, 3 of them left out" in words(result(ended=make_end(num_skipped=3)))


def test_what_is_predicted_stands_beside_the_computation_without_the_waiting():
    text = words(result(ended=make_end(step_seconds=2.36, data_seconds=1.18)))
    assert "step, computing 1.18 s 1.18 s +0.0% -" in text
    assert "step, waiting - 1.18 s - -" in text
    assert "waiting" not in words(result(ended=make_end(data_seconds=0.001)))


def test_nor_is_time_predicted_in_which_other_processes_had_the_cores():
    text = words(result(ended=make_end(step_seconds=2.36, idle_seconds=1.18)))
    assert "step, computing 1.18 s 1.18 s +0.0% -" in text
    assert "step, idle - 1.18 s - -" in text
    assert "idle" not in words(result(ended=make_end(idle_seconds=0.01)))


def test_every_account_that_was_measured_stands_beside_its_prediction():
    told = {"allocated": 6 * GIB, "active": 6 * GIB, "reserved": 8 * GIB, "total": 9 * GIB}
    found = {"allocated": 5 * GIB, "reserved": 8 * GIB, "total": 9 * GIB}
    text = words(result(ended=make_end(predicted_totals=told, measured_totals=found)))
    assert "of it allocated 6.00 GiB 5.00 GiB +20.0% -" in text
    assert "of it reserved 8.00 GiB 8.00 GiB +0.0% -" in text
    assert "active" not in text
    assert "of it" not in words(result())


def test_files_of_one_folder_are_told_together():
    files = {"plan": Path("runs/a/plan.json"), "report": Path("runs/a/report.html")}
    text = result(files=files)
    assert "Files in runs/a\n  plan     plan.json\n  report   report.html\n" in text


def test_files_of_two_folders_are_told_in_full():
    files = {"plan": Path("here/plan.json"), "report": Path("there/report.html")}
    assert "Files\n  plan     here/plan.json\n  report   there/report.html\n" in result(files=files)


def test_a_run_without_steps_has_a_result():
    end = make_end(
        steps=0,
        samples_seen=0,
        step_seconds=None,
        predicted_peak_bytes=None,
        predicted_step_seconds=None,
        measured_peak_bytes=0,
        budget_bytes=None,
        finished=False,
        reason="interrupted",
    )
    text = words(result(ended=end, evaluation=None))
    assert "steps 0 of 200, stopped: interrupted" in text
    assert "held-out not evaluated" in text
    assert "peak memory - - - -" in text
    assert "Files" not in text


def test_an_evaluation_before_the_end_says_when():
    evaluation = make_evaluation(100, metrics={})
    assert "(10,000 samples, after step 100)" in words(result(evaluation=evaluation))


def test_a_peak_over_the_prediction_has_a_negative_error():
    end = make_end(predicted_peak_bytes=8 * GIB, measured_peak_bytes=10 * GIB)
    assert "8.00 GiB 10.0 GiB -20.0%" in words(result(ended=end))


def test_whether_the_batch_was_worth_it_is_told_or_why_it_is_not_known():
    rest = make_start(), make_end(), None, {}
    told = printed(print_result, *rest, [("noise scale", "820 samples (640 to 1,100)")], "unknown")
    assert "Is the batch worth it? noise scale 820 samples (640 to 1,100)" in words(told)
    assert "unknown" not in told
    reason = "The noise scale was not measured: there is one micro-batch."
    assert reason in words(printed(print_result, *rest, [], reason))
    assert "worth it" not in printed(print_result, *rest)


def result(
    ended: Any = None,
    evaluation: Evaluated | None = make_evaluation(200),  # noqa: B008
    files: dict[str, Path] | None = None,
) -> str:
    return printed(print_result, make_start(), ended or make_end(), evaluation, files or {})

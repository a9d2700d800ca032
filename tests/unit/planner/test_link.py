"""What joins the ranks decides how long their exchange is predicted to take, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.planner.tasks import deep_task

import anybatch as ab
from anybatch.estimate import subject_of
from anybatch.estimate.calibration import Correction
from anybatch.machine import Machine
from anybatch.planner import Wishes, layouts_of, make_plan, setting
from anybatch.plans import Exchange, Link, Plan

ONE_GIGABIT = Link(bytes_per_second=117e6, hop_seconds=2e-4, measured=True)
AT_ONCE = Link(bytes_per_second=1e15, hop_seconds=0.0, measured=True)


def planned(
    link: Link | None,
    count: int = 2,
    parallel: Any = "replicate",
    told: Exchange | None = None,
    **changes: Any,
) -> Plan:
    """For ranks on CPUs that have measured `link`, or have measured nothing, and tell each other what
    is `told`."""
    device = Machine.describe("8GiB", count=count).device
    layouts = layouts_of([device] * count, parallel, link=link, exchange=told)
    return make_plan(
        subject_of(deep_task(**changes)), device, Wishes(), limited=False, layouts=layouts
    )


def exchange(plan: Plan) -> float:
    assert plan.prediction
    return plan.prediction.step_parts.get("exchange of gradients", 0.0)


def rows(plan: Plan) -> dict[str, str]:
    return dict(plan.explain())


def test_the_exchange_takes_what_the_link_tells():
    fast, slow, slower = (
        planned(link)
        for link in (
            AT_ONCE,
            ONE_GIGABIT,
            ONE_GIGABIT.model_copy(update={"bytes_per_second": 11.7e6}),
        )
    )
    assert exchange(fast) < exchange(slow) < exchange(slower)
    for plan in (fast, slow, slower):
        assert plan.prediction
        assert sum(plan.prediction.step_parts.values()) == pytest.approx(
            plan.prediction.step_seconds
        )
    assert slower.link
    assert slower.link.measured


def test_an_exchange_that_is_not_exact_takes_less():
    whole, halved, rare, late = (
        exchange(planned(ONE_GIGABIT, told=told))
        for told in (
            None,
            Exchange(compress="bf16"),
            Exchange(every=8),
            Exchange(stale=True),
        )
    )
    vote = ONE_GIGABIT.seconds(0, 2)
    assert halved - 2 * vote == pytest.approx((whole - 2 * vote) / 2)
    assert rare == pytest.approx(whole / 8)
    assert vote <= late < whole


def test_what_sends_less_is_not_advised_where_it_is_done():
    advice = "compression and local steps (exchange=) send less"
    assert any(advice in notice for notice in planned(ONE_GIGABIT).notices)
    halved = planned(ONE_GIGABIT, told=Exchange(compress="bf16"))
    assert any("one rank alone" in notice for notice in halved.notices)
    assert not any(advice in notice for notice in halved.notices)


def test_a_plan_tells_what_was_measured_and_a_file_keeps_it(tmp_path):
    plan = planned(ONE_GIGABIT)
    assert rows(plan)["link"] == "measured when the ranks joined: 117 MB/s, 400 us a collective"
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.link == ONE_GIGABIT


def test_ranks_that_are_not_here_are_joined_as_tabulated():
    plan = ab.plan(deep_task(), Machine.describe("8GiB"), ranks=4)
    assert plan.link
    assert not plan.link.measured
    assert rows(plan)["link"].startswith("as tabulated for ranks of one machine, not measured")


def test_one_rank_has_no_link():
    plan = ab.plan(deep_task(), Machine.describe("8GiB"))
    assert plan.link is None
    assert "link" not in rows(plan)


def test_where_one_rank_would_be_faster_the_plan_says_so():
    told = "which one rank alone would do in about"
    assert any(told in notice for notice in planned(ONE_GIGABIT).notices)
    assert not any(told in notice for notice in planned(AT_ONCE).notices)
    assert not any(told in notice for notice in planned(None).notices)  # nobody knows


def test_what_earlier_runs_taught_of_computing_leaves_the_exchange_alone(monkeypatch):
    plain = planned(ONE_GIGABIT)
    monkeypatch.setattr(setting, "correction", lambda *_: Correction(seconds=3.0, num_runs=1))
    learned = planned(ONE_GIGABIT)
    assert learned.prediction
    assert plain.prediction
    assert learned.choice == plain.choice
    assert exchange(learned) == exchange(plain)
    own, before = (
        p.step_seconds - exchange(q)
        for p, q in ((learned.prediction, learned), (plain.prediction, plain))
    )
    assert own == pytest.approx(3 * before)

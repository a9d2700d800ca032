"""Plans as files: what is written is read back, and every bad edit is named with its place."""

import itertools
import json
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from anybatch.errors import InputError
from anybatch.plans import (
    PRECISION_ALIASES,
    Candidate,
    Choice,
    KernelChoices,
    Link,
    Plan,
    Precision,
    Prediction,
    Recompute,
    TaskIdentity,
    parse_precision,
)

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
COUNTS = st.integers(0, 1 << 60)
SECONDS = st.floats(0, allow_nan=False, allow_infinity=False)
RECOMPUTES = st.builds(
    Recompute,
    blocks=st.lists(NAMES, max_size=3).map(tuple),
    keep=st.sampled_from(["nothing", "matmuls"]),
    nested=st.booleans(),
    to_host=st.booleans(),
)


@st.composite
def plans(draw):
    ghost = draw(st.none() | st.integers(1, 40))
    total = draw(st.integers(1, 5000))
    unit = min(ghost or 1, total)
    sizes = st.integers(1, total // unit).map(lambda n: n * unit) | st.just(total)
    choices = st.builds(
        Choice,
        micro_batch=sizes,
        evaluation_batch=st.integers(1, 5000),
        precision=st.sampled_from(Precision.__args__),
        recompute=RECOMPUTES,
    )
    predictions = st.builds(
        Prediction,
        peak_bytes=COUNTS,
        evaluation_peak_bytes=COUNTS,
        commit_bytes=st.tuples(COUNTS, COUNTS),
        step_seconds=SECONDS,
        by_kind=st.dictionaries(NAMES, COUNTS, max_size=3),
        method=NAMES,
    )
    candidates = st.builds(
        Candidate, choice=choices, peak_bytes=COUNTS, step_seconds=SECONDS, reason=NAMES
    )
    device = draw(st.sampled_from(["cpu", "cuda:0", "cuda:13"]))
    kernels = st.builds(
        KernelChoices,
        channels_last=st.booleans(),
        autotune=st.just(False) if device == "cpu" else st.booleans(),
        compile=st.booleans(),
    )
    links = st.builds(
        Link,
        bytes_per_second=st.floats(1, 1e13),
        hop_seconds=st.floats(0, 1e3),
        measured=st.booleans(),
    )
    return Plan(
        link=draw(st.none() | links),
        task=TaskIdentity(
            name=draw(NAMES),
            global_batch=total,
            parameters=draw(COUNTS),
            trainable_parameters=draw(st.integers(1, 1 << 40)),
            ghost_batch=ghost,
        ),
        device=device,
        kernels=draw(kernels),
        device_name=draw(NAMES),
        budget_bytes=draw(st.none() | st.integers(1, 1 << 60)),
        enforced=draw(st.booleans()),
        choice=draw(choices),
        ladder=tuple(draw(st.lists(choices, max_size=3))),
        prediction=draw(st.none() | predictions),
        rejected=tuple(draw(st.lists(candidates, max_size=2))),
        notices=tuple(draw(st.lists(NAMES, max_size=2))),
    )


@given(plans())
def test_a_plan_is_read_back_as_it_was_written(plan):
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text
    assert Plan.model_validate(plan.model_dump()) == plan


@given(plans())
def test_leaner_plans_come_to_an_end_and_are_plans(plan):
    seen = 0
    while plan is not None:
        assert Plan.from_json(plan.to_json()) == plan  # every one of them is valid
        before, plan = plan, plan.leaner()
        seen += 1
        assert seen < 40
    assert before.choice.micro_batch <= max(before.task.ghost_batch or 1, 1) or (
        before.choice.micro_batch == before.task.global_batch
    )


@given(plans())
def test_below_the_ladder_the_micro_batch_falls_down_to_the_unit(plan):
    plan = plan.model_copy(update={"ladder": ()})
    unit = min(plan.task.ghost_batch or 1, plan.task.global_batch)
    sizes = []
    while plan is not None:
        sizes.append(plan.choice.micro_batch)
        assert plan.choice.micro_batch == sizes[0] or plan.choice.evaluation_batch <= sizes[-1]
        plan = plan.leaner()
    assert sizes[-1] == unit
    assert all(b < a for a, b in itertools.pairwise(sizes))


@given(plans())
def test_a_plan_is_explained_in_few_lines(plan):
    lines = plan.explain()
    assert 5 <= len(lines) <= 9
    assert all(what and isinstance(how, str) for what, how in lines)


def example(**changes):
    plan = {
        "version": 1,
        "task": {
            "name": "digits",
            "global_batch": 64,
            "parameters": 10,
            "trainable_parameters": 10,
            "ghost_batch": 8,
        },
        "device": "cpu",
        "choice": {"micro_batch": 16, "evaluation_batch": 16},
        "ladder": [{"micro_batch": 8, "evaluation_batch": 8}],
    }
    for place, value in changes.items():
        *path, last = place.split("__")
        node = plan
        for part in path:
            node = node[int(part) if part.isdigit() else part]
        if value is ...:
            del node[last]
        else:
            node[last] = value
    return json.dumps(plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "has version 2, and this anybatch reads version 1"),
        ({"version": ...}, "has version None"),
        ({"version": "1"}, "has version '1'"),
        ({"speed": 3}, "speed is not a field of a plan"),
        ({"choice__micro_batches": 3}, "choice.micro_batches is not a field of a plan"),
        ({"task": ...}, "task is missing"),
        ({"choice": ...}, "choice is missing"),
        ({"choice__micro_batch": ...}, "choice.micro_batch is missing"),
        ({"choice__micro_batch": 0}, "choice.micro_batch is 0"),
        ({"choice__micro_batch": -4}, "choice.micro_batch is -4"),
        ({"choice__micro_batch": 2.5}, "choice.micro_batch is 2.5"),
        ({"choice__micro_batch": "16"}, "choice.micro_batch is '16'"),
        ({"choice__micro_batch": None}, "choice.micro_batch is None"),
        ({"choice__micro_batch": True}, "choice.micro_batch is True"),
        (
            {"choice__micro_batch": 128},
            "choice.micro_batch is 128, more than the global batch of 64",
        ),
        ({"choice__micro_batch": 12}, "choice.micro_batch is 12, which would cut a ghost batch"),
        ({"ladder__0__micro_batch": 3}, "ladder.0.micro_batch is 3, which would cut a ghost"),
        ({"choice__evaluation_batch": 0}, "choice.evaluation_batch is 0"),
        ({"choice__precision": "fp4"}, "choice.precision is 'fp4'"),
        ({"choice__recompute": "all"}, "choice.recompute is 'all'"),
        ({"choice__recompute": {"keep": "some"}}, "choice.recompute.keep is 'some'"),
        ({"choice__recompute": {"blocks": "layers.*"}}, "choice.recompute.blocks is 'layers"),
        ({"choice__recompute": {"blocks": [1]}}, "choice.recompute.blocks.0 is 1"),
        ({"choice__recompute": {"nested": "yes"}}, "choice.recompute.nested is 'yes'"),
        ({"ladder": {}}, "ladder is {}"),
        ({"ladder__0__precision": "x"}, "ladder.0.precision is 'x'"),
        ({"device": "gpu"}, "device is 'gpu'"),
        ({"device": "cuda:"}, "device is 'cuda:'"),
        ({"budget_bytes": 0}, "budget_bytes is 0"),
        ({"budget_bytes": "10GiB"}, "budget_bytes is '10GiB'"),
        ({"enforced": 1}, "enforced is 1"),
        ({"parallel": "spread"}, "parallel is 'spread'"),
        ({"shares": [1.0, 1.0]}, "shares has 2 numbers, but parallel is 'single'"),
        ({"parallel": "replicate", "shares": [0.0, 0.0]}, "shares is [0.0, 0.0]"),
        ({"parallel": "replicate", "shares": []}, "shares is []"),
        ({"parallel": "in-process"}, "parallel is 'in-process': ranks are processes; choose 'repl"),
        (
            {"parallel": "ddp"},
            "parallel is 'ddp': runs use no DistributedDataParallel; choose 'repl",
        ),
        (
            {"exchange": {"compress": "powersgd"}},
            "exchange.compress is 'powersgd': there is no PowerSGD",
        ),
        ({"norms": "synchronised"}, "norms is 'synchronised'"),
        ({"task__global_batch": 0}, "task.global_batch is 0"),
        ({"task__ghost_batch": 0}, "task.ghost_batch is 0"),
        ({"task__name": 3}, "task.name is 3"),
        ({"prediction": {"peak_bytes": 1}}, "prediction.evaluation_peak_bytes is missing"),
        ({"prediction": []}, "prediction is"),
        ({"notices": ["a", 2]}, "notices.1 is 2"),
    ],
)
def test_a_bad_edit_is_named_with_its_place(changes, message):
    with pytest.raises(InputError) as found:
        Plan.from_json(example(**changes), source="plan.json")
    assert message in str(found.value)
    assert str(found.value).startswith("plan.json ")


def test_all_faults_are_named_at_once():
    with pytest.raises(InputError) as found:
        Plan.from_json(example(device="gpu", choice__micro_batch=0, speed=1))
    for fault in ("device is 'gpu'", "choice.micro_batch is 0", "speed is not a field"):
        assert fault in str(found.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON: Expecting value at line 1, column 1"),
        ('{"version": 1,\n "task" }', "is not JSON: .* at line 2"),
        ("[1]", "holds list where a plan"),
        ("null", "holds NoneType where a plan"),
        ('"plan"', "holds str where a plan"),
    ],
)
def test_a_file_that_holds_no_plan(text, message):
    with pytest.raises(InputError, match=message):
        Plan.from_json(text)


def test_fields_that_earlier_releases_wrote_are_left_out():
    text = example(devices=[], exchange={"powersgd_rank": 1})
    assert Plan.from_json(text) == Plan.from_json(example())


def test_the_example_is_a_plan():
    plan = Plan.from_json(example())
    assert plan.accumulation_steps == 4
    assert plan.choice.describe() == "micro-batch 16, fp32, recompute none"


@given(plans())
def test_a_plan_and_its_prediction_are_shown_in_one_line(plan):
    for shown in (plan, plan.prediction):
        assert len(repr(shown).splitlines()) == 1
        assert str(shown) == repr(shown)


def test_a_plan_at_a_prompt_and_in_a_notebook():
    prediction = Prediction(peak_bytes=3 << 20, evaluation_peak_bytes=0, step_seconds=0.25)
    changes = {"prediction": prediction, "budget_bytes": 4 << 20, "device_name": "a <CPU>"}
    plan = Plan.from_json(example()).model_copy(update=changes)
    assert repr(prediction) == "<Prediction: peak 3.00 MiB, step 250 ms>"
    assert repr(plan) == (
        f"<Plan of {plan.task.name}: global batch 64, micro-batch 16, fp32, recompute none, on a <CPU>;"
        " predicted peak 3.00 MiB of 4.00 MiB, step 250 ms>"
    )
    table = plan._repr_html_()
    assert "a &lt;CPU&gt;" in table
    assert table.count("<tr>") == len(plan.explain())


@pytest.mark.parametrize(
    ("dtypes", "precision", "told"),
    [
        ((), "fp32", "fp32"),
        (("float32",), "fp32", "fp32"),
        (("float64",), "fp32", "fp32; parameters stay as the model has them: float64"),
        (
            ("bfloat16", "float32"),
            "bf16",
            "bf16; parameters stay as the model has them: bfloat16 and float32",
        ),
        (("float64",), "bf16-pure", "bf16-pure"),
    ],
)
def test_parameters_of_another_dtype_are_told(dtypes, precision, told):
    plan = Plan.from_json(example())
    choice = plan.choice.model_copy(update={"precision": precision})
    task = plan.task.model_copy(update={"dtypes": dtypes})
    lines = dict(plan.model_copy(update={"choice": choice, "task": task}).explain())
    assert lines["precision"] == told


def test_the_prediction_of_a_plan_whose_choice_was_edited_is_left_out_and_that_is_told(tmp_path):
    plan = Plan.from_json(example())
    prediction = Prediction(
        peak_bytes=3 << 20, evaluation_peak_bytes=0, step_seconds=0.25, choice=plan.choice
    )
    plan = plan.model_copy(update={"prediction": prediction})
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    path.write_text(plan.to_json().replace('"micro_batch": 16', '"micro_batch": 8', 1))
    edited = Plan.load(path)
    assert edited.choice.micro_batch == 8
    assert edited.prediction is None
    assert edited.notices[-1] == (
        "The choice was changed after it was predicted (micro-batch 16, fp32, recompute none), so"
        " nothing is predicted of it."
    )


def test_files(tmp_path):
    plan = Plan.from_json(example())
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    with pytest.raises(InputError, match=r"nowhere.json cannot be read: No such file"):
        Plan.load(tmp_path / "nowhere.json")
    with pytest.raises(InputError, match="cannot be written to"):
        plan.save(tmp_path / "nowhere" / "plan.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not a text file"):
        Plan.load(tmp_path / "binary")


def test_a_plan_of_another_task_is_refused():
    plan = Plan.from_json(example())
    plan.check_fits(plan.task.model_copy(update={"name": "renamed"}))
    other = plan.task.model_copy(update={"global_batch": 128, "ghost_batch": None})
    with pytest.raises(
        InputError, match="global_batch is 64 in the plan and 128 in the task; ghost"
    ):
        plan.check_fits(other)


def test_a_micro_batch_larger_than_a_ghost_batch_can_always_be_made_smaller():
    """48 // 2 holds no whole ghost batch of 32, but 32 does."""
    plan = Plan(
        task=TaskIdentity(
            name="t", global_batch=48, parameters=1, trainable_parameters=1, ghost_batch=32
        ),
        device="cpu",
        choice=Choice(micro_batch=48, evaluation_batch=64),
    )
    leaner = plan.leaner()
    assert leaner is not None
    assert (leaner.choice.micro_batch, leaner.choice.evaluation_batch) == (32, 32)
    assert leaner.leaner() is None


@pytest.mark.parametrize("name", [*Precision.__args__, *PRECISION_ALIASES])
def test_names_of_precisions(name):
    assert parse_precision(name) in Precision.__args__
    assert parse_precision(name.upper()) == parse_precision(name.lower())


def test_what_json_cannot_hold_is_no_prediction():
    with pytest.raises(ValueError, match="step_seconds"):
        Prediction(peak_bytes=1, evaluation_peak_bytes=1, step_seconds=math.nan)


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        (("layers.0", "layers.1", "layers.2"), "3 blocks (layers.0-2)"),
        (("layers.0", "layers.2", "layers.3", "head"), "4 blocks (layers.0, layers.2-3, head)"),
        (("0", "1"), "2 blocks (0-1)"),
        (("layers.*",), "layers.*"),
        (("a.1", "b.2"), "2 blocks (a.1, b.2)"),
        (("1", "²"), "2 blocks (1, ²)"),  # a digit, and no number
    ],
)
def test_blocks_are_named_in_ranges(blocks, words):
    assert Recompute(blocks=blocks).describe(named=True) == words


# ------------------------------------------------------------------------------------- the link


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_a_link_is_found_again_from_two_sums_over_it(num_ranks):
    link = Link(bytes_per_second=117e6, hop_seconds=2e-4, measured=True)
    least, most = ((size, link.seconds(size, num_ranks)) for size in (4096, 1 << 24))
    found = Link.through(least, most, num_ranks)
    assert found is not None
    assert found.measured
    assert found.bytes_per_second == pytest.approx(link.bytes_per_second)
    assert found.hop_seconds == pytest.approx(link.hop_seconds)


def test_each_rank_sends_all_but_an_nth_of_the_bytes_twice():
    link = Link(bytes_per_second=1e9, hop_seconds=1e-3)
    assert link.seconds(10**9, 1) == 0
    assert link.seconds(10**9, 2) == pytest.approx(1.0 + 2e-3)
    assert link.seconds(10**9, 4) == pytest.approx(1.5 + 6e-3)


@pytest.mark.parametrize(
    "most", [(1 << 24, 1e-3), (1 << 24, 9e-4), (4096, 2e-3)], ids=["as-fast", "faster", "no-larger"]
)
def test_sums_that_tell_no_speed_make_no_link(most):
    assert Link.through((4096, 1e-3), most, 2) is None


def test_a_hop_takes_no_less_than_no_time():
    found = Link.through((4096, 1e-9), (8192, 1.0), 2)
    assert found is not None
    assert found.hop_seconds == 0.0


def test_a_link_is_told_with_where_it_comes_from():
    link = Link(bytes_per_second=117.3e6, hop_seconds=2e-4, measured=True)
    assert link.describe(2) == "measured when the ranks joined: 117 MB/s, 400 us a collective"
    tabulated = link.model_copy(update={"measured": False, "bytes_per_second": 1.3e9})
    assert tabulated.describe(2) == (
        "as tabulated for ranks of one machine, not measured: 1.30 GB/s, 400 us a collective"
    )

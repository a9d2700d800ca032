"""Steps against the picture in schedule.py, and at its edges."""

import pytest

from anybatch.data.schedule import Span, Steps
from anybatch.errors import InputError

PICTURE = {
    "keep": [[(0, 0, 4)], [(0, 4, 8)], [(0, 8, 10)], [(1, 0, 4)], [(1, 4, 8)], [(1, 8, 10)]],
    "drop": [[(0, 0, 4)], [(0, 4, 8)], [(1, 0, 4)], [(1, 4, 8)]],
    "wrap": [[(0, 0, 4)], [(0, 4, 8)], [(0, 8, 10), (1, 0, 2)], [(1, 2, 6)], [(1, 6, 10)]],
}


@pytest.mark.parametrize("last", PICTURE)
def test_two_epochs_as_drawn(last):
    steps = Steps(10, 4, last, epochs=2)
    assert steps.total_steps == len(PICTURE[last])
    for step, spans in enumerate(PICTURE[last]):
        assert steps.samples_of(step) == tuple(Span(*span) for span in spans)
        assert steps.epoch_of(step) == spans[0][0]
    assert steps.samples_of(steps.total_steps) == ()
    assert steps.total_samples == sum(b - a for spans in PICTURE[last] for _, a, b in spans)


@pytest.mark.parametrize(("last", "ends"), [("keep", [2, 5]), ("drop", [1, 3]), ("wrap", [2, 4])])
def test_the_step_with_the_last_sample_ends_the_epoch(last, ends):
    steps = Steps(10, 4, last, epochs=2)
    assert [s for s in range(steps.total_steps) if steps.is_epoch_end(s)] == ends


def test_a_global_batch_larger_than_the_data_spans_many_epochs():
    steps = Steps(3, 8, "wrap", steps=2)
    assert steps.samples_of(1) == (Span(2, 2, 3), Span(3, 0, 3), Span(4, 0, 3), Span(5, 0, 1))
    assert steps.total_samples == 16


@pytest.mark.parametrize(
    ("last", "num_steps", "sizes"),
    [("keep", 5, [4, 4, 2, 4, 1]), ("drop", 4, [4, 4, 4, 3]), ("wrap", 4, [4, 4, 4, 3])],
)
def test_samples_end_training_exactly(last, num_steps, sizes):
    steps = Steps(10, 4, last, samples=15)
    assert steps.total_steps == num_steps
    assert [steps.num_samples_of(step) for step in range(num_steps)] == sizes
    assert steps.samples_before(99) == 15


@pytest.mark.parametrize("last", PICTURE)
@pytest.mark.parametrize("length", [{"epochs": 2}, {"steps": 2}, {"samples": 9}, {"samples": 17}])
def test_the_first_step_of_one_sample(last, length):
    for num_samples in range(2, 12):
        for global_batch in range(1, num_samples + 1):
            steps = Steps(num_samples, global_batch, last, **length)
            sizes = [steps.num_samples_of(step) for step in range(steps.total_steps or 0)]
            assert steps.first_of_one == (sizes.index(1) if 1 in sizes else None)


def test_of_a_stream_it_is_not_known():
    assert Steps(None, 4, epochs=2).first_of_one is None
    assert Steps(None, 1, epochs=2).first_of_one == 0


def test_a_stream_knows_only_what_follows_from_the_task():
    assert Steps(None, 4, epochs=2).total_steps is None
    assert Steps(None, 4, epochs=2).total_samples is None
    assert Steps(None, 4, "wrap", samples=15).total_steps == 4
    assert Steps(None, 4, "keep", samples=15).total_steps is None
    assert Steps(None, 4, steps=3).total_samples == 12
    with pytest.raises(InputError, match="as it is read"):
        Steps(None, 4, epochs=2).epoch_of(0)

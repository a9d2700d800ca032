"""Two ranks give what the executable specification in `examples/nano_anybatch.py` gives on one, and the
specification itself gives the same on two."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from examples import nano_anybatch as nano
from tests.property.nano_cases import Case, assert_alike, by_nano, by_session, task_of

TOKENS = Case(kind="tokens", optimizer="adamw", global_batch=10, rest=3, num_passes=3, epochs=2)
FAILING = Case(
    optimizer="adamw", global_batch=17, rest=2, num_passes=4, clip_norm=0.1, failing=(2, 5)
)
FROZEN = Case(kind="conv", global_batch=64, rest=1, num_passes=3, failing=(4,), is_frozen=True)
NORM = Case(kind="conv and norm", global_batch=13, rest=5, num_passes=2, clip_norm=0.1)


def on_two_ranks(rank, size, case, shares):
    failing = case.failures if rank == 1 else ()
    ours = by_session(case, failing, parallel="replicate", shares=shares)
    mine = replace(case, num_passes=case.num_passes + rank)  # another micro-batch on each rank
    return ours, by_nano(mine, failing, shares)


@pytest.mark.parametrize(
    ("case", "shares"),
    [
        (TOKENS, (1.0, 3.0)),
        (FAILING, (1.0, 1.0)),
        (FROZEN, (2.0, 1.0)),
        (NORM, (1.0, 3.0)),
        (replace(TOKENS, global_batch=1), (1.0, 1.0)),  # a rank without samples
        (replace(FAILING, rest=0), (0.0, 1.0)),
    ],
)
def test_two_ranks_train_as_nano_does_alone(crew, case, shares):
    alone = by_nano(case)
    for ours, theirs in crew(2, on_two_ranks, case, shares):
        assert_alike(ours, alone, torch.float64)
        if case.ghosts:  # the statistics of nano are those of rank 0
            theirs.model.load_state_dict(dict(alone.model.named_buffers()), strict=False)
        assert_alike(theirs, alone, torch.float64)


class BrokenDisk:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        raise OSError("broken")


def with_an_error(rank, size):
    task = task_of(Case(global_batch=8, num_full=1))
    nano.train(replace(task, data=BrokenDisk()) if rank == 1 else task, 2, (1, 1))


def test_an_error_on_one_rank_of_nano_ends_all(crew):
    (first, _), (second, _) = crew.outcomes(2, with_an_error)
    assert isinstance(first, ValueError)
    assert "failed=1" in str(first)
    assert isinstance(second, OSError)


@pytest.mark.nightly
def test_the_example_prints_the_same_losses_in_every_row(warm, tmp_path):
    example = Path(__file__).parents[2] / "examples" / "nano_anybatch.py"
    done = warm(["python", example], tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == ["1", "1", "2", "2"]
    assert len({tuple(row[4:]) for row in rows}) == 1
    before, _, after = rows[-1][1:4]
    assert int(after) == (int(before) + 1) // 2  # memory did run out

"""Objects that ranks send each other: unpickled only if a rank of the same run has signed them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.crew import Crew
from torch.distributed import ProcessGroup, new_group

from anybatch.errors import LaunchError
from anybatch.launch import call, find, join
from anybatch.parallel.collectives import broadcast_object, gather_objects
from anybatch.process.signing import SECRET


class Attack:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def values_of(rank: int, size: int) -> list[Any]:
    own = {"rank": rank, "text": "x" * 1000 * rank}
    alone = new_group([1])
    parts = broadcast_object(own, 0, alone) if isinstance(alone, ProcessGroup) and rank else None
    return [gather_objects(own), broadcast_object(own, 1), parts]


def test_objects_of_any_size_reach_all_ranks(crew: Crew):
    one, other = ({"rank": rank, "text": "x" * 1000 * rank} for rank in (0, 1))
    found = crew(2, values_of)
    assert found == [[[one, other], other, None], [[one, other], other, other]]


def attacked(rank: int, size: int, harm: Path, share: Callable[..., object]) -> str:
    before = os.environ.get(SECRET)
    os.environ[SECRET] = f"the secret of rank {rank}"
    try:
        share(Attack(harm) if rank == 1 else None)
    except LaunchError as error:
        return str(error)
    finally:
        del os.environ[SECRET]
        if before is not None:
            os.environ[SECRET] = before
    return ""


def from_rank_1(value: object) -> object:
    return broadcast_object(value, 1)


@pytest.mark.parametrize("share", [gather_objects, from_rank_1])
def test_what_another_secret_has_signed_is_not_unpickled(
    share: Callable[..., object], crew: Crew, tmp_path: Path
):
    harm = tmp_path / "harm"
    told = crew(2, attacked, harm, share)[0]
    assert "what rank 1 sent is not signed with this rank's secret" in told
    # Rank 1 reads what it has signed itself.
    assert not harm.exists() or share is from_rank_1


def secret() -> tuple[str, list[str]]:
    membership = find()
    assert membership is not None
    with join(membership, "cpu", timeout_seconds=60):
        return os.environ[SECRET], gather_objects("both")


@pytest.mark.nightly
def test_ranks_of_one_machine_share_a_secret_that_no_other_run_has():
    found = [call(secret, ranks=2) for _ in range(2)]
    secrets = {one for ranks in found for one, _ in ranks}
    assert len(secrets) == 2
    assert all(len(one) == 32 for one in secrets)
    assert SECRET not in os.environ

"""Several machines: two agents on one, and two network namespaces with a cable between them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.faults.launch.ranks import seen
from tests.multiprocess import netns
from tests.ports import free_port

CODE = """
import json, sys
from anybatch.launch import call
from tests.multiprocess.probe import probe
ranks, rendezvous, seconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
results = call(probe, ranks=ranks, nodes=2, rendezvous=rendezvous, timeout_seconds=seconds)
print(json.dumps(results))
"""
SECONDS = 120


def command(ranks: int, rendezvous: str, seconds: float = SECONDS) -> list[str]:
    return [sys.executable, "-c", CODE, str(ranks), rendezvous, str(seconds)]


def run(commands: Sequence[Sequence[str]]) -> list[tuple[int, str, str]]:
    """Status, output and errors of processes that run at the same time."""
    secret = {"ANYBATCH_RENDEZVOUS_SECRET": "of these machines"}
    environment = {**os.environ, **secret, "OMP_NUM_THREADS": "1"}
    environment.pop("GLOO_SOCKET_IFNAME", None)
    processes = [
        subprocess.Popen(
            one, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for one in commands
    ]
    try:
        told = [process.communicate(timeout=2 * SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, *texts) for process, texts in zip(processes, told, strict=True)]


def results_of(ended: Sequence[tuple[int, str, str]]) -> list[list[dict[str, Any]]]:
    assert [status for status, _, _ in ended] == [0] * len(ended), [told for _, _, told in ended]
    return [json.loads(output) for _, output, _ in ended]


@pytest.mark.nightly
def test_two_agents_with_one_rendezvous():
    place = f"127.0.0.1:{free_port()}"
    first, second = results_of(run([command(2, place), command(1, place)]))
    ranks = sorted([*first, *second], key=lambda rank: rank["rank"])
    assert [rank["rank"] for rank in ranks] == [0, 1, 2]
    assert [rank["sum"] for rank in ranks] == [3, 3, 3]
    assert sorted(rank["local_rank"] for rank in first) == [0, 1]
    assert {rank["local_world_size"] for rank in first} == {2}
    assert {rank["local_world_size"] for rank in second} == {1}


@pytest.mark.slow
def test_two_machines_joined_by_a_cable():
    reason = netns.why_not()
    if reason is not None:
        pytest.skip(reason)
    with netns.two_machines() as (first, second):
        place = f"{first.address}:29500"
        machines = {first: command(2, place), second: command(2, place)}
        seen = results_of(run([m.command(*words) for m, words in machines.items()]))
        for machine, ranks in zip(machines, seen, strict=True):
            for rank in ranks:
                assert rank["sum"] == 0 + 1 + 2 + 3
                assert rank["world_size"] == 4
                assert rank["interface"] == machine.interface
                assert rank["master"] in (first.address, second.address)
        assert sorted(rank["rank"] for ranks in seen for rank in ranks) == [0, 1, 2, 3]


def fail_on(status: int) -> None:
    """A rank that leaves its peers in a collective with `status`, or waits for them if it is 0."""
    from torch import distributed

    from anybatch.launch import find, join

    membership = find()
    assert membership is not None
    with join(membership, "cpu", timeout_seconds=60):
        distributed.barrier()
        if status:
            raise ArithmeticError("on this machine")
        distributed.barrier()


FAILING = """
import sys
from anybatch.launch import call
from tests.multiprocess.test_launch_machines import fail_on
call(fail_on, int(sys.argv[2]), ranks=1, nodes=2, rendezvous=sys.argv[1], timeout_seconds=60)
"""


@pytest.mark.nightly
def test_no_machine_waits_for_one_whose_rank_failed():
    place = f"127.0.0.1:{free_port()}"
    ended = run([[sys.executable, "-c", FAILING, place, status] for status in ("0", "1")])
    assert [status for status, _, _ in ended] == [1, 1]
    assert "ArithmeticError: on this machine" in ended[1][2]
    assert "failed first: ArithmeticError: on this machine" in ended[0][2]
    assert f"on {socket.gethostname()}" in ended[0][2]


LEAVING = """
import sys
from anybatch.launch import run_command
options = {"nodes": 2, "rendezvous": sys.argv[2], "restarts": 1, "module": "tests.faults.launch.ranks"}
sys.exit(run_command([sys.argv[1], "3"], 1, **options))
"""


@pytest.mark.slow
def test_every_machine_ends_with_the_status_of_the_first_cause(tmp_path: Path):
    place = f"127.0.0.1:{free_port()}"
    ended = run([[sys.executable, "-c", LEAVING, str(tmp_path), place]] * 2)
    assert [status for status, _, _ in ended] == [3, 3]
    (pid,) = [rank["pid"] for (_, number), rank in seen(tmp_path).items() if number == 1]
    who = f"rank 1 of 2 (process {pid}, on {socket.gethostname()})"
    for _, _, errors in ended:
        assert f"anybatch: {who} failed first: it exited with status 3.\n" in errors


@pytest.mark.slow
def test_a_machine_that_does_not_come_is_given_up():
    place = f"127.0.0.1:{free_port()}"
    ((status, _, told),) = run([command(1, place, seconds=1)])
    assert status == 1
    message = told.splitlines()[-1]
    assert f"fewer than 2 machines have come to {place} within 1 s" in message


@pytest.mark.nightly
def test_a_machine_that_waits_for_another_says_so():
    place = f"127.0.0.1:{free_port()}"
    ((status, _, told),) = run([command(1, place, seconds=8)])
    assert status == 1
    assert told.startswith(f"anybatch: waiting at {place} for 2 machines, for 8 s at the most.")

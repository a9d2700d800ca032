"""Machines that go and come, and the others, which go on. Each is an agent; most are on this machine,
two have a cable between them that is cut."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.faults.launch.ranks import seen
from tests.faults.launch.test_exits import check_gone, wait_until
from tests.multiprocess import netns
from tests.ports import free_port

pytestmark = [pytest.mark.faults, pytest.mark.slow]

SECONDS = 120.0

# Machines are given up sooner, and waited for less, than by default.
AGENT = """
import sys, tempfile
tempfile.tempdir = sys.argv[1] + "/temporary"
from anybatch.launch import call, elastic, rendezvous
from tests.faults.launch.ranks import until_finished
rendezvous.SILENT_SECONDS = 5.0
elastic.LAST_CALL_SECONDS = 3.0
folder, place, ranks, least, most = sys.argv[1:]
machines = (int(least), int(most))
print(
    call(until_finished, folder, ranks=int(ranks), nodes=machines, rendezvous=place, grace_seconds=5)
)
"""

Agent = subprocess.Popen[str]


@pytest.fixture
def place() -> str:
    """An address where nobody listens yet."""
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def start(tmp_path: Path, place: str) -> Iterator[Callable[..., Agent]]:
    """Starts an agent. In the end none is left, nor any rank or folder of one."""
    (tmp_path / "temporary").mkdir()
    agents: list[Agent] = []

    def start(
        ranks: int = 1,
        nodes: tuple[int, int] = (1, 2),
        there: str = place,
        before: Sequence[str] = (),
    ) -> Agent:
        words = [str(tmp_path), there, *map(str, (ranks, *nodes))]
        agent = subprocess.Popen(
            [*before, sys.executable, "-c", AGENT, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "ANYBATCH_RENDEZVOUS_SECRET": "of these machines",
            },
            start_new_session=True,
        )
        agents.append(agent)
        return agent

    yield start
    for agent in agents:
        agent.kill()
        agent.communicate()
    for rank in seen(tmp_path).values():
        check_gone(rank["pid"])
    wait_until(lambda: not list((tmp_path / "temporary").glob("anybatch-ranks-*")))


def await_world(folder: Path, size: int, after: int = -1) -> int:
    """Wait until `size` ranks are at work in an attempt later than `after`; its number."""

    def attempts() -> list[int]:
        found = seen(folder)
        return [
            attempt
            for attempt in {number for number, _ in found}
            if attempt > after
            and [rank["world_size"] for (number, _), rank in found.items() if number == attempt]
            == [size] * size
        ]

    wait_until(lambda: bool(attempts()))
    return max(attempts())


def await_host(place: str) -> None:
    """Wait until somebody listens there: who comes first is the host."""
    host, port = place.split(":")

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    wait_until(listens)


def finish(folder: Path, *agents: Agent) -> list[tuple[str, str]]:
    """Let the ranks come to their end; what the agents wrote."""
    (folder / "finish").touch()
    told = [agent.communicate(timeout=SECONDS) for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * len(agents), told
    return told


def kill(agent: Agent) -> None:
    """As if the machine's power were lost, but for the connections, which break."""
    os.killpg(agent.pid, signal.SIGKILL)
    agent.wait()


@pytest.mark.nightly
def test_the_others_go_on_without_a_machine_that_is_killed(
    start: Callable[..., Agent], tmp_path: Path
):
    stays = start(ranks=2)
    await_world(tmp_path, 2)
    gone = start(ranks=1)
    attempt = await_world(tmp_path, 3)
    kill(gone)
    attempt = await_world(tmp_path, 2, after=attempt)
    ((output, errors),) = finish(tmp_path, stays)
    assert output == f"{[(attempt, 2)] * 2}\n"
    assert errors.count("a machine has come. All ranks are started again.") == 1
    (told,) = [line for line in errors.splitlines() if "restart 1 of 3" in line]
    assert told.startswith(f"anybatch: nothing was heard from {socket.gethostname()}. All ranks")


@pytest.mark.nightly
def test_a_machine_that_comes_back_is_taken_in(
    start: Callable[..., Agent], tmp_path: Path, place: str
):
    stays = start()
    await_host(place)
    gone = start()
    attempt = await_world(tmp_path, 2)
    kill(gone)
    attempt = await_world(tmp_path, 1, after=attempt)
    back = start()
    attempt = await_world(tmp_path, 2, after=attempt)
    told = finish(tmp_path, stays, back)
    assert [output for output, _ in told] == [f"[({attempt}, 2)]\n"] * 2


@pytest.mark.nightly
def test_a_machine_that_is_told_to_end_saves_and_the_others_go_on(
    start: Callable[..., Agent], tmp_path: Path, place: str
):
    stays = start()
    await_host(place)
    leaves = start()
    attempt = await_world(tmp_path, 2)
    leaves.send_signal(signal.SIGTERM)
    attempt = await_world(tmp_path, 1, after=attempt)
    _, errors = leaves.communicate(timeout=SECONDS)
    assert "was sent SIGTERM" in errors
    ((output, errors),) = finish(tmp_path, stays)
    assert output == f"[({attempt}, 1)]\n"
    assert "was told to end. All ranks are started again.\n" in errors


@pytest.mark.nightly
def test_too_few_machines_do_not_go_on(start: Callable[..., Agent], tmp_path: Path, place: str):
    stays = start(nodes=(2, 2))
    await_host(place)
    gone = start(nodes=(2, 2))
    await_world(tmp_path, 2)
    kill(gone)
    _, errors = stays.communicate(timeout=SECONDS)
    assert stays.returncode == 1
    assert f"nothing is heard from {socket.gethostname()} any more" in errors
    assert "started again" not in errors
    assert {attempt for attempt, _ in seen(tmp_path)} == {0}


@pytest.mark.nightly
def test_the_others_end_with_the_machine_where_they_meet(
    start: Callable[..., Agent], tmp_path: Path, place: str
):
    host = start()
    await_host(place)
    guest = start()
    await_world(tmp_path, 2)
    kill(host)
    _, errors = guest.communicate(timeout=SECONDS)
    assert guest.returncode == 1
    last = [line for line in errors.splitlines() if line.startswith("anybatch.errors.LaunchError")]
    assert len(last) == 1
    assert f"the connection to the rendezvous at {place} was lost while the ranks were" in last[0]


@pytest.fixture
def cable() -> Iterator[tuple[netns.Machine, netns.Machine]]:
    reason = netns.why_not()
    if reason is not None:
        pytest.skip(reason)
    with netns.two_machines() as machines:
        yield machines


@pytest.mark.nightly
def test_a_cable_is_cut_between_two_machines(
    start: Callable[..., Agent],
    tmp_path: Path,
    cable: tuple[netns.Machine, netns.Machine],
):
    comes, stays = cable  # the one that comes has rank 0, since its address sorts first
    there = f"{stays.address}:29500"
    host = start(there=there, before=stays.command())
    await_world(tmp_path, 1)
    guest = start(there=there, before=comes.command())
    attempt = await_world(tmp_path, 2)
    netns.cut(comes)
    attempt = await_world(tmp_path, 1, after=attempt)
    _, errors = guest.communicate(timeout=SECONDS)
    assert guest.returncode == 1
    assert f"the connection to the rendezvous at {there} was lost" in errors
    assert "it has not answered for 5 s" in errors
    ((output, _),) = finish(tmp_path, host)
    assert output == f"[({attempt}, 1)]\n"

"""Who started this process, from its environment; joining as the only rank, and joining nobody."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests import ports
from torch import distributed

from anybatch.errors import InputError, LaunchError
from anybatch.launch import Membership, find, join
from anybatch.launch.membership import first_host, tasks_per_node
from anybatch.launch.network import parse_address

OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def nobody_started_this(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*OURS, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


STEP = (
    "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1"
    " SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2)"
)
POD = "RANK=3 PET_NODE_RANK=3 PET_NNODES=4 MASTER_ADDR=train-master-0 MASTER_PORT=23456"
OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0"
    " OMPI_COMM_WORLD_LOCAL_SIZE=2"
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("RANK=0 WORLD_SIZE=1", Membership(0, 1, 0, 1, "torchrun")),
        (
            "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4",
            Membership(5, 8, 1, 4, "torchrun"),
        ),
        ("RANK=1 WORLD_SIZE=2", Membership(1, 2, 1, 2, "torchrun")),
        ("RANK=5 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4", Membership(5, 8, 1, 4, "torchrun")),
        ("RANK=1 WORLD_SIZE=2 ANYBATCH_LAUNCHED=1", Membership(1, 2, 1, 2, "anybatch")),
        (f"{POD} WORLD_SIZE=4 PET_NPROC_PER_NODE=auto", Membership(3, 4, 0, 1, "torchrun")),
        (
            f"{POD} WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2",
            Membership(3, 8, 1, 2, "torchrun"),
        ),
        (STEP, Membership(3, 4, 1, 2, "slurm")),
        (f"{STEP} RANK=0 WORLD_SIZE=1", Membership(0, 1, 0, 1, "torchrun")),
        (OPEN_MPI, Membership(2, 4, 0, 2, "mpi")),
        ("PMI_RANK=1 PMI_SIZE=2", Membership(1, 2, 1, 2, "mpi")),
        (
            "PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2",
            Membership(3, 4, 1, 2, "mpi"),
        ),
    ],
    ids=lambda value: value.launcher if isinstance(value, Membership) else value.split()[0],
)
def test_each_launcher_is_recognised(text: str, found: Membership):
    assert find(variables(text)) == found


@pytest.mark.parametrize(
    ("text", "attempt"),
    [
        ("ANYBATCH_LAUNCHED=1 ANYBATCH_ATTEMPT=2 TORCHELASTIC_RESTART_COUNT=1", 2),
        ("ANYBATCH_LAUNCHED=1", 0),
        ("TORCHELASTIC_RESTART_COUNT=3", 3),
        ("ANYBATCH_ATTEMPT=2", 0),
    ],
)
def test_a_rank_knows_how_often_it_was_started_before(text: str, attempt: int):
    found = find(variables(f"RANK=0 WORLD_SIZE=2 {text}"))
    assert found is not None
    assert found.attempt == attempt


@pytest.mark.parametrize(
    "text",
    [
        "",
        "RANK= WORLD_SIZE=",
        "MASTER_ADDR=node1 MASTER_PORT=29500",
        "SLURM_JOB_ID=7 SLURM_NTASKS=4",
        "SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0",
        "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=1",
        "PMI_RANK=0 PMI_SIZE=1",
        f"{POD} WORLD_SIZE=8 PET_NPROC_PER_NODE=2",
    ],
    ids=["nothing", "empty", "address", "salloc", "sbatch", "step of one", "mpi of one", "pod"],
)
def test_a_process_by_itself_is_no_rank(text: str):
    assert find(variables(text)) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("RANK=1", ("RANK is 1", "WORLD_SIZE is not set", "torchrun")),
        ("WORLD_SIZE=2", ("WORLD_SIZE is 2", "RANK is not set")),
        ("LOCAL_RANK=0", ("LOCAL_RANK is 0", "RANK is not set")),
        ("RANK=2 WORLD_SIZE=2", ("RANK is 2", "2 ranks", "between 0 and 1")),
        ("RANK=one WORLD_SIZE=2", ("RANK is 'one'", "whole number")),
        ("RANK=-1 WORLD_SIZE=2", ("RANK is '-1'",)),
        ("RANK=0 WORLD_SIZE=0", ("RANK is 0", "0 ranks")),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", ("rank 2 of 2", "LOCAL_RANK")),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=3", ("rank 0 of 3",)),
        (STEP.replace("PROCID=3", "PROCID=4"), ("SLURM_PROCID is 4", "4 ranks")),
        (STEP.replace("2(x2)", "two"), ("'two'",)),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_variables_that_cannot_be_are_named(text: str, words: tuple[str, ...]):
    with pytest.raises(InputError) as raised:
        find(variables(text))
    for word in words:
        assert word in str(raised.value)


# --------------------------------------------------------------------------------------------- joining

ALONE = Membership(0, 1, 0, 1, "torchrun")


def test_a_group_of_one_needs_no_address_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ), torch.get_num_threads()
    with join(ALONE, "cpu", timeout_seconds=30):
        assert distributed.get_world_size() == 1
        assert torch.get_num_threads() == len(os.sched_getaffinity(0))
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        assert find() == Membership(0, 1, 0, 1, "torch")
    assert not distributed.is_initialized()
    assert (dict(os.environ), torch.get_num_threads()) == before


def test_the_group_goes_with_an_error_too():
    with pytest.raises(ZeroDivisionError), join(ALONE, "cpu", timeout_seconds=30):
        _ = 1 / 0
    assert not distributed.is_initialized()


def test_threads_and_interface_of_the_user_stay(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    before = torch.get_num_threads()
    with join(Membership(0, 1, 0, 1, "torchrun"), "cpu", timeout_seconds=30):
        assert torch.get_num_threads() == before
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize("scheme", ["tcp", "file", "env"])
def test_a_group_of_the_script_is_left_alone(
    scheme: str, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    where = {
        "tcp": f"tcp://127.0.0.1:{port}",
        "file": f"file://{tmp_path}/meeting",
        "env": "env://",
    }
    distributed.init_process_group("gloo", init_method=where[scheme], rank=0, world_size=1)
    try:
        membership = find({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
        assert membership == Membership(0, 1, 0, 1, "torch")
        group = distributed.group.WORLD
        with join(membership, "cpu", timeout_seconds=30):
            assert distributed.group.WORLD is group
        assert distributed.is_initialized()
    finally:
        distributed.destroy_process_group()


def test_one_group_after_the_other_over_the_same_address(port: int, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    for _ in range(2):
        with join(ALONE, "cpu", timeout_seconds=30):
            number = torch.ones(1)
            distributed.all_reduce(number)
            assert number.item() == 1


@pytest.fixture
def port() -> int:
    return ports.free_port()


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize("text", ["node1", "node1:port", "node1:70000", ":29500", "fe80::1:29500"])
def test_an_address_that_cannot_be_read_is_named(text: str):
    with pytest.raises(InputError, match=f"the place is '{text}': .* such as node1:29500"):
        parse_address(text, "the place")


def test_an_address_that_is_not_there_is_named():
    with (
        pytest.raises(InputError, match="MASTER_ADDR is not set, so the 2 ranks"),
        join(Membership(0, 2, 0, 2, "torchrun"), "cpu", timeout_seconds=1),
    ):
        pass


def test_mpi_over_several_machines_needs_an_address():
    with (
        pytest.raises(InputError, match="MASTER_ADDR is not set, so the 4 ranks"),
        join(Membership(0, 4, 0, 2, "mpi"), "cpu", timeout_seconds=1),
    ):
        pass


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What a rank of two is told that cannot meet the other at an address."""

    def refused(rank: int, port: int, host: str = "127.0.0.1", seconds: float = 1) -> str:
        monkeypatch.setenv("MASTER_ADDR", host)
        monkeypatch.setenv("MASTER_PORT", str(port))
        membership = Membership(rank, 2, rank, 2, "torchrun")
        with (
            pytest.raises(LaunchError) as raised,
            join(membership, "cpu", timeout_seconds=seconds),
        ):
            pass
        assert not distributed.is_initialized()
        return str(raised.value)

    return refused


def test_a_port_in_use_is_named(taken_port: int, refused):
    message = refused(0, taken_port)
    assert f"127.0.0.1:{taken_port}" in message
    assert "port is in use" in message


def test_an_address_where_nobody_listens_is_given_up(port: int, refused):
    message = refused(1, port)
    assert f"nothing answered at 127.0.0.1:{port} within 1 s" in message
    assert "firewall" in message


def test_a_port_of_another_program_is_given_up(taken_port: int, refused):
    message = refused(1, taken_port)
    assert f"127.0.0.1:{taken_port} did not answer as ranks do within 1 s" in message


def test_another_program_is_not_asked_for_as_long_as_ranks_may_take_to_come(
    taken_port: int, refused, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("anybatch.launch.network._ANSWER_SECONDS", 1.0)
    message = refused(1, taken_port, seconds=600)
    assert "did not answer as ranks do within 1 s" in message


def test_an_unknown_name_is_given_up(refused):
    message = refused(1, 29500, "no-such-machine.invalid")
    assert "no-such-machine.invalid:29500 within 1 s" in message
    assert "check the name" in message


def test_ranks_that_do_not_come_are_counted(port: int, refused):
    message = refused(0, port)
    assert f"1 of 2 ranks have come to 127.0.0.1:{port} within 1 s" in message


def test_a_rank_too_many_is_counted(refused):
    from anybatch.launch import membership

    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    distributed.PrefixStore(f"anybatch/0/{membership._num_joins + 1}", store).add("arrived", 2)
    message = refused(1, store.port)
    assert "rank number 3 has come" in message
    assert "another run uses the same address" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are CUDA devices")
def test_more_ranks_than_devices_are_counted():
    with (
        pytest.raises(InputError, match=r"2 ranks were started .* where 0 CUDA devices"),
        join(Membership(1, 2, 1, 2, "torchrun"), "cuda", timeout_seconds=1),
    ):
        pass


@pytest.mark.parametrize(
    ("launcher", "variables_there", "visible", "taken"),
    [
        ("slurm", "", 1, 0),  # --ntasks-per-gpu, --gpu-bind=single:1
        ("slurm", "SLURM_GPUS_PER_TASK=2", 2, 0),
        ("slurm", "SLURM_GPUS_PER_TASK=1", 4, 3),  # --gpu-bind=none
        ("mpi", "", 1, 0),
        ("torchrun", "", 4, 3),
        ("torchrun", "", 1, None),
        ("slurm", "", 2, None),
    ],
)
def test_each_rank_takes_the_device_that_its_launcher_shows_it(
    launcher, variables_there, visible, taken, monkeypatch: pytest.MonkeyPatch
):
    from anybatch.launch import membership

    monkeypatch.delenv("SLURM_GPUS_PER_TASK", raising=False)
    for name, value in variables(variables_there).items():
        monkeypatch.setenv(name, value)
    found = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    last_of_four = Membership(3, 4, 3, 4, launcher)
    if taken is None:
        with pytest.raises(
            InputError, match=f"4 ranks were started .* where {visible} CUDA device"
        ):
            membership._take_device(last_of_four)
    else:
        membership._take_device(last_of_four)
        assert found == [taken]


# ---------------------------------------------------------------------------------- Slurm's short forms


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("alone", "alone"),
        ("a,b.example.org", "a"),
        ("node[08-11]", "node08"),
        ("node[01-02,07],gpu-a", "node01"),
        ("r[1-2]n[01-02]", "r1n01"),
        ("x[3]-ib", "x3-ib"),
    ],
)
def test_the_first_of_a_host_list(text: str, name: str):
    assert first_host(text) == name


@pytest.mark.parametrize("text", ["", ",", "[a-b]", "]"])
def test_what_is_no_host_list_is_named(text: str):
    with pytest.raises(InputError, match="not a Slurm host list"):
        first_host(text)


@pytest.mark.parametrize(
    ("text", "numbers"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2)", [1, 2, 2])]
)
def test_counts_per_node_are_written_out(text: str, numbers: list[int]):
    assert tasks_per_node(text) == numbers


@pytest.mark.parametrize("text", ["", "two", "2(3)", "2(x3", "2,"])
def test_what_is_no_list_of_counts_is_named(text: str):
    with pytest.raises(InputError, match="not a Slurm list of counts"):
        tasks_per_node(text)

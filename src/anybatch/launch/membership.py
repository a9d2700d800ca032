"""Membership: the launcher, rank and world size of this process, and how the ranks are joined.

Launchers set different variables: torchrun and this package set `RANK`, Slurm `SLURM_PROCID`, MPI
its own. `find` reads all of them into one record, so that no other part of the package has to read
them. `join` creates the process group, and destroys it.

`join` selects the current CUDA device. While the group exists, it also sets the number of intra-op
threads and the network interface (`GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME`), which torch and NCCL
read only from the environment. Values that the user has set are kept.
"""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, TypeAlias

from anybatch.errors import InputError, LaunchError
from anybatch.launch import exits
from anybatch.launch.network import (
    LOOPBACK,
    Deadline,
    gather_at,
    interface_to,
    joined,
    literal,
    meet,
)
from anybatch.process.early_stop_signal import MARK
from anybatch.process.threads import num_cores, torch_threads

if TYPE_CHECKING:
    from torch.distributed import Store

Launcher: TypeAlias = Literal["torch", "torchrun", "slurm", "mpi", "anybatch"]
DeviceType: TypeAlias = Literal["cpu", "cuda"]

ATTEMPT = "ANYBATCH_ATTEMPT"
"""Environment variable that this package sets in the ranks that it starts, together with `MARK`:
the number of earlier starts of the ranks of this run."""

COLLECTIVE_SECONDS = 1800.0
"""Timeout of a collective of the process group, as torch's default for gloo. Connecting has a
separate, shorter timeout."""

_FAREWELL_SECONDS = 10.0

_num_joins = 0
"""Number of joins of this process. It is the same on all ranks, since they join together. Entries
of an earlier group in a store that outlives it are not used by a later group."""

_served: dict[tuple[str, int], Store] = {}

_FIRST_PORT, _NUM_PORTS = 10_000, 20_000  # below the kernel's ephemeral ports


@dataclass(frozen=True, slots=True)
class Membership:
    """The position of this process among the ranks of a run.

    Attributes:
        rank: from 0 to `world_size - 1`.
        world_size: number of ranks on all machines.
        local_rank: from 0 to `local_world_size - 1`.
        local_world_size: number of ranks on this machine.
        launcher: what started this process; `"torch"` if the script created the process group
            itself.
        attempt: number of earlier starts of the ranks of this run, repeated because one had failed
            or the number of machines had changed. The same on all ranks that this package starts;
            torchrun counts failures, separately on each machine.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: Launcher
    attempt: int = 0


def find(environment: Mapping[str, str] | None = None) -> Membership | None:
    """Find the membership of this process; None if it was started by itself.

    The sources are, in this order: an existing process group of torch; torchrun's variables
    (`RANK`, `WORLD_SIZE`; a group of one counts); a Slurm job step of several tasks (not the shell
    of `sbatch`); an MPI job of several ranks. If `LOCAL_RANK` is not set, it defaults to the rank,
    as on one machine, but to 0 in a pod of Kubeflow's training operator, which has one rank, or
    starts several.

    Args:
        environment: variables to read instead of those of this process.

    Raises:
        InputError: variables are missing or contradict each other.
    """
    variables = os.environ if environment is None else environment
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        return _from_group(variables, distributed.get_rank(), distributed.get_world_size())
    return _started(variables)


@contextmanager
def join(
    membership: Membership, device_type: DeviceType, *, timeout_seconds: float
) -> Iterator[None]:
    """Create the process group of the ranks for the duration of a `with` block: gloo, and also NCCL
    for CUDA. The ranks meet at the address that their launcher provides. An existing group, which a
    script has created in its own way, is left unchanged. Every rank has to call this.

    Args:
        membership: membership of this process.
        device_type: where the ranks compute. With CUDA, each uses the visible device whose index is
            its local rank.
        timeout_seconds: time limit for all ranks to arrive and connect.

    Raises:
        InputError: an address is invalid, or there are more ranks than devices.
        LaunchError: the ranks did not meet in time.
    """
    from torch import distributed

    global _num_joins
    if distributed.is_initialized():
        yield
        return
    _num_joins += 1
    deadline = Deadline(timeout_seconds)
    exits.forget()
    with ExitStack() as stack:
        if device_type == "cuda":
            _take_device(membership)
        else:
            own_cores = max(1, num_cores() // membership.local_world_size)
            stack.enter_context(torch_threads(own_cores))
        try:
            store, place, host, serves = _store(membership, deadline)
            stack.enter_context(_interface(membership, host))
            _connect(membership, device_type, store, place, deadline)
        except BaseException as error:
            exits.note(error)
            raise
        try:
            yield
        except BaseException as error:
            exits.note(error)
            _leave(device_type, failed=True)
            raise
        _leave(device_type, failed=False)
        _say_farewell(store, membership, serves)


# --------------------------------------------------------------------------------- reading variables


def _text(variables: Mapping[str, str], *names: str) -> str | None:
    """The value of the first of `names` that is set and not empty."""
    return next((value for name in names if (value := variables.get(name))), None)


def _number(variables: Mapping[str, str], name: str) -> int | None:
    """The value as a whole number of at least 0; None if it is not set. Raises `InputError`."""
    text = variables.get(name)
    if not text:
        return None
    if not text.strip().isdecimal():
        raise InputError(
            f"the environment variable {name} is {text!r}: it has to be a whole number of at least 0."
            " Correct it, or unset it if this process is to run by itself."
        )
    return int(text)


def _started(variables: Mapping[str, str]) -> Membership | None:
    return _from_torchrun(variables) or _from_slurm(variables) or _from_mpi(variables)


def _from_group(variables: Mapping[str, str], rank: int, world_size: int) -> Membership:
    """The membership in an existing group. The group does not record which ranks share a machine,
    but the variables of the launcher may."""
    try:
        started = _started(variables)
    except InputError:
        started = None  # the script did not use these variables either
    if started is not None and (started.rank, started.world_size) == (rank, world_size):
        return replace(started, launcher="torch")
    return Membership(rank, world_size, rank, world_size, "torch")


def _from_torchrun(variables: Mapping[str, str]) -> Membership | None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    numbers = {name: _number(variables, name) for name in names}
    there = [name for name in names if numbers[name] is not None]
    if not there:
        return None
    rank, world_size = numbers["RANK"], numbers["WORLD_SIZE"]
    if rank is None or world_size is None:
        missing = "RANK" if rank is None else "WORLD_SIZE"
        raise InputError(
            f"the environment variable {there[0]} is {numbers[there[0]]}, but {missing} is not set:"
            " start the ranks with torchrun, or set both, or unset it if this process is to run by"
            " itself."
        )
    if there == ["RANK", "WORLD_SIZE"] and (pods := _text(variables, "PET_NNODES")) is not None:
        # A pod of Kubeflow's training operator: RANK counts pods. The pod is a rank if each pod has
        # one; with more (nprocPerNode) it starts them.
        if pods != str(world_size):
            return None
        numbers |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    ours = _text(variables, MARK) is not None
    attempt = _number(variables, ATTEMPT if ours else "TORCHELASTIC_RESTART_COUNT") or 0
    local_rank, local_size = numbers["LOCAL_RANK"], numbers["LOCAL_WORLD_SIZE"]
    launcher: Launcher = "anybatch" if ours else "torchrun"
    found = _checked(rank, world_size, local_rank, local_size, launcher)
    return replace(found, attempt=attempt)


def _from_slurm(variables: Mapping[str, str]) -> Membership | None:
    # The shells of sbatch and salloc have SLURM_PROCID and SLURM_NTASKS too, but are not job steps.
    rank = _number(variables, "SLURM_PROCID")
    world_size = _number(variables, "SLURM_STEP_NUM_TASKS")
    if rank is None or world_size is None or world_size < 2:
        return None
    local_size = None
    tasks = _text(variables, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    node = _number(variables, "SLURM_NODEID")
    if tasks is not None and node is not None:
        per_node = tasks_per_node(tasks)
        local_size = per_node[node] if node < len(per_node) else None
    local_rank = _number(variables, "SLURM_LOCALID")
    return _checked(rank, world_size, local_rank, local_size, "slurm", "SLURM_PROCID")


def first_host(text: str) -> str:
    """The first name of a Slurm host list: for `node[01-03,7],gpu` it is `node01`. `scontrol show
    hostnames` lists them, but is not available in every container that a job step runs in."""
    first = re.match(r"(?:[^,\[\]]|\[\d[^\]]*\])+", text)
    if first is None:
        raise InputError(f"{text!r} is not a Slurm host list such as node[01-03],gpu.")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def tasks_per_node(text: str) -> list[int]:
    """Expand `SLURM_TASKS_PER_NODE` to one number per node: `2(x3),1` is `[2, 2, 2, 1]`."""
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    if None in parts:
        raise InputError(f"{text!r} is not a Slurm list of counts such as 2(x3),1.")
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]


def _from_mpi(variables: Mapping[str, str]) -> Membership | None:
    families = (
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    )
    for names in families:
        rank, world_size, local_rank, local_size = (_number(variables, name) for name in names)
        if rank is not None and world_size is not None and world_size > 1:
            return _checked(rank, world_size, local_rank, local_size, "mpi", names[0])
    return None


def _checked(
    rank: int,
    world_size: int,
    local_rank: int | None,
    local_size: int | None,
    launcher: Launcher,
    name: str = "RANK",
) -> Membership:
    """The membership, if its numbers agree. Without local numbers, all ranks are assumed to be on
    one machine."""
    if rank >= world_size:
        raise InputError(
            f"the environment variable {name} is {rank}, but there are {world_size} ranks: it has to"
            f" be between 0 and {world_size - 1}, and different in each process."
        )
    if local_rank is None:
        local_rank = rank if local_size is None else rank % max(1, local_size)
    if local_size is None:
        local_size = world_size
    if local_rank >= local_size or local_size > world_size:
        raise InputError(
            f"this process is rank {rank} of {world_size}, and on this machine rank {local_rank} of"
            f" {local_size}, which cannot be: correct the environment variables that say so"
            " (LOCAL_RANK, LOCAL_WORLD_SIZE), or start the ranks with torchrun."
        )
    return Membership(rank, world_size, local_rank, local_size, launcher)


# ------------------------------------------------------------------------------- where the ranks meet


def _store(membership: Membership, deadline: Deadline) -> tuple[Store, str, str, bool]:
    """The store where the ranks meet, its address in words, its host, and whether this rank serves
    it."""
    from torch.distributed import PrefixStore

    host, port = _address(membership)
    place = joined(host, port)
    # torchrun's agent serves the store itself, at the address that it provides.
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = membership.rank == 0 and not agent_serves
    if _on_one_machine(membership) and not agent_serves:
        host = LOOPBACK
    # A rank that rejoins may be faster than the serving rank, so the store of rank 0 is kept.
    role = "host" if serves else "guest"
    base = _served.get((host, port)) or meet(host, port, role, deadline, listen=literal(host))
    if serves and port:
        _served[host, port] = base
    store = PrefixStore(f"anybatch/{membership.attempt}/{_num_joins}", base)
    gather_at(store, place, membership.world_size, deadline)
    return store, place, host, serves


def _on_one_machine(membership: Membership) -> bool:
    """Whether all ranks are on this machine, according to their launcher."""
    if membership.world_size == 1:
        return True
    said = _text(
        os.environ,
        "LOCAL_WORLD_SIZE",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_TASKS_PER_NODE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "MPI_LOCALNRANKS",
    )
    return said is not None and membership.local_world_size == membership.world_size


def _address(membership: Membership) -> tuple[str, int]:
    """The address of rank 0, from the environment."""
    variables = os.environ
    host, port = _text(variables, "MASTER_ADDR"), _number(variables, "MASTER_PORT")
    if host is not None and port is not None:
        if not 0 < port < 1 << 16:
            raise InputError(
                f"the environment variable MASTER_PORT is {port}: a port is between 1 and 65535."
            )
        return host, port
    alone = membership.local_world_size == membership.world_size
    if membership.launcher == "slurm":
        step = _text(variables, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        if host is None and step is not None:
            host = LOOPBACK if alone else first_host(step)
        job = _text(variables, "SLURM_JOB_ID", "SLURM_JOBID")
        key = f"{job}.{_text(variables, 'SLURM_STEP_ID')}"
    elif membership.launcher == "mpi":
        if host is None and alone:
            host = LOOPBACK
        key = _text(variables, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid") or str(os.getppid())
    elif membership.world_size == 1:
        return LOOPBACK, 0
    else:
        key = None
    if host is None or key is None:
        missing = "MASTER_ADDR" if host is None else "MASTER_PORT"
        raise InputError(
            f"the environment variable {missing} is not set, so the {membership.world_size} ranks do"
            " not know where to meet: set MASTER_ADDR to the machine of rank 0 and MASTER_PORT to a"
            " free port there, alike for all ranks."
        )
    return host, port or _FIRST_PORT + zlib.crc32(key.encode()) % _NUM_PORTS


# ------------------------------------------------------------------------------------ joining, leaving


def _connect(
    membership: Membership,
    device_type: DeviceType,
    store: Store,
    place: str,
    deadline: Deadline,
) -> None:
    from torch import distributed

    backend = "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"
    try:
        distributed.init_process_group(
            backend,
            store=store,
            rank=membership.rank,
            world_size=membership.world_size,
            timeout=timedelta(seconds=max(1.0, deadline.left)),
        )
    except (RuntimeError, OSError) as error:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "the default")
        raise LaunchError(
            f"the {membership.world_size} ranks met at {place}, but could not connect to each other"
            f" within {deadline.seconds:g} s: check that all machines reach each other over the"
            f" interface {interface} (GLOO_SOCKET_IFNAME chooses another). torch says: {error}"
        ) from error
    # The deadline applies to connecting. Collectives may wait longer for a slow rank.
    set_timeout = getattr(distributed, "set_timeout", None)  # since torch 2.14
    set_timeout = set_timeout or distributed.distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=COLLECTIVE_SECONDS))


def _leave(device_type: DeviceType, failed: bool) -> None:
    """Destroy the process group. After a failure, peers may have exited in the middle of a
    collective, and NCCL would wait for pending operations, so the group is aborted on CUDA."""
    from torch import distributed

    if not distributed.is_initialized():
        return  # the script has already destroyed it
    try:
        if failed and device_type == "cuda":
            distributed.distributed_c10d._abort_process_group()
        else:
            distributed.destroy_process_group()
    except RuntimeError:
        if not failed:  # otherwise the earlier failure is the one to report
            raise


def _say_farewell(store: Store, membership: Membership, serves: bool) -> None:
    """Make the rank that serves the store wait until the others have left, for a limited time."""
    try:
        if store.add("left", 1) == membership.world_size:
            store.set("empty", "1")
        if serves:
            store.wait(["empty"], timedelta(seconds=_FAREWELL_SECONDS))
    except RuntimeError:
        return  # the other ranks or the serving rank have exited


def _take_device(membership: Membership) -> None:
    import torch

    visible = torch.cuda.device_count()
    # Slurm and mpirun may make only a rank's own devices visible, which cannot always be detected.
    few = membership.launcher in ("slurm", "mpi") and visible < membership.local_world_size
    bound = few and (visible == 1 or "SLURM_GPUS_PER_TASK" in os.environ)
    index = 0 if bound else membership.local_rank
    if index >= visible:
        raise InputError(
            f"{membership.local_world_size} ranks were started on this machine, where {visible} CUDA"
            f" device{'' if visible == 1 else 's'} can be seen: start as many ranks as there are"
            " devices, or show more of them (CUDA_VISIBLE_DEVICES)."
        )
    torch.cuda.set_device(index)


@contextmanager
def _interface(membership: Membership, host: str) -> Iterator[None]:
    """Select the network interface for the backends: the one that leads to the place where the
    ranks met, or the loopback on one machine, so that their ports cannot be reached from outside.
    By default they use the interface that the machine's own name resolves to, which on many
    machines leads nowhere."""
    name = interface_to(LOOPBACK if _on_one_machine(membership) else host, 1)
    values = {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    ours = {key: value for key, value in values.items() if key not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for key in ours:
            os.environ.pop(key, None)

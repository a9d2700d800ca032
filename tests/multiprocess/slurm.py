"""A Slurm of one machine, in a folder of its own: authentication, controller and node, on loopback.

It needs Debian's packages slurm-wlm and munge, and root, as which the node starts the steps of a job.
Ports, keys and state are its own, so that it does not meet a Slurm that is installed. All waiting is
bounded, and everything is stopped again.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
START_SECONDS = 60.0
STOP_SECONDS = 10.0

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
CryptoType=crypto/munge
SlurmctldPort={controller}
SlurmdPort={node}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmdParameters=config_overrides
JobRequeue=1
KillWait=5
MinJobAge=600
RebootProgram=/bin/true
PlugStackConfig=/dev/null
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A running Slurm: the folder it lives in, and the environment in which its commands find it."""

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str, seconds: float = 60.0) -> str:
        """What a command prints on standard output."""
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def wait_for(
        self, job: str, states: Sequence[str], *, restarts: int = 0, seconds: float = 180.0
    ) -> dict[str, str]:
        """The fields of `scontrol show job`, once the job is in one of `states` and has been requeued
        `restarts` times or more."""
        end = time.monotonic() + seconds
        while True:
            text = self.run("scontrol", "show", "job", job)
            fields = dict(word.split("=", 1) for word in text.split() if "=" in word)
            if fields["JobState"] in states and int(fields["Restarts"]) >= restarts:
                return fields
            assert time.monotonic() < end, f"job {job} is not {states}: {text}\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        """The last lines of the daemons' logs."""
        return "\n".join(
            "\n".join([log.name, *log.read_text("utf-8", "replace").splitlines()[-20:]])
            for log in sorted(self.folder.glob("*.log"))
        )


def why_not() -> str | None:
    """Why no Slurm can be started here, or None if one can."""
    path = _path()
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurm-wlm and munge)"
    return None if os.geteuid() == 0 else "slurmd starts the steps of jobs as root only"


@contextmanager
def running(folder: Path) -> Iterator[Slurm]:
    """A Slurm in `folder`, which must be empty. Raises `RuntimeError` if the machine forbids it."""
    host = socket.gethostname().partition(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    controller, node = free_port(), free_port()
    configuration = folder / "slurm.conf"
    configuration.write_text(
        _CONFIGURATION.format(host=host, folder=folder, controller=controller, node=node)
    )
    (folder / "cgroup.conf").write_text(f"CgroupPlugin={_cgroup_plugin()}\n")
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("SLURM_")},
        "PATH": _path(),
        "SLURM_CONF": str(configuration),
    }
    munged = [
        "munged",
        "--foreground",
        "--force",
        f"--key-file={key}",
        f"--socket={folder}/munge.socket",
        f"--pid-file={folder}/munged.pid",
        f"--log-file={folder}/munged.log",
        f"--seed-file={folder}/munge.seed",
    ]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in (
            munged,
            ["slurmctld", "-D", "-i", "-f", str(configuration)],
            ["slurmd", "-D", "-f", str(configuration), "-N", host],
        ):
            with (folder / f"{command[0]}.out.log").open("wb") as output:
                daemons.append(
                    subprocess.Popen(
                        command, env=environment, stdout=output, stderr=output, cwd=folder
                    )
                )
            if command is munged:
                _await(daemons, (folder / "munge.socket").exists)
        slurm = Slurm(folder, environment)
        try:
            _await(daemons, lambda: _is_idle(slurm))
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{slurm.logs()}") from error
        yield slurm
        slurm.run("scancel", "--user=root")
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _cgroup_plugin() -> str:
    """The plugin that does nothing here: older versions load one, but nothing asks it."""
    done = subprocess.run(
        ["slurmd", "-V"],
        env={**os.environ, "PATH": _path()},
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=True,
    )
    version = [int(part) for part in done.stdout.split()[-1].split(".")[:2]]
    return "disabled" if version >= [23, 11] else "cgroup/v1"


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _is_idle(slurm: Slurm) -> bool:
    done = subprocess.run(
        ["sinfo", "--noheader", "--format=%T"],
        env=slurm.environment,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    return done.stdout.strip() == "idle"


def _await(daemons: Sequence[subprocess.Popen[bytes]], ready) -> None:
    end = time.monotonic() + START_SECONDS
    while not ready():
        for daemon in daemons:
            if daemon.poll() is not None:
                raise RuntimeError(f"{daemon.args} has ended with {daemon.returncode}")
        if time.monotonic() > end:
            raise RuntimeError(f"Slurm was not ready within {START_SECONDS:g} s")
        time.sleep(0.1)

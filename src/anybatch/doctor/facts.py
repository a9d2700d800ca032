"""Facts: what probes saw, as plain values that cross between processes and are judged without looking.

Nothing here imports torch, which may be what is broken. A record that is None was not to be had: why
not is told by a finding of its own (see `anybatch.doctor.examine`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Package:
    """A package that this one needs, or can use.

    Attributes:
        name: as pip knows it.
        extra: that installs it; empty: it is needed in any case.
        least: version from which on it will do; empty: any.
        version: that is here; None: none is.
        fault: why it cannot be imported; empty: it can, or that was not tried.
    """

    name: str
    extra: str = ""
    least: str = ""
    version: str | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Python:
    """The interpreter, the system under it, and the packages.

    Attributes:
        version: of Python.
        executable: its path.
        prefix: the folder in which its packages are.
        anybatch: version of this package; empty: it is not installed, only found.
        folder: where this package is.
        system: name and release of the operating system, and the machine.
        libc: name and version of the C library; empty: not known.
        compiler: path of a C++ compiler, which `torch.compile` needs on a CPU; empty: none.
        packages: needed ones first.
    """

    version: str
    executable: str
    prefix: str
    anybatch: str
    folder: str
    system: str
    libc: str
    compiler: str
    packages: tuple[Package, ...] = ()


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A CUDA device as torch sees it. `capability` is `8.9`, or an architecture of ROCm."""

    name: str
    capability: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Torch:
    """torch, in a process that imported it.

    Attributes:
        fault: why it cannot be imported; all else is then unknown.
        version: with the build after a plus.
        folder: where it is.
        cuda, hip: what it was built for; empty: not for that.
        architectures: that it has kernels for, such as `sm_90` and `compute_90`.
        cpu: instructions that its kernels use, such as `AVX512`.
        cudnn: version of cuDNN; empty: there is none.
        libraries: of the CPU, among `mkl`, `mkldnn`, `openmp`.
        threads: that an operation uses.
        backends: of torch.distributed, among `gloo`, `nccl`, `mpi`, `ucc`.
        nccl: its version; empty: there is none.
        devices: those of CUDA that can be seen.
        cuda_fault: what torch says when CUDA is to be started; empty: it starts, or it is not built so.
        allocator_fault: what torch says to the allocator's settings; empty: it takes them.
    """

    fault: str = ""
    version: str = ""
    folder: str = ""
    cuda: str = ""
    hip: str = ""
    architectures: tuple[str, ...] = ()
    cpu: str = ""
    cudnn: str = ""
    libraries: tuple[str, ...] = ()
    threads: int = 0
    backends: tuple[str, ...] = ()
    nccl: str = ""
    devices: tuple[CudaDevice, ...] = ()
    cuda_fault: str = ""
    allocator_fault: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """Two steps of training on a device. `fault` is empty if they came out right."""

    device: str
    fault: str = ""


@dataclass(frozen=True, slots=True)
class GpuUser:
    """A process that holds memory of a GPU. `num_bytes` is None where the driver does not tell, `name`
    is empty where the process is not of this container."""

    pid: int
    name: str
    num_bytes: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its driver sees it, whatever this process may see. None: the driver does not tell.

    Attributes:
        index: in the driver's order, that of the bus.
        name: as its maker calls it.
        uuid: with `GPU-` before it.
        total_bytes, free_bytes: memory.
        capability: such as `8.9`.
        ecc: whether memory is corrected.
        errors: that could not be corrected, since the driver was loaded.
        mig: whether it is divided.
        compute_mode: `default`, `exclusive process` or `prohibited`.
        users: processes that hold memory of it.
    """

    index: int
    name: str
    uuid: str
    total_bytes: int
    free_bytes: int
    capability: str = ""
    ecc: bool | None = None
    errors: int | None = None
    mig: bool | None = None
    compute_mode: str = "default"
    users: tuple[GpuUser, ...] = ()


@dataclass(frozen=True, slots=True)
class Gpus:
    """NVIDIA's GPUs and driver.

    Attributes:
        driver: its version; empty: it was not reached.
        cuda: newest version of CUDA that it speaks.
        fault: what NVML said when it was not reached.
        on_bus: display controllers of NVIDIA on the PCI bus; None: no bus can be looked at.
        module: version of the kernel's module that is loaded; empty: none.
        gpus: in the driver's order.
    """

    driver: str = ""
    cuda: str = ""
    fault: str = ""
    on_bus: int | None = None
    module: str = ""
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of the operating system on this process. None: none."""

    soft: int | None = None
    hard: int | None = None


@dataclass(frozen=True, slots=True)
class Host:
    """Cores and memory.

    Attributes:
        system: `linux`, `darwin` or `win32`.
        cores: of the machine.
        own_cores: those that this process may run on.
        quota_cores: as many as it may use at a time by its control group; None: all.
        total_bytes, available_bytes, swap_bytes: memory of the machine.
        group_bytes, group_used_bytes, group_file: limit of the control group on memory, what it has in
            use, and the file that says so; None: no limit.
        oom_kills: processes of the control group that were killed for memory; None: not known.
        overcommit: Linux's `vm.overcommit_memory`; None: not known.
        huge_pages: `always`, `madvise` or `never`; empty: not known.
        limits: of this process, among `RLIMIT_DATA`, `RLIMIT_AS`, `RLIMIT_MEMLOCK`, `RLIMIT_NOFILE`.
        shm_bytes, shm_free_bytes: size of /dev/shm; None: there is none, or it cannot be written to.
        mallocs: libraries in this process that replace malloc, such as `libjemalloc.so.2`.
        infiniband: whether there is such a network.
    """

    system: str
    cores: int
    own_cores: int
    total_bytes: int
    available_bytes: int
    swap_bytes: int = 0
    quota_cores: float | None = None
    group_bytes: int | None = None
    group_used_bytes: int = 0
    group_file: str = ""
    oom_kills: int | None = None
    overcommit: int | None = None
    huge_pages: str = ""
    limits: Mapping[str, Limit] = field(default_factory=dict[str, Limit])
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    mallocs: tuple[str, ...] = ()
    infiniband: bool = False


@dataclass(frozen=True, slots=True)
class Enforcement:
    """Whether the kernel refuses memory beyond a limit on data: yes, unless `fault` says why not."""

    fault: str = ""


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface that is up, with its addresses of IPv4 and IPv6."""

    name: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Master:
    """The place where the environment says that ranks meet.

    Attributes:
        host: empty: not set.
        port: None: not set, or not a number.
        host_fault: why the name leads nowhere.
        here: whether it is this machine.
        port_free: whether a socket can be bound to it here; None: not tried.
        place: host and port in one; empty: neither is set.
    """

    host: str = ""
    port: int | None = None
    host_fault: str = ""
    here: bool = False
    port_free: bool | None = None
    place: str = ""


@dataclass(frozen=True, slots=True)
class Network:
    """The network, and who the environment says that this process is.

    Attributes:
        name: of this machine.
        address: to which the name leads.
        name_fault: why it leads nowhere.
        loopback_fault: why this machine does not reach itself.
        interfaces: that are up.
        master: where ranks are to meet.
        launcher: who started this process; empty: nobody that starts ranks.
        rank, world_size: that it was given; None: none.
        launcher_fault: what contradicts itself in the variables that say so.
    """

    name: str
    address: str = ""
    name_fault: str = ""
    loopback_fault: str = ""
    interfaces: tuple[Interface, ...] = ()
    master: Master = Master()
    launcher: str = ""
    rank: int | None = None
    world_size: int | None = None
    launcher_fault: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two processes that met and added up a tensor by gloo. `fault` is empty if they did."""

    interface: str = ""
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that is written to.

    Attributes:
        path: whole.
        fault: why a file cannot be written there; empty: one can.
        free_bytes: of its disk; None: not known.
    """

    path: str
    fault: str = ""
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Folders:
    """Where files go: what was measured, runs (by default), and what is short-lived."""

    cache: Folder
    runs: Folder
    temporary: Folder


@dataclass(frozen=True, slots=True)
class Facts:
    """All that was seen. `environment`: the variables that matter, of those that are set; `steps`: in
    the order of devices."""

    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    python: Python | None = None
    torch: Torch | None = None
    steps: tuple[Step, ...] = ()
    gpus: Gpus | None = None
    host: Host | None = None
    enforcement: Enforcement | None = None
    network: Network | None = None
    pair: Pair | None = None
    folders: Folders | None = None

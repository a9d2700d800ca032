"""Made-up machines, each with one thing broken: what the doctor says of it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.unit.doctor import machines
from tests.unit.doctor.machines import (
    GIB,
    GPUS,
    TORCH,
    WELL,
    Facts,
    broken_torch,
    folder,
    master,
    no_gpus,
    pair,
    step,
    user,
    with_,
)

from anybatch.doctor.check import LEAST, TESTED, is_before, relevant
from anybatch.doctor.examine import Silence
from anybatch.doctor.examine import findings as by_group
from anybatch.doctor.finding import Finding, Level
from anybatch.doctor.look import parse

ROOT = Path(__file__).parents[3]


def findings(facts: Facts, *silences: Silence) -> list[Finding]:
    groups = by_group(facts, silences)
    return [finding for group in groups.values() for finding in group]


def not_well(facts: Facts, *silences: Silence) -> list[Finding]:
    return [finding for finding in findings(facts, *silences) if finding.level != "ok"]


def test_where_all_is_well_nothing_is_told():
    assert not_well(WELL) == []
    assert all(by_group(WELL).values())


class Broken(NamedTuple):
    """One thing that is wrong, the finding that tells of it, and words of its sentence."""

    name: str
    level: Level
    words: tuple[str, ...]
    changes: dict[str, Any]


def gpu(**changes: Any) -> dict[str, Any]:
    """The first of the GPUs, changed."""
    return {"gpus": [{**GPUS["gpus"][0], **changes}, *GPUS["gpus"][1:]]}


def package(*arguments: str) -> dict[str, Any]:
    return {"python": {"packages": [machines.package(*arguments)]}}


def variable(name: str, value: str) -> dict[str, Any]:
    return {"environment": {name: value}}


NO_GPUS = no_gpus()
FOR_CPUS = {**TORCH, "cuda": "", "version": "2.13.0+cpu", "devices": [], "backends": ["gloo"]}
MISSING = "ImportError: libcudart.so.13: cannot open shared object file: No such file or directory"
USER = user(4711, "python", 20 * GIB)

PACKAGES = [
    Broken("torch", "problem", ("needs it", "'torch>=2.11'"), package("torch", "", "2.11")),
    Broken(
        "pydantic",
        "problem",
        ("needs 2 or later", "'pydantic>=2'"),
        package("pydantic", "", "2", "1.10.9"),
    ),
    Broken(
        "numpy",
        "problem",
        ("cannot be imported (ImportError: libblas)", "--force-reinstall numpy"),
        package("numpy", "", "", "2.4.0", "ImportError: libblas"),
    ),
    Broken("[slurm]", "note", ("anybatch[slurm]",), package("submitit", "slurm")),
    Broken(
        "[torchao]",
        "warning",
        ("0.18 or later is needed of torchao", "anybatch[torchao]"),
        package("torchao", "torchao", "0.18", "0.9.0"),
    ),
    Broken("anybatch", "note", ("not installed",), {"python": {"anybatch": "", "packages": ()}}),
    Broken("C++ compiler", "note", ("--compile", "g++"), {"python": {"compiler": ""}}),
]

TORCHES = [
    Broken(
        "torch", "problem", ("CUDA is missing", "LD_LIBRARY_PATH"), {"torch": broken_torch(MISSING)}
    ),
    Broken(
        "torch",
        "problem",
        ("No module", "pip install torch"),
        {"torch": broken_torch("ModuleNotFoundError: No module named 'torch'")},
    ),
    Broken(
        "torch",
        "problem",
        ("failed to map", "ulimit"),
        {"torch": broken_torch("ImportError: libtorch_cpu.so: failed to map segment")},
    ),
    Broken(
        "torch",
        "problem",
        ("undefined symbol", "several versions", "LD_PRELOAD"),
        {"torch": broken_torch("ImportError: /x/libtorch_cpu.so: undefined symbol: iJIT")},
    ),
    Broken(
        "torch",
        "problem",
        ("another module", "rename"),
        {"torch": broken_torch("it is another module of this name", "/home/me")},
    ),
    Broken("torch", "problem", ("2.11 or later",), {"torch": {"version": "2.10.1+cu126"}}),
    Broken("torch", "note", ("2.11 to 2.13",), {"torch": {"version": "2.14.0"}}),
    Broken(
        "steps on cuda:1",
        "problem",
        ("CUDA error", "CUDA_LAUNCH_BLOCKING"),
        {"steps": (step("cpu"), step("cuda:0"), step("cuda:1", "CUDA error: an illegal access"))},
    ),
    Broken("steps on cpu", "problem", ("-7 is right",), {"steps": (step("cpu", "-7 is right"),)}),
]

DRIVERS = [
    Broken(
        "driver",
        "note",
        ("no GPU of NVIDIA", "computes on the CPU"),
        {"gpus": NO_GPUS, "torch": {"devices": (), "cuda_fault": "no driver"}},
    ),
    Broken("driver", "note", ("torch sees its GPUs", "not known"), {"gpus": NO_GPUS}),
    Broken(
        "driver",
        "problem",
        ("2 GPUs are on the bus", "--gpus all", "NVRM", "version mismatch"),
        {"gpus": no_gpus("Driver/library version mismatch", on_bus=2), "torch": {"devices": ()}},
    ),
    Broken(
        "torch and CUDA",
        "warning",
        ("does not use them", "build for CUDA"),
        {"torch": FOR_CPUS, "steps": (step("cpu"),)},
    ),
    Broken(
        "torch and CUDA",
        "problem",
        ("driver shows 2", "unknown error"),
        {"torch": {"devices": (), "cuda_fault": "RuntimeError: CUDA unknown error"}},
    ),
    Broken(
        "torch and CUDA",
        "problem",
        ("too old", "update the driver", "CUDA 13.0"),
        {"torch": {"devices": (), "cuda_fault": "RuntimeError: the driver is too old"}},
    ),
    Broken(
        "steps on cuda:0",
        "problem",
        ("no kernel image", "build of torch for this GPU"),
        {"steps": [step("cpu"), step("cuda:0", "CUDA error: no kernel image is available")]},
    ),
]

CARDS = [
    Broken(
        "GPU 0", "problem", ("no process", "-c DEFAULT"), {"gpus": gpu(compute_mode="prohibited")}
    ),
    Broken(
        "GPU 0",
        "problem",
        ("one process at a time", "python (pid 4711)"),
        {"gpus": gpu(compute_mode="exclusive process", users=[USER])},
    ),
    Broken("GPU 0", "warning", ("3 errors", "replaced"), {"gpus": gpu(errors=3)}),
    Broken(
        "GPU 0",
        "warning",
        ("20.0 GiB are held", "python (pid 4711) with 20.0 GiB"),
        {"gpus": gpu(free_bytes=60 * GIB, users=[USER])},
    ),
    Broken(
        "GPU 0",
        "warning",
        ("outside this container", "and 1 more"),
        {"gpus": gpu(free_bytes=GIB, users=[user(i, "", None) for i in range(4)])},
    ),
    Broken("order of GPUs", "note", ("CUDA_DEVICE_ORDER=PCI_BUS_ID",), {"gpus": gpu(name="T4")}),
]

VISIBLE = [
    Broken(
        "CUDA_VISIBLE_DEVICES",
        "problem",
        ("'7' is none of this machine", "GPUs 0 to 1", "shows none"),
        variable("CUDA_VISIBLE_DEVICES", "7"),
    ),
    Broken(
        "CUDA_VISIBLE_DEVICES",
        "problem",
        ("'2'", "only the 1 before it"),
        variable("CUDA_VISIBLE_DEVICES", "1,2"),
    ),
    Broken("CUDA_VISIBLE_DEVICES", "problem", ("twice",), variable("CUDA_VISIBLE_DEVICES", "0,0")),
    Broken(
        "CUDA_VISIBLE_DEVICES", "warning", ("hides all 2",), variable("CUDA_VISIBLE_DEVICES", "")
    ),
    Broken(
        "CUDA_VISIBLE_DEVICES", "warning", ("hides all 2",), variable("CUDA_VISIBLE_DEVICES", "-1")
    ),
    Broken(
        "CUDA_VISIBLE_DEVICES",
        "problem",
        ("'MIG-1' is none",),
        variable("CUDA_VISIBLE_DEVICES", "MIG-1"),
    ),
    Broken(
        "CUDA_VISIBLE_DEVICES",
        "warning",
        ("no GPU is to be had",),
        {
            **variable("CUDA_VISIBLE_DEVICES", "7"),
            "gpus": NO_GPUS,
            "torch": FOR_CPUS,
            "steps": (step("cpu"),),
        },
    ),
]

HOSTS = [
    Broken(
        "cores",
        "warning",
        ("8 threads", "OMP_NUM_THREADS=2"),
        {"host": {"quota_cores": 2.5}},
    ),
    Broken("memory", "warning", ("nearly all",), {"host": {"available_bytes": GIB}}),
    Broken(
        "limit of the group",
        "warning",
        ("nearly all", "give the group more"),
        {
            "host": {
                "group_bytes": 8 * GIB,
                "group_used_bytes": 7.5 * GIB,
                "group_file": "/memory.max",
            }
        },
    ),
    Broken("killed for memory", "note", ("ran out", "--memory"), {"host": {"oom_kills": 2}}),
    Broken(
        "RLIMIT_DATA",
        "warning",
        ("data", "ulimit -d"),
        {"host": {"limits": {"RLIMIT_DATA": (GIB, None)}}},
    ),
    Broken(
        "RLIMIT_AS",
        "warning",
        ("addresses", "ulimit -v"),
        {"host": {"limits": {"RLIMIT_AS": (4 * GIB, None)}}},
    ),
    Broken(
        "open files",
        "warning",
        ("by a file", "ulimit -n 512"),
        {"host": {"limits": {"RLIMIT_NOFILE": (256, 512)}}},
    ),
    Broken(
        "open files",
        "warning",
        ("as root",),
        {"host": {"limits": {"RLIMIT_NOFILE": (256, 256)}}},
    ),
    Broken("/dev/shm", "warning", ("bus error", "--shm-size"), {"host": {"shm_bytes": 64 << 20}}),
    Broken("/dev/shm", "warning", ("have left there",), {"host": {"shm_free_bytes": 1 << 20}}),
    Broken("/dev/shm", "warning", ("--shm-size",), {"host": {"shm_bytes": None}}),
    Broken("malloc", "warning", ("LD_PRELOAD",), {"host": {"mallocs": ("libjemalloc.so.2",)}}),
    Broken(
        "budget on the CPU",
        "warning",
        ("no limit is enforced by darwin", "--memory"),
        {"enforcement": {"fault": "no limit is enforced by darwin"}},
    ),
]

NETWORKS = [
    Broken("gloo", "problem", ("could not meet", "refused"), {"pair": pair("lo", "refused")}),
    Broken("backends", "problem", ("no gloo",), {"torch": {"backends": ("nccl",)}}),
    Broken("backends", "problem", ("no NCCL", "2 GPUs"), {"torch": {"backends": ("gloo",)}}),
    Broken(
        "host name", "warning", ("no address", "/etc/hosts"), {"network": {"name_fault": "unknown"}}
    ),
    Broken("loopback", "problem", ("lo up",), {"network": {"loopback_fault": "unreachable"}}),
    Broken(
        "GLOO_SOCKET_IFNAME",
        "problem",
        ("'eth9'", "lo, eth0"),
        variable("GLOO_SOCKET_IFNAME", "eth9"),
    ),
    Broken("NCCL_SOCKET_IFNAME", "problem", ("'ib'",), variable("NCCL_SOCKET_IFNAME", "ib")),
    Broken(
        "started as",
        "problem",
        ("RANK is not set", "set both"),
        {
            **variable("WORLD_SIZE", "2"),
            "network": {"launcher_fault": "WORLD_SIZE is 2, but RANK is not set: set both."},
        },
    ),
    Broken(
        "MASTER_PORT",
        "problem",
        ("something listens on port 29500",),
        {
            **variable("MASTER_PORT", "29500"),
            "network": {
                "master": master("node1", 29500, is_taken=True),
                "launcher": "torchrun",
                "rank": 0,
                "world_size": 2,
            },
        },
    ),
    Broken(
        "MASTER_PORT",
        "warning",
        ("another port",),
        {
            **variable("MASTER_PORT", "29500"),
            "network": {"master": master("", 29500, is_taken=True)},
        },
    ),
    Broken("MASTER_PORT", "problem", ("1 to 65535",), variable("MASTER_PORT", "70000")),
    Broken(
        "MASTER_ADDR",
        "problem",
        ("leads nowhere (unknown)",),
        {
            **variable("MASTER_ADDR", "node9"),
            "network": {"master": master("node9", None, "unknown")},
        },
    ),
]

FOLDER = [
    Broken(
        "cache",
        "warning",
        ("Read-only", "XDG_CACHE_HOME"),
        {"folders": {"cache": folder("/c", "Read-only file system", GIB)}},
    ),
    Broken("runs", "warning", ("--out",), {"folders": {"runs": folder("/r", "Permission denied")}}),
    Broken("runs", "warning", ("nearly full",), {"folders": {"runs": folder("/r", "", 1 << 20)}}),
    Broken(
        "temporary files", "problem", ("TMPDIR",), {"folders": {"temporary": folder("", "nowhere")}}
    ),
]


def named(name: str, value: str, level: Level, *words: str, **more: Any) -> Broken:
    return Broken(name, level, words, {**variable(name, value), **more})


REFUSED = {"torch": {"allocator_fault": "ValueError: stoull"}}
REFUSED_ON_CPU = {"torch": {**FOR_CPUS, "allocator_fault": "ValueError: stoull"}, "gpus": NO_GPUS}

VARIABLES = [
    named("PYTORCH_ALLOC_CONF", "a", "problem", "(ValueError: stoull)", "option:value", **REFUSED),
    named("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:x", "problem", "stoull", **REFUSED),
    named("PYTORCH_ALLOC_CONF", "a", "warning", "stoull", **REFUSED_ON_CPU),
    named("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "warning", "is off"),
    named("OMP_NUM_THREADS", "64", "warning", "8 cores", "set it to 8"),
    named("OMP_NUM_THREADS", "many", "warning", "not a number"),
    named("OMP_NUM_THREADS", "1", "note", "of 8 cores"),
    named("CUBLAS_WORKSPACE_CONFIG", "big", "warning", ":4096:8"),
    named("CUDA_LAUNCH_BLOCKING", "1", "warning", "waits for each kernel"),
    named("NVIDIA_TF32_OVERRIDE", "1", "warning", "TensorFloat-32 whatever"),
    named("NVIDIA_TF32_OVERRIDE", "0", "warning", "nothing is in TensorFloat-32"),
    named("CUDA_MODULE_LOADING", "EAGER", "note", "holds more"),
    named("NCCL_P2P_DISABLE", "1", "warning", "by way of the host"),
    named("NCCL_DEBUG", "INFO", "note", "slower"),
    named("TORCHDYNAMO_DISABLE", "1", "note", "--compile"),
]

ALL = [
    *(*PACKAGES, *TORCHES, *DRIVERS, *CARDS, *VISIBLE),
    *(*HOSTS, *NETWORKS, *FOLDER, *VARIABLES),
]


@pytest.mark.parametrize("broken", ALL, ids=lambda one: f"{one.name}-{'-'.join(one.words)[:40]}")
def test_what_is_broken_is_told_with_a_remedy(broken: Broken):
    told = [one for one in not_well(with_(WELL, **broken.changes)) if one.name == broken.name]
    assert [one.level for one in told] == [broken.level]
    sentence = told[0].sentence
    assert not [word for word in broken.words if word.lower() not in sentence.lower()], sentence
    assert told[0].value


@pytest.mark.parametrize(
    "broken",
    [one for one in ALL if one.level in ("warning", "problem")],
    ids=lambda one: f"{one.name}-{'-'.join(one.words)[:40]}",
)
def test_warnings_and_problems_say_what_to_do(broken: Broken):
    for one in not_well(with_(WELL, **broken.changes)):
        if one.level in ("warning", "problem") and one.name != "budget on the CPU":
            assert one.meaning
            assert one.remedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_VISIBLE_DEVICES", "1,0"),
        ("CUDA_VISIBLE_DEVICES", "GPU-1a"),
        ("GLOO_SOCKET_IFNAME", "eth0"),
        ("NCCL_SOCKET_IFNAME", "^lo"),
        ("NCCL_SOCKET_IFNAME", "=eth0"),
        ("NCCL_SOCKET_IFNAME", "eth"),
        ("NCCL_P2P_LEVEL", "NVL"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        ("OMP_NUM_THREADS", "8"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8:16:8"),
        ("CUDA_LAUNCH_BLOCKING", "0"),
    ],
)
def test_variables_that_are_well_are_shown_and_no_more(name: str, value: str):
    assert not_well(with_(WELL, environment={name: value})) == []


def test_a_group_that_leaves_all_that_is_free_is_well():
    group = {"group_bytes": 63 * GIB, "group_used_bytes": GIB, "group_file": "/memory.max"}
    assert not_well(with_(WELL, host=group)) == []


def test_a_port_that_others_wait_at_is_in_use_as_it_should_be():
    """Rank 1 is told where rank 0 listens; ranks of torchrun, where the agent does."""
    environment = {"MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    place = master("node1", 29500, is_taken=True)
    network = {"master": place, "launcher": "torchrun", "rank": 0, "world_size": 2}
    assert not_well(with_(WELL, environment=environment, network=network)) == []
    del environment["TORCHELASTIC_USE_AGENT_STORE"]
    assert not_well(with_(WELL, environment=environment, network={**network, "rank": 1})) == []


def test_only_variables_that_matter_are_looked_at():
    environment = {"API_TOKEN": "secret", "NCCL_DEBUG": "WARN", "RANK": "0", "HOME": "/home/me"}
    assert relevant(environment) == {"NCCL_DEBUG": "WARN", "RANK": "0"}


@pytest.mark.parametrize("name", [name for name in WELL if name != "environment"])
def test_what_could_not_be_looked_at_stops_no_other(name: str):
    """Each record may be missing; the groups of the others are judged all the same."""
    nothing = {**dict.fromkeys(WELL), "steps": [], "environment": {}}
    without = {**WELL, name: nothing[name]}
    assert not [one for one in not_well(without) if one.name == "doctor"]
    alone = {**nothing, name: WELL[name]}
    assert not [one for one in findings(alone) if one.name == "doctor"]


def test_a_judge_that_fails_is_told_of():
    (told,) = not_well({**WELL, "folders": 3})
    assert (told.name, told.level) == ("doctor", "warning")
    assert "AttributeError" in told.sentence


@pytest.mark.parametrize(
    ("silence", "level", "words"),
    [
        (Silence("gpus", "no answer came within 20 s"), "problem", ("within 20 s", "NVRM")),
        (Silence("step cuda:1", "it was ended by SIGSEGV"), "problem", ("SIGSEGV", "Xid")),
        (Silence("step cpu", "it was ended by SIGILL"), "problem", ("lacks instructions",)),
        (Silence("torch", "it was ended by SIGBUS"), "problem", ("reinstall torch",)),
        (Silence("host", "no process could be started to look"), "warning", ("ulimit -a",)),
        (Silence("gpus", "ImportError: psutil"), "problem", ("reinstall the package",)),
        (Silence("folders", "no answer came within 15 s"), "problem", ("df",)),
    ],
)
def test_a_probe_without_an_answer_is_a_finding(
    silence: Silence, level: Level, words: tuple[str, ...]
):
    (told,) = not_well(WELL, silence)
    assert told.level == level
    assert not [word for word in words if word.lower() not in told.sentence.lower()], told.sentence


def test_two_processes_need_not_be_told_of_where_torch_is_broken():
    facts = with_(WELL, torch=broken_torch(MISSING), pair=pair("", MISSING), steps=[])
    assert [one.name for one in not_well(facts)] == ["torch"]


@pytest.mark.parametrize(
    ("version", "other", "earlier"),
    [
        ("2.9.1", "2.11", True),
        ("2.11.0+cpu", "2.11", False),
        ("2.11", "2.11.0", False),
        ("2.10.0", "2.11.0", True),
        ("2", "2.0.1", True),
        ("unknown", "2.11", False),
        ("3.0rc1", "2.11", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, other: str, earlier: bool):
    assert is_before(version, other) is earlier


def test_the_versions_of_torch_are_those_that_the_project_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert f"torch>={LEAST}" in project["dependencies"]
    pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    assert any(pin.startswith(f"torch=={TESTED}.") for pin in pins)


def test_every_requirement_of_the_project_is_read():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    written = [f"{one}; extra == 'all'" for name in extras if name != "dev" for one in extras[name]]
    assert len(parse([*project["dependencies"], *written])) == len(
        [*project["dependencies"], *written]
    )


def test_made_up_records_are_those_that_are_judged():
    """So that a test above does not pass because a group was empty."""
    names = {one.name for one in findings(WELL)}
    assert {"Python", "torch", "driver", "GPU 1", "cores", "gloo", "cache"} <= names

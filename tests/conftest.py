"""What holds for every test: it is deterministic, and it leaves nothing behind."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
from tests.crew import Crew
from tests.warm import Warm

from anybatch.engine import staging
from anybatch.runs import planning

try:
    import resource
except ImportError:  # not on Windows
    resource = None

# Threads and processes on their way out get this long to go; only a test that leaks waits for it.
GRACE_SECONDS = 30.0

# Environment variables that pytest and other libraries set when they are imported or first used.
FOREIGN_VARIABLES = frozenset(
    {
        "PYTEST_CURRENT_TEST",
        "KMP_DUPLICATE_LIB_OK",
        "KMP_INIT_AT_FORK",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",  # by which the compiler tells kernels a place
    }
)

# Helpers that multiprocessing starts once and keeps until the interpreter ends.
LASTING_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")

_caches: list[tempfile.TemporaryDirectory[str]] = []

hypothesis.settings.register_profile(
    "deterministic",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=50,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)


def pytest_configure(config: pytest.Config) -> None:
    # Shells start what runs in the background with SIGINT ignored, and processes hand that on.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hypothesis.settings.load_profile("deterministic")
    # What is measured on this machine goes into a cache of this run's own, and with it.
    _caches.append(tempfile.TemporaryDirectory(prefix="anybatch-cache-"))
    os.environ["XDG_CACHE_HOME"] = _caches[0].name
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        give_speeds()  # who only hands out tests needs none
    if hasattr(config, "workerinput"):
        # Workers share the cores: one thread each, and one in the processes that their tests start.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("MKL_NUM_THREADS", "1")
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker that is done takes tests from the other: by default each is given chunks of many, and
    the one with the long ones among them is waited for."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def give_speeds() -> None:
    """Put nominal speeds of this machine's processor where measured ones are looked for: then started
    processes, too, plan the same on every machine, and none stops to measure."""
    from anybatch.estimate import calibration as store
    from anybatch.machine import Machine

    device = Machine.here(device="cpu").device
    speeds = dataclasses.replace(store.nominal(device), measured=True)
    here = store.where(device)
    for threads in {1, here.threads, len(os.sched_getaffinity(0)), os.cpu_count() or 1}:
        path = dataclasses.replace(here, threads=threads).file("speeds")
        if not path.exists():
            store.write(path, store.SPEEDS, speeds)


def pytest_unconfigure() -> None:
    while _caches:
        os.environ.pop("XDG_CACHE_HOME", None)
        _caches.pop().cleanup()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and this machine has none")


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    """Runs a function as several ranks; see `tests/crew.py`."""
    crew = Crew()
    yield crew
    crew.close()


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Runs commands and scripts in processes that have torch already; see `tests/warm.py`."""
    warm = Warm()
    yield warm
    warm.close()


# ------------------------------------------------------------------------------------ leak police
#
# Autouse fixtures are set up before, and torn down after, the fixtures that a test asks for: what
# monkeypatch and the test's own fixtures put back in time is no leak. A leak is repaired before it
# is reported, so that it fails the test that left it and no other.


@pytest.fixture(autouse=True)
def environment_is_left_unchanged() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changes = []
    for name in sorted((before.keys() | after.keys()) - FOREIGN_VARIABLES):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        changes.append(f"{name} was {_shown(old)}, is {_shown(new)}")
        if old is None:
            del os.environ[name]
        else:
            os.environ[name] = old
    _fail_if(changes, "environment variables changed", "set them with monkeypatch.setenv")


@pytest.fixture(autouse=True)
def plans_are_predicted(request: pytest.FixtureRequest) -> Iterator[None]:
    """In this process a plan that a trace predicts is not rehearsed, so that tests of the planner and
    of what follows a plan depend on no measurement; but for tests marked `rehearsed`."""
    real = planning._is_rehearsed
    with pytest.MonkeyPatch.context() as patch:
        if "rehearsed" not in request.keywords:
            patch.setattr(
                planning,
                "_is_rehearsed",
                lambda task, plan, wanted: plan.prediction is None and real(task, plan, wanted),
            )
        yield


@pytest.fixture
def losses_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that count what a step calls: the first one does not look at whether the loss adds
    up."""
    monkeypatch.setattr(staging.Staging, "_check_loss", lambda *_: None)


@pytest.fixture(autouse=True)
def nothing_is_learned_for_later_tests() -> Iterator[None]:
    """Plans use how far predictions of earlier runs were off, and the choices that fitted."""
    yield
    shutil.rmtree(Path(_caches[0].name) / "anybatch" / "plans", ignore_errors=True)
    learned = list(Path(_caches[0].name).glob("anybatch/history-*"))
    for path in learned:
        path.unlink()
    if learned:
        give_speeds()  # which may have been found stale


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = _children()
    yield
    multiprocessing.active_children()  # collects those that have ended
    leaked = [child for child in _children() - before if not _is_lasting_helper(child)]
    _, leaked = psutil.wait_procs(leaked, timeout=GRACE_SECONDS if leaked else 0)
    described = [_described(child) for child in leaked]
    for child in leaked:
        if child.is_running():
            child.kill()
    psutil.wait_procs(leaked, timeout=GRACE_SECONDS if leaked else 0)
    _fail_if(described, "child processes left", "end and join them")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    lasting = _threads_of_the_compiler()
    leaked = [t for t in threading.enumerate() if t not in before | lasting and not t.daemon]
    deadline = time.monotonic() + GRACE_SECONDS
    for thread in leaked:
        thread.join(max(0.0, deadline - time.monotonic()))
    names = [thread.name for thread in leaked if thread.is_alive()]
    _fail_if(names, "threads left that would keep the interpreter alive", "stop and join them")


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    def initialized() -> bool:
        distributed = sys.modules.get("torch.distributed")
        return bool(distributed and distributed.is_available() and distributed.is_initialized())

    before = initialized()
    yield
    leaked = initialized() and not before
    if leaked:
        sys.modules["torch.distributed"].destroy_process_group()
    _fail_if(
        ["the default group"] if leaked else [],
        "torch.distributed process group left initialised",
        "call torch.distributed.destroy_process_group()",
    )


@pytest.fixture(autouse=True)
def torch_settings_are_restored() -> Iterator[None]:
    before = _torch_settings()
    yield
    if "torch" not in sys.modules:
        return
    # A test that was the first to import torch found it as torch ships it.
    before = before or _torch_settings_as_shipped()
    changes = [
        f"{name} was {before[name]}, is {value}"
        for name, value in _torch_settings().items()
        if value != before[name]
    ]
    if changes:
        _restore_torch_settings(before)
    _fail_if(changes, "torch settings changed", "put them back in a fixture or a with block")


@pytest.fixture(autouse=True)
def memory_limit_is_restored() -> Iterator[None]:
    if resource is None:
        yield
        return
    before, _ = resource.getrlimit(resource.RLIMIT_DATA)
    yield
    after, hard = resource.getrlimit(resource.RLIMIT_DATA)
    changes = []
    if after != before:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))
        changes.append(f"RLIMIT_DATA (soft) was {before}, is {after}")
    _fail_if(changes, "memory limit changed", "set it in a process of its own, or put it back")


def _fail_if(leaks: list[str], what: str, remedy: str) -> None:
    if leaks:
        pytest.fail(f"The test leaks. {what}: {'; '.join(leaks)}. Remedy: {remedy}.", pytrace=False)


def _shown(value: str | None) -> str:
    return "unset" if value is None else repr(value)


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _threads_of_the_compiler() -> set[threading.Thread]:
    """Threads of torch's compiler, which it keeps once it has compiled something for a CPU."""
    module = sys.modules.get("torch._inductor.async_compile")
    made = module and module.AsyncCompile.pool.cache_info().currsize
    return set(module.AsyncCompile.pool()._threads) if made else set()


def _is_lasting_helper(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return process.pid in Crew.pids | Warm.pids or any(
        helper in command for helper in LASTING_HELPERS
    )


def _described(process: psutil.Process) -> str:
    try:
        return f"process {process.pid} ({' '.join(process.cmdline())})"
    except psutil.Error:
        return f"process {process.pid}"


def _torch_settings() -> dict[str, Any]:
    if "torch" not in sys.modules:
        return {}
    torch = sys.modules["torch"]
    return {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic algorithms warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }


def _torch_settings_as_shipped() -> dict[str, Any]:
    return {
        "default dtype": sys.modules["torch"].float32,
        "grad mode": True,
        "deterministic algorithms": False,
        "deterministic algorithms warn only": False,
        "cudnn.deterministic": False,
        "cudnn.benchmark": False,
        "float32 matmul precision": "highest",
    }


def _restore_torch_settings(settings: Mapping[str, Any]) -> None:
    torch = sys.modules["torch"]
    torch.set_default_dtype(settings["default dtype"])
    torch.set_grad_enabled(settings["grad mode"])
    torch.use_deterministic_algorithms(
        settings["deterministic algorithms"],
        warn_only=settings["deterministic algorithms warn only"],
    )
    torch.backends.cudnn.deterministic = settings["cudnn.deterministic"]
    torch.backends.cudnn.benchmark = settings["cudnn.benchmark"]
    torch.set_float32_matmul_precision(settings["float32 matmul precision"])

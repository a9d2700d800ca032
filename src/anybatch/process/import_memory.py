"""Memory for the import of the libraries, which is checked before anything can be planned.

torch maps several hundred MiB of addresses. Under a limit on addresses (`ulimit -v`), its import
fails in whatever way the loader, C++ or a thread pool reacts: an ImportError, a MemoryError, a
crash. So the addresses that the limit leaves are compared with what torch's files need before they
are loaded. An import that is refused memory later raises the same error.
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from struct import iter_unpack, unpack_from

from anybatch.errors import NoPlanFits

_REFUSED = re.compile(r"cannot allocate memory(?! in static TLS)|failed to map segment", re.I)
_RESERVE = 384 << 20
"""Reserve for numpy, which is loaded with torch, for the first plan, and for the stacks and heaps
of threads, for each of which glibc reserves 64 MiB or more. With less, they fail in ways that
cannot be handled."""

_LIBRARIES = ("c10", "torch_cpu", "torch_cuda", "torch_hip", "torch_python")
_LOADED = 1  # PT_LOAD, the type of an ELF segment that is mapped

_REMEDY = (
    "lift it (`ulimit -v unlimited`), since it counts addresses, of which torch takes many and fills"
    " few, and bound training by --memory instead."
)


@contextmanager
def explained() -> Iterator[None]:
    """Context for importing libraries. Raises `NoPlanFits` if there is not enough memory for them."""
    try:
        yield
    except (ImportError, MemoryError, OSError) as error:
        if not _is_refused(error):
            raise
        raise NoPlanFits(_sentence(error)) from error


def check_addresses() -> None:
    """Raises `NoPlanFits` if the limit on this process's addresses leaves less than torch needs."""
    left = _addresses_left()
    if left is None or "torch" in sys.modules:
        return
    mapped = sum(map(mapped_bytes, _files_of_torch()))
    if left[1] < mapped + _RESERVE:
        what = f"torch needs {mapped >> 20} MiB for its code and {_RESERVE >> 20} MiB to start"
        raise NoPlanFits(_told(*left, what))


def mapped_bytes(library: Path) -> int:
    """Bytes of addresses that a shared library takes; 0 if it is not a 64-bit ELF file."""
    with library.open("rb") as file:
        head = file.read(64)
        if head[:6] != b"\x7fELF\x02\x01":
            return 0
        (offset,), (size, count) = unpack_from("<Q", head, 32), unpack_from("<HH", head, 54)
        file.seek(offset)
        table = file.read(size * count)
    segments = iter_unpack("<IIQQQQQQ", table)
    return max((at + length for kind, _, _, at, _, _, length, _ in segments if kind == _LOADED))


def _files_of_torch() -> Iterator[Path]:
    """The large libraries that importing torch always maps."""
    spec = find_spec("torch")  # does not import torch
    for folder in spec.submodule_search_locations or () if spec else ():
        for name in _LIBRARIES:
            path = Path(folder) / "lib" / f"lib{name}.so"
            if path.is_file():
                yield path


def _is_refused(error: BaseException) -> bool:
    is_code = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or is_code or _REFUSED.search(str(error)) is not None


def _sentence(error: BaseException) -> str:
    what = f"an import was refused memory ({str(error) or type(error).__name__})"
    left = _addresses_left()
    if left is not None:
        return _told(*left, what)
    return (
        f"{what}: see what else runs on this machine, and the limits of this process (`ulimit -a`)."
    )


def _told(limit: int, free: int, what: str) -> str:
    return (
        f"the limit of {limit >> 20} MiB on this process (RLIMIT_AS, ulimit -v) leaves {free >> 20} MiB"
        f" of addresses, and {what}: {_REMEDY}"
    )


def _addresses_left() -> tuple[int, int] | None:
    """The limit on this process's addresses and the bytes that it leaves; None if there is no
    limit."""
    if sys.platform != "linux":
        return None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return limit, max(0, limit - used * resource.getpagesize())

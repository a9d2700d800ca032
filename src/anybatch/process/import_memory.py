"""Memory for the import of the libraries, which is checked before anything can be planned.

torch maps several hundred MiB of addresses. Under a limit on addresses (`ulimit -v`), its import
fails in whatever way the loader, C++ or a thread pool reacts: an ImportError, a MemoryError, a
crash. So the addresses that the limit leaves are compared with what torch needs before it is
loaded. An import that is refused memory later raises the same error.
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from anybatch.errors import NoPlanFits

_REFUSED = re.compile(r"cannot allocate memory(?! in static TLS)|failed to map segment", re.I)
_NEEDED = 1 << 30
"""Addresses for torch on a CPU (350 MiB), for numpy, for the first plan, and for the stacks and
heaps of threads, for each of which glibc reserves 64 MiB or more. With less, they fail in ways that
cannot be handled."""

_REMEDY = (
    "lift it (`ulimit -v unlimited`), since it counts addresses, of which torch takes many and fills"
    " few, and bound training by a memory budget instead."
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
    if left is not None and left[1] < _NEEDED and "torch" not in sys.modules:
        raise NoPlanFits(_shortage(*left, f"torch needs {_NEEDED >> 20} MiB to start"))


def _is_refused(error: BaseException) -> bool:
    is_code = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or is_code or _REFUSED.search(str(error)) is not None


def _sentence(error: BaseException) -> str:
    what = f"an import was refused memory ({str(error) or type(error).__name__})"
    left = _addresses_left()
    if left is not None:
        return _shortage(*left, what)
    return (
        f"{what}: see what else runs on this machine, and the limits of this process (`ulimit -a`)."
    )


def _shortage(limit: int, free: int, what: str) -> str:
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

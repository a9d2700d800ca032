"""Settings of torch's CUDA allocator, as the environment has them: they decide what is reserved.

`PYTORCH_ALLOC_CONF`, or `PYTORCH_CUDA_ALLOC_CONF` as it was called first, lists options with their
values (`expandable_segments:True,max_split_size_mb:256`; torch's documentation, "Optimizing memory
usage"). Those that move the peak are followed; of the others that could, the plan tells.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

_OPTION = re.compile(r"([a-z_0-9]+)\s*:\s*(\[[^\]]*\]|[^,]*)")

_HARMLESS = {
    "garbage_collection_threshold",  # gives back more, and earlier
    "pinned_max_cached_size_mb",
    "pinned_max_power2_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_device_malloc",
}


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """What `CudaCache` is told.

    Attributes:
        expandable: `expandable_segments`.
        max_split_bytes: `max_split_size_mb`; None: no limit.
        ignored: options that may change what is reserved, and are not followed.
    """

    expandable: bool = False
    max_split_bytes: int | None = None
    ignored: tuple[str, ...] = ()


def settings_here() -> AllocatorSettings:
    """As the environment has them. What torch would not understand is left to torch."""
    told = next((os.environ[name] for name in _NAMES if os.environ.get(name)), "")
    expandable, most, ignored = False, None, list[str]()
    for name, value in _OPTION.findall(told.replace(" ", "")):
        if name == "expandable_segments":
            expandable = value == "True"
        elif name == "max_split_size_mb" and value.isdecimal():
            most = int(value) << 20
        elif (name, value) != ("backend", "native") and name not in _HARMLESS:
            ignored.append(f"{name}:{value}")
    return AllocatorSettings(expandable, most, tuple(ignored))


def allocator_notices() -> Iterator[str]:
    """What to say of settings in plans for CUDA: sentences."""
    here = settings_here()
    followed = ["expandable_segments"] if here.expandable else []
    followed += ["max_split_size_mb"] if here.max_split_bytes is not None else []
    name = next((name for name in _NAMES if os.environ.get(name)), "")
    if followed:
        yield (
            f"Bytes are those of an allocator under {' and '.join(followed)}, which {name} sets here."
            " Set it the same where you train."
        )
    if here.ignored:
        yield (
            f"{name} sets {', '.join(here.ignored)}, which the prediction of bytes does not follow:"
            " more may be reserved than is told."
        )

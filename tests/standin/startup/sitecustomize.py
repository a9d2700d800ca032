"""Read by every Python that is started with this folder in its path: `Computing` from its start to its
end. Speeds of a device that is not there mean nothing and take minutes, so they are not measured."""

from __future__ import annotations

import os
import sys

_MEASURES = "anybatch.estimate.calibration_apart"

if os.environ.get("NULL_CUDA_COMPUTES") and sys.prefix != sys.base_prefix:
    if _MEASURES in sys.orig_argv and any(word.startswith("cuda") for word in sys.orig_argv):
        os._exit(1)
    from computing import computing

    to_the_end = computing()  # it would end with the last reference to it
    to_the_end.__enter__()

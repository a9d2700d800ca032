"""Read by every Python that is started with this folder in its path: `Computing` from its start to its
end. Speeds of a device that is not there mean nothing and take minutes, so they are not measured."""

from __future__ import annotations

import os
import sys

_MEASURES = "anybatch.estimate.calibration"

if os.environ.get("NULL_CUDA_COMPUTES") and sys.prefix != sys.base_prefix:
    told = sys.orig_argv
    if any(_MEASURES in word for word in told) and any(word.startswith("cuda") for word in told):
        os._exit(1)
    from computing import computing

    to_the_end = computing()  # it would end with the last reference to it
    to_the_end.__enter__()

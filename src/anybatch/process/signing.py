"""Signatures of what the processes of a run tell each other as pickles, which run any code.

Whoever reaches a port of a run can write to it: other machines, and on one machine its other users.
"""

from __future__ import annotations

import hashlib
import hmac

SECRET = "ANYBATCH_RENDEZVOUS_SECRET"
"""The environment variable with the secret that the processes of a run share. Several machines are
given one; on one machine the ranks are given one of their own, which no other user can read."""

_SIZE = hashlib.sha256().digest_size


def signed(data: bytes, secret: str, purpose: str) -> bytes:
    """`data` with a signature before it, which holds for the `secret` and this `purpose` alone."""
    return _signature(data, secret, purpose) + data


def verified(data: bytes, secret: str, purpose: str) -> bytes | None:
    """What was `signed`; None: not with this secret, or not for this purpose."""
    signature, data = data[:_SIZE], data[_SIZE:]
    if not hmac.compare_digest(signature, _signature(data, secret, purpose)):
        return None
    return data


def _signature(data: bytes, secret: str, purpose: str) -> bytes:
    key = hashlib.sha256(f"anybatch {purpose}: {secret}".encode()).digest()
    return hmac.digest(key, data, "sha256")

"""Signatures of the pickles that the processes of a run exchange, since unpickling can execute any
code.

Any program that reaches a port of a run can write to it: on other machines, and on the same machine
those of other users.
"""

from __future__ import annotations

import hashlib
import hmac

SECRET = "ANYBATCH_RENDEZVOUS_SECRET"
"""Name of the environment variable with the secret that the processes of a run share. Several
machines are given the same secret; on one machine the ranks get a generated one, which no other
user can read."""

_SIZE = hashlib.sha256().digest_size


def signed(data: bytes, secret: str, purpose: str) -> bytes:
    """`data`, prefixed with a signature that is valid only for this `secret` and this `purpose`."""
    return _signature(data, secret, purpose) + data


def verified(data: bytes, secret: str, purpose: str) -> bytes | None:
    """The data that was `signed`; None if the signature is not valid for this secret and this
    purpose."""
    signature, data = data[:_SIZE], data[_SIZE:]
    if not hmac.compare_digest(signature, _signature(data, secret, purpose)):
        return None
    return data


def _signature(data: bytes, secret: str, purpose: str) -> bytes:
    key = hashlib.sha256(f"anybatch {purpose}: {secret}".encode()).digest()
    return hmac.digest(key, data, "sha256")

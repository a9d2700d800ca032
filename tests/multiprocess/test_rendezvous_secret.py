"""A stranger who reaches the rendezvous of several machines writes there, and runs nothing."""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.ports import free_port
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousStateError

from anybatch.errors import InputError
from anybatch.launch import call, read_secret
from anybatch.launch.network import LOOPBACK, Deadline, meet
from anybatch.launch.rendezvous import SignedBackend, of_machines

KEY = "torch.rendezvous.anybatch"
SECRET = "0123456789abcdef"
SECONDS = 120.0


class Attack:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def attack(tmp_path: Path) -> bytes:
    """A pickle that makes `tmp_path / "harm"`; that it does is checked here."""
    text = pickle.dumps(Attack(tmp_path / "harm"))
    pickle.loads(text)
    (tmp_path / "harm").rmdir()
    return text


@pytest.fixture
def store() -> TCPStore:
    return meet(LOOPBACK, 0, "host", Deadline(30), listen=LOOPBACK)


def test_a_state_comes_back_to_those_who_share_the_secret(store: TCPStore):
    one, other = SignedBackend(store, SECRET), SignedBackend(store, SECRET)
    assert one.get_state() is None
    written = one.set_state(b"first")
    assert written is not None
    assert written[0] == b"first"
    assert written[2]
    state, token = other.get_state() or (b"", None)
    assert state == b"first"
    assert (other.set_state(b"second", token) or (b"",))[0] == b"second"
    lost = one.set_state(b"third", written[1])  # it has been replaced
    assert lost is not None
    assert (lost[0], lost[2]) == (b"second", False)


@pytest.mark.parametrize("length", [0, 1, 31, 32, 200])
def test_an_unsigned_state_is_not_handed_to_torch(store: TCPStore, length: int):
    backend = SignedBackend(store, SECRET)
    store.set(KEY, base64.b64encode(b"x" * length).decode())
    with pytest.raises(RendezvousStateError, match="not signed"):
        backend.get_state()
    with pytest.raises(RendezvousStateError, match="not signed"):
        backend.set_state(b"mine")


def test_a_state_signed_with_another_secret_is_not_handed_to_torch(store: TCPStore):
    SignedBackend(store, "another secret of theirs").set_state(b"theirs")
    with pytest.raises(RendezvousStateError, match="not signed"):
        SignedBackend(store, SECRET).get_state()


def test_torch_unpickles_nothing_of_a_stranger(store: TCPStore, attack: bytes, tmp_path: Path):
    machines = of_machines(
        store,
        SECRET,
        LOOPBACK,
        least=1,
        most=2,
        join_seconds=5,
        last_call_seconds=1,
    )
    for text in (attack, b"s" * 32 + attack):
        store.set(KEY, base64.b64encode(text).decode())
        with pytest.raises(RendezvousStateError, match="not signed"):
            machines.next_rendezvous()
    assert not (tmp_path / "harm").exists()


AGENT = """
import os, sys
from anybatch.launch import call
call(os.getpid, ranks=1, nodes=2, rendezvous=sys.argv[1], timeout_seconds=60)
"""


def test_an_agent_that_a_stranger_writes_to_ends_and_says_so(attack: bytes, tmp_path: Path):
    place = f"127.0.0.1:{free_port()}"
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, place],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "ANYBATCH_RENDEZVOUS_SECRET": SECRET},
    )
    try:
        stranger = meet(LOOPBACK, int(place.rpartition(":")[2]), "guest", Deadline(SECONDS))
        while not stranger.check([KEY]):
            time.sleep(0.02)
        while agent.poll() is None:  # the agent writes its own state in between
            stranger.set(KEY, base64.b64encode(attack).decode())
            time.sleep(0.02)
    except RuntimeError:
        pass  # the agent, which serves the store, has ended
    finally:
        _, told = agent.communicate(timeout=SECONDS)
    assert agent.returncode == 1
    assert f"took no part in the run that met at {place}" in told.splitlines()[-1]
    assert "not signed with this machine's secret" in told.splitlines()[-1]
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(("secret", "state"), [("", "is missing"), ("short", "has 5 characters")])
def test_machines_without_a_secret_do_not_meet(
    secret: str, state: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ANYBATCH_RENDEZVOUS_SECRET", secret)
    with pytest.raises(InputError, match=f"secret of the rendezvous {state}"):
        call(os.getpid, ranks=1, nodes=2, rendezvous="127.0.0.1:29500")


def test_a_secret_is_read_from_a_file(tmp_path: Path):
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    assert read_secret(tmp_path / "secret") == SECRET
    with pytest.raises(InputError, match="nowhere"):
        read_secret(tmp_path / "nowhere")

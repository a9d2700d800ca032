"""Ranks in threads that take turns: what each sees is its own, and what one raises ends all."""

import gc
import os
import random
import signal
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from anybatch.compute.buckets import Buckets
from anybatch.errors import InputError, PeerFailed
from anybatch.parallel.in_process import InProcessRanks


@pytest.fixture
def ranks():
    with InProcessRanks(["cpu"] * 3) as found:
        yield found
    assert not [t for t in threading.enumerate() if t.name.startswith("anybatch-rank")]


class Patch:
    """A model and its gradients in buckets, as a replica keeps them."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.buckets = None

    def flatten(self):
        self.buckets = Buckets(list(self.model.parameters()))
        return self.buckets


def adopted(group, used=range(6)):
    """A patch whose gradients are 10 ** rank, for the parameters in `used`."""
    patch = Patch(seed=group.rank)
    group.prepare(patch.model)
    group.adopt(patch)
    for i, param in enumerate(patch.model.parameters()):
        if i in used:
            (param * 10.0**group.rank).sum().backward()
    return patch


# ---------------------------------------------------------------------------------------- the protocol


def test_values_of_all_ranks_by_rank(ranks):
    assert ranks.run(lambda group: group.exchange(group.rank * 2)) == [0, 2, 4]
    assert ranks.run(lambda group: (group.rank, group.size)) == (0, 3)


def test_rank_0_works_in_the_thread_of_the_caller_and_the_others_in_their_own(ranks):
    def where(group):
        return group.exchange(threading.get_ident())

    first, second = ranks.run(where), ranks.run(where)
    assert first == second
    assert first[0] == threading.get_ident()
    assert len(set(first)) == 3


def test_one_rank_at_a_time_in_the_order_of_ranks(ranks):
    order = []

    def work(group):
        for _ in range(3):
            order.append(group.rank)
            group.between_passes()
        group.exchange(None)

    ranks.run(work)
    assert order == [0, 1, 2] * 3


def test_weights_are_those_of_rank_0(ranks):
    def work(group):
        patch = Patch(seed=group.rank)
        group.prepare(patch.model)
        return group.exchange(patch.model.state_dict())

    states = ranks.run(work)
    for name, value in Patch(seed=0).model.state_dict().items():
        assert all(torch.equal(state[name], value) for state in states)


def test_gradients_are_summed_and_the_same_on_all_ranks(ranks):
    def work(group):
        patch = adopted(group)
        group.gather(failed=False)
        assert group.agree(torch.zeros(3, dtype=torch.float64)) is not None
        return group.exchange([param.grad.clone() for param in patch.model.parameters()])

    for gradients in ranks.run(work):
        assert all(torch.equal(g, torch.full_like(g, 111.0)) for g in gradients)


def test_a_parameter_that_no_rank_used_has_no_gradient(ranks):
    def work(group):
        patch = adopted(group, used={0: (0, 1), 1: (1, 2), 2: ()}[group.rank])
        group.gather(failed=False)
        group.agree(torch.zeros(3, dtype=torch.float64))
        return group.exchange([p.grad is not None for p in patch.model.parameters()])

    assert ranks.run(work) == [[True, True, True, False, False, False]] * 3


def test_totals_of_different_lengths_are_summed(ranks):
    mine = [[1.0, 2.0, 0.0], [10.0, 20.0, 0.0, 5.0, 1.0], [100.0, 200.0, 1.0]]

    def work(group):
        return group.agree(torch.tensor(mine[group.rank], dtype=torch.float64), note=group.rank)

    agreed = ranks.run(work)
    assert agreed.totals == [111.0, 222.0, 1.0, 5.0, 1.0]
    assert (agreed.lengths, agreed.notes) == ((3, 5, 3), (0, 1, 2))


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_failed_fails_the_vote(ranks, failing):
    def work(group):
        failed = group.rank == failing
        patch = adopted(group)
        group.gather(failed)
        agreed = group.agree(None if failed else torch.ones(3, dtype=torch.float64))
        kept = float(next(patch.model.parameters()).grad[0, 0])
        return group.exchange((agreed, kept))

    assert ranks.run(work) == [(None, 1.0), (None, 10.0), (None, 100.0)]


def test_all_devices_have_their_work_before_one_is_waited_for(ranks):
    order = []

    def work(group):
        adopted(group)
        order.append("queued")

        def held(module, name):
            order.append("read")
            return module._buffers[name]

        group.staged(held)

    ranks.run(work)
    assert order[:3] == ["queued"] * 3
    assert set(order[3:]) == {"read"}


def test_what_others_give_is_a_copy(ranks):
    def work(group):
        mine = [group.rank]
        everyone = group.exchange(mine)
        assert everyone[group.rank] is mine
        everyone[(group.rank + 1) % 3].append("changed")
        group.exchange(None)
        return mine

    assert ranks.run(work) == [0]


def test_two_ranks_with_one_model_are_told(ranks):
    shared = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="train the same model"):
        ranks.run(lambda group: group.prepare(shared))


def test_a_single_rank_needs_no_thread():
    with InProcessRanks(["cpu"]) as ranks:
        before = threading.active_count()
        assert ranks.run(lambda group: group.exchange(threading.active_count())) == [before]


# --------------------------------------------------------------------------------------- random state


def draws():
    return random.random(), torch.rand(()).item(), float(np.random.rand())  # noqa: NPY002


def test_each_rank_draws_from_its_own_generators(ranks):
    def seed(group):
        random.seed(group.rank)
        torch.manual_seed(group.rank)
        np.random.seed(group.rank)  # noqa: NPY002

    def draw(group):
        mine = []
        for i in range(4):
            mine.append(draws())
            if i % 2 == group.rank % 2:
                group.between_passes()
        return group.exchange(mine)

    ranks.run(seed)
    first, second = ranks.run(draw), ranks.run(draw)
    for rank in range(3):
        seed(SimpleNamespace(rank=rank))
        expected = [draws() for _ in range(8)]
        assert first[rank] + second[rank] == expected


def test_the_caller_keeps_the_generators_of_rank_0(ranks):
    def draw(group):
        draws()
        group.between_passes()
        return draws()

    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    expected = [draws() for _ in range(3)]
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    assert [ranks.run(draw), draws()] == expected[1:]


def test_the_modes_of_the_caller_hold_on_all_ranks(ranks):
    def modes(group):
        return group.exchange((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    assert ranks.run(modes) == [(True, False)] * 3
    with torch.no_grad(), torch.autocast("cpu"):
        assert ranks.run(modes) == [(False, True)] * 3
    assert ranks.run(modes) == [(True, False)] * 3


# ------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_the_error_of_a_rank_is_raised_as_it_is(ranks, failing, place):
    ends = {}

    def work(group):
        try:
            for now in ("before", "between", "after"):
                if group.rank == failing and now == place:
                    raise KeyError(f"{place} on {failing}")
                if now != "after":
                    group.exchange(now)
            ends[group.rank] = "done"
        except PeerFailed as error:
            ends[group.rank] = str(error)
            raise

    with pytest.raises(KeyError, match=f"{place} on {failing}") as caught:
        ranks.run(work)
    assert caught.value.__notes__ == [f"raised on rank {failing} of 3, cpu"]
    others = {rank: end for rank, end in ends.items() if rank != failing}
    told = f"rank {failing} failed with KeyError: '{place} on {failing}'."
    assert set(others.values()) == ({"done"} if place == "after" else {told})
    assert ranks.run(lambda group: group.exchange(group.rank)) == [0, 1, 2]


def test_the_first_of_several_errors_is_raised(ranks):
    def work(group):
        if group.rank != 1:
            group.between_passes()
        raise ValueError(group.rank)

    with pytest.raises(ValueError, match="1"):
        ranks.run(work)


def test_ranks_that_part_ways_are_told(ranks):
    with pytest.raises(
        PeerFailed, match=r"rank 1 has ended, while rank 2 waits for it in exchange"
    ):
        ranks.run(lambda group: group.rank == 1 or group.exchange(0))
    with pytest.raises(PeerFailed, match="rank 1 has come to agree, and others to exchange"):
        ranks.run(lambda group: group.agree(None) if group.rank == 1 else group.exchange(0))


def test_a_run_inside_a_run_is_told(ranks):
    with pytest.raises(RuntimeError, match="at work already"):
        ranks.run(lambda group: ranks.run(lambda inner: 1))
    assert ranks.run(lambda group: 1) == 1


def test_an_error_leaves_nothing_alive(ranks):
    """Its traceback holds what the failed work held; once it is dropped, all of it is gone."""
    held = []

    def work(group):
        tensor = torch.zeros(1000)
        held.append(weakref.ref(tensor))
        group.exchange(None)
        if group.rank == 2:
            raise KeyError("gone")
        group.exchange(None)

    gc.disable()
    try:
        with pytest.raises(KeyError, match="gone"):
            ranks.run(work)
        alive = [ref() is not None for ref in held]
    finally:
        gc.enable()
    assert alive == [False] * 3


@pytest.fixture
def ctrl_c():
    """Ctrl-C raises KeyboardInterrupt, as in a script; whoever runs the tests may have changed that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_main():
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_while_rank_0_has_the_turn(ranks, ctrl_c):
    def work(group):
        group.exchange(None)
        if group.rank == 0:
            interrupt_main()
            time.sleep(5)
        group.exchange(None)

    with pytest.raises(KeyboardInterrupt):
        ranks.run(work)
    assert ranks.run(lambda group: group.exchange(group.rank)) == [0, 1, 2]


@pytest.mark.parametrize("place", ["pass", "meeting", "end"])
@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupt_while_another_rank_has_the_turn(ranks, ctrl_c, place, times):
    """Ctrl-C reaches the thread of the caller, which waits. The other rank is let finish its pass."""
    running = []

    def work(group):
        running.append(group.rank)
        if group.rank == 0 and place == "pass":
            group.between_passes()
        if group.rank == 0 and place == "end":
            running.remove(0)
            return
        if group.rank == 1:
            for _ in range(times):
                interrupt_main()
                time.sleep(0.01)
            if place == "meeting":
                assert running == [0, 1]
        if place != "end":
            group.exchange(None)
        running.remove(group.rank)

    with pytest.raises(KeyboardInterrupt):
        ranks.run(work)
    running.clear()
    assert ranks.run(lambda group: group.exchange(group.rank)) == [0, 1, 2]


def test_interrupts_at_any_moment_leave_no_deadlock(monkeypatch):
    """Many runs, each struck by a signal at another moment; every rank is there for the next run."""
    # An interrupt in a finalizer is not raised, but given to this hook; pytest's is Python code that
    # the next interrupt may strike, upon which pytest fails the test.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    stop = threading.Event()

    def strike():
        wait = 0.0005
        while not stop.wait(wait):
            wait = 0.0005 + (wait * 1.618) % 0.003
            interrupt_main()

    def work(group):
        for _ in range(5):
            group.exchange(None)
            group.between_passes()

    outcomes = set()
    with InProcessRanks(["cpu"] * 3) as ranks:
        ranks.run(work)
        before = signal.getsignal(signal.SIGINT)
        striking = [False]

        def handler(number, frame):
            if striking[0]:
                raise KeyboardInterrupt

        signal.signal(signal.SIGINT, handler)
        striker = threading.Thread(target=strike)
        striker.start()
        try:
            for _ in range(150):
                try:
                    striking[0] = True
                    ranks.run(work)
                    striking[0] = False
                    outcomes.add("done")
                except KeyboardInterrupt:
                    striking[0] = False
                    outcomes.add("interrupted")
        finally:
            striking[0] = False
            stop.set()
            striker.join()
            signal.signal(signal.SIGINT, before)
        assert ranks.run(lambda group: group.exchange(group.rank)) == [0, 1, 2]
    assert "interrupted" in outcomes


@pytest.mark.parametrize(
    ("devices", "shares"), [([], None), (["cpu"], (1, 1)), (["cpu", "cpu"], (1,))]
)
def test_shares_that_do_not_go_with_the_devices_are_told(devices, shares):
    with pytest.raises(InputError, match="one share for each"):
        InProcessRanks(devices, shares)

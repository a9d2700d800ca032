"""SIGINT that waits for the end of a block."""

from __future__ import annotations

import signal
import threading

import pytest

from anybatch.process.interrupts import handle, held

done: list[int] = []


@pytest.fixture(autouse=True)
def python_s_own_handler():
    done.clear()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before or signal.SIG_DFL)


def strike(times=1, error=None):
    """Within a block, be interrupted; then end, or fail."""
    with held(), held():
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        done.append(signal.SIGINT)
        if error is not None:
            raise error


def test_an_interrupt_comes_out_at_the_end():
    with pytest.raises(KeyboardInterrupt):
        strike()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_nothing_comes_out():
    with held():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_comes_out_after_an_error_too():
    with pytest.raises(KeyboardInterrupt) as raised:
        strike(error=ValueError())
    assert isinstance(raised.value.__context__, ValueError)


def test_each_one_is_handled_by_whom_it_finds():
    """As in a run that is asked to stop: the first interrupt sets the handler of the second."""
    came = []

    def first(number, frame):
        came.append(len(done))
        handle(signal.SIGINT, signal.default_int_handler)

    handle(signal.SIGINT, first)
    with pytest.raises(KeyboardInterrupt):
        strike(times=2)
    assert came == [1]


def test_a_handler_that_is_set_meanwhile_answers_at_the_end():
    came = []
    with held():
        handle(signal.SIGINT, lambda number, frame: came.append(number))
        signal.raise_signal(signal.SIGINT)
        assert not came
    assert came == [signal.SIGINT]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_where_python_does_not_answer_nothing_is_changed(handler):
    signal.signal(signal.SIGINT, handler)
    with held():
        assert signal.getsignal(signal.SIGINT) is handler


def test_in_another_thread_nothing_is_changed():
    def work():
        with held():
            seen.append(signal.getsignal(signal.SIGINT))

    seen = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]

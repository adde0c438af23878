"""Signals and maintenance notices become requests to stop."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from metadata_server import metadata_server

from jaxtrain.run.attempts.signals import STOP_SIGNALS, maintenance_notices, notice, stop_signals


class Asked:
    """Requests to stop, and a way to wait for one."""

    def __init__(self):
        self.names = []
        self.came = threading.Event()

    def __call__(self, name):
        self.names.append(name)
        self.came.set()


@pytest.fixture(autouse=True)
def hangup_is_not_ignored():
    """As it is where the suite runs under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_each_signal_asks_to_stop_by_its_name(number):
    asked = Asked()
    before = [signal.getsignal(one) for one in STOP_SIGNALS]
    with stop_signals(asked):
        os.kill(os.getpid(), number)
        assert asked.came.wait(10)
    assert asked.names == [signal.Signals(number).name]
    assert [signal.getsignal(one) for one in STOP_SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_second_interrupt_interrupts():
    asked = Asked()

    def interrupt_twice():
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.came.wait(10)
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(10)

    with stop_signals(asked), pytest.raises(KeyboardInterrupt):
        interrupt_twice()


def test_the_first_interrupt_is_answered_at_once(capsys):
    asked = Asked()
    with stop_signals(asked, answer="stopping"):
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.came.wait(10)
        asked.came.clear()
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.came.wait(10)
    assert capsys.readouterr().err == "jaxtrain: stopping\n"
    assert asked.names == ["SIGTERM", "SIGINT"]


def test_a_second_interrupt_stops_now_where_somebody_can():
    asked, stopped = Asked(), threading.Event()
    with stop_signals(asked, stop_now=stopped.set):
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.came.wait(10)
        assert not stopped.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped.wait(10)
    assert asked.names == ["SIGINT"]


def test_under_nohup_a_closed_terminal_stops_nothing():
    asked = Asked()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_signals(asked):
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.came.wait(10)
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN
    assert asked.names == ["SIGTERM"]


def test_another_signals_number_is_not_a_request():
    asked, heard = Asked(), threading.Event()
    before = signal.signal(signal.SIGUSR2, lambda *_: heard.set())
    with stop_signals(asked):
        os.kill(os.getpid(), signal.SIGUSR2)
        assert heard.wait(10)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.came.wait(10)
    signal.signal(signal.SIGUSR2, before)
    assert asked.names == ["SIGTERM"]


BUSY = """
import ctypes
from jaxtrain.run.attempts.attempt import stop_signals

def stop(name):
    print("asked by", name, flush=True)

with stop_signals(stop):
    c, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    c.pthread_mutex_lock(mutex)
    print("in C", flush=True)
    c.pthread_mutex_lock(mutex)
"""


def test_a_request_does_not_wait_for_the_main_thread():
    """The main thread waits in C for a lock that it holds itself: no handler of Python's runs."""
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "in C\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "asked by SIGTERM\n"
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_in_another_thread_no_handler_is_set():
    found = []

    def work():
        with stop_signals(found.append):
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]


@pytest.fixture
def server():
    """A metadata server on loopback; its answers by path can be set."""
    answers = {}
    with metadata_server(answers) as address:
        yield address, answers


@pytest.mark.parametrize(
    ("path", "answer", "alarm"),
    [
        ("instance/maintenance-event", "NONE", False),
        ("instance/maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", True),
        ("instance/preempted", "FALSE", False),
        ("instance/preempted", "TRUE", True),
    ],
)
def test_only_an_announced_end_is_a_notice(server, path, answer, alarm):
    host, answers = server
    answers[path] = answer
    assert notice(host) == (f"{path} {answer}" if alarm else None)


def test_a_notice_asks_to_stop(server):
    host, answers = server
    asked = Asked()
    environment = {"GCE_METADATA_HOST": host}
    with maintenance_notices(asked, environment, on_google_cloud=False, period_seconds=0.02):
        answers["instance/preempted"] = "TRUE"
        assert asked.came.wait(10)
    assert asked.names == ["instance/preempted TRUE"]


def test_a_server_that_is_not_there_announces_nothing():
    assert notice("127.0.0.1:1") is None


def test_elsewhere_nobody_is_asked():
    before = threading.active_count()
    with maintenance_notices(Asked(), {}, on_google_cloud=False):
        assert threading.active_count() == before

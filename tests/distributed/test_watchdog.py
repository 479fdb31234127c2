"""A run that hangs ends, and shows where; several processes stop after the same step."""

import math
import os
import signal
import types

import pytest
from small_run import command

from bert_jax.distributed import watchdog
from bert_jax.storage import retry


@pytest.mark.parametrize(
    ("hang", "code"),
    [
        ("time.sleep(60)", 74),
        # As C code that waits and never gives the interpreter's lock back.
        pytest.param(*("ctypes.PyDLL(None).sleep(60)", -signal.SIGALRM), marks=pytest.mark.long),
    ],
)
def test_a_hang_is_tried_again_also_where_no_thread_can_run(hang, code):
    program = (
        "import ctypes, time\n"
        "from bert_jax.distributed import watchdog\n"
        "watchdog._KILL = 1.0\n"
        "watchdog.Watchdog(1.0).reset()\n" + hang
    )
    done = command("-c", program)
    assert done.returncode == code
    assert b"Timeout (0:00:01.100000)!" in done.stderr and b'File "<string>", line 5' in done.stderr


def test_until_when_nothing_may_happen(monkeypatch):
    """Three timers that are set together, later with `times`, and not at all after a pause."""
    now, shows, alarms = [1000.0], [], []
    monkeypatch.delenv("BERT_JAX_HANG_AFTER", raising=False)
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    handler = watchdog.faulthandler
    monkeypatch.setattr(handler, "dump_traceback_later", lambda s, file: shows.append(s))
    monkeypatch.setattr(handler, "cancel_dump_traceback_later", lambda: shows.append(0.0))
    monkeypatch.setattr(watchdog.signal, "setitimer", lambda which, s: alarms.append(s))
    dog = watchdog.Watchdog(100.0)
    dog._watch = object()  # no thread
    assert dog._deadline == float("inf")
    dog.reset()
    assert 1100 < dog._deadline < 1110 and 100 <= shows[-1] < alarms[-1] < 150
    now[0] += 50.0
    dog.reset()
    assert 1150 < dog._deadline < 1160 and len(shows) == len(alarms) == 2
    dog.reset(times=2)
    assert 1250 < dog._deadline < 1260 and 200 <= shows[-1] < alarms[-1] < 250
    dog.pause()
    assert dog._deadline == float("inf") and shows[-1] == alarms[-1] == 0.0
    dog.reset(times=2)  # at the same time as before
    assert 1250 < dog._deadline < 1260 and 200 <= shows[-1] < alarms[-1]
    never = watchdog.Watchdog(0.0)
    never.reset()
    assert never._deadline == float("inf") and len(shows) == len(alarms) == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_heard_where_nobody_can_be_shown_so(number, monkeypatch):
    """As where Ctrl-C has ended `tee` first: the state is saved all the same."""
    monkeypatch.setattr(retry.control, "deadline", math.inf)  # put back
    reader, writer = os.pipe()
    os.close(reader)
    shown = os.dup(2)
    try:
        os.dup2(writer, 2)
        with watchdog.StopRequest(types.SimpleNamespace(count=1)) as stop:
            signal.raise_signal(number)
    finally:
        os.dup2(shown, 2)
        os.close(shown), os.close(writer)
    assert stop.requested and retry.control.deadline < math.inf


def test_processes_ask_about_each_step_once_and_stop_together(monkeypatch):
    """Also after a roll-back, which does steps again."""
    asked = []

    def reached(number):
        asked.append(number)
        return number == 8

    monkeypatch.setattr(watchdog.multihost_utils, "reached_preemption_sync_point", reached)
    stop = watchdog.StopRequest(types.SimpleNamespace(count=2))
    for done in (5, 6, 3):
        stop.on_step(done)
        assert not stop.requested
    stop.on_step(4)
    assert stop.requested and asked == [5, 6, 7, 8]

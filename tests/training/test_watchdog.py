"""A run that hangs ends, and shows where; several processes stop after the same step."""

import signal
import types

import pytest
from small_run import command

from bert_jax.running import watchdog


@pytest.mark.parametrize(
    ("hang", "code"),
    [
        ("time.sleep(60)", 74),
        # As C code that waits and never gives the interpreter's lock back.
        ("ctypes.PyDLL(None).sleep(60)", -signal.SIGALRM),
    ],
)
def test_a_hang_is_tried_again_also_where_no_thread_can_run(hang, code):
    program = (
        "import ctypes, time\n"
        "from bert_jax.running import watchdog\n"
        "watchdog._STUCK = 1.0\n"
        "watchdog.Watchdog(1.0).reset()\n" + hang
    )
    done = command("-c", program)
    assert done.returncode == code
    assert b"Timeout (0:00:01.100000)!" in done.stderr and b'File "<string>", line 5' in done.stderr


def test_processes_ask_about_each_step_once_and_stop_together(monkeypatch):
    """Also after a roll-back, which does steps again."""
    asked = []

    def reached(number):
        asked.append(number)
        return number == 8

    monkeypatch.setattr(watchdog.multihost_utils, "reached_preemption_sync_point", reached)
    stop = watchdog.StopRequest(types.SimpleNamespace(count=2))
    for done in (5, 6, 3):
        stop.after_step(done)
        assert not stop.requested
    stop.after_step(4)
    assert stop.requested and asked == [5, 6, 7, 8]

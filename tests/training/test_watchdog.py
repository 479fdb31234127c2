"""A run that hangs ends, and shows where."""

import signal

import pytest
from small_run import command


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

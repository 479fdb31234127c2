"""A run that hangs ends, and shows where."""

import pathlib
import signal

import pytest
from small_run import command, write_text

MEMBER = pathlib.Path(__file__).parent / "pod_member.py"


@pytest.mark.long
def test_a_run_that_hangs_ends_with_the_stacks_of_its_threads(tmp_path):
    file = write_text(tmp_path)
    run = ("pretrain", file, "--workdir", tmp_path / "w", "--set", "run.hang_after_seconds=10")
    done = command(MEMBER, tmp_path / "rows", 0, 5, "hang", *run)
    assert done.returncode == 74
    err = done.stderr.decode()
    assert "Timeout (0:00:10.500000)!" in err and "pod_member.py" in err and "in noting" in err
    assert (tmp_path / "w" / "checkpoints" / "4").exists()


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

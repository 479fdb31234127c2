"""What a run says about its speed: tokens that are no padding, and the share that is; to nobody."""

import builtins
import io
import os
import subprocess
import sys
import time
import types

import pytest
from rich.console import Console

from bert_jax.running.progress import Clock, Counts, LineConsole, Progress


def test_the_rate_that_is_shown_counts_no_padding():
    clock = Clock(peak_flops=1e12)
    seconds = clock.end_window(Counts(steps=10, tokens=10_000, flops=10**9), filled=0.25)
    assert seconds["padding"] == 0.75
    assert seconds["real_tokens_per_second"] == pytest.approx(250 * seconds["steps_per_second"])
    utilisation = 1e8 * seconds["steps_per_second"] / 1e12
    assert seconds["utilisation"] == pytest.approx(utilisation)
    assert seconds["real_utilisation"] == pytest.approx(utilisation / 4)
    seconds["real_tokens_per_second"] = 7_653.2
    text = io.StringIO()
    Progress(Console(file=text, width=200)).show_training_line({"step": 10, "loss": 1.5}, seconds)
    assert "loss 1.500  7,653 tokens/s, 75% padding  " in text.getvalue()


@pytest.mark.parametrize(
    ("what", "is_of_steps"),
    [
        ("data", True),
        *((name, False) for name in ("compilation", "evaluation", "probes", "checkpoint")),
    ],
)
def test_what_is_no_step_does_not_slow_the_rate_down(what, is_of_steps, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = Clock()
    with clock.waiting(what):
        now[0] += 30.0
    now[0] += 10.0
    lap = clock.end_window(Counts(steps=20, tokens=100))
    assert (lap["seconds"], lap[f"{what}_seconds"]) == (40.0, 30.0)
    assert lap["steps_per_second"] == pytest.approx(0.5 if is_of_steps else 2.0)


def test_where_all_steps_were_skipped_no_rate_is_shown():
    """No step says then how much of its rows was padding."""
    seconds = Clock(None).end_window(Counts(steps=10, tokens=10_000))
    assert "real_tokens_per_second" not in seconds and "padding" not in seconds
    text = io.StringIO()
    Progress(Console(file=text, width=200)).show_training_line(
        {"step": 10, "bad_steps": 1.0}, seconds
    )
    assert "tokens/s" not in text.getvalue() and "100% of steps skipped" in text.getvalue()


def test_the_time_left_leaves_out_compilation_and_counts_saves():
    text = io.StringIO()
    progress = Progress(Console(file=text, width=200))
    with progress.bar(50, 110):
        compiled = {"steps": 10, "seconds": 100.0, "compilation_seconds": 90.0}
        progress.show_training_line({"step": 60, "loss": 1.5}, compiled)
        saved = {"steps": 10, "seconds": 30.0, "checkpoint_seconds": 20.0}
        progress.show_training_line({"step": 70, "loss": 1.5}, saved)
    first, second = text.getvalue().splitlines()
    assert first.endswith("  50 s left")
    assert second.endswith("  1 min left")


def test_a_notebook_shows_all_lines_as_one_text(monkeypatch, capsys):
    """Not each as an output of its own, which is what rich does by IPython.display."""
    shell = type("ZMQInteractiveShell", (), {})  # by which rich knows Jupyter
    outputs, display = [], types.ModuleType("IPython.display")
    monkeypatch.setattr(builtins, "get_ipython", shell, raising=False)
    monkeypatch.setattr(display, "display", outputs.append, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    Console().print("zero")
    assert len(outputs) == 1
    progress = Progress(LineConsole())
    progress.report("one")
    with progress.bar(0, 20):
        progress.show_training_line({"step": 10, "loss": 1.5}, {})
    assert len(outputs) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first == "one" and second.startswith("step 10/20  loss 1.500")


def saying(words: str, **places) -> subprocess.Popen:
    """A process that shows lines as a run does."""
    program = (
        "import os, sys\n"
        "from bert_jax.running.progress import LineConsole, Progress\n"
        f"progress = Progress(LineConsole())\n{words}\nsys.stdout.flush()\n"
    )
    return subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, **places)


def test_a_line_for_which_a_disk_has_no_room_is_left_out():
    """Of it nothing waits for the end, either, where it would be a run's failure."""
    with open("/dev/full", "wb") as full:
        one = saying("progress.report('one')\nos.dup2(2, 1)\nprogress.report('two')", stdout=full)
    assert one.communicate()[1] == b"two\n" and one.returncode == 0


def test_a_terminal_that_is_gone_ends_nothing():
    """Also where a bar is shown on it."""
    words = "with progress.bar(0, 2):\n    sys.stdin.readline()\n    progress.report('one')"
    reader, terminal = os.openpty()
    one = saying(f"{words}\nprogress.report('two')", stdin=subprocess.PIPE, stdout=terminal)
    os.close(terminal)
    shown = b""
    while b"0/2" not in shown:
        shown += os.read(reader, 1000)
    os.close(reader)
    assert one.communicate(b"\n")[1] == b"" and one.returncode == 0

import os
import platform
import re
import subprocess
import sys
import time

import pytest

from bert_jax import process, system

ONE_CORE = """
import os
from bert_jax import system
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
print(system.cores())
"""
PARENT = """
import subprocess, sys
from bert_jax import system
code = "import sys, time; print('up', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code], preexec_fn=system.die_with_parent)
sys.stdin.read()
"""
ECHO = """
import sys
from bert_jax import system
system.restart_in_utf8_mode()
print(open(sys.argv[1]).read(), *map(ascii, sys.argv[1:]))
"""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("option", [[], ["-X", "utf8=0"]])
def test_words_and_files_are_utf8_where_the_locale_knows_only_ascii(tmp_path, option):
    """An option wins over the variable: then Python stays as it is, and is not started for ever."""
    (tmp_path / "béll.txt").write_text("Größe 😀", encoding="utf-8")
    code = ECHO.replace("open(sys.argv[1]).read(), ", "") if option else ECHO
    command = [sys.executable, *option, "-c", code, tmp_path / "béll.txt", "the béll 😀"]
    done = subprocess.run(command, capture_output=True, env=os.environ | ASCII, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    if not option:
        assert done.stdout.startswith("Größe 😀 ".encode())
        assert done.stdout.endswith(ascii("the béll 😀").encode() + b"\n")


def test_cores_are_those_that_this_process_may_use():
    done = subprocess.run([sys.executable, "-c", ONE_CORE], capture_output=True, check=True)
    assert done.stdout == b"1\n"


def test_a_child_dies_with_a_killed_parent():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout.readline() == b"up\n"
        began = time.monotonic()
        parent.kill()
        assert parent.stdout.read() == b""  # the child has let go of it, too
    assert time.monotonic() - began < 60


def test_where_linux_is_not(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(system, "_LIBC", object())
    assert system.cores() == os.cpu_count()
    system.die_with_parent()
    system.use_one_memory_pool()


KEEPING = """
import resource, sys, threading
import numpy as np
from bert_jax import system

system.use_one_memory_pool()
pages = []


def use_and_free():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.empty(100 * 2**20, np.uint8).fill(1)
    pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


def twice():
    system.keep_freed_memory()
    use_and_free()
    use_and_free()


thread = threading.Thread(target=twice)
thread.start()
thread.join()
sys.exit(pages[1] > pages[0] / 10)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of the GNU C library alone")
def test_memory_that_a_thread_has_freed_is_used_again():
    """A hundred megabytes, as of logits: without one pool they are faulted in again each time."""
    assert subprocess.run([sys.executable, "-c", KEEPING], check=False).returncode == 0


def test_log_lines_name_severity_time_and_process_unless_on_a_terminal(capsys, monkeypatch):
    handlers = [*process.logger.handlers]
    process.prepare_process()  # once more: adds no second handler
    assert process.logger.handlers == handlers
    monkeypatch.setattr(process, "index", 2)
    process.logger.warning("a %s", "line")
    assert re.fullmatch(r"W\d{4} \d\d:\d\d:\d\d process 2\] a line\n", capsys.readouterr().err)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    process.logger.warning("a line")
    assert capsys.readouterr().err == "a line\n"

import os
import subprocess
import sys
import time

from bert_jax import system

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

"""Worker processes: what arrives, and when they end."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import dying
import pytest

from bert_jax.data.workers import Worker, WorkerDied, wait


@pytest.fixture
def worker():
    with contextlib.closing(Worker()) as started:
        yield started


def call(worker, function, *arguments):
    worker.start(function, *arguments)
    return worker.result()


class BadArgument:
    """Cannot be made in the worker."""

    def __reduce__(self):
        return os.stat, ("/none",)


def test_results_and_errors_of_one_call_after_another_arrive(worker):
    assert call(worker, len, b"1" * 10**7) == 10**7  # more than a pipe holds
    for function, argument in ((os.stat, "/none"), (len, BadArgument())):
        with pytest.raises(FileNotFoundError, match="/none"):
            call(worker, function, argument)
    with pytest.raises(BaseException, match="as pyo3 raises it"):
        call(worker, dying.fail, "panic")
    with pytest.raises(RuntimeError, match=r"ValueError: \('m', <function"):
        call(worker, dying.fail, "unpicklable")
    with pytest.raises(RuntimeError, match="Unreadable: m and 1"):
        call(worker, dying.fail, "unreadable")
    assert call(worker, os.getpid) == worker.process.pid
    assert call(worker, os.getsid, 0) == worker.process.pid  # Ctrl-C does not reach it


def test_calls_that_ended_are_told_from_others_and_a_death_has_its_code(worker):
    with contextlib.closing(Worker()) as other:
        other.start(dying.sleep)
        worker.start(dying.kill_worker)
        assert wait([other, worker]) == [worker] and wait([other], 0) == []
    for _ in range(2):
        with pytest.raises(WorkerDied, match="code -9"):
            call(worker, os.getpid)


def test_output_goes_to_standard_error_or_a_file(tmp_path, capfd):
    with open(tmp_path / "output", "wb") as file:
        pair = Worker(), Worker({**os.environ, "WORD": "b"}, file)
    for one in pair:
        with contextlib.closing(one):
            call(one, os.system, "echo a$WORD; echo error >&2")
    assert capfd.readouterr() == ("", "a\nerror\n")
    assert (tmp_path / "output").read_text() == "ab\nerror\n"


# Started by a thread that ends, without `if __name__ == "__main__"`.
PARENT = """
import sys, time, threading
sys.path.insert(0, sys.argv[1])
import dying
from bert_jax.data.workers import Worker
workers = []
starter = threading.Thread(target=lambda: workers.append(Worker()))
starter.start()
starter.join()
workers[0].start(dying.sleep)
print(workers[0].process.pid, flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("end", ["kill", "leave", "interrupt"])
def test_a_worker_ends_with_its_parent_in_the_middle_of_a_call(end):
    seconds = "0" if end == "leave" else "100"
    command = [sys.executable, "-c", PARENT, os.path.dirname(dying.__file__), seconds]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, start_new_session=True, text=True, **pipes) as parent:
        status = pathlib.Path(f"/proc/{int(parent.stdout.readline())}/status")
        if end != "leave":  # Ctrl-C reaches a group, perhaps while the worker starts
            number = signal.SIGINT if end == "interrupt" else signal.SIGKILL
            os.killpg(parent.pid, number)
        parent.wait(20)
        limit = time.monotonic() + 20
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            while "State:\tZ" not in status.read_text():
                assert time.monotonic() < limit
                time.sleep(0.01)
        assert parent.stderr.read().count("Traceback") == (end == "interrupt")


PREPARING = """
import sys
from etils import epath
from bert_jax.config import Corpus
from bert_jax.data import corpus, parts
print("top level")
parts.PART_BYTES = 2_000
claim = Corpus(sources=("text:" + sys.argv[1],), layout="sentences_by_line", validation_share=0.2)
corpus.prepare(claim, 60, epath.Path(sys.argv[2]), lambda line: None, workers=2)
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["script", "-c", "stdin"])
def test_a_script_without_a_guard_is_run_once(how, tmp_path):
    text = "".join(f"Aa bb {n:b} cc.\nDd {n:b} ee.\n\n" for n in range(200))
    (tmp_path / "text.txt").write_text(text.replace("1", "k").replace("0", "l"))
    (tmp_path / "script.py").write_text(PREPARING)
    program = {"script": [str(tmp_path / "script.py")], "-c": ["-c", PREPARING], "stdin": ["-"]}
    done = subprocess.run(
        [sys.executable, *program[how], str(tmp_path / "text.txt"), str(tmp_path / "made")],
        input=PREPARING if how == "stdin" else "",
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("top level\n", "")
    assert (tmp_path / "made" / "COMPLETE").exists()

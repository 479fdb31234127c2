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
from bert_jax.errors import InputError


@pytest.fixture
def worker():
    with contextlib.closing(Worker()) as started:
        yield started


def call(worker, function, *arguments):
    worker.start(function, *arguments)
    return worker.result()


def test_a_worker_makes_one_call_after_another(worker):
    pids = [call(worker, os.getpid) for _ in range(3)]
    assert pids == [worker.process.pid] * 3
    assert call(worker, len, b"1" * 10**7) == 10**7  # more than a pipe holds


def test_calls_that_ended_are_told_from_those_that_did_not(worker):
    with contextlib.closing(Worker()) as other:
        other.start(dying.sleep)
        worker.start(os.getpid)
        assert wait([other, worker]) == [worker] and wait([other], 0) == []
        other.process.kill()
        assert wait([other]) == [other]


def test_errors_arrive(worker):
    with pytest.raises(FileNotFoundError, match="/none"):
        call(worker, os.stat, "/none")
    with pytest.raises(dying.Panic):
        call(worker, dying.fail, "panic")
    with pytest.raises(RuntimeError, match="Unpicklable: m"):
        call(worker, dying.fail, "unpicklable")
    with pytest.raises(RuntimeError, match="Unreadable: m and 1"):
        call(worker, dying.fail, "unreadable")
    with pytest.raises(InputError, match="of the arguments"):
        call(worker, len, BadArgument())
    assert call(worker, os.getpid) == worker.process.pid


class BadArgument:
    """Cannot be made in the worker."""

    def __reduce__(self):
        return dying.refuse, ("of the arguments",)


def test_a_death_is_an_error_with_its_code(worker):
    with pytest.raises(WorkerDied, match="code -9"):
        call(worker, dying.kill_worker)
    with pytest.raises(WorkerDied) as caught:
        call(worker, os.getpid)
    assert caught.value.code == -signal.SIGKILL


def test_output_goes_to_standard_error(capfd):
    with contextlib.closing(Worker()) as worker:
        call(worker, dying.print_line)
    out, err = capfd.readouterr()
    assert out == "" and err.count("of a library\n") == 2


def test_output_goes_to_the_file(tmp_path, capfd):
    environment = {**os.environ, "PYTHONUNBUFFERED": "yes"}
    with (
        open(tmp_path / "output", "wb") as file,
        contextlib.closing(Worker(environment, file)) as w,
    ):
        call(w, dying.print_line)
        assert call(w, os.getenv, "PYTHONUNBUFFERED") == "yes"
    assert (tmp_path / "output").read_text().count("of a library\n") == 2
    assert capfd.readouterr() == ("", "")


# --- the end of a worker ---

# Without `if __name__ == "__main__"`, as users write scripts.
SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
import dying, threading
from bert_jax.data.workers import Worker
worker = Worker()
starter = threading.Thread(target=worker.start, args=(dying.sleep,))
starter.start()
starter.join()
print(worker.process.pid, flush=True)
"""


def is_running(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return "State:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    return False


@pytest.mark.parametrize("end", ["kill", "leave", "interrupt"])
def test_a_worker_ends_with_its_parent(end, tmp_path):
    text = SCRIPT.format(tests=os.path.dirname(dying.__file__))
    text += "" if end == "leave" else "time.sleep(100)"
    (tmp_path / "script.py").write_text(text)
    command = [sys.executable, str(tmp_path / "script.py")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        pid = int(parent.stdout.readline())
        began = time.monotonic()
        if end == "kill":
            parent.kill()
        elif end == "interrupt":  # as by Ctrl-C, at any moment of the worker's start
            os.killpg(parent.pid, signal.SIGINT)
        parent.wait(20)
        while is_running(pid):
            assert time.monotonic() - began < 20
            time.sleep(0.01)
        assert parent.stdout.read() == ""
        errors = parent.stderr.read()
    # The parent alone is interrupted.
    assert errors.count("Traceback") == (end == "interrupt")


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
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "top level\n", "")
    assert (tmp_path / "made" / "COMPLETE").exists()

"""Runs side by side in processes of their own: the same results, and what happens to processes."""

import concurrent.futures
import os
import pathlib
import shutil
import threading
import time

import pytest
import suite_data
import tuned
from broken import fails, said
from etils import epath
from test_suite_runs import SMALL, results

from bert_jax import config, system
from bert_jax.data.workers import WorkerDied
from bert_jax.errors import InputError
from bert_jax.tools.benchmark.device_workers import DeviceWorkers, bytes_of_run, environment_of


def pause(path):
    """Waits until two processes have called this; returns the number of this one."""
    pathlib.Path(f"{path}.{os.getpid()}").touch()
    deadline = time.monotonic() + 60
    while len([*pathlib.Path(path).parent.glob(f"{pathlib.Path(path).name}.*")]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return os.getpid()


def die_unless_alone(path):
    """Dies if another process is in this function, too, or was when that one died."""
    others = [*pathlib.Path(path).parent.glob(f"{pathlib.Path(path).name}.*")]
    mine = pathlib.Path(f"{path}.{os.getpid()}")
    mine.touch()
    time.sleep(0.5)
    if others or len([*mine.parent.glob(f"{pathlib.Path(path).name}.*")]) > 1:
        mine.unlink()
        os._exit(9)
    time.sleep(1)
    mine.unlink()
    return "alone"


def refuse(text):
    raise InputError(text)


def wait_for_ever(path):
    pathlib.Path(path).touch()
    time.sleep(600)


@pytest.fixture
def workers(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    made = DeviceWorkers(2, epath.Path(tmp_path / "logs"))
    yield made
    made.close()


@pytest.mark.long
def test_calls_run_side_by_side_and_raise_their_errors(workers, tmp_path):
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        first = [threads.submit(workers.call, pause, str(tmp_path / "a")) for _ in range(2)]
        processes = {call.result() for call in first}
        assert len(processes) == 2 and os.getpid() not in processes
        with pytest.raises(InputError, match="no such"):
            workers.call(refuse, "no such")
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        "process-0.log",
        "process-1.log",
    }


@pytest.mark.long
def test_a_process_that_dies_beside_another_is_tried_again_alone(workers, tmp_path):
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        path = str(tmp_path / "b")
        calls = [threads.submit(workers.call, die_unless_alone, path) for _ in range(2)]
        assert [call.result() for call in calls] == ["alone", "alone"]
    with pytest.raises(WorkerDied):
        workers.call(os._exit, 3)


@pytest.mark.long
def test_the_end_of_the_workers_ends_their_calls(workers, tmp_path):
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(workers.call, wait_for_ever, tmp_path / f"{i}") for i in range(3)]
        while not (tmp_path / "0").exists() and not (tmp_path / "1").exists():
            time.sleep(0.01)
        threading.Timer(0.2, workers.close).start()
        for call in calls:
            with pytest.raises(WorkerDied):
                call.result()


def test_no_more_run_at_once_than_the_memory_holds(workers, monkeypatch):
    monkeypatch.setattr(system, "free_memory", lambda: 10 * 10**9)
    assert [workers.fit_to_memory(n * 10**9) for n in (20, 6, 5, 1)] == [1, 1, 2, 2]
    (task,) = (t.experiment for t in config.load_suite("glue").tasks if t.name == "MNLI")
    base = config.load("bert_base").model
    # BERT-Base with 32 rows of 128 tokens: 1.8 GB for Adam, and some gigabytes of activations.
    assert 4e9 < bytes_of_run(base, 110_000_000, task) < 9e9
    assert system.free_memory() > 10**7


def test_each_process_sees_its_part_of_the_accelerators(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(system, "accelerator_count", lambda: 4)
    seen = [environment_of(number, 2) for number in range(2)]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in seen] == ["0,1", "2,3"]
    assert [e["TPU_VISIBLE_CHIPS"] for e in seen] == ["0,1", "2,3"]
    assert {e["TPU_CHIPS_PER_PROCESS_BOUNDS"] for e in seen} == {"1,2,1"}
    assert environment_of(3, 4)["TPU_VISIBLE_CHIPS"] == "3"
    words = "benchmark glue --from base --data data --side-by-side 3"
    suite_data.glue(pathlib.Path("data"))
    fails(words, "--side-by-side", "4 devices")
    monkeypatch.setattr(system, "accelerator_count", lambda: 0)
    assert environment_of(0, 2) == {}


@pytest.mark.nightly
def test_a_suite_side_by_side_ends_at_the_same_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tuned.write_base(tmp_path / "base")
    suite_data.glue(tmp_path / "data")
    (tmp_path / "small.py").write_text(SMALL)
    shutil.copy(config.files.SHIPPED / "suites/glue.py", tmp_path)
    words = "benchmark small.py --from base --data data --rules intermediate --seeds 2"
    words += " --set=task.max_sequence_length=32 --set=epochs=2 --out"
    said(f"{words} one_by_one")
    printed = said(f"{words} at_once --side-by-side 2")
    assert "2 runs side by side" in printed
    assert results("at_once") == results("one_by_one")
    logs = [path.read_text() for path in pathlib.Path("at_once/processes").iterdir()]
    assert len(logs) == 2 and all("finetune:" in log for log in logs)
    assert "finetune:" not in printed
    # Nothing is run again, in either way.
    assert "MNLI, " not in said(f"{words} at_once")

"""An experiment on a local pod: the same specification as elsewhere, and the same retries."""

import pathlib
import shlex
import subprocess

import pytest
from small_run import final_state, write_text

from bert_jax import config, errors
from bert_jax.config import code
from bert_jax.tools.verify import pod
from launch import __main__


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("pod") / "it's $(odd)")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BERT_JAX_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.long
def test_an_experiment_is_run_as_it_was_resolved_here(small, cache, tmp_path, capfd):
    words = [str(small), "--workdir", str(tmp_path / "run"), "--processes", "1"]
    words += ["--set", "phases.0.steps=3", "--set", "phases.1.steps=1"]
    assert __main__.main(["local", *words, "--set", "run.corpus_dir="]) == errors.FINISHED
    assert final_state(tmp_path / "run")[0] == 4
    assert "[0] finished: step 4" in capfd.readouterr().out


def test_a_dry_run_is_a_script_that_holds_it_all(small, cache, tmp_path, capfd):
    workdir, given = tmp_path / "a run", ["--devices-per-process", "4", "--slices", "3"]
    words = [str(small), "--workdir", str(workdir), "--set", "phases.1.steps=9", "--retries", "2"]
    words += ["--dry-run", "--processes", "3", "--extend"]
    assert __main__.main(["local", *words, *given]) == errors.FINISHED
    script = capfd.readouterr().out
    *files, start = script.splitlines()
    start = shlex.split(start)
    assert start[1:5] == ["-m", "launch", "local", "--processes=3"]
    assert start[5:7] == ["--devices-per-process=4", "--slices=3"]
    assert start[9] == "--retries=2" and start[11:] == ["--workdir", str(workdir), "--extend"]
    subprocess.run(["bash"], input="\n".join(files).encode(), check=True)
    shipped = config.load(start[10])
    assert shipped == config.override(config.load(str(small)), ["phases.1.steps=9"])


def test_own_code_of_a_resolved_experiment_is_named(cache, tmp_path, monkeypatch, capfd):
    file = pathlib.Path("experiments/electra.py")
    (tmp_path / "it.json").write_text(config.to_json(config.load(str(file))))
    monkeypatch.setattr(code, "_loaded", {})
    monkeypatch.setattr(code, "_named_paths", [])
    words = ["local", str(tmp_path / "it.json"), "--dry-run"]
    assert __main__.main(words) == errors.BAD_INPUT and "--code FILE" in capfd.readouterr().err
    assert __main__.main([*words, "--code", str(file)]) == errors.FINISHED
    assert file.read_text() in capfd.readouterr().out


@pytest.mark.parametrize(
    ("endings_", "starts", "code"),
    [
        ([(75, False), (137, False), (0, False)], 3, 0),  # preempted, killed, finished
        ([(134, False), (75, False), (134, False), (0, False)], 3, 134),  # two retries, no more
        ([(75, True), (0, False)], 1, 75),  # the user's own wish
        ([(1, False), (0, False)], 1, 1),  # would fail again
        ([(2, False), (0, False)], 1, 2),
    ],
)
def test_it_is_started_again_after_a_preemption_or_a_loss(
    endings_, starts, code, small, cache, tmp_path, monkeypatch
):
    left, commands = list(endings_), []

    def run(command, **shape):
        commands.append(tuple(command))
        return pod.PodResult(*left.pop(0))

    monkeypatch.setattr(pod, "run", run)
    words = [str(small), "--workdir", str(tmp_path / "run"), "--retries", "2"]
    assert __main__.main(["local", *words]) == code
    assert len(commands) == starts and len(set(commands)) == 1


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--"],
        ["experiments/tiny.py", "--", "true"],
        ["--set", "seed=1", "--", "true"],
        ["experiments/tiny.py", "--retries", "-1"],
    ],
)
def test_what_cannot_be_is_refused(words):
    with pytest.raises(SystemExit) as caught:
        __main__.main(["local", *words])
    assert caught.value.code == errors.BAD_INPUT

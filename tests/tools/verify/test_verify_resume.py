"""`bert-jax verify-resume` as a user runs it: a round of each kind, and a run that is not sound."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from broken import asked
from etils import epath
from small_run import OBJECTIVES, pretrain, run_bert_jax, saves_in, settings, write_text

from bert_jax import config
from bert_jax.tools.verify import compare, kills

HERE = pathlib.Path(__file__).parent
KINDS = tuple(kills.KINDS)


@pytest.fixture(scope="module")
def verified(tmp_path_factory):
    """A round of each kind: the folder, and what was printed."""
    folder = tmp_path_factory.mktemp("verify")
    done = run_bert_jax(
        "verify-resume", write_text(folder), "--workdir", folder / "v", "--rounds", len(KINDS),
        "--set", "optimizer.bad_steps_in_a_row=3", timeout=600,
    )  # fmt: skip
    printed = done.stdout.decode()
    assert done.returncode == 0, printed + done.stderr.decode()
    return folder / "v", printed.splitlines()


@pytest.mark.nightly
def test_rounds_of_two_objectives_find_no_difference(tmp_path):
    """Of full rows read from the left, and then of pairs; others differ in less."""
    sets = [word for setting in OBJECTIVES["phases"] for word in ("--set", setting)]
    file = write_text(tmp_path)
    done = run_bert_jax(
        "verify-resume", file, "--workdir", tmp_path / "v", "--rounds", 2, *sets, timeout=600
    )
    printed = done.stdout.decode()
    assert done.returncode == 0, printed + done.stderr.decode()
    assert printed.splitlines()[-1] == "verify-resume: 2 kills, 0 differences"


@pytest.fixture(scope="module")
def alike(tmp_path_factory):
    """A folder as `verify-resume` leaves it, with the same run under both names."""
    folder = tmp_path_factory.mktemp("alike")
    assert pretrain(write_text(folder), folder / "undisturbed")[0] == "finished"
    shutil.copytree(folder / "undisturbed", folder / "killed")
    shutil.copy(folder / "undisturbed" / "experiment.json", folder)
    return folder


@pytest.mark.nightly
def test_a_round_of_each_kind_finds_no_difference(verified):
    folder, printed = verified
    assert printed[-1] == f"verify-resume: {len(KINDS)} kills, 0 differences"
    summary = {line[:27].strip(): line[27:].split() for line in printed[-30:]}
    for kind in KINDS:
        assert summary[kind] == ["1", "0"]
    assert not any("difference:" in line or "left out" in line for line in printed)
    first = next(i for i, line in enumerate(printed) if line.startswith("round"))
    lines = [line.split() for line in printed[first + 1 : first + 1 + len(KINDS)]]
    assert [int(words[0]) for words in lines] == list(range(1, len(KINDS) + 1))
    assert {words[-2] for words in lines} == {"-9", "75"}
    for *_, began, done, _, _ in lines[1:]:
        assert int(began) <= int(done) <= 22
    text = "\n".join(printed)
    for what in (
        "0  undisturbed: each of 144 rows trained on once",
        "0  undisturbed: rolled back over steps ",
        "0  killed: parameters, optimizer and counters: ",
        "0  killed: metrics.jsonl: 12 lines, byte for byte",
        "0  killed: predictions.jsonl: 4 lines, byte for byte",
        "0  killed: each of 144 rows trained on once",
    ):
        assert what in text
    assert json.loads((folder / "verify.json").read_text()) == {
        "format_version": 1, "experiment": "small", "rounds": len(KINDS), "seed": 0,
    }  # fmt: skip


# --- what would be found ------------------------------------------------------------------------


def experiment_of(folder):
    return config.from_json((folder / "experiment.json").read_text(), "experiment.json")


@pytest.mark.long
def test_a_flipped_bit_of_a_parameter_is_named(alike, tmp_path):
    experiment = experiment_of(alike)
    shutil.copytree(alike / "killed", tmp_path / "killed")
    checkpoints = epath.Path(tmp_path / "killed" / "checkpoints")
    state, metadata = compare.last_state(experiment, tmp_path / "killed")
    words = state["params"]["encoder"]["embeddings"]["word"]
    table = np.array(words["embedding"])
    table.view(np.uint32).ravel()[7] ^= 1
    words["embedding"] = table
    state = jax.device_put(state)
    (checkpoints / "22").rmtree()
    with saves_in(tmp_path / "killed", experiment.run) as saved:
        loss = metadata.pop("held_out_loss")
        del metadata["checksums"]
        saved.save(22, state, metadata, loss)
    (line,) = compare.states(experiment, tmp_path / "killed", alike / "undisturbed").differences
    assert (
        "1 of 94 arrays differ, the first is params/encoder/embeddings/word/embedding, by " in line
    )
    assert not compare.states(experiment, alike / "killed", alike / "undisturbed").differences


@pytest.mark.long
@pytest.mark.parametrize("name", ["metrics.jsonl", "predictions.jsonl"])
def test_a_changed_line_is_named(name, alike, tmp_path):
    lines = (alike / "killed" / name).read_text().splitlines(keepends=True)
    changed = [*lines[:2], lines[2].replace("0.", "0.0", 1), *lines[3:]]
    for text, where in ((changed, 3), (lines[:-1], len(lines)), ([*lines, "{}\n"], len(lines) + 1)):
        (tmp_path / name).write_text("".join(text))
        (line,) = compare.json_lines(name, tmp_path, alike / "undisturbed").differences
        assert line.startswith(f"{name}:{where} differs: ")


@pytest.mark.long
def test_another_corpus_is_named(alike, tmp_path):
    shutil.copytree(alike / "corpus", tmp_path / "corpus")
    assert compare.corpora(tmp_path / "corpus", alike / "corpus") == []
    ids = tmp_path / "corpus" / "stream" / "train" / "ids.npy"
    ids = ids if ids.exists() else next((tmp_path / "corpus" / "stream" / "train").glob("ids*"))
    ids.write_bytes(ids.read_bytes()[:-1] + b"\x07")
    (tmp_path / "corpus" / "COMPLETE").unlink()
    assert compare.corpora(tmp_path / "corpus", alike / "corpus") == [
        "COMPLETE is not in both",
        f"stream/train/{ids.name} differs",
    ]


@pytest.mark.nightly
def test_a_run_that_goes_on_with_another_batch_is_found(tmp_path, monkeypatch):
    for name, value in settings(1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *sys.path]))
    monkeypatch.setattr(kills, "CHILD", "one_step_on")
    words = f"verify-resume {write_text(tmp_path)} --workdir {tmp_path}/v --rounds 1"
    code, printed, _ = asked(f"{words} --set optimizer.bad_steps_in_a_row=3")
    assert code == 1, printed
    assert "steps had another batch, the first is step " in printed
    assert "killed: resumed to its end" in printed
    assert not printed.splitlines()[-1].endswith(" 0 differences")


@pytest.mark.long
def test_an_interrupt_ends_the_child_too(tmp_path):
    """Ctrl-C reaches the command alone, and nothing of it stays."""
    environment = os.environ | settings(1)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "bert_jax.cli", "verify-resume", str(write_text(tmp_path))),
            *("--workdir", str(tmp_path / "v")),
        ],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    log = tmp_path / "v" / "undisturbed.log"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    children_of = [int(n) for n in pathlib.Path(
        f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]  # fmt: skip
    assert children_of
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and error == b"bert-jax: interrupted\n"
    assert not any(pathlib.Path(f"/proc/{number}").exists() for number in children_of)

"""Runs that begin with another's checkpoint.

A decay from a checkpoint of a stable run equals a run whose schedule decays at that step. A fork
continues from a checkpoint with other settings, and with the rows that were not seen.
"""

import json
import re
import shutil
import signal
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from broken import call, fails, tree
from compare import assert_identical
from etils import epath
from small_run import assert_same_run, command, final_state, killed, pretrain, write_text

from bert_jax import config
from bert_jax.checkpoints import fork as fork_lib
from bert_jax.checkpoints.save import Saver
from bert_jax.errors import InputError, Unavailable
from bert_jax.pretraining.prepared_corpus import PreparedCorpus
from bert_jax.storage.workdir import Workdir, fork_record
from bert_jax.tools.verify.faults import Fault, Plan

# Phases of 14 and 8 steps, a checkpoint every 4, of which all are kept.
STABLE = ("optimizer.schedule=wsd", "run.keep_checkpoints=9", "run.log_every=2")
DECAY = ("optimizer.decay_steps=4", "phases.1.steps=6")  # from step 16 on, to 20
FOUR = ("phases.0.steps=2", "phases.1.steps=2", "optimizer.warmup_steps=1")  # a run of four steps


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a stable run."""
    folder = tmp_path_factory.mktemp("branch")
    file = write_text(folder)
    assert pretrain(file, folder / "stable", *STABLE)[0] == "finished"
    return folder


def branch(folder, workdir, *options, step=16, run="stable"):
    """The arguments of `decay` from a checkpoint."""
    words = f"decay --workdir {workdir} {folder}/{run}/checkpoints/{step}"
    return [*words.split(), "--set", "optimizer.decay_steps=4", *options]


@pytest.mark.long
def test_a_decay_is_bit_identical_to_a_run_that_decays_there(runs, tmp_path):
    assert pretrain(runs / "small.py", runs / "decayed", *STABLE, *DECAY)[0] == "finished"
    assert call(branch(runs, tmp_path / "w")) == (0, "")
    assert_same_run(tmp_path / "w", runs / "decayed")
    assert final_state(tmp_path / "w")[0] == 20
    lines = (tmp_path / "w" / "metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line).get("learning_rate") for line in lines]
    assert rates.count(None) < len(rates) and min(filter(None, rates)) < 0.004
    # It is a run like any other: it no longer needs the stable one, and records its source.
    first = json.loads((tmp_path / "w" / "timings.jsonl").read_text().splitlines()[0])
    assert first["branch"] == f"{runs}/stable/checkpoints/16"
    assert (tmp_path / "w" / "checkpoints" / "16").exists()
    assert call(f"pretrain --workdir {tmp_path}/w") == (0, "")
    assert call(branch(runs, tmp_path / "w")) == (0, "")  # the same command again
    command = f"decay {runs}/decayed/checkpoints/20 --set optimizer.decay_steps=3"
    fails(f"{command} --workdir {tmp_path}/x", "choose a step from 3 to 16, where")


@pytest.mark.parametrize(
    ("command", "step", "fits"),
    [
        *(("fork", step, step < 4) for step in (0, 3, 4, 5)),
        # The rate is at its peak from the end of the warm-up, 1, to the start of the decay, 3.
        *(("decay", step, 1 <= step <= 3) for step in (0, 1, 3, 4)),
    ],
)
def test_at_which_steps_a_fork_or_decay_may_begin(command, step, fits, tmp_path, monkeypatch):
    """A run of four steps: a fork begins before its end, a decay where the rate is at its peak."""
    decay = "optimizer.decay_steps=1"
    experiment = config.override(config.load(str(write_text(tmp_path))), [*STABLE, *FOUR, decay])
    monkeypatch.setattr(fork_lib.ForkPoint, "load_saved", lambda self: (experiment, "no checksum"))
    fork_point = fork_lib.ForkPoint(Workdir(tmp_path), step, command)
    if fits:
        fork_point.require_compatible(experiment)
    else:
        with pytest.raises(InputError, match=f"{command} .*checkpoints/{step}"):
            fork_point.require_compatible(experiment)


# --- forks ---


def fork(folder, workdir, *settings, step=8, run="stable"):
    """The arguments of `fork` from a checkpoint."""
    changed = [word for setting in settings for word in ("--set", setting)]
    return ["fork", f"{folder}/{run}/checkpoints/{step}", "--workdir", f"{workdir}", *changed]


def planned_fork(folder, run, step, *settings, file=None):
    """The experiment that a fork would train."""
    place = f"{folder}/{run}/checkpoints/{step}"
    return fork_lib.plan_fork(place, file, settings, Workdir(folder / "not there"))[0]


def rows_of(experiment, first, last):
    """(phase, row) of all rows of the steps [first, last), in the order in which they are seen."""
    prepared, found = PreparedCorpus.open(epath.Path(experiment.run.corpus_dir)), []
    for step in range(first, last):
        phase, begins = experiment.phase_at(step)
        size = experiment.phases[phase].batch_size
        batch = prepared.train_batches(experiment, phase).batch(step - begins, np.arange(size))
        found += [(phase, row) for row in batch["rows"].tolist()]
    return found


@pytest.mark.long
def test_a_fork_with_the_same_settings_ends_bit_identical_to_the_run(copy_of_run):
    assert call(fork(".", "w", step=16, run="run")) == (0, "")
    one, other = copy_of_run / "w", copy_of_run / "run"
    assert_identical(final_state(one), final_state(other))
    for name in ("metrics.jsonl", "experiment.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    record = fork_record(Workdir(one))
    assert call("pretrain w/experiment.json --workdir w") == (0, "")
    assert fork_record(Workdir(one)) == record != {}


def test_other_batch_sizes_continue_at_the_rows_that_were_not_seen(copy_of_run):
    half = planned_fork(copy_of_run, "run", 16, "phases.1.batch_size=2")
    assert rows_of(half, 16, 18) == [(1, row) for row in range(8, 12)]
    # The same text is recognized after it has moved, and with its vocabulary at another path.
    (copy_of_run / "text").rename(copy_of_run / "moved")
    moved = f"corpus.sources=text:{copy_of_run}/moved"
    for setting in (moved, f"corpus.tokenizer={copy_of_run}/corpus/tokenizer"):
        assert planned_fork(copy_of_run, "run", 16, setting).phases[1].row_offset == 0
    (copy_of_run / "moved" / "more.txt").write_text("wa wb .\n")
    assert planned_fork(copy_of_run, "run", 16, moved).phases[1].row_offset == -8  # from row 0
    # Another seed has other rows, of which none was seen.
    other = planned_fork(copy_of_run, "run", 16, "seed=1", "phases.1.batch_size=2")
    assert rows_of(other, 16, 18) == [(1, row) for row in range(4)]


@pytest.mark.parametrize("file", [None, "small.py"], ids=["its own experiment", "a file"])
def test_a_fork_of_a_fork_skips_the_rows_of_both(file, copy_of_run, monkeypatch):
    """Whether or not the experiment that is given holds the row offset of the first fork."""
    small = config.load("small.py")
    # The run saw rows 0 to 7 of the second phase; its fork at step 16 saw rows 8 to 15.
    first = config.override(small, ["phases.1.batch_size=2", "phases.1.row_offset=4"])
    assert rows_of(first, 16, 20) == [(1, row) for row in range(8, 16)]
    (copy_of_run / "run" / "experiment.json").write_text(config.to_json(first))
    monkeypatch.setattr(fork_lib.ForkPoint, "load_saved", lambda self: (first, "no checksum"))
    second = planned_fork(copy_of_run, "run", 20, "phases.1.batch_size=4", file=file)
    assert rows_of(second, 20, 22) == [(1, row) for row in range(16, 24)]
    other = planned_fork(copy_of_run, "run", 20, "phases.1.batch_size=4", "seed=1", file=file)
    assert rows_of(other, 20, 22) == [(1, row) for row in range(8)]


@pytest.mark.parametrize("file", [None, "small.py"], ids=["its own experiment", "a file"])
def test_a_fork_that_is_resumed_keeps_its_rows(file, copy_of_run, monkeypatch):
    first = config.override(config.load("small.py"), ["phases.1.row_offset=4"])
    (copy_of_run / "run" / "experiment.json").write_text(config.to_json(first))
    place = f"{copy_of_run}/other/checkpoints/16"
    monkeypatch.setattr(fork_lib, "fork_record", lambda workdir: {"checkpoint": place})
    resumed, *_ = fork_lib.plan_fork(place, file, (), Workdir(copy_of_run / "run"))
    assert [phase.row_offset for phase in resumed.phases] == [0, 4]


@pytest.mark.long
@pytest.mark.nightly
def test_a_fork_of_a_fork_goes_on_at_the_rows_that_neither_has_seen(runs, tmp_path):
    """Also if a longer first phase makes it current again."""
    sizes = ("phases.0.batch_size=4", "phases.1.batch_size=8")
    shorter = (*sizes, "phases.0.steps=18", "phases.1.steps=2", "optimizer.b1=0.8")
    assert call(fork(runs, tmp_path / "one", *shorter)) == (0, "")
    one = config.from_json((tmp_path / "one" / "experiment.json").read_text(), "experiment")
    longer = ("phases.0.steps=21", "phases.1.steps=8", "phases.0.batch_size=16")
    two = planned_fork(tmp_path, "one", 20, *longer, "phases.1.batch_size=4")
    stable = config.override(config.load(str(runs / "small.py")), STABLE)
    seen = rows_of(stable, 0, 8) + rows_of(one, 8, 20) + rows_of(two, 20, 29)
    for phase, count in ((0, 8 * 8 + 10 * 4 + 16), (1, 2 * 8 + 8 * 4)):
        assert [row for number, row in seen if number == phase] == list(range(count))


@pytest.mark.long
def test_a_decay_of_a_fork_is_a_fork(runs, tmp_path):
    """Its settings cannot train from step 0, where its row offset would be negative."""
    settings = "phases.0.batch_size=16", "phases.1.steps=4"
    assert call(fork(runs, tmp_path / "one", *settings)) == (0, "")
    assert call(branch(tmp_path, tmp_path / "two", run="one")) == (0, "")
    assert fork_record(Workdir(tmp_path / "two")) == fork_record(Workdir(tmp_path / "one")) != {}
    fails(f"pretrain {tmp_path}/two/experiment.json --workdir {tmp_path}/three", "row_offset=-64")


@pytest.mark.long
@pytest.mark.nightly
def test_another_optimizer_begins_with_fresh_moments(runs, tmp_path):
    _, before = final_state(runs / "stable", 8)
    changed = ("optimizer.name=lamb", "phases.0.steps=8", "phases.1.steps=1")
    assert call(fork(runs, tmp_path / "w", *changed)) == (0, "")
    _, state = final_state(tmp_path / "w", 8)
    assert_identical(state["params"], before["params"])
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state["optimizer"]))


@pytest.mark.long
def test_a_killed_fork_needs_its_parent_run_until_its_first_save(runs, tmp_path):
    shutil.copytree(runs / "stable", tmp_path / "stable")
    settings = "phases.0.batch_size=4", "optimizer.name=lamb", "name=x"
    undisturbed, disturbed = (fork(tmp_path, tmp_path / name, *settings) for name in ("alone", "w"))
    assert call(undisturbed) == (0, "")
    plan = Plan(Fault("save", signal.SIGKILL, 8, progress=1))  # once one of its files exists
    result = command("-m", "bert_jax.tools.verify.child", plan.to_json(), *disturbed)
    assert (
        result.returncode == -signal.SIGKILL and not (tmp_path / "w" / "checkpoints" / "8").exists()
    )
    # Its own settings say where it begins.
    again = ["pretrain", "--workdir", f"{tmp_path}/w"]
    assert killed(13, signal.SIGKILL, *again).returncode == -signal.SIGKILL
    shutil.rmtree(tmp_path / "stable")
    assert call(disturbed) == (0, "")
    assert_same_run(tmp_path / "w", tmp_path / "alone")


@pytest.mark.long
@pytest.mark.parametrize(
    ("begin", "options", "step", "words"),
    [
        (branch, (), 15, ["checkpoints/15", "22, 20, 16, 12, 8, 4"]),
        (branch, (), 12, ["before the last phase", "step 14"]),
        (branch, (), "newest", ["RUN/checkpoints/STEP"]),
        (branch, ("--set=optimizer.b1=0.8",), 16, ["other settings", "optimizer.b1"]),
        (branch, ("--set=optimizer.decay_steps=0",), 16, ["optimizer.decay_steps"]),
        (branch, ("--set=data.final_masked_lm_prob=0.1",), 16, ["final_masked_lm_prob"]),
        (fork, (), 15, ["checkpoints/15", "22, 20, 16, 12, 8, 4"]),
        (fork, ("model.hidden_size=32", "optimizer.b1=0.8"), 8, ["model.hidden_size: 16 -> 32"]),
        (fork, FOUR, 8, ["4 steps"]),
        (fork, ("corpus.tokenizer=train",), 8, ["corpus.tokenizer", "corpus/tokenizer"]),
    ],
)
def test_an_invalid_start_fails_with_one_line_and_creates_nothing(
    runs, tmp_path, begin, options, step, words
):
    fails(begin(runs, tmp_path / "w", *options, step=step), *words)
    assert not (tmp_path / "w").exists()


@pytest.mark.long
def test_another_vocabulary_or_a_damaged_checkpoint_is_named_and_begins_no_run(runs, tmp_path):
    text = (runs / "vocab.txt").read_text().replace("wa\n", "wz\n", 1)
    (tmp_path / "vocab.txt").write_text(text)
    other = (f"corpus.tokenizer={tmp_path}/vocab.txt", f"run.corpus_dir={tmp_path}/corpus")
    fails(fork(runs, tmp_path / "w", *other), "vocabulary")
    shutil.copytree(runs / "stable", tmp_path / "stable")
    for file in (tmp_path / "stable" / "checkpoints" / "8").rglob("d/*"):
        file.write_bytes(file.read_bytes()[::-1])
    fails(fork(tmp_path, tmp_path / "w"), "checkpoints/8")
    assert not (tmp_path / "w").exists()


def test_a_new_run_removes_the_record_of_a_fork_that_never_saved(copy_of_run, monkeypatch):
    """After the first save of a fork, its workdir refuses a run with other settings."""
    monkeypatch.setattr(Saver, "require_space", Mock(side_effect=Unavailable("at once")))
    assert call(fork(".", "w", step=16, run="run"))[0] == 74
    assert fork_record(Workdir(copy_of_run / "w"))
    assert call("pretrain small.py --workdir w --set seed=7")[0] == 74
    assert not fork_record(Workdir(copy_of_run / "w"))


def test_a_fork_copies_no_metrics_of_later_steps(copy_of_run):
    """Trackers would send them during the restore, and later skip the fork's own lines."""
    (copy_of_run / "w").mkdir()
    workdir = Workdir(copy_of_run / "w", f"{copy_of_run}/corpus")
    fork_lib.plan_fork("run/checkpoints/16", None, (), workdir)[2].copy_metrics(workdir)
    own, theirs = (Path(w, "metrics.jsonl").read_text().splitlines(True) for w in ("w", "run"))
    assert own == [line for line in theirs if json.loads(line)["step"] <= 16] != theirs


@pytest.mark.long
def test_a_run_with_another_schedule_decays_in_a_fork(copy_of_run):
    """With the flags that the error message of `decay` suggests."""
    flags = "run/checkpoints/16 --workdir w --set optimizer.decay_steps=3"
    message = fails(f"decay {flags}", "optimizer.schedule=wsd", "bert-jax fork")
    assert not Path("w").exists()
    settings = " ".join(re.findall(r"--set \S+=\w+", message))
    assert call(f"fork {flags} {settings}")[0] == 0
    lines = [json.loads(line) for line in Path("w/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 19
    rates = [
        line["learning_rate"] for line in lines if line["step"] > 16 and "learning_rate" in line
    ]
    assert rates and rates[-1] < config.load("small.py").optimizer.peak_learning_rate / 2


def test_a_workdir_holds_one_fork(copy_of_run):
    shutil.copytree("run", "other")
    before = tree(copy_of_run)
    for workdir in ("run", "other"):  # the run itself, and another one
        fails(fork(".", workdir, step=16, run="run"), workdir, "checkpoints/16")
    assert tree(copy_of_run) == before


@pytest.mark.parametrize(
    "command", ["prepare small.py", "pretrain small.py", "fork run/checkpoints/16", "auto text"]
)
def test_a_corpus_is_not_prepared_in_the_workdir_of_another_run(command, copy_of_run):
    """`other` shares the corpus of `run`, as a fork does, so `other/corpus` does not exist."""
    shutil.copytree("run", "other")
    before = tree(copy_of_run)
    hours = " --hours 0.001" if command == "auto text" else ""
    fails(
        f"{command} --workdir new --set run.corpus_dir=other/corpus{hours}",
        *("other/corpus", "run.corpus_dir=corpus"),
    )
    fails("prepare small.py --set run.corpus_dir=other", "=other:", "run.corpus_dir=corpus")
    assert tree(copy_of_run) == before
    # The run may have its own corpus again, and a fork may read it from there.
    code, _ = call("prepare small.py --workdir other --set run.corpus_dir=")
    assert code == 0
    assert call("prepare small.py --workdir new --set run.corpus_dir=other/corpus")[0] == 0

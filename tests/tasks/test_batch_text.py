"""A step of a fine-tuning as text, against the batch that the step is given."""

import dataclasses
import shutil

import numpy as np
import pytest
import tuned

from bert_jax import cli, config
from bert_jax.config import Finetuning
from bert_jax.storage.workdir import Workdir
from bert_jax.tasks.finetuning_job import FinetuningJob
from bert_jax.tasks.rows import TaskBatches
from bert_jax.training import mesh as mesh_lib


@pytest.fixture
def task(tmp_path, monkeypatch):
    """Makes a run that has not begun: a base, examples, and the folder with what was asked."""
    monkeypatch.chdir(tmp_path)
    tuned.write_base(tmp_path / "base")

    def make(kind, **fields):
        tuned.write_task(tmp_path, kind)
        experiment = config.load("task.py", Finetuning)
        of_task = dataclasses.replace(experiment.task, **fields)
        experiment = dataclasses.replace(experiment, init_from="base", task=of_task)
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "experiment.json").write_text(config.to_json(experiment))
        setup = FinetuningJob(experiment, Workdir("run"), lambda line: None)
        setup.check_inputs(mesh_lib.one_device())
        return setup

    return make


def batch_of(setup, number, size):
    cfg = setup.experiment
    rows, pad_id = setup.data.training.rows, tuned.PIECES.index("[PAD]")
    batches = TaskBatches(rows, pad_id, cfg.batch_size, cfg.seed)
    return batches.batch(number, np.arange(size))


def show(capsys, *words, code=0):
    assert cli.main(["show", "--workdir", "run", *words]) == code
    out, err = capsys.readouterr()
    return [line for line in out.splitlines() if line] if code == 0 else err


@pytest.mark.parametrize("kind", tuned.TASKS)
def test_the_pieces_of_a_step_are_those_of_its_batch(kind, task, capsys):
    setup = task(kind)
    head, *lines = show(capsys, "--step", "2", "--rows", "99")
    size = len(lines) // 2
    batch = batch_of(setup, 2, size)
    assert head.startswith(f"step 2 of 4, epoch 0: {size} rows of {batch['input_ids'].shape[1]}, ")
    for shown, ids, mask in zip(lines[1::2], batch["input_ids"], batch["input_mask"], strict=True):
        source = shown.partition(" -> ")[0]
        words = [word.strip("{}").split("|")[0] for word in source.split()]
        assert words == [tuned.PIECES[i] for i in ids[: mask.sum()]]


def test_a_pass_is_over_all_rows_and_a_run_begun_when_it_was_not_keeps_its_steps(task, capsys):
    setup = task("span", max_sequence_length=16, document_stride=4)
    rows, steps = len(setup.data.training.rows.ids), setup.total_steps
    assert rows >= 32 and steps == -(-rows // 4)
    drawn = [setup.data.training.batches.step_rows(number) for number in range(steps)]
    assert set(np.concatenate(drawn)) == set(range(rows))
    assert f": 16 examples in {rows} rows, 11 held out, {steps} steps" in next(setup._describe({}))
    assert show(capsys)[0].startswith(f"step 0 of {steps}, ")
    notes = {"labels": setup.labels, "total_steps": 4}
    saved = {"init_sha256": setup._base.sha256, "corpus_sha256": setup.data_sha256, "notes": notes}
    assert setup.differences(setup.experiment, saved) == []
    assert (setup.total_steps, setup.optimizer.warmup_steps) == (4, 0)


def test_labels_tags_and_answers_stand_with_their_rows_and_pieces(task, tmp_path, capsys):
    setup = task("classify")
    assert "--step 4: the run has steps 0 to 3" in show(capsys, "--step", "4", code=2)
    _, *lines = show(capsys, "--rows", "4")
    targets = batch_of(setup, 0, 4)["targets"]
    assert [line.rpartition(": ")[2] for line in lines[::2]] == [setup.labels[t] for t in targets]
    assert all(line.startswith("train:") for line in lines[::2])

    shutil.rmtree(tmp_path / "run")
    task("tag")
    _, _, text, *_ = show(capsys)
    first, second = (word.strip("{}").split("|") for word in text.split()[1:3])
    assert {first[1], second[1]} == {"0", "1"}
    assert (first[0] in tuned.BAD) == (first[1] == "1")

    shutil.rmtree(tmp_path / "run")
    setup = task("span")
    _, *lines = show(capsys, "--rows", "16")
    questions = setup.data.training.examples
    answers = {q.id: q.answers[0].text if q.answers else None for q in questions}
    for place, text in zip(lines[::2], lines[1::2], strict=True):
        there = [word.strip("{}") for word in text.split() if word.startswith("{")]
        id_ = place.removesuffix(": no answer in this row").rpartition(" ")[2]
        assert there in ([], [f"{answers[id_]}|answer"])
        assert place.endswith("no answer in this row") == (not there)

"""Tables: what is run, what is kept, and what is written."""

import ast
import csv
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import statistics
import types

import pytest
import suite_data
from made import COLUMNS, Quiet, compare, fake_runs, small, write_table, write_task
from small_run import killed, run_bert_jax

from bert_jax import config, errors
from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.workdir import Workdir
from bert_jax.tools.compare import results, runs
from bert_jax.tools.compare.results import Results, short_hash
from bert_jax.tools.compare.runs import Comparison
from bert_jax.tools.report import figures

SHIPPED = pathlib.Path(__file__).parents[3] / "tables"


def only(name):
    """The folder of a run, whose name ends in a hash."""
    (found,) = pathlib.Path("w").glob(f"{name}-*")
    return found


def record():
    return json.loads(pathlib.Path("w/table.json").read_text())


def table_csv():
    return list(csv.DictReader(pathlib.Path("w/table.csv").read_text().splitlines()))


# --- runs ---


def test_what_is_missing_is_run_and_measured_and_means_are_written(here, capsys, monkeypatch):
    write_table(here)
    done = fake_runs(monkeypatch)
    assert compare() == 0
    out = capsys.readouterr().out.splitlines()
    # All rows with the first seed first.
    assert [one[:2] for one in done] == [("base", 0), ("wide", 0), ("base", 7), ("wide", 7)]
    text = pathlib.Path("w/table.txt").read_text().splitlines()
    assert out[-4:-1] == text
    error = statistics.stdev([5.0, 5.07]) / math.sqrt(2)
    assert text[0].split() == ["row", "runs", *COLUMNS]
    assert text[2].split()[:5] == ["wide", "2", "5.035", "+-", f"{error:.3f}"]
    rows = table_csv()
    assert float(rows[1]["loss"]) == pytest.approx(5.035)
    assert float(rows[1]["loss_error"]) == pytest.approx(error)
    assert float(rows[0]["below_unigrams"]) == pytest.approx(6.5 - 4.035)
    assert rows[1]["loss_runs"] == "2" and float(rows[0]["cpu_seconds"]) == 2.5
    # Two steps of phase 0 of 8 x 16 half filled, a third of phase 1 of 4 x 24.
    assert float(rows[0]["real_tokens"]) == 2 * 128 * 0.5 + 96 * 0.75
    assert float(rows[0]["steps"]) == 3
    members = [config.flatten(m.experiment) for m in members_of(here)]
    folders = {dict(flat)["run.corpus_dir"] for flat in members}
    assert len(folders) == 1 and folders.pop().startswith("w/corpora/")

    # Nothing is left to do; the workdirs are not even looked at.
    shutil.rmtree("w/runs")
    assert compare() == 0 and len(done) == 4
    assert pathlib.Path("w/table.txt").read_text().splitlines() == text


def test_a_run_with_skipped_steps_is_measured(here):
    """Of steps that were skipped no row counts; nor does an evaluation before the last step."""
    last = {"step": 2, "masked_lm_loss": 4.0, "masked_lm_accuracy": 0.25, "unigram_loss": 6.5}
    record = types.SimpleNamespace(
        experiment=small(here, "phases.0.steps=3", "phases.1.steps=1"),
        total_steps=4,
        evaluation=[last],
        train=[{"step": 1, "filled": 0.5}, {"step": 3}, {"step": 4, "filled": 0.75}],
    )
    assert runs._measure("real_tokens", record) == 128 * 0.5 + 96 * 0.75
    assert [runs._measure(name, record) for name in ("loss", "below_unigrams")] == [None, None]
    record.evaluation.append(last | {"step": 4})
    assert runs._measure("loss", record) == 4.0


def members_of(here):
    table = config.load_table("table.py")
    return Comparison(Results.read(table, "w"), Quiet())._results.members


def test_a_stopped_table_goes_on_and_a_failed_run_keeps_none_from_going_on(
    here, capsys, monkeypatch
):
    write_table(here, ("loss",))
    done = fake_runs(
        monkeypatch, lambda e: "stopped" if (e.name, e.seed) == ("base", 7) else "finished"
    )
    assert compare() == errors.STOPPED
    assert len(done) == 3
    line = capsys.readouterr().out.splitlines()[-2]
    assert line.split() == ["wide", "1", "5.000"]
    done = fake_runs(monkeypatch, lambda e: "failed" if e.name == "base" else "finished")
    assert compare() == errors.FAILED
    assert [one[:2] for one in done] == [("base", 7), ("wide", 7)]
    assert capsys.readouterr().out.splitlines()[-3].split() == ["base", "1", "4.000"]


def test_what_a_run_does_not_learn_is_a_blank_and_is_asked_once(here, capsys, monkeypatch):
    write_table(here, ("loss", "next_sentence"))
    done = fake_runs(monkeypatch)
    run = runs.session.run

    def without(job, progress):
        outcome, metrics = run(job, progress), job.workdir.metrics
        text = metrics.read_text()
        if job.experiment.name == "wide":
            metrics.write_text(text.replace("next_sentence_accuracy", "other"))
        return outcome

    monkeypatch.setattr(runs.session, "run", without)
    assert [compare(), compare()] == [0, 0] and len(done) == 4
    assert capsys.readouterr().out.splitlines()[-2].split()[-1] == "-"
    assert (table_csv()[1]["next_sentence"], table_csv()[1]["next_sentence_runs"]) == ("", "0")


@pytest.mark.parametrize("column", ["below_unigrams", "reach:1", "loss", "accuracy"])
def test_an_objective_of_its_own_without_pieces_has_no_unigram_line(here, column):
    lines = [{"step": 2, "kind": "evaluation", "replaced_loss": 0.5, "loss": 0.5}]
    record = types.SimpleNamespace(evaluation=lines, windows=[], timings=[], total_steps=2)
    assert runs._measure(column, record) is None


def test_how_long_a_loss_took_is_seconds_of_cpu_or_a_blank(here, capsys, monkeypatch):
    """The fake runs end 2.5 and 1.5 nat below unigrams after 2.5 seconds of CPU."""
    fake_runs(monkeypatch)
    write_table(here, ("reach:1", "reach:2"))
    assert compare() == 0
    found = {run["row"]: run["values"] for run in record()["runs"] if run["seed"] == 0}
    assert found["base"] == pytest.approx({"reach:1": 1.0, "reach:2": 2.0})
    assert found["wide"] == {"reach:1": pytest.approx(2.5 / 1.5), "reach:2": None}


def test_a_column_more_is_measured_without_a_run_more(here, monkeypatch, capsys):
    write_table(here, ("loss",))
    done = fake_runs(monkeypatch)
    assert compare() == 0
    write_table(here, ("loss", "accuracy"))
    assert compare() == 0
    # Asked again, a finished run ends at once.
    assert len(done) == 8
    assert "0.250" in capsys.readouterr().out


def test_a_value_is_of_all_that_is_computed_and_of_nothing_else(here):
    base = small(here)
    changes = (
        ("seed=1", "phases.1.steps=9", "corpus.case=cased", "optimizer.name=lamb"),
        ("run.log_every=7", "parallelism.accumulation=2", "data.dupe_factor=0", "name=other"),
    )
    hashes = [{short_hash(config.override(base, [c])) for c in of} for of in changes]
    assert len(hashes[0] | {short_hash(base)}) == 5 and hashes[1] == {short_hash(base)}


def fake_tasks(monkeypatch):
    """Fine-tunings that end at once, with the share of one label as their score."""
    asked = []

    def finetune(experiment, base, root, progress, origin=None):
        asked.append((experiment.seed, base, root))
        folder = Workdir(root).root
        folder.mkdir(parents=True)
        share = pathlib.Path("test").read_text().count('"label": "w"') / 8
        lines = [
            {"step": n, "kind": "scores", "score": score} for n, score in ((1, 0.1), (2, share))
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        (folder / "experiment.json").write_text(config.to_json(experiment))
        return "finished"

    monkeypatch.setattr(runs, "finetune", finetune)
    monkeypatch.setattr(runs, "_probe", lambda column, workdir: len(asked))
    return asked


@pytest.mark.long
def test_values_are_of_the_text_and_the_examples_as_they_are(here, monkeypatch, capsys):
    """What changed is marked and measured again, and what was there before is known again."""
    write_task(here)
    asked, done = fake_tasks(monkeypatch), fake_runs(monkeypatch)
    write_table(here, ("loss", "probe:task.py", "finetune:task.py"))

    text, examples = here / "text" / "all.txt", here / "test"
    given = text.read_text(), examples.read_text()

    def measured():
        """Runs it; returns mean losses, mean scores, and which columns are marked."""
        assert compare() == 0
        rows = table_csv()
        lines = pathlib.Path("w/table.txt").read_text().splitlines()
        marks = lines[1].count("*"), len(lines) - 1 - len(rows)
        page = pathlib.Path("w/table.html").read_text()
        assert (results.AGAIN in page) == (results.AGAIN in lines) == (marks[0] > 0)
        scores = [float(row["finetune:task.py"]) for row in rows]
        return [float(row["loss"]) for row in rows], scores, *marks

    losses, scores, *marks = first = measured()
    assert scores == [0.5, 0.5] and marks == [0, 0] and len(asked) == 4
    # All labels are one: tasks are asked again, of the runs that there are.
    examples.write_text(given[1].replace('"label": "x"', '"label": "w"'))
    folders = {*pathlib.Path("w/runs").iterdir()}
    assert measured() == (losses, [1.0, 1.0], 2, 1) and len(asked) == 8
    assert {*pathlib.Path("w/runs").iterdir()} == folders
    # Less text: all is run and asked again, beside what was there.
    text.write_text("\n\n".join(given[0].split("\n\n")[:20]))
    del done[:]
    assert measured()[1:] == ([1.0, 1.0], 3, 1) and len(done) == 4 and len(asked) == 12
    assert {*pathlib.Path("w/runs").iterdir()} > folders
    assert len([*pathlib.Path("w/corpora").iterdir()]) == 2
    # As it was: nothing is run.
    text.write_text(given[0])
    examples.write_text(given[1])
    del done[:]
    assert measured() == first and not done and len(asked) == 12
    # Nor for the same experiment by another name.
    table = (here / "table.py").read_text()
    twice = table.replace("rows = (Row(", 'rows = (Row(name="again", experiment=base), Row(')
    (here / "table.py").write_text(twice)
    losses, scores, *marks = measured()
    assert losses[0] == losses[1] == first[0][0] and scores == [0.5] * 3 and marks == [0, 0]
    assert not done and len(asked) == 12


def test_other_weights_to_begin_with_are_other_values(here, monkeypatch):
    write_table(here, ("loss",))
    table = (here / "table.py").read_text()
    (here / "table.py").write_text(table.replace('["run.', '["init_from=base", "run.'))
    done, weights = fake_runs(monkeypatch), iter("aabb")
    monkeypatch.setattr(runs, "hash_weights", lambda folder: next(weights))
    assert [compare(), compare()] == [0, 0] and len(done) == 8


def test_examples_that_change_while_they_are_asked_are_named(here, monkeypatch, capsys):
    write_task(here)
    fake_tasks(monkeypatch)
    fake_runs(monkeypatch)
    write_table(here, ("probe:task.py",))

    def probed(column, workdir):
        (here / "test").write_text((here / "test").read_text().replace('"x"', '"w"'))
        return 0.5

    monkeypatch.setattr(runs, "_probe", probed)
    assert compare() == 2 and "probe:task.py" in capsys.readouterr().err
    assert record()["values"] == {} and compare() == 0


def test_text_that_changed_below_a_corpus_of_the_user_s_is_named(here, monkeypatch, capsys):
    write_table(here, ("loss",))
    table = (here / "table.py").read_text()
    (here / "table.py").write_text(table.replace('"run.corpus_dir="', '"run.corpus_dir=mine"'))
    fake_runs(monkeypatch)
    assert compare() == 0
    (here / "text" / "all.txt").write_text("wa wb .\n")
    assert compare() == 2
    assert "all.txt" in capsys.readouterr().err and not pathlib.Path("w/corpora").exists()


def test_tasks_are_asked_of_each_run(here, monkeypatch):
    write_task(here)
    asked = fake_tasks(monkeypatch)
    write_table(here, ("probe:task.py", "finetune:task.py"))
    fake_runs(monkeypatch)
    assert compare() == 0
    seed, base, folder = asked[2]
    assert seed == 7 and base == os.fspath(only("runs/base-7"))
    assert folder == os.fspath(only(f"tasks/{pathlib.Path(base).name}/small"))
    row = table_csv()[0]
    assert (float(row["probe:task.py"]), float(row["finetune:task.py"])) == (1.0, 0.5)
    # Another recipe of the task is another column, beside what was learned by the first.
    changed = pathlib.Path("task.py").read_text().replace("epochs=1", "epochs=2")
    pathlib.Path("task.py").write_text(changed)
    assert compare() == 0 and len(asked) == 8
    assert len([*pathlib.Path(folder).parent.iterdir()]) == 2


draw, draw_dots = figures.draw, figures.draw_dots


def test_the_page_needs_nothing_else_and_says_what_each_row_changes(here, monkeypatch):
    monkeypatch.setattr(figures, "draw", draw)
    monkeypatch.setattr(figures, "draw_dots", draw_dots)
    write_table(here, ("loss", "steps"))
    text = (here / "table.py").read_text().replace('name="wide"', 'name="<b>wide&"')
    (here / "table.py").write_text(text)
    fake_runs(monkeypatch)
    assert compare() == 0
    text = pathlib.Path("w/table.html").read_text()
    assert "default-src 'none'" in text and not re.search("<(script|img|link|b)[ >]", text)
    assert "&lt;b&gt;wide&amp;" in text and "model.intermediate_size: 32 -&gt; 40" in text
    assert "CPU seconds" in text and "3 steps a run" in text
    assert "4.035 +- 0.035" in text


@pytest.mark.nightly
def test_a_table_killed_in_the_middle_goes_on_without_redoing_runs(here):
    """As a user runs it: killed at a step of the second run, then run to its end."""
    write_task(here)
    write_table(here, (*COLUMNS, "probe:task.py", "finetune:task.py"))
    arguments = ("compare", "table.py", "--workdir", "w")
    plain = run_bert_jax(*arguments, timeout=600)
    assert plain.returncode == 0, plain.stderr
    whole = record()["runs"]
    (here / "w").rename(here / "whole")
    # The first run alone, then all of them, of which the next is killed before its third step.
    both = (here / "table.py").read_text()
    (here / "table.py").write_text(both.replace("(0, 7)", "(0,)").replace("=rows,", "=rows[:1],"))
    assert run_bert_jax(*arguments, timeout=600).returncode == 0
    (here / "table.py").write_text(both)
    assert killed(2, 9, *arguments, timeout=600).returncode == -9
    again = run_bert_jax(*arguments, timeout=600)
    assert again.returncode == 0, again.stderr
    starts = []
    for folder in ("base-0", "wide-0", "base-7"):
        lines = JsonLines(Workdir(only(f"runs/{folder}")).timings).read()
        starts.append(sum(line["kind"] == "start" for line in lines))
    assert starts == [1, 2, 1]
    for one, two in zip(whole, record()["runs"], strict=True):
        for values in (one["values"], two["values"]):
            assert values.pop("cpu_seconds") > 0
        assert one == two
    run = whole[-1]["values"]
    lines = JsonLines(Workdir(only("tasks/wide-7-*/small")).metrics).read()
    scores = [line["score"] for line in lines if line["kind"] == "scores"]
    assert run["finetune:task.py"] == scores[-1] and 0 <= run["probe:task.py"] <= 1


@pytest.mark.nightly
def test_a_real_run_is_measured(here):
    """Not a stand-in: a row of three steps."""
    write_table(here, ("loss", "cpu_seconds", "real_tokens"))
    text = (here / "table.py").read_text().replace("rows=rows", "rows=rows[:1]")
    (here / "table.py").write_text(text.replace("(0, 7)", "(0,)"))
    assert compare() == 0
    (run,) = record()["runs"]
    lines = JsonLines(Workdir(only("runs/base-0")).metrics).read()
    (last,) = (line for line in lines if line["kind"] == "evaluation")
    assert run["values"]["loss"] == last["masked_lm_loss"]
    assert run["values"]["cpu_seconds"] > 0
    positions = 2 * 8 * 16 + 4 * 24
    assert positions / 4 < run["values"]["real_tokens"] < positions


@pytest.mark.parametrize("file", sorted(SHIPPED.glob("*.py")), ids=lambda file: file.stem)
def test_a_table_file_is_what_its_docstring_names(file, monkeypatch):
    """Its rows share a corpus and a vocabulary, and differ."""
    text = ast.get_docstring(ast.parse(file.read_text()))
    assert f"bert-jax compare tables/{file.name}" in text
    assert all(f"\n{word}:" in text for word in ("Source", "Hardware", "Expected"))
    monkeypatch.chdir(file.parents[1])
    table = config.load_table(str(file))
    assert table.name == file.stem and len(table.rows) <= 10
    for one, two in itertools.pairwise(table.rows):
        assert config.differences(one.experiment, two.experiment, "identity")
    corpora = {(row.experiment.corpus, row.experiment.model.vocab_size) for row in table.rows}
    assert len(corpora) == 1
    learned = [short_hash(config.override(row.experiment, ["name=x"])) for row in table.rows]
    assert len(set(learned)) == len(learned)


def test_a_column_s_settings_change_its_task_alone(here):
    """Those of one file are told apart by their names, in what is kept too."""
    write_task(here)
    columns = ("finetune:task.py", "finetune:task.py name=small-batch batch_size=2")
    write_table(here, columns)
    found = Results.read(config.load_table("table.py"), "w").columns
    assert [column.task.batch_size for column in found] == [4, 2]
    assert [column.heading for column in found] == ["finetune:task.py", "small-batch"]
    experiment = small(here)
    assert len({results.hash_of(column, experiment) for column in found}) == 2


def test_a_suite_is_a_column_for_each_of_its_tasks(here, monkeypatch):
    write_task(here)
    suite_data.glue(here / "data")
    (here / "some.py").write_text(
        "import dataclasses\nfrom bert_jax import config\n\ndef suite():\n"
        "    glue = config.load_suite('glue')\n"
        "    tasks = tuple(task for task in glue.tasks if task.name in ('SST-2', 'CoLA'))\n"
        "    return dataclasses.replace(glue, tasks=tasks)\n"
    )
    write_table(here, ("loss", "suite:some.py:data task.max_sequence_length=32"))
    asked = fake_tasks(monkeypatch)
    fake_runs(monkeypatch)
    assert compare() == 0
    first, *_ = table_csv()
    names = [f"suite:some.py:data:{name} task.max_sequence_length=32" for name in ("SST-2", "CoLA")]
    assert [name for name in first if name.endswith("=32")] == names
    heads = pathlib.Path("w/table.txt").read_text().splitlines()[0]
    assert "SST-2" in heads and "CoLA" in heads and len(asked) == 8
    fake_runs(monkeypatch)
    assert compare() == 0 and len(asked) == 8

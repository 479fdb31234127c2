"""The pages of fine-tunings, and of runs that are compared."""

import json
import shutil
from dataclasses import replace

import pytest
from test_page import HOSTILE, Tags, assert_inert
from tuned_lines import SCORES, Run

from bert_jax import cli, config
from bert_jax.tools.report import curves, figures, page, run_comparison
from bert_jax.tools.report.run_record import Record


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Pictures are not drawn: their titles are what these tests look at."""
    monkeypatch.setattr(figures, "draw", lambda *_: "")


@pytest.mark.parametrize("kind", ["classify", "regress", "tag", "span"])
def test_a_fine_tuning_shows_its_scores_and_its_mistakes(kind, tmp_path):
    run = Run(kind)
    record = Record.read(run.write(tmp_path / "run"))
    text = Tags(page.render_page([record])).text
    main = next(iter(SCORES[kind]))
    newest = f"{record.evaluation[-1]['score']:.4f}{main}"
    worst = run.mistakes["worst"][0]
    for word in (f"Validation score: {main}", newest, worst["truth"], worst["texts"][0]):
        assert word in text, word
    assert ("how often" in text) == (kind in ("classify", "tag"))
    assert f"{run.mistakes['wrong']} examples are not right" in text


def test_a_score_of_each_file_is_shown_also_after_lines_without(tmp_path):
    run = Run()
    run.scored[-1]["accuracy/dev_matched"] = 0.12342
    text = Tags(page.render_page([Record.read(run.write(tmp_path / "run"))])).text
    assert "accuracy/dev_matched" in text and "0.1234" in text


def test_hostile_examples_are_shown_as_text(tmp_path):
    run = Run()
    for one in run.mistakes["worst"]:
        one |= dict.fromkeys(("place", "truth", "predicted"), HOSTILE) | {"texts": [HOSTILE]}
    run.mistakes["confusions"][0][0] = run.task["guess"][0] = HOSTILE
    text = page.render_page([Record.read(run.write(tmp_path / "run"))])
    assert "<script>alert(1)</script> \\x1b[31mred" in assert_inert(text)


def test_a_fine_tuning_that_has_only_begun_has_a_page(tmp_path):
    run = Run()
    run.train, run.scored, run.mistakes, run.timings = [], [], None, run.timings[:1]
    text = Tags(page.render_page([Record.read(run.write(tmp_path / "run"))])).text
    assert "No line is written yet" in text and "kept at the end of the run" in text


def test_a_run_of_similar_texts_promises_no_mistakes_and_a_corpus_has_no_share(tmp_path):
    run = Run("regress")
    task = replace(run.experiment.task, kind="similar")
    run.experiment, run.mistakes = replace(run.experiment, task=task), None
    del run.task["unknown"]["train"]
    text = Tags(page.render_page([Record.read(run.write(tmp_path / "run"))])).text
    assert "Validation score: spearman" in text and "0.2 %" in text
    assert "kept at the end of the run" not in text


def test_what_is_measured_in_training_too_is_drawn_of_both(tmp_path):
    record = Record.read(Run("classify").write(tmp_path / "run"))
    drawn = {plot.title: plot.curves for plot in curves.learning_plots([record])}
    for title in ("Accuracy", "Loss"):
        assert [one.style for one in drawn[title]] == ["line", "points"]
    assert [one.style for one in drawn["Macro f1"]] == ["points"]


def test_retrieval_is_drawn_beside_its_baselines(tmp_path):
    run = Run("regress")
    run.task["guess"] = ["BM25", 0.7]
    record = Record.read(run.write(tmp_path / "run"))
    record.predictions.append({"kind": "untrained", "guess": ["before training", 0.2]})
    record.predictions.append({"kind": "mean_vectors", "guess": ["mean vectors", 0.3]})
    (drawn,) = (x for x in curves.learning_plots([record]) if x.title.startswith("Validation"))
    assert drawn.levels == [(0.7, "BM25"), (0.2, "before training"), (0.3, "mean vectors")]
    assert "ignores the text" not in drawn.note


# --- comparisons ---


@pytest.fixture
def several(finished_run, tmp_path):
    """Makes copies of a pre-training, of which these have changed."""

    def make(*changes):
        for number, change in enumerate(changes):
            folder = tmp_path / f"run{number}"
            shutil.copytree(finished_run / "run", folder)
            tree = json.loads((folder / "experiment.json").read_text())
            for path, value in change.items():
                section, name = path.split(".")
                tree[section][name] = value
            (folder / "experiment.json").write_text(json.dumps(tree))
        return [Record.read(str(tmp_path / f"run{i}")) for i in range(len(changes))]

    return make


def curves_of(records):
    """The curves of each plot that has one, by its title."""
    plots = curves.learning_plots(records)
    return {plot.title: plot.curves for plot in plots if not plot.empty}


def test_runs_of_the_same_held_out_rows_are_compared_in_nats(several):
    records = several({}, {"optimizer.peak_learning_rate": 1e-3})
    assert run_comparison.explain_losses(records) == run_comparison.explain_scores(records) == ""
    drawn = curves_of(records)["Masked LM loss, nat"]
    assert [one.style for one in drawn] == ["line", "points"] * 2
    assert [one.colour for one in drawn] == [0, 0, 1, 1]
    assert [one.label for one in drawn] == ["run0", "", "run1", ""]


@pytest.mark.parametrize(
    "change", [{"data.eval_sequence_length": 24}, {"corpus.sources": ["text:elsewhere"]}]
)
def test_runs_of_other_held_out_rows_are_compared_with_their_unigrams(change, several):
    records = several({}, change)
    note = run_comparison.explain_losses(records)
    assert f"Held-out rows differ ({next(iter(change))})" in note
    drawn, last = curves_of(records), records[0].evaluation[-1]
    below = drawn["Nats below its own unigram baseline"]
    assert below[0].y[-1] == last["unigram_loss"] - last["masked_lm_loss"]
    assert not any("Masked LM" in title for title in drawn)
    assert {one.style for of_plot in drawn.values() for one in of_plot} == {"points"}


def test_text_that_changed_under_the_same_settings_is_seen(several):
    records = several({}, {})
    for line in records[1].evaluation:
        line["unigram_loss"] *= 1.05
    assert "the text, whose unigram baselines differ" in run_comparison.explain_losses(records)


def test_training_losses_under_other_masks_are_not_compared(several):
    records = several({}, {"data.masking": "whole_word"})
    drawn = curves_of(records)["Masked LM loss, nat"]
    assert [one.style for one in drawn] == ["points"] * 2


def test_masks_of_a_phase_are_other_masks_too(several):
    one, other = several({}, {})
    assert not run_comparison.masks_differ([one, other])
    other.experiment = config.override(other.experiment, ["phases.0.masked_lm_prob=0.1"])
    assert run_comparison.masks_differ([one, other])


def test_scores_of_the_same_file_compare_wherever_it_lies(tmp_path):
    records = [Record.read(Run("classify").write(tmp_path / name)) for name in ("one", "other")]
    for record in records:
        changed = [f"task.validation=tsv:/{record.label}/./dev.tsv"]
        record.experiment = config.override(record.experiment, changed)
    assert run_comparison.explain_scores(records) == ""


def test_what_a_run_has_spent_is_added_up(several):
    """A line is logged after each 3 steps."""
    (record,) = several({})
    by_name = {axis.name: axis.converter(record) for axis in run_comparison.AXES}
    windows = record.windows
    tokens = sum(x["real_tokens_per_second"] / x["steps_per_second"] * x["steps"] for x in windows)
    assert by_name["tokens"]([0, record.steps_done]) == pytest.approx([0, tokens])
    cpu = sum(x["cpu_seconds"] for x in windows)
    assert by_name["CPU seconds"]([record.steps_done])[0] == pytest.approx(cpu)
    positions = 14 * 8 * 16 + 8 * 4 * 24  # of both phases
    assert 0.5 * positions < tokens <= positions
    first, all_ = by_name["FLOPs"]([14, 22])
    assert 0 < first < all_ and by_name["FLOPs"]([7])[0] == pytest.approx(first / 2)
    # What lies before a fork was paid for by the other run.
    began, before = windows[3]["step"], by_name["FLOPs"]
    record.origin, record.windows = {"fork": {"checkpoint": f"a/checkpoints/{began}"}}, windows[4:]
    by_name = {axis.name: axis.converter(record) for axis in run_comparison.AXES}
    cpu = sum(x["cpu_seconds"] for x in windows[4:])
    assert by_name["CPU seconds"]([1, began, record.steps_done]) == pytest.approx([0, 0, cpu])
    wanted = [0, 0, all_ - before([began])[0]]
    assert by_name["FLOPs"]([1, began, 22]) == pytest.approx(wanted)


def test_the_table_has_scores_first_and_then_what_they_took(tmp_path):
    """400 steps of which each takes 1,200 tokens, 0.2 seconds and 0.3 of CPU."""
    runs = [Run(kind).write(tmp_path / kind) for kind in ("classify", "regress")]
    made = run_comparison.table([Record.read(run) for run in runs])
    spent = ["steps", "tokens", "seconds", "CPU seconds"]
    scores = ["accuracy", "guessing", "held-out loss", "examples"]
    assert made.columns == ["run", *scores, "spearman", *spent]
    first, second = (row[1:] for row in made.rows)
    assert first[1] == "0.4000" and first[4] == second[0] == ""
    assert first[5:] == second[5:] == ["400", "480k", "80", "120"]


def test_a_page_of_runs_of_both_kinds(several, tmp_path, monkeypatch):
    several({})
    Run().write(tmp_path / "tuned")
    Run("regress").write(tmp_path / "numbers")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", "run0", "tuned", "numbers"]) == 0
    text = (tmp_path / "comparison.html").read_text()
    tags = Tags(text)
    for words in ("Newest results", "over tokens", "over CPU seconds", "below unigrams"):
        assert words in tags.text, words
    # What only one of them has is no axis, and no difference.
    assert "over FLOPs" not in tags.text and "model.hidden_size" not in tags.text
    assert "Scores are not of the same task (task.kind, task.score differ)" in (tags.text)

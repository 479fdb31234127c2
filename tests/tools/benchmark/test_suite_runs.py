"""The runs that each rule asks for, what is kept of them, and a whole suite that is killed."""

import csv
import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import pytest
import suite_data
import tuned
from broken import fails, said
from etils import epath

from bert_jax import config
from bert_jax.config import Suite
from bert_jax.storage.workdir import read_json
from bert_jax.tools.benchmark import suite_files, suite_table
from bert_jax.tools.benchmark.suite_runs import Benchmark, Start
from bert_jax.tools.compare import sweep

GLUE = config.load_suite("glue")
RATES = ("5e-5", "4e-5", "3e-5", "2e-5")


class Quiet:
    def report(self, line):
        pass


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A base and the files of GLUE; the current folder."""
    tuned.write_base(tmp_path / "base")
    suite_data.glue(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def runs(monkeypatch):
    """The runs that were asked for, each as (task, rate, batch, seed, base); none is done.

    The best rate is 3e-5 with 16 examples; the best seed is 2. `scores` may be replaced.
    """
    found = []

    def score(task, rate, batch, seed):
        return 0.5 + 0.1 * (rate == 3e-5) + 0.01 * (batch == 16) + 0.001 * (seed == 2)

    def run_member(member, base, workdir, progress):
        e = member.experiment
        setting = (e.name, e.optimizer.peak_learning_rate, e.batch_size, e.seed)
        found.append((*setting, base))
        value = run_member.score(*setting)
        if value is None:
            return "failed", []
        (task,) = (task for task in GLUE.tasks if task.name == e.name)
        line = {"score": value} | {score.name: value for score in task.scores}
        return run_member.outcome, [line]

    run_member.score, run_member.outcome, run_member.found = score, "finished", found
    monkeypatch.setattr(sweep, "run_member", run_member)
    monkeypatch.setattr(Benchmark, "_predict", lambda *_: None)
    monkeypatch.setattr(Benchmark, "_make_start", lambda self, name, _: Start(f"of {name}", name))
    return run_member


def benchmark(rules, seeds=None, only=("MNLI", "RTE")):
    tasks = tuple(task for task in GLUE.tasks if task.name in only)
    suite = Suite(name="small", tasks=tasks)
    checked = suite_files.load_tasks(suite, "data", ["task.max_sequence_length=32"])
    pathlib.Path("w").mkdir(exist_ok=True)
    return Benchmark(suite, checked, epath.Path("w"), rules, seeds, Quiet())


def test_by_the_paper_settings_are_chosen_with_one_seed_and_small_tasks_have_five(folder, runs):
    found = benchmark("paper")
    assert found.run("base") == "finished"
    searched = [(float(rate), batch, 1) for rate in RATES for batch in (16, 32)]
    more = [(3e-5, 16, seed) for seed in (2, 3, 4, 5)]
    assert [run[1:4] for run in runs.found if run[0] == "MNLI"] == searched
    assert [run[1:4] for run in runs.found if run[0] == "RTE"] == searched + more
    assert {run[4] for run in runs.found} == {"base"}
    mnli, rte = found.results
    assert rte.settings == {"optimizer.peak_learning_rate": "3e-5", "batch_size": "16"}
    assert (len(mnli.seed_runs), len(rte.seed_runs)) == (1, 5)
    assert rte.best["settings"]["seed"] == "2"
    mean, deviation = rte.stats(rte.task.scores[0])
    assert mean == pytest.approx(0.6102) and deviation == pytest.approx(0.001 / 5**0.5)


def test_one_setting_needs_no_search_and_seeds_may_be_given(folder, runs):
    assert benchmark("one", seeds=3).run("base") == "finished"
    assert [run[:4] for run in runs.found] == [
        (name, 5e-5, 32, seed) for name in ("MNLI", "RTE") for seed in (1, 2, 3)
    ]


def test_by_the_rule_intermediate_some_tasks_start_from_another_model(folder, runs):
    found = benchmark("intermediate", only=("MNLI", "SST-2", "CoLA", "STS-B", "MRPC", "RTE"))
    assert found.run("base") == "finished"
    starts = {run[0]: run[4] for run in runs.found}
    small = dict.fromkeys(("STS-B", "MRPC", "RTE"), "of MNLI")
    assert starts == {"MNLI": "base", "SST-2": "base", "CoLA": "base"} | small


def test_what_is_done_is_skipped_unless_settings_base_or_examples_differ(folder, runs):
    def count(rules="one", **options):
        runs.found.clear()
        benchmark(rules, **options).run("base")
        return len(runs.found)

    assert count(seeds=2) == 4
    assert count(seeds=2) == 0
    assert count(seeds=3) == 2
    # One of the eight settings of the search is the one that was run.
    assert count("paper", seeds=1) == 14
    path = folder / "data/RTE/train.tsv"
    path.write_text(path.read_text().replace("wa wa", "wb wa", 1))
    assert count(seeds=3) == 3
    tuned.write_base(folder / "other", seed=1)
    (folder / "base").rename(folder / "before")
    (folder / "other").rename(folder / "base")
    assert count(seeds=3) == 6


def test_a_failed_run_leaves_the_others_and_is_tried_again(folder, runs):
    score = runs.score
    runs.score = lambda task, rate, *more: None if rate == 3e-5 else score(task, rate, *more)
    found = benchmark("paper", only=("WNLI",))
    assert found.run("base") == "failed"
    assert found.results[0].settings["optimizer.peak_learning_rate"] == "5e-5"
    runs.score = score
    found = benchmark("paper", only=("WNLI",))
    assert found.run("base") == "finished"
    assert found.results[0].settings["optimizer.peak_learning_rate"] == "3e-5"


def test_a_stop_ends_the_suite_even_after_a_failed_run(folder, runs, monkeypatch):
    def run_member(member, *more):
        runs.score = lambda task, rate, batch, seed: None if rate == 3e-5 else 0.5
        runs.outcome = "stopped" if member.experiment.seed == 2 else "finished"
        return runs(member, *more)

    monkeypatch.setattr(sweep, "run_member", run_member)
    assert benchmark("paper", seeds=2).run("base") == "stopped"
    assert {run[0] for run in runs.found} == {"MNLI"}


def test_the_table_has_published_values_beside_ours(folder, runs):
    found = benchmark("paper")
    found.run("base")
    suite_table.write(found)
    rows = read_table("w")
    assert [(row["task"], row["score"]) for row in rows] == [
        ("MNLI-m", "accuracy"),
        ("MNLI-mm", "accuracy"),
        ("RTE", "accuracy"),
    ]
    assert rows[2]["published dev"] == "64.76" and rows[2]["published test"] == "66.4"
    assert float(rows[2]["best"]) == pytest.approx(61.1)
    page = pathlib.Path("w/table.html").read_text()
    assert "64.76" in page and "61.02" in page and "<svg" in page


def test_arguments_are_refused_before_anything_is_run(folder):
    words = "benchmark glue --from base --data data --out w"
    fails(words.replace("glue", "gleu"), "gleu", "glue")
    fails(words.replace("--from base", "--from nowhere"), "nowhere")
    fails(words, "task.max_sequence_length=128")  # the base has 64 positions
    fails(words.replace("--data data", "--data base"), "base/MNLI/train.tsv", "MNLI.zip")
    pathlib.Path("mine").mkdir()
    pathlib.Path("mine/notes").touch()
    fails(words.replace("--out w", "--out mine"), "mine", "--out")
    assert not pathlib.Path("w").exists() or not [*pathlib.Path("w").iterdir()]


SMALL = """
import dataclasses
import glue
from bert_jax.config import Suite


def suite():
    tasks = [task for task in glue.suite().tasks if task.name in ("MNLI", "STS-B")]
    tasks = [dataclasses.replace(task, sweep=("batch_size=16,32",)) for task in tasks]
    return Suite(name="small", tasks=tuple(tasks))
"""


def read_table(out):
    with pathlib.Path(out, "table.csv").open() as file:
        return list(csv.DictReader(file))


def results(out):
    """The table but for its minutes, and the archive."""
    rows = read_table(out)
    for row in rows:
        del row["minutes"]
    return rows, pathlib.Path(out, "glue.zip").read_bytes()


def kill_at_random(words, times):
    """Starts a command so often, and each time kills its processes while it runs.

    A kill is up to a third of a second after one of the first lines of output.
    """
    draws = random.Random(0)
    command = [sys.executable, "-m", "bert_jax.cli", *words]
    for _ in range(times):
        with subprocess.Popen(command, stdout=-1, start_new_session=True) as process:
            for _ in range(draws.randint(1, 15)):
                process.stdout.readline()
            time.sleep(draws.uniform(0, 0.3))
            assert process.poll() is None, "ended before it was killed"
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.nightly
def test_glue_that_is_killed_ten_times_ends_at_the_same_table_and_archive(folder):
    suite_data.glue(folder / "data", train=160, dev=48, test=40)

    def command(out):
        words = f"benchmark glue --from base --data data --out {out} --rules one --seeds 1"
        settings = "task.max_sequence_length=32", "run.log_every=5", "run.checkpoint_every=3"
        words += "".join(f" --set {setting}" for setting in settings)
        return words.split()

    said(command("whole"))
    kill_at_random(command("killed"), times=10)
    said(command("killed"))
    rows, archive = results("killed")
    assert (rows, archive) == results("whole")
    assert len(rows) == 13 and len(zipfile.ZipFile("killed/glue.zip").namelist()) == 11


@pytest.mark.nightly
def test_a_suite_that_is_killed_at_random_ends_at_the_same_table(folder):
    (folder / "small.py").write_text(SMALL)
    shutil.copy(config.files.SHIPPED / "suites/glue.py", folder)

    def command(out):
        words = f"benchmark small.py --from base --data data --out {out} --rules intermediate"
        settings = ["task.max_sequence_length=32", "epochs=6", "run.checkpoint_every=2"]
        return [*words.split(), "--seeds", "2", *(f"--set={setting}" for setting in settings)]

    said(command("whole"))
    kill_at_random(command("killed"), times=5)
    said(command("killed"))
    assert results("killed") == results("whole")
    record = read_json(epath.Path("killed/benchmark.json"), 1)
    assert len(record["runs"]) == 6  # for each task two of the search, and a second seed
    (start,) = pathlib.Path("killed/bases").iterdir()
    assert start.name.startswith("MNLI_")
    names = [file.output for task in GLUE.tasks[:1] for file in task.predictions]
    with zipfile.ZipFile("killed/glue.zip") as archive:
        assert archive.namelist() == [*names, "STS-B.tsv"]
    assert "finetune:" not in said(command("killed"))


OTHERS = """
import dataclasses
from bert_jax import config

NAMES = "SQuAD-1.1 SQuAD-2.0 SWAG CoNLL-2003 CoNLL-2003-concat_last_four".split()


def suite():
    paper = config.load_suite("paper")
    tasks = [task for task in paper.tasks if task.name in NAMES]
    return dataclasses.replace(paper, tasks=tuple(tasks))
"""


@pytest.mark.nightly
def test_the_other_tables_of_the_paper_end_in_files_of_predictions(folder):
    suite_data.paper(folder / "data", "IOB1")
    (folder / "others.py").write_text(OTHERS)
    tuned.write_base(folder / "deep", model=dataclasses.replace(tuned.MODEL, num_hidden_layers=4))
    words = "benchmark others.py --from deep --data data --out w --rules one --seeds 1"
    settings = ["max_sequence_length=32", "max_query_length=8", "document_stride=8"]
    said(words, *(f"--set=task.{setting}" for setting in settings))
    values = {(row["task"], row["score"]): float(row["mean"]) for row in read_table("w")}
    assert len(values) == 7 and all(0 <= value <= 100 for value in values.values())
    answers = json.loads(pathlib.Path("w/predictions/SQuAD-2.0-dev.json").read_text())
    assert [*answers] == [f"q{number}" for number in range(12)]
    for name, count in (("dev", 12), ("test", 10)):
        text = pathlib.Path(f"w/predictions/CoNLL-2003-{name}.conll").read_text()
        sentences = text.removesuffix("\n\n").split("\n\n")
        truth = [[line.split()[1] for line in lines.split("\n")] for lines in sentences]
        scheme = [suite_data.CONLL["IOB1"][number % 2].split() for number in range(count)]
        assert truth == scheme

"""The page of a run, read as a browser reads it."""

import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
from small_run import settings, write_text

from bert_jax import cli
from bert_jax.errors import InputError
from bert_jax.report import figures, page
from bert_jax.report.records import Record
from bert_jax.storage.workdir import Workdir, in_use, lock

# A document that would run a script, recolour the terminal, reverse text, and break a template.
HOSTILE = (
    "<script>alert(1)</script> \x1b[31mred\x1b[0m \u202egnp.exe {{ 7*7 }} {% raw %} </style> &amp; "
    "$\\frac{1}{2}$ <img src=x onerror=alert(1)>"
)


class Tags(html.parser.HTMLParser):
    """Which elements and attributes a page has, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = set(), set(), ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run on text of which every document is hostile."""
    folder = tmp_path_factory.mktemp("report")
    file = write_text(folder)
    text = folder / "text" / "all.txt"
    sentence = HOSTILE.replace("\n", " ")
    text.write_text(text.read_text().replace(" .\n", f" . {sentence} .\n"))
    vocab = folder / "vocab.txt"
    # Pieces of a hostile vocabulary; an id each, so the table keeps its size.
    pieces = vocab.read_text().split("\n")
    pieces[-4:-1] = ["<script>alert(2)</script>", "\x1b[31m", "<"]
    vocab.write_text("\n".join(pieces))
    workdir = folder / "<img src=x>"
    watched = 'run.watch=["<b>wa</b> [MASK] \\u001b[31m"]'
    args = ["pretrain", str(file), "--workdir", str(workdir)]
    args += ["--set", watched, "--set", "name=x&y<b>"]
    assert cli.main(args) == 0
    return workdir


def test_a_page_of_hostile_text_shows_it_as_text(run):
    assert cli.main(["report", str(run)]) == 0
    text = (run / "report.html").read_text()
    tags = Tags(text)
    assert not tags.tags & {"script", "img", "iframe", "link"}
    assert not any(name.startswith("on") for name in tags.attributes)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", text)
    assert "<b>wa</b> [MASK] \\x1b[31m" in tags.text
    assert "<img src=x>" in tags.text


def test_a_hostile_piece_is_shown_as_text_in_every_place(run, monkeypatch):
    """Whatever piece stands in the vocabulary, in batches, tables and predictions."""
    piece = HOSTILE
    monkeypatch.setattr("bert_jax.text.tokenizer.WordPiece.piece", lambda self, i: piece)
    page._opened.cache_clear()
    record = Record.read(str(run))
    for line in record.predictions:
        for sentence in line["sentences"]:
            sentence["masks"] = [[(piece, 0.5)]]
            sentence["text"] = sentence["truth"] = piece
    text = page.render([record])
    page._opened.cache_clear()
    tags = Tags(text)
    assert not tags.tags & {"script", "img"} and "onerror" not in tags.attributes
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", text)
    shown = tags.text.count("<script>alert(1)</script> \\x1b[31mred")
    # Forty commonest pieces, examples of two phases, predictions.
    assert shown > 60 and "{{ 7*7 }}" in tags.text


def test_a_page_needs_nothing_else(run):
    text = page.render([Record.read(str(run))])
    assert "default-src 'none'" in text
    assert not re.search(r"""(src|href)=["']?(http|//)""", text)
    assert not re.search(r"url\((?!#)", text)


def test_a_page_says_how_the_run_stands(run):
    record = Record.read(str(run))
    assert record.state == "finished" and record.done == 22
    text = Tags(page.render([record])).text
    newest = record.evaluation[-1]
    for words in (
        "step 22 of 22",
        f"{newest['masked_lm_loss']:.3f} nat",
        f"{record.recent('real_tokens_per_second'):,.0f}tokens a second; padding is",
        f"{100 * record.recent('real_utilisation'):.1f} % without padding",
        f"{100 * newest['next_sentence_accuracy']:.1f} %",
        "Masked LM loss",
        "unigrams",
        "majority",
        "Gradient norm",
        "Where the time went",
        "compiling steps",
        "random next",
        "[MASK]",
        "model.hidden_size: 768 -> 16",
        "jax",
    ):
        assert words in text, words


def test_every_id_of_a_page_is_its_own(run):
    ids = re.findall(r' id="([^"]+)"', page.render([Record.read(str(run))]))
    assert len(ids) == len(set(ids)) > 0


def test_several_runs_are_compared_on_one_page(run, tmp_path, monkeypatch):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    saved = json.loads((other / "experiment.json").read_text())
    saved["seed"] = 5
    (other / "experiment.json").write_text(json.dumps(saved))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", str(run), str(other)]) == 0
    tags = Tags((tmp_path / "comparison.html").read_text())
    assert "What differs" in tags.text and "seed" in tags.text
    assert "Held-out masked LM loss" in tags.text
    assert not tags.tags & {"script", "img"}


def test_goodput_and_cost_are_printed_and_shown(run, tmp_path, capsys):
    """As if the run had had four chips, a price at which a second of one costs 1."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    timings = copy / "timings.jsonl"
    lines = [json.loads(line) for line in timings.read_text().splitlines()]
    assert lines[0]["environment"]["devices"] == ["cpu", 4]
    assert cli.main(["report", str(copy), "--price-per-chip-hour", "3600"]) == 0
    assert "; no cost, since cpu has no price\n" in capsys.readouterr().out
    assert "cost so far" not in (copy / "report.html").read_text()

    lines[0]["environment"]["devices"] = ["TPU v4", 4]
    timings.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cli.main(["report", str(copy), "--price-per-chip-hour", "3600"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    cost = f"{4 * sum(one['seconds'] for one in lines):,.2f}"
    assert line.startswith("goodput ") and line.endswith(f"chip-hours, cost {cost}")
    text = Tags((copy / "report.html").read_text()).text
    assert line in text and f"{cost}cost so far" in text


def test_a_run_before_its_first_line_has_a_page(run, tmp_path):
    for name in ("experiment.json", "corpus"):
        source = run / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name)
        elif source.exists():
            shutil.copy(source, tmp_path / name)
    text = Tags(page.render([Record.read(str(tmp_path))])).text
    assert "not started" in text and "No line is written yet" in text


def test_a_report_without_the_corpus_says_so(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    saved = json.loads((copy / "experiment.json").read_text())
    saved["run"]["corpus_dir"] = str(tmp_path / "gone")
    (copy / "experiment.json").write_text(json.dumps(saved))
    assert "no prepared corpus here" in Tags(page.render([Record.read(str(copy))])).text


def test_a_killed_run_is_not_one_that_goes_on(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    lines = (copy / "timings.jsonl").read_text().splitlines(keepends=True)
    (copy / "timings.jsonl").write_text("".join(lines[:-1]))
    assert Record.read(str(copy)).state == "killed"
    code = (
        "import sys; from bert_jax.report.records import Record;"
        "print(Record.read(sys.argv[1]).state)"
    )
    with lock(Workdir(copy).root):
        # A lock is seen from another process alone.
        command = [sys.executable, "-c", code, str(copy)]
        assert subprocess.check_output(command, text=True) == "running\n"
    assert not in_use(Workdir(copy).root)


@pytest.mark.long
def test_following_ends_with_the_run(tmp_path):
    """The page renews itself while the run goes on, and no longer once it is over."""
    file = write_text(tmp_path / "text")
    workdir = tmp_path / "w"
    environment = os.environ | settings(1)
    steps = ["--set", "phases.0.steps=3000"]
    command = [sys.executable, "-m", "bert_jax.cli", "pretrain", str(file), "--workdir"]
    with subprocess.Popen(
        [*command, str(workdir), *steps], env=environment, stdout=subprocess.DEVNULL
    ) as training:
        while not (workdir / "timings.jsonl").exists() and training.poll() is None:
            time.sleep(0.1)
        following = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "bert_jax.cli",
                "report",
                str(workdir),
                "--follow",
                "--every",
                "1",
            ],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        report = workdir / "report.html"
        while not report.exists() and following.poll() is None:
            time.sleep(0.1)
        first = report.read_text()
        training.terminate()
    assert training.returncode == 75
    where, goodput = following.communicate(timeout=60)[0].splitlines()
    assert where == f"report: {report}" and goodput.startswith("goodput ")
    assert following.returncode == 0
    assert 'http-equiv="refresh"' in first and "running" in Tags(first).text
    assert 'http-equiv="refresh"' not in report.read_text()
    assert "stopped" in Tags(report.read_text()).text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["{empty}"], "no run here"),
        (["{run}", "--out", "{empty}"], "is no file"),
        (["{run}", "--out", "{empty}/no/page.html"], "no folder"),
        (["{run}", "{run}/"], "the same run as"),
        (["{run}", "--follow", "--every", "0"], "--every 0"),
        (["{run}", "--price-per-chip-hour", "nan"], "--price-per-chip-hour nan"),
        (["{run}", "--price-per-chip-hour", "-1"], "--price-per-chip-hour -1"),
    ],
)
def test_bad_input_is_named(args, words, run, tmp_path, capsys):
    args = [arg.format(run=run, empty=tmp_path) for arg in args]
    assert cli.main(["report", *args]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_long_curve_is_thinned_without_losing_its_ends():
    x, y = figures.thin(list(range(100_001)), [1.0] * 100_001)
    assert len(x) <= 400 and x[-1] == 100_000 and set(y) == {1.0}
    assert figures.thin([], []) == ([], [])


def test_a_plot_of_nothing_but_text_that_looks_like_mathematics():
    svg = figures.draw(figures.Plot("t", [figures.Curve([1, 2], [1, 2], "_$x_1 <b>")]), "a")
    assert "_$x_1 &lt;b&gt;" in svg


def test_a_line_of_one_point_shows_it():
    one, two = (
        figures.draw(figures.Plot("t", [figures.Curve(x, x, "", style="line")]), "a")
        for x in ([1.0], [1.0, 2.0])
    )
    marked = re.compile(r'<g clip-path="[^"]*">\s*<use')
    assert marked.search(one) and not marked.search(two)


def test_a_run_that_ends_in_an_error_is_not_called_killed(run, tmp_path, monkeypatch):
    def fails(*_):
        raise InputError("the disk is full")

    monkeypatch.setattr("bert_jax.training.runner.Trainer._evaluate", fails)
    file = run.parent / "small.py"
    assert cli.main(["pretrain", str(file), "--workdir", str(tmp_path / "w")]) == 2
    record = Record.read(str(tmp_path / "w"))
    assert record.state == "failed" and record.timings[-1]["why"] == "the disk is full"
    assert record.done == 6


def test_starting_a_finished_run_again_leaves_its_times_alone(run):
    before = (run / "timings.jsonl").read_bytes()
    record = Record.read(str(run))
    args = [f"run.watch={json.dumps(record.experiment.run.watch)}", "name=x&y<b>"]
    settings = [word for arg in args for word in ("--set", arg)]
    assert (
        cli.main(["pretrain", str(run.parent / "small.py"), "--workdir", str(run), *settings]) == 0
    )
    assert (run / "timings.jsonl").read_bytes() == before

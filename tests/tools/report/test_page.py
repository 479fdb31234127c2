"""The page of a run, read as a browser reads it."""

import html.parser
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import broken
import numpy as np
import pytest
from small_run import hooked, settings, write_text

from bert_jax.data import corpus, draws, pairs
from bert_jax.errors import InputError
from bert_jax.pretraining.prepared_corpus import PreparedCorpus
from bert_jax.tools.plan import estimate
from bert_jax.tools.report import figures, page, times
from bert_jax.tools.report.run_record import Record, corpus_statistics

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


def assert_inert(text):
    tags = Tags(text)
    assert not tags.tags & {"script", "img", "iframe", "link"}
    assert not any(name.startswith("on") for name in tags.attributes)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", text)
    assert "{{ 7*7 }}" in tags.text
    return tags.text


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures are not drawn: their titles are what these tests look at."""
    for name in ("draw", "draw_histogram"):
        monkeypatch.setattr(figures, name, lambda *_: "")


def edited(file, change):
    """Writes JSON lines, or one JSON object, again."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in change(lines)))


def named(folder, **values):
    saved = json.loads((folder / "experiment.json").read_text())
    for name, value in values.items():
        saved[name] = saved[name] | value if isinstance(value, dict) else value
    (folder / "experiment.json").write_text(json.dumps(saved))


def test_hostile_text_is_shown_as_text_in_every_place(run, monkeypatch):
    """Whatever stands in the vocabulary, rows, predictions, and names of run and settings."""
    hostile = run.with_name("<img src=x>")
    run.rename(hostile)
    named(hostile, run={"watch": [HOSTILE]})
    monkeypatch.setattr("bert_jax.text.tokenizer.WordPiece.token", lambda self, i: HOSTILE)
    page._cached_statistics.cache_clear()
    record = Record.read(str(hostile))
    sentence = {"text": HOSTILE, "truth": HOSTILE, "masks": [[(HOSTILE, 0.5)]]}
    record.predictions = [line | {"sentences": [sentence]} for line in record.predictions]
    text = page.render_page([record])
    page._cached_statistics.cache_clear()
    shown = assert_inert(text)
    assert "<img src=x>" in shown
    # Forty commonest pieces, examples of two phases, predictions.
    assert shown.count("<script>alert(1)</script> \\x1b[31mred") > 60
    # The page needs nothing else, and no id of a picture is there twice.
    assert "default-src 'none'" in text
    assert not re.search(r"""(src|href)=["']?(http|//)""", text)
    assert not re.search(r"url\((?!#)", text)
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids)) > 0


def test_a_page_says_how_the_run_stands(run, undrawn):
    record = Record.read(str(run))
    assert record.state == "finished" and record.steps_done == 22
    text = Tags(page.render_page([record])).text
    newest = record.evaluation[-1]
    for words in (
        "step 22 of 22",
        f"{newest['masked_lm_loss']:.3f}masked LM, nat",
        f"{record.recent('real_tokens_per_second'):,.0f}tokens per second; padding is",
        f"{100 * record.recent('real_utilisation'):.1f} % without padding",
        f"{100 * newest['next_sentence_accuracy']:.1f} ± ",
        "Masked LM loss",
        "Gradient norm",
        "compiling steps",
        "random next",
        "[MASK]",
        "model.hidden_size: 768 -> 16",
    ):
        assert words in text, words


def test_each_part_of_the_time_has_a_colour():
    style = pathlib.Path(page.__file__).with_name("style.html").read_text()
    assert all(f".k{number} {{" in style for number in range(len(times.PARTS)))


def test_a_planned_run_shows_its_plan(run, undrawn):
    seconds = dict.fromkeys(estimate.TERMS, 0.0005)
    seconds |= {"total": sum(seconds.values())}
    fits = {"phase": 0, "outcome": "compiled", "memory": {"peak": 2**30}, "seconds": seconds}
    fits |= {"utilisation": 0.4, "hours": 3.0}
    other = {"phase": 1, "outcome": "too large", "memory": {}, "hours": None}
    entry = {"topology": "v5e:2x4", "chips": 8, "device_memory": 2**34, "phases": [fits, other]}
    record = Record.read(str(run))
    record.plan = {"slices": [entry], "versions": {"libtpu": "1.2"}}
    text = Tags(page.render_page([record])).text
    for words in ("v5e:2x4", "1.00 of 16 GiB", "5.0 ms", "40.0 %", "too large", "libtpu 1.2"):
        assert words in text, words
    step, *columns = map(float, re.findall(r"([\d.]+) ms", text))
    assert sum(columns) == pytest.approx(step), "no term is left out"


def test_a_corpus_is_counted(run):
    record = Record.read(str(run))
    prepared = PreparedCorpus.open(record.workdir.corpus)
    made = corpus_statistics(record.experiment, prepared)
    stream = corpus.open_stream(prepared.folder, "train")
    unknown, sentences = prepared.tokenizer.unk_id, np.diff(stream.sentence_offsets)
    assert made["unknown"] == np.mean(stream.ids == unknown)
    assert np.array_equal(made["sentence_lengths"], sentences)
    assert made["document_lengths"].tolist() == [*map(len, prepared_documents(stream))]
    piece, share = made["top_tokens"][0]
    assert piece == "." and share == np.mean(stream.ids == prepared.tokenizer.encode(".")[0])
    for plan, phase in zip(made["row_shares"], record.experiment.phases, strict=True):
        number = record.experiment.phases.index(phase)
        key = draws.key_of(record.experiment.seed, "train", number, 0)
        rows = pairs.sample(stream, phase.sequence_length, 0.1, key, 10**6, "pairs")
        wanted = rows["a_length"].astype(int) + rows["b_length"]
        kept = np.minimum(wanted, phase.sequence_length - 3)
        assert plan["truncated"] == pytest.approx(1 - kept.sum() / wanted.sum())
        assert plan["filled"] == pytest.approx((kept + 3).mean() / phase.sequence_length)
        assert plan["random_next"] == rows["is_random_next"].mean()


def prepared_documents(stream):
    starts = stream.sentence_offsets[stream.document_offsets]
    return [stream.ids[a:b] for a, b in itertools.pairwise(starts)]


def test_several_runs_are_compared_on_one_page(run, undrawn):
    shutil.copytree(run, "other")
    named(run.with_name("other"), seed=5)
    broken.said(["report", str(run), "other"])
    text = run.with_name("comparison.html").read_text()
    assert "What differs" in text and "Masked LM loss, nat" in text
    assert re.search(r">seed</td>\s*<td[^>]*>0</td>\s*<td[^>]*>5</td>", text)


def test_goodput_and_cost_are_printed_and_shown(run, undrawn):
    """As if the run had had four chips, a price at which a second of one costs 1."""
    command = f"report {run} --price-per-chip-hour 3600"
    assert "; no cost, since cpu has no price\n" in broken.said(command)
    assert "cost so far" not in (run / "report.html").read_text()
    timings = run / "timings.jsonl"
    text = timings.read_text()
    timings.write_text(text.replace('["cpu", 4]', '["TPU v4", 4]'))
    assert timings.read_text() != text
    lines = [json.loads(line) for line in text.splitlines()]
    line = broken.said(command).splitlines()[-1]
    cost = f"{4 * sum(one['seconds'] for one in lines):,.2f}"
    assert line.startswith("goodput ") and line.endswith(f"chip-hours, cost {cost}")
    text = Tags((run / "report.html").read_text()).text
    assert line in text and f"{cost}cost so far" in text


def test_a_run_before_its_first_line_and_without_its_corpus_has_a_page(run, undrawn, tmp_path):
    (tmp_path / "new").mkdir()
    shutil.copy(run / "experiment.json", tmp_path / "new")
    named(tmp_path / "new", run={"corpus_dir": str(tmp_path / "gone")})
    text = Tags(page.render_page([Record.read(str(tmp_path / "new"))])).text
    assert "not started" in text and "No line is written yet" in text
    assert "no prepared corpus here" in text


def test_how_a_run_stands_is_read_off_its_last_line_and_its_lock(run, undrawn, monkeypatch):
    timings = run / "timings.jsonl"
    facts = {"outcome": "failed", "why": "the disk is full\nmore"}
    edited(timings, lambda lines: [*lines[:-1], lines[-1] | facts])
    assert "failed at step 22: the disk is full\n" in broken.said(f"report {run}")
    assert "Failed: the disk is full" in Tags((run / "report.html").read_text()).text
    edited(timings, lambda lines: [*lines[:-1], lines[-1] | {"outcome": "stopped"}])
    record = Record.read(str(run))
    assert (record.state, record.reason) == ("stopped", "the disk is full")
    edited(timings, lambda lines: lines[:-1])
    assert Record.read(str(run)).state == "killed"
    monkeypatch.setattr("bert_jax.storage.mirror.is_running", lambda workdir: True)
    assert Record.read(str(run)).state == "running"


@pytest.mark.long
def test_a_run_that_ends_in_an_error_says_why_and_a_finished_one_keeps_its_times(run, monkeypatch):
    before = (run / "timings.jsonl").read_bytes()
    broken.said(f"pretrain small.py --workdir {run}")
    assert (run / "timings.jsonl").read_bytes() == before

    def fails(*_):
        raise InputError("the disk is full")

    with hooked(on_evaluation=fails):
        broken.fails("pretrain small.py --workdir w", "the disk is full")
    record = Record.read("w")
    assert record.state == "failed" and record.timings[-1]["why"] == "the disk is full"
    assert record.steps_done == 6


@pytest.mark.nightly
def test_following_ends_with_the_run(tmp_path):
    """The page renews itself while the run goes on, and no longer once it is over."""
    file = write_text(tmp_path / "text")
    workdir = tmp_path / "w"
    environment = os.environ | settings(1)
    command = [sys.executable, "-m", "bert_jax.cli"]
    train = ["pretrain", str(file), "--workdir", str(workdir), "--set", "phases.0.steps=3000"]
    follow = ["report", str(workdir), "--follow", "--every", "1"]
    with subprocess.Popen(
        [*command, *train], env=environment, stdout=subprocess.DEVNULL
    ) as training:
        while not (workdir / "timings.jsonl").exists() and training.poll() is None:
            time.sleep(0.1)
        following = subprocess.Popen(
            [*command, *follow], env=environment, stdout=subprocess.PIPE, text=True
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
    ("args", "name"),
    [
        (["empty"], "empty"),
        (["run", "--out", "empty"], "--out empty"),
        (["run", "--out", "empty/no/page.html"], "--out"),
        (["run", "run/"], "run/"),
        (["run", "--follow", "--every", "0"], "--every"),
        (["run", "--price-per-chip-hour", "nan"], "--price-per-chip-hour"),
        (["run", "--price-per-chip-hour", "-1"], "--price-per-chip-hour"),
    ],
)
def test_bad_input_is_named(args, name, run):
    run.with_name("empty").mkdir()
    broken.fails(["report", *args], name)
    assert not list(run.with_name("empty").iterdir()) and not (run / "report.html").exists()


# --- pictures ---


def test_a_long_curve_is_thinned_without_losing_its_ends():
    x, y = figures.thin(list(range(100_001)), [1.0] * 100_001)
    assert len(x) <= 400 and x[-1] == 100_000 and set(y) == {1.0}
    assert np.mean(figures.thin(range(1_000), range(1_000))[1]) == pytest.approx(499.5, rel=0.01)
    assert figures.thin([], []) == ([], [])


def test_a_label_that_looks_like_mathematics_is_text_and_a_single_point_is_seen():
    svg = figures.draw(figures.Plot("t", [figures.Curve([1, 2], [1, 2], "_$x_1 <b>")]), "a")
    assert "_$x_1 &lt;b&gt;" in svg
    marked = re.compile(r'<g clip-path="[^"]*">\s*<use')
    assert not marked.search(svg)
    assert marked.search(figures.draw(figures.Plot("t", [figures.Curve([1.0], [1.0], "")]), "a"))

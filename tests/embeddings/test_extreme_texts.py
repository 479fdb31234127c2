"""Empty and long queries, a single text, and a million texts, for vectors of each form."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import samples
import tuned
from etils import epath

from bert_jax.checkpoints import base as base_lib
from bert_jax.checkpoints.base import TextVectors
from bert_jax.embeddings import embed, search
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.storage.mirror import open_workdir

FORMS = ("dense", "sparse", "multi_vector")
LIMIT, QUERY_LENGTH = 12, 6
# The number of tokens to which a query is truncated.
QUERY_LIMIT = {"dense": LIMIT, "sparse": LIMIT, "multi_vector": QUERY_LENGTH}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "base"
    tuned.write_base(folder)
    return LoadedModel.of(open_workdir(folder))


def with_form(trained, form):
    """Returns the model with vectors of a form."""
    length = QUERY_LENGTH if form == "multi_vector" else 0
    vectors = TextVectors(form=form, max_length=LIMIT, query_length=length)
    params = trained.params
    if form == "multi_vector":
        kernel = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
        params = params | {"projection": {"kernel": kernel}}
    return dataclasses.replace(trained, vectors=vectors, params=params)


def embedder_of(model):
    return embed.Embedder(model, embed.VectorOptions(normalize=True), samples.mesh_of(1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("query", ["", " ", "?", "\x00", "unknown words only", "wa " * 500])
def test_a_query_of_any_length_ranks_a_single_text(form, query, trained, tmp_path):
    model = with_form(trained, form)
    (tmp_path / "texts").write_text("wa xb\n")
    arguments = epath.Path(tmp_path / "vectors"), model, embedder_of(model), print
    (hits,) = search.Index(str(tmp_path / "texts"), *arguments).nearest([query], 5)
    assert [(hit.line, hit.text) for hit in hits] == [(1, "wa xb")]
    assert np.isfinite(hits[0].score)


@pytest.mark.parametrize("form", FORMS)
def test_a_long_query_counts_as_truncated_and_is_its_beginning(form, trained):
    model, limit = with_form(trained, form), QUERY_LIMIT[form]
    embedder, words = embedder_of(model), ["wa", "xb", "wc"] * 5
    beginning = " ".join(words[: limit - 2])
    long, short = (list(embedder.embed([x], "query")) for x in (" ".join(words), beginning))
    records = [embedder.form.split_records(part.vectors)[0] for part in (*long, *short)]
    np.testing.assert_array_equal(*records)
    assert (embedder.texts, embedder.truncated_texts) == (2, 1)
    assert embedder.token_limit("query") == limit
    list(embedder.embed([beginning + " wa wa"]))  # as a text it may have all of `LIMIT`
    assert embedder.truncated_texts == 1 + (limit == LIMIT)


@pytest.mark.parametrize("form", FORMS)
def test_memory_does_not_grow_with_the_number_of_streamed_texts(form, trained, monkeypatch):
    """At most three windows are in memory: one that is computed, one tokenized, one collected."""
    monkeypatch.setattr(embed, "_WINDOW_TEXTS", 100)
    counts = {"taken": 0, "returned": 0}

    def texts():
        for number in range(2_000):
            counts["taken"] += 1
            yield f"{tuned.GOOD[number % 4]} {tuned.BAD[number // 4 % 4]}"

    for part in embedder_of(with_form(trained, form)).embed(texts()):
        counts["returned"] += part.vectors.shape[0]
        assert counts["taken"] - counts["returned"] <= 300
    assert counts["returned"] == 2_000


COMMAND = """
import pathlib, re, sys
from bert_jax import cli
code = cli.main(sys.argv[1:])
status = pathlib.Path("/proc/self/status").read_text()
print(re.search(r"VmHWM:\\s*(\\d+) kB", status)[1])
sys.exit(code)
"""


def run(*arguments):
    """Runs a command in a process of its own; returns what it prints, and its peak memory in MB."""
    words = [sys.executable, "-c", COMMAND, *arguments]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    *printed, peak = done.stdout.splitlines()
    return "\n".join(printed), int(peak) / 1024


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS)
def test_a_million_texts_are_embedded_and_searched(form, trained, tmp_path, monkeypatch):
    """`embed` needs no more memory than for 20,000 texts; `search` keeps a key of each text."""
    monkeypatch.chdir(tmp_path)
    model = with_form(trained, form)
    base = base_lib.Base(model.model, model.params, model.tokenizer, vectors=model.vectors)
    base_lib.write(base, epath.Path("base"))
    words, peaks = (*tuned.GOOD, *tuned.BAD), {}
    for count in (20_000, 1_000_000):
        with open("texts", "w") as file:
            for number in range(count):
                digits = (number // 8**place % 8 for place in range(7))
                file.write(" ".join(words[digit] for digit in digits) + "\n")
        printed, peak = run("embed", "texts", "--workdir", "base", "--out", "vectors.npz")
        assert f"{count:,} texts" in printed
        query = " ".join([words[7], *words[:1] * 4])
        printed, search_peak = run("search", "texts", query, "--workdir", "base", "--top", "2")
        assert len(printed.splitlines()) >= 3
        peaks[count] = peak, search_peak
    growth = np.subtract(peaks[1_000_000], peaks[20_000])
    assert growth[0] < 100 and growth[1] < 1_000, peaks

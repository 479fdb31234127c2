"""Documents selected by a number in their records, against files that were divided before."""

import csv
import dataclasses
import json
import random

import numpy as np
import pyarrow.parquet
import pytest
import samples
import tensorflow_datasets as tfds
from etils import epath
from test_corpus import SIZE, document, quiet, write_vocab

from bert_jax.config import Corpus
from bert_jax.data import corpus, parts
from bert_jax.errors import InputError
from bert_jax.text import documents

# Records of ten documents of each score 0, 0.5, ..., 3.5; the numbers at both ends of [2, 3) occur.
SCORES = [n % 8 / 2 for n in range(80)]
random.Random(0).shuffle(SCORES)
ROWS = [{"text": document(n), "meta": {"score": score}} for n, score in enumerate(SCORES)]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_table(path, rows):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=30)
        return path
    with open(path, "w", newline="") as file:
        cells = [(row["text"], row["meta"]["score"]) for row in rows]
        csv.writer(file).writerows([("text", "meta.score"), *cells])
    return path


def stream_files(manifest):
    files = manifest["files"].items()
    return {name: entry for name, entry in files if not name.startswith("dataset/")}


def test_documents_in_the_range_are_read_from_records_of_each_kind(tmp_path):
    expected = {
        "meta.score:2": [row["text"].strip() for row in ROWS if row["meta"]["score"] >= 2],
        "meta.score:2:3": [row["text"].strip() for row in ROWS if 2 <= row["meta"]["score"] < 3],
    }
    features = {"text": tfds.features.Text(), "meta": {"score": np.float32}}
    dataset = samples.ready_dataset(tmp_path / "tfds", "scored", features, {"train": ROWS})
    sources = [f"tfds_dir:{dataset}"]
    for path in (tmp_path / "a.jsonl", tmp_path / "a.csv", tmp_path / "a.parquet"):
        sources.append(str((write_lines if path.suffix == ".jsonl" else write_table)(path, ROWS)))
    for source in sources:
        for quality, texts in expected.items():
            settings = Corpus(sources=(source,), quality=quality)
            assert [found.text for found in documents.read(settings)] == texts, source


def test_a_corpus_of_bands_has_the_bytes_of_one_of_divided_files(tmp_path, monkeypatch):
    """A source listed twice is mixed as two files, and the excluded documents are counted."""
    monkeypatch.setattr(parts, "PART_BYTES", 2_000)  # so that files are read in several parts
    tokenizer = str(write_vocab(tmp_path / "vocab.txt"))
    scored = write_lines(tmp_path / "scored.jsonl", ROWS)
    other = write_lines(tmp_path / "other.jsonl", [{"text": document(n)} for n in range(90, 99)])
    bands = [
        write_lines(tmp_path / f"{low}.jsonl", [r for r in ROWS if low <= r["meta"]["score"] < top])
        for low, top in ((2, 3), (3, 9))
    ]
    by_score = Corpus(
        sources=(f"jsonl:{scored}", f"jsonl:{scored}", f"jsonl:{other}"),
        quality="meta.score:2:3,meta.score:3,",
        mixture=(1, 3, 1),
        tokenizer=tokenizer,
        validation_share=0.2,
    )
    divided = dataclasses.replace(
        by_score, sources=tuple(f"jsonl:{path}" for path in (*bands, other)), quality=""
    )
    lines = []
    made = corpus.prepare(by_score, SIZE, epath.Path(tmp_path / "a"), lines.append)
    expected = corpus.prepare(divided, SIZE, epath.Path(tmp_path / "b"), quiet)
    assert made["documents_of_sources"] == expected["documents_of_sources"]
    # The shards of the dataset are others, since the parts of the files are.
    assert stream_files(made) == stream_files(expected) != {}
    assert made["documents_excluded"] == 2 * len(ROWS) - 20 - 20
    assert expected["documents_excluded"] == 0
    assert any("120 documents" in line and "corpus.quality" in line for line in lines)
    changed = dataclasses.replace(by_score, quality="meta.score:2:3,meta.score:3:4,")
    with pytest.raises(InputError, match="prepared with quality="):
        corpus.prepare(changed, SIZE, epath.Path(tmp_path / "a"), quiet)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({}, "no column 'score'"),
        ({"score": None}, "'score' is null"),
        ({"score": "high"}, "'score' is \"high\""),
        ({"score": float("nan")}, "'score' is NaN"),
        ({"score": True}, "'score' is true"),
        ({"score": [3]}, r"'score' is \[3\]"),
    ],
)
def test_a_quality_that_is_no_number_is_named_with_its_line(tmp_path, monkeypatch, row, named):
    monkeypatch.setattr(parts, "PART_BYTES", 100)
    rows = [{"text": "Text.", "score": 1}] * 40 + [{"text": "Text."} | row]
    path = write_lines(tmp_path / "a.jsonl", rows)
    settings = Corpus(sources=(f"jsonl:{path}",), quality="score:1")
    with pytest.raises(InputError, match=rf"a\.jsonl:41: .*{named}.*corpus\.quality"):
        corpus.prepare(settings, SIZE, epath.Path(tmp_path / "corpus"), quiet)
    assert not (tmp_path / "corpus" / "COMPLETE").exists()


def test_a_missing_column_of_a_table_is_named_with_the_others(tmp_path):
    path = write_table(tmp_path / "a.parquet", ROWS)
    settings = Corpus(sources=(f"parquet:{path}",), quality="score:1")
    with pytest.raises(InputError, match=r"a\.parquet: no column 'score' .*'meta\.score'"):
        next(documents.read(settings))

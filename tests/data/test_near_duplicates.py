"""Near-duplicate documents and text of evaluation sets, against sets of words in plain Python."""

import dataclasses
import importlib.util
import itertools
import json
import random
import shutil

import numpy as np
import pytest
from etils import epath
from test_corpus import quiet

from bert_jax.config import Corpus
from bert_jax.data import corpus, near_duplicates
from bert_jax.errors import InputError
from bert_jax.storage.workdir import with_checksum

WORDS = [f"{a}{b}{c}" for a in "bdfgklm" for b in "aeiou" for c in "nprst"]
RUN, NGRAM = 5, 13


def runs(words, length):
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def numbered(documents):
    """Documents of numbers as the hashes of their words, and the bounds of the documents."""
    hashes = np.array([*itertools.chain.from_iterable(documents)], np.uint64)
    spread = hashes * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)
    return spread, np.cumsum([0, *map(len, documents)])


def test_runs_are_those_within_documents():
    rng = random.Random(0)
    documents = [[rng.randrange(3) for _ in range(n)] for n in (9, 0, 3, 5, 4, 40, 1, 6)]
    for length in (1, 2, 5, 13):
        hashes, counts = near_duplicates._hash_ngrams(*numbered(documents), length)
        expected = [tuple(d[i : i + length]) for d in documents for i in range(len(d) - length + 1)]
        assert counts.tolist() == [max(len(d) - length + 1, 0) for d in documents]
        assert len(hashes) == len(expected)
        pairs = {*zip(hashes.tolist(), expected, strict=True)}
        assert len(pairs) == len({*hashes.tolist()}) == len({*expected})


@pytest.mark.parametrize("similarity", [0.5, 0.7, 0.8, 0.9])
def test_pairs_are_found_as_often_as_their_similarity_says(similarity):
    """Two documents differ from some word on; 1 - (1 - s^8)^16 by Broder's theorem."""
    rng, pairs, size = random.Random(1), 600, 400
    kept = round(2 * similarity / (1 + similarity) * size)
    documents = []
    for _ in range(pairs):
        shared = [rng.randrange(1 << 40) for _ in range(kept + RUN - 1)]
        documents += [shared + [rng.randrange(1 << 40) for _ in range(size - kept)] for _ in "ab"]
    first, second = (runs(document, RUN) for document in documents[:2])
    exact = len(first & second) / len(first | second)
    assert exact == pytest.approx(similarity, abs=0.005)
    bands = near_duplicates.hash_bands(*numbered(documents))
    found = (bands[:, ::2] == bands[:, 1::2]).any(axis=0).mean()
    expected = 1 - (1 - exact**8) ** 16
    assert abs(found - expected) <= 4 * np.sqrt(expected * (1 - expected) / pairs) + 1e-3


def test_the_first_in_order_stays():
    bands = np.zeros((near_duplicates.BANDS, 6), np.uint64)
    bands[3] = [7, 0, 8, 7, 0, 8]
    bands[5, [1, 2]] = 9
    parts = [bands[:, :4], bands[:, 4:]]
    later = near_duplicates.find_later_duplicates(parts, np.arange(6))
    assert np.flatnonzero(later).tolist() == [2, 3, 5]
    later = near_duplicates.find_later_duplicates(parts, np.array([5, 4, 3, 2, 1, 0]))
    assert np.flatnonzero(later).tolist() == [0, 1, 2]


# --- a corpus ---


def sentence(rng, count=12):
    return " ".join(rng.choice(WORDS) for _ in range(count)).capitalize() + "."


def text(rng, sentences=20):
    return "\n".join(sentence(rng) for _ in range(sentences))


def write(folder, documents):
    """Writes two files of documents; returns the settings of their corpus."""
    folder.mkdir()
    for number in (0, 1):
        lines = (json.dumps({"text": document}) for document in documents[number::2])
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return Corpus(sources=(f"jsonl:{folder}",), validation_share=0.2)


def planted(rng):
    """Documents; near duplicates of the first twenty in other forms; and unrelated ones."""
    originals = [text(rng) for _ in range(120)]
    forms = (
        lambda d: f"{d}\n{sentence(rng)}",  # a longer one
        lambda d: d.upper().replace(".", " !"),  # other case and punctuation
        lambda d: d.replace(d.split()[100], "other"),  # another word in some places
        lambda d: d.partition("\n")[2],  # without its first sentence
    )
    copies = [forms[n % 4](document) for n, document in enumerate(originals[:40])]
    return originals, copies


def documents_in(folder):
    """The text of all documents that are left, as words."""
    manifest = corpus.open_manifest(folder)
    tokenizer = corpus.open_tokenizer(folder, manifest)
    found = {}
    for split in ("train", "validation"):
        stream = corpus.open_stream(folder, split)
        bounds = stream.sentence_offsets[stream.document_offsets.astype(np.int64)]
        pairs = itertools.pairwise(bounds.tolist())
        found[split] = [tokenizer.decode(stream.ids[a:b].tolist()) for a, b in pairs]
    return found


@pytest.fixture(scope="module")
def cleaned(tmp_path_factory):
    """A corpus of planted documents, kept whole and dropped."""
    root = tmp_path_factory.mktemp("planted")
    originals, copies = planted(random.Random(0))
    settings = write(root / "text", originals + copies)
    for name in ("keep", "drop"):
        changed = dataclasses.replace(settings, near_duplicates=name)
        corpus.prepare(changed, 300, epath.Path(root / name), quiet)
    return root, settings


def test_near_duplicates_are_dropped_and_counted(cleaned):
    root, _ = cleaned
    kept, dropped = (corpus.open_manifest(epath.Path(root / n)) for n in ("keep", "drop"))
    assert "documents_near_duplicate" not in kept
    assert dropped["documents_near_duplicate"] == 40
    counts = [sum(s["documents"] for s in m["splits"].values()) for m in (kept, dropped)]
    assert counts == [160, 120]
    left = documents_in(epath.Path(root / "drop"))
    words = [d.replace(".", "").replace("!", "").split() for s in left.values() for d in s]
    each = [runs(document, RUN) for document in words]
    assert not any(len(a & b) > 0.5 * len(a | b) for a, b in itertools.combinations(each, 2))
    # Of a held-out and a training document, the held-out one stays.
    before = documents_in(epath.Path(root / "keep"))["validation"]
    assert {*left["validation"]} <= {*before}
    lost = len(before) - len(left["validation"])
    assert lost < len(before) / 5


def test_a_corpus_of_an_earlier_version_is_used_as_it_is(cleaned, tmp_path):
    """Its manifest has none of the later settings."""
    root, settings = cleaned
    shutil.copytree(root / "keep", tmp_path / "old")
    manifest = corpus.open_manifest(epath.Path(root / "keep"))
    for name in ("near_duplicates", "evaluation_files", "temperature"):
        del manifest["settings"][name]
    del manifest["checksum"]
    (tmp_path / "old" / "manifest.json").write_text(json.dumps(with_checksum(manifest)))
    found = corpus.prepare(settings, 300, epath.Path(tmp_path / "old"), quiet)
    assert found["files"] == manifest["files"]
    changed = dataclasses.replace(settings, near_duplicates="drop")
    with pytest.raises(InputError, match="prepared with near_duplicates='keep', now 'drop'"):
        corpus.prepare(changed, 300, epath.Path(tmp_path / "old"), quiet)


@pytest.mark.long
def test_the_number_of_workers_changes_nothing(cleaned, monkeypatch, tmp_path):
    root, settings = cleaned
    monkeypatch.setattr("bert_jax.data.parts.PART_BYTES", 1 << 14)
    changed = dataclasses.replace(settings, near_duplicates="drop")
    alone, parallel = (
        corpus.prepare(changed, 300, epath.Path(tmp_path / str(n)), quiet, workers=n)
        for n in (1, 2)
    )
    assert alone["files"] == parallel["files"]
    assert documents_in(epath.Path(tmp_path / "2")) == documents_in(epath.Path(root / "drop"))


@pytest.mark.parametrize(
    ("kind", "enough", "too_few"), [("wordpiece", 13, 12), ("byte_bpe", 15, 3)]
)
def test_text_of_evaluation_sets_is_dropped(tmp_path, kind, enough, too_few, monkeypatch):
    """Thirteen words or tokens in a row; also of a document that several blocks hold."""
    monkeypatch.setattr(near_duplicates, "_BLOCK", 64)
    rng = random.Random(2)
    documents = [text(rng, 6) for _ in range(60)]
    lines = ["label\ttext"]
    excerpts = ((3, 0, enough), (17, 40, enough), (29, 57, enough), (40, 7, too_few))
    for number, start, count in excerpts:
        found = documents[number].split()[start : start + count]
        changed = ", ".join(found).upper().replace(".", "")  # as WordPiece's words, not as tokens
        lines.append(f"1\t{changed if kind == 'wordpiece' else ' '.join(found)}")
    (tmp_path / "dev.tsv").write_text("\n".join(lines) + "\n")
    settings = dataclasses.replace(
        write(tmp_path / "text", documents),
        evaluation_files=(str(tmp_path / "dev.tsv"),),
        tokenizer_kind=kind,
    )
    folder = epath.Path(tmp_path / "corpus")
    manifest = corpus.prepare(settings, 800, folder, quiet)
    assert "documents_near_duplicate" not in manifest
    assert manifest["documents_contaminated"] == 3
    assert manifest["evaluation_files"][0]["file"] == settings.evaluation_files[0]
    left = {d.lower().replace(".", "").strip() for s in documents_in(folder).values() for d in s}
    expected = [d for n, d in enumerate(documents) if n not in (3, 17, 29)]
    spaced = [" ".join(d.lower().replace(".", " ").split()) for d in expected]
    assert {" ".join(d.split()) for d in left} == {*spaced}


def test_what_is_missing_is_named_before_the_text_is_read(tmp_path, monkeypatch):
    settings = write(tmp_path / "text", [text(random.Random(n), 3) for n in range(20)])
    lost = dataclasses.replace(settings, evaluation_files=("lost.tsv",))
    with pytest.raises(InputError, match=r"corpus\.evaluation_files: lost\.tsv: no such file"):
        corpus.prepare(lost, 300, epath.Path(tmp_path / "corpus"), quiet)
    (tmp_path / "latin.tsv").write_bytes("good\nca\xf1a\n".encode("latin-1"))
    latin = dataclasses.replace(settings, evaluation_files=(str(tmp_path / "latin.tsv"),))
    with pytest.raises(InputError, match=r"corpus\.evaluation_files: .*latin\.tsv:2: byte 2"):
        corpus.prepare(latin, 300, epath.Path(tmp_path / "corpus"), quiet)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "rensa" else find(n))
    with pytest.raises(InputError, match=r"corpus\.near_duplicates.*bert-jax\[dedup\]"):
        changed = dataclasses.replace(settings, near_duplicates="drop")
        corpus.prepare(changed, 300, epath.Path(tmp_path / "corpus"), quiet)

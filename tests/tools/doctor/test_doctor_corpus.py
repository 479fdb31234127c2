"""Prepared corpora with one planted fault each; the doctor finds it and no other problem."""

import random

import pytest
import samples
from etils import epath

from bert_jax import config
from bert_jax.config import Corpus
from bert_jax.data import corpus, stream
from bert_jax.errors import InputError
from bert_jax.text import tokenizer_training, vocabulary
from bert_jax.tools import doctor
from bert_jax.tools.doctor import corpus_findings as examined
from bert_jax.tools.doctor import finding

LETTERS = "abcdefghijklmnop"
WORDS = [f"{a}{b}{c}" for a in LETTERS for b in "aeiou" for c in LETTERS][:600]


def sentence(rng, words=(8, 20)):
    return " ".join(rng.choices(WORDS, k=rng.randint(*words))) + "."


def documents(count=160, sentences=(60, 90), words=(8, 20), seed=0):
    rng = random.Random(seed)
    return [[sentence(rng, words) for _ in range(rng.randint(*sentences))] for _ in range(count)]


def examine(folder, docs, pieces=(*WORDS, "."), **settings):
    """Prepares documents with a vocabulary and examines the corpus."""
    (folder / "text").mkdir(parents=True)
    blocks = "\n\n".join("\n".join(doc) for doc in docs)
    (folder / "text" / "all.txt").write_text(blocks + "\n")
    vocab = [*vocabulary.SPECIALS, *pieces]
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n")
    settings = Corpus(
        sources=(f"text:{folder / 'text'}",),
        tokenizer=str(folder / "vocab.txt"),
        **{"layout": "sentences_by_line", "validation_share": 0.1, **settings},
    )
    corpus.prepare(settings, len(vocab), epath.Path(folder / "w" / "corpus"), lambda line: None)
    return doctor.examine(str(folder / "w"))


def one_sentence_documents(folder):
    docs = documents()
    return examine(folder, docs[:40] + [[line] for doc in docs[40:] for line in doc[:3]])


def endless_sentences(folder):
    return examine(folder, documents(200, (3, 6), (600, 900)))


def sentences_as_long_as_an_example(folder):
    return examine(folder, documents(200, (20, 30), (125, 135)))


def repeated_documents(folder):
    docs = documents()
    return examine(folder, docs + docs[:32])


def unknown_words(folder):
    docs = documents()
    for doc in docs:
        for place in range(0, len(doc), 4):
            doc[place] += " ω ψ χ."
    return examine(folder, docs)


def capitals_unknown(folder):
    docs = [[line.capitalize() for line in doc] for doc in documents()]
    return examine(folder, docs, case="cased")


def near_duplicates(folder):
    """Every document twice, the second time with a sentence more; splits go by whole texts."""
    docs = documents()
    return examine(
        folder, docs + [[*doc, sentence(random.Random(n))] for n, doc in enumerate(docs)]
    )


def near_duplicates_of_a_text_with_a_word_for_unknown_ones(folder):
    docs = [[line.replace(" ", " <unk> ", 1) for line in doc] for doc in documents()]
    return examine(folder, docs + [[*doc, "More."] for doc in docs], unknown_word="<unk>")


def one_document_of_nearly_all(folder):
    docs = documents(40, (4, 6))
    return examine(folder, [*docs, [line for doc in documents(40) for line in doc]])


FAULTS = [
    (one_document_of_nearly_all, finding.DOMINANT, " document "),
    (one_sentence_documents, finding.ONE_SENTENCE, "train document "),
    (endless_sentences, finding.LONG_SENTENCES, "the lon"),
    (sentences_as_long_as_an_example, examined.RANDOM, ""),
    (repeated_documents, finding.REPEATED, ""),
    (unknown_words, examined.UNKNOWN, "[UNK] [UNK] [UNK]"),
    (capitals_unknown, examined.CASE, ""),
    (near_duplicates, examined.LEAKED, "validation document "),
    (
        near_duplicates_of_a_text_with_a_word_for_unknown_ones,
        examined.LEAKED,
        "validation document ",
    ),
]


def problems(found):
    return [finding for finding in found if finding.severity == "problem"]


@pytest.mark.parametrize(
    ("plant", "rule", "where"), FAULTS, ids=[plant.__name__ for plant, _, _ in FAULTS]
)
def test_a_planted_fault_is_the_one_problem_found(plant, rule, where, tmp_path):
    found = problems(plant(tmp_path))
    assert [one.rule for one in found] == [rule], found
    assert where in found[0].example
    assert found[0].effect and found[0].remedy


def test_a_healthy_corpus_has_no_finding(tmp_path):
    assert examine(tmp_path, documents(400)) == []


def test_repeats_are_a_share_of_documents_as_they_are_cut(tmp_path):
    docs = documents(sentences=(60, 60))
    found = examine(tmp_path, docs + docs[:10], cut_documents=10)
    assert [f.severity for f in found if f.rule is finding.REPEATED] == ["note"]


def test_a_tokenizer_that_lowers_by_itself_is_not_asked_for_another_case():
    counted = samples.word_counts(dict.fromkeys(WORDS, 1))
    kind = Corpus(sources=("text:x",), tokenizer_kind="unigram")
    tok = tokenizer_training.train(counted, 200, kind)
    train = stream.make_stream([[[*tok.encode("aab "), tok.unk_id]]])
    (found,) = examined._check_vocabulary(train, tok)
    assert found.rule is examined.UNKNOWN


def test_what_is_wrong_with_pairs_alone_is_nothing_where_none_are_learned(tmp_path):
    one_sentence_documents(tmp_path)
    for objective, found in (("mlm", []), ("mlm_sop", [finding.ONE_SENTENCE])):
        settings = [
            f"data.objective={objective}",
            f"corpus.sources=text:{tmp_path / 'text'}",
            "corpus.layout=sentences_by_line",
        ]
        assert [f.rule for f in problems(doctor.examine("tiny", settings))] == found
        experiment = config.override(config.load("tiny"), settings)
        (tmp_path / "w" / "experiment.json").write_text(config.to_json(experiment))
        assert [f.rule for f in problems(doctor.examine(str(tmp_path / "w")))] == found


def test_a_run_without_its_corpus_is_refused(tmp_path):
    (tmp_path / "experiment.json").write_text(config.to_json(config.load("experiments/tiny.py")))
    with pytest.raises(InputError, match="corpus: no prepared corpus"):
        doctor.examine(str(tmp_path))


@pytest.mark.long
def test_the_shipped_sample_prepared_has_no_finding(tmp_path):
    settings = config.load("experiments/tiny.py")
    corpus.prepare(settings.corpus, 8_000, epath.Path(tmp_path / "corpus"), lambda line: None)
    assert doctor.examine(str(tmp_path)) == []


def sentences_of(ids):
    return [list(range(first, first + 15)) for first in ids]


def test_shared_sentences_are_found_wherever_they_stand():
    """One in four held-out sentences; other blocks, and sentences of the same pieces moved."""
    rng = random.Random(0)
    train = [sentences_of(rng.sample(range(10_000), 20)) for _ in range(40)]
    held_out = [sentences_of(range(20_000 + 50 * n, 20_020 + 50 * n)) for n in range(10)]
    for doc in held_out:
        doc[7:12] = train[11][3:8]
        doc[0] = [5, *train[5][0][:-1]]  # the same pieces, one place on
    (found,) = examined.find_leaked_sentences(
        stream.make_stream(train),
        stream.make_stream(held_out),
        lambda at: str(at),
    )
    assert found.severity == "problem"
    assert found.message.startswith("25% of held-out sentences")
    assert found.example == f'validation document 0: "{7 * 15}"'


def test_a_large_corpus_is_planned_by_a_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(examined, "_ROWS", 300)
    (found,) = problems(sentences_as_long_as_an_example(tmp_path))
    assert found.message.endswith("at length 128 (in a sample of 300 rows)")

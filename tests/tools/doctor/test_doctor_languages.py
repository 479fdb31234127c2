"""Documents in another language than that of the corpus are found in a sample, and counted."""

import collections
import json
import sys
import types

import pytest

from bert_jax.text.documents import Document
from bert_jax.tools import doctor
from bert_jax.tools.doctor import languages

ENGLISH = "The children and the headman stood by the house on the bank of the river, and it rained."
GERMAN = "Die Kinder und der Vorsteher standen bei dem Haus am Ufer des Flusses, und es regnete."


def find(folder, texts, *settings):
    """The findings about documents in other languages; the corpus has one document a line."""
    lines = [json.dumps({"text": f"{text} {number}"}) + "\n" for number, text in enumerate(texts)]
    (folder / "all.jsonl").write_text("".join(lines))
    path = folder / "experiment.py"
    path.write_text(
        "from bert_jax import config\n"
        "def experiment():\n"
        "    tiny = config.load('experiments/tiny.py')\n"
        f"    source = 'corpus.sources=jsonl:{folder}/all.jsonl'\n"
        "    return config.override(tiny, [source])\n"
    )
    findings = doctor.examine(str(path), settings)
    return [one for one in findings if one.rule is languages.OTHER_LANGUAGE]


@pytest.fixture
def detector(monkeypatch):
    """Stands in for lingua: German is what has the word `und`, and each other text English."""

    def value(code, probability):
        language = types.SimpleNamespace(iso_code_639_1=types.SimpleNamespace(name=code.upper()))
        return types.SimpleNamespace(language=language, value=probability)

    class Builder:
        @classmethod
        def from_all_languages(cls):
            return cls()

        def with_low_accuracy_mode(self):
            return self

        def build(self):
            return self

        def compute_language_confidence_values(self, text):
            german = 0.9 if " und " in text else 0.05
            return [value("de", german), value("en", 0.95 - german), value("fr", 0.05)]

    lingua = types.SimpleNamespace(LanguageDetectorBuilder=Builder)
    monkeypatch.setitem(sys.modules, "lingua", lingua)


def test_documents_in_another_language_are_counted(tmp_path, detector):
    (found,) = find(tmp_path, [ENGLISH] * 18 + [GERMAN] * 2)
    assert found.severity == "note"
    assert "2 of 20 sampled documents (10%)" in found.message and "de 2" in found.message
    assert "than en" in found.message and "Die Kinder" in found.example
    (found,) = find(tmp_path, [ENGLISH] * 18 + [GERMAN] * 2, "corpus.language=de")
    assert found.severity == "problem" and "18 of 20" in found.message
    assert not find(tmp_path, [ENGLISH] * 20)
    assert not find(tmp_path, [ENGLISH] * 20, "corpus.language=eo")  # unknown to the detector


def test_nothing_is_found_without_the_detector(tmp_path):
    assert not find(tmp_path, [GERMAN] * 20)


def test_the_sample_is_of_all_documents_alike(monkeypatch):
    monkeypatch.setattr(languages, "_SAMPLE", 50)
    sample = languages.LanguageSample()
    for number in range(1_000):
        sample.add(Document(f"{number}", [f"{number}"], "wrapped", 1))
    numbers = [int(text) for text, _ in sample._texts]
    assert len(set(numbers)) == 50
    tenths = collections.Counter(number // 100 for number in numbers)
    assert len(tenths) >= 8 and max(tenths.values()) <= 15


def test_lingua_tells_english_from_german(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "lingua")
    pytest.importorskip("lingua")
    (found,) = find(tmp_path, [ENGLISH] * 15 + [GERMAN] * 5)
    assert "5 of 20" in found.message and "de 5" in found.message

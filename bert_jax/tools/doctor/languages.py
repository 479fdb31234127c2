"""Finds documents in another language than that of the corpus, with lingua (the extra `language`).

For introductions of Wikipedia's articles, which have many foreign names, lingua is wrong in 10 of
1,000 English and 7 of 1,000 French ones.
"""

import collections
import random

from bert_jax.errors import pluralize
from bert_jax.text.documents import Document
from bert_jax.tools.doctor.finding import Finding, FindingRule, example

# Number of documents whose language is detected, and characters of each; takes ten seconds in all.
_SAMPLE, _BEGINNING = 2_000, 500
# Minimum difference between lingua's probabilities of another language and of the expected one.
_MARGIN = 0.5
# Maximum number of languages that a finding names.
_MAX_NAMED = 5

OTHER_LANGUAGE = FindingRule(
    "{count:,} of {documents} ({value}) seem to be in another language than {expected}: {others}",
    0.03, 0.5,
    "sentences are split by the rules of another language, and the vocabulary serves several",
    "--set corpus.language=CODE if the text is meant to be in another language; else remove these "
    "documents",
)  # fmt: skip


class LanguageSample:
    """A random sample of the documents of a corpus, by reservoir sampling."""

    def __init__(self) -> None:
        self._random, self._seen = random.Random(0), 0
        self._texts: list[tuple[str, str]] = []  # beginnings, and examples for a finding

    def add(self, document: Document) -> None:
        """Adds a document to the sample, or leaves it out; each has the same probability."""
        self._seen += 1
        position = self._seen - 1
        if position >= _SAMPLE and (position := self._random.randrange(self._seen)) >= _SAMPLE:
            return
        beginning = document.text[:_BEGINNING]
        excerpt = example(document.location(0), beginning)
        # Appends until the sample is full, then replaces.
        self._texts[position : position + 1] = [(beginning, excerpt)]

    def findings(self, language: str) -> list[Finding]:
        """Returns the finding about sampled documents in another language than `language`.

        `language` is a code of `corpus.language`. Returns [] if lingua is not installed or does not
        know this language.
        """
        try:
            from lingua import LanguageDetectorBuilder
        except ImportError:
            return []
        detector = LanguageDetectorBuilder.from_all_languages().with_low_accuracy_mode().build()
        expected = language.partition("-")[0]
        others, first_example = collections.Counter[str](), ""
        for text, excerpt in self._texts:
            probabilities = {
                value.language.iso_code_639_1.name.lower(): value.value
                for value in detector.compute_language_confidence_values(text)
            }
            if expected not in probabilities:
                return []
            likeliest = max(probabilities, key=probabilities.__getitem__)
            if probabilities[likeliest] - probabilities[expected] > _MARGIN:
                others[likeliest] += 1
                first_example = first_example or excerpt
        return OTHER_LANGUAGE.check(
            others.total() / max(1, len(self._texts)),
            first_example,
            count=others.total(),
            documents=pluralize(len(self._texts), "sampled document"),
            expected=expected,
            others=", ".join(f"{code} {count:,}" for code, count in others.most_common(_MAX_NAMED)),
        )

"""BM25 (Robertson and Zaragoza 2009): a ranking by shared words, without a model.

It is the usual first stage of a search and the usual baseline of a model. bm25s (the [bm25] extra)
computes it with its default settings: the variant of Lucene, k1=1.5 and b=0.75. A word is a run of
at least two letters or digits, in lower case. There are no stop words and no stemming, so that all
languages are treated alike. In a language written without spaces a whole phrase is one word, so
BM25 is of little use.
"""

import importlib.util
import re
from collections.abc import Iterator, Sequence

import numpy as np

from bert_jax.embeddings import nearest as nearest_lib
from bert_jax.errors import InputError

MISSING_MESSAGE = "BM25 needs bm25s, which is not installed: pip install 'bert-jax[bm25]'"

_WORD = re.compile(r"\w\w+")


def is_installed() -> bool:
    """Returns whether the library is installed."""
    return importlib.util.find_spec("bm25s") is not None


def nearest(
    queries: Sequence[str], texts: Sequence[str], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the texts with the highest scores for each query.

    Args:
      queries: at least one.
      texts: at least one.
      count: results wanted for each query; K is the smaller of `count` and the number of texts.

    Returns:
      Indices of texts, int64 [queries, K], and their scores, float32 [queries, K], in descending
      order. Texts with equal scores keep their order.
    """
    indices, scores = list[np.ndarray](), list[np.ndarray]()
    for row in all_scores(queries, texts):
        indices.append(nearest_lib.largest_indices(row, count))
        scores.append(row[indices[-1]])
    return np.stack(indices), np.stack(scores)


def all_scores(queries: Sequence[str], texts: Sequence[str]) -> Iterator[np.ndarray]:
    """Yields for each query the score of each text, float32 [texts], at least 0."""
    if not is_installed():
        raise InputError(MISSING_MESSAGE)
    import bm25s

    index, words = bm25s.BM25(), list(map(_words, texts))
    zeros = np.zeros(len(texts), np.float32)
    if any(words):  # bm25s cannot index texts without words
        index.index(words, show_progress=False)
    vocabulary = index.vocab_dict if any(words) else {}
    for query in queries:
        known = [word for word in _words(query) if word in vocabulary]
        yield index.get_scores(known) if known else zeros


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())

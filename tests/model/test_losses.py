"""Hits, against NumPy's argmax."""

import numpy as np
import pytest

from bert_jax.model import losses


@pytest.mark.parametrize("classes", [2, 64])
def test_of_equal_scores_the_first_is_the_answer(classes):
    """Scores are few whole numbers, so that most rows have several at the top."""
    rng = np.random.default_rng(classes)
    logits = rng.integers(0, 3, (500, classes)).astype(np.float32)
    labels = rng.integers(0, classes, 500).astype(np.int32)
    _, hits = losses.classification(logits, labels, np.ones(500, np.float32))
    assert hits.tolist() == [np.sum(logits.argmax(axis=-1) == labels), 500]

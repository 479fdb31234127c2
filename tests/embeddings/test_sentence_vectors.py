"""Vectors of texts, against sentence-transformers over exported bases (`make_sentences.py`)."""

import pathlib

import make_sentences
import numpy as np
import pytest

from bert_jax.embeddings.embed import Embedder, Features
from bert_jax.training import mesh as mesh_lib


@pytest.mark.parametrize(("pooling", "normalize"), make_sentences.CASES)
def test_vectors_equal_those_of_sentence_transformers(pooling, normalize):
    """With prompts, texts that are cut, an empty one, and capitals."""
    golden = np.load(pathlib.Path(__file__).with_name("sentences.npz"))
    base = make_sentences.base_of(pooling, normalize)
    embedder = Embedder(base, Features(), mesh_lib.one_device())
    for role in ("text", "query"):
        (part,) = embedder.embed(make_sentences.TEXTS, role)
        np.testing.assert_allclose(part.vectors, golden[f"{pooling}_{role}"], atol=2e-6)

"""Vectors of texts, compared with sentence-transformers on exports (`make_sentences.py`)."""

import pathlib

import numpy as np
import pytest
import sentences

from bert_jax.embeddings.embed import Embedder, VectorOptions
from bert_jax.training import mesh as mesh_lib


@pytest.mark.parametrize("case", sentences.CASES)
def test_vectors_equal_those_of_sentence_transformers(case):
    """The base has prompts; one text is cut, one is empty, and one has capitals."""
    expected = np.load(pathlib.Path(__file__).with_name("sentences.npz"))
    base = sentences.base_of(*case)
    embedder = Embedder(base, VectorOptions(), mesh_lib.one_device())
    for role, name in (("document", "text"), ("query", "query")):
        (part,) = embedder.embed(sentences.TEXTS, role)
        np.testing.assert_allclose(
            part.vectors, expected[f"{sentences.name_of(*case)}_{name}"], atol=2e-6
        )

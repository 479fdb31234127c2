"""Fine-tuned models as transformers' classes for tasks: names, shapes, fields and logits.

What they say was written by transformers: `make_task_classes`.
"""

import functools
import json

import jax
import make_task_classes as made
import numpy as np
import pytest

from bert_jax.config import Model
from bert_jax.interop import configs, finetuned, names
from bert_jax.model.encoder import Loop
from bert_jax.tasks import objective

MODEL = Model(
    vocab_size=14,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=64,
    initializer_range=0.2,
)
SAYS = json.loads((made.FOLDER / "says.json").read_text())


@functools.cache
def theirs(kind: str) -> dict[str, np.ndarray]:
    """Weights of the class of a kind."""
    return made.weights({name: tuple(shape) for name, shape in SAYS[kind]["shapes"].items()})


@functools.cache
def ours(kind: str) -> dict:
    """The same as our tree, which has a pooler only where the head reads it."""
    _, head = names.HEADS[made.CLASSES[kind][0]]
    held = theirs(kind)
    encoder = {name: value for name, value in held.items() if not name.startswith(head)}
    params, _ = names.to_ours(encoder, MODEL, "a test")
    kernel, bias = held[f"{head}.weight"].T, held[f"{head}.bias"]
    return params | {"head": {"kernel": kernel, "bias": bias}}


@pytest.mark.parametrize("kind", made.CLASSES)
def test_logits_are_those_of_the_class(kind):
    reads = "tokens" if kind in ("tag", "span") else "pooled"
    rows = made.batch()
    batch = {
        "input_ids": rows["input_ids"],
        "segment_ids": rows["token_type_ids"],
        "input_mask": rows["attention_mask"],
    }
    batch = {name: value.astype(np.int32) for name, value in batch.items()}
    params = ours(kind)
    outputs = params["head"]["bias"].size
    run = jax.jit(
        lambda params, batch: objective.task_logits(
            MODEL, reads, outputs, params, batch, None, 0.0, Loop()
        )
    )
    expected = np.load(made.FOLDER / "logits.npz")[kind]
    np.testing.assert_allclose(run(params, batch), expected, atol=1e-5)


@pytest.mark.parametrize("kind", made.CLASSES)
def test_tensors_are_those_of_the_class_bit_for_bit(kind):
    architecture = finetuned.ARCHITECTURES["bert"][kind]
    assert architecture == made.CLASSES[kind][0]
    found, expected = names.to_theirs(ours(kind), MODEL, architecture), theirs(kind)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, name)


@pytest.mark.parametrize("kind", made.CLASSES)
def test_fields_of_the_head_are_as_the_class_writes_them(kind):
    written = SAYS[kind]["config"]
    names_of = written.get("id2label", {}).values()
    found = configs.task_fields(kind, list(names_of) if kind != "regress" else [], "value", 0.0)
    for name in ("id2label", "label2id", "problem_type", "classifier_dropout"):
        assert found.get(name) == written.get(name), name

"""Against PyTorch's BertForPreTraining, run elsewhere."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close
from safetensors.numpy import load_file

from bert_jax.config import Model
from bert_jax.interop import names
from bert_jax.model import heads, losses
from bert_jax.model.encoder import Loop, encode

FOLDER = pathlib.Path(__file__).parents[1] / "data" / "hf_bert_tiny"
CONFIG = Model(
    vocab_size=1000,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=256,
    max_position_embeddings=128,
)


def ours(tensors):
    params, missing = names.to_ours(tensors, CONFIG, "golden")
    assert not missing
    return params


@pytest.fixture(scope="module")
def golden():
    params = jax.tree.map(jnp.asarray, ours(load_file(FOLDER / "model.safetensors")))
    raw = np.load(FOLDER / "batch.npz")
    labels = raw["labels"]
    positions = np.broadcast_to(np.arange(labels.shape[1]), labels.shape)
    batch = {
        "input_ids": raw["input_ids"],
        "segment_ids": raw["token_type_ids"],
        "input_mask": raw["attention_mask"],
        "masked_lm_positions": positions,
        "masked_lm_ids": np.maximum(labels, 0),
        "masked_lm_weights": (labels != -100).astype(np.float32),
        "next_sentence_labels": raw["next_sentence_label"],
        "row_weights": np.ones(len(labels), np.float32),
    }
    batch = {
        k: jnp.asarray(v, jnp.float32 if "weight" in k else jnp.int32) for k, v in batch.items()
    }
    return params, batch, dict(np.load(FOLDER / "outputs.npz"))


def test_hidden_states_equal_pytorch(golden):
    params, batch, outputs = golden
    model = heads.merge(CONFIG, params)
    inputs = (batch["input_ids"], batch["segment_ids"], batch["input_mask"])
    hidden = encode(model.encoder, CONFIG, *inputs, None, Loop(), outputs="all")
    # Rows of padding see everything and nothing sees them; they are compared too.
    for layer in range(4):
        assert_close({"h": hidden[layer]}, {"h": outputs["hidden_states"][layer]}, 1e-5)


def test_logits_and_loss_equal_pytorch(golden):
    params, batch, outputs = golden
    masked_lm, next_sentence = heads.pretraining_logits(CONFIG, params, batch, None, Loop())
    assert_close({"mlm": masked_lm[..., :1000]}, {"mlm": outputs["prediction_logits"]}, 1e-5)
    assert_close({"nsp": next_sentence}, {"nsp": outputs["seq_relationship_logits"]}, 1e-5)
    sums = losses.pretraining(masked_lm, next_sentence, batch)
    loss = sum(sums[k][0] / sums[k][1] for k in ("masked_lm_loss", "next_sentence_loss"))
    assert abs(float(loss) - float(outputs["loss"])) < 1e-5 * float(outputs["loss"])


def test_gradients_equal_pytorch(golden):
    params, batch, _ = golden

    def loss(params):
        sums = losses.pretraining(
            *heads.pretraining_logits(CONFIG, params, batch, None, Loop()), batch
        )
        return sum(sums[k][0] / sums[k][1] for k in ("masked_lm_loss", "next_sentence_loss"))

    assert_close(jax.grad(loss)(params), ours(dict(np.load(FOLDER / "grads.npz"))), 1e-5)

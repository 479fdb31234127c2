"""ModernBERT's encoder against what transformers computes with the same weights (make_modern)."""

import functools

import jax
import jax.numpy as jnp
import make_modern
import numpy as np
import pytest
from compare import assert_close

from bert_jax.config import Model
from bert_jax.interop import names
from bert_jax.model import heads, losses
from bert_jax.model.encoder import Loop
from bert_jax.model.kinds import encode

SIZES = make_modern.CONFIG
CFG = Model(
    kind="modern",
    **{name: value for name, value in SIZES.items() if name in Model.__dataclass_fields__},
    local_window=SIZES["local_attention"],
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
KEPT = Loop()


@functools.cache
def golden():
    return dict(np.load(make_modern.FOLDER / "outputs.npz"))


def converted(tensors):
    """Theirs in our tree; what they do not have is drawn."""
    params = names.to_ours(tensors, CFG, "golden")[0]
    return heads.init_params(CFG, jax.random.key(0)) | jax.tree.map(jnp.asarray, params)


@pytest.fixture(scope="module")
def params():
    return converted(make_modern.weights({t.name: t.shape for t in names.modern_tensors(CFG)}))


@pytest.fixture(scope="module")
def batch():
    made = make_modern.batch(SIZES, make_modern.ROWS, make_modern.LENGTH)
    labels = made["labels"]
    return {
        "input_ids": jnp.asarray(made["input_ids"], jnp.int32),
        "segment_ids": jnp.zeros(labels.shape, jnp.int32),
        "input_mask": jnp.asarray(made["attention_mask"], jnp.int32),
        "masked_lm_positions": jnp.broadcast_to(jnp.arange(labels.shape[1]), labels.shape),
        "masked_lm_ids": jnp.asarray(np.maximum(labels, 0), jnp.int32),
        "masked_lm_weights": jnp.asarray(labels >= 0, jnp.float32),
    }


def states(params, batch, cfg=CFG, loop=KEPT, outputs="all"):
    encoder = heads.merge(cfg, params).encoder
    inputs = (batch[name] for name in ("input_ids", "segment_ids", "input_mask"))
    return encode(encoder, cfg, *inputs, None, loop, outputs)


def loss(params, batch, loop=KEPT):
    hidden = states(params, batch, CFG, loop, "last")
    logits = heads.masked_lm_logits(
        heads.merge(CFG, params), CFG, hidden, batch["masked_lm_positions"]
    )
    pair, _ = losses.classification(logits, batch["masked_lm_ids"], batch["masked_lm_weights"])
    return pair[0] / pair[1], logits


def test_every_layer_is_as_pytorchs(params, batch):
    found = np.asarray(states(params, batch)) * np.asarray(batch["input_mask"])[..., None]
    for number, (ours, theirs) in enumerate(zip(found, golden()["hidden_states"], strict=True)):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, err_msg=f"layer {number}")


@pytest.mark.parametrize("loop", [KEPT, Loop("full"), Loop("dots", "unroll")], ids=str)
def test_logits_loss_and_gradients_are_as_pytorchs(params, batch, loop):
    (value, logits), gradients = jax.value_and_grad(
        functools.partial(loss, loop=loop), has_aux=True
    )(params, batch)
    real = np.asarray(batch["input_mask"])[..., None]
    ours = np.asarray(logits)[..., : CFG.vocab_size] * real
    np.testing.assert_allclose(ours, golden()["logits"], atol=1e-5)
    np.testing.assert_allclose(value, golden()["loss"], rtol=1e-5)
    theirs = {
        name.removeprefix("grad."): value
        for name, value in golden().items()
        if name.startswith("grad.")
    }
    theirs = names.to_ours(theirs, CFG, "gradients")[0]
    theirs["encoder"]["layers"]["attention_layer_norm"]["scale"][0] = 0  # they have none
    assert_close({part: gradients[part] for part in theirs}, theirs, 1e-5)

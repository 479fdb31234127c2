"""Left to right: both kinds against transformers' decoders (make_causal)."""

import functools

import jax
import jax.numpy as jnp
import make_causal
import make_modern
import numpy as np
import pytest
from compare import assert_close

from bert_jax.config import Model
from bert_jax.interop import names, weights
from bert_jax.model import heads, losses
from bert_jax.model.attention import Packing, Shared
from bert_jax.model.encoder import Loop
from bert_jax.model.kinds import attention_probabilities, encode, text_vector

LENGTH = make_causal.LENGTH
KEPT = Loop()


def config_of(kind):
    sizes = make_causal.CONFIGS[kind]
    window = {"local_window": sizes["local_attention"] - 2} if kind == "modern" else {}
    return Model(
        kind=kind,
        direction="left_to_right",
        **{name: value for name, value in sizes.items() if name in Model.__dataclass_fields__},
        **window,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


@functools.cache
def golden():
    return dict(np.load(make_causal.FOLDER / "outputs.npz"))


def theirs(kind):
    """Their tensors, drawn again."""
    cfg = config_of(kind)
    held = names.PARTS[names_of(kind)]
    tensors = [t for t in names.HUGGING_FACE[kind].tensors(cfg) if t.part in held]
    return make_modern.weights({tensor.name: tensor.shape for tensor in tensors})


def names_of(kind):
    return make_causal.CLASSES[kind][0]


@pytest.fixture(scope="module", params=make_causal.CONFIGS)
def model(request):
    cfg = config_of(request.param)
    params = weights.import_tensors(theirs(request.param), cfg, "golden")[0]
    fresh = heads.init_params(cfg, jax.random.key(0))
    return cfg, fresh | jax.tree.map(jnp.asarray, params)


@pytest.fixture(scope="module")
def batch():
    """Theirs as data.batches has it: every next piece is predicted, unless it is padding."""
    made = make_causal.batch()
    ids, mask = (jnp.asarray(made[n], jnp.int32) for n in ("input_ids", "attention_mask"))
    return {
        "input_ids": ids,
        "segment_ids": jnp.zeros_like(ids),
        "input_mask": mask,
        "masked_lm_positions": jnp.broadcast_to(jnp.arange(LENGTH - 1), (len(ids), LENGTH - 1)),
        "masked_lm_ids": ids[:, 1:],
        "masked_lm_weights": mask[:, 1:].astype(jnp.float32),
    }


def loss(params, cfg, batch, loop=KEPT):
    logits, pairs = heads.pretraining_logits(cfg, params, batch, None, loop)
    total, count = losses.pretraining(logits, pairs, batch, "causal")["next_piece_loss"]
    return total / count, logits


@pytest.mark.parametrize(
    "loop",
    [Loop(), pytest.param(Loop("dots"), marks=pytest.mark.long)],
    ids=lambda loop: loop.remat,
)
def test_logits_loss_and_gradient_are_as_pytorchs(model, batch, loop):
    cfg, params = model
    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=(1, 3))
    (value, logits), gradients = run(params, cfg, batch, loop)
    real = np.asarray(batch["input_mask"])[:, :-1, None]
    wanted = golden()[f"{cfg.kind}.logits"][:, :-1]
    np.testing.assert_allclose(logits[..., : cfg.vocab_size] * real, wanted * real, atol=1e-5)
    np.testing.assert_allclose(value, golden()[f"{cfg.kind}.loss"], rtol=1e-5)
    ours = gradients["encoder"]["embeddings"]["word"]["embedding"][: cfg.vocab_size]
    assert_close({"words": ours}, {"words": golden()[f"{cfg.kind}.gradient"]}, 1e-5)


def influence(cfg, params, ids, rest, outputs):
    """Which inputs each output hangs on, bool [outputs, inputs]: gradients that are not 0.

    Of each output some random combination of its numbers is taken, so that none is 0 by chance.
    """
    table = params["encoder"]["embeddings"]["word"]["embedding"]
    mix = jax.random.normal(jax.random.key(0), (cfg.hidden_size,))

    def of(extra):
        # One row of the table a place, so that each has a gradient of its own.
        rows = table[ids[0]] + extra
        words = {"embedding": jnp.pad(rows, ((0, len(table) - len(rows)), (0, 0)))}
        embeddings = params["encoder"]["embeddings"] | {"word": words}
        encoder = params["encoder"] | {"embeddings": embeddings}
        module = heads.merge(cfg, params | {"encoder": encoder}).encoder
        places = jnp.arange(ids.shape[1])[None]
        hidden = encode(module, cfg, places, jnp.zeros_like(ids), rest, None, Loop())
        return (hidden[0] @ mix)[outputs]

    jacobian = jax.jit(jax.jacrev(of))(jnp.zeros((ids.shape[1], cfg.hidden_size)))
    return np.abs(np.asarray(jacobian)).sum(axis=-1) > 0


@pytest.mark.parametrize("rows", ["alone", "apart", "packed"])
def test_no_place_sees_its_future(model, batch, rows):
    """Nor another document's pieces, if documents are apart; its own past it does see."""
    cfg, params = model
    ids = batch["input_ids"][:1]
    numbers = np.repeat([1, 2, 3], [9, 4, 11])
    starts = np.array([0, 9, 13])
    positions = jnp.asarray(np.arange(LENGTH) - starts[numbers - 1])[None]
    if rows == "alone":
        rest, numbers = jnp.ones_like(ids), np.ones(LENGTH, int)
    elif rows == "apart":
        rest = Shared(jnp.asarray(numbers, jnp.int32)[None], positions)
    else:
        width = 12
        tokens = np.full((3, width), LENGTH)
        tokens[numbers - 1, positions[0]] = np.arange(LENGTH)
        places = ((numbers - 1) * width + np.asarray(positions[0]))[None]
        rest = Packing(positions, jnp.asarray(tokens), jnp.asarray(places))
    found = influence(cfg, params, ids, rest, np.arange(LENGTH))
    place = np.arange(LENGTH)
    allowed = (place <= place[:, None]) & (numbers == numbers[:, None])
    assert not (found & ~allowed).any()
    # Windows of four places reach further from layer to layer, and a whole one sees all.
    assert (found == allowed).all()


@pytest.mark.long
def test_pictures_of_attention_show_the_same(model, batch):
    cfg, params = model
    module = heads.merge(cfg, params)
    inputs = (batch[n][:1] for n in ("input_ids", "segment_ids", "input_mask"))
    states = encode(module.encoder, cfg, *inputs, None, Loop(), "all")[:-1, 0]
    shown = np.asarray(attention_probabilities(module.encoder, cfg, states))
    np.testing.assert_allclose(shown.sum(axis=-1), 1, atol=1e-5)
    assert not np.triu(shown, 1).any()
    assert (np.diagonal(shown, axis1=2, axis2=3) > 0).all()


@pytest.mark.long
def test_a_text_is_what_its_last_piece_comes_to(model, batch):
    cfg, params = model
    module = heads.merge(cfg, params)
    inputs = (batch[n] for n in ("input_ids", "segment_ids", "input_mask"))
    hidden = encode(module.encoder, cfg, *inputs, None, Loop())
    lengths = np.asarray(batch["input_mask"]).sum(axis=1)
    wanted = np.asarray(hidden)[np.arange(len(lengths)), lengths - 1]
    np.testing.assert_array_equal(text_vector(cfg, hidden, batch["input_mask"]), wanted)

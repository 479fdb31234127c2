"""ModernBERT's encoder against what transformers computes with the same weights (make_modern)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import make_modern
import numpy as np
import pytest
import samples
from compare import assert_close

from bert_jax.config import Model
from bert_jax.interop import names, weights
from bert_jax.model import flops, heads, losses
from bert_jax.model.attention import Packing, Shared
from bert_jax.model.encoder import Loop
from bert_jax.model.kinds import attention_probabilities, encode

SIZES = make_modern.CONFIG
CFG = Model(
    kind="modern",
    **{name: value for name, value in SIZES.items() if name in Model.__dataclass_fields__},
    local_window=SIZES["local_attention"],
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
KEPT = Loop()
OTHER_LOOPS = Loop("full"), Loop("dots", "unroll")
# Of a BERT that reads the same batch.
LONG = {"vocab_size": CFG.vocab_size, "max_position_embeddings": CFG.max_position_embeddings}


@functools.cache
def golden():
    return dict(np.load(make_modern.FOLDER / "outputs.npz"))


@pytest.fixture(scope="module")
def params():
    """Theirs in our tree; what they do not have is drawn."""
    shapes = {t.name: t.shape for t in names.modern_tensors(CFG)}
    theirs = weights.import_tensors(make_modern.weights(shapes), CFG, "golden")[0]
    return heads.init_params(CFG, jax.random.key(0)) | jax.tree.map(jnp.asarray, theirs)


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
    inputs = [batch[name] for name in ("input_ids", "segment_ids", "input_mask")]
    return encoded(params, inputs, cfg, loop, outputs)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def encoded(params, inputs, cfg, loop, outputs):
    return encode(heads.merge(cfg, params).encoder, cfg, *inputs, None, loop, outputs)


def loss(params, batch, loop):
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


@pytest.mark.parametrize(
    "loop",
    [KEPT, *(pytest.param(loop, marks=pytest.mark.long) for loop in OTHER_LOOPS)],
    ids=lambda loop: loop.remat,
)
def test_logits_loss_and_gradients_are_as_pytorchs(params, batch, loop):
    run = jax.value_and_grad(functools.partial(loss, loop=loop), has_aux=True)
    (value, logits), gradients = jax.jit(run)(params, batch)
    real = np.asarray(batch["input_mask"])[..., None]
    ours = np.asarray(logits)[..., : CFG.vocab_size] * real
    np.testing.assert_allclose(ours, golden()["logits"], atol=1e-5)
    np.testing.assert_allclose(value, golden()["loss"], rtol=1e-5)
    theirs = {
        name.removeprefix("grad."): value
        for name, value in golden().items()
        if name.startswith("grad.")
    }
    theirs = weights.import_tensors(theirs, CFG, "gradients")[0]
    theirs["encoder"]["layers"]["attention_layer_norm"]["scale"][0] = 0  # they have none
    assert_close({part: gradients[part] for part in theirs}, theirs, 1e-5)


@pytest.mark.parametrize("kind", ["modern", "bert"])
@pytest.mark.parametrize("way", ["shared", "packed"])
def test_texts_that_share_rows_are_each_by_itself(params, batch, kind, way):
    """All in one row: positions and windows are those of each text."""
    cfg = CFG if kind == "modern" else dataclasses.replace(samples.without_dropout(), **LONG)
    params = params if kind == "modern" else heads.init_params(cfg, jax.random.key(0))
    expected = np.asarray(states(params, batch, cfg))
    real = np.asarray(batch["input_mask"]) > 0
    lengths = real.sum(axis=1)
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    numbers = np.repeat(np.arange(len(lengths)), lengths)[None]
    starts = np.cumsum(lengths) - lengths
    if way == "shared":
        sharing = Shared(jnp.asarray(numbers + 1, jnp.int32), positions)
    else:
        longest = lengths.max()
        place = np.arange(longest)
        tokens = np.where(place < lengths[:, None], starts[:, None] + place, lengths.sum())
        sharing = Packing(positions, jnp.asarray(tokens), numbers * longest + positions)
    one_row = np.asarray(batch["input_ids"])[real][None]
    inputs = (jnp.asarray(one_row), jnp.zeros_like(one_row), sharing)
    found = encoded(params, inputs, cfg, KEPT, "all")
    np.testing.assert_allclose(found[:, 0], expected[:, real], atol=1e-5)


def test_without_upper_layers_the_lower_ones_are_as_they_were(params, batch):
    """And there is no norm at the end, which belongs to the last of all."""
    expected = states(params, batch)
    encoder = dict(params["encoder"])
    encoder["layers"] = jax.tree.map(lambda x: x[:3], encoder["layers"])
    found = states(params | {"encoder": encoder}, batch, outputs="last")
    np.testing.assert_allclose(found, expected[3], atol=1e-6)


def norm(x, scale):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5) * scale


def test_where_pieces_look_is_what_makes_the_next_state(params, batch):
    """In float64, from maps, values and kernels: of a layer with a window and of one without."""
    row = {name: value[:1] for name, value in batch.items()}
    hidden = np.asarray(states(params, row), np.float64)[:, 0]
    encoder = heads.merge(CFG, params).encoder
    maps = np.asarray(attention_probabilities(encoder, CFG, jnp.float32(hidden[:-1])), np.float64)
    far = np.abs(np.subtract.outer(*[np.arange(len(hidden[0]))] * 2)) > CFG.local_window // 2
    for number in (1, 3):
        layer = {
            name: {leaf: np.asarray(value[number], np.float64) for leaf, value in module.items()}
            for name, module in params["encoder"]["layers"].items()
        }
        x = hidden[number]
        value = norm(x, layer["attention_layer_norm"]["scale"]) @ layer["value"]["kernel"]
        value = value.reshape(len(x), CFG.num_attention_heads, -1)
        context = np.einsum("hqk,khd->qhd", maps[number], value).reshape(x.shape)
        x = x + context @ layer["attention_output"]["kernel"]
        before = norm(x, layer["output_layer_norm"]["scale"])
        inner = jax.nn.gelu(before @ layer["intermediate"]["kernel"], approximate=False)
        x = x + (np.asarray(inner) * (before @ layer["gate"]["kernel"])) @ layer["output"]["kernel"]
        np.testing.assert_allclose(x, hidden[number + 1], atol=2e-5)
        assert (maps[number][:, far].max() == 0) == (number == 1)


@pytest.mark.long
def test_scaled_layers_begin_as_nothing():
    scaled = {"initialization": "scaled", "hidden_size": 96}
    for cfg in (Model(num_hidden_layers=2, **scaled), dataclasses.replace(CFG, **scaled)):
        params = heads.init_params(cfg, jax.random.key(0))
        stacked = params["encoder"]["layers"]
        for name in ("attention_output", "output"):
            assert not np.any(stacked[name]["kernel"])
        # Of a normal distribution cut off at two deviations 0.774 of the variance is left.
        assert np.std(stacked["query"]["kernel"]) == pytest.approx(0.88 * 96**-0.5, rel=0.02)
        assert np.std(params["encoder"]["embeddings"]["word"]["embedding"][: cfg.vocab_size]) < 0.02


def test_fresh_weights_are_distributed_as_the_reference_s():
    """transformers' `_init_weights`: 0.02, and over sqrt(2 L) what adds to the residual."""
    cfg = dataclasses.replace(CFG, hidden_size=96)
    params = heads.init_params(cfg, jax.random.key(0))
    stacked, thin = params["encoder"]["layers"], 0.02 / 14**0.5
    for kernel, deviation in (
        (stacked["query"]["kernel"], 0.02),
        (stacked["gate"]["kernel"], 0.02),
        (stacked["attention_output"]["kernel"], thin),
        (stacked["output"]["kernel"], thin),
        (params["masked_lm"]["transform"]["kernel"], thin),
    ):
        assert np.std(kernel) == pytest.approx(0.88 * deviation, rel=0.03)


def test_operations_are_those_of_products_that_are_needed():
    """By counting pairs of tokens that see each other."""
    length, width, inner = 24, CFG.hidden_size, CFG.intermediate_size
    apart = np.abs(np.subtract.outer(*[np.arange(length)] * 2))
    near = int((apart <= CFG.local_window // 2).sum())
    pairs = 3 * length**2 + 4 * near  # layers 0, 3 and 6 see all
    products = 7 * length * (4 * width * width + 3 * width * inner) + 2 * pairs * width
    operations = 2 * 5 * (products + width * width + 2 * width)
    assert flops.forward_flops(CFG, 5, length, 0) == pytest.approx(operations, abs=200)

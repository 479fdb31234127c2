"""The decoder against transformers' EncoderDecoderModel (make_decoder), and search against all."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import make_decoder
import numpy as np
import pytest

from bert_jax.config import Model
from bert_jax.interop import names, weights
from bert_jax.model import decoder, losses
from bert_jax.model.encoder import Loop

KEPT = Loop()
FIRST, LAST, LENGTH = make_decoder.FIRST, make_decoder.LAST, make_decoder.TARGET
CFG = Model(
    **{name: value for name, value in make_decoder.SIZES.items() if name != "pad_token_id"},
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
CROSS = {"query": "cross_query", "key": "cross_key", "value": "cross_value"} | {
    "attention_output": "cross_output",
    "attention_layer_norm": "cross_layer_norm",
}


def theirs_as_ours():
    """Their tensors, drawn again: a decoder of theirs is read twice, by its own attention's names
    and by those of the other.
    """
    shapes = {}
    for tensor in names.HUGGING_FACE["bert"].tensors(CFG):
        if tensor.part == "encoder":
            shapes[f"encoder.{tensor.name.removeprefix('bert.')}"] = tensor.shape
        if tensor.part in ("encoder", "masked_lm"):
            shapes[f"decoder.{tensor.name}"] = tensor.shape
            cross = tensor.name.replace(".attention.", ".crossattention.")
            shapes[f"decoder.{cross}"] = tensor.shape
    # What nothing here reads, but is drawn before others.
    shapes |= {"encoder.pooler.dense.weight": (24, 24), "encoder.pooler.dense.bias": (24,)}
    drawn = make_decoder.drawn(shapes)

    def ours(prefix, ours_prefix, left_out, attention):
        there = (name for name in drawn if name.startswith(prefix) and left_out not in name)
        renamed = {
            ours_prefix + name.removeprefix(prefix).replace(attention, ".attention."): drawn[name]
            for name in there
        }
        return weights.import_tensors(renamed, CFG, "golden")[0]

    encoder = ours("encoder.", "bert.", ".pooler.", ".attention.")
    decoder_ = ours("decoder.", "", ".crossattention.", ".attention.")
    other = ours("decoder.", "", ".attention.", ".crossattention.")["encoder"]["layers"]
    cross = {CROSS[name]: other[name] for name in CROSS}
    params = {
        "encoder": encoder["encoder"],
        "decoder": {"layers": decoder_["encoder"]["layers"] | cross},
        "masked_lm": decoder_["masked_lm"],
    }
    return jax.tree.map(jnp.asarray, params)


@functools.cache
def golden():
    return dict(np.load(make_decoder.FOLDER / "outputs.npz"))


@pytest.fixture(scope="module")
def params():
    return theirs_as_ours()


@pytest.fixture(scope="module")
def batch():
    made = {name: jnp.asarray(value, jnp.int32) for name, value in make_decoder.batch().items()}
    return {
        "input_ids": made["input_ids"],
        "segment_ids": jnp.zeros_like(made["input_ids"]),
        "input_mask": made["attention_mask"],
        "decoder_ids": made["decoder_input_ids"],
        "targets": jnp.maximum(made["labels"], 0),
        "target_weights": (made["labels"] >= 0).astype(jnp.float32),
    }


@functools.partial(jax.jit, static_argnames="cfg")
def logits_of(params, batch, cfg=CFG):
    return decoder.target_logits(decoder.merge_params(cfg, params), batch, None, Loop("dots"))


@functools.partial(jax.jit, static_argnames=("beams", "length", "last", "cfg"))
def search(params, batch, beams=1, length=LENGTH, last=LAST, cfg=CFG):
    generator = decoder.merge_params(cfg, params)
    settings = decoder.SearchSettings(beams, length, FIRST, last)
    return decoder.search(generator, batch, KEPT, settings)


def loss(params, batch):
    logits = logits_of(params, batch)
    total, count = losses.classification(logits, batch["targets"], batch["target_weights"])[0]
    return total / count


def ranks_of(params, batch, texts, last=LAST, cfg=CFG):
    """Log probabilities by teacher forcing, summed up to the end and divided as Wu et al. do."""
    texts = np.asarray(texts)
    given = np.concatenate([np.full_like(texts[:, :1], FIRST), texts[:, :-1]], axis=1)
    of_all = logits_of(params, batch | {"decoder_ids": jnp.asarray(given)}, cfg=cfg)
    logits = np.asarray(of_all, np.float64)
    logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    of_texts = np.take_along_axis(logs, texts[..., None], axis=-1)[..., 0]
    counted = np.cumsum(texts == last, axis=1) - (texts == last) == 0
    return (of_texts * counted).sum(axis=1) / ((5 + counted.sum(axis=1)) / 6) ** 0.6


def test_logits_loss_and_gradients_are_those_of_transformers(params, batch):
    theirs, real = golden(), batch["target_weights"][..., None]
    logits = np.asarray(logits_of(params, batch) * real)[..., : CFG.vocab_size]
    np.testing.assert_allclose(logits, theirs["logits"], atol=1e-5)
    value, gradient = jax.jit(jax.value_and_grad(loss))(params, batch)
    np.testing.assert_allclose(value, theirs["loss"], rtol=1e-6)
    found = {
        "cross_key": gradient["decoder"]["layers"]["cross_key"]["kernel"][0].T,
        "encoder": gradient["encoder"]["layers"]["value"]["kernel"][0].T,
    }
    for name, array in found.items():
        np.testing.assert_allclose(array, theirs[name], atol=1e-6)


def test_greedy_search_writes_what_transformers_does(params, batch):
    ids, ranks = search(params, batch)
    np.testing.assert_array_equal(ids, golden()["greedy"])
    assert (ids[0] == LAST).any() and (ids[1:] != LAST).all()
    np.testing.assert_allclose(ranks, ranks_of(params, batch, ids), rtol=1e-5)


@pytest.mark.long
def test_the_cache_gives_the_logits_of_teacher_forcing(params, batch):
    """Each of two beams is given a text of its own."""
    given = jnp.stack([batch["decoder_ids"], batch["decoder_ids"][::-1]], axis=1)
    length = given.shape[2]

    @jax.jit
    def one_by_one(params):
        generator = decoder.merge_params(CFG, params)
        cache = decoder.begin(generator, batch, KEPT, 2, length)

        def step(cache, place):
            ids = given[:, :, place]
            logits, cache = decoder.next_logits(generator, cache, ids, place)
            return cache, logits

        return jax.lax.scan(step, cache, jnp.arange(length))[1]

    cached = one_by_one(params)
    for beam in range(2):
        forced = logits_of(params, batch | {"decoder_ids": given[:, beam]})
        np.testing.assert_allclose(np.moveaxis(cached[:, :, beam], 0, 1), forced, atol=1e-5)


@pytest.mark.long
def test_beam_search_finds_the_best_of_all_texts():
    """Six pieces, texts of three at most: 125 that do not end, and 31 that do."""
    pieces, length, last, count = 6, 3, 3, 156
    cfg = dataclasses.replace(CFG, vocab_size=pieces, initializer_range=0.5)
    params = decoder.init_params(cfg, jax.random.key(3))
    params["encoder"]["embeddings"]["word"]["embedding"] *= 0.3  # else pieces repeat
    rng = np.random.default_rng(0)
    source = jnp.asarray(rng.integers(0, pieces, (6, 6)), jnp.int32)
    batch = {
        "input_ids": source,
        "segment_ids": jnp.zeros_like(source),
        "input_mask": jnp.ones_like(source),
    }
    every = {
        tuple(itertools.chain(itertools.takewhile(lambda piece: piece != last, text), [last] * 3))[
            :3
        ]
        for text in itertools.product(range(pieces), repeat=length)
    }
    texts = np.array(sorted(every), np.int32)
    assert len(texts) == count
    best, ranks = [], []
    for row in range(len(source)):
        repeated = {
            name: jnp.repeat(array[row : row + 1], count, axis=0) for name, array in batch.items()
        }
        of_all = ranks_of(params, repeated, texts, last, cfg)
        best.append(texts[of_all.argmax()])
        ranks.append(of_all.max())
    ids, found = search(params, batch, count, length, last, cfg)
    np.testing.assert_array_equal(ids, best)
    np.testing.assert_allclose(found, ranks, rtol=1e-5)
    greedy, few = (search(params, batch, beams, length, last, cfg) for beams in (1, 2))
    assert (np.asarray(greedy[0]) != ids).any()
    for ids, found in (greedy, few):
        np.testing.assert_allclose(found, ranks_of(params, batch, ids, last, cfg), rtol=1e-5)
    assert greedy[1].mean() < few[1].mean() <= np.mean(ranks) + 1e-6

"""Attention by cuDNN: what its calls are asked for, and that it means what XLA's attention does.

No test needs a GPU. The calls are lowered for CUDA and read, or computed by a stand-in: by jax's
own attention for XLA, which gets the very inputs that cuDNN would get.
"""

import dataclasses
import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close

from bert_jax import private_apis
from bert_jax.checkpoints.base import TextVectors
from bert_jax.config import Model, Optimizer, Parallelism
from bert_jax.embeddings import embedding_program
from bert_jax.model import attention, cudnn_attention, layers
from bert_jax.model.attention import Packing, Shared
from bert_jax.model.encoder import Loop
from bert_jax.running import session
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import step
from bert_jax.training.objective import Pretraining

BATCH, LENGTH, HEADS, WIDTH, HALF = 3, 32, 2, 8, 4
BERT = Model(
    vocab_size=64,
    hidden_size=HEADS * WIDTH,
    num_hidden_layers=2,
    num_attention_heads=HEADS,
    intermediate_size=16,
    max_position_embeddings=LENGTH,
    compute_dtype="bfloat16",
    attention_probs_dropout_prob=0.0,
)
MODERN = dataclasses.replace(BERT, kind="modern", local_window=2 * HALF, num_hidden_layers=4)
CAUSAL = dataclasses.replace(MODERN, direction="left_to_right")
DROPPING = dataclasses.replace(BERT, attention_probs_dropout_prob=0.1)


# --- what is computed ----------------------------------------------------------------------------


def stand_in(inputs):
    """Returns the context and the log-sum-exp that cuDNN would, by jax's attention for XLA."""
    context, sums = jax.nn.dot_product_attention(
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.bias,
        is_causal=inputs.is_causal,
        query_seq_lengths=inputs.lengths,
        key_value_seq_lengths=inputs.lengths,
        implementation="xla",
        return_residual=True,
    )
    return context, jnp.swapaxes(sums, 1, 2)


def stand_in_gradients(inputs, sums, context, gradient):
    """Returns the gradients by FlashAttention's equations, from what the forward pass saved."""
    query, key, value = inputs[:3]
    scale, positions = query.shape[-1] ** -0.5, [jnp.arange(x.shape[1]) for x in (query, key)]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * scale
    scores = scores if inputs.bias is None else scores + inputs.bias
    allowed = jnp.ones((1, 1, 1, 1), bool)
    if inputs.is_causal:
        allowed &= positions[0][:, None] >= positions[1]
    if inputs.lengths is not None:
        queries, keys = (p < inputs.lengths[:, None] for p in positions)
        allowed &= (queries[:, :, None] & keys[:, None, :])[:, None]
    probs = jnp.where(allowed, jnp.exp(scores - sums[..., None]), 0.0)
    d_probs = jnp.einsum("bqhd,bkhd->bhqk", gradient, value)
    inner = jnp.einsum("bqhd,bqhd->bhq", gradient, context)[..., None]
    d_scores = probs * (d_probs - inner) * scale
    return (
        jnp.einsum("bhqk,bkhd->bqhd", d_scores, key),
        jnp.einsum("bhqk,bqhd->bkhd", d_scores, query),
        jnp.einsum("bhqk,bqhd->bkhd", probs, gradient),
    )


@pytest.fixture
def computed_by_stand_in(monkeypatch):
    monkeypatch.setattr(private_apis, "cudnn_attention", stand_in)
    monkeypatch.setattr(private_apis, "cudnn_attention_gradients", stand_in_gradients)


def padded(length=LENGTH):
    """Three rows of one text each; a whole one, one of a third, and one without tokens."""
    return jnp.asarray(np.arange(length) < np.array([[length], [length // 3], [0]]), jnp.int32)


def shared(length=LENGTH):
    """Three rows of several texts, of which some are longer than a window, and some padding."""
    lengths = [[length - 7, 2, 5], [3, 1, 9, 8, 4], [length // 2]]
    numbers = [np.repeat(np.arange(len(row)) + 1, row) for row in lengths]
    rows = np.stack([np.pad(row, (0, length - len(row))) for row in numbers])
    return Shared(jnp.asarray(rows, jnp.int32), jnp.zeros(rows.shape, jnp.int32))


def slots(length=LENGTH):
    """Two texts, of 20 and 11 tokens, that a row of each three has in slots; a slot is empty."""
    tokens = np.full((3, length), 3 * length)
    tokens[0, :20], tokens[1, :11] = np.arange(20), 20 + np.arange(11)
    places = np.zeros(3 * length, np.int32)
    places[:20], places[20:31] = np.arange(20), length + np.arange(11)
    arrays = places.reshape(3, length), tokens, places.reshape(3, length)
    return Packing(*(jnp.asarray(x, jnp.int32) for x in arrays))


def is_token(mask):
    """Where rows have tokens, bool [B, S]."""
    if isinstance(mask, Packing):
        return jnp.arange(LENGTH * 3).reshape(3, -1) < 31
    return (mask.numbers if isinstance(mask, Shared) else mask) > 0


@pytest.mark.parametrize("is_global", [None, True, False], ids=["bert", "global", "local"])
@pytest.mark.parametrize("direction", ["both", "left_to_right"])
@pytest.mark.parametrize("mask", [padded, shared, slots, lambda: padded(26), lambda: shared(26)])
def test_inputs_mean_to_xla_what_its_attention_computes(
    computed_by_stand_in, mask, direction, is_global
):
    """Rows of 26 are not split: they have no whole number of blocks of 8."""
    mask = mask()
    tokens = is_token(mask)
    shape = *tokens.shape, HEADS, WIDTH
    keys = jax.random.split(jax.random.key(1), 4)
    *qkv, weights = (jax.random.normal(key, shape) for key in keys)
    weights = weights * tokens[:, :, None, None]
    cfg = dataclasses.replace(MODERN, direction=direction)
    is_global = None if is_global is None else jnp.asarray(is_global)

    def by_xla(*qkv):
        length = LENGTH if isinstance(mask, Packing) else tokens.shape[1]
        window = window_of(cfg, is_global, length)
        return attention.attend(*qkv, mask, None, 0.0, window)

    def by_cudnn(*qkv):
        return cudnn_attention.attend(cfg, *qkv, mask, is_global)

    def run(attend):
        def loss(*qkv):
            context = attend(*qkv)
            return (context * weights).sum(), context * tokens[:, :, None, None]

        (_, context), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*qkv)
        return {"context": context, "gradients": gradients}

    assert_close(jax.jit(run, static_argnums=0)(by_cudnn), run(by_xla), 2e-5)


def window_of(cfg, is_global, length):
    """Where a query may attend to a key, bool [S, S], written down once more."""
    distance = np.arange(length)[:, None] - np.arange(length)
    allowed = np.ones((length, length), bool)
    if is_global is not None and not is_global:
        allowed = np.abs(distance) <= HALF
    if cfg.direction == "left_to_right":
        allowed &= distance >= 0
    return jnp.asarray(allowed)


def random_batch(cfg, packed=False):
    """A batch as `bert_jax.data.batches` lays it out: rows of one text each, or of several."""
    rng, predictions = np.random.default_rng(0), 4
    ids = rng.integers(5, cfg.vocab_size, (BATCH, LENGTH)).astype(np.int32)
    mask = shared() if packed else padded()
    batch = {"example_numbers": mask.numbers, "positions": mask.positions} if packed else {}
    return batch | {
        "rows": np.arange(BATCH, dtype=np.uint32),
        "row_weights": np.ones(BATCH, np.float32),
        "input_ids": ids,
        "segment_ids": np.zeros_like(ids),
        "input_mask": is_token(mask).astype(np.int32),
        "masked_lm_positions": np.tile(np.arange(predictions, dtype=np.int32), (BATCH, 1)),
        "masked_lm_ids": ids[:, :predictions],
        "masked_lm_weights": is_token(mask)[:, :predictions].astype(np.float32),
        "next_sentence_labels": np.zeros(BATCH, np.int32),
    }


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_the_gradient_of_the_loss_is_that_with_xla_s_attention(computed_by_stand_in, remat):
    """In float32, through a loop over global and local layers, with texts that share rows."""
    objective = Pretraining(dataclasses.replace(MODERN, compute_dtype="float32"), "mlm")
    params, batch = objective.init_params(jax.random.key(0)), random_batch(MODERN, packed=True)
    noise = layers.RowNoise.of(jax.random.key(1), jnp.asarray(batch["rows"]))  # of hidden states

    def loss(params, loop):
        metrics = objective.forward(params, None, batch, noise, loop)
        return objective.loss(metrics, objective.counts(batch))

    run = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    assert_close(run(params, Loop(remat, cudnn=True)), run(params, Loop(remat)), 1e-5)


# --- what is asked for ---------------------------------------------------------------------------


@pytest.fixture
def on_cuda(monkeypatch):
    """Makes programs for the CPUs of this machine use cuDNN; they can be lowered for CUDA only."""
    monkeypatch.setattr(cudnn_attention, "refusal", lambda *_: None)


def calls(traced):
    """Returns what each call of cuDNN is asked for, in a traced program as lowered for CUDA."""
    found = []
    for line in traced.lower(lowering_platforms=("cuda",)).as_text().splitlines():
        if call := re.search(r"custom_call @(__cudnn\S+?)\(", line):
            config = re.search(r'backend_config = "(.*?)"', line)[1].replace(r"\22", '"')
            settings = json.loads(config)["cudnn_fmha_backend_config"]
            # What is the same in all calls.
            assert settings["fmha_scale"] == WIDTH**-0.5
            assert (settings["dropout_rate"], settings["sliding_window_length"]) == (0.0, 0)
            assert (settings["max_seg_per_batch"], settings["is_paged_attention"]) == (1, False)
            operands, results = line.rpartition(" : (")[2].split(") -> (")
            shapes = [re.findall(r"tensor<(\S+?)>", text) for text in (operands, results)]
            found.append((call[1].removeprefix("__cudnn$fmha"), settings["mask_type"], *shapes))
    return found


def train_calls(cfg, packed=False, **parallelism):
    parallelism, mesh = Parallelism(**parallelism), mesh_lib.one_device()
    spec = step.StepSpec(Pretraining(cfg), Optimizer(name="adamw"), parallelism, 1, mesh)
    state = step.abstract_state(spec.objective, spec.optimizer, parallelism, mesh)
    window = jax.eval_shape(lambda: step.empty_window(spec.objective.metrics))
    key = jax.eval_shape(lambda: step.phase_key(cfg, 0, 0))
    run = step.make_train_step.__wrapped__(spec, 10)  # its programs are kept by their arguments
    return calls(run.trace(state, window, random_batch(cfg, packed), key))


def vectors(rows, length, count=3):
    return [f"{rows}x{length}x{HEADS}x{WIDTH}xbf16"] * count


def expected(rows, queries, keys, bias, mask_type, lengths=False):
    """Returns the two calls of a training step: forward and backward."""
    query, (key, value) = vectors(rows, queries, 1), vectors(rows, keys, 2)
    name, sums = "ScaleBiasSoftmax" if bias else "Softmax", f"{rows}x{HEADS}x{queries}xf32"
    # cuDNN returns heads before positions.
    d_query, d_key = (f"{rows}x{HEADS}x{n}x{WIDTH}xbf16" for n in (queries, keys))
    lengths = [f"{rows}xi32"] * 2 if lengths else []
    bias, workspace = [bias] if bias else [], "0xui8"
    forward = [*query, key, value, *bias, *lengths], [d_query, sums, workspace]
    backward = [*query, key, value, sums, *query, *bias, *query, *lengths]
    gradients = [d_query, d_key, d_key, workspace]  # none of the bias
    return (name, mask_type, *forward), (f"{name}Backward", mask_type, backward, gradients)


BLOCK, BLOCKS = 2 * HALF, BATCH * LENGTH // (2 * HALF)
LOCAL = BLOCKS, BLOCK, 2 * BLOCK, f"{BLOCKS}x1x{BLOCK}x{2 * BLOCK}xbf16", "NO_MASK"
WHOLE, BY_TEXT = (BATCH, LENGTH, LENGTH), f"{BATCH}x1x{LENGTH}x{LENGTH}xbf16"
BY_POSITION = f"1x1x{LENGTH}x{LENGTH}xbf16"


@pytest.mark.parametrize(
    ("cfg", "packed", "asked"),
    [
        (BERT, False, [expected(*WHOLE, "", "PADDING", lengths=True)]),
        (MODERN, False, [expected(*LOCAL), expected(*WHOLE, "", "PADDING", lengths=True)]),
        (MODERN, True, [expected(*LOCAL), expected(*WHOLE, BY_TEXT, "NO_MASK")]),
        (CAUSAL, False, [expected(*LOCAL), expected(*WHOLE, "", "CAUSAL")]),
        (CAUSAL, True, [expected(*LOCAL), expected(*WHOLE, BY_TEXT, "CAUSAL")]),
        (DROPPING, False, []),
    ],
    ids=["bert", "windows", "windows_packed", "causal", "causal_packed", "dropout"],
)
@pytest.mark.parametrize("remat", ["none", "dots"])
def test_a_training_step_asks_for_masks_and_windows_as_meant(on_cuda, cfg, packed, asked, remat):
    """A local layer and a global one are two branches, of which the layer takes one."""
    forward, backward = zip(*asked, strict=True) if asked else ((), ())
    assert train_calls(cfg, packed, remat=remat) == [*forward, *backward]


def test_a_fully_recomputed_layer_asks_for_its_context_twice(on_cuda):
    names = [name for name, *_ in train_calls(BERT, remat="full")]
    assert names == ["Softmax", "Softmax", "SoftmaxBackward"]


def test_rows_without_a_whole_number_of_blocks_have_their_window_as_a_bias(on_cuda):
    cfg = dataclasses.replace(MODERN, local_window=24)
    local, whole = (expected(*WHOLE, b, "PADDING", lengths=True) for b in (BY_POSITION, ""))
    assert train_calls(cfg) == [local[0], whole[0], local[1], whole[1]]


@pytest.mark.parametrize("cfg", [MODERN, DROPPING])
def test_an_evaluation_drops_nothing(on_cuda, cfg):
    objective, mesh = Pretraining(cfg), mesh_lib.one_device()
    evaluate = step.make_eval_step.__wrapped__(objective, Parallelism(), mesh)
    params = jax.eval_shape(lambda: objective.init_params(jax.random.key(0)))
    sums = jax.eval_shape(lambda: dict.fromkeys(objective.metrics, jnp.zeros(2)))
    found = calls(evaluate.trace(params, sums, random_batch(cfg)))
    asked = [expected(*LOCAL)] if cfg.kind == "modern" else []
    asked.append(expected(*WHOLE, "", "PADDING", lengths=True))
    assert found == [forward for forward, _ in asked]


def test_packed_texts_are_embedded_in_their_slots(on_cuda):
    features = embedding_program.VectorOptions(normalize=True)
    mesh, params = mesh_lib.one_device(), Pretraining(BERT).init_params(jax.random.key(0))
    depth = BERT.num_hidden_layers
    run = embedding_program.build(BERT, depth, features, (depth,), TextVectors(), mesh)
    row, tokens = np.zeros((1, 96), np.int32), np.zeros((1, BATCH, LENGTH), np.int32)
    batch = {"input_ids": row, "positions": row, "slot_indices": row, "row_indices": tokens}
    forward, _ = expected(*WHOLE, "", "PADDING", lengths=True)
    assert calls(run.trace(params, batch)) == [forward]


# --- when it is used -----------------------------------------------------------------------------


def gpu(capability="9.0", platform="gpu"):
    return types.SimpleNamespace(platform=platform, compute_capability=capability)


@pytest.mark.parametrize(
    ("changed", "parallelism", "device", "named"),
    [
        ({}, {}, gpu(), None),
        ({}, {}, gpu("8.0"), None),
        ({}, {}, gpu("12.1"), None),
        ({}, {}, gpu(platform="cpu"), "not an NVIDIA GPU"),
        ({}, {"attention": "xla"}, gpu(), "parallelism.attention=xla"),
        ({"code": f"a.py:f:{64 * '0'}"}, {}, gpu(), "model.code"),
        ({"compute_dtype": "float32"}, {}, gpu(), "model.compute_dtype=float32"),
        ({}, {"tensor": 2}, gpu(), "parallelism.tensor=2"),
        ({}, {}, gpu("7.5"), "capability 7.5"),
        ({"num_attention_heads": 4}, {}, gpu(), "heads are 4 wide"),
        ({"hidden_size": 512}, {}, gpu(), None),
        ({"hidden_size": 512}, {}, gpu("8.9"), "heads are 256 wide"),
        ({"hidden_size": 528}, {}, gpu(), "heads are 264 wide"),
        ({"attention_probs_dropout_prob": 0.1}, {}, gpu(), "model.attention_probs_dropout_prob"),
    ],
)
def test_why_xla_computes_attention_is_said(monkeypatch, changed, parallelism, device, named):
    monkeypatch.setattr(private_apis, "cudnn_version", lambda: 91002)
    cfg, parallelism = dataclasses.replace(BERT, **changed), Parallelism(**parallelism)
    reason = cudnn_attention.training_refusal(cfg, device, parallelism)
    assert reason is None if named is None else named in reason
    if "attention_probs_dropout_prob" in changed:  # only training drops probabilities
        assert cudnn_attention.refusal(cfg, device, parallelism) is None


def test_a_gpu_without_cuda_is_left_to_xla():
    assert private_apis.cudnn_version() is None
    assert "not an NVIDIA GPU" in cudnn_attention.refusal(BERT, gpu(), Parallelism())


@pytest.mark.parametrize(
    ("cfg", "length", "has_noise", "fits"),
    [
        (DROPPING, 32, False, True),
        (DROPPING, 32, True, False),
        (BERT, 32, True, True),
        (BERT, 31, False, False),
    ],
)
def test_odd_rows_and_dropped_probabilities_are_left_to_xla(cfg, length, has_noise, fits):
    assert cudnn_attention.fits(cfg, length, has_noise) is fits


@pytest.mark.parametrize(
    ("cfg", "said"), [(DROPPING, "by XLA (model.attention_"), (BERT, "by cuDNN")]
)
def test_a_run_on_a_gpu_reports_what_computes_attention(monkeypatch, cfg, said):
    monkeypatch.setattr(private_apis, "cudnn_version", lambda: 91002)
    training = types.SimpleNamespace(objective=Pretraining(cfg))
    experiment, lines = types.SimpleNamespace(parallelism=Parallelism()), []
    job = types.SimpleNamespace(training=training, experiment=experiment, report=lines.append)
    for device in (gpu(), gpu(platform="cpu")):
        session._report_attention(job, types.SimpleNamespace(devices=np.array([device])))
    assert len(lines) == 1 and said in lines[0]

"""A head on an encoder: its parameters, which of them are trainable, and the loss of a task.

The head is always trainable. `adapt.how` determines what else is: the whole base (`full`), nothing
(`frozen`), or low-rank matrices next to the base's kernels (`lora`). A run saves only the trainable
parameters; the base supplies the others.

Shape letters: B rows, S sequence, D width, O outputs, L layers of the encoder, N features of each
token.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bert_jax.config import Adapt, Features, Model
from bert_jax.errors import InputError
from bert_jax.model import layers, lstm, similarity, transformer
from bert_jax.model import losses as losses_lib
from bert_jax.model.attention import Packing
from bert_jax.model.encoder import Loop, fill_params, initializer, params_of
from bert_jax.model.kinds import encode, encoder_functions, text_vector
from bert_jax.training import sharding
from bert_jax.training.sharding import Rule

Batch = dict[str, jax.Array]
Tree = dict[str, Any]
# What a task reads from the encoder. The input of a head is the pooled output of a text, or the
# output of each token. `decoder`, `vectors` and `masked_lm` (sparse vectors: logits of the whole
# masked LM head of pre-training) have no head of the task.
Reads = Literal["pooled", "tokens", "decoder", "vectors", "masked_lm"]
# What a head learns to predict: labels, a number, or the first and last token of a span.
Learns = Literal["labels", "numbers", "spans"]

HEAD_RULE = Rule("head/(kernel|bias)")
_LORA_RULE = Rule("lora/[a-z_]+/(down|up)")
# The logit of padding as the start or the end of an answer.
_PADDING_LOGIT = -1e9


def part_below_head(cfg: Model, reads: Reads, features: Features = "") -> str:
    """Returns the name of the pre-trained part between the encoder and the head; "" for none.

    It is `pooler` as in BERT, or `masked_lm` without its output layer as in ModernBERT. With
    `features` a tagger replaces it. Sparse vectors use all of `masked_lm`, and have no head.
    """
    if features:
        return ""
    if reads == "masked_lm":
        return "masked_lm"
    if cfg.kind == "modern":
        return "masked_lm" if reads in ("pooled", "tokens") else ""
    return "pooler" if reads == "pooled" else ""


class EncoderWithHead(nnx.Module):
    """An encoder, then the part of `part_below_head` or a tagger or neither, then the head."""

    def __init__(
        self, cfg: Model, reads: Reads, outputs: int, features: Features = "", *, rngs: nnx.Rngs
    ):
        self.encoder = encoder_functions(cfg).encoder(cfg, rngs=rngs)
        if features:
            self.tagger = Tagger(cfg, features, rngs=rngs)
        if part_below_head(cfg, reads, features) == "pooler":
            width = cfg.hidden_size
            self.pooler = layers.Dense(width, width, initializer(cfg), rngs=rngs)
        if part_below_head(cfg, reads, features) == "masked_lm":
            self.masked_lm = transformer.Transform(cfg, rngs=rngs)
        self.head = layers.Dense(cfg.hidden_size, outputs, initializer(cfg), rngs=rngs)


# --- BiLSTM layers for tags ---------------------------------------------------------------------

_LAST_FOUR = 4
# The number of layers that `adapt.features` needs.
_NEEDED = {"second_to_last": 2, "sum_last_four": _LAST_FOUR, "concat_last_four": _LAST_FOUR}


def tagger_rules(features: Features) -> tuple[Rule, ...]:
    """Returns rules that replicate the parameters of a tagger; () without a tagger."""
    gates = (Rule("tagger/(lower|upper)/gates/(kernel|bias)"),) if features else ()
    return (*gates, Rule("tagger/mixture/(weights|scale)")) if features == "mixed" else gates


class Mixture(nnx.Module):
    """A sum of all layers with the softmax of `weights` [L + 1], times `scale` [].

    Weight decay applies to kernels, embeddings and, as in ELMo, to these weights.
    """

    def __init__(self, count: int):
        self.weights = nnx.Param(jnp.zeros(count, jnp.float32))
        self.scale = nnx.Param(jnp.ones([], jnp.float32))

    def __call__(self, outputs: jax.Array) -> jax.Array:
        """[L + 1, B, S, D] -> float32 [B, S, D]."""
        shares = jax.nn.softmax(self.weights[...])
        return self.scale[...] * jnp.einsum("l,lbsd->bsd", shares, outputs.astype(jnp.float32))


class Tagger(nnx.Module):
    """Two BiLSTM layers as wide as the encoder, over the layers that `features` selects.

    BERT's feature-based approach (Devlin et al. 2018, section 5.3 and Table 7) reads some layers of
    a frozen encoder; that of ELMo (Peters et al. 2018, section 3.3) mixes all by trained weights.
    """

    def __init__(self, cfg: Model, features: Features, *, rngs: nnx.Rngs):
        width = cfg.hidden_size
        input_width = width * (_LAST_FOUR if features == "concat_last_four" else 1)
        if features == "mixed":
            self.mixture = Mixture(cfg.num_hidden_layers + 1)
        self.lower = lstm.both_directions(input_width, width // 2, rngs=rngs)
        self.upper = lstm.both_directions(width, width // 2, rngs=rngs)


def _tagger_features(tagger: Tagger, features: Features, outputs: jax.Array) -> jax.Array:
    """Returns the features of each token: [L + 1, B, S, D] of all layers -> float32 [B, S, N]."""
    outputs = outputs.astype(jnp.float32)
    last_four = outputs[-_LAST_FOUR:]
    if features == "mixed":
        return tagger.mixture(outputs)
    if features == "sum_last_four":
        return last_four.sum(axis=0)
    if features == "concat_last_four":
        return jnp.concatenate(list(last_four), axis=-1)
    return outputs[{"embeddings": 0, "second_to_last": -2, "last": -1}[features]]


def run_tagger(
    tagger: Tagger,
    features: Features,
    outputs: jax.Array,
    input_mask: jax.Array,
    noise: layers.Noise | None,
    rate: float,
) -> jax.Array:
    """Runs the BiLSTM layers over features of the encoder, with dropout on the input of each.

    Maps the encoder's `outputs`, [L + 1, B, S, D], and `input_mask`, int32 [B, S], 0 for padding,
    to [B, S, D] of the outputs' dtype.
    """
    x = _tagger_features(tagger, features, outputs)
    for number, layer in enumerate((tagger.lower, tagger.upper)):
        x = layers.dropout(x, layers.noise_at(noise, number), rate).astype(outputs.dtype)
        x = lstm.run_both(layer, jnp.stack([x, x]), input_mask)
    return x.astype(outputs.dtype)


def require_tagger_layers(model: Model, features: Features, where: str) -> None:
    """Raises InputError, which names `where`, unless the encoder has the layers for `features`."""
    needed = _NEEDED.get(features, 1)
    if model.num_hidden_layers < needed:
        raise InputError(
            f"adapt.features={features}: {where} has {model.num_hidden_layers} layers, but "
            f"{needed} are needed; choose embeddings, last or mixed"
        )
    if features and model.hidden_size % 2:
        raise InputError(
            f"adapt.features={features}: {where} has model.hidden_size={model.hidden_size}, which "
            "must be even for two directions; remove adapt.features"
        )


# --- trainable parameters -----------------------------------------------------------------------


def _init_lora(kernel: jax.Array, rank: int, key: jax.Array) -> Tree:
    """Returns initial matrices of all layers, whose product is 0 (Hu et al. 2021, section 4.1)."""
    count, inputs, outputs = kernel.shape
    down = jax.random.normal(key, (count, inputs, rank), jnp.float32) / inputs**0.5
    return {"down": down, "up": jnp.zeros((count, rank, outputs), jnp.float32)}


def merged_params(adapt: Adapt, trainable: Tree, frozen: Tree | None) -> Tree:
    """Returns the parameters of the model: the frozen ones, merged with the trainable ones.

    `frozen` has the base's encoder and the part below the head; None with `full`.
    """
    if frozen is None:
        return trainable
    params = {**frozen, **{name: tree for name, tree in trainable.items() if name != "lora"}}
    if adapt.how == "lora":
        encoder = dict(params["encoder"])
        stacked = dict(encoder["layers"])
        scale = adapt.lora_alpha / adapt.lora_rank
        for name, low_rank in trainable["lora"].items():
            update = scale * jnp.einsum("lir,lro->lio", low_rank["down"], low_rank["up"])
            stacked[name] = {**stacked[name], "kernel": stacked[name]["kernel"] + update}
        params["encoder"] = {**encoder, "layers": stacked}
    return params


# --- the loss -----------------------------------------------------------------------------------


def encode_texts(
    encoder: nnx.Module,
    model: Model,
    batch: Batch,
    noise: layers.Noise | None,
    loop: Loop,
    outputs: Literal["last", "all"] = "last",
) -> tuple[jax.Array, jax.Array]:
    """Returns the hidden states of each text, [N, S, D], and their mask, int32 [N, S].

    The N texts may be packed into fewer rows, see `embeddings.packing`; then `outputs` must be
    `last`. With `all` the states are [L + 1, N, S, D].
    """
    ids, mask = (batch["input_ids"], batch["segment_ids"]), batch["input_mask"]
    if "row_indices" not in batch:  # each text has its own row
        return encode(encoder, model, *ids, mask, noise, loop, outputs), mask
    packed = Packing(batch["positions"], batch["row_indices"], batch["slot_indices"])
    return packed.unpack(encode(encoder, model, *ids, packed, noise, loop)), packed.mask


@dataclasses.dataclass(frozen=True)
class TaskObjective:
    """The `Objective` of a task; see `training.objective`."""

    model: Model  # of the base, with the dropout rates and the compute type of `adapt`
    # The next four are those of the `TaskKind`.
    learns: Learns
    reads: Reads
    outputs: int
    rows_per_example: int
    adapt: Adapt
    fresh_parts: tuple[str, ...] = ()  # parts that are untrained in the base
    class_weights: tuple[float, ...] = ()  # of each label in the loss; empty: all equal

    losses: tuple[str, ...] = ("loss",)  # metrics whose means add up to the loss

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that `forward` returns."""
        return ("loss",) if self.learns == "numbers" else ("loss", "accuracy")

    @property
    def rules(self) -> Sequence[sharding.Rule]:
        """Returns the sharding rules of the trainable parameters."""
        rules = tagger_rules(self.adapt.features)
        part = part_below_head(self.model, self.reads, self.adapt.features)
        part_rules = sharding.optional_rules(self.model)[part] if part else ()
        if self.adapt.how == "full":
            encoder = sharding.encoder_rules(self.model)
            return [*encoder, *part_rules, HEAD_RULE, *rules]
        if part not in self.fresh_parts:
            part_rules = ()
        lora = self.adapt.how == "lora"
        return [HEAD_RULE, *rules, *part_rules, *[_LORA_RULE] * lora]

    @property
    def base_parts(self) -> tuple[str, ...]:
        """Names of the parts of a base that the model contains."""
        part = part_below_head(self.model, self.reads, self.adapt.features)
        return ("encoder", part) if part else ("encoder",)

    @property
    def notes(self) -> dict[str, Any]:
        """Metadata for checkpoints, as JSON."""
        return {}

    @property
    def _module_args(self) -> tuple[Any, ...]:
        return self.model, self.reads, self.outputs, self.adapt.features

    def init_params(self, key: jax.Array) -> Any:
        """Returns fresh trainable parameters, as nested dicts of float32 arrays.

        With `full` they include an encoder, which the caller replaces by the base's.
        """
        params = params_of(EncoderWithHead(*self._module_args, rngs=nnx.Rngs(params=key)))
        if self.adapt.how == "full":
            return params
        names = ("head", "tagger", *self.fresh_parts)
        trainable = {name: params[name] for name in names if name in params}
        if self.adapt.how == "lora":
            stacked, rank = params["encoder"]["layers"], self.adapt.lora_rank
            trainable["lora"] = {
                name: _init_lora(stacked[name]["kernel"], rank, jax.random.fold_in(key, number))
                for number, name in enumerate(sorted(self.adapt.lora_targets))
            }
        return trainable

    def logits(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> jax.Array:
        """Returns the head's logits: float32 [B, O] for pooled texts, [B, S, O] for tokens.

        `fixed` are the frozen parameters of the base, None if there are none; `noise` is that of
        dropout, None without dropout; `loop` has the settings of the loop over layers. Reads
        `input_ids`, `segment_ids` and `input_mask` of the batch, int32 [B, S].
        """
        cfg, features, rate = self.model, self.adapt.features, self.adapt.head_dropout_prob
        merged = merged_params(self.adapt, params, fixed)
        module = fill_params(merged, EncoderWithHead, *self._module_args)
        outputs = "all" if features else "last"
        hidden, mask = encode_texts(module.encoder, cfg, batch, noise, loop, outputs)
        # Dropout keys: the encoder uses the indices up to num_hidden_layers.
        if features:
            tagger_noise = layers.noise_at(noise, cfg.num_hidden_layers + 2)
            hidden = run_tagger(module.tagger, features, hidden, mask, tagger_noise, rate)
        if self.reads == "pooled" and self.adapt.pooling == "mean":
            hidden = similarity.pool(hidden, mask, "mean").astype(hidden.dtype)
        elif self.reads == "pooled":
            hidden = text_vector(cfg, hidden, mask)
        part = part_below_head(cfg, self.reads, features)
        if part == "pooler":
            # DistilBERT has this layer with ReLU in its heads. Like MPNet it has no segments.
            has_tanh = cfg.type_vocab_size or cfg.relative_position_buckets
            act = jnp.tanh if has_tanh else jax.nn.relu
            hidden = act(module.pooler(hidden)).astype(hidden.dtype)
        elif part == "masked_lm":
            hidden = module.masked_lm(hidden)
        head_noise = layers.noise_at(noise, cfg.num_hidden_layers + 1)
        return module.head(layers.dropout(hidden, head_noise, rate).astype(hidden.dtype))

    def predict(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> jax.Array:
        """Returns the outputs of each row for `TaskKind.answers`, by default the logits."""
        return self.logits(params, fixed, batch, noise, loop)

    def compress_output(self, values: np.ndarray) -> Any:
        """Returns what `run_rows` keeps of the result of `predict` for one row."""
        return values

    def forward(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> losses_lib.Metrics:
        """Computes the metrics of some rows."""
        return self.measure(self.logits(params, fixed, batch, noise, loop), batch)

    def measure(self, logits: jax.Array, batch: Batch) -> losses_lib.Metrics:
        """Returns (sum, count) of the loss and, except in regression, of correct predictions."""
        weights, rows_per_example = self._weights(batch), self.rows_per_example
        if self.learns == "numbers":
            errors = weights * jnp.square(logits[:, 0] - batch["targets"])
            return {"loss": jnp.stack([errors.sum(), weights.sum()])}
        if self.learns == "spans":
            logits = jnp.where(batch["input_mask"][..., None] > 0, logits, _PADDING_LOGIT)
            parts = [
                losses_lib.classification(logits[..., i], batch[name], weights)
                for i, name in enumerate(("starts", "ends"))
            ]
            # The mean of both, as in BERT's run_squad.py.
            loss, hits = ((a + b) / 2 for a, b in zip(*parts, strict=True))
            return {"loss": loss, "accuracy": hits}
        targets = batch["targets"][::rows_per_example]
        if rows_per_example > 1:  # each candidate has one logit
            logits = logits.reshape(-1, rows_per_example)
        loss, hits = losses_lib.classification(logits, targets, weights)
        if self.class_weights:
            label_weights = jnp.array(self.class_weights, jnp.float32)[targets]
            weighted, _ = losses_lib.classification(logits, targets, weights * label_weights)
            loss = jnp.stack([weighted[0], loss[1]])  # the mean weight is 1: the count stays
        return {"loss": loss, "accuracy": hits}

    def counts(self, batch: Batch) -> tuple[jax.Array, ...]:
        """Counts the targets: examples, words with tags, or tokens of generated texts."""
        return (self._weights(batch).sum(),)

    def _weights(self, batch: Batch) -> jax.Array:
        """Returns the weight of each target: [examples], or [B, S] for tokens."""
        weights = batch["row_weights"]
        if "target_weights" in batch:
            return batch["target_weights"] * weights[:, None]
        return weights[:: self.rows_per_example]

    def loss(self, metrics: losses_lib.Metrics, counts: tuple[jax.Array, ...]) -> jax.Array:
        """Returns the loss sum of a micro-batch over the number of targets of the whole batch."""
        return metrics["loss"][0] / counts[0]

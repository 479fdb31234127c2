"""A head on an encoder: its parameters, which of them learn, and the loss of a task.

The head learns always; of the base all of it (`full`), nothing (`frozen`), or thin matrices next to
its kernels (`lora`). A run keeps the parameters that learn alone; with those of the base they make
the model.

Shape letters: B rows, S sequence, D width, O outputs.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.config import Adapt, Features, Model
from bert_jax.model import heads, layers, similarity, transformer
from bert_jax.model import losses as losses_lib
from bert_jax.model.encoder import Loop, fill_params, initializer, params_of
from bert_jax.model.kinds import encode, encoder_of, text_vector
from bert_jax.tasks import tagger
from bert_jax.tasks.rows import Learns, Reads
from bert_jax.training import sharding

Batch = dict[str, jax.Array]
Tree = dict[str, Any]

HEAD_RULE = sharding.Rule("head/(kernel|bias)")
_LORA_RULE = sharding.Rule("lora/[a-z_]+/(down|up)")
# Padding is never the beginning or the end of an answer.
_NO_PLACE = -1e9


def below_head(cfg: Model, reads: Reads, features: Features = "") -> str:
    """Returns the part of pre-training that stands below the head of a task; empty for none.

    `pooler` as in BERT, or as in ModernBERT `masked_lm`, without its output; with `features` a
    tagger takes its place.
    """
    if features:
        return ""
    if cfg.kind == "modern":
        return "masked_lm" if reads in ("pooled", "tokens") else ""
    return "pooler" if reads == "pooled" else ""


class EncoderWithHead(nnx.Module):
    """An encoder and the head of a task; between them `below_head`, or a tagger, or nothing."""

    def __init__(
        self, cfg: Model, reads: Reads, outputs: int, features: Features = "", *, rngs: nnx.Rngs
    ):
        self.encoder = encoder_of(cfg).encoder(cfg, rngs=rngs)
        if features:
            self.tagger = tagger.Tagger(cfg, features, rngs=rngs)
        if below_head(cfg, reads, features) == "pooler":
            width = cfg.hidden_size
            self.pooler = layers.Dense(width, width, initializer(cfg), rngs=rngs)
        if below_head(cfg, reads, features) == "masked_lm":
            self.masked_lm = transformer.Transform(cfg, rngs=rngs)
        self.head = layers.Dense(cfg.hidden_size, outputs, initializer(cfg), rngs=rngs)


# --- what learns --------------------------------------------------------------------------------


def _thin(kernel: jax.Array, rank: int, key: jax.Array) -> Tree:
    """Returns for each layer two matrices whose product is zero (Hu et al. 2021, section 4.1)."""
    count, inputs, outputs = kernel.shape
    down = jax.random.normal(key, (count, inputs, rank), jnp.float32) / inputs**0.5
    return {"down": down, "up": jnp.zeros((count, rank, outputs), jnp.float32)}


def merged_params(adapt: Adapt, trainable: Tree, fixed: Tree | None) -> Tree:
    """Returns the parameters of the model: the base's, with those that learn laid over them.

    `fixed` are the base's encoder and what stands below the head; None with `full`.
    """
    if fixed is None:
        return trainable
    params = {**fixed, **{name: tree for name, tree in trainable.items() if name != "lora"}}
    if adapt.how == "lora":
        encoder = dict(params["encoder"])
        stacked = dict(encoder["layers"])
        scale = adapt.lora_alpha / adapt.lora_rank
        for name, thin in trainable["lora"].items():
            more = scale * jnp.einsum("lir,lro->lio", thin["down"], thin["up"])
            stacked[name] = {**stacked[name], "kernel": stacked[name]["kernel"] + more}
        params["encoder"] = {**encoder, "layers": stacked}
    return params


# --- the loss -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TaskObjective:
    """The `Objective` of a task; see `training.objective`."""

    model: Model  # of the base, with the dropout and the type of `adapt`
    learns: Learns  # as the other three of the task's `TaskKind`
    reads: Reads
    outputs: int
    rows_per_example: int
    adapt: Adapt  # how the base is adapted
    fresh_parts: tuple[str, ...] = ()  # parts that the base never learned
    class_weights: tuple[float, ...] = ()  # of each label in the loss; empty: they are alike

    losses: tuple[str, ...] = ("loss",)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what `forward` returns."""
        return ("loss",) if self.learns == "numbers" else ("loss", "accuracy")

    @property
    def rules(self) -> Sequence[sharding.Rule]:
        """Returns where the parameters that learn are cut."""
        of_features = tagger.rules(self.adapt.features)
        part = below_head(self.model, self.reads, self.adapt.features)
        of_part = sharding.optional_rules(self.model)[part] if part else ()
        if self.adapt.how == "full":
            encoder = sharding.encoder_rules(self.model)
            return [*encoder, *of_part, HEAD_RULE, *of_features]
        if part not in self.fresh_parts:
            of_part = ()
        lora = self.adapt.how == "lora"
        return [HEAD_RULE, *of_features, *of_part, *[_LORA_RULE] * lora]

    @property
    def _shape(self) -> tuple[Any, ...]:
        return self.model, self.reads, self.outputs, self.adapt.features

    def init_params(self, key: jax.Array) -> Any:
        """Returns those that learn, fresh, as nested dicts of float32 arrays; an encoder in them is
        to be replaced by the base's.
        """
        params = params_of(EncoderWithHead(*self._shape, rngs=nnx.Rngs(params=key)))
        if self.adapt.how == "full":
            return params
        learn = ("head", "tagger", *self.fresh_parts)
        learning = {name: params[name] for name in learn if name in params}
        if self.adapt.how == "lora":
            stacked, rank = params["encoder"]["layers"], self.adapt.lora_rank
            learning["lora"] = {
                name: _thin(stacked[name]["kernel"], rank, jax.random.fold_in(key, number))
                for number, name in enumerate(sorted(self.adapt.lora_targets))
            }
        return learning

    def logits(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> jax.Array:
        """Returns scores of the head: float32 [B, O] of what a text comes to, or [B, S, O].

        Parameters of the base that do not learn are `fixed`, None if all do; of a batch are read
        `input_ids`, `segment_ids` and `input_mask`, int32 [B, S].
        """
        cfg, features, rate = self.model, self.adapt.features, self.adapt.head_dropout_prob
        tuned = fill_params(merged_params(self.adapt, params, fixed), EncoderWithHead, *self._shape)
        ids, outputs = (batch["input_ids"], batch["segment_ids"]), "all" if features else "last"
        hidden = encode(tuned.encoder, cfg, *ids, batch["input_mask"], noise, loop, outputs)
        if features:
            below = None if noise is None else noise.at(cfg.num_hidden_layers + 2)
            mask = batch["input_mask"]
            hidden = tagger.run(tuned.tagger, features, hidden, mask, below, rate)
        if self.reads == "pooled" and self.adapt.pooling == "mean":
            hidden = similarity.pool(hidden, batch["input_mask"], "mean").astype(hidden.dtype)
        elif self.reads == "pooled":
            hidden = text_vector(cfg, hidden, batch["input_mask"])
        part = below_head(cfg, self.reads, features)
        if part == "pooler":
            # DistilBERT, which has no segments, has no pooler either, but at its heads this.
            act = jnp.tanh if cfg.type_vocab_size else jax.nn.relu
            hidden = act(tuned.pooler(hidden)).astype(hidden.dtype)
        elif part == "masked_lm":
            hidden = heads.apply_transform(tuned.masked_lm, cfg, hidden)
        # The layers have the numbers before, the embeddings the next.
        site = None if noise is None else noise.at(cfg.num_hidden_layers + 1)
        return tuned.head(layers.dropout(hidden, site, rate).astype(hidden.dtype))

    def forward(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> losses_lib.Metrics:
        """Computes the metrics of some rows."""
        return self.measure(self.logits(params, fixed, batch, noise, loop), batch)

    def measure(self, logits: jax.Array, batch: Batch) -> losses_lib.Metrics:
        """Returns sums and counts of the loss and, except of regressions, of the hits."""
        weights, together = self._weights(batch), self.rows_per_example
        if self.learns == "numbers":
            errors = weights * jnp.square(logits[:, 0] - batch["targets"])
            return {"loss": jnp.stack([errors.sum(), weights.sum()])}
        if self.learns == "places":
            logits = jnp.where(batch["input_mask"][..., None] > 0, logits, _NO_PLACE)
            parts = [
                losses_lib.classification(logits[..., i], batch[name], weights)
                for i, name in enumerate(("starts", "ends"))
            ]
            # As the reference: the mean of both.
            loss, hits = ((a + b) / 2 for a, b in zip(*parts, strict=True))
            return {"loss": loss, "accuracy": hits}
        targets = batch["targets"][::together]
        if together > 1:  # a score each
            logits = logits.reshape(-1, together)
        loss, hits = losses_lib.classification(logits, targets, weights)
        if self.class_weights:
            of_labels = jnp.array(self.class_weights, jnp.float32)[targets]
            weighted, _ = losses_lib.classification(logits, targets, weights * of_labels)
            loss = jnp.stack([weighted[0], loss[1]])
        return {"loss": loss, "accuracy": hits}

    def counts(self, batch: Batch) -> tuple[jax.Array, ...]:
        """Counts examples, or words if tags are learned, or the pieces of texts."""
        return (self._weights(batch).sum(),)

    def _weights(self, batch: Batch) -> jax.Array:
        """Returns how much each target counts: [examples], or of pieces [B, S]."""
        weights = batch["row_weights"]
        if "target_weights" in batch:
            return batch["target_weights"] * weights[:, None]
        return weights[:: self.rows_per_example]

    def loss(self, metrics: losses_lib.Metrics, counts: tuple[jax.Array, ...]) -> jax.Array:
        """Returns the loss of some rows over the counts of all."""
        return metrics["loss"][0] / counts[0]

"""Minimal pairs: tests which of two texts a model finds more likely (Warstadt et al. 2020).

A masked model gives no probability of a text. Its score is the pseudo-log-likelihood (Salazar et
al. 2020, section 2): each token is masked alone, and the log probabilities of all tokens, given the
rest of the text, are added. For a causal model (`model.direction`) the score is the log-likelihood:
the sum of the log probabilities of the tokens, each given the tokens before it. [CLS] and [SEP]
surround the text and are not counted. Scores are not normalized by length or frequency.

Shape letters: B rows, S sequence, U texts.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import Task
from bert_jax.data import draws
from bert_jax.errors import InputError, excerpt, prefix_errors
from bert_jax.model import flops, heads, layers
from bert_jax.model.encoder import Loop
from bert_jax.model.kinds import encode
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks.adaptation import MeshEncoder, require_finite
from bert_jax.tasks.examples import MinimalPair
from bert_jax.tasks.rows import padded, padded_length
from bert_jax.tasks.task_kind import TaskKind
from bert_jax.text.tokenizer import add_special_tokens
from bert_jax.training import feed
from bert_jax.training import mesh as mesh_lib

# Rows are padded to a multiple of this, which is smaller than elsewhere since texts are short.
_LENGTH_STEP = 8


class MinimalPairsKind(TaskKind):
    """The kind `minimal_pairs`, which only a probe scores."""

    parse_cells = staticmethod(examples_lib.minimal_pair_from_cells)


class MinimalPairs:
    """A probe that scores a model on the pairs of a task.

    At most `most` pairs are drawn, evenly from the paradigms and the same in every run; None: all.
    """

    majority, labels = 0.5, ()

    def __init__(self, name: str, task: Task, most: int | None):
        self.name, self.task = name, task
        pairs: list[Any] = examples_lib.read(task, task.validation, "labelled")
        self.examples = pairs if most is None else _sample(pairs, most)
        self.description = f"{len(self.examples)} minimal pairs"

    def open(self, reader: MeshEncoder) -> int:
        """Tokenizes the texts; returns the number of operations of one evaluation."""
        self._reader, model = reader, reader.model
        self._limit = min(self.task.max_sequence_length, model.max_position_embeddings)
        # Equal texts are scored once, so that their scores are equal to the last bit.
        self._texts: dict[tuple[int, ...], int] = {}
        self._pair_texts = np.array(
            [[self._number(t, pair.location) for t in pair.texts] for pair in self.examples]
        )

        def row_log_probabilities(
            params: Any, fixed: Any, batch: Any, noise: layers.Noise | None, loop: Loop
        ) -> jax.Array:
            module = heads.build_model(model, params)
            ids, mask = (batch["input_ids"], batch["segment_ids"]), batch["input_mask"]
            hidden = encode(module.encoder, model, *ids, mask, noise, loop)
            logits = heads.masked_lm_logits(module, model, hidden, batch["positions"])
            logs = jax.nn.log_softmax(logits)
            target_logs = jnp.take_along_axis(logs, batch["targets"][..., None], axis=-1)[..., 0]
            return (target_logs * batch["target_weights"]).sum(axis=1)  # [B]

        self._is_causal = model.direction == "left_to_right"
        self._log_probabilities = reader.compile_rows(row_log_probabilities)
        shapes = ((b["input_ids"].shape, b["positions"].shape) for _, b in self._batches())
        return sum(flops.forward_flops(model, n, length, p) for (n, length), (_, p) in shapes)

    def evaluate(self, params: Any) -> dict[str, Any]:
        """Returns how often the acceptable text is more likely. All processes call it.

        Returns:
          `accuracy`, in which equally likely texts count half, its standard error `error`, and the
          number of `pairs`; in `fields` and `paradigms` the same for each of them, by name.
        """
        likelihoods = self._log_likelihoods(params)
        require_finite(self.name, [likelihoods])
        good, bad = likelihoods[self._pair_texts].T
        right = np.where(good == bad, 0.5, good > bad)
        fields = [pair.field for pair in self.examples if pair.field]
        return {
            **_accuracy(right),
            "fields": _accuracy_by_name(right, fields) if fields else {},
            "paradigms": _accuracy_by_name(right, [pair.paradigm for pair in self.examples]),
        }

    def _number(self, text: str, location: str) -> int:
        """Returns the number of a text among the distinct texts."""
        with prefix_errors(location):
            ids = tuple(self._reader.tokenizer.encode(text))
        if not 1 <= len(ids) <= self._limit - 2:
            why = "has no tokens"
            if ids:
                why = f"has {len(ids) + 2} tokens with [CLS] and [SEP], but a row {self._limit}"
            raise InputError(f"{location}: {excerpt(text)}: {why}; remove the pair")
        return self._texts.setdefault(ids, len(self._texts))

    def _log_likelihoods(self, params: Any) -> np.ndarray:
        """Returns the log-likelihood or pseudo-log-likelihood of each text, float64 [U]."""
        sums = np.zeros(len(self._texts))
        for texts, batch in self._batches():
            (placed,) = feed.place_all([batch], mesh_lib.batch_sharding(self._reader.mesh))
            logs = jax.device_get(self._log_probabilities(params, None, placed))
            np.add.at(sums, texts, logs[: len(texts)].astype(np.float64))
        return sums

    def _batches(self) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """Yields batches of rows with one mask each, sorted by length, the longest first.

        For a causal model each text has one row without a mask.

        Yields:
          The text numbers of a batch's rows, and its arrays: the encoder's int32 [B, S];
          `positions` of predictions and their `targets`, int32 [B, P]; float32 `target_weights`, 0
          for no prediction. The last batch is filled up with rows whose `row_weights` are 0.
        """
        tok, size, texts = self._reader.tokenizer, self._reader.size, list(self._texts)
        lengths = np.array([len(ids) for ids in texts])
        ids = [add_special_tokens(tok, list(text), None)[0] for text in texts]
        ids = padded(ids, self._padded_length(lengths.max()), tok.pad_id, np.int32)
        order = np.argsort(-lengths, kind="stable")
        counts = (np.ones_like(lengths) if self._is_causal else lengths)[order]  # rows of a text
        # The text of each row, and the position of its mask.
        row_texts = np.repeat(order, counts)
        masks = 1 + np.arange(len(row_texts)) - np.repeat(np.cumsum(counts) - counts, counts)
        for start in range(0, len(row_texts), size):
            numbers = row_texts[start : start + size]
            filled = np.resize(np.arange(len(numbers)), size)
            text, positions = numbers[filled], masks[start:][filled, None]
            column = np.arange(self._padded_length(lengths[numbers[0]]))
            batch_ids = ids[text][:, : len(column)]
            if self._is_causal:
                # [CLS] predicts the first token, and so on up to the last; [SEP] is not predicted.
                is_target = column[:-1] < lengths[text, None]
                positions, targets = column[:-1] * is_target, batch_ids[:, 1:] * is_target
            else:
                is_target = np.ones_like(positions)
                targets = np.take_along_axis(batch_ids, positions, axis=1)
                np.put_along_axis(batch_ids, positions, tok.mask_id, axis=1)
            yield (
                numbers,
                {
                    "input_ids": batch_ids,
                    "segment_ids": np.zeros_like(batch_ids),
                    "input_mask": (column < lengths[text, None] + 2).astype(np.int32),
                    "positions": positions.astype(np.int32),
                    "targets": targets.astype(np.int32),
                    "target_weights": is_target.astype(np.float32),
                    "row_weights": (np.arange(size) < len(numbers)).astype(np.float32),
                },
            )

    def _padded_length(self, tokens: int) -> int:
        return padded_length(tokens + 2, self._limit, _LENGTH_STEP)


def score_lines(name: str, answer: dict[str, Any]) -> Iterator[str]:
    """Yields a table of a result of `MinimalPairs.evaluate`: in total, by field, by paradigm."""
    rows = [(name, answer), *answer["fields"].items(), *answer["paradigms"].items()]
    width = max(len(label) for label, _ in rows)
    for label, scores in rows:
        accuracy, error = (f"{scores[key]:.3f}" for key in ("accuracy", "error"))
        yield f"{label:{width}}  {accuracy} +- {error}  ({scores['pairs']} pairs)"


def _accuracy(right: np.ndarray) -> dict[str, float]:
    """Returns the mean of values in {0, 0.5, 1}, and its standard error for independent pairs."""
    error = float(right.std()) / len(right) ** 0.5
    return {"accuracy": float(right.mean()), "error": error, "pairs": len(right)}


def _accuracy_by_name(right: np.ndarray, names: Sequence[str]) -> dict[str, dict[str, float]]:
    named = np.array(names)
    return {name: _accuracy(right[named == name]) for name in sorted(set(names))}


def _sample(pairs: list[MinimalPair], most: int) -> list[MinimalPair]:
    """Returns a sample of at most `most` pairs, evenly from the paradigms, in their order."""
    counts: dict[str, int] = {}
    rounds = []  # in a random order, the number of each pair within its paradigm
    order = draws.permutation(draws.key_of(0, "probe"), 0, len(pairs))
    for i in order:
        name = pairs[i].paradigm
        rounds.append(counts.setdefault(name, 0))
        counts[name] += 1
    selected = order[np.argsort(rounds, kind="stable")[:most]]
    return [pairs[i] for i in np.sort(selected)]

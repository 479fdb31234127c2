"""Minimal pairs: which of two texts is the likelier to a model, as it is (Warstadt et al. 2020).

A masked model gives a text no probability of its own. It is scored by its pseudo-log-likelihood
(Salazar et al. 2020, section 2): each piece is masked alone, and the log probabilities of all
pieces, given the rest of the text, are added. A model that reads from left to right
(`model.direction`) does give one: the sum of the log probabilities of its pieces, each given those
before it, and each text is asked for once. [CLS] and [SEP] stand around the text and are not
counted. Nothing is learned, and nothing but the text is looked at: no length, no frequency.

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
from bert_jax.tasks.adapted import MeshEncoder, require_finite
from bert_jax.tasks.examples import MinimalPair
from bert_jax.tasks.rows import padded
from bert_jax.text.tokenizer import joined
from bert_jax.training import feed
from bert_jax.training import mesh as mesh_lib

# Rows are padded to a multiple of this: most texts are shorter than what others are padded to.
_LENGTH_STEP = 8


class MinimalPairs:
    """The pairs of a task, and a model to ask.

    At `most` so many are drawn, as many of each paradigm, the same in every run; None: all.
    """

    majority = 0.5

    def __init__(self, name: str, task: Task, most: int | None):
        self.name, self.task = name, task  # where they are
        pairs: list[Any] = examples_lib.read(task, task.validation, "labelled")
        self.pairs = pairs if most is None else _drawn(pairs, most)  # those that are asked

    def open(self, reader: MeshEncoder) -> int:
        """Makes ids of the texts; returns the operations of asking once."""
        self._reader, model = reader, reader.model
        self._limit = min(self.task.max_sequence_length, model.max_position_embeddings)
        # Equal texts are scored once, so that they are as likely to the last bit.
        self._texts: dict[tuple[int, ...], int] = {}
        self._of_pairs = np.array(
            [[self._number(t, pair.place) for t in (pair.good, pair.bad)] for pair in self.pairs]
        )

        def of_rows(
            params: Any, fixed: Any, batch: Any, noise: layers.Noise | None, loop: Loop
        ) -> jax.Array:
            del fixed
            module = heads.merge(model, params)
            ids, mask = (batch["input_ids"], batch["segment_ids"]), batch["input_mask"]
            hidden = encode(module.encoder, model, *ids, mask, noise, loop)
            logits = heads.masked_lm_logits(module, model, hidden, batch["positions"])
            logs = jax.nn.log_softmax(logits)
            of_targets = jnp.take_along_axis(logs, batch["targets"][..., None], axis=-1)[..., 0]
            return (of_targets * batch["target_weights"]).sum(axis=1)  # [B]

        self._is_causal = model.direction == "left_to_right"
        self._log_probabilities = reader.program(of_rows)
        shapes = ((b["input_ids"].shape, b["positions"].shape) for _, b in self._batches())
        return sum(
            flops.forward_flops(model, count, length, asked[1]) for (count, length), asked in shapes
        )

    def ask(self, params: Any) -> dict[str, Any]:
        """Returns how often the acceptable text is the likelier one; all processes call it.

        Returns:
          `accuracy`, in which texts that are as likely count half, its standard error `error`, and
          `pairs`; the same of each of `fields` and `paradigms`, by name.
        """
        likelihoods = self._log_likelihoods(params)
        require_finite(self.name, [likelihoods])
        good, bad = likelihoods[self._of_pairs].T
        right = np.where(good == bad, 0.5, good > bad)
        fields = [pair.field for pair in self.pairs if pair.field]
        return {
            **_accuracy(right),
            "fields": _by_name(right, fields) if fields else {},
            "paradigms": _by_name(right, [pair.paradigm for pair in self.pairs]),
        }

    def _number(self, text: str, place: str) -> int:
        """Returns the number of a text among those that differ."""
        with prefix_errors(place):
            ids = tuple(self._reader.tokenizer.encode(text))
        if not 1 <= len(ids) <= self._limit - 2:
            why = "no piece is left of it"
            if ids:
                why = f"{len(ids) + 2} pieces with [CLS] and [SEP], and a row has {self._limit}"
            raise InputError(f"{place}: {excerpt(text)}: {why}; leave the pair out")
        return self._texts.setdefault(ids, len(self._texts))

    def _log_likelihoods(self, params: Any) -> np.ndarray:
        """Returns that of each text, or its pseudo-log-likelihood, float64 [U]."""
        sums = np.zeros(len(self._texts))
        for which, batch in self._batches():
            (placed,) = feed.place_all([batch], mesh_lib.batch_sharding(self._reader.mesh))
            logs = jax.device_get(self._log_probabilities(params, None, placed))
            np.add.at(sums, which, logs[: len(which)].astype(np.float64))
        return sums

    def _batches(self) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """Yields rows with one mask each, those of like lengths together, the longest first.

        For a model that reads from left to right a text has one row, without a mask.

        Yields:
          Of a batch's first rows the numbers of their texts, and its arrays: those of the encoder
          int32 [B, S], `positions` of predictions and `targets`, what is to stand there, int32
          [B, P], and float32 `target_weights`, 0 where nothing is. The last is filled up with rows
          of `row_weights` 0.
        """
        tok, size, texts = self._reader.tokenizer, self._reader.size, list(self._texts)
        lengths = np.array([len(ids) for ids in texts])
        ids = [joined(tok, list(text), None)[0] for text in texts]
        ids = padded(ids, self._padded_length(lengths.max()), tok.pad_id, np.int32)
        order = np.argsort(-lengths, kind="stable")
        asked = (np.ones_like(lengths) if self._is_causal else lengths)[order]  # rows of a text
        # Of each row its text, and which piece of it is masked.
        of_rows = np.repeat(order, asked)
        pieces = 1 + np.arange(len(of_rows)) - np.repeat(np.cumsum(asked) - asked, asked)
        for start in range(0, len(of_rows), size):
            which = of_rows[start : start + size]
            filled = np.resize(np.arange(len(which)), size)
            text, positions = which[filled], pieces[start:][filled, None]
            column = np.arange(self._padded_length(lengths[which[0]]))
            batch_ids = ids[text][:, : len(column)]
            if self._is_causal:
                # From [CLS] the first piece, and so on up to the last; no [SEP].
                predicted = column[:-1] < lengths[text, None]
                positions, targets = column[:-1] * predicted, batch_ids[:, 1:] * predicted
            else:
                predicted = np.ones_like(positions)
                targets = np.take_along_axis(batch_ids, positions, axis=1)
                np.put_along_axis(batch_ids, positions, tok.mask_id, axis=1)
            yield (
                which,
                {
                    "input_ids": batch_ids,
                    "segment_ids": np.zeros_like(batch_ids),
                    "input_mask": (column < lengths[text, None] + 2).astype(np.int32),
                    "positions": positions.astype(np.int32),
                    "targets": targets.astype(np.int32),
                    "target_weights": predicted.astype(np.float32),
                    "row_weights": (np.arange(size) < len(which)).astype(np.float32),
                },
            )

    def _padded_length(self, pieces: int) -> int:
        return min(-(-(pieces + 2) // _LENGTH_STEP) * _LENGTH_STEP, self._limit)


def in_words(name: str, answer: dict[str, Any]) -> Iterator[str]:
    """Yields lines about what `MinimalPairs.ask` returned, the fields' first."""
    rows = [(name, answer), *answer["fields"].items(), *answer["paradigms"].items()]
    width = max(len(label) for label, _ in rows)
    for label, one in rows:
        score, error = (f"{one[key]:.3f}" for key in ("accuracy", "error"))
        yield f"{label:{width}}  {score} +- {error}  ({one['pairs']} pairs)"


def _accuracy(right: np.ndarray) -> dict[str, float]:
    """Returns the mean of 0s, halves and 1s, and its standard error if pairs are independent."""
    error = float(right.std()) / len(right) ** 0.5
    return {"accuracy": float(right.mean()), "error": error, "pairs": len(right)}


def _by_name(right: np.ndarray, names: Sequence[str]) -> dict[str, dict[str, float]]:
    named = np.array(names)
    return {name: _accuracy(right[named == name]) for name in sorted(set(names))}


def _drawn(pairs: list[MinimalPair], most: int) -> list[MinimalPair]:
    """Returns so many of them, as many of each paradigm as there are; files are often sorted."""
    met: dict[str, int] = {}
    rounds = []  # of each in a random order, which one of its paradigm it is
    order = draws.permutation(draws.key_of(0, "probe"), 0, len(pairs))
    for i in order:
        name = pairs[i].paradigm
        rounds.append(met.setdefault(name, 0))
        met[name] += 1
    chosen = order[np.argsort(rounds, kind="stable")[:most]]
    return [pairs[i] for i in np.sort(chosen)]

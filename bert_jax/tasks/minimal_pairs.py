"""Minimal pairs: tests which of two texts a model finds more likely (Warstadt et al. 2020).

A masked model gives no probability of a text. Its score is the pseudo-log-likelihood (Salazar et
al. 2020, section 2): each token is masked alone, and the log probabilities of all tokens, given the
rest of the text, are added. For a causal model (`model.direction`) the score is the log-likelihood:
the sum of the log probabilities of the tokens, each given the tokens before it. [CLS] and [SEP]
surround the text and are not counted. Scores are not normalized by length or frequency.

Shape letters: B rows, S sequence, P predictions of a row, U distinct texts.
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
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks.adaptation import ModelRunner, require_finite
from bert_jax.tasks.examples import MinimalPair
from bert_jax.tasks.rows import pad_rows, padded_length
from bert_jax.tasks.task_kind import TaskKind
from bert_jax.text.tokenizer import add_special_tokens
from bert_jax.training import feed
from bert_jax.training import mesh as mesh_lib

# Rows are padded to a multiple of this, which is smaller than elsewhere since texts are short.
_LENGTH_STEP = 8


class MinimalPairsKind(TaskKind):
    """The kind `minimal_pairs`, which only a probe scores."""

    parse_cells = staticmethod(examples_lib.minimal_pair_from_cells)


class TextLikelihoods:
    """Computes the (pseudo-)log-likelihoods of texts, or of their ends, by a model.

    Rows have at most `limit` tokens. Texts are added before `prepare`.
    """

    def __init__(self, runner: ModelRunner, limit: int):
        self._runner, self._limit = runner, min(limit, runner.model.max_position_embeddings)
        # (token ids, index of the first token that counts) -> index of the text. Equal texts are
        # scored once, so that their scores are equal to the last bit.
        self._texts: dict[tuple[tuple[int, ...], int], int] = {}

    def add_text(self, text: str, location: str, start: int = 0) -> int:
        """Adds a text if it is new; returns its index.

        Only tokens that end after the character `start` are scored; the others are read.
        """
        with prefix_errors(location):
            if start:  # the same ids, with their ends, but slower
                tokens = list(self._runner.tokenizer.token_ends(text))
                ids = tuple(token_id for token_id, _ in tokens)
                first = sum(end <= start for _, end in tokens)
            else:
                ids, first = tuple(self._runner.tokenizer.encode(text)), 0
        if first == len(ids) or len(ids) > self._limit - 2:
            why = "has no tokens to score"
            if first < len(ids):
                why = f"has {len(ids) + 2} tokens with [CLS] and [SEP], but a row has {self._limit}"
            raise InputError(f"{location}: {excerpt(text)}: {why}; remove it")
        return self._texts.setdefault((ids, first), len(self._texts))

    def prepare(self) -> int:
        """Compiles the program; returns the FLOPs of one evaluation."""
        model = self._runner.model

        def row_log_probabilities(
            params: Any, fixed: Any, batch: Any, noise: layers.Noise | None, loop: Loop
        ) -> jax.Array:
            module = heads.merge(model, params)
            ids, mask = (batch["input_ids"], batch["segment_ids"]), batch["input_mask"]
            hidden = encode(module.encoder, model, *ids, mask, noise, loop)
            logits = heads.masked_lm_logits(module, model, hidden, batch["positions"])
            log_probs = jax.nn.log_softmax(logits)
            log_probs = jnp.take_along_axis(log_probs, batch["targets"][..., None], axis=-1)[..., 0]
            return (log_probs * batch["target_weights"]).sum(axis=1)  # [B]

        self._is_causal = model.direction == "left_to_right"
        self._log_probabilities = self._runner.compile_rows(row_log_probabilities)
        shapes = ((b["input_ids"].shape, b["positions"].shape) for _, b in self._batches())
        return sum(flops.forward_flops(model, n, length, p) for (n, length), (_, p) in shapes)

    def log_likelihoods(self, params: Any) -> np.ndarray:
        """Returns the log-likelihood or pseudo-log-likelihood of each text, float64 [U]."""
        sums = np.zeros(len(self._texts))
        for texts, batch in self._batches():
            (placed,) = feed.place_all([batch], mesh_lib.batch_sharding(self._runner.mesh))
            row_sums = jax.device_get(self._log_probabilities(params, None, placed))
            np.add.at(sums, texts, row_sums[: len(texts)].astype(np.float64))
        return sums

    def _batches(self) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """Yields batches of rows with one masked token each, sorted by length, the longest first.

        For a causal model each text has one row without a masked token.

        Yields:
          The text indices of a batch's rows, and its arrays: inputs of the encoder, int32 [B, S];
          `positions` of predictions and their `targets`, int32 [B, P]; float32 `target_weights`, 0
          for no prediction. The last batch is filled up with rows whose `row_weights` are 0.
        """
        tok, size = self._runner.tokenizer, self._runner.size
        lengths, firsts = np.array([(len(ids), first) for ids, first in self._texts]).T
        ids = [add_special_tokens(tok, list(text), None)[0] for text, _ in self._texts]
        ids = pad_rows(ids, self._padded_length(lengths.max()), tok.pad_id, np.int32)
        order = np.argsort(-lengths, kind="stable")
        # The number of rows of each text.
        counts = (np.ones_like(lengths) if self._is_causal else lengths - firsts)[order]
        # The text of each row, and the position of its masked token.
        row_texts = np.repeat(order, counts)
        masked_at = np.arange(len(row_texts)) - np.repeat(np.cumsum(counts) - counts, counts)
        masked_at += 1 + firsts[row_texts]
        for start in range(0, len(row_texts), size):
            count = min(size, len(row_texts) - start)
            rows = start + np.resize(np.arange(count), size)  # repeats rows to fill the last batch
            texts, positions = row_texts[rows], masked_at[rows, None]
            column = np.arange(self._padded_length(lengths[texts[0]]))
            batch_ids = ids[texts][:, : len(column)]
            if self._is_causal:
                # [CLS] predicts the first token, and so on up to the last; [SEP] is not predicted.
                is_target = column[:-1] < lengths[texts, None]
                is_target &= column[:-1] >= firsts[texts, None]
                positions, targets = column[:-1] * is_target, batch_ids[:, 1:] * is_target
            else:
                is_target = np.ones_like(positions)
                targets = np.take_along_axis(batch_ids, positions, axis=1)
                np.put_along_axis(batch_ids, positions, tok.mask_id, axis=1)
            yield (
                texts[:count],
                {
                    "input_ids": batch_ids,
                    "segment_ids": np.zeros_like(batch_ids),
                    "input_mask": (column < lengths[texts, None] + 2).astype(np.int32),
                    "positions": positions.astype(np.int32),
                    "targets": targets.astype(np.int32),
                    "target_weights": is_target.astype(np.float32),
                    "row_weights": (np.arange(size) < count).astype(np.float32),
                },
            )

    def _padded_length(self, tokens: int) -> int:
        return padded_length(tokens + 2, self._limit, _LENGTH_STEP)


class MinimalPairsProbe:
    """A probe that scores a model on the pairs of a task.

    Draws at most `max_pairs` pairs (None: all), evenly from the paradigms, the same in every run.
    """

    majority, labels = 0.5, ()  # the baseline is chance; there are no labels

    def __init__(self, name: str, task: Task, max_pairs: int | None):
        self.name, self.task = name, task
        pairs: list[Any] = examples_lib.read(task, task.validation, "labelled")
        self.examples = pairs if max_pairs is None else _sample(pairs, max_pairs)
        self.description = f"{len(self.examples)} minimal pairs"

    def prepare(self, runner: ModelRunner) -> int:
        """Tokenizes the texts; returns the FLOPs of one evaluation."""
        self.texts = TextLikelihoods(runner, self.task.max_sequence_length)
        self._pair_texts = np.array(
            [[self.texts.add_text(t, pair.location) for t in pair.texts] for pair in self.examples]
        )
        return self.texts.prepare()

    def evaluate(self, params: Any) -> dict[str, Any]:
        """Returns how often the acceptable text is more likely. All processes call it.

        Returns:
          `accuracy`, in which equally likely texts count half; `error`, its standard error; the
          number of `pairs`; and these three for each of the `fields` and `paradigms`, by name.
        """
        likelihoods = self.texts.log_likelihoods(params)
        require_finite(self.name, [likelihoods])
        good, bad = likelihoods[self._pair_texts].T
        right = np.where(good == bad, 0.5, good > bad)
        fields = [pair.field for pair in self.examples if pair.field]  # of all pairs, or of none
        return {
            **_accuracy(right),
            "fields": _accuracy_by_name(right, fields) if fields else {},
            "paradigms": _accuracy_by_name(right, [pair.paradigm for pair in self.examples]),
        }


def require_masked_lm_head(trained: LoadedModel) -> None:
    """Raises InputError if the head that texts are scored with is not trained."""
    if any(part.startswith("masked_lm") for part in (*trained.fresh, *trained.idle)):
        raise InputError(
            f"{trained.name}: its masked LM head is untrained, and likelihoods of texts need it; "
            "import weights with it"
        )


def score_lines(name: str, results: dict[str, Any]) -> Iterator[str]:
    """Yields the results of `MinimalPairsProbe.evaluate` as a table: all, by field, by paradigm."""
    rows = [(name, results), *results["fields"].items(), *results["paradigms"].items()]
    width = max(len(label) for label, _ in rows)
    for label, scores in rows:
        accuracy, standard_error = (f"{scores[key]:.3f}" for key in ("accuracy", "error"))
        yield f"{label:{width}}  {accuracy} +- {standard_error}  ({scores['pairs']} pairs)"


def _accuracy(right: np.ndarray) -> dict[str, float]:
    """Returns the mean of values in {0, 0.5, 1}, and its standard error for independent pairs."""
    standard_error = float(right.std()) / len(right) ** 0.5
    return {"accuracy": float(right.mean()), "error": standard_error, "pairs": len(right)}


def _accuracy_by_name(right: np.ndarray, names: Sequence[str]) -> dict[str, dict[str, float]]:
    named = np.array(names)
    return {name: _accuracy(right[named == name]) for name in sorted(set(names))}


def _sample(pairs: list[MinimalPair], count: int) -> list[MinimalPair]:
    """Returns a sample of at most `count` pairs, evenly from the paradigms, in the given order."""
    counts: dict[str, int] = {}
    rounds = []  # for each pair in a random order, how many before it have its paradigm
    order = draws.permutation(draws.key_of(0, "probe"), 0, len(pairs))
    for i in order:
        name = pairs[i].paradigm
        rounds.append(counts.setdefault(name, 0))
        counts[name] += 1
    selected = order[np.argsort(rounds, kind="stable")[:count]]
    return [pairs[i] for i in np.sort(selected)]

"""Held-out evaluation on a fixed set of rows, next to two baselines, and sample predictions.

The unigram baseline is the loss of a model that knows only how often each token occurs in the
training split. The majority baseline is the accuracy of always giving the more frequent label.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import Data, Model, Parallelism
from bert_jax.data import batches as batches_lib
from bert_jax.data import sentences
from bert_jax.data.stream import Stream
from bert_jax.errors import InputError
from bert_jax.model import heads, losses
from bert_jax.model.encoder import Loop
from bert_jax.running import lines as lines_lib
from bert_jax.text.tokenizer import Tokenizer, add_special_tokens, first_segment_length
from bert_jax.text.vocabulary import MASK
from bert_jax.training import feed, step
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.objective import Objective

Arrays = Mapping[str, np.ndarray | jax.Array]  # a batch, on the host or on a device


@dataclasses.dataclass
class HeldOut:
    """The evaluation rows and their baselines."""

    batches: list[batches_lib.Batch]  # see data.batches.eval_batches
    rows: int  # number of rows that are not padding
    # Nats per predicted token, by the frequencies in the training split (one added to each).
    unigram_loss: float
    majority: float | None  # share of the more frequent label of pairs; None without pairs

    @classmethod
    def of(
        cls, train: Stream, validation: Stream, ids: batches_lib.Ids, data: Data, size: int
    ) -> "HeldOut":
        """Builds the rows in batches of `size`, and computes the baselines."""
        batches, rows = batches_lib.eval_batches(validation, ids, data, size)
        counts = train.unigrams + 1
        if data.objective == "causal":  # also predicts [SEP] at the ends of documents and rows
            rows_of_text = len(train.ids) // (data.eval_sequence_length - sentences.SPECIAL_TOKENS)
            counts[ids.sep] += len(train.document_offsets) - 1 + rows_of_text
        nats = -np.log(counts / counts.sum())
        weights = np.concatenate([b["masked_lm_weights"].ravel() for b in batches])
        labels = np.concatenate([b["masked_lm_ids"].ravel() for b in batches])
        majority = None
        if "next_sentence_labels" in batches[0]:
            labels_of_rows = (b["next_sentence_labels"] * b["row_weights"] for b in batches)
            random = sum(float(ones.sum()) for ones in labels_of_rows)
            majority = max(random / rows, 1 - random / rows)
        return cls(batches, rows, float((nats[labels] * weights).sum() / weights.sum()), majority)


def evaluate(
    held_out: HeldOut,
    params: Any,
    objective: Objective,
    parallelism: Parallelism,
    mesh: jax.sharding.Mesh,
) -> dict[str, float]:
    """Returns an objective's mean metrics over the held-out rows; `loss` is the sum of its losses.

    Adds `unigram_loss` if tokens are predicted, `perplexity` for causal models, and for pairs the
    majority baseline and the standard error of the accuracy.
    """
    sums = {name: np.zeros(2, np.float32) for name in objective.metrics}
    sums = feed.put(sums, mesh_lib.replicated(mesh))
    eval_step = step.make_eval_step(objective, parallelism, mesh)
    for batch in feed.place_all(held_out.batches, mesh_lib.batch_sharding(mesh)):
        sums = eval_step(params, sums, batch)
    scores = lines_lib.means(jax.device_get(sums))
    line = {**scores, "loss": sum(scores[name] for name in objective.losses)}
    if losses.find_task(scores, losses.TOKENS):
        line["unigram_loss"] = held_out.unigram_loss
    if "next_piece_loss" in scores:
        line["perplexity"] = math.exp(min(scores["next_piece_loss"], _HIGHEST_LOSS))
    pairs = losses.find_task(scores, losses.PAIRS)
    if pairs and held_out.majority is not None:
        accuracy = scores[f"{pairs}_accuracy"]
        line[f"{pairs}_majority"] = held_out.majority
        line[f"{pairs}_error"] = math.sqrt(max(accuracy * (1 - accuracy), 0.0) / held_out.rows)
    return line | {"rows": held_out.rows}


def summary(line: dict[str, Any]) -> str:
    """Returns a line of text about an evaluation."""
    words = []
    if metric := losses.find_task(line, losses.TOKENS):
        (loss, right), unigram = losses.token_metrics(line), line["unigram_loss"]
        side = "below" if unigram >= loss else "above"
        words = [
            f"held-out {losses.TOKENS[metric]} {loss:.3f} nat, {abs(unigram - loss):.3f} {side} "
            f"the unigram baseline {unigram:.3f}"
        ]
        words += [f"perplexity {line['perplexity']:.1f}"] if "perplexity" in line else []
        words.append(f"accuracy {right:.3f}")
    else:
        words.append(f"held-out loss {line['loss']:.3f}")
    if metric := losses.find_task(line, losses.PAIRS):
        right, error, majority = (line[f"{metric}_{x}"] for x in ("accuracy", "error", "majority"))
        words.append(f"{losses.PAIRS[metric]} {right:.3f} +- {error:.3f}, majority {majority:.3f}")
    known = ("loss", "unigram_loss", "perplexity", "rows", "step", "kind")
    words += [
        f"{name.replace('_', ' ')} {value:.3f}"
        for name, value in line.items()
        if name not in known and not losses.is_known(name)
    ]
    return f"{'; '.join(words)} ({line['rows']} rows)"


def similarity_warning(line: dict[str, Any], lines: list[dict[str, Any]], base: str) -> str:
    """Returns a suffix for a message if probes of similarity score lower than at step 0.

    `line` is the newest of metrics.jsonl, `lines` are those before. New probes are not compared.
    """
    first = next((x["scores"] for x in lines if x["kind"] == "probes" and x["step"] == 0), {})
    warnings = (
        f"; {name} was {first[name]:.4f} in {base}: training makes its text vectors worse; "
        "docs/howto/train-text-vectors.md tells how to restore them"
        for name in line["similar"]
        if name in first and line["scores"][name] < first[name] - _LOST_SCORE
    )
    return "".join(warnings)


# A smaller decrease of a score gives no warning.
_LOST_SCORE = 0.01
# The perplexity of a higher loss overflows.
_HIGHEST_LOSS = 700.0
# Inputs are padded to a multiple of this, so that lengths share compiled programs.
_LENGTH_STEP = 32


@dataclasses.dataclass
class Prediction:
    """The model's predictions for a text."""

    # For each [MASK] in order, the most likely tokens with their probabilities.
    masks: list[list[tuple[str, float]]]
    is_next: float | None  # probability that B follows A; None without B


@functools.lru_cache
def logits_fn(model: Model) -> Callable[[Any, Arrays], tuple[jax.Array, jax.Array]]:
    """Compiles (parameters, batch) -> logits of both heads; see `heads.pretraining_logits`."""
    return jax.jit(functools.partial(heads.pretraining_logits, model, noise=None, loop=Loop()))


class Predictor:
    """Predicts with a model's heads and tokenizer; parameters are given with each text."""

    def __init__(self, model: Model, tokenizer: Tokenizer):
        self._model, self._tokenizer = model, tokenizer
        self._logits = logits_fn(model)

    def predict(self, params: Any, a: str, b: str | None, top: int) -> Prediction:
        """Predicts the `top` most likely tokens of every [MASK] of A and B."""
        second = None if b is None else self.encode(b)
        probs, is_next = self.probabilities(params, self.encode(a), second)
        return Prediction([self.top_tokens(p, top) for p in probs], is_next)

    def top_tokens(self, probs: np.ndarray, top: int) -> list[tuple[str, float]]:
        """Returns the `top` most likely tokens of one [MASK] with their probabilities."""
        order = np.argsort(-probs, kind="stable")[:top]
        return [(self._tokenizer.token(int(i)), float(probs[i])) for i in order]

    def probabilities(
        self, params: Any, a: list[int], b: list[int] | None
    ) -> tuple[np.ndarray, float | None]:
        """Returns the model's predictions for token ids without [CLS] and [SEP].

        Returns:
          float32 [masks, vocabulary] for the [MASK]s of A and B in order; the probability that B
          follows A, None without B.
        """
        if self._model.direction != "both":
            raise InputError(
                "model.direction=left_to_right: a model of data.objective=causal cannot fill a "
                "[MASK]: it reads only the text to the left; use a model that was trained with "
                "mlm_nsp, mlm_sop or mlm"
            )
        tok = self._tokenizer
        ids, before = add_special_tokens(tok, a, b)
        first = first_segment_length(tok, ids, before)
        limit = self._model.max_position_embeddings
        if len(ids) > limit:
            raise InputError(f"text of {len(ids)} tokens; the model reads {limit} at most")
        length = min(-(-len(ids) // _LENGTH_STEP) * _LENGTH_STEP, limit)
        column = np.arange(length)
        masks = [i for i, token in enumerate(ids) if token == tok.mask_id]
        # At least one, and a multiple of 8 so that texts share compiled programs.
        width = -(-max(len(masks), 1) // 8) * 8
        batch = {
            "input_ids": np.pad(ids, (0, length - len(ids)), constant_values=tok.pad_id)[None],
            "segment_ids": ((column >= first) & (column < len(ids)))[None],
            "input_mask": (column < len(ids))[None],
            "masked_lm_positions": np.pad(masks, (0, width - len(masks)))[None],
        }
        batch = {name: jnp.asarray(value, jnp.int32) for name, value in batch.items()}
        masked_lm, next_sentence = self._logits(params, batch)
        probs = np.asarray(jax.nn.softmax(masked_lm[0, : len(masks), : self._model.vocab_size]))
        return probs, None if b is None else float(jax.nn.softmax(next_sentence[0])[0])

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text; "[MASK]" in it becomes the mask token."""
        *before, last = text.split(MASK)
        ids: list[int] = []
        for part in before:  # a blank before [MASK] belongs to the token to predict
            ids += [*self._tokenizer.encode(part.rstrip()), self._tokenizer.mask_id]
        return ids + self._tokenizer.encode(last)


# Number and lengths of the sentences from held-out documents, if `run.watch` is empty.
_SENTENCES = 6
_LENGTHS = range(8, 25)
_TOP = 5


class MaskedSentence(NamedTuple):
    """A sentence with a [MASK]."""

    ids: list[int]  # without [CLS] and [SEP]
    text: str  # for display
    truth: int | None  # the id of the original token; None if unknown


class PredictionSampler:
    """Sentences whose masked tokens a run predicts: `run.watch`, or some of held-out documents."""

    def __init__(
        self, texts: tuple[str, ...], model: Model, tokenizer: Tokenizer, validation: Stream
    ):
        self._predictor, self._tokenizer = Predictor(model, tokenizer), tokenizer
        longest = model.max_position_embeddings - 2  # without [CLS] and [SEP]
        self._sentences = []
        for number, text in enumerate(texts):
            ids, field = self._predictor.encode(text), f"run.watch[{number}]"
            if MASK not in text:
                raise InputError(f"{field}={text!r}: write {MASK} in place of a word to predict")
            if len(ids) > longest:
                raise InputError(f"{field}: {len(ids)} tokens; the model reads {longest} at most")
            self._sentences.append(MaskedSentence(ids, text, None))
        if not texts and model.direction == "both":
            self._sentences = mask_sentences(validation, tokenizer, longest)

    def sample(self, params: Any, mesh: jax.sharding.Mesh) -> dict[str, Any]:
        """Predicts the masked tokens with the parameters of a run, on process 0.

        Returns:
          `sentences`, unless it is empty. Each has its `text`, in `masks` the most likely tokens of
          each [MASK] and, if known, the original token `truth` and its `truth_probability`.
        """
        if "masked_lm" not in params:  # a custom objective may have no such head
            return {}
        params, predicted = gather_params(params, mesh), []
        if params is None:
            return {}
        for sentence in self._sentences:
            probs, _ = self._predictor.probabilities(params, sentence.ids, None)
            masks = [self._predictor.top_tokens(p, _TOP) for p in probs]
            line: dict[str, Any] = {"text": sentence.text, "masks": masks}
            if sentence.truth is not None:
                line["truth"] = self._tokenizer.token(sentence.truth)
                line["truth_probability"] = float(probs[0, sentence.truth])
            predicted.append(line)
        return {"sentences": predicted} if predicted else {}


def gather_params(params: Any, mesh: jax.sharding.Mesh) -> Any:
    """Gathers the parameters on one device of process 0. All processes call it; others get None.

    Gathers array by array: each of the other devices holds one whole array at a time.
    """
    whole = mesh_lib.replicated(mesh)

    def gather(leaf: jax.Array) -> jax.Array | None:
        if not leaf.is_fully_replicated:
            # Waits, since JAX allocates results when it dispatches a program.
            leaf = jax.block_until_ready(jax.jit(jnp.copy, out_shardings=whole)(leaf))
        return None if jax.process_index() else leaf.addressable_data(0)

    gathered = jax.tree.map(gather, params)
    return None if jax.process_index() else gathered


def mask_sentences(validation: Stream, tokenizer: Tokenizer, longest: int) -> list[MaskedSentence]:
    """Returns up to six sentences, from documents all over the split, each with one masked word.

    Each has at most `longest` tokens, without [CLS] and [SEP].
    """
    documents = len(validation.document_offsets) - 1
    sentences = []
    for number in range(_SENTENCES):
        document = documents * number // _SENTENCES
        first, last = validation.document_offsets[document : document + 2].tolist()
        # Starts in the middle, since texts begin with titles and formulas.
        for index in range((first + last) // 2, last):
            start, end = validation.sentence_offsets[index : index + 2].tolist()
            if end - start > longest:
                continue
            sentence = _mask_word(validation.ids[start:end].tolist(), tokenizer)
            if sentence is not None and sentence not in sentences:
                sentences.append(sentence)
                break
    return sentences


def _mask_word(ids: list[int], tokenizer: Tokenizer) -> MaskedSentence | None:
    """Masks the longest word that is one token. Returns None for an unsuitable sentence."""
    if len(ids) not in _LENGTHS or tokenizer.unk_id in ids:
        return None
    continues = [*(tokenizer.continues[i] for i in ids), False]
    words = [i for i in range(len(ids)) if not (continues[i] or continues[i + 1])]
    position = max(words, key=lambda i: len(tokenizer.token(ids[i])), default=None)
    if position is None or not tokenizer.token(ids[position]).strip("\u2581\u0120").isalpha():
        return None
    masked = [*ids[:position], tokenizer.mask_id, *ids[position + 1 :]]
    return MaskedSentence(masked, tokenizer.decode(masked), ids[position])

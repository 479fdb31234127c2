"""Held-out evaluation: the same frozen rows every time, against two simple guessers.

The unigram line is what a model knows that has only counted pieces in the training split; the
majority line is what always saying the commoner label scores.
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
from bert_jax.text.tokenizer import Tokenizer, joined, of_first_segment
from bert_jax.text.vocabulary import MASK
from bert_jax.training import feed, step
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.objective import Objective

Arrays = Mapping[str, np.ndarray | jax.Array]  # a batch, on the host or on a device


@dataclasses.dataclass
class HeldOut:
    """The evaluation rows and their baselines."""

    batches: list[batches_lib.Batch]  # as data.batches.eval_batches gives them
    rows: int  # how many rows are real
    # Nats a predicted piece, with the training split's frequencies (one added to each).
    unigram_loss: float
    majority: float | None  # share of the commoner label of pairs; None: rows have none

    @classmethod
    def of(
        cls, train: Stream, validation: Stream, ids: batches_lib.Ids, data: Data, size: int
    ) -> "HeldOut":
        """Makes the rows, in batches of a size."""
        batches, rows = batches_lib.eval_batches(validation, ids, data, size)
        counts = train.unigrams + 1
        if data.objective == "causal":  # predicts [SEP], too: where documents end, and rows
            rows_of_text = len(train.ids) // (data.eval_sequence_length - sentences.SPECIAL_TOKENS)
            counts[ids.sep] += len(train.document_offsets) - 1 + rows_of_text
        nats = -np.log(counts / counts.sum())
        weights = np.concatenate([b["masked_lm_weights"].ravel() for b in batches])
        labels = np.concatenate([b["masked_lm_ids"].ravel() for b in batches])
        majority = None
        if "next_sentence_labels" in batches[0]:
            ones = (b["next_sentence_labels"] * b["row_weights"] for b in batches)
            random = sum(float(each.sum()) for each in ones)
            majority = max(random / rows, 1 - random / rows)
        return cls(batches, rows, float((nats[labels] * weights).sum() / weights.sum()), majority)


def evaluate(
    held_out: HeldOut,
    params: Any,
    objective: Objective,
    parallelism: Parallelism,
    mesh: jax.sharding.Mesh,
) -> dict[str, float]:
    """Returns an objective's means over the held-out rows, and their `loss`.

    Next to pieces stands the unigram line, next to next pieces the perplexity, and next to pairs
    the commoner label's share, and the standard error.
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
    """Returns an evaluation in words."""
    words = []
    if pieces := losses.find_task(line, losses.TOKENS):
        (loss, right), unigram = losses.token_metrics(line), line["unigram_loss"]
        where = "below" if unigram >= loss else "above"
        words = [
            f"held-out {losses.TOKENS[pieces]} {loss:.3f} nat, {abs(unigram - loss):.3f} {where} "
            f"the unigram line {unigram:.3f}"
        ]
        words += [f"perplexity {line['perplexity']:.1f}"] if "perplexity" in line else []
        words.append(f"accuracy {right:.3f}")
    else:
        words.append(f"held-out loss {line['loss']:.3f}")
    if of := losses.find_task(line, losses.PAIRS):
        right, error, majority = (line[f"{of}_{x}"] for x in ("accuracy", "error", "majority"))
        words.append(f"{losses.PAIRS[of]} {right:.3f} +- {error:.3f}, majority {majority:.3f}")
    known = ("loss", "unigram_loss", "perplexity", "rows", "step", "kind")
    words += [
        f"{name.replace('_', ' ')} {value:.3f}"
        for name, value in line.items()
        if name not in known and not losses.is_known(name)
    ]
    return f"{'; '.join(words)} ({line['rows']} rows)"


def vectors_lost(line: dict[str, Any], lines: list[dict[str, Any]], base: str) -> str:
    """Returns a warning, to be put behind others, if similar texts are known worse than by a base.

    `line` is of probes, `lines` are all before: probes that were added since are not compared.
    """
    begun = next((x["scores"] for x in lines if x["kind"] == "probes" and x["step"] == 0), {})
    fell = (
        f"; {name} was {begun[name]:.4f} in {base}, whose vectors of texts get lost: "
        "docs/search.md says how to have them back"
        for name in line["similar"]
        if name in begun and line["scores"][name] < begun[name] - _LOST
    )
    return "".join(fell)


# By how much a score falls before a warning.
_LOST = 0.01
# Of more nats the perplexity is no float.
_HIGHEST_LOSS = 700.0
# Inputs are padded to a multiple of this, so that lengths share compiled programs.
_LENGTH_STEP = 32


@dataclasses.dataclass
class Prediction:
    """The model's answer to a text."""

    # For each [MASK] in order, the likeliest pieces with their probabilities.
    masks: list[list[tuple[str, float]]]
    is_next: float | None  # probability that B follows A; None without B


@functools.lru_cache
def logits_of(model: Model) -> Callable[[Any, Arrays], tuple[jax.Array, jax.Array]]:
    """Compiles `(parameters, batch) -> both heads' scores`, see `heads.pretraining_logits`."""
    return jax.jit(functools.partial(heads.pretraining_logits, model, noise=None, loop=Loop()))


class Predictor:
    """A model's heads and its tokenizer; parameters are given with each text."""

    def __init__(self, model: Model, tokenizer: Tokenizer):
        self._model, self._tokenizer = model, tokenizer
        self._logits = logits_of(model)

    def predict(self, params: Any, a: str, b: str | None, top: int) -> Prediction:
        """Fills every [MASK] of A and B with its `top` likeliest pieces."""
        second = None if b is None else self.encode(b)
        probs, is_next = self.probabilities(params, self.encode(a), second)
        return Prediction([self.likeliest(p, top) for p in probs], is_next)

    def likeliest(self, probs: np.ndarray, top: int) -> list[tuple[str, float]]:
        """Returns the `top` likeliest pieces of one [MASK] with their probabilities."""
        order = np.argsort(-probs, kind="stable")[:top]
        return [(self._tokenizer.piece(int(i)), float(probs[i])) for i in order]

    def probabilities(
        self, params: Any, a: list[int], b: list[int] | None
    ) -> tuple[np.ndarray, float | None]:
        """Returns what the model predicts for ids without [CLS] and [SEP].

        Returns:
          float32 [masks, vocabulary] for the [MASK]s of A and B in order; the probability that B
          follows A, None without B.
        """
        if self._model.direction != "both":
            raise InputError(
                "model.direction=left_to_right: a model of data.objective=causal sees no text to "
                "the right of a [MASK] together with that to its left, and never met one; ask one "
                "trained with mlm_nsp, mlm_sop or mlm"
            )
        tok = self._tokenizer
        ids, before = joined(tok, a, b)
        first = of_first_segment(tok, ids, before)
        limit = self._model.max_position_embeddings
        if len(ids) > limit:
            raise InputError(f"text of {len(ids)} pieces; the model reads {limit} at most")
        length = min(-(-len(ids) // _LENGTH_STEP) * _LENGTH_STEP, limit)
        column = np.arange(length)
        masks = [i for i, token in enumerate(ids) if token == tok.mask_id]
        # At least one position, and a width that texts share.
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
        """Returns ids of a text in which [MASK] stands for itself."""
        *before, last = text.split(MASK)
        ids: list[int] = []
        for part in before:  # whose last blank belongs to the piece that is asked for
            ids += [*self._tokenizer.encode(part.rstrip()), self._tokenizer.mask_id]
        return ids + self._tokenizer.encode(last)


# Sentences taken from held-out documents where the experiment names none, and their lengths.
_SENTENCES = 6
_LENGTHS = range(8, 25)
_TOP = 5


class Sentence(NamedTuple):
    """A sentence with a [MASK]."""

    ids: list[int]  # without [CLS] and [SEP]
    text: str  # as it is shown
    truth: int | None  # the id of the piece that stood there; None if nobody knows


class PredictionSampler:
    """Sentences whose masked pieces a run predicts: given ones, or some of held-out documents."""

    def __init__(
        self, texts: tuple[str, ...], model: Model, tokenizer: Tokenizer, validation: Stream
    ):
        self._predictor, self._tokenizer = Predictor(model, tokenizer), tokenizer
        longest = model.max_position_embeddings - 2  # [CLS] and [SEP] stand around it
        self._sentences = []
        for number, text in enumerate(texts):
            ids, where = self._predictor.encode(text), f"run.watch[{number}]"
            if MASK not in text:
                raise InputError(f"{where}={text!r}: write {MASK} where a word is asked")
            if len(ids) > longest:
                raise InputError(f"{where}: {len(ids)} pieces; the model reads {longest} at most")
            self._sentences.append(Sentence(ids, text, None))
        if not texts and model.direction == "both":
            self._sentences = held_out_sentences(validation, tokenizer, longest)

    def ask(self, params: Any, mesh: jax.sharding.Mesh) -> dict[str, Any]:
        """Predicts the masked pieces with the parameters of a run, on process 0.

        Returns:
          `sentences`, if there are any, for each `text`; `masks`, the likeliest pieces of each
          [MASK]; and if it is known what stood there, `truth`, that piece, and `truth_probability`.
        """
        if "masked_lm" not in params:  # learned by code that has no use for it
            return {}
        params, predicted = on_one_device(params, mesh), []
        if params is None:
            return {}
        for sentence in self._sentences:
            probs, _ = self._predictor.probabilities(params, sentence.ids, None)
            masks = [self._predictor.likeliest(p, _TOP) for p in probs]
            line: dict[str, Any] = {"text": sentence.text, "masks": masks}
            if sentence.truth is not None:
                line["truth"] = self._tokenizer.piece(sentence.truth)
                line["truth_probability"] = float(probs[0, sentence.truth])
            predicted.append(line)
        return {"sentences": predicted} if predicted else {}


def on_one_device(params: Any, mesh: jax.sharding.Mesh) -> Any:
    """Gathers the parameters whole on one device of process 0; all take part, others get None.

    Array by array: the other devices hold one of them at a time, next to their own parts.
    """
    whole = mesh_lib.replicated(mesh)

    def gather(leaf: jax.Array) -> jax.Array | None:
        if not leaf.is_fully_replicated:
            # Waits, since memory of results is taken when a program is handed over.
            leaf = jax.block_until_ready(jax.jit(jnp.copy, out_shardings=whole)(leaf))
        return None if jax.process_index() else leaf.addressable_data(0)

    gathered = jax.tree.map(gather, params)
    return None if jax.process_index() else gathered


def held_out_sentences(validation: Stream, tokenizer: Tokenizer, longest: int) -> list[Sentence]:
    """Returns up to six sentences from documents all over the split, a whole word masked in each.

    Each has `longest` pieces at most, [CLS] and [SEP] not counted.
    """
    documents = len(validation.document_offsets) - 1
    sentences = []
    for number in range(_SENTENCES):
        document = documents * number // _SENTENCES
        first, last = validation.document_offsets[document : document + 2].tolist()
        # From its middle on: texts begin with titles and formulas.
        for at in range((first + last) // 2, last):
            start, end = validation.sentence_offsets[at : at + 2].tolist()
            if end - start > longest:
                continue
            sentence = _masked(validation.ids[start:end].tolist(), tokenizer)
            if sentence is not None and sentence not in sentences:
                sentences.append(sentence)
                break
    return sentences


def _masked(ids: list[int], tokenizer: Tokenizer) -> Sentence | None:
    """Masks the longest whole word of one piece; None for a sentence that does not lend itself."""
    if len(ids) not in _LENGTHS or tokenizer.unk_id in ids:
        return None
    goes_on = [*(tokenizer.continues[i] for i in ids), False]
    whole = [i for i in range(len(ids)) if not (goes_on[i] or goes_on[i + 1])]
    place = max(whole, key=lambda i: len(tokenizer.piece(ids[i])), default=None)
    if place is None or not tokenizer.piece(ids[place]).strip("\u2581\u0120").isalpha():
        return None
    masked = [*ids[:place], tokenizer.mask_id, *ids[place + 1 :]]
    return Sentence(masked, tokenizer.decode(masked), ids[place])

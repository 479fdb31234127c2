"""The evaluators of a pre-training run: held-out rows, sample predictions, and probes.

The loss on held-out rows stands next to two baselines. The unigram baseline is the loss of a model
that knows only how often each token occurs in the training split. The majority baseline is the
accuracy of always giving the more frequent label.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from bert_jax.checkpoints.base import TextVectors
from bert_jax.config import Experiment, Model, Parallelism
from bert_jax.data import batches as batches_lib
from bert_jax.data import corpus as corpus_lib
from bert_jax.data import sentences
from bert_jax.data.dataset import SPLITS
from bert_jax.data.stream import Stream
from bert_jax.errors import InputError
from bert_jax.model import flops, losses
from bert_jax.pretraining.loaded_model import Predictor, load_params
from bert_jax.pretraining.prepared_corpus import PreparedCorpus
from bert_jax.running import lines as lines_lib
from bert_jax.running.job import Evaluator, due_every
from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.workdir import Workdir
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.vocabulary import MASK
from bert_jax.training import feed, step
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import objective as objective_lib

# Number and lengths of the sentences from held-out documents, if `run.watch` is empty.
_SENTENCES = 6
_LENGTHS = range(8, 25)
# Tokens that are logged for each [MASK].
_TOP = 5
# A smaller decrease of a score gives no warning.
_LOST_SCORE = 0.01
# The perplexity of a higher loss overflows.
_HIGHEST_LOSS = 700.0


def held_out_evaluators(
    experiment: Experiment, corpus: PreparedCorpus, mesh: jax.sharding.Mesh
) -> tuple[Evaluator, Evaluator]:
    """Returns the evaluators of held-out rows and of sample predictions."""
    is_due = due_every(experiment.run.eval_every, experiment.total_steps)
    validation = corpus_lib.open_stream(corpus.folder, "validation")
    samplers = {
        model: PredictionSampler(experiment.run.watch, model, corpus.tokenizer, validation)
        for model in {experiment.model_of(number) for number in range(len(experiment.phases))}
        if model.direction == "both"
    }

    def sample(params: Any, done: int) -> dict[str, Any]:
        model = experiment.model_after(done)
        return samplers[model].sample(params, mesh) if model in samplers else {}

    return (
        Evaluator("evaluation", is_due, HeldOut.of(corpus, experiment, mesh).evaluate, summary),
        Evaluator("predictions", is_due, sample, lambda line: "", "predictions"),
    )


# --- held-out rows ------------------------------------------------------------------------------


@dataclasses.dataclass
class HeldOut:
    """The evaluation rows of an experiment on a mesh, and their baselines."""

    experiment: Experiment
    mesh: jax.sharding.Mesh
    batches: list[batches_lib.Batch]  # see data.batches.eval_batches
    rows: int  # number of rows that are not padding
    # Nats per predicted token, by the frequencies in the training split (one added to each).
    unigram_loss: float
    majority: float | None  # share of the more frequent label of pairs; None without pairs

    @classmethod
    def of(
        cls, corpus: PreparedCorpus, experiment: Experiment, mesh: jax.sharding.Mesh
    ) -> "HeldOut":
        """Builds the rows and computes the baselines."""
        data, shards = experiment.data, mesh_lib.batch_shards(mesh)
        size = -(-experiment.run.eval_batch_size // shards) * shards
        train, validation = (corpus_lib.open_stream(corpus.folder, split) for split in SPLITS)
        batches, rows = batches_lib.eval_batches(validation, corpus.ids, data, size)
        counts = train.unigrams + 1
        if data.objective == "causal":  # also predicts [SEP] at the ends of documents and rows
            rows_of_text = len(train.ids) // (data.eval_sequence_length - sentences.SPECIAL_TOKENS)
            counts[corpus.ids.sep] += len(train.document_offsets) - 1 + rows_of_text
        nats = -np.log(counts / counts.sum())
        weights = np.concatenate([b["masked_lm_weights"].ravel() for b in batches])
        labels = np.concatenate([b["masked_lm_ids"].ravel() for b in batches])
        majority = None
        if "next_sentence_labels" in batches[0]:
            labels_of_rows = (b["next_sentence_labels"] * b["row_weights"] for b in batches)
            random = sum(float(ones.sum()) for ones in labels_of_rows)
            majority = max(random / rows, 1 - random / rows)
        unigram_loss = float((nats[labels] * weights).sum() / weights.sum())
        return cls(experiment, mesh, batches, rows, unigram_loss, majority)

    def evaluate(self, params: Any, done: int) -> dict[str, float]:
        """Returns the mean metrics of the parameters after `done` steps.

        The metrics are those of the experiment's objective in all phases, so that they are
        comparable; `loss` is the sum of its losses. Adds `unigram_loss` if tokens are predicted,
        `perplexity` for causal models, and for pairs the majority baseline and the standard error
        of the accuracy.
        """
        experiment, mesh = self.experiment, self.mesh
        objective = objective_lib.pretraining_objective(
            experiment.model_for_scoring(done), experiment.data
        )
        sums = {name: np.zeros(2, np.float32) for name in objective.metrics}
        sums = feed.put(sums, mesh_lib.replicated(mesh))
        eval_step = step.make_eval_step(objective, experiment.parallelism, mesh)
        for batch in feed.place_all(self.batches, mesh_lib.batch_sharding(mesh)):
            sums = eval_step(params, sums, batch)
        scores = lines_lib.means(jax.device_get(sums))
        line = {**scores, "loss": sum(scores[name] for name in objective.losses)}
        if losses.find_task(scores, losses.TOKENS):
            line["unigram_loss"] = self.unigram_loss
        if "next_piece_loss" in scores:
            line["perplexity"] = math.exp(min(scores["next_piece_loss"], _HIGHEST_LOSS))
        pairs = losses.find_task(scores, losses.PAIRS)
        if pairs and self.majority is not None:
            accuracy = scores[f"{pairs}_accuracy"]
            line[f"{pairs}_majority"] = self.majority
            line[f"{pairs}_error"] = math.sqrt(max(accuracy * (1 - accuracy), 0.0) / self.rows)
        return line | {"rows": self.rows}


def summary(line: dict[str, Any]) -> str:
    """Returns a line of text about an evaluation."""
    parts = [f"held-out loss {line['loss']:.3f}"]
    if task := losses.find_task(line, losses.TOKENS):
        (loss, accuracy), unigram = losses.token_metrics(line), line["unigram_loss"]
        side = "below" if unigram >= loss else "above"
        parts = [
            f"held-out {losses.TOKENS[task]} {loss:.3f} nat, {abs(unigram - loss):.3f} {side} "
            f"the unigram baseline {unigram:.3f}"
        ]
        parts += [f"perplexity {line['perplexity']:.1f}"] if "perplexity" in line else []
        parts.append(f"accuracy {accuracy:.3f}")
    if task := losses.find_task(line, losses.PAIRS):
        accuracy, error, majority = (line[f"{task}_{x}"] for x in ("accuracy", "error", "majority"))
        parts.append(f"{losses.PAIRS[task]} {accuracy:.3f} +- {error:.3f}, majority {majority:.3f}")
    known = ("loss", "unigram_loss", "perplexity", "rows", "step", "kind")
    parts += [
        f"{name.replace('_', ' ')} {value:.3f}"
        for name, value in line.items()
        if name not in known and not losses.is_known(name)
    ]
    return f"{'; '.join(parts)} ({line['rows']} rows)"


def score_held_out(
    experiment: Experiment, run: Workdir, checkpoint: str
) -> tuple[int, dict[str, float]]:
    """Returns the step of a run's checkpoint and its metrics on the held-out rows.

    Args:
      experiment: the run's experiment; fields of placement may differ.
      run: the workdir, opened with the corpus.
      checkpoint: `newest`, `best`, or a step.
    """
    # The run's parallelism is for the devices of its training.
    experiment = dataclasses.replace(experiment, parallelism=Parallelism())
    corpus, mesh = PreparedCorpus.open(run.corpus), mesh_lib.make_mesh(Parallelism())
    params, done = load_params(experiment, run, corpus, mesh, checkpoint)
    return done, HeldOut.of(corpus, experiment, mesh).evaluate(params, done)


# --- sample predictions -------------------------------------------------------------------------


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
        self._sentences = [] if texts else mask_sentences(validation, tokenizer, longest)
        for number, text in enumerate(texts):
            ids, field = self._predictor.encode(text), f"run.watch[{number}]"
            if MASK not in text:
                raise InputError(f"{field}={text!r}: write {MASK} in place of a word to predict")
            if len(ids) > longest:
                raise InputError(f"{field}: {len(ids)} tokens; the model reads {longest} at most")
            self._sentences.append(MaskedSentence(ids, text, None))

    def sample(self, params: Any, mesh: jax.sharding.Mesh) -> dict[str, Any]:
        """Predicts the masked tokens with the parameters of a run, on process 0.

        Returns:
          `sentences`, unless it is empty. Each has its `text`, in `masks` the most likely tokens of
          each [MASK] and, if known, the original token `truth` and its `truth_probability`.
        """
        if "masked_lm" not in params:  # a custom objective may have no such head
            return {}
        params = gather_on_primary(params, mesh)
        if params is None or not self._sentences:
            return {}
        return {"sentences": [self._predict(params, sentence) for sentence in self._sentences]}

    def _predict(self, params: Any, sentence: MaskedSentence) -> dict[str, Any]:
        probs, _ = self._predictor.probabilities(params, sentence.ids, None)
        masks = [self._predictor.top_tokens(p, _TOP) for p in probs]
        line: dict[str, Any] = {"text": sentence.text, "masks": masks}
        if sentence.truth is not None:
            line["truth"] = self._tokenizer.token(sentence.truth)
            line["truth_probability"] = float(probs[0, sentence.truth])
        return line


def gather_on_primary(params: Any, mesh: jax.sharding.Mesh) -> Any:
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
    sentences: list[MaskedSentence] = []
    for number in range(_SENTENCES):
        document = documents * number // _SENTENCES
        first, last = validation.document_offsets[document : document + 2].tolist()
        # Starts in the middle, since texts begin with titles and formulas.
        for index in range((first + last) // 2, last):
            start, end = validation.sentence_offsets[index : index + 2].tolist()
            if end - start not in _LENGTHS or end - start > longest:
                continue
            sentence = _mask_word(validation.ids[start:end].tolist(), tokenizer)
            if sentence is not None and sentence not in sentences:
                sentences.append(sentence)
                break
    return sentences


def _mask_word(ids: list[int], tokenizer: Tokenizer) -> MaskedSentence | None:
    """Masks the longest word that is one token; returns None if the sentence is unsuitable."""
    continues = [*(tokenizer.continues[i] for i in ids), False]
    words = [i for i in range(len(ids)) if not (continues[i] or continues[i + 1])]
    position = max(words, key=lambda i: len(tokenizer.token(ids[i])), default=None)
    if position is None or tokenizer.unk_id in ids:
        return None
    if not tokenizer.token(ids[position]).strip("\u2581\u0120").isalpha():
        return None
    masked = [*ids[:position], tokenizer.mask_id, *ids[position + 1 :]]
    return MaskedSentence(masked, tokenizer.decode(masked), ids[position])


# --- probes -------------------------------------------------------------------------------------


def probe_evaluator(
    probes: Any,
    experiment: Experiment,
    tokenizer: Tokenizer,
    mesh: jax.sharding.Mesh,
    read_vectors: Callable[[], TextVectors | None],
    metrics: epath.Path,
) -> Evaluator:
    """Returns the evaluator of `probes`, a `tasks.probes.Probes`.

    `read_vectors` returns the settings for text vectors of the run's base, which the run knows only
    when it has its state. `metrics` is the run's metrics.jsonl.
    """
    setup = tokenizer, experiment.parallelism, mesh, experiment.run.eval_batch_size

    @functools.lru_cache(maxsize=1)  # prepares the probes again if an argument changes
    def prepare_probes(model: Model, vectors: TextVectors | None) -> int:
        return probes.prepare(model, *setup, vectors)

    def evaluate_probes(params: Any, done: int) -> dict[str, Any]:
        prepare_probes(experiment.model_after(done), read_vectors())
        return probes.evaluate(params)

    def describe(line: dict[str, Any]) -> str:
        scores = (f"{name} {score:.4f}" for name, score in line["scores"].items())
        warning, base = "", experiment.init_from
        if base and "similar" in line and line["step"]:
            warning = similarity_warning(line, JsonLines(metrics).read(), base)
        return f"probes: {', '.join(scores)}{warning}"

    is_due = _probe_schedule(experiment, prepare_probes(experiment.model_of(0), read_vectors()))
    return Evaluator("probes", is_due, evaluate_probes, describe, time_category="probes")


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


def _probe_schedule(experiment: Experiment, operations: int) -> Callable[[int], bool]:
    """Returns an `is_due` of probes, an evaluation of which takes so many operations.

    They are due before the first step, after the last, and as `run.probe_share` allows.
    """

    def allowed(done: int) -> int:
        """Returns how many evaluations of probes fit into the share of so many steps."""
        trained = 0
        for phase in experiment.phases:
            steps = min(done, phase.steps)
            done -= steps
            trained += steps * flops.phase_flops(experiment.model, phase)
        return int(experiment.run.probe_share * trained / operations)

    def is_due(done: int) -> bool:
        if done in (0, experiment.total_steps):
            return True
        every = experiment.run.eval_every
        return done % every == 0 and allowed(done) > allowed(done - every)

    return is_due

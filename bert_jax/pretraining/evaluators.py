"""The evaluators of a pre-training run: held-out rows, sample predictions, and probes.

Metrics of held-out rows stand next to two baselines. The unigram baseline is the loss of a model
that knows only how often each token occurs in the training split. For pairs of texts, the majority
baseline is the accuracy of always predicting the more frequent label.
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
from bert_jax.running.job import Evaluator, due_every
from bert_jax.running.lines import mean_metrics
from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.workdir import Workdir
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.vocabulary import MASK
from bert_jax.training import feed, step
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import objective as objective_lib

# Number and lengths in tokens of held-out sentences that are sampled if `run.watch` is empty.
_SAMPLES = 6
_SAMPLE_LENGTHS = range(8, 25)
_TOP_TOKENS = 5  # number of most likely tokens that are logged for each [MASK]
_MAX_SIMILARITY_DROP = 0.01  # since step 0; a probe of similarity that drops more gives a warning
_MAX_LOSS = 700.0  # the perplexity of a higher loss, exp(loss), would overflow


def held_out_evaluators(
    experiment: Experiment, corpus: PreparedCorpus, mesh: jax.sharding.Mesh
) -> tuple[Evaluator, Evaluator]:
    """Returns the evaluators of held-out rows and of sample predictions."""
    is_due = due_every(experiment.run.eval_every, experiment.total_steps)
    validation = corpus_lib.open_stream(corpus.folder, "validation")
    # {model settings: predictor}; phases may differ in settings. Causal models have no [MASK].
    predictors = {
        model: SamplePredictor(experiment.run.watch, model, corpus.tokenizer, validation)
        for model in {experiment.model_of(number) for number in range(len(experiment.phases))}
        if model.direction == "both"
    }

    def predict_samples(params: Any, done: int) -> dict[str, Any]:
        model = experiment.latest_model(done)
        return predictors[model].predict(params, mesh) if model in predictors else {}

    held_out = HeldOutRows.of(corpus, experiment, mesh)
    return (
        Evaluator("evaluation", is_due, held_out.evaluate, describe_evaluation),
        Evaluator("predictions", is_due, predict_samples, lambda metrics: "", file="predictions"),
    )


# --- held-out rows ------------------------------------------------------------------------------


@dataclasses.dataclass
class HeldOutRows:
    """The held-out rows on which an experiment is evaluated, and their baselines."""

    experiment: Experiment
    mesh: jax.sharding.Mesh
    batches: list[batches_lib.Batch]  # see data.batches.eval_batches
    count: int  # number of rows, without padding rows
    # The unigram baseline in nats per predicted token; its counts have add-one smoothing.
    unigram_loss: float
    majority: float | None  # the majority baseline of pairs; None without pairs

    @classmethod
    def of(
        cls, corpus: PreparedCorpus, experiment: Experiment, mesh: jax.sharding.Mesh
    ) -> "HeldOutRows":
        """Builds the rows and computes the baselines."""
        data, shards = experiment.data, mesh_lib.batch_shards(mesh)
        batch_size = -(-experiment.run.eval_batch_size // shards) * shards  # rounded up
        train, validation = (corpus_lib.open_stream(corpus.folder, split) for split in SPLITS)
        batches, count = batches_lib.eval_batches(validation, corpus.special_ids, data, batch_size)
        token_counts = train.unigrams + 1
        if data.objective == "causal":  # also predicts [SEP], which ends documents and rows
            # As many rows as the training split would give at the held-out length.
            train_rows = len(train.ids) // (data.eval_sequence_length - sentences.NUM_SPECIALS)
            token_counts[corpus.special_ids.sep] += len(train.document_offsets) - 1 + train_rows
        nats = -np.log(token_counts / token_counts.sum())
        weights = np.concatenate([b["masked_lm_weights"].ravel() for b in batches])
        labels = np.concatenate([b["masked_lm_ids"].ravel() for b in batches])  # or next tokens
        majority = None
        if "next_sentence_labels" in batches[0]:
            labels_of_rows = (b["next_sentence_labels"] * b["row_weights"] for b in batches)
            negatives = sum(float(x.sum()) for x in labels_of_rows)  # random or swapped pairs
            majority = max(negatives / count, 1 - negatives / count)
        unigram_loss = float((nats[labels] * weights).sum() / weights.sum())
        return cls(experiment, mesh, batches, count, unigram_loss, majority)

    def evaluate(self, params: Any, done: int) -> dict[str, float]:
        """Returns the mean metrics of the parameters after `done` steps.

        All phases are scored by `data.objective`, even those that train another objective, so that
        their metrics are comparable. `loss` is the sum of the objective's losses. Adds
        `unigram_loss` if tokens are predicted, `perplexity` for causal models, and for pairs
        `<task>_majority`, the majority baseline, and `<task>_error`, the accuracy's standard error.
        """
        experiment, mesh = self.experiment, self.mesh
        model = experiment.model_for_scoring(done)  # attends as data.objective needs
        objective = objective_lib.pretraining_objective(model, experiment.data)
        sums = {name: np.zeros(2, np.float32) for name in objective.metrics}  # sum and weight
        sums = feed.put(sums, mesh_lib.replicated(mesh))
        eval_step = step.make_eval_step(objective, experiment.parallelism, mesh)
        for batch in feed.place_all(self.batches, mesh_lib.batch_sharding(mesh)):
            sums = eval_step(params, sums, batch)
        scores = mean_metrics(jax.device_get(sums))
        line = {**scores, "loss": sum(scores[name] for name in objective.losses)}
        if losses.find_task(scores, losses.TOKENS):  # a head predicts tokens
            line["unigram_loss"] = self.unigram_loss
        if "next_piece_loss" in scores:  # the next-token loss of a causal model
            line["perplexity"] = math.exp(min(scores["next_piece_loss"], _MAX_LOSS))
        pair_task = losses.find_task(scores, losses.PAIRS)
        if pair_task and self.majority is not None:
            accuracy = scores[f"{pair_task}_accuracy"]
            line[f"{pair_task}_majority"] = self.majority
            line[f"{pair_task}_error"] = math.sqrt(max(accuracy * (1 - accuracy), 0.0) / self.count)
        return line | {"rows": self.count}


def describe_evaluation(metrics: dict[str, Any]) -> str:
    """Returns one line of text with the metrics of an evaluation of held-out rows."""
    parts = [f"held-out loss {metrics['loss']:.3f}"]
    if task := losses.find_task(metrics, losses.TOKENS):
        (loss, accuracy), unigram = losses.token_metrics(metrics), metrics["unigram_loss"]
        side = "below" if unigram >= loss else "above"
        parts = [
            f"held-out {losses.TOKENS[task]} {loss:.3f} nat, {abs(unigram - loss):.3f} {side} "
            f"the unigram baseline {unigram:.3f}"
        ]
        parts += [f"perplexity {metrics['perplexity']:.1f}"] if "perplexity" in metrics else []
        parts.append(f"accuracy {accuracy:.3f}")
    if task := losses.find_task(metrics, losses.PAIRS):
        score, error, majority = (metrics[f"{task}_{x}"] for x in ("accuracy", "error", "majority"))
        parts.append(f"{losses.PAIRS[task]} {score:.3f} +- {error:.3f}, majority {majority:.3f}")
    described = ("loss", "unigram_loss", "perplexity", "rows", "step", "kind")
    parts += [
        f"{name.replace('_', ' ')} {value:.3f}"
        for name, value in metrics.items()
        if name not in described and not losses.is_known(name)  # of a custom objective
    ]
    return f"{'; '.join(parts)} ({metrics['rows']} rows)"


def score_held_out(
    experiment: Experiment, workdir: Workdir, checkpoint: str
) -> tuple[int, dict[str, float]]:
    """Returns the step of a run's checkpoint and its metrics on the held-out rows.

    `experiment` may differ from the run's in placement (devices, folders). `workdir` must come from
    `Workdir.with_corpus`. `checkpoint` is `newest`, `best`, or a step.
    """
    # The run's own parallelism is for the devices that trained it.
    experiment = dataclasses.replace(experiment, parallelism=Parallelism())
    corpus, mesh = PreparedCorpus.open(workdir.corpus), mesh_lib.make_mesh(Parallelism())
    params, done = load_params(experiment, workdir, corpus, mesh, checkpoint)
    return done, HeldOutRows.of(corpus, experiment, mesh).evaluate(params, done)


# --- sample predictions -------------------------------------------------------------------------


class MaskedSentence(NamedTuple):
    """A sentence with a [MASK]."""

    ids: list[int]  # without [CLS] and [SEP]
    text: str  # for display
    truth: int | None  # the id of the original token; None if unknown


class SamplePredictor:
    """Predicts the [MASK]s of `texts`, or of held-out sentences if `texts` is empty."""

    def __init__(
        self, texts: tuple[str, ...], model: Model, tokenizer: Tokenizer, validation: Stream
    ):
        self._predictor, self._tokenizer = Predictor(model, tokenizer), tokenizer
        limit = model.max_position_embeddings - 2  # without [CLS] and [SEP]
        self._sentences = [] if texts else mask_sentences(validation, tokenizer, limit)
        for number, text in enumerate(texts):
            ids, field = self._predictor.encode(text), f"run.watch[{number}]"
            if MASK not in text:
                raise InputError(f"{field}={text!r}: write {MASK} in place of a word to predict")
            if len(ids) > limit:
                raise InputError(f"{field}: {len(ids)} tokens; the model reads {limit} at most")
            self._sentences.append(MaskedSentence(ids, text, None))

    def predict(self, params: Any, mesh: jax.sharding.Mesh) -> dict[str, Any]:
        """Predicts the masked tokens with the parameters of a run; all processes must call it.

        Returns:
          {"sentences": [...]}, with these keys for each sentence: `text`; `masks`, the most likely
          tokens for each [MASK]; and, if the original token is known, `truth`, which is the token,
          and `truth_probability`. Returns {} without sentences, and on all processes but 0.
        """
        if "masked_lm" not in params:  # a custom objective may have no such head
            return {}
        params = gather_on_primary(params, mesh)
        if params is None or not self._sentences:
            return {}
        return {"sentences": [self._predict(params, sentence) for sentence in self._sentences]}

    def _predict(self, params: Any, sentence: MaskedSentence) -> dict[str, Any]:
        probs, _ = self._predictor.probabilities(params, sentence.ids, None)
        masks = [self._predictor.top_tokens(p, _TOP_TOKENS) for p in probs]
        line: dict[str, Any] = {"text": sentence.text, "masks": masks}
        if sentence.truth is not None:
            line["truth"] = self._tokenizer.token(sentence.truth)
            line["truth_probability"] = float(probs[0, sentence.truth])
        return line


def gather_on_primary(params: Any, mesh: jax.sharding.Mesh) -> Any:
    """Returns parameters on one device of process 0, None elsewhere; all processes must call it.

    Gathers array by array, so that the other devices never hold more than one whole array.
    """
    whole = mesh_lib.replicated(mesh)

    def gather(leaf: jax.Array) -> jax.Array | None:
        if not leaf.is_fully_replicated:
            # Waits for each copy: JAX allocates at dispatch, so all copies would exist at once.
            leaf = jax.block_until_ready(jax.jit(jnp.copy, out_shardings=whole)(leaf))
        return None if jax.process_index() else leaf.addressable_data(0)

    gathered = jax.tree.map(gather, params)
    return None if jax.process_index() else gathered


def mask_sentences(validation: Stream, tokenizer: Tokenizer, limit: int) -> list[MaskedSentence]:
    """Returns up to six sentences of documents spread over the split, each with a masked word.

    A sentence has at most `limit` tokens, without [CLS] and [SEP].
    """
    documents = len(validation.document_offsets) - 1
    samples: list[MaskedSentence] = []
    for number in range(_SAMPLES):
        document = documents * number // _SAMPLES
        first, stop = validation.document_offsets[document : document + 2].tolist()  # sentences
        # Starts in the middle of the document, since many begin with titles and boilerplate.
        for index in range((first + stop) // 2, stop):
            start, end = validation.sentence_offsets[index : index + 2].tolist()
            if end - start not in _SAMPLE_LENGTHS or end - start > limit:
                continue
            sample = _mask_word(validation.ids[start:end].tolist(), tokenizer)
            if sample is not None and sample not in samples:
                samples.append(sample)
                break
    return samples


def _mask_word(ids: list[int], tokenizer: Tokenizer) -> MaskedSentence | None:
    """Masks the longest word that is one token; returns None if the sentence is unsuitable."""
    is_continuation = [*(tokenizer.continues[i] for i in ids), False]  # of the word before
    words = [i for i in range(len(ids)) if not (is_continuation[i] or is_continuation[i + 1])]
    position = max(words, key=lambda i: len(tokenizer.token(ids[i])), default=None)
    if position is None or tokenizer.unk_id in ids:
        return None
    if not tokenizer.token(ids[position]).strip("\u2581\u0120").isalpha():  # markers of spaces
        return None
    masked = [*ids[:position], tokenizer.mask_id, *ids[position + 1 :]]
    return MaskedSentence(masked, tokenizer.decode(masked), ids[position])


# --- probes -------------------------------------------------------------------------------------


def probe_evaluator(
    probes: Any,
    experiment: Experiment,
    tokenizer: Tokenizer,
    mesh: jax.sharding.Mesh,
    get_vector_settings: Callable[[], TextVectors | None],
    metrics_path: epath.Path,
) -> Evaluator:
    """Returns the evaluator of `probes`, a `tasks.probes.Probes`: tasks that measure the encoder.

    `get_vector_settings` returns the settings with which the run's base makes text vectors, known
    only after the run has loaded its state. `metrics_path` is the run's metrics.jsonl.
    """
    setup = tokenizer, experiment.parallelism, mesh, experiment.run.eval_batch_size

    @functools.lru_cache(maxsize=1)  # prepares the probes again only if an argument changes
    def prepare_probes(model: Model, vector_settings: TextVectors | None) -> int:
        return probes.prepare(model, *setup, vector_settings)  # FLOPs of one evaluation

    def evaluate_probes(params: Any, done: int) -> dict[str, Any]:
        prepare_probes(experiment.latest_model(done), get_vector_settings())
        return probes.evaluate(params)

    def describe(line: dict[str, Any]) -> str:
        scores = (f"{name} {score:.4f}" for name, score in line["scores"].items())
        warning, base = "", experiment.init_from
        if base and "similar" in line and line["step"]:  # has probes of similarity
            warning = similarity_warning(line, JsonLines(metrics_path).read(), base)
        return f"probes: {', '.join(scores)}{warning}"

    # The schedule needs the cost of the probes before the vector settings are known.
    flops_per_evaluation = prepare_probes(experiment.model_of(0), get_vector_settings())
    is_due = _probe_schedule(experiment, flops_per_evaluation)
    return Evaluator("probes", is_due, evaluate_probes, describe, time_category="probes")


def similarity_warning(line: dict[str, Any], lines: list[dict[str, Any]], base: str) -> str:
    """Returns a suffix for a message if probes of similarity score lower than at step 0.

    `lines` precede `line` in metrics.jsonl. Probes without a score at step 0 are skipped.
    """
    first = next((x["scores"] for x in lines if x["kind"] == "probes" and x["step"] == 0), {})
    warnings = (
        f"; {name} was {first[name]:.4f} in {base}: training makes the text vectors worse; "
        "docs/howto/train-text-vectors.md tells how to improve them again"
        for name in line["similar"]
        if name in first and line["scores"][name] < first[name] - _MAX_SIMILARITY_DROP
    )
    return "".join(warnings)


def _probe_schedule(experiment: Experiment, flops_per_evaluation: int) -> Callable[[int], bool]:
    """Returns the `is_due` of probes: whether they are due after a number of steps.

    They are due before the first step, after the last, and as `run.probe_share` allows.
    """

    def count_affordable(done: int) -> int:
        """Returns how many evaluations fit into `run.probe_share` of the FLOPs of `done` steps."""
        training_flops = 0
        for phase in experiment.phases:
            steps = min(done, phase.steps)
            done -= steps
            training_flops += steps * flops.phase_step_flops(experiment.model, phase)
        return int(experiment.run.probe_share * training_flops / flops_per_evaluation)

    def is_due(done: int) -> bool:
        if done in (0, experiment.total_steps):
            return True
        every = experiment.run.eval_every
        return done % every == 0 and count_affordable(done) > count_affordable(done - every)

    return is_due

"""BabyLM: finds checkpoints by the words seen, and scores them on the zero-shot tasks.

The rules and files are those of github.com/babylm-org/babylm-eval (folder strict). A model chooses
the likeliest text of an item. As in that project's backends `mlm` and `causal`, the score of a text
is the (pseudo-)log-likelihood of the tokens of its completion: the whole text in BLiMP and the wug
tasks, else the words after the context. Among equally likely texts the first is chosen, which in
these files is the right one.
"""

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from bert_jax.checkpoints import layout
from bert_jax.checkpoints.load import Checkpoints
from bert_jax.config import Experiment, Model, Parallelism, Run
from bert_jax.errors import InputError
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.pretraining.prepared_corpus import PreparedCorpus
from bert_jax.storage import workdir
from bert_jax.storage.workdir import Workdir
from bert_jax.tasks import scores
from bert_jax.tasks.adaptation import ModelRunner, require_finite
from bert_jax.tasks.examples import parse_number
from bert_jax.tasks.formats import require_field, require_text
from bert_jax.tasks.minimal_pairs import TextLikelihoods, require_masked_lm_head
from bert_jax.text import line_reader, records
from bert_jax.training import mesh as mesh_lib

# The numbers of words, in millions, for which checkpoints are asked.
_MILLIONS = (*range(1, 10), *range(10, 100, 10), *range(100, 1_001, 100))
# A checkpoint may differ from its number of words by this share.
_TOLERANCE = 0.05
# How many rows are sampled to estimate the mean tokens of a phase's rows, to a few per mille.
_SAMPLED_ROWS = 8_192
# Each task, and its folders below `fast_eval` and `full_eval`; "": none.
TASKS = (
    ("blimp", "blimp_fast", "blimp_filtered"),
    ("blimp", "supplement_fast", "supplement_filtered"),
    ("ewok", "ewok_fast", "ewok_filtered"),
    ("entity_tracking", "entity_tracking_fast", "entity_tracking"),
    ("wug_adj", "wug_adj_nominalization", "wug_adj_nominalization"),
    ("wug_past", "wug_past_tense", "wug_past_tense"),
    ("comps", "", "comps"),
)
_FORMAT_VERSION = 1
Report = Callable[[str], None]


# --- words seen -----------------------------------------------------------------------------------


def steps_by_name(experiment: Experiment, prepared: PreparedCorpus, words: int) -> dict[str, int]:
    """Returns the steps after which a run has seen 1M, 2M, ... words: {"chck_1M": 81, ...}.

    `words` is the number of words of the text of the corpus, as separated by white space; it gives
    the words per token. Repeated text counts again, and both texts of a pair count.
    """
    tokens = sum(counts["tokens"] for counts in prepared.manifest["splits"].values())
    per_phase = [
        phase.steps * _tokens_per_step(experiment, prepared, i) * words / tokens
        for i, phase in enumerate(experiment.phases)
    ]
    ends, seen = [0, *experiment.ends], [0.0, *itertools.accumulate(per_phase)]
    steps = {}
    for millions in _MILLIONS:
        step = round(float(np.interp(millions * 1e6, seen, ends)))
        if abs(np.interp(step, ends, seen) - millions * 1e6) <= _TOLERANCE * millions * 1e6:
            steps[f"chck_{millions}M"] = step
        elif millions * 1e6 < seen[-1]:
            raise InputError(
                f"--words {words}: no step ends within {_TOLERANCE:.0%} of {millions} million "
                "words seen; choose a smaller phases.0.batch_size"
            )
    return steps


def checkpoints_by_name(run: Workdir, words: int) -> dict[str, int]:
    """Returns for each name of `steps_by_name` up to the newest checkpoint the nearest one."""
    checkpoints = Checkpoints(run.checkpoints)
    newest, saved = checkpoints.find_step("newest"), checkpoints.steps
    experiment = workdir.load_experiment(run)
    corpus = run.with_corpus(experiment.run.corpus_dir).corpus
    steps = {}
    for name, step in steps_by_name(experiment, PreparedCorpus.open(corpus), words).items():
        nearest = min(saved, key=lambda other, step=step: abs(other - step))
        if abs(nearest - step) <= _TOLERANCE * step:
            steps[name] = nearest
        elif step < newest:
            raise InputError(
                f"--words {words}: {run.checkpoints}: no checkpoint near step {step}, {name}; "
                "train with the run.keep_steps that `bert-jax words-seen` prints"
            )
    return steps


def _tokens_per_step(experiment: Experiment, prepared: PreparedCorpus, phase_index: int) -> float:
    """Returns the mean tokens of a phase's batches, without [CLS], [SEP] and padding.

    The first rows are a random sample, since the rows of an epoch are in random order.
    """
    phase, ids = experiment.phases[phase_index], prepared.special_ids
    batches = prepared.train_batches(experiment, phase_index)
    count = min(phase.steps, math.ceil(_SAMPLED_ROWS / phase.batch_size))
    inputs = [batches.batch(i, np.arange(phase.batch_size))["input_ids"] for i in range(count)]
    batches.close()
    return float(np.isin(inputs, (ids.pad, ids.cls, ids.sep), invert=True).sum()) / count


# --- zero-shot tasks ------------------------------------------------------------------------------


class Item(NamedTuple):
    """Candidate texts; the first is the right one, or in the wug tasks that of `ratio`."""

    location: str
    subtask: str
    texts: Sequence[str]
    starts: Sequence[int]  # of the completion in each text, in characters
    predictions: Sequence[str]  # what is written if a text is chosen
    ratio: float = 0.0  # of the wug tasks: the share of people who prefer the first text


def _read_item(task: str, stem: str, record: dict[str, Any], location: str) -> Item:
    """Returns the item of a line of the file STEM.jsonl."""

    def fields(*names: str) -> list[str]:
        return [require_field(record, name, str, location) for name in names]

    if task == "blimp":
        texts = fields("sentence_good", "sentence_bad")
        subtask = fields("UID")[0] if "field" in record else stem
        return Item(location, subtask, texts, [0, 0], texts)
    if task == "ewok":
        context, *targets, domain = fields("Context1", "Target1", "Target2", "Domain")
        targets = [f" {target}" for target in targets]
        texts = [context + target for target in targets]
        return Item(location, domain, texts, [len(context)] * 2, targets)
    if task == "entity_tracking":
        (prefix,) = fields("input_prefix")
        options = [
            require_text(option, "an option", location)
            for option in require_field(record, "options", list, location)
        ]
        subtask = f"{stem}_{require_field(record, 'numops', int, location)}_ops"
        texts = [prefix + option for option in options]
        return Item(location, subtask, texts, [len(prefix)] * len(texts), options)
    if task == "comps":
        *prefixes, phrase = fields("prefix_acceptable", "prefix_unacceptable", "property_phrase")
        texts = [f"{prefix} {phrase}" for prefix in prefixes]
        subtask = stem.removeprefix("comps_").replace("-", "_")
        return Item(location, subtask, texts, [len(prefix) + 1 for prefix in prefixes], texts)
    texts = fields("sentences")[0].split("\t")  # the wug tasks
    ratio = parse_number(record.get("ratio"), "'ratio'", location)
    return Item(location, task, texts, [0] * len(texts), texts, ratio)


class ZeroShotTask:
    """The items of a folder of .jsonl files, whose texts are scored by models like `runner`'s."""

    def __init__(self, task: str, folder: epath.Path, runner: ModelRunner):
        self.task, self._folder = task, folder
        self.items = list[Item]()
        for path in sorted(folder.glob("*.jsonl")):
            lines = (line for _, line in line_reader.read_file(str(path)))
            for record in records.parse("jsonl", lines, str(path)):
                values = dict(zip(record.names, record.values, strict=True))
                self.items.append(_read_item(task, path.stem, values, record.location))
        if not self.items:
            raise InputError(f"{folder}: no .jsonl file with items")
        self._likelihoods = TextLikelihoods(runner, runner.model.max_position_embeddings)
        self._text_indices = [
            [
                self._likelihoods.add_text(text, item.location, start)
                for text, start in zip(item.texts, item.starts, strict=True)
            ]
            for item in self.items
        ]
        self._likelihoods.prepare()

    def evaluate(self, params: Any) -> tuple[dict[str, Any], dict[str, float]]:
        """Returns the predictions by subtask, and the scores in percent.

        Scores are accuracies by subtask, or for wug tasks the Spearman correlation of probabilities
        with people's choices; and their mean, `average`.
        """
        log_likelihoods = self._likelihoods.log_likelihoods(params)
        require_finite(str(self._folder), [log_likelihoods])
        is_wug, predictions, right = self.task.startswith("wug"), {}, {}
        for item, texts in zip(self.items, self._text_indices, strict=True):
            values = log_likelihoods[texts]
            chosen, previous = int(values.argmax()), predictions.setdefault(item.subtask, [])
            prediction: dict[str, Any] = {"id": f"{item.subtask}_{len(previous)}"}
            prediction["pred"] = item.predictions[chosen]
            if is_wug:
                prediction["prob"] = float(np.exp(values[0] - np.logaddexp.reduce(values)))
            previous.append(prediction)
            right.setdefault(item.subtask, []).append(chosen == 0)
        if is_wug:
            probabilities = [prediction["prob"] for prediction in predictions[self.task]]
            ratios = [item.ratio for item in self.items]
            results = {self.task: 100 * scores.score("spearman", ratios, probabilities)}
        else:
            results = {name: 100 * float(np.mean(values)) for name, values in right.items()}
        average = float(np.mean(list(results.values())))
        wrapped = {name: {"predictions": values} for name, values in predictions.items()}
        return wrapped, {"average": average, **results}


class Evaluation:
    """Scores checkpoints of a run on the files in the folder `data`.

    Writes OUT/REVISION/zero_shot/BACKEND/TASK/FOLDER/predictions.json, as collate_preds.py reads
    them, and scores.json next to it, with the checksum of the checkpoint and of the files.
    """

    def __init__(self, run: Workdir, data: epath.Path, out: epath.Path, report: Report):
        self._run, self._data, self._out, self._report = run, data, out, report
        self._experiment = workdir.load_experiment(run)
        self._mesh = mesh_lib.make_mesh(Parallelism())
        self._files: dict[tuple[Model, epath.Path], ZeroShotTask] = {}
        folders = [f"fast_eval/{fast}" for _, fast, _ in TASKS if fast]
        folders += [f"full_eval/{full}" for _, _, full in TASKS]
        missing = [name for name in folders if not (data / name).exists()]
        if missing == folders:
            raise InputError(
                f"--data {data}: has no {folders[0]}, ...; give the folder evaluation_data"
            )
        if missing:
            report(f"babylm: not scored, since {data} does not have it: {', '.join(missing)}")

    def score(self, revision: str, step: int, kind: str) -> dict[str, float]:
        """Returns the average score by folder of a checkpoint; `kind` is `fast` or `full`.

        Folders that were scored already with the same parameters and files are not scored again.
        """
        saved = Checkpoints(self._run.checkpoints).metadata(step)["checksums"]
        averages = dict[str, float]()
        is_causal = self._experiment.latest_model(step).direction == "left_to_right"
        backend = self._out / revision / "zero_shot" / ("causal" if is_causal else "mlm")
        trained: LoadedModel | None = None
        for task, *names in TASKS:
            name = names[kind == "full"]
            folder, out = self._data / f"{kind}_eval" / name, backend / task / name
            if not name or not folder.exists():
                continue
            files = (path.read_bytes() for path in sorted(folder.glob("*.jsonl")))
            hashes = [hashlib.sha256(content).hexdigest() for content in files]
            inputs = layout.hash_json({"checkpoint": saved, "files": hashes})
            if (path := out / "scores.json").exists():
                record = workdir.read_json(path, _FORMAT_VERSION)
                if record["inputs"] == inputs:
                    averages[name] = record["scores"]["average"]
                    continue
            trained = trained or LoadedModel.of(self._run, checkpoint=str(step))
            require_masked_lm_head(trained)
            prepared = self._prepare(task, folder, trained)
            params = jax.device_put(trained.params, mesh_lib.replicated(self._mesh))
            predictions, task_scores = prepared.evaluate(params)
            out.mkdir(parents=True, exist_ok=True)
            workdir.write_atomic(out / "predictions.json", json.dumps(predictions))
            record = {"format_version": _FORMAT_VERSION, "inputs": inputs}
            workdir.write_json(path, record | {"scores": task_scores})
            averages[name] = task_scores["average"]
            self._report(f"babylm: {revision}, step {step}: {name} {averages[name]:.2f}")
        return averages

    def _prepare(self, task: str, folder: epath.Path, trained: LoadedModel) -> ZeroShotTask:
        """Returns the tokenized items of a folder, the same ones for all checkpoints of a model."""
        key = dataclasses.replace(trained.model, compute_dtype="float32"), folder
        if key not in self._files:
            shards = mesh_lib.batch_shards(self._mesh)
            size = -(-Run().eval_batch_size // shards) * shards
            runner = ModelRunner(key[0], trained.tokenizer, Parallelism(), self._mesh, size)
            self._files[key] = ZeroShotTask(task, folder, runner)
        return self._files[key]

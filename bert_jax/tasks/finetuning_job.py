"""Fine-tuning as a job of the training loop."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

from bert_jax import config
from bert_jax.config import Finetuning
from bert_jax.distributed.peers import Peers
from bert_jax.errors import InputError, pluralize
from bert_jax.running import session
from bert_jax.running.job import Evaluator, Job, PhaseBatches, Training, due_every
from bert_jax.running.progress import Progress
from bert_jax.storage import mirror
from bert_jax.storage.workdir import load_experiment
from bert_jax.tasks import rows, similar
from bert_jax.tasks.adaptation import (
    base_head,
    base_params,
    compile_forward,
    frozen_params,
    read_base,
)
from bert_jax.tasks.examples import Tally
from bert_jax.tasks.task_kind import read_data
from bert_jax.tasks.task_objective import TaskObjective
from bert_jax.text.records import quote_names
from bert_jax.text.tokenizer import UnknownShare
from bert_jax.training import feed, step
from bert_jax.training import mesh as mesh_lib

# At most this many labels are shown with their counts.
_MAX_LABELS = 10


def finetune(
    experiment: Finetuning,
    base: str | None,
    path: str | None,
    progress: Progress,
    origin: dict[str, Any] | None = None,
) -> session.Outcome:
    """Starts or resumes the fine-tuning of a base on a task.

    If `base` is None, the base is that of the experiment, or that of the run in the workdir. The
    workdir is at `path`, or runs/NAME. `origin` is from `config.load_with_origin`.
    """
    if not experiment.task.spec.adapt_methods:
        raise InputError(
            f"task.kind={experiment.task.kind}: is not for training; score a run on it with "
            "`bert-jax evaluate --task FILE`, or during pre-training with run.probes"
        )
    path = path or f"runs/{experiment.name}"
    if base is None and not experiment.init_from:
        workdir = mirror.open_workdir(path)  # in a bucket: with local copies of its files
        if workdir.experiment.exists():
            base = load_experiment(workdir, Finetuning).init_from
    if base is not None:
        experiment = dataclasses.replace(experiment, init_from=base)
    workdir = mirror.open_workdir(path, to_write=True)
    return session.run(FinetuningJob(experiment, workdir, progress.report), progress, origin)


class FinetuningJob(Job):
    """The fine-tuning of a base on a task."""

    experiment: Finetuning
    objective: TaskObjective

    def check_inputs(self, mesh: jax.sharding.Mesh) -> None:
        experiment = self.experiment
        experiment.task.spec.implementing_class.require_libraries()
        self._base = read_base(experiment)
        self._tallies = {"train": Tally(), "validation": Tally()}
        self.data = read_data(experiment, self._base, self._tallies)
        self.objective, self.data_sha256 = self.data.objective, self.data.sha256
        # A sample is an example, or a row if an example may have several (tags and spans).
        samples = experiment.epochs * self.data.training.samples_per_epoch
        self._set_steps(math.ceil(samples / experiment.batch_size))
        # Raises InputError if the state cannot be sharded over the mesh.
        step.abstract_state(self.objective, self.optimizer, experiment.parallelism, mesh)
        microbatches = experiment.parallelism.accumulation_of(phase=0)
        size = experiment.batch_size
        mesh_lib.require_divisible(size, "finetuning.batch_size", mesh, microbatches)

    @property
    def labels(self) -> tuple[str, ...]:
        """The label of each class number; () for a task without labels."""
        return self.data.kind.labels

    def _set_steps(self, steps: int) -> None:
        """Sets the number of steps, and the schedule of the learning rate."""
        self.total_steps, warmup = steps, int(self.experiment.warmup_share * steps)
        self.optimizer = dataclasses.replace(self.experiment.optimizer, warmup_steps=warmup)

    def differences(self, saved: Finetuning, metadata: dict[str, Any]) -> list[str]:
        """Returns the changed settings; without any, checks the data and sets `total_steps`."""
        if metadata["init_sha256"] != self._base.sha256:
            raise InputError(
                f"--from {self.experiment.init_from}: its weights are not those that this run "
                "started from; name that base, or choose another --workdir"
            )
        changed = config.differences(saved, self.experiment, role="identity")  # must not change
        changed = [line for line in changed if not line.startswith("init_from:")]
        labels = tuple(metadata["notes"]["labels"])
        if not changed and labels != self.labels:
            raise InputError(
                f"{self.workdir.address}: this run has the labels {quote_names(labels)}, but the "
                f"training examples have {quote_names(self.labels)}; restore the old labels, or "
                "start again with another --workdir"
            )
        if not changed:
            # Raises InputError for other examples before the state is restored, in other shapes.
            self.accept_checkpoint(metadata)
            # In older runs, which may have fewer steps, epochs counted examples instead of rows.
            self._set_steps(metadata["notes"].get("total_steps", self.total_steps))
        return changed

    def open(self, mesh: jax.sharding.Mesh, peers: Peers) -> None:
        peers.require_same(
            "examples",
            {"examples": self.data_sha256[:16], "base": self._base.sha256[:16]},
            "give all processes the same files",
        )
        experiment, tokenizer = self.experiment, self._base.tokenizer
        data, training = self.data, self.data.training
        shards = mesh_lib.batch_shards(mesh)
        eval_size = -(-experiment.run.eval_batch_size // shards) * shards
        eval_size *= data.eval_rows.rows_per_example
        self._mesh, self._eval_size = mesh, eval_size
        self.eval_batches = rows.eval_batches(data.eval_rows, tokenizer.pad_id, eval_size)
        counts = self._tallies["validation"].examples
        self._by_source = data.kind.split_by_source(data.validation, counts)
        self.frozen = frozen_params(self._base, self.objective, mesh)
        self._forward = compile_forward(self.objective, experiment.parallelism, mesh)
        self._baseline_text = ""
        if (baseline := data.kind.baseline(data.validation)) is not None:
            answer, score = baseline
            self._baseline_text = f"; {answer}: {experiment.task.main_score} {score:.4f}"
        splits = {"train": training.rows, "validation": data.eval_rows}
        ids = {name: split.ids for name, split in splits.items() if split is not None}
        unknown = {name: UnknownShare(tokenizer).add(rows_ids) for name, rows_ids in ids.items()}
        for line in self._describe(unknown):
            self.report(line)
        record = {
            "total_steps": self.total_steps,
            "examples": {"train": training.count, "validation": len(data.validation)},
            "unknown": {name: share.value for name, share in unknown.items()},
            "cut": {name: _truncated_share(split) for name, split in splits.items()},
            "guess": baseline,
            "warnings": data.warnings,
        }
        size = experiment.batch_size * training.kind.rows_per_example
        # Rows of a micro-batch on one device, whose texts are packed together; 0: none are packed.
        block = size // (shards * experiment.parallelism.accumulation_of(phase=0))
        if not training.kind.packs_rows(on_cpu=mesh.devices.flat[0].platform == "cpu"):
            block = 0
        make_batch = functools.partial(training.batch, block)
        # The only phase has the number 0, and its first step is step 0.
        phase = PhaseBatches(0, 0, self.total_steps, size, self.objective, make_batch)
        self.training = Training(
            objective=self.objective,
            optimizer=self.optimizer,
            total_steps=self.total_steps,
            metric_names=self.objective.metrics,
            phase_batches_at=lambda done: phase,
            evaluators=self._evaluators(record),
            data_sha256=self.data_sha256,
            frozen=self.frozen,
            patience=experiment.patience,
        )

    def _evaluators(self, record: dict[str, Any]) -> tuple[Evaluator, ...]:
        """Returns the evaluator of scores, and those that write a line of predictions.jsonl once.

        Such lines are `record` and baselines of retrieval at step 0, and mistakes at the end.
        """

        def once(name: str, at: int, evaluate: Callable[[Any, int], dict[str, Any]]) -> Evaluator:
            return Evaluator(name, lambda n: n == at, evaluate, lambda line: "", file="predictions")

        scores = Evaluator(
            "scores",
            due_every(self.experiment.run.eval_every, self.total_steps),
            self._evaluate,
            lambda line: summary(line) + self._baseline_text,
        )
        task, baselines = self.experiment.task, list[Evaluator]()
        if task.is_scored_by_retrieval:
            baselines.append(once("untrained", 0, self._score_untrained))
            if task.spec.makes_vectors and task.kind != "similar":
                baselines.append(once("mean_vectors", 0, self._score_mean_vectors))
        evaluators = once("task", 0, lambda *_: record), *baselines, scores
        if not self.data.training.examples:  # kinds that train vectors record no mistakes
            return evaluators
        return *evaluators, once("mistakes", self.total_steps, lambda *_: self._mistakes())

    def _describe(self, unknown: dict[str, UnknownShare]) -> Iterator[str]:
        """Yields lines about the task, the examples and the base, and warnings."""
        experiment, task, labels = self.experiment, self.experiment.task, self.labels[:_MAX_LABELS]
        data, training = self.data, self.data.training
        hidden = len(self.labels) - len(labels)
        more = f" and {hidden} more" if hidden else ""
        count, samples = training.count, training.samples_per_epoch
        in_rows = f" in {samples:,} rows" if samples != count else ""
        yield (
            f"finetune: {pluralize(count, 'example')}{in_rows}, "
            f"{len(data.validation):,} held out, {pluralize(self.total_steps, 'step')}; "
            f"{experiment.init_from}, used weights {self._base.sha256[:12]}"
        )
        if labels and data.kind.reads == "pooled":
            counts = collections.Counter(str(example.label) for example in training.examples)
            shown = ", ".join(f"{name} {counts[name]:,}" for name in labels)
            has_f1 = len(labels) == 2 and "f1" in task.spec.scores
            positive = f"; f1 is of {labels[1]!r}" if has_f1 else ""
            yield f"finetune: labels {shown}{more}{positive}{self._baseline_text}"
        if weights := self.objective.class_weights:
            by_label = zip(labels, weights, strict=False)
            shown = ", ".join(f"{name} {weight:.3g}" for name, weight in by_label)
            yield f"finetune: class weights {shown}{more}"
        head = self._base.head
        if base_head(self._base, experiment, self.labels) is not None:
            yield "finetune: begins with the head that the base was fine-tuned with"
        elif head is not None and task.kind in head.kinds and not experiment.adapt.features:
            why = f"labels {quote_names(head.labels)}"
            if experiment.adapt.pooling not in ("", head.pooling):
                why = f"pooling {head.pooling}"
            yield f"finetune: begins with a fresh head: the base's has {why}"
        yield from (f"finetune: warning: {warning}" for warning in data.warnings)
        if task.broken_rows == "skip":
            parts = (f"{t.describe_broken()} of {name}" for name, t in self._tallies.items())
            yield f"finetune: broken rows left out: {', '.join(parts)}"
        for name, held_out in data.eval_rows.truncated.items():
            train = training.rows.truncated[name] if training.rows is not None else 0
            if train + held_out:
                yield f"finetune: truncated {name}: {train:,} of train, {held_out:,} of validation"
        if data.kind.reads == "decoder" and self._base.tokenizer.case == "uncased":
            yield "finetune: an uncased base writes lower case, but scores compare case"
        values = ", ".join(f"{share.value:.1%} of {name}" for name, share in unknown.items())
        yield f"finetune: unknown tokens: {values}"
        yield from filter(None, (share.warning(name) for name, share in unknown.items()))

    def initial_state(self, new_state: step.State) -> tuple[step.State, str]:
        params = dict(new_state["params"])
        if self.experiment.adapt.how == "full":
            training = self.data.training
            base, line = training.kind.adjust_base(self._base, self.objective, training.rows)
            if line:
                self.report(line)
            for name, tree in base_params(base, self.objective).items():
                if name not in base.fresh:
                    params[name] = _overlay(params[name], tree)
        if (head := base_head(self._base, self.experiment, self.labels)) is not None:
            params["head"] = _overlay(params["head"], head)
        return new_state | {"params": params}, self._base.sha256

    def accept_checkpoint(self, metadata: dict[str, Any]) -> None:
        if metadata["corpus_sha256"] != self.data_sha256:
            raise InputError(
                f"{self.workdir.address}: the examples are not those that this run was trained on; "
                "restore them, or start again with another --workdir"
            )

    def notes(self, evaluation: dict[str, Any]) -> dict[str, Any]:
        return self.objective.notes | {
            "labels": list(self.labels),
            "no_answer_threshold": evaluation.get("no_answer_threshold"),
            "total_steps": self.total_steps,
            "class_weights": list(self.objective.class_weights),
        }

    def _evaluate(self, params: Any, done: int) -> dict[str, Any]:
        """Returns the loss on the validation examples, all scores, and the main one as `score`."""
        data = self.data
        outputs, loss = self._forward(params, self.frozen, self.eval_batches, data.eval_rows)
        line = data.kind.evaluate(outputs, loss, data.eval_rows, data.validation, self._by_source)
        self._newest = outputs, data.kind.with_threshold(line)
        return line

    def _score_untrained(self, params: Any, done: int) -> dict[str, Any]:
        """Scores the model before the first step, after `TaskKind.adjust_base`."""
        return self._add_baseline("before training", self._evaluate(params, done)["score"])

    def _score_mean_vectors(self, params: Any, done: int) -> dict[str, Any]:
        """Scores vectors that are means over the tokens of a text, by the encoder of the base."""
        task, passages = self.experiment.task, self.data.validation
        score = similar.score_mean_vectors(self._base, task, passages, self._mesh, self._eval_size)
        return self._add_baseline("mean vectors", score)

    def _add_baseline(self, name: str, score: float) -> dict[str, Any]:
        """Adds the main score of a baseline to later lines about scores; returns its record."""
        self._baseline_text += f"; {name}: {self.experiment.task.main_score} {score:.4f}"
        return {"guess": (name, score)}

    def _mistakes(self) -> dict[str, Any]:
        """Returns the mistakes of the evaluation that `scores` has made at this last step."""
        outputs, kind = self._newest
        answers = kind.answers(outputs, self.data.eval_rows, self.data.validation)
        return kind.mistakes(answers, self.data.validation)


def _overlay(fresh: Any, tree: Any) -> Any:
    """Returns newly initialized parameters, some of them replaced by a base's."""
    if not isinstance(tree, dict):
        return feed.put(tree, fresh.sharding)
    return fresh | {name: _overlay(fresh[name], part) for name, part in tree.items()}


def _truncated_share(task_rows: rows.TaskRows | None) -> float:
    """Estimates the share of truncated rows by the share of rows of the maximum length.

    It is 0 for rows with `origins` (tags and spans), whose long texts continue in another row.
    """
    if task_rows is None or task_rows.origins:
        return 0.0
    return float((task_rows.lengths >= task_rows.limit).mean())


def summary(line: dict[str, Any]) -> str:
    """Returns a line of text about scores."""
    names = [n for n in line if n not in ("step", "kind", "loss", "score", "examples")]
    shown = ", ".join(f"{name} {line[name]:.4f}" for name in names)
    return f"held-out loss {line['loss']:.4f}; {shown} ({line['examples']} examples)"

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
from bert_jax.tasks import rows
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
    root: str | None,
    progress: Progress,
    origin: dict[str, Any] | None = None,
) -> session.Outcome:
    """Starts or resumes the fine-tuning of a base on a task.

    If `base` is None, the base is that of the experiment, or that of the run in the workdir. The
    workdir is `root`, or runs/NAME. `origin` is described at `session.run`.
    """
    if not experiment.task.spec.adapt_methods:
        raise InputError(
            f"task.kind={experiment.task.kind}: is not for training; score a run on it with "
            "`bert-jax evaluate --task FILE`, or during pre-training with run.probes"
        )
    path = root or f"runs/{experiment.name}"
    if base is None and not experiment.init_from:
        existing = mirror.open_workdir(path)
        if existing.experiment.exists():
            base = load_experiment(existing, Finetuning).init_from
    if base is not None:
        experiment = dataclasses.replace(experiment, init_from=base)
    workdir = mirror.open_workdir(path, to_write=True)
    return session.run(FinetuningJob(experiment, workdir, progress.report), progress, origin)


class FinetuningJob(Job):
    """The fine-tuning of a base on a task."""

    experiment: Finetuning
    objective: TaskObjective

    def read_inputs(self, mesh: jax.sharding.Mesh) -> None:
        experiment = self.experiment
        experiment.task.spec.implementing_class.require_libraries()
        self._base = read_base(experiment)
        self._tallies = {"train": Tally(), "validation": Tally()}
        self.data = read_data(experiment, self._base, self._tallies)
        self.objective, self.data_sha256 = self.data.objective, self.data.sha256
        draws = self.data.training.draws_per_epoch
        self._set_steps(math.ceil(experiment.epochs * draws / experiment.batch_size))
        # Raises InputError if the state cannot be sharded over the mesh.
        step.abstract_state(self.objective, self.optimizer, experiment.parallelism, mesh)
        parts = experiment.parallelism.accumulation_of(0)
        mesh_lib.require_divisible(experiment.batch_size, "finetuning.batch_size", mesh, parts)

    @property
    def labels(self) -> tuple[str, ...]:
        """The label of each class number; () for a task without labels."""
        return self.data.kind.labels

    def _set_steps(self, steps: int) -> None:
        """Sets the number of steps, and the schedule of the learning rate."""
        self.total_steps, warmup = steps, int(self.experiment.warmup_share * steps)
        self.optimizer = dataclasses.replace(self.experiment.optimizer, warmup_steps=warmup)

    def differences(self, saved: Finetuning, metadata: dict[str, Any]) -> list[str]:
        if metadata["init_sha256"] != self._base.sha256:
            raise InputError(
                f"--from {self.experiment.init_from}: its weights are not those that this run "
                "started from; name that base, or choose another --workdir"
            )
        changed = config.differences(saved, self.experiment, "identity")
        changed = [line for line in changed if not line.startswith("init_from:")]
        labels = tuple(metadata["notes"]["labels"])
        if not changed and labels != self.labels:
            raise InputError(
                f"{self.workdir.address}: this run has the labels {quote_names(labels)}, but the "
                f"training examples have {quote_names(self.labels)}; restore the old labels, or "
                "start again with another --workdir"
            )
        if not changed:
            self.load_notes(metadata)  # other examples may give a state of other shapes
            # Older runs have fewer steps: their epochs counted examples, not rows.
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
        size = -(-experiment.run.eval_batch_size // shards) * shards
        size *= data.eval_rows.rows_per_example
        self.eval_batches = rows.eval_batches(data.eval_rows, tokenizer.pad_id, size)
        self._parts = data.kind.parts(data.validation, self._tallies["validation"].examples)
        self.frozen = frozen_params(self._base, self.objective, mesh)
        self._forward = compile_forward(self.objective, experiment.parallelism, mesh)
        guess = data.kind.baseline(data.validation)
        self._baseline = ""
        if guess is not None:
            self._baseline = f"; {guess[0]}: {experiment.task.main_score} {guess[1]:.4f}"
        shares = {
            name: UnknownShare(tokenizer).add(task_rows.ids)
            for name, task_rows in (("train", training.rows), ("validation", data.eval_rows))
            if task_rows is not None
        }
        for line in self._describe(shares):
            self.report(line)
        record = {
            "total_steps": self.total_steps,
            "examples": {"train": training.count, "validation": len(data.validation)},
            "unknown": {name: share.value for name, share in shares.items()},
            "cut": {"train": _full_share(training.rows), "validation": _full_share(data.eval_rows)},
            "guess": guess,
            "warnings": data.warnings,
        }
        size = experiment.batch_size * training.kind.rows_per_example
        group = size // (shards * experiment.parallelism.accumulation_of(0))
        make_batch = functools.partial(training.batch, group)
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
        """Returns the evaluators: `record` at step 0, scores, and mistakes at the last step."""

        def once(kind: str, step: int, evaluate: Callable[[], dict[str, Any]]) -> Evaluator:
            return Evaluator(
                kind, lambda n: n == step, lambda *_: evaluate(), lambda line: "", "predictions"
            )

        scores = Evaluator(
            "scores",
            due_every(self.experiment.run.eval_every, self.total_steps),
            self._evaluate,
            lambda line: summary(line) + self._baseline,
        )
        evaluators = once("task", 0, lambda: record), scores
        if not self.data.training.examples:
            return evaluators
        return *evaluators, once("mistakes", self.total_steps, self._mistakes)

    def _describe(self, shares: dict[str, UnknownShare]) -> Iterator[str]:
        """Yields lines about the task, the examples and the base, and warnings."""
        experiment, task, labels = self.experiment, self.experiment.task, self.labels[:_MAX_LABELS]
        data, training = self.data, self.data.training
        hidden = len(self.labels) - len(labels)
        more = f" and {hidden} more" if hidden else ""
        in_rows = (
            f" in {training.draws_per_epoch:,} rows"
            if training.draws_per_epoch != training.count
            else ""
        )
        yield (
            f"finetune: {pluralize(training.count, 'example')}{in_rows}, "
            f"{len(data.validation):,} held out, "
            f"{pluralize(self.total_steps, 'step')}; "
            f"{experiment.init_from}, used weights {self._base.sha256[:12]}"
        )
        if labels and data.kind.reads == "pooled":
            counts = collections.Counter(str(example.label) for example in training.examples)
            shown = ", ".join(f"{name} {counts[name]:,}" for name in labels)
            has_f1 = len(labels) == 2 and "f1" in task.spec.scores
            positive = f"; f1 is of {labels[1]!r}" if has_f1 else ""
            yield f"finetune: labels {shown}{more}{positive}{self._baseline}"
        if weights := self.objective.class_weights:
            by_label = zip(labels, weights, strict=False)
            shown = ", ".join(f"{name} {weight:.3g}" for name, weight in by_label)
            yield f"finetune: class weights {shown}{more}"
        head = self._base.head
        if base_head(self._base, experiment, self.labels) is not None:
            yield "finetune: begins with the head that the base was fine-tuned with"
        elif head is not None and task.kind in head.kinds and not experiment.adapt.features:
            is_same = experiment.adapt.pooling in ("", head.pooling)
            why = f"labels {quote_names(head.labels)}" if is_same else f"pooling {head.pooling}"
            yield f"finetune: begins with a fresh head: the base's has {why}"
        yield from (f"finetune: warning: {warning}" for warning in data.warnings)
        if task.broken_rows == "skip":
            parts = ", ".join(f"{tally} of {name}" for name, tally in self._tallies.items())
            yield f"finetune: broken rows left out: {parts}"
        for texts, held_out in data.eval_rows.cut.items():
            count = training.rows.cut[texts] if training.rows is not None else 0
            if count + held_out:
                yield f"finetune: truncated {texts}: {count:,} of train, {held_out:,} of validation"
        if data.kind.reads == "decoder" and self._base.tokenizer.case == "uncased":
            yield "finetune: an uncased base writes lower case, but scores compare case"
        values = ", ".join(f"{share.value:.1%} of {name}" for name, share in shares.items())
        yield f"finetune: unknown tokens: {values}"
        yield from filter(None, (share.warning(name) for name, share in shares.items()))

    def initial_state(self, fresh: step.State) -> tuple[step.State, str]:
        params = dict(fresh["params"])
        if self.experiment.adapt.how == "full":
            for name, tree in base_params(self._base, self.objective).items():
                if name not in self._base.fresh:
                    params[name] = _overlay(params[name], tree)
        if (head := base_head(self._base, self.experiment, self.labels)) is not None:
            params["head"] = _overlay(params["head"], head)
        return fresh | {"params": params}, self._base.sha256

    def load_notes(self, metadata: dict[str, Any]) -> None:
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
        line = data.kind.evaluate(outputs, loss, data.eval_rows, data.validation, self._parts)
        self._newest = outputs, data.kind.fitted(line)
        return line

    def _mistakes(self) -> dict[str, Any]:
        """Returns the mistakes of the newest evaluation, which was at the same step."""
        outputs, kind = self._newest
        answers = kind.answers(outputs, self.data.eval_rows, self.data.validation)
        return kind.mistakes(answers, self.data.validation)


def _overlay(fresh: Any, tree: Any) -> Any:
    """Returns fresh parameters, some of them replaced by a base's."""
    if not isinstance(tree, dict):
        return feed.put(tree, fresh.sharding)
    return fresh | {name: _overlay(fresh[name], part) for name, part in tree.items()}


def _full_share(task_rows: rows.TaskRows | None) -> float:
    """Returns the share of rows of maximum length, most of which were truncated.

    It is 0 for tags and spans, which continue in another row.
    """
    if task_rows is None or task_rows.notes:
        return 0.0
    return float((task_rows.lengths >= task_rows.limit).mean())


def summary(line: dict[str, Any]) -> str:
    """Returns a line of text about scores."""
    names = [n for n in line if n not in ("step", "kind", "loss", "score", "examples")]
    shown = ", ".join(f"{name} {line[name]:.4f}" for name in names)
    return f"held-out loss {line['loss']:.4f}; {shown} ({line['examples']} examples)"

"""Fine-tuning as a job of the training loop."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import numpy as np

from bert_jax import config
from bert_jax.config import SCORES, Finetuning
from bert_jax.distributed.peers import Peers
from bert_jax.embeddings import packing
from bert_jax.embeddings.text_pairs import CorpusPairs
from bert_jax.errors import InputError, pluralize
from bert_jax.running import session
from bert_jax.running.job import Evaluator, Job, PhaseBatches, Training, repeat_every
from bert_jax.running.progress import Progress
from bert_jax.storage import mirror
from bert_jax.storage.workdir import load_experiment
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks import rows, scores, similar
from bert_jax.tasks.adaptation import LoadedBase, compile_forward, kind_of
from bert_jax.tasks.examples import Tally
from bert_jax.tasks.generate import TargetRows
from bert_jax.tasks.rows import Batch
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
    if experiment.task.kind == "minimal_pairs":
        raise InputError(
            "task.kind=minimal_pairs: they are not for training; score a run on them with "
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

    def read(self, mesh: jax.sharding.Mesh) -> None:
        experiment = self.experiment
        if experiment.task.kind == "generate":
            scores.require_sacrebleu()
        self._base = LoadedBase.of(experiment)
        self._tallies = {"train": Tally(), "validation": Tally()}
        self.labels: tuple[str, ...] = ()  # the label of each class number
        if experiment.task.kind == "similar":
            self._read_similar()
        else:
            self._read_labelled()
        # An epoch draws rows one by one: an example of tags or spans may have several rows.
        known = self._rows
        self._drawn = self._count if known is None else len(known.ids) // self._per_example
        self._set_steps(math.ceil(experiment.epochs * self._drawn / experiment.batch_size))
        step.abstract_state(self.objective, self.optimizer, experiment.parallelism, mesh)
        parts = experiment.parallelism.accumulation_of(0)
        mesh_lib.require_divisible(experiment.batch_size, "finetuning.batch_size", mesh, parts)

    def _set_steps(self, steps: int) -> None:
        """Sets the number of steps, and the schedule of the learning rate."""
        self.total_steps, warmup = steps, int(self.experiment.warmup_share * steps)
        self.optimizer = dataclasses.replace(self.experiment.optimizer, warmup_steps=warmup)

    def _read_labelled(self) -> None:
        experiment = self.experiment
        self._train, self._held_out = (
            examples_lib.read(experiment.task, getattr(experiment.task, name), "labelled", tally)
            for name, tally in self._tallies.items()
        )
        self.labels = examples_lib.find_labels(experiment.task, self._train)
        examples_lib.require_known_labels(self.labels, self._held_out)
        parts = {"train": self._train, "validation": self._held_out}
        keys = frozenset(map(examples_lib.text_key, self._train))
        self._warnings = scores.data_warnings(experiment.task, self.labels, parts, keys)
        self.data_sha256 = examples_lib.sha256([*self._train, *self._held_out], self.labels)
        self._kind = kind_of(experiment.task, self.labels, self._base.tokenizer)
        self._rows, self._eval_rows = map(self._kind.rows, (self._train, self._held_out))
        weights: tuple[float, ...] = ()
        if experiment.class_weights == "balanced":
            weights = rows.balanced_weights(self._rows, len(self.labels))
        self.objective = self._base.objective(experiment, self._kind, weights)
        self._count, self._per_example = len(self._train), self._rows.rows_per_example
        self._batches = rows.TaskBatches(
            self._rows, self._base.tokenizer.pad_id, experiment.batch_size, experiment.seed
        )

    def _read_similar(self) -> None:
        base = self._base
        task = similar.inherit_prompts(self.experiment.task, base.vectors)
        experiment = dataclasses.replace(self.experiment, task=task)
        train = similar.read(experiment, base.model, base.tokenizer, self._tallies["train"])
        task = similar.validation_task(experiment.task)
        tally = self._tallies["validation"]
        self._held_out = examples_lib.read(task, task.validation, "labelled", tally)
        self._warnings = scores.data_warnings(task, (), {"validation": self._held_out}, train.keys)
        self.data_sha256 = examples_lib.sha256(self._held_out, (train.sha256,))
        self._kind = kind_of(task, (), base.tokenizer)
        self._train, self._rows = [], train.rows
        self._eval_rows = self._kind.rows(self._held_out)
        self._count, self._per_example = train.examples, train.rows_per_example
        self._batches = train.batches
        train_kind = kind_of(experiment.task, (), base.tokenizer)
        train_kind.outputs, train_kind.rows_per_example = train.width, train.rows_per_example
        self.objective = base.objective(experiment, train_kind)

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
            self.resume(metadata)  # before a state of other shapes is read
            # Older runs have fewer steps: their epochs counted examples, not rows.
            self._set_steps(metadata["notes"].get("total_steps", self.total_steps))
        return changed

    def open(self, mesh: jax.sharding.Mesh, peers: Peers) -> None:
        peers.require_same(
            "examples",
            {"examples": self.data_sha256[:16], "base": self._base.sha256[:16]},
            "give all processes the same files",
        )
        experiment, pad_id = self.experiment, self._base.tokenizer.pad_id
        shards = mesh_lib.batch_shards(mesh)
        size = -(-experiment.run.eval_batch_size // shards) * shards
        size *= self._eval_rows.rows_per_example
        self.eval_batches = rows.eval_batches(self._eval_rows, pad_id, size)
        self._parts = self._kind.parts(self._held_out, self._tallies["validation"].examples)
        self.frozen = self._base.fixed(self.objective, mesh)
        self._forward = compile_forward(self.objective, experiment.parallelism, mesh)
        guess = scores.guess(experiment.task, self.labels, self._held_out)
        self._baseline = ""
        if guess is not None:
            self._baseline = f"; {guess[0]}: {experiment.task.main_score} {guess[1]:.4f}"
        shares = {
            name: UnknownShare(self._base.tokenizer).add(task_rows.ids)
            for name, task_rows in (("train", self._rows), ("validation", self._eval_rows))
            if task_rows is not None
        }
        for line in self._describe(shares):
            self.report(line)
        record = {
            "total_steps": self.total_steps,
            "examples": {"train": self._count, "validation": len(self._held_out)},
            "unknown": {name: share.value for name, share in shares.items()},
            "cut": {
                "train": _full_share(self._rows),
                "validation": _full_share(self._eval_rows),
            },
            "guess": guess,
            "warnings": self._warnings,
        }
        size = experiment.batch_size * self._per_example
        make_batch = self._batches.batch
        if experiment.task.kind == "similar":
            group = size // (shards * experiment.parallelism.accumulation_of(0))
            make_batch = functools.partial(_pack_batch, self._batches, group)
        phase = PhaseBatches(0, 0, self.total_steps, size, self.objective, make_batch)
        self.training = Training(
            objective=self.objective,
            optimizer=self.optimizer,
            total_steps=self.total_steps,
            metric_names=self.objective.metrics,
            batches=lambda done: phase,
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

        mistakes = [once("mistakes", self.total_steps, self._mistakes)] * bool(self._train)
        return (
            once("task", 0, lambda: record),
            Evaluator(
                "scores",
                repeat_every(self.experiment.run.eval_every, self.total_steps),
                self._evaluate,
                lambda line: summary(line) + self._baseline,
            ),
            *mistakes,
        )

    def _describe(self, shares: dict[str, UnknownShare]) -> Iterator[str]:
        """Yields lines about the task, the examples and the base, and warnings."""
        experiment, task, labels = self.experiment, self.experiment.task, self.labels[:_MAX_LABELS]
        hidden = len(self.labels) - len(labels)
        more = f" and {hidden} more" if hidden else ""
        in_rows = f" in {self._drawn:,} rows" if self._drawn != self._count else ""
        yield (
            f"finetune: {pluralize(self._count, 'example')}{in_rows}, "
            f"{len(self._held_out):,} held out, "
            f"{pluralize(self.total_steps, 'step')}; "
            f"{experiment.init_from} {self._base.sha256[:12]}"
        )
        if labels and self._kind.reads == "pooled":
            labelled = cast(list[examples_lib.Sentence], self._train)
            counts = collections.Counter(str(example.label) for example in labelled)
            shown = ", ".join(f"{name} {counts[name]:,}" for name in labels)
            has_f1 = len(labels) == 2 and "f1" in SCORES[task.kind]
            positive = f"; f1 is of {labels[1]!r}" if has_f1 else ""
            yield f"finetune: labels {shown}{more}{positive}{self._baseline}"
        if weights := self.objective.class_weights:
            by_label = zip(labels, weights, strict=False)
            shown = ", ".join(f"{name} {weight:.3g}" for name, weight in by_label)
            yield f"finetune: class weights {shown}{more}"
        head = self._base.head
        if self._base.head_for(experiment, self.labels) is not None:
            yield "finetune: begins with the head that the base was fine-tuned with"
        elif head is not None and task.kind in head.kinds and not experiment.adapt.features:
            is_same = experiment.adapt.pooling in ("", head.pooling)
            why = f"labels {quote_names(head.labels)}" if is_same else f"pooling {head.pooling}"
            yield f"finetune: begins with a fresh head: the base's has {why}"
        yield from (f"finetune: warning: {warning}" for warning in self._warnings)
        if task.broken_rows == "skip":
            parts = ", ".join(f"{tally} of {name}" for name, tally in self._tallies.items())
            yield f"finetune: broken rows left out: {parts}"
        if isinstance(self._rows, TargetRows) and isinstance(self._eval_rows, TargetRows):
            names = ("texts", "max_sequence_length"), ("targets", "max_target_length")
            sides = zip(names, self._rows.cut, self._eval_rows.cut, strict=True)
            cut = ", ".join(
                f"{a} {side} of train and {b} of validation at task.{name}={getattr(task, name)}"
                for (side, name), a, b in sides
            )
            yield f"finetune: cut {cut}"
            if self._base.tokenizer.case == "uncased":
                yield "finetune: an uncased base writes lower case, but scores compare case"
        if self._rows is not None and self._rows.cut_questions + self._eval_rows.cut_questions:
            yield (
                f"finetune: questions cut at task.max_query_length={task.max_query_length}: "
                f"{self._rows.cut_questions:,} of train, {self._eval_rows.cut_questions:,} of "
                "validation"
            )
        values = ", ".join(f"{share.value:.1%} of {name}" for name, share in shares.items())
        yield f"finetune: unknown tokens: {values}"
        yield from filter(None, (share.warning(name) for name, share in shares.items()))

    def initial_state(self, fresh: step.State) -> tuple[step.State, str]:
        params = dict(fresh["params"])
        if self.experiment.adapt.how == "full":
            for name, tree in self._base.params_for(self.objective).items():
                if name not in self._base.fresh:
                    params[name] = _overlay(params[name], tree)
        if (head := self._base.head_for(self.experiment, self.labels)) is not None:
            params["head"] = _overlay(params["head"], head)
        return fresh | {"params": params}, self._base.sha256

    def resume(self, metadata: dict[str, Any]) -> None:
        if metadata["corpus_sha256"] != self.data_sha256:
            raise InputError(
                f"{self.workdir.address}: the examples are not those that this run was trained on; "
                "restore them, or start again with another --workdir"
            )

    def notes(self, evaluation: dict[str, Any]) -> dict[str, Any]:
        # The threshold was found at the checkpoint's step, also in a resumed run.
        vectors = {}
        if isinstance(self.objective, similar.SimilarObjective):
            task = similar.inherit_prompts(self.experiment.task, self._base.vectors)
            vectors = self.objective.notes(task)
        return vectors | {
            "labels": list(self.labels),
            "no_answer_threshold": evaluation.get("no_answer_threshold"),
            "total_steps": self.total_steps,
            "class_weights": list(self.objective.class_weights),
        }

    def scores(self, outputs: list[np.ndarray]) -> dict[str, float]:
        """Returns all scores for the head's outputs on the validation rows."""
        return self._kind.scores(outputs, self._eval_rows, self._held_out)

    def _evaluate(self, params: Any, done: int) -> dict[str, Any]:
        """Returns the loss on the validation examples, all scores, and the main one as `score`."""
        outputs, loss = self._forward(params, self.frozen, self.eval_batches, self._eval_rows)
        by_name = self.scores(outputs)
        self._newest = outputs, by_name.get("no_answer_threshold")
        by_name |= self._newest_kind().part_scores(outputs, self._parts)
        score = by_name[self.experiment.task.main_score]
        if math.isnan(loss) and not self._train:  # task.kind=similar has no loss in evaluation
            loss = 1 - score
        return {"loss": loss, "score": score, "examples": len(self._held_out), **by_name}

    def _newest_kind(self) -> rows.TaskKind:
        """Returns the kind of task; for spans, with the threshold of the newest evaluation."""
        _, threshold = self._newest
        if threshold is None:
            return self._kind
        return kind_of(self.experiment.task, self.labels, self._base.tokenizer, threshold)

    def _mistakes(self) -> dict[str, Any]:
        """Returns the mistakes of the newest evaluation, which was at the same step."""
        outputs, _ = self._newest
        kind = self._newest_kind()
        answers = kind.answers(outputs, self._eval_rows, self._held_out)
        return scores.mistakes(kind, self.labels, answers, self._held_out)


def _overlay(fresh: Any, tree: Any) -> Any:
    """Returns fresh parameters, some of them replaced by a base's."""
    if not isinstance(tree, dict):
        return feed.put(tree, fresh.sharding)
    return fresh | {name: _overlay(fresh[name], part) for name, part in tree.items()}


def _pack_batch(
    batches: rows.TaskBatches | CorpusPairs, group: int, step: int, indices: np.ndarray
) -> Batch:
    """Returns rows of a step in which several texts share a row, see `packing.share_rows`."""
    return packing.share_rows(batches.batch(step, indices), batches.lengths(step), group)


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

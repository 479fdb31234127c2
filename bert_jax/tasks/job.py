"""Fine-tuning as the loop is given it."""

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
from bert_jax.model import flops
from bert_jax.running import session
from bert_jax.running.job import Evaluator, Job, PhaseBatches, repeat_every
from bert_jax.running.progress import Progress
from bert_jax.storage import mirror
from bert_jax.storage.workdir import load_experiment
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks import rows, scores, similar
from bert_jax.tasks.adapted import LoadedBase, forward_of, kind_of
from bert_jax.tasks.examples import Tally
from bert_jax.tasks.formats import listed
from bert_jax.tasks.generate import TargetRows
from bert_jax.tasks.objective import TaskObjective
from bert_jax.tasks.rows import Batch
from bert_jax.text.tokenizer import UnknownShare
from bert_jax.training import feed, step
from bert_jax.training import mesh as mesh_lib

# Labels whose counts are shown.
_LABELS = 10


def finetune(
    experiment: Finetuning,
    base: str | None,
    root: str | None,
    progress: Progress,
    origin: dict[str, Any] | None = None,
) -> session.Outcome:
    """Adapts a base to a task, or goes on with it.

    Without a base it is the one that the experiment or the run here names; the workdir is `root`,
    or runs/NAME. For `origin` see session.run.
    """
    if experiment.task.kind == "minimal_pairs":
        raise InputError(
            "task.kind=minimal_pairs: nothing is learned from them; `bert-jax evaluate --task "
            "FILE` asks a run, and `run.probes` while it is trained"
        )
    place = root or f"runs/{experiment.name}"
    if base is None and not experiment.init_from:
        known = mirror.open_workdir(place)
        if known.experiment.exists():
            base = load_experiment(known, Finetuning).init_from
    if base is not None:
        experiment = dataclasses.replace(experiment, init_from=base)
    workdir = mirror.open_to_write(place)
    return session.run(FinetuningJob(experiment, workdir, progress.report), progress, origin)


class FinetuningJob(Job):
    """A task and the base that is adapted to it."""

    experiment: Finetuning
    # Only this class sets it.
    objective: TaskObjective  # pyrefly: ignore[bad-override-mutable-attribute]

    def read(self) -> None:
        """Reads the base and the examples."""
        experiment = self.experiment
        if experiment.task.kind == "generate":
            scores.require_sacrebleu()
        self._base = LoadedBase.of(experiment)
        self._tallies = {"train": Tally(), "validation": Tally()}
        self.labels: tuple[str, ...] = ()  # names, by number
        if experiment.task.kind == "similar":
            self._read_similar()
        else:
            self._read_labelled()
        # What one pass draws: long tags and spans are several rows, each drawn by itself.
        rows_ = self._rows
        self._drawn = self._count if rows_ is None else len(rows_.ids) // self._per_example
        self._last(math.ceil(experiment.epochs * self._drawn / experiment.batch_size))

    def _last(self, steps: int) -> None:
        """Lays the schedule over so many steps."""
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
        self._batches = rows.TrainBatches(
            self._rows, self._base.tokenizer.pad_id, experiment.batch_size, experiment.seed
        )

    def _read_similar(self) -> None:
        base = self._base
        task = similar.inherit_prompts(self.experiment.task, base.vectors)
        experiment = dataclasses.replace(self.experiment, task=task)
        learned = similar.read(experiment, base.model, base.tokenizer, self._tallies["train"])
        task = similar.validation_task(experiment.task)
        tally = self._tallies["validation"]
        self._held_out = examples_lib.read(task, task.validation, "labelled", tally)
        self._warnings = scores.data_warnings(
            task, (), {"validation": self._held_out}, learned.keys
        )
        self.data_sha256 = examples_lib.sha256(self._held_out, (learned.sha256,))
        self._kind = kind_of(task, (), base.tokenizer)
        self._train, self._rows = [], learned.rows
        self._eval_rows = self._kind.rows(self._held_out)
        self._count, self._per_example = learned.examples, learned.rows_per_example
        self._batches = learned.batches
        learner = kind_of(experiment.task, (), base.tokenizer)
        learner.outputs, learner.rows_per_example = learned.width, learned.rows_per_example
        self.objective = base.objective(experiment, learner)

    def require_runnable(self, mesh: jax.sharding.Mesh) -> None:
        """Raises InputError if the batches or the state cannot be laid over these devices."""
        step.abstract_state(self.objective, self.optimizer, self.experiment.parallelism, mesh)
        size = self.experiment.batch_size
        parts = self.experiment.parallelism.accumulation_of(0)
        mesh_lib.require_divisible(size, "finetuning.batch_size", mesh, parts)

    def differences(self, saved: Finetuning, metadata: dict[str, Any]) -> list[str]:
        """Returns how the experiment differs from a saved one; where the base lies may change."""
        if metadata["init_sha256"] != self._base.sha256:
            raise InputError(
                f"--from {self.experiment.init_from}: holds other weights than those this run "
                "adapts; name the base it began with, or choose another --workdir"
            )
        changed = config.differences(saved, self.experiment, "identity")
        changed = [line for line in changed if not line.startswith("init_from:")]
        labels = tuple(metadata["notes"]["labels"])
        if not changed and labels != self.labels:
            raise InputError(
                f"{self.workdir.named}: this run learned the labels {listed(labels)}, and those "
                f"of the training examples are {listed(self.labels)}; put them back, or start "
                "again with another --workdir"
            )
        if not changed:
            self.require_same(metadata)  # before a state of other shapes is read
            # Of the time before passes were over rows there are runs with fewer.
            self._last(metadata["notes"].get("total_steps", self.total_steps))
        return changed

    def open(self, mesh: jax.sharding.Mesh, peers: Peers) -> None:
        """Opens what was prepared."""
        peers.require_same(
            "examples",
            {"examples": self.data_sha256[:16], "base": self._base.sha256[:16]},
            "give all of them the same files",
        )
        experiment, pad_id = self.experiment, self._base.tokenizer.pad_id
        shards = mesh_lib.batch_shards(mesh)
        size = -(-experiment.run.eval_batch_size // shards) * shards
        size *= self._eval_rows.rows_per_example
        self.eval_batches = rows.eval_batches(self._eval_rows, pad_id, size)
        self._parts = self._kind.parts(self._held_out, self._tallies["validation"].examples)
        self.metric_names, self.patience = self.objective.metrics, experiment.patience
        self.frozen = self._base.fixed(self.objective, mesh)
        self._forward = forward_of(self.objective, experiment.parallelism, mesh)
        guess = scores.guess(experiment.task, self.labels, self._held_out)
        self._guessing = ""
        if guess is not None:
            self._guessing = f"; {guess[0]}: {experiment.task.main_score} {guess[1]:.4f}"
        shares = {
            name: UnknownShare(self._base.tokenizer).add(made.ids)
            for name, made in (("train", self._rows), ("validation", self._eval_rows))
            if made is not None
        }
        for line in self._about(shares):
            self.report(line)
        about = {
            "total_steps": self.total_steps,
            "examples": {"train": self._count, "validation": len(self._held_out)},
            "unknown": {name: share.value for name, share in shares.items()},
            "cut": {"train": _cut(self._rows), "validation": _cut(self._eval_rows)},
            "guess": guess,
            "warnings": self._warnings,
        }
        size = experiment.batch_size * self._per_example
        make = self._batches.batch
        if experiment.task.kind == "similar":
            together = size // (shards * experiment.parallelism.accumulation_of(0))
            make = functools.partial(_sharing, self._batches, together)
        self._phase = PhaseBatches(0, 0, self.total_steps, size, make)
        self.evaluators = self._evaluators(about)

    def batches(self, done: int) -> PhaseBatches:
        """Returns the only phase."""
        return self._phase

    def _evaluators(self, about: dict[str, Any]) -> tuple[Evaluator, ...]:
        """Returns what asks for lines about the task, its scores, and at the end its mistakes."""

        def once(kind: str, when: int, ask: Callable[[], dict[str, Any]]) -> Evaluator:
            return Evaluator(
                kind, lambda done: done == when, lambda *of: ask(), lambda line: "", "predictions"
            )

        wrong = [once("mistakes", self.total_steps, self._mistakes)] * bool(self._train)
        return (
            once("task", 0, lambda: about),
            Evaluator(
                "scores",
                repeat_every(self.experiment.run.eval_every, self.total_steps),
                self._evaluate,
                lambda line: summary(line) + self._guessing,
            ),
            *wrong,
        )

    def _about(self, shares: dict[str, UnknownShare]) -> Iterator[str]:
        """Yields lines about what is learned, and what of it may go wrong."""
        experiment, task, labels = self.experiment, self.experiment.task, self.labels[:_LABELS]
        more = f" and {len(self.labels) - _LABELS} more" if len(self.labels) > _LABELS else ""
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
            two = len(labels) == 2 and "f1" in SCORES[task.kind]
            positive = f"; f1 is of {labels[1]!r}" if two else ""
            yield f"finetune: labels {shown}{more}{positive}{self._guessing}"
        if weights := self.objective.class_weights:
            by_label = zip(labels, weights, strict=False)
            shown = ", ".join(f"{name} {weight:.3g}" for name, weight in by_label)
            yield f"finetune: class weights {shown}{more}"
        head = self._base.head
        if self._base.head_for(experiment, self.labels) is not None:
            yield "finetune: begins with the head that the base was fine-tuned with"
        elif head is not None and task.kind in head.kinds and not experiment.adapt.features:
            same = experiment.adapt.pooling in ("", head.pooling)
            its = f"knows {listed(head.labels)}" if same else f"is of pooling {head.pooling}"
            yield f"finetune: begins with a fresh head: the base's {its}"
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
                yield "finetune: an uncased base writes lower case, and scores count case"
        if self._rows is not None and self._rows.cut_questions + self._eval_rows.cut_questions:
            yield (
                f"finetune: questions cut at task.max_query_length={task.max_query_length}: "
                f"{self._rows.cut_questions:,} of train, {self._eval_rows.cut_questions:,} of "
                "validation"
            )
        values = ", ".join(f"{share.value:.1%} of {name}" for name, share in shares.items())
        yield f"finetune: unknown pieces: {values}"
        yield from filter(None, (share.warning(name) for name, share in shares.items()))

    def count_flops(self, batch: dict[str, jax.Array]) -> int:
        """Returns those of a step with such a batch."""
        # Of `full`, to which others come close, since gradients flow to the bottom.
        model, (rows_, width) = self.objective.model, batch["input_ids"].shape
        operations = flops.train_step_flops(model, rows_, width, 0)
        if "decoder_ids" in batch:  # without its attention to the source
            count, length = batch["decoder_ids"].shape
            operations += flops.train_step_flops(model, count, length, length)
        return operations

    def initial_state(self, fresh: step.State) -> tuple[step.State, str]:
        """Returns a fresh state with the weights of the base, where they learn, and their hash."""
        params = dict(fresh["params"])
        if self.experiment.adapt.how == "full":
            for name, tree in self._base.read_by(self.objective).items():
                if name not in self._base.fresh:
                    params[name] = _laid_over(params[name], tree)
        if (head := self._base.head_for(self.experiment, self.labels)) is not None:
            params["head"] = _laid_over(params["head"], head)
        return fresh | {"params": params}, self._base.sha256

    def require_same(self, metadata: dict[str, Any]) -> None:
        """Raises InputError unless a checkpoint with this metadata learned from these examples."""
        if metadata["corpus_sha256"] != self.data_sha256:
            raise InputError(
                f"{self.workdir.named}: the examples are not those that this run learned from; "
                "put them back, or start again with another --workdir"
            )

    def notes(self, evaluation: dict[str, Any]) -> dict[str, Any]:
        """Returns the metadata that tasks.predict and checkpoints.checkpoint read.

        The threshold is that of this very step: a resumed run keeps the same.
        """
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
        """Returns all scores of what a head gives for each validation row."""
        return self._kind.scores(outputs, self._eval_rows, self._held_out)

    def _evaluate(self, params: Any, done: int) -> dict[str, Any]:
        """Returns the loss on the validation examples, all scores, and as `score` the main one."""
        outputs, loss = self._forward(params, self.frozen, self.eval_batches, self._eval_rows)
        by_name = self.scores(outputs)
        self._newest = outputs, by_name.get("no_answer_threshold")
        by_name |= self._newest_kind().part_scores(outputs, self._parts)
        score = by_name[self.experiment.task.main_score]
        if math.isnan(loss) and not self._train:  # of vectors no loss is asked but this
            loss = 1 - score
        return {"loss": loss, "score": score, "examples": len(self._held_out), **by_name}

    def _newest_kind(self) -> rows.TaskKind:
        """Returns the kind of task, of spans with the threshold of the newest evaluation."""
        _, threshold = self._newest
        if threshold is None:
            return self._kind
        return kind_of(self.experiment.task, self.labels, self._base.tokenizer, threshold)

    def _mistakes(self) -> dict[str, Any]:
        """Returns what is wrong in the newest evaluation, which is of the same step."""
        outputs, _ = self._newest
        kind = self._newest_kind()
        answers = kind.answers(outputs, self._eval_rows, self._held_out)
        return scores.mistakes(kind, self.labels, answers, self._held_out)


def _laid_over(fresh: Any, tree: Any) -> Any:
    """Returns fresh parameters with those of a base, which may be fewer, in their places."""
    if not isinstance(tree, dict):
        return feed.put(tree, fresh.sharding)
    return fresh | {name: _laid_over(fresh[name], part) for name, part in tree.items()}


def _sharing(
    batches: rows.TrainBatches | CorpusPairs, together: int, step: int, indices: np.ndarray
) -> Batch:
    """Returns rows of a step that their texts share, see `packing.share_rows`."""
    return packing.share_rows(batches.batch(step, indices), batches.lengths(step), together)


def _cut(made: rows.Rows | None) -> float:
    """Returns the share of rows that hold as much as they may, as texts do that are cut.

    Tags and spans go on in another row, and are not cut.
    """
    return 0.0 if made is None or made.notes else float((made.lengths >= made.limit).mean())


def summary(line: dict[str, Any]) -> str:
    """Returns a line of scores in words."""
    names = [n for n in line if n not in ("step", "kind", "loss", "score", "examples")]
    shown = ", ".join(f"{name} {line[name]:.4f}" for name in names)
    return f"held-out loss {line['loss']:.4f}; {shown} ({line['examples']} examples)"

"""A base made ready for a task: its weights, its kind of task, its head over rows."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from bert_jax.checkpoints import base as base_lib
from bert_jax.config import Finetuning, Model, Parallelism, Task
from bert_jax.errors import InputError
from bert_jax.model import flops
from bert_jax.pretraining.loaded import Loaded
from bert_jax.tasks import tagger
from bert_jax.tasks.generate import SOURCE, Generate, GenerateObjective
from bert_jax.tasks.labels import Choices, NumberTask, Sentences, Tags
from bert_jax.tasks.objective import TaskObjective, below_head
from bert_jax.tasks.rows import Batch, Rows, TaskKind, eval_batches
from bert_jax.tasks.similar import Similar, SimilarObjective, require_comparable
from bert_jax.tasks.spans import SpanTask
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import feed, step
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.objective import Pretraining

# By `task.kind`, of which `examples.EXAMPLE_FORMATS` and `config.SCORES` have the rest.
KINDS: dict[str, Callable[..., TaskKind]] = {
    "classify": Sentences,
    "pair": Sentences,
    "regress": NumberTask,
    "choice": Choices,
    "tag": Tags,
    "span": SpanTask,
    "generate": Generate,
    "similar": Similar,
}


def kind_of(
    task: Task, labels: tuple[str, ...], tokenizer: Tokenizer, *threshold: float
) -> TaskKind:
    """Returns the kind of a task; of spans also by a threshold, see `SpanTask`."""
    return KINDS[task.kind](task, labels, tokenizer, *threshold)


@dataclasses.dataclass
class LoadedBase(base_lib.Base):
    """The weights of a base that a task's head can read.

    The model has the dropout and the type of `adapt`; parameters, on the host, are `encoder`, and
    what a head reads or what scores pieces. The hash, of them and the tokenizer, is what trained
    parameters belong to.
    """

    @classmethod
    def of(cls, experiment: Finetuning) -> "LoadedBase":
        """Reads the base that an experiment names."""
        if not experiment.init_from:
            raise InputError("--from: name a base or a run whose encoder is to be adapted")
        trained = Loaded.of(epath.Path(experiment.init_from))
        adapt, generates = experiment.adapt, experiment.task.kind == "generate"
        require_adaptable(trained.model, experiment, experiment.init_from)
        read = {"encoder", "masked_lm" if generates else below_head(trained.model, "pooled")}
        params = jax.device_get({name: trained.params[name] for name in sorted(read)})
        if "masked_lm" in params and not generates:
            for name in {"output_bias", "output"} & params["masked_lm"].keys():
                del params["masked_lm"][name]
        for name in adapt.lora_targets:
            if adapt.how == "lora" and name not in params["encoder"]["layers"]:
                raise InputError(
                    f"adapt.lora_targets: the layers of {experiment.init_from}, "
                    f"model.kind={trained.model.kind}, have no {name!r}"
                )
        fresh = tuple(name for name in trained.fresh if name in params)
        digest = hashlib.sha256(trained.tokenizer.sha256.encode())
        for path, leaf in sorted(base_lib.flat(params).items()):
            digest.update(path.encode())
            digest.update(np.ascontiguousarray(leaf).data)
        if trained.head is not None and trained.head.pooling != "cls":
            digest.update(trained.head.pooling.encode())
        frozen = adapt.how == "frozen"  # what does not learn is read as it is
        model = dataclasses.replace(
            trained.model,
            hidden_dropout_prob=0.0 if frozen else adapt.hidden_dropout_prob,
            attention_probs_dropout_prob=0.0 if frozen else adapt.attention_probs_dropout_prob,
            compute_dtype=adapt.compute_dtype,
        )
        known = {"head": trained.head, "vectors": trained.vectors, "fresh": fresh}
        return cls(model, params, trained.tokenizer, sha256=digest.hexdigest(), **known)

    def objective(
        self, experiment: Finetuning, kind: TaskKind, class_weights: Sequence[float] = ()
    ) -> TaskObjective:
        """Returns the loss of the experiment's task over this base."""
        adapt = experiment.adapt
        if self.head is not None and experiment.task.kind in self.head.kinds:
            adapt = dataclasses.replace(adapt, pooling=adapt.pooling or self.head.pooling)
        args = (
            *(self.model, kind.learns, kind.reads, kind.outputs, kind.rows_per_example),
            *(adapt, self.fresh, tuple(class_weights)),
        )
        if kind.reads == "vectors":
            known = self.vectors or base_lib.TextVectors()
            how = experiment.vectors
            require_comparable(how, self.model)
            return SimilarObjective(*args, how=how, pooling=how.pooling or known.pooling)
        if kind.reads != "decoder":
            return TaskObjective(*args)
        ends = {"first": self.tokenizer.cls_id, "last": self.tokenizer.sep_id}
        return GenerateObjective(*args, **ends, length=experiment.task.max_target_length)

    def head_for(self, experiment: Finetuning, labels: Sequence[str]) -> dict[str, Any] | None:
        """Returns the head that the base has for a task, its outputs in the order of the labels."""
        if self.head is None or experiment.task.kind not in self.head.kinds:
            return None
        if experiment.adapt.features or sorted(self.head.labels or labels) != sorted(labels):
            return None
        if experiment.adapt.pooling not in ("", self.head.pooling):
            return None
        order = [self.head.labels.index(label) for label in labels if self.head.labels]
        order = order or list(range(len(self.head.bias)))
        return {"kernel": self.head.kernel[:, order], "bias": self.head.bias[order]}

    def fixed(self, objective: TaskObjective, mesh: jax.sharding.Mesh) -> dict[str, Any] | None:
        """Returns the weights that do not learn, whole on each device; None if all do."""
        if objective.adapt.how == "full":
            return None
        return feed.put(self.read_by(objective), mesh_lib.replicated(mesh))

    def read_by(self, objective: TaskObjective) -> dict[str, Any]:
        """Returns the weights that a task's head reads, on the host.

        A decoder's layers are the encoder's; what else it has is not there.
        """
        if objective.reads == "decoder":
            return self.params | {"decoder": {"layers": self.params["encoder"]["layers"]}}
        part = below_head(objective.model, objective.reads, objective.adapt.features)
        return {name: self.params[name] for name in ("encoder", part) if name}


def require_adaptable(model: Model, experiment: Finetuning, where: str) -> None:
    """Raises InputError, which names `where`, unless a task can be learned over such a model.

    It is refused where the model does not read such long rows, or has no layers that a tagger reads
    or a decoder can be made of.
    """
    task, generates = experiment.task, experiment.task.kind == "generate"
    if generates and (model.kind != "bert" or model.code):
        this = f"model.code={model.code}" if model.code else f"model.kind={model.kind}"
        raise InputError(
            f"{where}: task.kind=generate makes a decoder of the layers of model.kind=bert, and "
            f"this encoder has {this}; name another base"
        )
    for name in ["max_sequence_length"] + ["max_target_length"] * generates:
        if getattr(task, name) > model.max_position_embeddings:
            raise InputError(
                f"task.{name}={getattr(task, name)}: longer than the position table of {where}, "
                f"{model.max_position_embeddings}"
            )
    tagger.require_layers(model, experiment.adapt.features, where)


@dataclasses.dataclass(frozen=True, eq=False)
class MeshEncoder:
    """A pre-trained model that is read, and how it lies on the devices."""

    model: Model
    tokenizer: Tokenizer
    parallelism: Parallelism
    mesh: jax.sharding.Mesh
    size: int  # rows of a batch, over all devices
    vectors: base_lib.TextVectors | None = None  # how it makes them of texts; None: as usual

    def program(self, of_rows: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Returns `of_rows`, see `training.step.make_rows_step`, compiled for the devices."""
        objective = Pretraining(self.model)
        return step.make_rows_step(objective, of_rows, self.parallelism, self.mesh)

    def fitted(self, task: Task) -> Task:
        """Returns a task whose rows are no longer than the model reads."""
        length = min(task.max_sequence_length, self.model.max_position_embeddings)
        return dataclasses.replace(task, max_sequence_length=length)

    def batches(self, rows: Rows) -> list[tuple[np.ndarray, Batch]]:
        """Returns what `tasks.rows.eval_batches` does."""
        unit = rows.rows_per_example * mesh_lib.batch_shards(self.mesh)
        size = -(-self.size // unit) * unit
        return eval_batches(rows, self.tokenizer.pad_id, size)

    def operations(self, batches: list[tuple[np.ndarray, Batch]]) -> int:
        """Counts those of asking once."""
        shapes = (batch["input_ids"].shape for _, batch in batches)
        return sum(flops.forward_flops(self.model, rows, length, 0) for rows, length in shapes)


def require_finite(name: str, outputs: Sequence[np.ndarray]) -> None:
    """Raises InputError, which names a task, if a model gives what are no numbers."""
    if not all(np.isfinite(values).all() for values in outputs):
        raise InputError(
            f"{name}: the model gives numbers that are not finite; begin with other weights"
        )


def run_rows(
    run: Callable[[Any], jax.Array],
    batches: list[tuple[np.ndarray, Batch]],
    rows: Rows,
    mesh: jax.sharding.Mesh,
) -> list[np.ndarray]:
    """Returns what a program gives for each row, in the order of the rows.

    `run` takes one of their batches on the devices and gives float32 [B, O] or [B, S, O]; a row of
    n ids has float32 [O], or [n, O].
    """
    outputs: list[Any] = [None] * len(rows.ids)
    placed = feed.place_all([batch for _, batch in batches], mesh_lib.batch_sharding(mesh))
    for (which, _), batch in zip(batches, placed, strict=True):
        for row, values in zip(which, jax.device_get(run(batch)), strict=False):
            outputs[row] = values if values.ndim == 1 else values[: rows.lengths[row]]
    return outputs


# Gives the outputs of every row as `run_rows` does, and the mean loss, nan of rows without targets;
# of parameters that learn, those that do not, batches of rows (tasks.rows.eval_batches), the rows.
Forward = Callable[[Any, Any, list[tuple[np.ndarray, Batch]], Rows], tuple[list[np.ndarray], float]]


def forward_of(
    objective: TaskObjective, parallelism: Parallelism, mesh: jax.sharding.Mesh, beams: int = 1
) -> Forward:
    """Returns what asks a model of this objective, compiled for the devices of a mesh.

    Of a decoder outputs are the ids that are written, by a search with so many `beams`, and the
    loss is that of a target's piece.
    """
    if isinstance(objective, GenerateObjective):
        texts = functools.partial(objective.texts, beams)
        write = step.make_rows_step(objective, texts, parallelism, mesh)
        add_metrics = step.make_eval_step(objective, parallelism, mesh)
        zeros: Any = {name: np.zeros(2, np.float32) for name in objective.metrics}

        def ask(params: Any, fixed: Any, batch: Any) -> jax.Array:
            return write(params, fixed, {name: batch[name] for name in SOURCE})

        def measure(params: Any, outputs: jax.Array, batch: Any) -> Any:
            return add_metrics(params, zeros, batch)
    else:
        ask = step.make_rows_step(objective, objective.logits, parallelism, mesh)
        of_logits = jax.jit(objective.measure, out_shardings=mesh_lib.replicated(mesh))

        def measure(params: Any, outputs: jax.Array, batch: Any) -> Any:
            return of_logits(outputs, batch)

    def forward(params, fixed, batches, rows):
        sums = np.zeros(2)

        def run(batch: Any) -> jax.Array:
            nonlocal sums
            outputs = ask(params, fixed, batch)
            if "targets" in batch or "starts" in batch:
                sums = sums + jax.device_get(measure(params, outputs, batch)["loss"])
            return outputs

        outputs = run_rows(run, batches, rows, mesh)
        return outputs, float(sums[0] / sums[1]) if sums[1] else float("nan")

    return forward

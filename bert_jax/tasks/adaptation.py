"""Reads a base for a task, and runs models over rows."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from bert_jax import config
from bert_jax.checkpoints import base as base_lib
from bert_jax.checkpoints.base import Base
from bert_jax.config import Adapt, Finetuning, Model, Parallelism, Task
from bert_jax.errors import InputError
from bert_jax.model import flops
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.storage import mirror
from bert_jax.tasks.examples import ENTITY_TAG
from bert_jax.tasks.rows import INPUT_NAMES, Batch, TaskRows, eval_batches
from bert_jax.tasks.task_objective import TaskObjective, part_below_head, require_tagger_layers
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import feed, step
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.objective import Pretraining

Batches = list[tuple[np.ndarray, Batch]]  # from `eval_batches`
# The columns that the task of an imported head reads by default, for kinds that need others than
# `Task`'s own.
_HEAD_COLUMNS: dict[str, Any] = {
    "pair": {"text_column": "sentence1", "second_column": "sentence2"},
    "rank": {"text_column": "query", "second_column": "docs", "label_column": "labels"},
    "choice": {"choice_columns": ("ending0", "ending1")},
    "tag": {"text_column": "words", "label_column": "tags"},
}
# The longest row of such a task by default: `serve` compiles a program for each length. For spans
# it is SQuAD's.
_HEAD_LENGTH, _SPAN_LENGTH = 512, 384


def read_base(experiment: Finetuning) -> Base:
    """Reads the base of a run as `select_weights` returns it."""
    if not experiment.init_from:
        raise InputError("--from: name a base or a run whose encoder is to be adapted")
    trained = LoadedModel.of(mirror.open_workdir(experiment.init_from))  # local or in a bucket
    return select_weights(trained, experiment)


def select_weights(trained: Base, experiment: Finetuning) -> Base:
    """Returns a base with only those weights that a task can use, on the host.

    They are `encoder`; the pooler or transform that feeds the head, or for a decoder and sparse
    vectors all of `masked_lm`; and the layers after the pooling (`VECTOR_PARTS`). The model has the
    dropout rates and the compute type of `adapt`. The hash covers the weights, the tokenizer and
    the pooling of a head; a run saves it to identify its base.
    """
    adapt, reads = experiment.adapt, experiment.task.spec.implementing_class.reads
    reads_masked_lm = reads in ("decoder", "masked_lm")
    require_usable(trained.model, experiment, experiment.init_from)
    # This part is read even for tags and spans, which may not use it: the hash covers it.
    part = "masked_lm" if reads_masked_lm else part_below_head(trained.model, "pooled")
    names = {"encoder", part}
    names |= base_lib.VECTOR_PARTS & trained.params.keys()
    params = jax.device_get({name: trained.params[name] for name in sorted(names)})
    if "masked_lm" in params and not reads_masked_lm:
        for name in {"output_bias", "output"} & params["masked_lm"].keys():
            del params["masked_lm"][name]
    for name in adapt.lora_targets:
        if adapt.how == "lora" and name not in params["encoder"]["layers"]:
            raise InputError(
                f"adapt.lora_targets: the layers of {experiment.init_from}, "
                f"model.kind={trained.model.kind}, have no {name!r}"
            )
    digest = hashlib.sha256(trained.tokenizer.sha256.encode())
    for path, leaf in sorted(base_lib.flatten(params).items()):
        digest.update(path.encode())
        digest.update(np.ascontiguousarray(leaf).data)
    if trained.head is not None and trained.head.pooling != "cls":
        digest.update(trained.head.pooling.encode())
    frozen = adapt.how == "frozen"  # then there is no dropout
    model = dataclasses.replace(
        trained.model,
        hidden_dropout_prob=0.0 if frozen else adapt.hidden_dropout_prob,
        attention_probs_dropout_prob=0.0 if frozen else adapt.attention_probs_dropout_prob,
        compute_dtype=adapt.compute_dtype,
    )
    return Base(
        model,
        params,
        trained.tokenizer,
        fresh=tuple(name for name in trained.fresh if name in params),
        sha256=digest.hexdigest(),
        vectors=trained.vectors,
        head=trained.head,
    )


def base_head(base: Base, experiment: Finetuning, labels: Sequence[str]) -> dict[str, Any] | None:
    """Returns the base's head for a task, with outputs in the order of the labels, or None."""
    head = base.head
    if head is None or experiment.task.kind not in head.kinds:
        return None
    if experiment.adapt.features or sorted(head.labels or labels) != sorted(labels):
        return None
    if experiment.adapt.pooling not in ("", head.pooling):
        return None
    order = [head.labels.index(label) for label in labels] if head.labels else slice(None)
    return {"kernel": head.kernel[:, order], "bias": head.bias[order]}


def head_experiment(base: Base, name: str) -> Finetuning:
    """Returns a fine-tuning that would have given a base its head, so that the head can be used.

    Nothing is trained. The task has the first of the head's kinds, and no sources. `name` is that
    of the base. Raises InputError if the base has no head.
    """
    head, model = base.head, base.model
    if head is None:
        raise InputError(
            f"{name}: has no head of a task; fine-tune it, or import a model that has one"
        )
    kind = head.kinds[0]
    length = (base.vectors.max_length if base.vectors else 0) or model.max_position_embeddings
    length = min(length, _SPAN_LENGTH if kind == "span" else _HEAD_LENGTH)
    fields = _HEAD_COLUMNS.get(kind, {}) | {"max_sequence_length": length, "labels": head.labels}
    if kind == "span":  # for rows of 384 tokens the numbers of SQuAD
        fields |= {"max_query_length": length // 6, "document_stride": length // 3}
    if kind == "tag" and not all(map(ENTITY_TAG.fullmatch, head.labels)):
        fields["score"] = "accuracy"
    source = ("tfds:-:-",)  # a new Task must name one; removed below
    experiment = Finetuning(
        name=config.name_of(name) or "base",
        init_from=name,
        task=Task(kind=kind, train=source, validation=source, **fields),
        adapt=Adapt(
            hidden_dropout_prob=model.hidden_dropout_prob,
            attention_probs_dropout_prob=model.attention_probs_dropout_prob,
            head_dropout_prob=model.hidden_dropout_prob,
            compute_dtype=model.compute_dtype,
        ),
    )
    experiment = config.override(experiment, head.settings)
    require_usable(model, experiment, name)
    task = experiment.task.with_fields(train=(), validation=())
    return dataclasses.replace(experiment, task=task)


def base_params(base: Base, objective: TaskObjective) -> dict[str, Any]:
    """Returns the base's weights for an objective, on the host.

    A decoder starts with the encoder's layers; the base has no cross-attention for it.
    """
    if objective.reads == "decoder":
        return base.params | {"decoder": {"layers": base.params["encoder"]["layers"]}}
    return {name: base.params[name] for name in objective.base_parts if name in base.params}


def frozen_params(
    base: Base, objective: TaskObjective, mesh: jax.sharding.Mesh
) -> dict[str, Any] | None:
    """Returns the frozen weights, replicated over the mesh; None if all are trained."""
    if objective.adapt.how == "full":
        return None
    return feed.put(base_params(base, objective), mesh_lib.replicated(mesh))


def require_usable(model: Model, experiment: Finetuning, where: str) -> None:
    """Raises InputError, which names `where`, unless a model can be fine-tuned on the task.

    The model must read rows as long as the task's, and have the layers for a tagger or a decoder.
    """
    task = experiment.task
    has_decoder = task.spec.implementing_class.reads == "decoder"
    if has_decoder and (model.kind != "bert" or model.code or model.relative_position_buckets):
        kind = f"model.code={model.code}" if model.code else f"model.kind={model.kind}"
        if buckets := model.relative_position_buckets:
            kind = f"model.relative_position_buckets={buckets}"
        raise InputError(
            f"{where}: {kind}: task.kind=generate needs the layers of the original BERT for its "
            "decoder; name another base"
        )
    for name in ["max_sequence_length"] + ["max_target_length"] * has_decoder:
        if getattr(task, name) > model.max_position_embeddings:
            raise InputError(
                f"task.{name}={getattr(task, name)}: longer than the position table of {where}, "
                f"{model.max_position_embeddings}"
            )
    require_tagger_layers(model, experiment.adapt.features, where)


@dataclasses.dataclass(frozen=True, eq=False)
class ModelRunner:
    """A model without parameters, on a mesh: compiles functions, and makes batches for them."""

    model: Model
    tokenizer: Tokenizer
    parallelism: Parallelism
    mesh: jax.sharding.Mesh
    size: int  # rows of a batch, over all devices
    vector_settings: base_lib.TextVectors | None = None  # how texts become vectors; None: defaults

    def compile_rows(self, run: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Compiles `run`, with the arguments of `Objective.forward`; see `step.make_rows_step`.

        The parameters may include `VECTOR_PARTS`, which `run` gets as frozen parameters.
        """
        compiled = step.make_rows_step(Pretraining(self.model), run, self.parallelism, self.mesh)

        def compute(params: Any, fixed: Any, batch: Any) -> jax.Array:
            frozen = {name: params[name] for name in base_lib.VECTOR_PARTS & params.keys()}
            own = {name: params[name] for name in params if name not in frozen}
            return compiled(own, frozen or fixed, batch)

        return compute

    def clamp_length(self, task: Task) -> Task:
        """Returns the task with rows that are at most as long as the model's positions."""
        length = min(task.max_sequence_length, self.model.max_position_embeddings)
        return dataclasses.replace(task, max_sequence_length=length)

    def batches(self, rows: TaskRows) -> Batches:
        """Returns batches of rows for the mesh; see `tasks.rows.eval_batches`."""
        unit = rows.rows_per_example * mesh_lib.batch_shards(self.mesh)
        size = -(-self.size // unit) * unit
        return eval_batches(rows, self.tokenizer.pad_id, size)

    def count_flops(self, batches: Batches) -> int:
        """Counts the floating-point operations of a forward pass over the batches."""
        shapes = (batch["input_ids"].shape for _, batch in batches)
        return sum(flops.forward_flops(self.model, *shape, predictions=0) for shape in shapes)


def require_finite(name: str, outputs: Sequence[np.ndarray]) -> None:
    """Raises InputError, which names a task, if an output of a model is not finite."""
    if not all(np.isfinite(values).all() for values in outputs):
        raise InputError(f"{name}: the model's outputs are not finite; start with other weights")


def run_rows(
    run: Callable[[Any], jax.Array],
    batches: Batches,
    rows: TaskRows,
    mesh: jax.sharding.Mesh,
    compress_output: Callable[[np.ndarray], Any] = lambda values: values,
) -> list[Any]:
    """Returns the outputs of a program for each row, in the order of the rows.

    `run` maps a batch on the devices to float32 [B, O] or [B, S, O]. `compress_output` maps the
    outputs of a row of n tokens, float32 [O] or [n, O], to what is returned for the row.
    """
    outputs: list[Any] = [None] * len(rows.ids)
    placed = feed.place_all([batch for _, batch in batches], mesh_lib.batch_sharding(mesh))
    for (row_indices, _), batch in zip(batches, placed, strict=True):
        for row, values in zip(row_indices, jax.device_get(run(batch)), strict=False):
            values = values if values.ndim == 1 else values[: rows.lengths[row]]
            outputs[row] = compress_output(values)
    return outputs


# Maps (trainable parameters, frozen parameters, batches from `eval_batches`, rows) to the outputs
# of every row, as `run_rows`, and the mean loss, which is nan for rows without targets.
Forward = Callable[[Any, Any, Batches, TaskRows], tuple[list[np.ndarray], float]]


def compile_forward(
    objective: TaskObjective, parallelism: Parallelism, mesh: jax.sharding.Mesh
) -> Forward:
    """Returns the forward function of an objective, compiled for the devices of a mesh.

    The outputs are those of `objective.predict`. The loss of a decoder is per token of the targets.
    """
    predict = step.make_rows_step(objective, objective.predict, parallelism, mesh)
    if objective.reads == "decoder":  # outputs are generated ids: the loss takes another pass
        add_metrics = step.make_eval_step(objective, parallelism, mesh)
        zeros: Any = {name: np.zeros(2, np.float32) for name in objective.metrics}

        def measure(params: Any, outputs: jax.Array, batch: Any) -> Any:
            return add_metrics(params, zeros, batch)
    else:
        measure_logits = jax.jit(objective.measure, out_shardings=mesh_lib.replicated(mesh))

        def measure(params: Any, outputs: jax.Array, batch: Any) -> Any:
            return measure_logits(outputs, batch)

    def forward(params, fixed, batches, rows):
        sums = np.zeros(2)

        def run(batch: Any) -> jax.Array:
            nonlocal sums
            outputs = predict(params, fixed, {name: batch[name] for name in INPUT_NAMES})
            if "targets" in batch or "starts" in batch:
                sums = sums + jax.device_get(measure(params, outputs, batch)["loss"])
            return outputs

        outputs = run_rows(run, batches, rows, mesh, objective.compress_output)
        return outputs, float(sums[0] / sums[1]) if sums[1] else float("nan")

    return forward

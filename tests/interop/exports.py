"""A small model of random weights for each family, exported in each form.

`python tests/interop/exports.py FOLDER` writes FOLDER/FAMILY/FORM.
"""

import dataclasses
import itertools
import pathlib
import sys
from types import SimpleNamespace

import jax
import numpy as np
from etils import epath

from bert_jax.checkpoints.base import TextVectors
from bert_jax.config import Finetuning, Model, Task
from bert_jax.interop import exporting, huggingface
from bert_jax.model import heads
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.tasks.finetuned_model import FinetunedModel
from bert_jax.text.tokenizer import WordPiece

WORDS = "we the people of united states in order to form a more perfect union"
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",", *WORDS.split(" ")]
_BERT = Model(
    vocab_size=len(PIECES),
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=48,
    max_position_embeddings=64,
    initializer_range=0.2,
)
FAMILIES = {
    "bert": _BERT,
    "roberta": dataclasses.replace(_BERT, type_vocab_size=1, position_offset=1),
    "distilbert": dataclasses.replace(_BERT, type_vocab_size=0),
    "modernbert": dataclasses.replace(_BERT, kind="modern", local_window=8, global_every=2),
}
VECTORS = {
    "dense": TextVectors("mean", True, 32, query_prefix="we ", text_prefix="the "),
    "sparse": TextVectors(form="sparse", max_length=32),
    "multi_vector": TextVectors(form="multi_vector", max_length=32, query_length=8),
}
# Task kinds of the forms that have a task's head, their labels, and fields of the task.
TASKS = {
    "classify": (("no", "yes"), {}),
    "rank": ((), {"second_column": "docs"}),
    "tag": (("B-X", "I-X", "O"), {}),
    "span": ((), {"train": ("squad:a",), "validation": ("squad:b",), "document_stride": 32}),
}
FORMS = ("masked_lm", "encoder", *VECTORS, *TASKS)


def load(family: str, vectors: TextVectors | None = None) -> LoadedModel:
    """Returns a pre-trained model of a family."""
    model = FAMILIES[family]
    params = jax.device_get(heads.init_params(model, jax.random.key(0)))
    if vectors and vectors.form == "multi_vector":
        kernel = np.random.default_rng(0).normal(0, 0.2, (model.hidden_size, 16))
        params["projection"] = {"kernel": kernel.astype(np.float32)}
    tokenizer = WordPiece(PIECES, "uncased")
    return LoadedModel(model, params, tokenizer, vectors=vectors, name=family)


def load_finetuned(family: str, kind: str) -> FinetunedModel:
    """Returns a model with the head of a task."""
    loaded, (labels, fields), rng = load(family), TASKS[kind], np.random.default_rng(1)
    part = "masked_lm" if family == "modernbert" else "pooler"
    below_head = {name: x for name, x in loaded.params[part].items() if name != "output_bias"}
    params = {"encoder": loaded.params["encoder"], part: below_head}
    outputs = 2 if kind == "span" else len(labels) or 1
    kernel = rng.normal(0, 0.2, (32, outputs)).astype(np.float32)
    params["head"] = {"kernel": kernel, "bias": kernel[0]}
    task = Task(kind=kind, **{"train": ("jsonl:a",), "validation": ("jsonl:b",)} | fields)
    task_model = SimpleNamespace(
        experiment=Finetuning(name=family, task=task),
        kind=SimpleNamespace(task=task, reads=task.spec.implementing_class.reads),
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        labels=labels,
        pooling="cls",
        params=params,
        frozen=None,
    )
    return FinetunedModel(
        loaded.model, loaded.params, loaded.tokenizer, name=family, task_model=task_model
    )


def write(family: str, form: str, folder: pathlib.Path) -> None:
    """Exports a family's model in a form to a new folder."""
    if form in TASKS:
        exporting.export(load_finetuned(family, form), epath.Path(folder), "task", "float32")
        return
    name = "masked_lm" if form in ("masked_lm", "sparse") else "encoder"
    model = load(family, VECTORS.get(form))
    huggingface.write_folder(model, name, "float32", epath.Path(folder))


if __name__ == "__main__":
    for family, form in itertools.product(FAMILIES, FORMS):
        write(family, form, pathlib.Path(sys.argv[1]) / family / form)

"""Fine-tuned runs against transformers and PEFT, through folders that `export` writes.

The second half of `make parity`. Fine-tunes a small model of random weights to a task of each
kind, exports it whole and, where it learned one, as an adapter; `parity_tasks_peer` then loads the
folders in its own environment, warnings being errors, and says how far logits, ids and pipelines
are off. The exit code is 1 if one is beyond its bound.
"""

import argparse
import dataclasses
import json
import pathlib
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from etils import epath

from benchmarks.measure import ROOT
from bert_jax import base
from bert_jax.config import LORA_TARGETS, Adapt, Finetuning, Model, Optimizer, Run, Task
from bert_jax.interop import finetuned
from bert_jax.model import heads
from bert_jax.running.progress import LineConsole, Progress
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks.job import finetune
from bert_jax.tasks.predict import TaskModel
from bert_jax.text.library import Library
from bert_jax.text.tokenizer import WordPiece

EXAMPLES = 24
# Room for all pieces: pipelines cut nothing.
LENGTHS = {"bert": 48, "roberta": 200, "distilbert": 48, "modern": 48}
WORDS = [f"w{a}{b}" for a in "abcdefgh" for b in "abcdefgh"]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "?", ".", *WORDS]
_BERT = Model(
    vocab_size=len(PIECES),
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=64,
    initializer_range=0.1,
)
_ROBERTA = {"type_vocab_size": 1, "position_offset": 2, "layer_norm_eps": 1e-5}
_ROBERTA |= {"max_position_embeddings": 256}
_VOCABULARIES = ROOT / "tests" / "golden" / "tokenizers"
MODELS = {
    "bert": _BERT,
    "roberta": dataclasses.replace(_BERT, **_ROBERTA),
    "distilbert": dataclasses.replace(_BERT, type_vocab_size=0),
    "modern": dataclasses.replace(_BERT, kind="modern", num_hidden_layers=4, local_window=16),
}
_NO_GATE = tuple(name for name in LORA_TARGETS if name != "gate")
_EVERYWHERE = dict.fromkeys(MODELS, _NO_GATE) | {"modern": LORA_TARGETS}
_BELOW = dict.fromkeys(MODELS, "pooler") | {"modern": "masked_lm"}
# Of a task, the fields it needs, what learns, and whether the base has learned what is below it.
CASES: list[tuple[str, dict[str, Any], dict[str, Any], Literal["learned", "fresh"]]] = [
    ("classify", {}, {"how": "lora"}, "learned"),
    ("classify", {}, {"how": "lora", "lora_targets": "everywhere", "lora_rank": 3}, "fresh"),
    ("pair", {"second_column": "b"}, {"how": "full"}, "learned"),
    ("regress", {"second_column": "b", "label_column": "value"}, {"how": "lora"}, "learned"),
    (
        "choice",
        {"choice_columns": ("b", "c", "d"), "label_column": "right"},
        {"how": "lora", "lora_targets": ("output", "value")},
        "learned",
    ),
    ("tag", {"text_column": "words", "label_column": "tags"}, {"how": "lora"}, "learned"),
    ("span", {"document_stride": 16, "max_query_length": 8}, {"how": "lora"}, "learned"),
    ("classify", {}, {"how": "frozen"}, "learned"),
]


def main() -> int:
    """Makes the folders, and asks the peer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=".venv-torch/bin/python", help="with torch and peft")
    parser.add_argument("--folder", help="where they are made and stay [a temporary one]")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = pathlib.Path(flags.folder or name)
        places = [str(place) for place in make(root)]
        command = [flags.python, "-m", "benchmarks.parity_tasks_peer", *places]
        return subprocess.run(command, check=False).returncode


def make(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a folder for each model and case: `task`, perhaps `adapter`, and what ours says."""
    for model, (number, case) in ((m, c) for m in MODELS for c in enumerate(CASES)):
        kind, fields, adapt, below = case
        if adapt.get("lora_targets") == "everywhere":
            adapt = adapt | {"lora_targets": _EVERYWHERE[model]}
        place = root / f"{model}-{number}-{kind}"
        write_base(model, (_BELOW[model],) * (below == "fresh"), place / "base")
        write_examples(kind, place)
        source = f"{'squad' if kind == 'span' else 'jsonl'}:{place / 'examples'}"
        task = Task(
            kind=kind,
            train=(source,),
            validation=(source,),
            max_sequence_length=LENGTHS[model],
            **fields,
        )
        experiment = Finetuning(
            name=f"{model}_{kind}",
            task=task,
            adapt=Adapt(**adapt),
            epochs=2,
            batch_size=8,
            optimizer=Optimizer(name="adamw", peak_learning_rate=2e-2, warmup_steps=0),
            run=Run(eval_batch_size=8),
        )
        finetune(
            experiment, str(place / "base"), str(place / "run"), Progress(LineConsole(quiet=True))
        )
        tuned = TaskModel(str(place / "run"))
        forms = ["task", "adapter"] if adapt["how"] == "lora" else ["task"]
        architectures = [
            finetuned.export(tuned, form, "float32", epath.Path(place / form)) for form in forms
        ]
        write_answers(tuned, architectures[0], forms, place)
        yield place


def write_base(name: str, fresh: tuple[str, ...], folder: pathlib.Path) -> None:
    """A base none of whose parameters is zero or one."""
    rng, cfg, tokenizer = np.random.default_rng(0), MODELS[name], WordPiece(PIECES, "uncased")
    if name == "roberta":
        specials = {"pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
        specials |= {"cls_token": "<s>", "sep_token": "</s>"}
        tokenizer = Library((_VOCABULARIES / "roberta.json").read_bytes(), specials, name)
        cfg = dataclasses.replace(cfg, vocab_size=tokenizer.size)
    params = jax.device_get(heads.init_params(cfg, jax.random.key(0)))
    params = jax.tree.map(
        lambda x: x + 0.05 * rng.standard_normal(x.shape).astype(np.float32), params
    )
    for part, name in (("encoder", "word"), ("masked_lm", "output_bias")):
        of = params[part]["embeddings"][name]["embedding"] if name == "word" else params[part][name]
        of[cfg.vocab_size :] = 0
    made = base.Base(cfg, params, tokenizer, "benchmarks.parity_tasks", fresh)
    base.write(made, epath.Path(folder))


def write_examples(kind: str, folder: pathlib.Path) -> None:
    """Random words with random labels, in a form that the kind is read from."""
    draw = random.Random(0)

    def text(most: int = 14) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(2, most)))

    if kind == "span":
        paragraphs = []
        for number in range(EXAMPLES):
            context = text(60)
            word = draw.choice(context.split())
            answer = {"text": word, "answer_start": context.index(word)}
            question = {"id": f"q{number}", "question": text(5) + "?", "answers": [answer]}
            paragraphs.append({"context": context, "qas": [question]})
        (folder / "examples").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
        return
    with (folder / "examples").open("w") as file:
        for number in range(EXAMPLES):
            words = text().split()
            row: dict[str, Any] = {name: text() for name in ("sentence", "b", "c", "d")}
            row |= {"label": ("no", "perhaps", "yes")[number % 3], "value": draw.uniform(-2, 2)}
            row |= {"right": draw.randrange(3), "words": words}
            row["tags"] = [draw.choice(["O", "B-X", "I-X"]) for _ in words]
            if kind == "choice":
                row["sentence"], row["right"] = text(), draw.randrange(3)
            file.write(json.dumps(row) + "\n")


def write_answers(
    tuned: TaskModel, architecture: str, forms: Sequence[str], folder: pathlib.Path
) -> None:
    """says.json: rows of ids, their segments and logits; texts, and what ours answers to them."""
    task = tuned.experiment.task
    examples = examples_lib.read(task, task.validation, "unlabelled")
    outputs, _, rows = tuned.outputs(examples)
    answers = list(tuned.predict(examples))
    says = {
        "kind": task.kind,
        "architecture": architecture,
        "forms": forms,
        "labels": tuned.labels,
        "rows_per_example": rows.rows_per_example,
        "ids": [row.tolist() for row in rows.ids],
        "first": rows.first.tolist(),
        "logits": [values.tolist() for values in outputs],
        "examples": [dataclasses.asdict(example) for example in examples],
        "answers": answers,
        "length": task.max_sequence_length,
    }
    (folder / "says.json").write_text(json.dumps(says))


if __name__ == "__main__":
    sys.exit(main())

"""Fine-tuned runs against transformers and PEFT, through folders that `export` writes.

The second half of `make parity`. Fine-tunes a small model of random weights to a task of each
kind, exports it whole and, where it learned one, as an adapter; `parity_tasks_peer` then loads the
folders in its own environment, warnings being errors, and says how far logits, ids and pipelines
are off. The exit code is 1 if one is beyond its bound.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import random
import subprocess
import sys
import tempfile
from typing import Any, Literal

from etils import epath

from benchmarks import measure, parity
from bert_jax.config import LORA_TARGETS, Adapt, Finetuning, Model, Optimizer, Run, Task
from bert_jax.embeddings.forms import FORMS
from bert_jax.interop import exporting, finetuned
from bert_jax.running.progress import LineConsole, Progress
from bert_jax.storage.mirror import open_workdir
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks.finetuned_model import FinetunedModel, TaskModel
from bert_jax.tasks.finetuning_job import finetune
from bert_jax.text.library import LibraryTokenizer
from bert_jax.text.tokenizer import WordPiece

EXAMPLES = 24
WORDS = [f"w{a}{b}" for a in "abcdefgh" for b in "abcdefgh"]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "?", ".", *WORDS]
_SIZE = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
_SIZE |= {"intermediate_size": 128, "max_position_embeddings": 64}
_BERT = Model(vocab_size=len(PIECES), initializer_range=0.1, **_SIZE)
_ROBERTA = {"type_vocab_size": 1, "position_offset": 2, "layer_norm_eps": 1e-5}
_ROBERTA_TOKENIZER = measure.ROOT / "tests" / "golden" / "tokenizers" / "roberta.json"
MODELS = {
    "bert": _BERT,
    "roberta": dataclasses.replace(_BERT, max_position_embeddings=256, **_ROBERTA),
    "distilbert": dataclasses.replace(_BERT, type_vocab_size=0),
    "modern": dataclasses.replace(_BERT, kind="modern", num_hidden_layers=4, local_window=16),
}
_CHOICE = {"choice_columns": ("b", "c", "d"), "label_column": "right"}
_TEXTS = {"second_column": "texts", "label_column": "values"}
# Of a task, the fields it needs, what learns, and whether the base has learned what is below it.
Case = tuple[str, dict[str, Any], dict[str, Any], Literal["learned", "fresh"]]
CASES: list[Case] = [
    ("classify", {}, {"how": "lora"}, "learned"),
    ("classify", {}, {"how": "lora", "lora_targets": LORA_TARGETS, "lora_rank": 3}, "fresh"),
    ("pair", {"second_column": "b"}, {"how": "full"}, "learned"),
    ("regress", {"second_column": "b", "label_column": "value"}, {"how": "lora"}, "learned"),
    ("choice", _CHOICE, {"how": "lora", "lora_targets": ("output", "value")}, "learned"),
    ("tag", {"text_column": "words", "label_column": "tags"}, {"how": "lora"}, "learned"),
    ("span", {"document_stride": 16, "max_query_length": 8}, {"how": "lora"}, "learned"),
    ("classify", {}, {"how": "frozen"}, "learned"),
    ("rank", _TEXTS, {"how": "full"}, "learned"),
    ("sparse", _TEXTS, {"how": "full"}, "learned"),
    ("multi_vector", _TEXTS | {"query_prefix": "wab "}, {"how": "full"}, "learned"),
]


def main() -> int:
    """Makes the folders, and asks the peer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=measure.TORCH[0], help="with torch and peft")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        places = []
        for model, (number, case) in itertools.product(MODELS, enumerate(CASES)):
            places.append(pathlib.Path(name) / f"{model}-{number}-{case[0]}")
            make(model, case, places[-1])
        command = [flags.python, "-m", "benchmarks.parity_tasks_peer", *map(str, places)]
        return subprocess.run(command, check=False).returncode


def make(model: str, case: Case, place: pathlib.Path) -> None:
    """Makes a folder for a model and a case: `task`, perhaps `adapter`, and what ours says."""
    kind, fields, adapt, below = case
    if model != "modern" and "lora_targets" in adapt:  # which alone has a gate
        targets = tuple(name for name in adapt["lora_targets"] if name != "gate")
        adapt = adapt | {"lora_targets": targets}
    head = ("masked_lm" if model == "modern" else "pooler",)
    write_base(model, head if below == "fresh" else (), place / "base")
    (place / "examples").write_text(examples(kind))
    source = (f"{'squad' if kind == 'span' else 'jsonl'}:{place / 'examples'}",)
    # Room for all pieces: pipelines cut nothing.
    length = {"max_sequence_length": 200 if model == "roberta" else 48}
    experiment = Finetuning(
        name=f"{model}_{kind}",
        task=Task(kind=kind, train=source, validation=source, **length, **fields),
        adapt=Adapt(**adapt),
        epochs=2,
        batch_size=8,
        optimizer=Optimizer(name="adamw", peak_learning_rate=2e-2, warmup_steps=0),
        run=Run(eval_batch_size=8),
    )
    quiet = Progress(LineConsole(quiet=True))
    finetune(experiment, str(place / "base"), str(place / "run"), quiet)
    tuned = FinetunedModel.load(open_workdir(place / "run"))
    if experiment.task.spec.makes_vectors:
        exporting.export(tuned, epath.Path(place / "task"), None, "float32")
        (place / "says.json").write_text(json.dumps(vectors_say(tuned)))
        return
    forms = ["task", "adapter"] if adapt["how"] == "lora" else ["task"]
    names = [finetuned.export(tuned, f, "float32", epath.Path(place / f)) for f in forms]
    (place / "says.json").write_text(
        json.dumps(says(tuned.task_model) | {"forms": forms, "class": names[0]})
    )


def write_base(name: str, fresh: tuple[str, ...], folder: pathlib.Path) -> None:
    """A base of one of `MODELS`."""
    cfg, tokenizer = MODELS[name], WordPiece(PIECES, "uncased")
    if name == "roberta":
        specials = {"pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
        specials |= {"cls_token": "<s>", "sep_token": "</s>"}
        tokenizer = LibraryTokenizer(_ROBERTA_TOKENIZER.read_bytes(), specials, name)
        cfg = dataclasses.replace(cfg, vocab_size=tokenizer.size)
    parity.write_base(cfg, tokenizer, 0.05, folder, fresh)


def examples(kind: str) -> str:
    """Random words with random labels, in a form that the kind is read from."""
    draw, rows = random.Random(0), []

    def text(most: int = 14) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(2, most)))

    for number in range(EXAMPLES):
        context, words = text(60), text().split()
        word = draw.choice(context.split())
        answers = [{"text": word, "answer_start": context.index(word)}]
        row: dict[str, Any] = {name: text() for name in ("sentence", "b", "c", "d")}
        row |= {"label": ("no", "perhaps", "yes")[number % 3], "value": draw.uniform(-2, 2)}
        row |= {"right": draw.randrange(3), "words": words, "context": context}
        row |= {"texts": [row["b"], row["c"], context], "values": [0, 1, 0.5]}
        row["tags"] = [draw.choice(["O", "B-X", "I-X"]) for _ in words]
        row["qas"] = [{"id": f"q{number}", "question": text(5) + "?", "answers": answers}]
        rows.append(row)
    if kind == "span":
        return json.dumps({"data": [{"paragraphs": rows}]})
    return "".join(json.dumps(row) + "\n" for row in rows)


def vectors_say(model: FinetunedModel) -> dict[str, Any]:
    """Queries, texts, and the score of each text for each query."""
    kind = model.task_model.task.kind
    rows = [json.loads(line) for line in examples("rank").splitlines()]
    queries = [row["sentence"] for row in rows]
    texts = [text for row in rows for text in row["texts"]]
    scores = FORMS[kind].score(model.embed(queries, role="query"), model.embed(texts))
    said = {"queries": queries, "texts": texts, "scores": scores.tolist()}
    return said | {"kind": kind, "forms": ["task"], "class": ""}


def says(tuned: TaskModel) -> dict[str, Any]:
    """Rows of ids, their segments and logits; texts, and what ours answers to them."""
    task = tuned.experiment.task
    read = examples_lib.read(task, task.validation, "unlabelled")
    outputs, _, rows = tuned.outputs(read)
    return {
        "kind": task.kind,
        "rows_per_example": rows.rows_per_example,
        "ids": [row.tolist() for row in rows.ids],
        "first": rows.first_lengths.tolist(),
        "logits": [values.tolist() for values in outputs],
        "examples": [dataclasses.asdict(example) for example in read],
        "answers": list(tuned.predict(read)),
    }


if __name__ == "__main__":
    sys.exit(main())

"""A small base, small tasks of every kind in files, and their fine-tuning by the command."""

import json
import pathlib

import broken
import jax
from etils import epath
from small_run import signal_before as signal_before

from bert_jax.checkpoints import base as base_lib
from bert_jax.config import Model
from bert_jax.model import heads
from bert_jax.text.tokenizer import WordPiece

GOOD, BAD = ("wa", "wb", "wc", "wd"), ("xa", "xb", "xc", "xd")
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "?", *GOOD, *BAD]
MODEL = Model(
    vocab_size=len(PIECES),
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=64,
    initializer_range=0.2,  # so small a model would say the same of all texts
)
FINETUNE = "finetune task.py --from base --workdir run"
# Of each kind its own fields.
TASKS = {
    "classify": "",
    "pair": 'second_column="b",',
    "regress": 'second_column="b", label_column="value",',
    "choice": 'choice_columns=("b", "c"), label_column="right",',
    "tag": 'text_column="words", label_column="tags", score="accuracy",',
    "span": 'no_answer="possible", document_stride=8, max_query_length=8,',
    "generate": 'label_column="b", max_target_length=15,',
}
FILE = """
from bert_jax.config import Adapt, Finetuning, Optimizer, Run, Task


def experiment():
    return Finetuning(
        name="small",
        task=Task(kind="{kind}", train=("{source}train",), validation=("{source}test",),
                  max_sequence_length=30, {fields}),
        adapt=Adapt(how="{how}", head_dropout_prob=0.0),
        epochs={epochs}, batch_size=4,
        optimizer=Optimizer(name="adamw", peak_learning_rate=5e-2, warmup_steps=0),
        run=Run(log_every=4, eval_every=4, checkpoint_every=4, eval_batch_size=8),
    )
"""


def write_base(folder, seed=0, model=MODEL):
    """A base of random weights."""
    params = jax.device_get(heads.init_params(model, jax.random.key(seed)))
    base = base_lib.Base(model, params, WordPiece(PIECES, "uncased"), "a test")
    base_lib.write(base, epath.Path(folder))


def rows(kind, count):
    """Records: texts of good words are `good`, of bad ones `bad`."""
    for i in range(count):
        bad, first, other = i % 2, (GOOD, BAD)[i % 2], (BAD, GOOD)[i % 2]
        text = f"{first[i % 4]} {first[i // 2 % 4]}"
        if kind == "tag":
            yield {"words": [first[i % 4], other[i // 2 % 4]], "tags": [str(bad), str(1 - bad)]}
        else:
            yield {
                "sentence": text,
                "b": first[i // 3 % 4],
                "c": other[i % 4],
                "label": ("good", "bad")[bad],
                "value": float(bad),
                "right": 0,
            }


def questions(count):
    """SQuAD's form; every third has no answer."""
    found = []
    for i in range(count):
        context = " ".join((GOOD + BAD)[(i + j) % 8] for j in range(6 + i % 20))
        word = context.split()[i % 6]
        answers = [{"text": word, "answer_start": context.index(word)}] if i % 3 else []
        qas = [{"id": f"q{i}", "question": "wa ?", "is_impossible": not i % 3, "answers": answers}]
        found.append({"context": context, "qas": qas})
    return {"data": [{"paragraphs": found}]}


def write_task(folder: pathlib.Path, kind: str, how: str = "full", epochs: float = 1) -> None:
    """`train`, `test` and `task.py` in the folder, which is the current one for the command."""
    for name, count in (("train", 16), ("test", 11)):
        if kind == "span":
            text = json.dumps(questions(count))
        else:
            text = "".join(json.dumps(row) + "\n" for row in rows(kind, count))
        (folder / name).write_text(text)
    source = "squad:" if kind == "span" else "jsonl:"
    text = FILE.format(kind=kind, source=source, fields=TASKS[kind], how=how, epochs=epochs)
    (folder / "task.py").write_text(text)


def finetune(*more: str) -> str:
    """Fine-tunes in the current folder; returns what is printed."""
    return broken.said(FINETUNE, *more)


def predict(*words: str, stdin: bytes = b"") -> list:
    """What `bert-jax predict --workdir run WORDS` prints, a value a line."""
    printed = broken.said("predict --workdir run", *words, stdin=stdin)
    return [json.loads(line) for line in printed.splitlines()]


def lines(path: str) -> list:
    """JSON lines of a file."""
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]

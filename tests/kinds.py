"""Small tasks of every kind, and examples of them."""

import dataclasses
import random

import jax
import numpy as np

from bert_jax.config import Adapt, Model, Optimizer, Task
from bert_jax.tasks import task_kind
from bert_jax.tasks.examples import AnswerSpan, Question, Sentence, Tagged
from bert_jax.tasks.task_objective import TaskObjective
from bert_jax.text.tokenizer import WordPiece

WORDS = [f"w{chr(97 + i)}" for i in range(20)]
MORE = [".", ",", "(", ")", "cafe", "naive", "12", "\u65e5", "\u672c", "un", "##til", "##s"]
TOKENIZER = WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *MORE, *WORDS], "uncased")
FIELDS = {
    "classify": {},
    "pair": {"second_column": "b"},
    "regress": {"second_column": "b"},
    "choice": {"choice_columns": ("b", "c")},
    "tag": {},
    "span": {},
}


def task(kind, **settings):
    source = {"tag": "conll:x", "span": "squad:x"}.get(kind, "jsonl:x")
    if kind == "tag":
        settings = {"text_column": "0", "label_column": "1"} | settings
    if kind == "span":
        settings = {"document_stride": 8, "max_query_length": 8} | settings
    fields = {"train": (source,), "validation": (source,), "max_sequence_length": 40}
    return Task(kind=kind, **fields | FIELDS[kind] | settings)


def write_task_file(file, **fields):
    """Writes the file of a task with these fields, called as the file is; returns the file."""
    of = ", ".join(f"{name}={value!r}" for name, value in fields.items())
    file.write_text(
        "from bert_jax.config import Finetuning, Task\n\n\ndef experiment():\n"
        f"    return Finetuning(name={file.stem!r}, task=Task({of}))\n"
    )
    return file


def sentence(*texts, label=None):
    return Sentence("f:1", texts, label)


def tagged(words, tags=None):
    return Tagged("f:1", tuple(words), None if tags is None else tuple(tags))


def question(context, *answers, number=0, text="wa wb ?"):
    """Answers are parts of the context, the first of their kind."""
    found = tuple(AnswerSpan(answer, context.index(answer)) for answer in answers)
    return Question("f", f"q{number}", text, context, found, bool(answers))


def ids(text):
    """Pieces parted by blanks, as they stand in the vocabulary."""
    return [TOKENIZER.vocab.index(piece) for piece in text.split()]


MODEL = Model(
    vocab_size=TOKENIZER.size,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=40,
)


def examples(kind, count=8, seed=0):
    """Labelled examples whose texts are of several lengths."""
    rng = random.Random(seed)

    def text(most=9):
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(2, most)))

    def one(number):
        if kind == "tag":
            words = text().split()
            return tagged(words, [rng.choice(LABELS["tag"]) for _ in words])
        if kind == "span":
            context = text(40)
            return question(context, rng.choice(context.split()), number=number)
        if kind == "regress":
            return sentence(text(), text(), label=rng.uniform(-2, 2))
        texts = {"classify": 1, "pair": 2, "choice": 3}[kind]
        return sentence(*(text() for _ in range(texts)), label=rng.choice(LABELS[kind]))

    return [one(number) for number in range(count)]


LABELS = {
    "classify": ("a", "b", "c"),
    "pair": ("a", "b"),
    "regress": (),
    "choice": ("0", "1"),
    "tag": ("B-X", "I-X", "O"),
    "span": (),
}


def kind_of(kind):
    return task_kind.make_kind(task(kind), LABELS[kind], TOKENIZER)


def objective(kind, adapt=None, model=MODEL, fresh_parts=()):
    adapt = adapt or Adapt()
    of = kind_of(kind)
    shape = of.learns, of.reads, of.output_count, of.rows_per_example
    return TaskObjective(model, *shape, adapt, fresh_parts)


def without_dropout(**settings):
    """An `Adapt` and a model that draw no noise."""
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    model = dataclasses.replace(MODEL, **dict.fromkeys(names, 0.0))
    nothing = dict.fromkeys((*names, "head_dropout_prob"), 0.0)
    return Adapt(**nothing, **settings), model


def base_params(reads, seed=7):
    """An encoder, and a pooler if it is read, that are not as freshly made: biases are not zero."""
    rng = np.random.default_rng(seed)
    made = TaskObjective(MODEL, "labels", reads, 2, 1, Adapt()).init_params(jax.random.key(seed))
    params = jax.device_get(made)
    params = jax.tree.map(lambda p: p + 0.1 * rng.normal(size=p.shape).astype(np.float32), params)
    return {name: params[name] for name in ("encoder", "pooler") if name in params}


# The gradient of a key bias is zero but for rounding, which Adam with a small eps would blow up.
OPTIMIZER = Optimizer(
    name="adamw", peak_learning_rate=1e-2, warmup_steps=0, schedule="linear", eps=1e-4
)

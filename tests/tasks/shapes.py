"""Small tasks of every shape, and examples of them."""

from bert_jax.config import Task
from bert_jax.tasks.examples import Answer, Question, Sentence, Tagged
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


def task(shape, **settings):
    source = {"tag": "conll:x", "span": "squad:x"}.get(shape, "jsonl:x")
    if shape == "tag":
        settings = {"text_column": "0", "label_column": "1"} | settings
    if shape == "span":
        settings = {"document_stride": 8, "max_query_length": 8} | settings
    fields = {"train": (source,), "validation": (source,), "max_sequence_length": 40}
    return Task(shape=shape, **fields | FIELDS[shape] | settings)


def sentence(*texts, label=None):
    return Sentence("f:1", texts, label)


def tagged(words, tags=None):
    return Tagged("f:1", tuple(words), None if tags is None else tuple(tags))


def question(context, *answers, number=0, text="wa wb ?"):
    """Answers are parts of the context, the first of their kind."""
    found = tuple(Answer(answer, context.index(answer)) for answer in answers)
    return Question("f", f"q{number}", text, context, found, bool(answers))


def ids(text):
    """Pieces parted by blanks, as they stand in the vocabulary."""
    return [TOKENIZER.vocab.index(piece) for piece in text.split()]

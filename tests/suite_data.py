"""Look-alikes of the files of benchmarks, in the layouts in which they are distributed.

The first text of an example holds a good word if the label is the last one, else a bad word.
"""

import json
import pathlib
from collections.abc import Iterator

from tuned import BAD, GOOD

BINARY = ("0", "1")
ENTAILED = ("not_entailment", "entailment")
MNLI = ("contradiction", "entailment", "neutral")
MNLI_COLUMNS = "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse"
MNLI_COLUMNS += " sentence1_parse sentence2_parse sentence1 sentence2"
# {task: (columns of train.tsv and dev.tsv, columns of test.tsv, labels)}. Names of columns are
# those of the files; a label column is the one that the test file lacks.
TABLES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "SST-2": ("sentence label", "index sentence", BINARY),
    "QQP": ("id qid1 qid2 question1 question2 is_duplicate", "id question1 question2", BINARY),
    "QNLI": ("index question sentence label", "index question sentence", ENTAILED),
    "RTE": ("index sentence1 sentence2 label", "index sentence1 sentence2", ENTAILED),
    "WNLI": ("index sentence1 sentence2 label", "index sentence1 sentence2", BINARY),
    "MRPC": (
        "Quality|#1 ID|#2 ID|#1 String|#2 String",
        "index|#1 ID|#2 ID|#1 String|#2 String",
        BINARY,
    ),
    "STS-B": (
        "index genre filename year old_index source1 source2 sentence1 sentence2 score",
        "index genre filename year old_index source1 source2 sentence1 sentence2",
        ("0.000", "2.500", "5.000"),
    ),
}
TEXTS = {"sentence", "sentence1", "sentence2", "question", "question1", "question2"}
TEXTS |= {"#1 String", "#2 String"}
ANSWERS = {"label", "is_duplicate", "Quality", "score", "label1", "gold_label"}


def text(number: int, label: int, position: int) -> str:
    """Returns a text with quotation marks, which have no meaning in the files."""
    words = (GOOD if label else BAD) if position == 0 else GOOD + BAD
    mark = ('"', "", "'")[number % 3]
    return f"{mark}{words[number % len(words)]} {words[number // 2 % len(words)]}"


def table(columns: str, labels: tuple[str, ...], count: int) -> str:
    """Returns the text of a file whose first line names its columns."""
    names = columns.split("|" if "|" in columns else " ")
    lines = ["\t".join(names)]
    for number in range(count):
        label, cells, texts = number % len(labels), [], 0
        for name in names:
            if name in TEXTS:
                cells.append(text(number, label, texts))
                texts += 1
            elif name in ANSWERS:
                cells.append(labels[label])
            else:
                cells.append(str(number))
        lines.append("\t".join(cells))
    return "".join(f"{line}\n" for line in lines)


def cola(count: int) -> Iterator[str]:
    """Yields the lines of CoLA's train.tsv and dev.tsv, which have no names of columns."""
    for number in range(count):
        label = number % 2
        yield f"gj04\t{label}\t{'' if label else '*'}\t{text(number, label, 0)}\n"


def glue(folder: pathlib.Path, train: int = 40, dev: int = 9, test: int = 7) -> None:
    """Writes the files of GLUE with these numbers of examples."""
    counts = {"train": train, "dev": dev}
    for name, (columns, test_columns, labels) in TABLES.items():
        files = {f"{split}.tsv": table(columns, labels, n) for split, n in counts.items()}
        files["test.tsv"] = table(test_columns, labels, test)
        write(folder / name, files)
    (folder / "QQP/train.tsv").open("a").write("7\t1\t2\n")  # rows of QQP lack columns
    files = {f"{split}.tsv": "".join(cola(n)) for split, n in counts.items()}
    write(folder / "CoLA", files | {"test.tsv": table("index sentence", BINARY, test)})
    five = " ".join(f"label{number}" for number in range(1, 6))
    files = {"train.tsv": table(f"{MNLI_COLUMNS} label1 gold_label", MNLI, train)}
    for name in ("matched", "mismatched"):
        files[f"dev_{name}.tsv"] = table(f"{MNLI_COLUMNS} {five} gold_label", MNLI, dev)
        files[f"test_{name}.tsv"] = table(MNLI_COLUMNS, MNLI, test + (name == "mismatched"))
    write(folder / "MNLI", files)
    diagnostic = table("index sentence1 sentence2", MNLI, test)
    write(folder / "diagnostic", {"diagnostic.tsv": diagnostic})


def write(folder: pathlib.Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")


# --- SQuAD, SWAG and CoNLL-2003 -----------------------------------------------------------------


def squad(count: int, version: str) -> str:
    """Returns questions about contexts of numbered words; in 2.0 every third has no answer."""
    paragraphs = []
    for number in range(count):
        words = [(GOOD + BAD)[(number + i) % 8] for i in range(6 + number % 5)]
        answer = {"text": " ".join(words[2:4]), "answer_start": len(" ".join(words[:2])) + 1}
        question = {"id": f"q{number}", "question": "wa ?", "answers": [answer]}
        if version == "v2.0":
            question["is_impossible"] = number % 3 == 0
            question["answers"] = [] if number % 3 == 0 else [answer]
        paragraphs.append({"context": " ".join(words), "qas": [question]})
    articles = [{"title": "words", "paragraphs": paragraphs}]
    return json.dumps({"version": version.replace("v1", "1"), "data": articles})


SWAG_COLUMNS = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source"
SWAG_COLUMNS += ",ending0,ending1,ending2,ending3,label"


def swag(count: int) -> str:
    """Returns sentences whose right continuation has a good word; one cell has a comma."""
    lines = [SWAG_COLUMNS]
    for number in range(count):
        right = number % 4
        ends = [f"{(GOOD if i == right else BAD)[number // 4 % 4]} wa" for i in range(4)]
        ends[3] = f'"{ends[3]}, wb"'
        cells = [number, f"v{number}", number, "wa wb . wc", "wa wb .", "wc", "gold", *ends, right]
        lines.append(",".join(map(str, cells)))
    return "".join(f"{line}\n" for line in lines)


CONLL = {
    # As distributed: B- only where an entity follows another one of the same type.
    "IOB1": ("I-PER I-PER O I-LOC B-LOC O", "O I-ORG I-ORG O I-MISC"),
    "IOB2": ("B-PER I-PER O B-LOC B-LOC O", "O B-ORG I-ORG O B-MISC"),
}


def conll(count: int, scheme: str) -> str:
    """Returns sentences with a part of speech, a chunk and a tag for each word, in two documents.

    The words of entities are good ones.
    """
    lines = ["-DOCSTART- -X- -X- O", ""]
    for number in range(count):
        if number == count // 2:
            lines += ["-DOCSTART- -X- -X- O", ""]
        for position, tag in enumerate(CONLL[scheme][number % 2].split()):
            word = (BAD if tag == "O" else GOOD)[(number + position) % 4]
            lines.append(f"{word} NN I-NP {tag}")
        lines.append("")
    return "\n".join(lines) + "\n"


def paper(folder: pathlib.Path, scheme: str = "IOB1") -> None:
    """Writes the files of all tables of the paper."""
    glue(folder)
    versions = ("v1.1", "v2.0")
    counts = {"train": 24, "dev": 12}
    files = {f"{s}-{v}.json": squad(n, v) for s, n in counts.items() for v in versions}
    write(folder / "squad", files)
    write(folder / "swag", {"train.csv": swag(24), "val.csv": swag(12)})
    names = {"eng.train": 24, "eng.testa": 12, "eng.testb": 10}
    write(folder / "conll2003", {name: conll(n, scheme) for name, n in names.items()})

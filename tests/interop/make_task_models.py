"""Small models with the head of a task, and the answers of the libraries that published them.

`python tests/interop/make_task_models.py`, in an environment with torch and sentence-transformers,
writes tests/golden/task_models.json again (made with torch 2.13.0, transformers 5.24.0 and
sentence-transformers 6.2.0). The weights are not stored: `families.drawn` draws them again.
"""

import json
import pathlib
import re
from typing import Any

import families
import numpy as np
from safetensors.numpy import save_file

FILE = families.GOLDEN / "task_models.json"
TEXTS = (
    "We the people of the United States have a great Government.",
    "It should be free!",
    "Upon the right of every nation which has been made with their power, peace will stand. " * 6,
)
PAIRS = (
    ("the people of the States", "They have the right to be free."),
    ("a great nation", "It is great, and it is free."),
    ("a great nation", "peace and power are their principle " * 12),  # too long for the model
    ("peace and power are great " * 12, "the people of the nation have a right " * 14),
)
TAGGED = ("We the people of the United States have", "Congress shall make no law")
QUESTIONS = (
    (
        "who has power?",
        "Every nation has the power to make peace; the Government is of the people.",
    ),
    ("what is free", "The country, the people and the Congress are free."),
)
CHOICES = (("the nation is", "great", "of the people"), ("peace", "and power", "will be made"))
WORDS = re.findall(r"\w+", " ".join((*TEXTS[:2], QUESTIONS[0][1])).lower())
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_LETTERS, *".,;!?"]
PIECES += [*(f"##{letter}" for letter in _LETTERS), *dict.fromkeys(w for w in WORDS if len(w) > 1)]

_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 66,
}
_ROBERTA = _SIZES | {"vocab_size": 501, "type_vocab_size": 1, "pad_token_id": 1}
# By family: the prefix of its classes, fields of config.json, and the name of the tokenizer.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("Bert", _SIZES | {"vocab_size": len(PIECES)}, "bert"),
    "roberta": ("Roberta", _ROBERTA | {"max_position_embeddings": 68}, "roberta"),
    "xlm-roberta": ("XLMRoberta", _ROBERTA | {"max_position_embeddings": 68}, "xlmr"),
    "distilbert": (
        "DistilBert",
        {"vocab_size": len(PIECES), "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48}
        | {"max_position_embeddings": 66},
        "bert",
    ),
    "modernbert": (
        "ModernBert",
        _SIZES
        | {"vocab_size": 530, "pad_token_id": 528, "cls_token_id": 526, "sep_token_id": 527}
        | {"bos_token_id": 526, "eos_token_id": 527, "local_attention": 16},
        "modernbert",
    ),
}
_THREE = {"id2label": {0: "bad", 1: "so so", 2: "good"}}
_TWO = {"id2label": {0: "not_entailment", 1: "entailment"}}
_TAGS = {"id2label": dict(enumerate(("O", "B-PER", "I-PER", "B-LOC")))}
_NUMBER = {"num_labels": 1, "problem_type": "regression"}
_RANK = {"num_labels": 1}
_IDENTITY = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
# By name, the family, the kind of task, and its fields of config.json. The names that begin with
# `cross` are saved by CrossEncoder of sentence-transformers.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    f"{family} {kind}": (family, kind, fields)
    for family in FAMILIES
    for kind, fields in {
        "classify": _THREE,
        "pair": _TWO,
        "tag": _TAGS,
        "span": {},
        "choice": {},
    }.items()
} | {
    "bert regress": ("bert", "regress", _NUMBER),
    "modernbert regress": ("modernbert", "regress", _NUMBER),
    "modernbert mean": ("modernbert", "classify", _THREE | {"classifier_pooling": "mean"}),
    "distilbert rank": ("distilbert", "rank", _RANK),
    "old cross-encoder": ("modernbert", "rank", _RANK | _IDENTITY),
    "cross sigmoid": ("xlm-roberta", "rank", _RANK),
    "cross identity": ("bert", "rank", _RANK),
    "cross labels": ("roberta", "pair", _TWO),
}
_ENDINGS = {
    "tag": "ForTokenClassification",
    "span": "ForQuestionAnswering",
    "choice": "ForMultipleChoice",
}


def write_folder(folder: pathlib.Path, record: dict[str, Any], tokenizer: str) -> None:
    """Writes the folder of a model again, from the record of it in the golden file."""
    folder.mkdir(exist_ok=True)
    for name, content in record["files"].items():
        (folder / name).write_text(json.dumps(content))
    content = (FILE.parent / "tokenizers" / f"{tokenizer}.json").read_text()
    (folder / "tokenizer.json").write_text(content)
    tensors = {name: families.drawn(name, tuple(shape)) for name, shape in record["shapes"].items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def read_record(folder: pathlib.Path, shapes: dict[str, list[int]]) -> dict[str, Any]:
    """Returns the record of a folder: its small files, and the shapes of its tensors."""
    files = {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    del files["tokenizer.json"]
    return {"files": files, "shapes": shapes}


def find_answer(
    tokenizer: Any, row: Any, starts: np.ndarray, ends: np.ndarray
) -> tuple[str, float]:
    """Returns the span of whole words with the largest sum of logits, by trying all spans."""
    question, context = row
    encoding = tokenizer(question, context, return_offsets_mapping=True)
    kinds, word_ids = encoding.sequence_ids(0), encoding.word_ids(0)
    best, answer = -np.inf, ""
    positions = [i for i, kind in enumerate(kinds) if kind == 1]
    for start in positions:
        for end in (i for i in positions if start <= i < start + 30):
            if starts[start] + ends[end] <= best:
                continue
            best, words = starts[start] + ends[end], {word_ids[start], word_ids[end]}
            inside = [i for i in positions if word_ids[i] in words]
            offsets = [encoding["offset_mapping"][i] for i in inside]
            answer = context[min(a for a, _ in offsets) : max(b for _, b in offsets)].strip()
    return answer, float(best)


def ask(model: Any, tokenizer: Any, kind: str) -> list[Any]:
    """Returns the answers of a class of transformers to the inputs of a kind."""
    import torch

    def logits(*texts: Any) -> Any:
        rows = {"truncation": True, "max_length": 66, "padding": True, "return_tensors": "pt"}
        with torch.no_grad():
            return model(**tokenizer(*texts, **rows))

    if kind in ("classify", "regress"):
        values = logits(list(TEXTS)).logits
        return (values[:, 0] if kind == "regress" else values.softmax(-1)).tolist()
    if kind in ("pair", "rank"):
        values = logits(*map(list, zip(*PAIRS, strict=True))).logits
        return (values[:, 0].sigmoid() if kind == "rank" else values.softmax(-1)).tolist()
    if kind == "choice":
        answers = []
        for context, *candidates in CHOICES:
            rows = tokenizer([context] * 2, candidates, padding=True, return_tensors="pt")
            with torch.no_grad():
                output = model(**{name: rows[name][None] for name in rows})
            answers.append(output.logits.softmax(-1)[0].tolist())
        return answers
    if kind == "span":
        outputs = [logits(*row) for row in QUESTIONS]
        return [
            find_answer(tokenizer, row, *(values[0].numpy() for values in pair))
            for row, pair in zip(
                QUESTIONS, ((x.start_logits, x.end_logits) for x in outputs), strict=True
            )
        ]
    answers = []
    for text in TAGGED:
        offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        labels = logits(text).logits[0].argmax(-1).tolist()
        ends = [match.start() for match in re.finditer(r"\S+", text)]
        first = [next(i for i, (a, b) in enumerate(offsets) if a < b and b > at) for at in ends]
        answers.append([model.config.id2label[labels[i]] for i in first])
    return answers


def main() -> None:
    """Writes the golden file."""
    import tempfile

    import transformers
    from sentence_transformers import CrossEncoder

    special = {"bert": families.SQUARE} | families.NAMED
    bert = transformers.BertTokenizer(vocab={piece: i for i, piece in enumerate(PIECES)})
    with tempfile.TemporaryDirectory() as name:
        bert.save_pretrained(name)
        content = pathlib.Path(name, "tokenizer.json").read_text()
        (FILE.parent / "tokenizers" / "bert.json").write_text(content)
    records = {}
    for name, (family, kind, fields) in MODELS.items():
        prefix, sizes, tokenizer_name = FAMILIES[family]
        path = FILE.parent / "tokenizers" / f"{tokenizer_name}.json"
        tokenizer = bert
        if tokenizer_name != "bert":
            tokenizer = transformers.PreTrainedTokenizerFast(
                tokenizer_file=str(path), **special[tokenizer_name]
            )
        tokenizer.model_max_length = 66
        cls = prefix + _ENDINGS.get(kind, "ForSequenceClassification")
        model = getattr(transformers, cls)(
            getattr(transformers, f"{prefix}Config")(**sizes | fields)
        )
        shapes = {
            key: list(value.shape)
            for key, value in model.state_dict().items()
            if not key.endswith("position_ids")
        }
        with tempfile.TemporaryDirectory() as temporary:
            folder = pathlib.Path(temporary)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            write_folder(folder, read_record(folder, shapes), tokenizer_name)
            if name.startswith("cross"):
                import torch

                activation = torch.nn.Sigmoid() if name == "cross sigmoid" else torch.nn.Identity()
                CrossEncoder(temporary, activation_fn=activation).save_pretrained(temporary)
                write_folder(folder, read_record(folder, shapes), tokenizer_name)
            record = read_record(folder, shapes)
            if "cross" in name:
                scores = CrossEncoder(temporary).predict(list(PAIRS), apply_softmax=kind == "pair")
                record["answers"] = scores.tolist()
            else:
                loaded = getattr(transformers, cls).from_pretrained(folder).eval()
                tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
                record["answers"] = ask(loaded, tokenizer, kind)
        records[name] = record | {"architecture": cls}
    FILE.write_text(json.dumps(records, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()

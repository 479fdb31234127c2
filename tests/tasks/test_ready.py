"""Ready TFDS datasets as examples: named classes, nested answers, what is refused."""

import json
import shutil

import numpy as np
import pytest
import samples
import tensorflow_datasets as tfds

from bert_jax.config import Task
from bert_jax.errors import InputError
from bert_jax.tasks import examples
from bert_jax.tasks.examples import AnswerSpan
from bert_jax.text import tfds_files

CONTEXT = "Größe: 12 m."
FEATURES = {
    "glue": {
        "sentence1": tfds.features.Text(),
        "sentence2": tfds.features.Text(),
        "label": tfds.features.ClassLabel(names=["not_same", "same"]),
        "score": np.float32,
        "truth": np.bool_,
        "idx": np.int32,
        "bare": tfds.features.ClassLabel(num_classes=3),
    },
    "conll": {
        "tokens": tfds.features.Sequence(tfds.features.Text()),
        "ner": tfds.features.Sequence(tfds.features.ClassLabel(names=["O", "B-PER", "I-PER"])),
    },
    "squad": {
        "id": np.str_,
        "context": tfds.features.Text(),
        "question": tfds.features.Text(),
        "is_impossible": np.bool_,
        "answers": tfds.features.Sequence({"text": tfds.features.Text(), "answer_start": np.int32}),
    },
}
PAIR = {"sentence1": "A é", "sentence2": "B", "score": 3.5, "truth": True, "idx": 7, "bare": 2}
ASKED = {"context": CONTEXT, "is_impossible": False}
TALL = {"id": "q1", "question": "How tall?"} | ASKED
TALL |= {"answers": {"text": ["12 m", "12"], "answer_start": [7, 7]}}
WIDE = {"id": "q2", "question": "How wide?"} | ASKED | {"is_impossible": True}
WIDE |= {"answers": {"text": [], "answer_start": []}}
EXAMPLES = {
    "glue": {
        "train": [PAIR | {"label": "same"}, PAIR | {"label": "not_same"}],
        "test": [PAIR | {"label": "same"}, PAIR | {"label": -1}],
    },
    "conll": {"train": [{"tokens": ["Ada", "é"], "ner": ["B-PER", "O"]}]},
    "squad": {"train": [TALL, WIDE]},
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """The three, as `download_and_prepare` leaves them."""
    root = tmp_path_factory.mktemp("tfds")
    for key, features in FEATURES.items():
        samples.ready_dataset(root, key, features, EXAMPLES[key])
    return root


@pytest.fixture(autouse=True)
def ready(data_dir, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))


def read(kind, source, labelled="labelled", **settings):
    task = Task(kind=kind, train=(source,), validation=(source,), **settings)
    return examples.read(task, (source,), labelled)


PAIRS = {"text_column": "sentence1", "second_column": "sentence2"}


def pairs(source, labelled="labelled", **settings):
    return read("pair", source, labelled, **PAIRS | settings)


@pytest.mark.parametrize("source", ["tfds:glue:train", "tfds:glue:1.0.0:train"])
def test_classes_are_called_by_their_names(source):
    first, second = pairs(source)
    assert (first.texts, first.label) == (("A é", "B"), "same")
    assert (second.location, second.label) == (f"{source}:1", "not_same")


def test_labels_may_be_booleans_integers_floats_classes_without_names_or_missing():
    for column, label in (("truth", "true"), ("idx", "7"), ("bare", "2")):
        assert pairs("tfds:glue:train", label_column=column)[0].label == label
    assert read("regress", "tfds:glue:train", **PAIRS | {"label_column": "score"})[0].label == 3.5
    assert [e.label for e in pairs("tfds:glue:test", "unlabelled")] == [None, None]


def test_words_and_tags_are_sequences():
    columns = {"text_column": "tokens", "label_column": "ner"}
    (found,) = read("tag", "tfds:conll:train", **columns)
    assert (found.words, found.tags) == (("Ada", "é"), ("B-PER", "O"))


def test_answers_are_nested_features():
    first, second = read("span", "tfds:squad:train", no_answer="possible", max_sequence_length=384)
    assert first.location == "tfds:squad:train: question q1"
    assert (first.context, first.answers) == (CONTEXT, (AnswerSpan("12 m", 7), AnswerSpan("12", 7)))
    assert (second.question, second.answers, second.has_answer) == ("How wide?", (), False)


@pytest.mark.parametrize(
    ("kind", "source", "columns", "words"),
    [
        ("classify", "tfds:glue:train", {"text_column": "text"}, "train:0: no column 'text'"),
        ("classify", "tfds:glue:dev", {}, "no split 'dev'"),
        ("classify", "tfds:other:train", {}, "no prepared dataset"),
        ("span", "tfds:glue:train", {"max_sequence_length": 384}, "tfds:glue:train:0: .*'id'"),
        ("tag", "tfds:glue:train", {"text_column": "sentence1"}, "column 'sentence1'"),
        ("pair", "tfds:glue:test", PAIRS, "tfds:glue:test:1: column 'label' is missing"),
    ],
)
def test_what_a_dataset_does_not_have_is_named(kind, source, columns, words):
    with pytest.raises(InputError, match=words):
        read(kind, source, **columns)


def test_what_is_wrong_with_a_dataset_is_named(data_dir, tmp_path, monkeypatch):
    """As after other names were put next to the records, or other features."""
    folder = tmp_path / "glue" / "1.0.0"
    shutil.copytree(data_dir / "glue" / "1.0.0", folder)
    (folder / "label.labels.txt").write_text("not_same\n")
    features = json.loads((folder / "features.json").read_text())
    features["featuresDict"]["features"]["label"]["classLabel"]["numClasses"] = "1"
    (folder / "features.json").write_text(json.dumps(features))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    with pytest.raises(InputError, match="tfds:glue:train:0: class 1, but there are 1 classes"):
        pairs("tfds:glue:train")
    name = "tensorflow_datasets.core.features.sequence_feature.Sequence"
    text = {"pythonClassName": "tensorflow_datasets.core.features.text_feature.Text", "text": {}}
    tree = {"pythonClassName": name, "sequence": {"feature": text, "length": "-1"}}
    (folder / "features.json").write_text(json.dumps(tree))
    with pytest.raises(InputError, match=r"features\.json: its examples have no named fields"):
        pairs("tfds:glue:train")
    (folder / "label.labels.txt").unlink()
    monkeypatch.setattr(tfds_files, "class_labels", lambda folder: {})
    monkeypatch.setattr(tfds_files, "records", lambda folder, split: iter([{"text": b"caf\xe9"}]))
    with pytest.raises(InputError, match="tfds:glue:train:0: not UTF-8"):
        read("classify", "tfds:glue:train", text_column="text")

"""Published models with the head of a task answer as their own libraries do.

The answers are from transformers and sentence-transformers: `make_task_models`.
"""

import json
import pathlib

import broken
import make_task_models as made
import numpy as np
import pytest
from safetensors.numpy import load_file

import bert_jax
from bert_jax.errors import InputError
from bert_jax.serve import endpoints
from bert_jax.storage.mirror import open_workdir
from bert_jax.tasks.finetuned_model import TaskModel

RECORDS = json.loads(made.FILE.read_text())
# The models of the quick test: each kind, each family, each file that names an activation.
QUICK = {
    "distilbert classify",
    "modernbert tag",
    "bert span",
    "roberta choice",
    "modernbert regress",
    "old cross-encoder",
    "cross sigmoid",
}
# Flags of `import` for models whose kind is not the default of their class.
FLAGS = {
    "pair": "--kind pair",
    "tag": "--set task.max_sequence_length=60",  # of which none has an effect on the answers
}


def write(name: str, folder: str = "hf") -> str:
    """Writes the folder of a model; returns the kind of its task."""
    family, kind, _ = made.MODELS[name]
    made.write_folder(pathlib.Path(folder), RECORDS[name], made.FAMILIES[family][2])
    return kind


def import_model(name: str, *flags: str) -> str:
    """Imports a model to the folder `base`; returns the kind of its task."""
    kind = write(name)
    broken.said("import hf --workdir base", *(flags or FLAGS.get(kind, "").split()))
    return kind


def predict(*arguments: str) -> list:
    """Returns the answers of `bert-jax predict --workdir base`."""
    printed = broken.said("predict --workdir base", *arguments)
    return [json.loads(line) for line in printed.splitlines()]


def inputs(kind: str) -> list[tuple[str, ...]]:
    """Returns the texts of each example of a kind."""
    if kind in ("classify", "regress"):
        return [(text,) for text in made.TEXTS]
    if kind == "tag":
        return [(text,) for text in made.TAGGED]
    return list({"span": made.QUESTIONS, "choice": made.CHOICES}.get(kind, made.PAIRS))


def check_answers(kind: str, answers: list, expected: list) -> None:
    """Compares answers with those of the library: numbers to 1e-5, labels and spans exactly."""
    if kind == "tag":
        assert [answer["tags"] for answer in answers] == expected
        return
    if kind == "span":
        assert [answer["answer"] for answer in answers] == [text for text, _ in expected]
        numbers = [answer["best"][0]["score"] for answer in answers]
        expected = [score for _, score in expected]
    elif kind == "regress":
        numbers = [answer["value"] for answer in answers]
    elif kind == "rank":
        numbers = [answer["ranking"][0]["score"] for answer in answers]
    else:
        numbers = [list(answer["probabilities"].values()) for answer in answers]
        labels = [list(answer["probabilities"]) for answer in answers]
        best = np.argmax(expected, axis=1)
        assert [a["label"] for a in answers] == [
            row[i] for row, i in zip(labels, best, strict=True)
        ]
    np.testing.assert_allclose(numbers, expected, atol=1e-5)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.long) for n in RECORDS]
)
def test_answers_are_those_of_the_library(name):
    kind = import_model(name)
    answers = [answer for texts in inputs(kind) for answer in predict(*texts)]
    check_answers(kind, answers, RECORDS[name]["answers"])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.long) for n in RECORDS]
)
def test_an_export_is_the_folder_that_was_imported(name):
    """The tensors are equal bit for bit, and config.json says the same of the head."""
    import_model(name)
    broken.said("export --workdir base --out out")
    tensors, exported = load_file("hf/model.safetensors"), load_file("out/model.safetensors")
    unused = [key for key in tensors if key not in exported]
    assert all(".pooler." in key for key in unused), unused  # which no head for tokens reads
    for key, value in exported.items():
        np.testing.assert_array_equal(value, tensors[key], key)
    before, after = (json.loads(pathlib.Path(f, "config.json").read_text()) for f in ("hf", "out"))
    if made.MODELS[name][1] in ("classify", "pair", "tag"):
        assert after["id2label"] == before["id2label"]
    pooling = [fields.get("classifier_pooling", "cls") for fields in (before, after)]
    assert pooling[0] == pooling[1]
    assert after["architectures"] == [before["architectures"][0].removeprefix("XLM")]
    card = pathlib.Path("out/README.md").read_text()
    assert "imported from" in card and "## Recipe" not in card
    again = bert_jax.load("out")  # the folder of transformers, without an import
    assert again.task_model.task.ranking_loss == TaskModel(open_workdir("base")).task.ranking_loss


def test_a_folder_is_asked_from_python():
    write("bert span")
    model = bert_jax.load("hf")
    answers = model.predict(list(made.QUESTIONS))
    assert isinstance(model, bert_jax.FinetunedModel)
    assert [answer["answer"] for answer in answers] == [
        t for t, _ in RECORDS["bert span"]["answers"]
    ]
    with pytest.raises(InputError, match="name labelled examples"):
        model.score()


def test_labelled_examples_are_scored_and_labels_renamed():
    import_model("distilbert pair", "--kind", "pair", "--set", "task.labels=no,yes")
    probabilities = np.array(RECORDS["distilbert pair"]["answers"])
    labels = [("no", "yes")[i] for i in probabilities.argmax(axis=1)]
    wrong = ("no", "yes")[probabilities[-1].argmin()]
    rows = [
        {"a": a, "b": b, "label": label}
        for (a, b), label in zip(made.PAIRS, [*labels[:-1], wrong], strict=True)
    ]
    pathlib.Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ("--text", "a", "--second", "b")
    (scores,) = predict("--score", "--source", "jsonl:rows.jsonl", *columns)
    truth = [probabilities[i][("no", "yes").index(row["label"])] for i, row in enumerate(rows)]
    assert scores["accuracy"] == pytest.approx(3 / 4)
    assert scores["loss"] == pytest.approx(-np.log(truth).mean(), abs=1e-5)
    broken.said("predict --workdir base --input rows.jsonl --out out.csv", *columns)
    lines = pathlib.Path("out.csv").read_text().splitlines()
    assert [line.split(",")[-2] for line in lines[1:]] == labels
    rows[1]["label"] = "entailment"  # its name in the folder
    pathlib.Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    score = "predict --workdir base --score --source jsonl:rows.jsonl --text a --second b"
    broken.fails(score, "rows.jsonl:2", "entailment")


def test_a_cross_encoder_sorts_what_a_search_finds_and_is_served():
    import_model("cross sigmoid")
    scores = RECORDS["cross sigmoid"]["answers"]
    query, text = made.PAIRS[0]
    pathlib.Path("texts").write_text(f"{made.PAIRS[1][1]}\n{text}\n")
    printed = broken.said(["search", "--workdir", "base", "texts", query, "--rerank", "base"])
    assert f"{scores[0]:.3f}  line 2: {text}" in printed
    endpoint = endpoints.PredictEndpoint(TaskModel(open_workdir("base")))
    limits = endpoints.Limits(64, 8, 1 << 20, 30.0, 8)
    items = endpoint.items({"input": [query, text]}, limits)
    (answer,) = endpoint.compute([example for example, _ in items])
    assert answer["ranking"][0]["score"] == pytest.approx(scores[0], abs=1e-5)


@pytest.mark.parametrize(
    ("name", "setting", "texts", "key", "value"),
    [
        ("roberta choice", "task.choice_columns=a,b,c", "peace and of to", "label", "2"),
        ("bert span", "task.no_answer=possible", "who people", "no_answer", None),
        ("bert regress", "task.second_column=b", "who people", "texts", ["who", "people"]),
        ("cross sigmoid", "task.ranking_loss=mse", "peace power", "ranking", None),
    ],
)
def test_a_setting_of_the_import_changes_the_task(name, setting, texts, key, value):
    import_model(name, "--set", setting)
    (answer,) = predict(*texts.split())
    assert value is None or answer[key] == value
    if key == "ranking":  # the output itself: the inverse of the sigmoid
        (other,) = bert_jax.load("hf").predict([texts.split()])
        probability, output = (found["ranking"][0]["score"] for found in (other, answer))
        assert output == pytest.approx(np.log(probability / (1 - probability)), abs=1e-5)
    if key == "no_answer":  # the score of [CLS] minus that of the best answer decides
        assert answer["answer"] == ("" if answer[key] > 0 else answer["best"][0]["answer"])


def test_finetuning_starts_from_the_head_under_its_new_labels():
    import_model("bert classify", "--set", "task.labels=1,2,3")
    rows = [{"sentence": text, "label": i} for i, text in enumerate(made.TEXTS, 1)]
    pathlib.Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = broken.said(
        "finetune --kind classify --train rows.jsonl --validation rows.jsonl --from base "
        "--workdir run --set task.max_sequence_length=66 --set optimizer.peak_learning_rate=1e-12 "
        "--set epochs=1"
    )
    assert "begins with the head" in printed
    found = json.loads(broken.said(["predict", "--workdir", "run", made.TEXTS[0]]))
    expected = RECORDS["bert classify"]["answers"][0]
    np.testing.assert_allclose(list(found["probabilities"].values()), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("bert span", "--kind tag", ("--kind", "span")),
        ("bert classify", "--set task.labels=a,b", ("task.labels", "3 labels")),
        ("bert classify", "--set task.max_sequence_length=99", ("task.max_sequence_length=99",)),
        ("bert regress", "--kind regress --set task.labels=a,b", ("task.labels",)),
    ],
)
def test_an_import_refuses_what_does_not_fit_the_head(name, flags, words):
    write(name)
    broken.fails(f"import hf --workdir base {flags}", *words)
    assert not pathlib.Path("base").exists()


def test_a_base_without_a_head_is_refused_by_name():
    write("bert classify")
    config = RECORDS["bert classify"]["files"]["config.json"]
    several = config | {"problem_type": "multi_label_classification"}
    pathlib.Path("hf/config.json").write_text(json.dumps(several))
    assert "is not imported" in broken.said("import hf --workdir base")
    pathlib.Path("texts").write_text("a\n")
    for command, word in (
        ("predict --workdir base --source jsonl:texts", "--source"),
        ("search --workdir base texts a --rerank base", "--rerank base"),
        ("import hf --workdir other --kind classify", "--kind"),
    ):
        broken.fails(command, word)


def test_settings_of_a_cross_encoder_that_change_its_scores_are_refused():
    write("cross identity")
    settings = RECORDS["cross identity"]["files"]["config_sentence_transformers.json"]
    file = pathlib.Path("hf/config_sentence_transformers.json")
    file.write_text(json.dumps(settings | {"default_prompt_name": "query"}))
    broken.fails("import hf --workdir base", file.name, "default_prompt_name")
    tanh = settings | {"activation_fn": "torch.nn.modules.activation.Tanh"}
    file.write_text(json.dumps(tanh))
    assert "is not imported" in broken.said("import hf --workdir base")

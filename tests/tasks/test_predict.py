"""A fine-tuned run does its task: of typed texts, of sources, over its own base alone."""

import csv
import dataclasses
import gzip
import json
import pathlib
import shutil

import broken
import numpy as np
import pytest
import tuned
from safetensors.numpy import load_file

from bert_jax.storage.mirror import open_workdir
from bert_jax.tasks import examples, finetuned_model, predict, task_objective
from bert_jax.tasks.finetuned_model import TaskModel

# Written by transformers; see tests/interop/make_task_classes.py.
TASK_CLASSES = pathlib.Path(__file__).parents[1] / "interop" / "task_classes"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folders with a base, a task, and its finished run in `run`, by kind."""
    made = {}

    def folder(kind):
        if kind not in made:
            here = tmp_path_factory.mktemp(kind)
            tuned.write_base(here / "base")
            how = {"classify": "lora", "tag": "frozen"}.get(kind, "full")
            tuned.write_task(here, kind, how, epochs=8 if kind == "classify" else 1)
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(here)
                tuned.finetune()
            made[kind] = here
        return made[kind]

    return folder


@pytest.fixture
def run(finished, tmp_path, monkeypatch):
    """A copy of a finished classification by LoRA; the current folder."""
    shutil.copytree(finished("classify"), tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")


def test_typed_texts_are_answered_in_their_order(run):
    asked = ["wa wb", "xb", "wa wc wa", "xd xa"]
    found = tuned.predict(*asked)
    assert [(answer["text"], answer["label"]) for answer in found] == list(
        zip(asked, ["good", "bad"] * 2, strict=True)
    )
    for answer in found:
        assert list(answer["probabilities"]) == ["bad", "good"]
        assert sum(answer["probabilities"].values()) == pytest.approx(1)
        assert max(answer["probabilities"], key=answer["probabilities"].get) == answer["label"]
    typed = tuned.predict(stdin="\n".join(["", *asked, " ", ""]).encode())
    for answer, other in zip(typed, found, strict=True):
        assert answer["text"] == other["text"]
        np.testing.assert_allclose(
            list(answer["probabilities"].values()),
            list(other["probabilities"].values()),
            rtol=1e-5,
        )


def test_answers_to_a_source_are_the_same_in_any_windows(run, monkeypatch):
    # Without labels: they are not read.
    rows = [{"sentence": row["sentence"]} for row in tuned.rows("classify", 11)]
    pathlib.Path("bare").write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = tuned.predict("--source", "jsonl:bare")
    assert [answer["text"] for answer in whole] == [row["sentence"] for row in rows]
    monkeypatch.setattr(finetuned_model, "WINDOW", 3)
    assert tuned.predict("--source", "jsonl:bare", "--out", "answers") == []
    for a, b in zip(whole, tuned.lines("answers"), strict=True):
        assert a["label"] == b["label"]
        assert a["probabilities"]["bad"] == pytest.approx(b["probabilities"]["bad"], rel=1e-5)


def test_examples_are_taken_as_they_are_needed(run, monkeypatch):
    monkeypatch.setattr(finetuned_model, "WINDOW", 2)
    model, taken = TaskModel(open_workdir("run")), 0

    def one_by_one():
        nonlocal taken
        for example in examples.read(model.experiment.task, ("jsonl:test",), "unlabelled"):
            taken += 1
            yield example

    next(model.predict(one_by_one()))
    assert taken == 2


@pytest.mark.long
def test_best_and_numbered_checkpoints_are_chosen_by_name(run):
    evaluations = [x for x in tuned.lines("run/metrics.jsonl") if x["kind"] == "scores"]
    kept = {int(path.name) for path in pathlib.Path("run/checkpoints").iterdir()}
    best = min((x for x in evaluations if x["step"] in kept), key=lambda x: x["loss"])
    (found,) = tuned.predict("--score", "--checkpoint", "best")
    assert found["step"] == best["step"]
    (found,) = tuned.predict("--score", "--checkpoint", str(min(kept)))
    assert found["step"] == min(kept)
    first = TaskModel(open_workdir("run"), None, str(min(kept)))
    assert first.evaluation == next(x for x in evaluations if x["step"] == min(kept))
    assert "step 32: every array" in broken.said("checkpoints run --verify")


@pytest.mark.parametrize(
    "kind",
    [
        "classify",
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("choice", "tag", "span")),
    ],
)
def test_scores_are_those_of_the_last_evaluation_and_of_the_answers(
    finished, kind, monkeypatch, tmp_path
):
    monkeypatch.chdir(finished(kind))
    out = str(tmp_path / "answers")
    (found,) = tuned.predict("--score", "--out", out)
    last = [x for x in tuned.lines("run/metrics.jsonl") if x["kind"] == "scores"][-1]
    assert found == pytest.approx({k: v for k, v in last.items() if k != "kind"}, abs=1e-5)
    answers = tuned.lines(out)
    truth = list(tuned.rows(kind, 11)) if kind != "span" else tuned.questions(11)["data"][0]
    if kind == "tag":
        assert [a["words"] for a in answers] == [t["words"] for t in truth]
        hits = np.array([a["tags"] for a in answers]) == [t["tags"] for t in truth]
    elif kind == "span":
        golds = [[a["text"] for a in p["qas"][0]["answers"]] or [""] for p in truth["paragraphs"]]
        hits = [a["answer"] in gold for a, gold in zip(answers, golds, strict=True)]
        assert [a["id"] for a in answers] == [f"q{i}" for i in range(11)]
    else:
        wanted = ["0" if kind == "choice" else row["label"] for row in truth]
        hits = [a["label"] == label for a, label in zip(answers, wanted, strict=True)]
    assert found["exact_match" if kind == "span" else "accuracy"] == pytest.approx(np.mean(hits))


@pytest.mark.long
def test_no_answer_is_given_above_the_threshold_of_the_checkpoint(finished, monkeypatch, tmp_path):
    shutil.copytree(finished("span"), tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    last = [x for x in tuned.lines("run/metrics.jsonl") if x["kind"] == "scores"][-1]
    for answer in tuned.predict("--source", "squad:test"):
        best, limit = answer["best"][0]["answer"], last["no_answer_threshold"]
        # The threshold may be the score of one of these questions; seven digits of it are printed.
        score = answer["no_answer"]
        above = score > limit and score != pytest.approx(limit, rel=1e-6)
        assert answer["answer"] == ("" if above else best)
    # Typed ones are numbered.
    found = tuned.predict("wa ?", "wb wc", "wa ?", "xa")
    assert [(answer["id"], answer["question"]) for answer in found] == [
        ("1", "wa ?"),
        ("2", "wa ?"),
    ]
    # A checkpoint between two evaluations has none.
    sets = ("run.eval_every=100", "run.keep_checkpoints=9", "run.checkpoint_every=2")
    tuned.finetune("--workdir", "other", *(w for x in sets for w in ("--set", x)))
    code, err = broken.call("predict --workdir other --checkpoint 2 'wa ?' wb")
    assert code == 0 and "step 2 was not evaluated" in err


@pytest.mark.long
def test_a_base_is_found_where_it_lies_now_and_no_other_is_taken(run):
    before = tuned.predict("wa")
    shutil.move("base", "moved")
    words = "predict --workdir run wa"
    broken.fails(words, "the base of run is base: give its current folder with --from")
    assert tuned.predict("--from", "moved", "wa") == before
    tuned.write_base("other", seed=1)
    broken.fails(f"{words} --from other", "other: its weights (", "the base of run")


def test_texts_cannot_command_a_terminal(run):
    out = broken.said(["predict", "--workdir", "run", "wa \x9b2J \u65e5"])
    assert "\x9b" not in out and "\u65e5" in out
    assert json.loads(out)["text"] == "wa \x9b2J \u65e5"


def test_an_exported_run_holds_what_transformers_writes(run, tmp_path):
    says = json.loads((TASK_CLASSES / "says.json").read_text())["bert classify"]
    out = tmp_path / "hf"
    broken.said(f"export --workdir run --out {out}")
    found = load_file(out / "model.safetensors")
    assert {n: list(value.shape) for n, value in found.items()} == says["shapes"]
    written = json.loads((out / "config.json").read_text())
    for name, value in says["config"].items():
        # Ours are of training, and the version is that of transformers.
        if not name.endswith(("dropout_prob", "dropout", "transformers_version")):
            assert written.get(name, value) == value, name
    model = TaskModel(open_workdir("run"))
    adapt = model.experiment.adapt
    merged = task_objective.merged_params(adapt, model.params, model.frozen)
    value = merged["encoder"]["layers"]["value"]["kernel"][0]
    name = "bert.encoder.layer.0.attention.self.value.weight"
    np.testing.assert_array_equal(found["classifier.weight"].T, merged["head"]["kernel"])
    np.testing.assert_array_equal(found[name].T, value)
    says = json.loads((out / "tokenizer_config.json").read_text())
    assert says["model_max_length"] == 30
    card = (out / "README.md").read_text()
    assert f"`{written['architectures'][0]}`" in card and str(tmp_path) not in card


def test_an_adapter_over_its_base_is_the_whole_model_and_cards_have_scores_and_recipe(run):
    for form in ("task", "adapter", "encoder"):
        broken.said(f"export --workdir run --as {form} --out {form}")
        card = pathlib.Path(form, "README.md").read_text()
        assert all(f"\n- {name}: " in card for name in ("accuracy", "task.kind", "epochs")), form
    whole = load_file("task/model.safetensors")
    base, adapter = (
        load_file("adapter/base/model.safetensors"),
        load_file("adapter/adapter_model.safetensors"),
    )
    says = json.loads(pathlib.Path("adapter/adapter_config.json").read_text())
    assert says["base_model_name_or_path"] == "adapter/base" and says["task_type"] == "SEQ_CLS"
    assert not base["classifier.weight"].any() and says["modules_to_save"] == ["classifier"]
    for module in says["target_modules"]:
        a, b = (adapter.pop(f"base_model.model.{module}.lora_{x}.weight") for x in "AB")
        assert b.any()
        base[f"{module}.weight"] += says["lora_alpha"] / says["r"] * (b @ a)
    base |= {name.removeprefix("base_model.model."): value for name, value in adapter.items()}
    assert base.keys() == whole.keys()
    for name, value in whole.items():
        np.testing.assert_allclose(base[name], value, atol=1e-6, err_msg=name)


@pytest.mark.long
def test_a_head_over_the_mean_of_all_pieces_goes_out_and_comes_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tuned.write_base("base", model=dataclasses.replace(tuned.MODEL, kind="modern", global_every=1))
    tuned.write_task(tmp_path, "classify", "frozen")
    texts = ("wa xb wc", "xd")
    tuned.finetune("--set", "adapt.pooling=mean")
    expected = [answer["probabilities"] for answer in tuned.predict(*texts)]
    broken.said("export --workdir run --as task --out hf")
    assert json.loads(pathlib.Path("hf/config.json").read_text())["classifier_pooling"] == "mean"
    broken.said("import hf --workdir again")
    still = ("--from", "again", "--workdir", "run", "--set", "optimizer.peak_learning_rate=1e-9")
    for pooling, says in (("cls", "a fresh head: the base's has pooling mean"), ("", "the head")):
        shutil.rmtree("run")
        assert f"begins with {says}" in tuned.finetune(*still, "--set", f"adapt.pooling={pooling}")
    for answer, wanted in zip(tuned.predict(*texts), expected, strict=True):
        assert answer["probabilities"] == pytest.approx(wanted, abs=1e-5)
    # Again as it was read: a task that says nothing.
    broken.said("export --workdir run --as task --out more")
    assert json.loads(pathlib.Path("more/config.json").read_text())["classifier_pooling"] == "mean"


@pytest.mark.long
def test_what_cannot_be_exported_of_a_fine_tuning_is_named(finished, monkeypatch):
    monkeypatch.chdir(finished("tag"))
    for words, what in (
        ("--workdir run --out base", "base"),
        ("--workdir run --as masked_lm --out new", "--as "),
        ("--workdir run --as adapter --out new --from test", "test"),
        ("--workdir run --as adapter --out new", "adapt.how=frozen"),
        ("--workdir base --as task --out new", "--as task: base is not"),
        ("--workdir base --out new", "--as: choose"),
    ):
        broken.fails(f"export {words}", what)
        assert not pathlib.Path("new").exists()


def table(name, ending, rows_):
    """Writes a file with these columns, the first row their names."""
    if ending == "jsonl":
        text = "".join(
            json.dumps(dict(zip(rows_[0], row, strict=True))) + "\n" for row in rows_[1:]
        )
    else:
        mark = {"csv": ",", "tsv": "\t"}[ending]
        text = "".join(mark.join(row) + "\n" for row in rows_)
    pathlib.Path(f"{name}.{ending}").write_text(text)
    return f"{name}.{ending}"


@pytest.mark.long
@pytest.mark.parametrize(("ending", "other"), [("csv", "csv"), ("tsv", "jsonl"), ("jsonl", "tsv")])
def test_rows_of_a_file_keep_their_columns_and_get_two_more(run, ending, other):
    rows_ = [["id", "sentence", "note"], ["7", "wa wb", "x y"], ["8", "xb xa", "é"]]
    file = table("asked", ending, rows_)
    answers = tuned.predict("wa wb", "xb xa")
    said = broken.said(f"predict --workdir run --input {file} --out found.{other}")
    assert f"found.{other}: 2 rows of {file}; predicted bad 1, good 1" in said
    text = pathlib.Path(f"found.{other}").read_text()
    if other == "jsonl":
        found = [json.loads(line) for line in text.splitlines()]
    else:
        found = list(csv.DictReader(text.splitlines(), delimiter="," if other == "csv" else "\t"))
    for row, answer, given in zip(found, answers, rows_[1:], strict=True):
        assert list(row) == [*rows_[0], "predicted", "probability"]
        assert list(row.values())[:3] == given and row["predicted"] == answer["label"]
        expected = answer["probabilities"][answer["label"]]
        assert float(row["probability"]) == pytest.approx(expected, rel=1e-5)


def test_rows_whose_text_is_blank_have_no_prediction_and_are_counted(run):
    """In a file of one column a blank line is such a row."""
    table("two", "csv", [["sentence", "id"], ["wa", "1"], [" ", "2"], ["xa", "3"]])
    pathlib.Path("one.csv").write_text('sentence\nwa\n\n"xa\nxb"\nxa\n\n')
    expected = {
        "two": [["wa", "1", "good"], [" ", "2", ""], ["xa", "3", "bad"]],
        "one": [["wa", "good"], ["", ""], ["xa\nxb", "bad"], ["xa", "bad"]],
    }
    for name, rows_ in expected.items():
        said = broken.said(f"predict --workdir run --input {name}.csv --out found.csv")
        assert f" 1 ({name}.csv:3)" in said
        with open("found.csv", newline="") as file:
            _, *found = csv.reader(file)
        assert [row[:-1] for row in found] == rows_


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("--next xa wa", "--next: run answers a task"),
        ("--top 3 wa", "--top: run answers a task"),
        ("--score wa", "TEXTS: "),
        ("--source text:test", "'text:test'"),
        ("--source jsonl:blank --out a.jsonl", "blank:2: column 'sentence'"),
        ("--score --source jsonl:strange", "strange:1: label 'odd'"),
        ("--checkpoint 3 wa", "--checkpoint 3"),
        ("--workdir nowhere wa", "nowhere: no run here"),
        ("--workdir begun wa", "no checkpoint yet"),
        ("wa --out base", "base"),
        ("--input test --out a.csv", "--input test: the name does not say which format"),
        ("--input none.csv.gz --out a.csv", "none.csv.gz"),
        ("--source jsonl:test --out test/a.jsonl", "--out test/a.jsonl"),
        ("--source jsonl:test --out base", "--out base"),
        ("--input jsonl:test --out a.xls", "--out a.xls: the name must end in .csv"),
        ("--input jsonl:test", "--input: needs --out"),
        ("--input had.csv --out a.csv", "has a column 'predicted' already"),
        ("--input none.csv --out a.csv", "holds no examples"),
        ("--input odd.jsonl --out a.csv", "odd.jsonl:2"),
        ("--input lines.csv --out a.tsv", "lines.csv:2: a cell holds a tab or a newline"),
        ("--input return.jsonl --out a.tsv", "return.jsonl:1: a cell holds a tab or a newline"),
        ("--input twice.csv --out a.jsonl", "twice.csv:2: two columns have one name"),
    ],
)
def test_what_cannot_be_predicted_is_one_line_and_nothing_is_written(run, words, what):
    table("had", "csv", [["sentence", "predicted"], ["wa", "1"]])
    table("none", "csv", [["sentence"]])
    table("lines", "csv", [["sentence", "id"], ['"wa\nwb"', "1"]])
    table("twice", "csv", [["sentence", "", ""], ["wa", "1", "2"]])
    pathlib.Path("return.jsonl").write_text('{"sentence": "wa\\rwb"}\n')
    pathlib.Path("odd.jsonl").write_text('{"sentence": "wa"}\n{"sentence": "wa", "id": 1}\n')
    pathlib.Path("blank").write_text('{"sentence": "wa"}\n{"sentence": " "}\n')
    pathlib.Path("strange").write_text('{"sentence": "wa", "label": "odd"}\n')
    shutil.copytree("run", "begun", ignore=shutil.ignore_patterns("checkpoints"))
    broken.fails(f"predict --workdir run {words}", what)
    assert not list(pathlib.Path().glob("a.*"))


@pytest.mark.parametrize("flag", ["--pooling cls", "--layers 0", "--max-length 9", "--normalize"])
def test_a_task_is_not_served_as_vectors(flag, run, monkeypatch):
    monkeypatch.setattr("bert_jax.serve.service.serve", lambda *_: None)
    broken.fails(f"serve --workdir run --port 0 {flag}", flag.split()[0])


@pytest.mark.long
def test_files_may_have_other_columns_than_those_of_training(run):
    """As CoLA's test file has."""
    answers = tuned.predict("wa wb", "xb xa")
    pathlib.Path("bare.tsv").write_text("7\twa wb\n8\txb xa\n")
    pathlib.Path("named.tsv").write_text("id\ttext\n7\twa wb\n8\txb xa\n")
    for flags in ("bare.tsv --header none --text 1", "named.tsv --text text"):
        found = tuned.predict("--source", *f"tsv:{flags}".split())
        assert [answer["label"] for answer in found] == [answer["label"] for answer in answers]
        broken.said(f"predict --workdir run --out found.csv --input {flags}")
        with open("found.csv", newline="") as file:
            rows_ = list(csv.reader(file))[-2:]
        assert [row[2] for row in rows_] == [answer["label"] for answer in answers]
    for flags, what in (
        ("--source tsv:bare.tsv --header none --text 2", "bare.tsv:1: no column '2'"),
        ("--source tsv:named.tsv --second id", "--second"),
        ("--header none wa", "--header"),
        ("--workdir base --broken-rows skip wa", "--broken-rows"),
    ):
        broken.fails(f"predict --workdir run {flags}", what)


def test_compressed_files_are_known_by_the_name_before(run):
    text = gzip.compress(b"sentence,id\nwa wb,1\n")
    pathlib.Path("asked.csv.gz").write_bytes(text)
    broken.said("predict --workdir run --input asked.csv.gz --out found.csv")
    (row,) = csv.DictReader(pathlib.Path("found.csv").read_text().splitlines())
    assert (row["sentence"], row["predicted"]) == ("wa wb", "good")


def test_an_exported_run_that_is_imported_answers_as_the_run(run):
    broken.said("export --workdir run --out theirs")
    broken.said("import theirs --workdir again")
    (found,), (expected,) = (
        [json.loads(broken.said(f"predict --workdir {folder} 'wa xb'"))]
        for folder in ("again", "run")
    )
    assert found["label"] == expected["label"]
    assert found["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-5)
    broken.fails("predict --workdir again wa --next wb", "--next")
    broken.fails("predict --workdir again wa --from base", "--from")
    broken.fails("predict --workdir again wa --checkpoint best", "--checkpoint")


def test_broken_rows_of_a_file_are_left_out_and_named(run):
    pathlib.Path("a.tsv").write_text("sentence\tlabel\nwa wb\tgood\nxb\nxb xa\t-\nxa\tbad\n")
    words = "predict --workdir run --broken-rows skip"
    _, out, err = broken.asked(f"{words} --score --source tsv:a.tsv")
    assert json.loads(out)["examples"] == 2 and "2 (a.tsv:3, a.tsv:4)" in err
    _, out, err = broken.asked(f"{words} --input a.tsv --out found.tsv")
    assert "3 rows of a.tsv" in out and "1 (a.tsv:3)" in err
    broken.fails("predict --workdir run --score --source tsv:a.tsv", "a.tsv:3")


def test_several_files_have_a_score_each(run):
    table("right", "csv", [["sentence", "label"], ["wa wb", "good"], ["xb xa", "bad"]])
    table("wrong", "csv", [["sentence", "label"], ["xb xa", "good"], ["xa", "bad"]])
    (found,) = tuned.predict("--score", "--source", "csv:right.csv", "--source", "csv:wrong.csv")
    assert (found["accuracy"], found["score"], found["examples"]) == (0.75, 0.75, 4)
    assert (found["accuracy/right"], found["accuracy/wrong"]) == (1.0, 0.5)
    (found,) = tuned.predict("--score", "--source", "csv:right.csv")
    assert not [name for name in found if "/" in name]


def test_numbers_that_json_cannot_hold_are_refused_by_line(run):
    pathlib.Path("large.jsonl").write_text('{"sentence": "wa"}\n{"sentence": "wa", "n": [1e400]}\n')
    broken.fails("predict --workdir run --input large.jsonl --out found.jsonl", "large.jsonl:2")


def test_json_lines_may_have_any_order_a_return_and_half_a_character(run):
    lines = ['{"sentence": "wa\\rwb", "id": 1}', '{"id": 2, "sentence": "xa \\ud83d"}']
    pathlib.Path("asked.jsonl").write_text("\n".join(lines) + "\n")
    for out in ("found.csv", "found.jsonl"):
        broken.said(f"predict --workdir run --input asked.jsonl --out {out}")
    with open("found.csv", newline="") as file:
        rows_ = list(csv.DictReader(file))
    assert [row["id"] for row in rows_] == ["1", "2"] and rows_[0]["sentence"] == "wa\rwb"
    found = [json.loads(line) for line in pathlib.Path("found.jsonl").read_text().splitlines()]
    assert found[1]["sentence"] == "xa \ud83d"


def test_what_is_printed_has_the_digits_that_float32_holds():
    value = {"a": [1 / 3, 1e-9 / 3, 2], "b": "1.23456789", "c": {"d": 123456.789012}}
    shown = {"a": [0.3333333, 3.333333e-10, 2], "b": "1.23456789", "c": {"d": 123456.8}}
    assert predict._rounded(value) == shown

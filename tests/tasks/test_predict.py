"""A fine-tuned run does its task: of typed texts, of sources, over its own base alone."""

import csv
import io
import json
import pathlib
import shutil
import sys

import numpy as np
import pytest
import tuned
from safetensors.numpy import load_file

from bert_jax import cli
from bert_jax.errors import InputError
from bert_jax.tasks import examples, objective, predict, rows
from bert_jax.tasks.predict import TaskModel

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
                assert tuned.finetune() == 0
            made[kind] = here
        return made[kind]

    return folder


@pytest.fixture
def run(finished, tmp_path, monkeypatch):
    """A copy of a finished classification by LoRA; the current folder."""
    shutil.copytree(finished("classify"), tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")


def typed(monkeypatch, text):
    stdin = io.TextIOWrapper(io.BytesIO(text.encode()))
    monkeypatch.setattr(sys, "stdin", stdin)


def test_typed_texts_are_answered_in_their_order(run, capsys, monkeypatch):
    asked = ["wa wb", "xb", "wa wc wa", "xd xa"]
    found = tuned.predict(capsys, *asked)
    assert [(answer["text"], answer["label"]) for answer in found] == list(
        zip(asked, ["good", "bad"] * 2, strict=True)
    )
    for answer in found:
        assert list(answer["probabilities"]) == ["bad", "good"]
        assert sum(answer["probabilities"].values()) == pytest.approx(1)
        assert max(answer["probabilities"], key=answer["probabilities"].get) == answer["label"]
    typed(monkeypatch, "\n".join(["", *asked, " ", ""]))
    for answer, other in zip(tuned.predict(capsys), found, strict=True):
        assert answer["text"] == other["text"]
        np.testing.assert_allclose(
            list(answer["probabilities"].values()),
            list(other["probabilities"].values()),
            rtol=1e-5,
        )


def test_answers_to_a_source_are_the_same_in_any_windows(run, capsys, monkeypatch):
    # Without labels: they are not read.
    rows = [{"sentence": row["sentence"]} for row in tuned.rows("classify", 11)]
    pathlib.Path("bare").write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = tuned.predict(capsys, "--source", "jsonl:bare")
    assert [answer["text"] for answer in whole] == [row["sentence"] for row in rows]
    monkeypatch.setattr(predict, "WINDOW", 3)
    assert tuned.predict(capsys, "--source", "jsonl:bare", "--out", "answers") == []
    for a, b in zip(whole, tuned.lines("answers"), strict=True):
        assert a["label"] == b["label"]
        assert a["probabilities"]["bad"] == pytest.approx(b["probabilities"]["bad"], rel=1e-5)


def test_examples_are_taken_as_they_are_needed(run, monkeypatch):
    monkeypatch.setattr(predict, "WINDOW", 2)
    model, taken = TaskModel("run"), 0

    def one_by_one():
        nonlocal taken
        for example in examples.read(model.experiment.task, ("jsonl:test",), "unlabelled"):
            taken += 1
            yield example

    next(model.predict(one_by_one()))
    assert taken == 2


def test_best_and_numbered_checkpoints_are_chosen_by_name(run, capsys):
    evaluations = [x for x in tuned.lines("run/metrics.jsonl") if x["kind"] == "scores"]
    kept = {int(path.name) for path in pathlib.Path("run/checkpoints").iterdir()}
    best = min((x for x in evaluations if x["step"] in kept), key=lambda x: x["loss"])
    (found,) = tuned.predict(capsys, "--score", "--checkpoint", "best")
    assert found["step"] == best["step"]
    (found,) = tuned.predict(capsys, "--score", "--checkpoint", str(min(kept)))
    assert found["step"] == min(kept)
    (line,) = tuned.predict(capsys, "--checkpoint", "3", "wa", code=2)
    assert "--checkpoint 3" in line


@pytest.mark.parametrize(
    "kind", ["classify", pytest.param("choice", marks=pytest.mark.long), "tag", "span"]
)
def test_scores_are_those_of_the_last_evaluation_and_of_the_answers(
    finished, kind, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(finished(kind))
    out = str(tmp_path / "answers")
    (found,) = tuned.predict(capsys, "--score", "--out", out)
    last = [x for x in tuned.lines("run/metrics.jsonl") if x["kind"] == "scores"][-1]
    assert found == pytest.approx({k: v for k, v in last.items() if k != "kind"}, abs=1e-5)
    answers, truth = tuned.lines(out), list(tuned.rows(kind, 11))
    if kind == "classify":
        hits = [a["label"] == t["label"] for a, t in zip(answers, truth, strict=True)]
        assert found["accuracy"] == pytest.approx(np.mean(hits))
    elif kind == "choice":
        hits = [a["label"] == "0" for a in answers]
        assert found["accuracy"] == pytest.approx(np.mean(hits))
        assert answers[0]["texts"] == [truth[0][name] for name in ("sentence", "b", "c")]
    elif kind == "tag":
        assert [a["words"] for a in answers] == [t["words"] for t in truth]
        hits = [
            a == b
            for x, t in zip(answers, truth, strict=True)
            for a, b in zip(x["tags"], t["tags"], strict=True)
        ]
        assert found["accuracy"] == pytest.approx(np.mean(hits))
    else:
        paragraphs = tuned.questions(11)["data"][0]["paragraphs"]
        golds = [[a["text"] for a in p["qas"][0]["answers"]] or [""] for p in paragraphs]
        hits = [a["answer"] in gold for a, gold in zip(answers, golds, strict=True)]
        assert found["exact_match"] == pytest.approx(np.mean(hits))
        assert [a["id"] for a in answers] == [f"q{i}" for i in range(11)]


def test_no_answer_is_given_above_the_threshold_of_the_checkpoint(
    finished, capsys, monkeypatch, tmp_path
):
    shutil.copytree(finished("span"), tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    last = [x for x in tuned.lines("run/metrics.jsonl") if x["kind"] == "scores"][-1]
    for answer in tuned.predict(capsys, "--source", "squad:test"):
        best, limit = answer["best"][0]["answer"], last["no_answer_threshold"]
        # The threshold may be the score of one of these questions; seven digits of it are printed.
        score = answer["no_answer"]
        above = score > limit and score != pytest.approx(limit, rel=1e-6)
        assert answer["answer"] == ("" if above else best)
    # Typed ones are numbered.
    found = tuned.predict(capsys, "wa ?", "wb wc", "wa ?", "xa")
    assert [(answer["id"], answer["question"]) for answer in found] == [
        ("1", "wa ?"),
        ("2", "wa ?"),
    ]
    # A checkpoint between two evaluations has none.
    code = tuned.finetune(
        "--set",
        "run.eval_every=100",
        "--set",
        "run.keep_checkpoints=9",
        "--workdir",
        "other",
        "--set",
        "run.checkpoint_every=2",
    )
    assert code == 0
    assert cli.main(["predict", "--workdir", "other", "--checkpoint", "2", "wa ?", "wb"]) == 0
    assert "step 2 was not evaluated" in capsys.readouterr().err


def test_a_base_is_found_where_it_lies_now(run, capsys):
    before = tuned.predict(capsys, "wa")
    shutil.move("base", "moved")
    (line,) = tuned.predict(capsys, "wa", code=2)
    assert "run adapts base: name with --from the folder it is in now" in line
    assert tuned.predict(capsys, "--from", "moved", "wa") == before


def test_an_adapter_over_another_base_is_refused_by_both_names(run, capsys):
    tuned.write_base("other", seed=1)
    (line,) = tuned.predict(capsys, "--from", "other", "wa", code=2)
    assert "other: holds other weights" in line and "those that run adapts" in line


def test_other_labels_are_refused_by_name(run, capsys):
    text = pathlib.Path("train").read_text().replace('"good"', '"fine"', 2)
    pathlib.Path("train").write_text(text)
    assert tuned.finetune() == 2
    err = capsys.readouterr().err
    assert "run: this run learned the labels 'bad', 'good', and those of" in err
    assert "are 'bad', 'fine', 'good'" in err


def test_a_label_that_was_not_learned_has_no_score(run, capsys):
    pathlib.Path("odd").write_text('{"sentence": "wa", "label": "odd"}\n')
    (line,) = tuned.predict(capsys, "--score", "--source", "jsonl:odd", code=2)
    assert "odd:1: label 'odd' is none of 'bad', 'good'" in line


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--next", "xa", "wa"], "--next: run: "),
        (["--top", "3", "wa"], "--top: run: "),
        (["--score", "wa"], "TEXT: --source and --score"),
        (["--source", "text:test"], "'text:test'"),
        (["--source", "jsonl:nowhere"], "nowhere"),
        (["wa", " "], "TEXT 2: text 1 is blank"),
        (["wa", "--out", "base"], "base"),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_one_line(run, capsys, words, what):
    (line,) = tuned.predict(capsys, *words, code=2)
    assert what in line


def test_answers_are_written_whole_or_not_at_all(run, capsys):
    pathlib.Path("half").write_text('{"sentence": "wa"}\n{"sentence": " "}\n')
    tuned.predict(capsys, "--source", "jsonl:half", "--out", "answers", code=2)
    assert not pathlib.Path("answers").exists()


def test_texts_cannot_command_a_terminal(run, capsys):
    assert cli.main(["predict", "--workdir", "run", "wa \x9b2J \u65e5"]) == 0
    out = capsys.readouterr().out
    assert "\x9b" not in out and "\u65e5" in out
    assert json.loads(out)["text"] == "wa \x9b2J \u65e5"


def test_nothing_here_or_a_run_hardly_begun_is_named(run, capsys):
    shutil.rmtree("run/checkpoints")
    (line,) = tuned.predict(capsys, "wa", code=2)
    assert "no checkpoint yet" in line
    with pytest.raises(InputError, match="nowhere: no run here"):
        TaskModel("nowhere")


def test_checkpoints_of_a_task_are_listed_and_verified(run, capsys):
    capsys.readouterr()
    assert cli.main(["checkpoints", "run", "--verify"]) == 0
    out = capsys.readouterr().out
    assert "the run is finished" in out and "step 32: every array is what was saved" in out


@pytest.mark.parametrize("kind", ["classify", "tag", "span"])
def test_an_exported_run_holds_what_transformers_writes(finished, kind, monkeypatch, tmp_path):
    monkeypatch.chdir(finished(kind))
    says = json.loads((TASK_CLASSES / "says.json").read_text())[f"bert {kind}"]
    out = tmp_path / "hf"
    assert cli.main(["export", "--workdir", "run", "--out", str(out)]) == 0
    found = load_file(out / "model.safetensors")
    assert {n: list(value.shape) for n, value in found.items()} == says["shapes"]
    written = json.loads((out / "config.json").read_text())
    for name, value in says["config"].items():
        # Ours are of training, and the version is that of transformers.
        if not name.endswith(("dropout_prob", "dropout", "transformers_version")):
            assert written.get(name, value) == value, name
    model = TaskModel("run")
    adapt = model.experiment.adapt
    merged = objective.merged_params(adapt, model.params, model.fixed)
    head = "qa_outputs" if kind == "span" else "classifier"
    np.testing.assert_array_equal(found[f"{head}.weight"].T, merged["head"]["kernel"])
    value = merged["encoder"]["layers"]["value"]["kernel"][0]
    np.testing.assert_array_equal(
        found["bert.encoder.layer.0.attention.self.value.weight"].T, value
    )
    says = json.loads((out / "tokenizer_config.json").read_text())
    assert says["model_max_length"] == 30
    card = (out / "README.md").read_text()
    assert f"`{written['architectures'][0]}`" in card and str(finished(kind)) not in card


def test_an_adapter_over_its_base_is_the_whole_model(run, capsys):
    for form in ("task", "adapter"):
        assert cli.main(["export", "--workdir", "run", "--as", form, "--out", form]) == 0
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


def test_what_cannot_be_exported_of_a_fine_tuning_is_named(finished, run, capsys, monkeypatch):
    (pathlib.Path("there")).mkdir()
    for words, code, what in (
        (["--out", "there"], 2, "there"),
        (["--as", "encoder", "--out", "new"], 2, "--as task"),
        (["--as", "adapter", "--out", "new", "--from", "test"], 2, "test"),
    ):
        assert cli.main(["export", "--workdir", "run", *words]) == code
        assert what in capsys.readouterr().err
    monkeypatch.chdir(finished("tag"))
    assert cli.main(["export", "--workdir", "run", "--as", "adapter", "--out", "new"]) == 2
    assert "--as adapter: small learned with adapt.how=frozen" in capsys.readouterr().err
    for words, what in ((["--as", "task"], "--as task: base is not"), ([], "--as: choose")):
        assert cli.main(["export", "--workdir", "base", *words, "--out", "new"]) == 2
        assert what in capsys.readouterr().err
    assert not pathlib.Path("new").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "--workdir", "run"],
        ["plan", "--workdir", "run", "--topology", "v5e:2x2"],
        ["import", "run", "--workdir", "there"],
        ["finetune", "task.py", "--from", "run", "--workdir", "there"],
        ["pretrain", "task.py"],
    ],
)
def test_what_takes_no_fine_tuning_names_what_does(run, capsys, words):
    capsys.readouterr()
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is a fine-tuning, not a pre-training; `bert-jax finetune` takes it" in line
    assert not pathlib.Path("there").exists()


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


@pytest.mark.parametrize(("ending", "other"), [("csv", "csv"), ("tsv", "jsonl"), ("jsonl", "tsv")])
def test_rows_of_a_file_keep_their_columns_and_get_two_more(run, capsys, ending, other):
    rows_ = [["id", "sentence", "note"], ["7", "wa wb", "x y"], ["8", "xb xa", "é"]]
    file = table("asked", ending, rows_)
    answers = tuned.predict(capsys, "wa wb", "xb xa")
    words = ["--workdir", "run", "--input", file, "--out", f"found.{other}"]
    assert cli.main(["predict", *words]) == 0
    said = capsys.readouterr().out
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


def test_a_blank_line_of_one_column_is_a_row_and_nobody_s_code_is_named(run, capsys):
    pathlib.Path("one.csv").write_text('sentence\nwa\n\n"xa\nxb"\nxa\n\n')
    pathlib.Path("own.py").write_text("1\n")
    words = ["predict", "--workdir", "run", "--input", "one.csv", "--out", "found.csv"]
    assert cli.main([*words, "--code", "own.py"]) == 0
    said = capsys.readouterr()
    assert "4 rows of one.csv" in said.out and "for 1 of them (the first at one.csv:3)" in said.out
    assert said.err == "--code own.py: this command uses no code of it; leave it out\n"
    with open("found.csv", newline="") as file:
        _, *rows_ = csv.reader(file)
    assert [row[:2] for row in rows_] == [
        *(["wa", "good"], ["", ""], ["xa\nxb", "bad"], ["xa", "bad"]),
    ]


def test_a_batch_is_as_large_as_the_largest_window_yet(run, monkeypatch):
    sizes = []
    made = rows.eval_batches
    monkeypatch.setattr(rows, "eval_batches", lambda *given: sizes.append(given[2]) or made(*given))
    model = TaskModel("run", None, "newest")
    for texts in (["wa"], ["wa"] * 9, ["wa"] * 2):
        list(model.predict(examples.parse_arguments(model.experiment.task, texts)))
    assert sizes[1] == sizes[2] > sizes[0]


def test_rows_whose_text_is_blank_have_no_prediction_and_are_counted(run, capsys):
    file = table("asked", "csv", [["sentence", "id"], ["wa", "1"], [" ", "2"], ["xa", "3"]])
    words = ["predict", "--workdir", "run", "--input", file, "--out", "found.csv"]
    assert cli.main(words) == 0
    assert "for 1 of them (the first at asked.csv:3)" in capsys.readouterr().out
    _, *rows_ = csv.reader(pathlib.Path("found.csv").read_text().splitlines())
    assert [row[:3] for row in rows_] == [["wa", "1", "good"], [" ", "2", ""], ["xa", "3", "bad"]]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--input", "test", "--out", "a.csv"], "--input test: the name does not say which format"),
        (["--input", "jsonl:test", "--out", "a.xls"], "--out a.xls: end its name in .csv"),
        (["--input", "jsonl:test"], "--input: needs --out"),
        (["--input", "jsonl:test", "--out", "a.csv", "wa"], "--input: needs --out"),
        (["--input", "had.csv", "--out", "a.csv"], "has a column 'predicted' already"),
        (["--input", "none.csv", "--out", "a.csv"], "holds no examples"),
        (["--input", "odd.jsonl", "--out", "a.csv"], "odd.jsonl:2: has other columns"),
        (["--input", "twice.csv", "--out", "a.jsonl"], "twice.csv:2: two columns have one name"),
    ],
)
def test_tables_that_cannot_be_written_are_refused_and_nothing_is_left(run, capsys, words, what):
    table("had", "csv", [["sentence", "predicted"], ["wa", "1"]])
    table("none", "csv", [["sentence"]])
    table("twice", "csv", [["sentence", "", ""], ["wa", "1", "2"]])
    pathlib.Path("odd.jsonl").write_text('{"sentence": "wa"}\n{"sentence": "wa", "id": 1}\n')
    (line,) = tuned.predict(capsys, *words, code=2)
    assert what in line
    assert not list(pathlib.Path().glob("a.*"))


def test_json_lines_may_have_any_order_and_half_a_character(run, capsys):
    lines = ['{"sentence": "wa", "id": 1}', '{"id": 2, "sentence": "xa \\ud83d"}']
    pathlib.Path("asked.jsonl").write_text("\n".join(lines) + "\n")
    for out in ("found.csv", "found.jsonl"):
        assert (
            cli.main(["predict", "--workdir", "run", "--input", "asked.jsonl", "--out", out]) == 0
        )
    rows_ = list(csv.DictReader(pathlib.Path("found.csv").read_text().splitlines()))
    assert [row["id"] for row in rows_] == ["1", "2"]
    found = [json.loads(line) for line in pathlib.Path("found.jsonl").read_text().splitlines()]
    assert found[1]["sentence"] == "xa \ud83d"


def test_what_is_printed_has_the_digits_that_float32_holds():
    value = {"a": [1 / 3, 1e-9 / 3, 2], "b": "1.23456789", "c": {"d": 123456.789012}}
    shown = {"a": [0.3333333, 3.333333e-10, 2], "b": "1.23456789", "c": {"d": 123456.8}}
    assert predict._rounded(value) == shown

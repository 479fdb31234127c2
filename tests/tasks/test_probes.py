"""What a linear layer reads off an encoder while it is pre-trained."""

import functools
import json

import broken
import jax
import kinds
import numpy as np
import pytest
import samples
from compare import assert_close
from small_run import final_state, pretrain, write_text

from bert_jax.config import Parallelism
from bert_jax.errors import InputError
from bert_jax.pretraining import evaluators
from bert_jax.storage.json_lines import JsonLines
from bert_jax.tasks import probes
from bert_jax.tasks.adaptation import ModelRunner, run_rows
from bert_jax.tasks.similar import Similar
from bert_jax.training.objective import Pretraining


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Text, an experiment, and a task of each kind: is a word of the w's or the x's?"""
    folder = tmp_path_factory.mktemp("probed")
    write_text(folder)
    rng = np.random.default_rng(0)

    def words(letter):
        return [f"{letter}{chr(97 + i)}" for i in rng.integers(0, 19, 4)]

    for name, count in (("train", 28), ("test", 16)):
        lines = []
        for i in range(count):
            first, second = "wx"[i % 2], "wx"[i // 2 % 2]
            lines.append(
                {
                    "sentence": " ".join(words(first)),
                    "b": " ".join(words(second)),
                    "label": first,
                    "same": first == second,
                    "value": float(first == second),
                    "words": [*words(first)[:2], *words(second)[:2]],
                    "tags": [first, first, second, second],
                }
            )
        (folder / name).write_text("\n".join(map(json.dumps, lines)) + "\n")
    pairs = [{"good": "wa", "bad": f"xa {'wb ' * i}", "of": f"p{i % 3}"} for i in range(9)]
    (folder / "goods").write_text("\n".join(map(json.dumps, pairs)) + "\n")
    (folder / "same").write_text('{"sentence": "wa", "b": "wb", "same": 1}\n')

    def write(name, train="train", test="test", **fields):
        sources = {"train": (f"jsonl:{folder}/{train}",), "validation": (f"jsonl:{folder}/{test}",)}
        kinds.write_task_file(folder / f"{name}.py", **sources, **fields)

    same = {"kind": "pair", "second_column": "b", "label_column": "same"}
    write("letters", kind="classify")
    write("pairs", **same)
    write("words", kind="tag", text_column="words", label_column="tags", score="accuracy")
    write("values", kind="regress", second_column="b")
    write("alike", "same", "same", **same)
    goods = {"kind": "minimal_pairs", "validation": (f"jsonl:{folder}/goods",)}
    columns = {"text_column": "good", "second_column": "bad", "label_column": "of"}
    kinds.write_task_file(folder / "minimal.py", **goods, **columns)
    return folder


def probed(folder, *names):
    return "run.probes=" + ",".join(str(folder / f"{name}.py") for name in names)


def lines(workdir):
    return [
        line for line in JsonLines(workdir / "metrics.jsonl").read() if line["kind"] == "probes"
    ]


@pytest.mark.parametrize("size", [1, 3, 8])
def test_examples_of_two_texts_are_whole_on_any_devices(size):
    reader = ModelRunner(kinds.MODEL, kinds.TOKENIZER, Parallelism(), samples.mesh_of(3), size)
    kind = Similar(kinds.task("regress"), (), kinds.TOKENIZER)
    batches = reader.batches(kind.rows([kinds.sentence("wa", "wb")] * 5))
    assert {len(batch["input_ids"]) for _, batch in batches} == {-(-size // 6) * 6}
    assert [i for which, _ in batches for i in which] == list(range(10))


def test_features_of_a_text_do_not_depend_on_the_rows_beside_it():
    reader = ModelRunner(kinds.MODEL, kinds.TOKENIZER, Parallelism(), samples.mesh_of(1), 8)
    kind = kinds.kind_of("classify")
    params = Pretraining(kinds.MODEL).init_params(jax.random.key(0))
    features_of_rows = probes.jit_features(reader, "pooled", "all")
    features = []
    for others in ([], [kinds.sentence("wa " * 12)]):
        rows = kind.rows([kinds.sentence("wa wb"), *others])
        run = functools.partial(features_of_rows, params, None)
        features.append(run_rows(run, reader.batches(rows), rows, reader.mesh)[0])
    assert_close(*features, 1e-6)


def test_ridge_takes_the_penalty_that_does_best_on_rows_left_out():
    """Each row left out and the rest solved again by NumPy, for every penalty."""
    rng = np.random.default_rng(1)
    classes = rng.integers(0, 3, 40)
    features = rng.normal(size=(40, 12)) + 0.4 * np.eye(12)[classes]
    features[:, 5] = 7.0  # constant: nothing is to be read there
    weights, bias = probes.ridge(features, classes, 3)

    live = np.delete(features, 5, axis=1)
    scaled = (live - live.mean(0)) / live.std(0)
    wanted = np.eye(3)[classes]

    def solved(rows, penalty):
        # The bias is a column of ones without a penalty.
        design = np.hstack([scaled[rows], np.ones((len(rows), 1))])
        pull = penalty * np.diag([1.0] * 11 + [0.0])
        return np.linalg.solve(design.T @ design + pull, design.T @ wanted[rows])

    def left_out(penalty):
        found = 0.0
        for row in range(40):
            solution = solved(np.delete(np.arange(40), row), penalty)
            found += np.square(wanted[row] - np.append(scaled[row], 1) @ solution).sum()
        return found

    best = min((share * 40 for share in (1e-3, 1e-2, 1e-1, 1.0, 10.0)), key=left_out)
    expected = np.hstack([scaled, np.ones((40, 1))]) @ solved(np.arange(40), best)
    np.testing.assert_allclose(features @ weights + bias, expected, atol=1e-9)


@pytest.mark.long
def test_probes_run_before_between_and_after_and_change_nothing(folder, finished_run, tmp_path):
    """Against the same run without them."""
    asked = probed(folder, "letters", "pairs", "words", "minimal")
    outcome, shown = pretrain(folder / "small.py", tmp_path / "with", asked, "run.probe_share=1")
    assert outcome == "finished" and "letters (accuracy; 28 examples to learn from, 16" in shown
    assert "minimal (9 minimal pairs)" in shown
    found = lines(tmp_path / "with")
    # Asking costs as much as some steps: less than the whole run, more than to the middle.
    assert [line["step"] for line in found] == [0, 18, 22]
    names = ["letters", "pairs", "words", "minimal"]
    for line in found:
        assert list(line["scores"]) == names and line["majority"] == dict.fromkeys(names, 0.5)
        answer = line["minimal_pairs"]["minimal"]
        assert line["scores"]["minimal"] == answer["accuracy"]
        assert list(answer["paradigms"]) == ["p0", "p1", "p2"]
    # Which words there are is in their embeddings from the start.
    assert found[0]["scores"]["letters"] > 0.75 and found[0]["scores"]["words"] > 0.6
    workdirs = tmp_path / "with", finished_run / "run"
    with_, without = (JsonLines(workdir / "metrics.jsonl").read() for workdir in workdirs)
    assert [line for line in with_ if line["kind"] != "probes"] == without
    states = [final_state(workdir)[1]["params"] for workdir in workdirs]
    word = [state["encoder"]["embeddings"]["word"]["embedding"] for state in states]
    np.testing.assert_array_equal(*word)
    timings = JsonLines(tmp_path / "with" / "timings.jsonl").read()
    assert sum(line.get("probes_seconds", 0) > 0 for line in timings) >= 2
    broken.said(f"report {tmp_path}/with")
    page = (tmp_path / "with" / "report.html").read_text()
    for words in ("on the frozen encoder", "Probe letters", ">majority<", "Minimal pairs minimal"):
        assert words in page, words


def test_probes_that_were_added_since_the_first_step_are_not_compared():
    line = {"kind": "probes", "scores": {"a": 0.5, "b": 0.5}, "similar": {"a": {}, "b": {}}}
    later = {"step": 3, "kind": "probes", "scores": {"a": 0.9, "b": 0.9}}
    first = {"step": 0, "kind": "probes", "scores": {"a": 0.52}}
    assert evaluators.similarity_warning(line, [later], "base") == ""
    warning = evaluators.similarity_warning(line, [first, later], "base")
    assert "; a was 0.5200 in base" in warning and "b was" not in warning


@pytest.mark.long
def test_what_cannot_be_evaluated_is_not_probed(folder, tmp_path, monkeypatch):
    """A probe of parameters that ran away would end the run by another name."""
    monkeypatch.setattr(evaluators.HeldOutRows, "evaluate", lambda *_: {"loss": float("nan")})
    pretrain(folder / "small.py", tmp_path / "w", probed(folder, "letters"), "run.probe_share=1")
    assert [line["step"] for line in lines(tmp_path / "w")] == [0]


def test_an_encoder_that_gives_no_numbers_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "run_rows", lambda *of: [np.full(3, np.nan)] * 28)
    with pytest.raises(InputError, match=r"run\.probes: letters: .* not finite"):
        pretrain(folder / "small.py", tmp_path / "w", probed(folder, "letters"))


def test_processes_with_other_examples_are_known_by_their_hash(folder):
    """By the hash that they compare."""
    hashes = {
        probes.Probes([str(folder / f"{name}.py") for name in names]).sha256
        for names in (("letters",), ("pairs",), ("letters", "pairs"), ("letters",), ("minimal",))
    }
    assert len(hashes) == 4


def test_a_task_is_scored_on_files_with_other_columns(tmp_path):
    (tmp_path / "bare.tsv").write_text("wa\tgood\nxb\tbad\nxa\n")
    source = (f"tsv:{tmp_path}/bare.tsv",)
    fields = {"kind": "classify", "train": source, "validation": source}
    file = str(kinds.write_task_file(tmp_path / "letters.py", **fields))
    other = {"header": "none", "text_column": "0", "label_column": "1", "broken_rows": "skip"}
    (probe,) = probes.Probes([file], fields=other).probes
    assert [(e.texts, e.label) for e in probe.train] == [(("wa",), "good"), (("xb",), "bad")]
    for fields, named in (({}, "'sentence'"), ({"second_column": "2"}, "task.second_column")):
        with pytest.raises(InputError, match=named) as caught:
            probes.Probes([file], fields=fields)
        assert file in str(caught.value)


def test_what_cannot_be_a_probe_is_named(folder):
    for names, message in (
        (("values",), "task.kind=regress is not supported"),
        (("letters", "letters"), "two tasks have the name 'letters'"),
        (("nowhere",), "run.probes takes files of tasks: "),
        (("alike",), "alike.py: task.train: 'same' has only one label"),
        (("small",), "small.py: is a pre-training, not a fine-tuning; "),
    ):
        with pytest.raises(InputError) as caught:
            probes.Probes([str(folder / f"{name}.py") for name in names])
        assert message in str(caught.value) and "\n" not in str(caught.value)

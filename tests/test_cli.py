"""The commands, as a user types them."""

import io
import json
import shutil
import sys

import pytest
from small_run import write_text

from bert_jax import cli, config, loaded
from bert_jax.running import environment, evaluators
from bert_jax.running.pretraining import Prepared
from bert_jax.storage.workdir import Workdir
from bert_jax.text import tokenizer
from bert_jax.training import mesh as mesh_lib


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run: (folder, experiment file, workdir)."""
    folder = tmp_path_factory.mktemp("cli")
    file = write_text(folder)
    workdir = folder / "run"
    assert cli.main(["pretrain", str(file), "--workdir", str(workdir)]) == 0
    return folder, file, workdir


def call(capsys, *args, stdin: bytes = b"", monkeypatch=None):
    """Exit code, standard output, standard error."""
    if monkeypatch is not None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, write_through=True))
        code = cli.main([str(arg) for arg in args])
        return code, raw.getvalue(), capsys.readouterr().err
    capsys.readouterr()
    code = cli.main([str(arg) for arg in args])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_help_shows_the_exit_codes_of_the_command(capsys):
    for args, runs, own in (
        (["--help"], True, ""),
        (["pretrain", "--help"], True, ""),
        (["doctor", "--help"], False, "a problem was found"),
    ):
        with pytest.raises(SystemExit) as left:
            cli.main(args)
        assert left.value.code == 0
        _, codes = capsys.readouterr().out.split("exit codes:")
        assert ("\n  75 " in codes) == runs and "\n  2 " in codes and own in codes


def test_a_run_goes_on_by_its_workdir_alone(run, capsys):
    """With the settings that it was started with; its record of them stays."""
    _, _, workdir = run
    origin = (workdir / "origin.json").read_bytes()
    code, out, _ = call(capsys, "pretrain", "--workdir", workdir)
    assert code == 0 and "holds the finished run" in out
    more = ("--set", "phases.1.steps=20")
    code, _, err = call(capsys, "pretrain", "--workdir", workdir, *more)
    assert code == 2 and "phases.1.steps: 8 -> 20" in err and "--extend" in err
    code, _, err = call(capsys, "pretrain", "--workdir", workdir, *more, "--set", "seed=3")
    assert code == 2 and "--extend" not in err
    assert (workdir / "origin.json").read_bytes() == origin


def test_a_run_goes_on_where_its_text_was_moved_and_not_on_other_text(run, capsys, tmp_path):
    _, file, workdir = run
    (source,) = config.load(str(file)).corpus.sources
    word, _, folder = source.partition(":")
    shutil.copytree(folder, tmp_path / "text")
    moved = (
        "pretrain",
        file,
        "--workdir",
        workdir,
        "--set",
        f"corpus.sources={word}:{tmp_path}/text",
    )
    code, out, _ = call(capsys, *moved)
    assert code == 0 and "holds the finished run" in out
    (tmp_path / "text" / "another.txt").write_text("Another text.")
    code, _, err = call(capsys, *moved)
    assert code == 2 and "started with other settings (corpus.sources: " in err
    assert call(capsys, "pretrain", file, "--workdir", workdir)[0] == 0


def test_a_run_that_goes_on_under_other_code_says_so(run, capsys, monkeypatch):
    _, _, workdir = run
    before = environment.environment()
    start = json.loads((workdir / "timings.jsonl").read_text().split("\n")[0])
    assert start["environment"] == json.loads(json.dumps(before))
    _, out, _ = call(capsys, "pretrain", "--workdir", workdir)
    assert " -> " not in out
    monkeypatch.setattr(environment, "code", lambda: "0" * 12)
    _, out, _ = call(capsys, "pretrain", "--workdir", workdir)
    (line,) = [line for line in out.splitlines() if " -> " in line]
    assert line == (
        f"resume: code {before['code']} -> {'0' * 12}: batches and arithmetic are those of the "
        "code that runs now"
    )


def test_changes_of_an_environment_are_one_line_and_what_was_not_saved_is_none(monkeypatch):
    saved = json.loads(json.dumps(environment.environment()))
    assert environment.changes(saved) == ""
    older = saved | {"versions": saved["versions"] | {"jax": "0.1"}, "devices": ["cpu", 77]}
    del older["code"]
    now = saved["versions"]["jax"]
    assert environment.changes(older) == (
        f"jax 0.1 -> {now}, devices cpu x 77 -> {' x '.join(map(str, saved['devices']))}: "
        "batches exact, arithmetic to rounding"
    )


def test_the_hash_of_the_code_is_of_names_and_bytes(tmp_path, monkeypatch):
    """A launcher and experiments, which a wheel holds within the package, are none of it."""
    hashes = {}
    for name, text in (("a.py", "x"), ("a.py", "y"), ("b.py", "y"), ("launch/b.py", "x")):
        package = tmp_path / str(len(hashes))
        for file, content in (("__init__.py", ""), (name, text)):
            (package / file).parent.mkdir(parents=True, exist_ok=True)
            (package / file).write_text(content)
        monkeypatch.setattr(environment.bert_jax, "__file__", str(package / "__init__.py"))
        hashes[name, text] = environment.code.__wrapped__()
    (package / "launch" / "b.py").unlink()
    alone = environment.code.__wrapped__()
    assert len({*hashes.values()}) == 4 and hashes["launch/b.py", "x"] == alone


def test_a_folder_of_transformers_is_to_be_imported_first(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for command in ("predict", "evaluate"):
        code, _, err = call(capsys, command, "--workdir", tmp_path)
        assert code == 2 and f"bert-jax import {tmp_path} --workdir B" in err


def test_evaluate_gives_the_run_s_own_last_evaluation(run, capsys):
    """From the workdir alone, with its saved config; another batch size changes nothing."""
    _, _, workdir = run
    code, out, _ = call(capsys, "evaluate", "--workdir", workdir, "--set", "run.eval_batch_size=4")
    assert code == 0
    found = json.loads(out.splitlines()[-1])
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    saved = [line for line in lines if line["kind"] == "evaluation"][-1]
    for name in ("masked_lm_loss", "next_sentence_accuracy", "unigram_loss", "rows"):
        assert found[name] == pytest.approx(saved[name], rel=1e-5)
    assert found["step"] == 22


def test_metrics_lines_are_complete(run):
    _, _, workdir = run
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    train = [line["step"] for line in lines if line["kind"] == "train"]
    evaluation = [line["step"] for line in lines if line["kind"] == "evaluation"]
    assert train == [3, 6, 9, 12, 15, 18, 21, 22]
    assert evaluation == [6, 12, 18, 22]
    timings = [json.loads(x) for x in (workdir / "timings.jsonl").read_text().splitlines()]
    laps = [line for line in timings if line["kind"] == "train"]
    assert [line["step"] for line in laps] == train
    assert all(line["tokens_per_second"] > 0 and line["utilisation"] > 0 for line in laps)
    # What counts is what is no padding; the share that is stands next to it.
    filled = [line["filled"] for line in lines if line["kind"] == "train"]
    for line, share in zip(laps, filled, strict=True):
        assert 0 < share < 1 and line["padding"] == 1 - share
        for name in ("tokens_per_second", "utilisation"):
            assert line[f"real_{name}"] == line[name] * share
    assert sum(line["steps"] for line in laps) == 22
    assert timings[0]["kind"] == "start" and timings[0]["prepare_seconds"] > 0
    assert timings[-1]["kind"] == "end" and timings[-1]["outcome"] == "finished"
    # Two phases, two programs; compiling is nobody else's time.
    assert sum(line.get("compilation_seconds", 0) > 0 for line in laps) == 2
    for line in timings:
        waits = [
            value
            for name, value in line.items()
            if name.endswith("_seconds") and name != "cpu_seconds"
        ]
        assert sum(waits) <= line["seconds"]


def test_watched_sentences_are_asked_at_every_evaluation(run):
    _, _, workdir = run
    lines = [json.loads(x) for x in (workdir / "predictions.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [6, 12, 18, 22]
    sentences = lines[0]["sentences"]
    assert sentences and all(len(s["masks"]) == 1 for s in sentences)
    assert all(s["text"].count("[MASK]") == 1 and s["truth"].isalpha() for s in sentences)
    assert [s["text"] for s in lines[-1]["sentences"]] == [s["text"] for s in sentences]
    for line in lines:
        for sentence in line["sentences"]:
            chances = [p for _, p in sentence["masks"][0]]
            assert len(chances) == 5 and sorted(chances, reverse=True) == chances


def test_show_decodes_the_batch_that_was_trained_on(run, capsys):
    _, file, workdir = run
    code, out, _ = call(capsys, "show", file, "--workdir", workdir, "--step", "9", "--rows", "2")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("step 9: phase 0, step 9 of 14 there, 8 rows of 16")
    assert any(line.startswith("epoch 1: ") for line in lines)
    text = [line for line in lines if line.startswith("[CLS] ")]
    assert len(text) == 2
    for line in text:
        assert line.count("[SEP]") == 2 and "|" in line
    assert sum("B is random" in x or "B follows" in x for x in lines) == 2


def test_config_prints_what_the_run_was(run, capsys):
    _, file, workdir = run
    code, out, _ = call(capsys, "config", "--workdir", workdir)
    assert code == 0
    assert config.from_json(out, "out") == config.load(str(file))
    code, out, _ = call(capsys, "config", file, "--set", "seed=4")
    assert config.from_json(out, "out").seed == 4


def test_a_resolved_config_is_an_experiment(run, capsys, tmp_path):
    _, _, workdir = run
    copy = tmp_path / "claim.json"
    copy.write_text((workdir / "experiment.json").read_text())
    code, out, _ = call(capsys, "pretrain", copy, "--workdir", workdir)
    assert code == 0 and "finished" in out


def test_predict_fills_masks_and_judges_pairs(run, capsys):
    _, _, workdir = run
    code, out, _ = call(
        capsys, "predict", "--workdir", workdir, "--top", "3",
        "wa [MASK] wb [MASK] .", "--next", "[MASK] xa",
    )  # fmt: skip
    assert code == 0
    lines = out.splitlines()
    assert lines[:2] == ["wa [MASK] wb [MASK] .", "[MASK] xa"]
    assert [line.split(":")[0] for line in lines[2:5]] == [f"  [MASK] {i}" for i in (1, 2, 3)]
    assert len(lines[2].split(":")[1].split()) == 6
    assert lines[5].startswith("  B follows A: 0.")


def test_predict_warns_of_text_that_the_vocabulary_cannot_read(run, capsys):
    _, _, workdir = run
    code, _, err = call(capsys, "predict", "--workdir", workdir, "房间 [MASK] 好")
    assert code == 0 and err.startswith("warning: 75% of the text is [UNK]")


def test_predict_reads_lines_and_pairs(run, capsys, monkeypatch):
    _, _, workdir = run
    code, out, _ = call(
        capsys, "predict", "--workdir", workdir, stdin=b"wa [MASK]\nwa\twb\n",
        monkeypatch=monkeypatch,
    )  # fmt: skip
    assert code == 0
    assert out.decode().count("[MASK] 1:") == 1 and out.decode().count("B follows A") == 1


def test_predictions_do_not_depend_on_padding(run):
    """A text of 20 pieces is padded to 32; the same text before more padding says the same."""
    _, _, workdir = run
    experiment = config.load(str(workdir / "experiment.json"))
    place = Workdir(workdir, experiment.run.corpus_dir)
    prepared = Prepared.open(place.corpus)
    mesh = mesh_lib.make_mesh(experiment.parallelism)
    params, step = loaded.load_params(experiment, place, prepared, mesh)
    assert step == 22
    asked = evaluators.Predictor(experiment.model, prepared.tokenizer)
    short = asked.predict(params, "wa [MASK] wb", None, 3)
    length_step, evaluators._LENGTH_STEP = evaluators._LENGTH_STEP, 5
    try:
        padded_less = asked.predict(params, "wa [MASK] wb", None, 3)
    finally:
        evaluators._LENGTH_STEP = length_step
    for (a, p), (b, q) in zip(short.masks[0], padded_less.masks[0], strict=True):
        assert a == b and p == pytest.approx(q, rel=1e-5)


def test_tokenize_writes_ids_line_for_line(run, capsys, monkeypatch):
    folder, _, _ = run
    text = "wa wb\n\nzz\u2028wa\r\n[SEP]".encode()
    code, out, _ = call(
        capsys, "tokenize", "--tokenizer", folder / "vocab.txt", stdin=text,
        monkeypatch=monkeypatch,
    )  # fmt: skip
    assert code == 0
    tok = tokenizer.load(folder / "vocab.txt")
    lines = [tok.encode(line) for line in ("wa wb", "", "zz\u2028wa\r", "[SEP]")]
    assert out == "".join(" ".join(map(str, ids)) + "\n" for ids in lines).encode()
    assert tok.sep_id not in lines[3]
    folder_code, folder_out, _ = call(
        capsys, "tokenize", "--tokenizer", folder / "corpus" / "tokenizer", stdin=text,
        monkeypatch=monkeypatch,
    )  # fmt: skip
    assert (folder_code, folder_out) == (0, out)


def test_prepare_alone_and_twice(run, capsys, tmp_path):
    _, file, _ = run
    args = ("prepare", file, "--workdir", tmp_path / "w", "--set", "run.corpus_dir=")
    assert call(capsys, *args)[0] == 0
    code, out, _ = call(capsys, *args)
    assert code == 0 and out.count("\n") == 1 and "is ready" in out


def test_doctor_tells_its_findings_and_exits_1_if_one_is_a_problem(run, capsys, tmp_path):
    folder, file, workdir = run
    for path in (workdir, file):
        code, out, _ = call(capsys, "doctor", path)
        assert code == 0 and out.splitlines()[-1].startswith("no problem, "), out
    one_a_document = "corpus.layout=paragraphs_by_line"
    code, out, _ = call(capsys, "doctor", file, "--set", one_a_document)
    assert code == 1
    lines = out.splitlines()
    assert lines[0] == "problem: 1 different document, and `prepare` needs 16"
    assert [line.split()[0] for line in lines[1:4]] == ["example", "effect", "remedy"]
    assert lines[-1] == "1 problem, no notes"
    (tmp_path / "\x1b[31m.txt").write_text("\x1b[31m" + (folder / "text" / "all.txt").read_text())
    code, out, _ = call(capsys, "doctor", tmp_path)
    assert code == 1 and "\x1b" not in out


def test_an_interrupt_while_preparing_leaves_nothing(run, capsys, tmp_path, monkeypatch):
    from bert_jax.data import parts

    def interrupted(*_):
        raise KeyboardInterrupt

    _, file, _ = run
    monkeypatch.setattr(parts.Read, "make", interrupted)
    args = ("pretrain", file, "--workdir", tmp_path / "w", "--set", "run.corpus_dir=")
    code, _, err = call(capsys, *args)
    assert code == 130 and err == "bert-jax: interrupted\n"
    assert not list(tmp_path.iterdir())


def test_a_reader_that_leaves_is_no_error_of_ours(run):
    import subprocess

    _, _, workdir = run
    command = f"{sys.executable} -m bert_jax.cli show --workdir {workdir} --rows 8 | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    "setting", ["seed=4", "model.num_attention_heads=1", "model.hidden_size=32"]
)
def test_evaluate_refuses_other_settings_than_the_run_s(setting, run, capsys):
    _, _, workdir = run
    code, _, err = call(capsys, "evaluate", "--workdir", workdir, "--set", setting)
    assert code == 2 and "was trained with other settings" in err
    assert setting.split("=")[0] in err


def test_a_config_that_is_not_text_is_named(run, capsys, tmp_path):
    (tmp_path / "experiment.json").write_bytes(b"\xff\xfe{")
    code, _, err = call(capsys, "config", "--workdir", tmp_path)
    assert code == 2 and "experiment.json: byte 0 is not UTF-8" in err


def test_predict_says_when_there_is_nothing_to_fill(run, capsys):
    _, _, workdir = run
    code, out, _ = call(capsys, "predict", "--workdir", workdir, "wa wb")
    assert code == 0 and "write [MASK]" in out


def test_what_is_to_be_done_is_shown_before_the_first_step(run, capsys, tmp_path):
    _, file, _ = run
    code, out, _ = call(capsys, "pretrain", file, "--workdir", tmp_path / "w")
    lines = out.splitlines()
    shown = next(i for i, line in enumerate(lines) if line.startswith("small: 0.0M parameters"))
    assert code == 0 and lines[shown + 1].startswith("step ")
    assert "14 steps of 8 x 16 tokens, then 8 steps of 4 x 24 tokens" in lines[shown]


def test_a_setting_without_effect_is_said(copy_of_run, monkeypatch, capsys):
    monkeypatch.setattr("bert_jax.running.pretraining.pretrain", lambda *_: "finished")
    for command in ("pretrain", "show"):
        words = [command, "small.py", "--workdir", "new", "--set", "optimizer.decay_steps=5"]
        assert cli.main(words) == 0
        assert "optimizer.decay_steps=5" in capsys.readouterr().out

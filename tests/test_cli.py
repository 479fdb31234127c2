"""The commands, as a user types them in the folder of a finished run."""

import json
import pathlib
import shlex
import shutil
import subprocess
import sys

import pytest
from broken import asked as run_cli
from broken import fails, said

from bert_jax import cli, config
from bert_jax.cli import parsing, shared
from bert_jax.pretraining import loaded_model
from bert_jax.pretraining.prepared_corpus import PreparedCorpus
from bert_jax.running import environment
from bert_jax.storage.workdir import Workdir
from bert_jax.text import tokenizer
from bert_jax.training import mesh as mesh_lib


@pytest.fixture
def run(finished_run, monkeypatch):
    """The folder of a finished run, current, in which nothing is changed."""
    monkeypatch.chdir(finished_run)
    return finished_run / "run"


def lines_of(path: pathlib.Path, kind: str = "") -> list[dict]:
    lines = map(json.loads, path.read_text().splitlines())
    return [line for line in lines if not kind or line["kind"] == kind]


def test_help_shows_the_exit_codes_of_the_command(capsys):
    for words, runs, own in (
        (["--help"], True, ""),
        (["pretrain", "--help"], True, ""),
        (["doctor", "--help"], False, "a problem was found"),
    ):
        with pytest.raises(SystemExit) as left:
            cli.main(words)
        assert left.value.code == 0
        _, codes = capsys.readouterr().out.split("exit codes:")
        assert ("\n  75 " in codes) == runs and "\n  2 " in codes and own in codes


@pytest.mark.parametrize(
    "command", ["predict wa", "embed --out v.npz", "search x wa", "evaluate", "evaluate --task x"]
)
def test_from_is_refused_for_a_run_without_a_base(command, run):
    fails(f"{command} --workdir run --from elsewhere", "--from")


def test_words_may_stand_on_both_sides_of_flags_and_numbers_have_bounds():
    args = cli.parse(shlex.split("--debug predict a --workdir run b --top 3"))
    assert (args.texts, args.top, args.beam) == (["a", "b"], 3, None)
    assert cli.parse(shlex.split("predict --workdir run -- -x y")).texts == ["-x", "y"]
    args = cli.parse(shlex.split("embed --workdir w --out a --layers -4,-3 f --no-normalize"))
    assert (args.layers, args.text_file, args.normalize) == ((-4, -3), ["f"], False)
    for words, why in (
        ("predict --workdir run --top 0", "--top"),
        ("serve --workdir run --port 65536", "--port"),
        ("serve --workdir run --port x", "--port"),
        ("serve --workdir run --timeout nan", "--timeout"),
    ):
        fails(words, why)


def test_a_flag_that_is_not_given_has_the_default_that_its_argument_states():
    for name, command in cli.COMMANDS.items():
        defaults = {action.dest: action.default for action in command.parser(name)._actions}
        flags = [argument for argument in command.arguments if argument.names[0][0] == "-"]
        assert {a.dest: a.default for a in flags}.items() <= defaults.items()


def test_flags_that_have_their_defaults_count_as_not_given():
    args = cli.parse(["search", "texts", "a query", "--workdir", "w", "--pooling", "cls"])
    (given,) = parsing.find_changed_flags(args, shared.VECTOR_FLAGS)
    assert given.dest == "pooling"


def test_an_answer_without_a_model_is_given_without_jax():
    """Help, usage errors and missing files need no import of it: a third of a second of CPU."""
    code = (
        "import contextlib, sys; from bert_jax import cli\n"
        "for words in (['--help'], ['pretrian'], ['show', 'tiny', '--set', 'data.foo=1'],\n"
        "              ['pretrain', 'tiny', '--set', 'lr=1'],\n"
        "              ['show', 'tiny', '--workdir', 'nowhere'], ['report', 'nowhere'],\n"
        "              ['predict', '--workdir', 'nowhere', 'x'], ['config', 'tiny'],\n"
        "              ['search', '--workdir', 'nowhere', 'x'], ['doctor', 'nowhere'],\n"
        "              ['import', 'nowhere', '--workdir', 'b'],\n"
        "              ['plan', 'tiny', '--topology', 'v9:1x1']):\n"
        "    with contextlib.suppress(SystemExit): cli.main(words)\n"
        "    assert not {'jax', 'tensorflow_datasets', 'pyarrow'} & set(sys.modules), words\n"
        "import bert_jax.data.batches, bert_jax.data.stream, bert_jax.tools.doctor\n"
        "import bert_jax.tasks.examples, bert_jax.tasks.scores\n"
        "assert 'jax' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


# --- going on ---


@pytest.mark.long
def test_a_run_goes_on_by_its_workdir_alone(copy_of_run):
    """With the settings that it was started with; its record of them stays."""
    origin = pathlib.Path("run/origin.json").read_bytes()
    for experiment in ("", "small.py", "run/experiment.json"):
        assert "holds the finished run" in said(f"pretrain {experiment} --workdir run")
        if not experiment:
            assert pathlib.Path("run/origin.json").read_bytes() == origin
    longer = "pretrain --workdir run --set phases.1.steps=20"
    fails(longer, "phases.1.steps: 8 -> 20", "bert-jax extend")
    assert "bert-jax extend" not in fails(f"{longer} --set seed=3")


@pytest.mark.long
def test_a_run_goes_on_where_its_text_was_moved_and_not_on_other_text(copy_of_run):
    shutil.copytree("text", "moved")
    moved = "pretrain small.py --workdir run --set corpus.sources=text:moved"
    assert "holds the finished run" in said(moved)
    pathlib.Path("moved/another.txt").write_text("Another text.")
    fails(moved, "corpus.sources: ")


@pytest.mark.long
def test_a_run_that_goes_on_under_other_code_says_so(copy_of_run, monkeypatch):
    before = environment.environment()
    (start, *_) = lines_of(pathlib.Path("run/timings.jsonl"))
    assert start["environment"] == json.loads(json.dumps(before))
    assert " -> " not in run_cli("pretrain --workdir run")[1]
    monkeypatch.setattr(environment, "code_hash", lambda: "0" * 12)
    assert f"code {before['code']} -> {'0' * 12}" in run_cli("pretrain --workdir run")[1]
    older = start["environment"] | {"devices": ["cpu", 77]}
    older["versions"] = older["versions"] | {"jax": "0.1"}
    del older["code"]  # what was not saved has not changed
    now = start["environment"]
    assert environment.describe_changes(older) == (
        f"jax 0.1 -> {now['versions']['jax']}, devices cpu x 77 -> "
        f"{' x '.join(map(str, now['devices']))}: batches exact, arithmetic to rounding"
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
        hashes[name, text] = environment.code_hash.__wrapped__()
    (package / "launch" / "b.py").unlink()
    alone = environment.code_hash.__wrapped__()
    assert len({*hashes.values()}) == 4 and hashes["launch/b.py", "x"] == alone


def test_an_interrupt_while_preparing_leaves_nothing(run, tmp_path, monkeypatch):
    from bert_jax.data import parts  # of a corpus; `Read` splits one into words

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(parts.Read, "make", interrupted)
    code, _, err = run_cli("pretrain small.py --set run.corpus_dir= --workdir", tmp_path / "w")
    assert code == 130 and err == "bert-jax: interrupted\n"
    assert not list(tmp_path.iterdir())


def test_prepare_alone_and_twice(run, tmp_path):
    words = "prepare small.py --set run.corpus_dir= --workdir"
    assert run_cli(words, tmp_path / "w")[0] == 0
    code, out, _ = run_cli(words, tmp_path / "w")
    assert code == 0 and out.count("\n") == 1 and "is ready" in out


def test_a_setting_without_effect_is_noted(copy_of_run, monkeypatch):
    monkeypatch.setattr("bert_jax.running.session.run", lambda *_: "finished")
    for command in ("pretrain", "show"):
        code, out, _ = run_cli(f"{command} small.py --workdir new --set optimizer.decay_steps=5")
        assert code == 0 and "optimizer.decay_steps=5" in out


# --- what a run has written ---


@pytest.mark.long
def test_evaluate_gives_the_run_s_own_last_evaluation(run):
    """From the workdir alone, with its saved config; another batch size changes nothing."""
    *_, line = said("evaluate --workdir run --set run.eval_batch_size=4").splitlines()
    known = json.loads(line)
    saved = lines_of(run / "metrics.jsonl", "evaluation")[-1]
    for name in ("masked_lm_loss", "next_sentence_accuracy", "unigram_loss", "rows"):
        assert known[name] == pytest.approx(saved[name], rel=1e-5)
    assert known["step"] == 22
    for setting in ("seed=4", "model.hidden_size=32"):
        fails(f"evaluate --workdir run --set {setting}", setting.split("=")[0])


def test_metrics_lines_are_complete(run):
    train = lines_of(run / "metrics.jsonl", "train")
    steps = [line["step"] for line in train]
    assert steps == [3, 6, 9, 12, 15, 18, 21, 22]
    evaluations = lines_of(run / "metrics.jsonl", "evaluation")
    assert [line["step"] for line in evaluations] == [6, 12, 18, 22]
    timings = lines_of(run / "timings.jsonl")
    laps = lines_of(run / "timings.jsonl", "train")
    assert [line["step"] for line in laps] == steps
    # The real rates count no padding; its share is in the line, too.
    for line, share in zip(laps, (line["filled"] for line in train), strict=True):
        assert 0 < share < 1 and line["padding"] == 1 - share
        for name in ("tokens_per_second", "utilisation"):
            assert line[f"real_{name}"] == line[name] * share > 0
    assert sum(line["steps"] for line in laps) == 22
    assert timings[0]["kind"] == "start" and timings[0]["prepare_seconds"] > 0
    assert timings[-1]["kind"] == "end" and timings[-1]["outcome"] == "finished"
    # Two phases, two programs; compiling is nobody else's time.
    assert sum(line.get("compilation_seconds", 0) > 0 for line in laps) == 2
    for line in timings:
        waits = [line[name] for name in line if name.endswith("_seconds") and name[:3] != "cpu"]
        assert sum(waits) <= line["seconds"]


def test_watched_sentences_are_asked_at_every_evaluation(run):
    lines = lines_of(run / "predictions.jsonl")
    assert [line["step"] for line in lines] == [6, 12, 18, 22]
    sentences = lines[0]["sentences"]
    assert sentences and all(len(s["masks"]) == 1 for s in sentences)
    assert all(s["text"].count("[MASK]") == 1 and s["truth"].isalpha() for s in sentences)
    for line in lines:
        assert [s["text"] for s in line["sentences"]] == [s["text"] for s in sentences]
        for sentence in line["sentences"]:
            chances = [p for _, p in sentence["masks"][0]]
            assert len(chances) == 5 and sorted(chances, reverse=True) == chances


def test_show_decodes_the_batch_that_was_trained_on(run):
    lines = said("show small.py --workdir run --step 9 --rows 2").splitlines()
    assert lines[0].startswith("step 9: phase 0, its step 9 of 14, 8 rows of 16")  # tokens
    assert any(line.startswith("epoch 1: ") for line in lines)
    text = [line for line in lines if line.startswith("[CLS] ")]
    assert len(text) == 2 and all(line.count("[SEP]") == 2 and "|" in line for line in text)
    assert sum("B is random" in x or "B follows" in x for x in lines) == 2


def test_config_prints_what_the_run_was(run):
    assert config.from_json(said("config --workdir run"), "out") == config.load("small.py")
    assert config.from_json(said("config small.py --set seed=4"), "out").seed == 4


# --- asking it ---


def test_predict_fills_masks_and_judges_pairs(run):
    command = "predict --workdir run --top 3 'wa [MASK] wb [MASK] .' --next '[MASK] xa'"
    code, out, _ = run_cli(command)
    lines = out.splitlines()
    assert code == 0 and lines[:2] == ["wa [MASK] wb [MASK] .", "[MASK] xa"]
    assert [line.split(":")[0] for line in lines[2:5]] == [f"  [MASK] {i}" for i in (1, 2, 3)]
    assert len(lines[2].split(":")[1].split()) == 6
    assert lines[5].startswith("  B follows A: 0.")
    code, out, _ = run_cli("predict --workdir run", stdin=b"wa [MASK]\nwa\twb\n")
    assert code == 0 and out.count("[MASK] 1:") == 1 and out.count("B follows A") == 1
    code, out, err = run_cli("predict --workdir run '房间 好'")
    assert code == 0 and "write [MASK]" in out and err.startswith("warning: 100% of the text is")


def test_predictions_do_not_depend_on_padding(run, monkeypatch):
    """A text is padded to a multiple of some length; another multiple gives the same answer."""
    experiment = config.load("run/experiment.json")
    place = Workdir(run, experiment.run.corpus_dir)
    prepared = PreparedCorpus.open(place.corpus)
    mesh = mesh_lib.make_mesh(experiment.parallelism)
    params, step = loaded_model.load_params(experiment, place, prepared, mesh)
    assert step == 22
    predictor = loaded_model.Predictor(experiment.model, prepared.tokenizer)
    padded = predictor.predict(params, "wa [MASK] wb", None, 3)
    monkeypatch.setattr(loaded_model, "_LENGTH_STEP", 5)
    padded_less = predictor.predict(params, "wa [MASK] wb", None, 3)
    for (a, p), (b, q) in zip(padded.masks[0], padded_less.masks[0], strict=True):
        assert a == b and p == pytest.approx(q, rel=1e-5)


def test_tokenize_writes_ids_line_for_line(run):
    text = "wa wb\n\nzz\u2028wa\r\n[SEP]".encode()
    tok = tokenizer.load("vocab.txt")
    lines = [tok.encode(line) for line in ("wa wb", "", "zz\u2028wa\r", "[SEP]")]
    assert tok.sep_id not in lines[3]
    for named in ("vocab.txt", "corpus/tokenizer"):
        code, out, _ = run_cli(f"tokenize --tokenizer {named}", stdin=text)
        assert code == 0 and out == "".join(" ".join(map(str, ids)) + "\n" for ids in lines)


def test_doctor_shows_its_findings_and_exits_1_if_one_is_a_problem(run, tmp_path):
    for path in ("run", "small.py"):
        assert said(f"doctor {path}").splitlines()[-1].startswith("no problem, ")
    code, out, _ = run_cli("doctor small.py --set corpus.layout=paragraphs_by_line")
    lines = out.splitlines()
    assert code == 1 and lines[0].startswith("problem: ") and lines[-1].startswith("1 problem")
    assert [line.split()[0] for line in lines[1:4]] == ["example", "effect", "remedy"]
    (tmp_path / "\x1b[31m.txt").write_text("\x1b[31m" + pathlib.Path("text/all.txt").read_text())
    code, out, _ = run_cli("doctor", tmp_path)
    assert code == 1 and "\x1b" not in out


def test_a_closed_pipe_gives_no_traceback(run):
    command = f"{sys.executable} -m bert_jax.cli config --explain | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
    assert b"Traceback" not in done.stderr

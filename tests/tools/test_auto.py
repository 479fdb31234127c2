"""What is chosen for a text and so many hours."""

import dataclasses
import json
import pathlib
import re
import types
import unicodedata

import broken
import pytest
from small_run import write_text

from bert_jax import config, errors
from bert_jax.storage.workdir import Workdir
from bert_jax.tools import auto
from bert_jax.tools.compare import budget

SENTENCES = {
    "en": "It is the house of the man that was here with us, and the dog is for sale.",
    "ru": "Дети и староста стоят у дома на берегу реки.",
    "hi": "बच्चे और मुखिया नदी के किनारे घर के पास खड़े हैं।",
    "ja": "子供たちは川のそばの家にいます。",
    "el": "Τα παιδιά είναι στο σπίτι.",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Text; the current folder; a machine whose speed is known, and small encoders."""
    write_text(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(auto.hardware, "peak_flops", lambda _: 1e9)
    sizes = [auto.Size(0.0, 1, 64, 8, 1_000), auto.Size(1e13, 2, 128, 8, 1_000)]
    monkeypatch.setattr(auto, "SIZES", tuple(sizes))
    monkeypatch.setattr(auto, "_EVAL_ROWS", 8)
    return tmp_path


def timed(monkeypatch, rate):
    """Steps are done at this rate, and their times asked for are listed."""
    asked = []

    def time_phases(experiment, *_):
        asked.append(experiment)
        return [{"steps_per_second": rate}]

    monkeypatch.setattr(budget, "time_phases", time_phases)
    return asked


@pytest.mark.parametrize(("faster_by", "chosen_type"), [(1.5, "bfloat16"), (1.01, "float32")])
def test_a_cpu_computes_in_bfloat16_if_its_steps_are_faster(
    here, monkeypatch, faster_by, chosen_type
):
    def time_phases(experiment, *_):
        rounded = experiment.model.compute_dtype == "bfloat16"
        return [{"steps_per_second": 0.25 * (faster_by if rounded else 1.0)}]

    def choose(*settings, hours=0.2):
        monkeypatch.setattr(budget, "time_phases", time_phases)
        request = auto.Request("text", hours, None, settings)
        return auto.choose_experiment(request, Workdir("w"), types.SimpleNamespace(report=str))

    without_corpus(monkeypatch)
    choice = choose()
    assert choice.experiment.model.compute_dtype == chosen_type
    (line,) = (line for line in choice.reasons if line.startswith("compute type"))
    assert f"compute type: {chosen_type}; a step takes 4 s in float32" in line
    # A short run times one type alone, and a type that is set holds.
    assert choose(hours=0.1).experiment.model.compute_dtype == "float32"
    for given in ("float32", "bfloat16"):
        choice = choose(f"model.compute_dtype={given}")
        assert choice.experiment.model.compute_dtype == given
        assert not any(line.startswith("compute type") for line in choice.reasons)


@pytest.mark.parametrize(
    ("peak", "seconds", "bfloat16_seconds", "layers"),
    [
        (1e8, 4.0, 4.0, [1, 1]),
        (1e8, 4.0, 2.0, [1, 1, 2]),  # bfloat16 is faster
        (1e8, 2.0, 2.0, [1, 1, 2]),  # steps are faster than the guess
        (1e9, 40.0, 40.0, [2, 2, 1]),  # and slower
    ],
)
def test_the_speed_of_steps_decides_the_encoder_but_not_its_vocabulary(
    here, monkeypatch, peak, seconds, bfloat16_seconds, layers
):
    small = auto.Size(0.0, 1, 64, 8, 1_000)
    monkeypatch.setattr(auto, "SIZES", (small,))
    smallest = auto._fresh_experiment("w", auto.examine_text("text"), 1.0)
    operations = auto.flops.phase_step_flops(smallest.model, smallest.phases[0])
    # Two hours are enough for the second encoder if a step of the first takes less than 3 s.
    sizes = (small, auto.Size(operations / 3 * 7_200, 2, 128, 8, 2_000))
    monkeypatch.setattr(auto, "SIZES", sizes)
    monkeypatch.setattr(auto, "_BYTES_PER_ENTRY", 1)
    monkeypatch.setattr(auto.hardware, "peak_flops", lambda _: peak)
    models = []

    def time_phases(experiment, *_):
        models.append(experiment.model)
        in_bfloat16 = models[-1].compute_dtype == "bfloat16"
        return [{"steps_per_second": 1 / (bfloat16_seconds if in_bfloat16 else seconds)}]

    monkeypatch.setattr(budget, "time_phases", time_phases)
    without_corpus(monkeypatch)
    request = auto.Request("text", 2.0, None, ())
    experiment, reasons = auto.choose_experiment(
        request, Workdir("w"), types.SimpleNamespace(report=str)
    )
    assert [model.num_hidden_layers for model in models] == layers
    assert experiment.model.hidden_size == 64 * layers[-1]
    assert experiment.model.vocab_size == models[0].vocab_size == 1_000 * layers[0]
    assert (experiment.model.compute_dtype == "bfloat16") == (bfloat16_seconds < seconds)
    assert any("operations" in line for line in reasons)


@pytest.mark.parametrize("code", SENTENCES)
def test_a_language_is_assumed_from_the_script_and_only_english_is_lower_cased(here, code):
    (here / "d.txt").write_text(unicodedata.normalize("NFD", SENTENCES[code]))
    text = auto.examine_text("d.txt")
    assert (text.language, text.case) == (code, "uncased" if code == "en" else "cased")


def test_a_language_that_is_given_holds(here, monkeypatch):
    (here / "d.txt").write_text("Les enfants du village sont au bord des champs.")
    experiment, said = chosen(monkeypatch, "corpus.language=fr", text="d.txt")
    assert (experiment.corpus.language, experiment.corpus.case) == ("fr", "cased")
    assert not any("--language" in line for line in said)
    assert "language en (assumed" in "".join(chosen(monkeypatch, text="d.txt")[1])
    (here / "d.txt").write_text("తెలుగు")  # of a script for which no language is assumed
    assert auto.examine_text("d.txt").case == "cased"
    assert auto.examine_text("d.txt", ["corpus.language=en"]).case == "cased"


@pytest.mark.long
def test_a_run_is_chosen_once_and_then_goes_on_as_it_is(here, monkeypatch):
    asked = timed(monkeypatch, rate=0.25)
    command = "auto text --hours 0.05 --workdir w --language en"
    said = broken.said(f"{command} --set data.short_seq_prob=0.2")
    saved = config.load("w/experiment.json")
    # 180 seconds are 45 steps, of which 9 evaluations take a third each; the corpus took some, too.
    assert 30 <= saved.total_steps <= 42
    assert saved.optimizer.warmup_steps == saved.total_steps // 10
    assert saved.data.short_seq_prob == 0.2 and len(asked) == 1
    assert saved.corpus.language == "en" and saved.model.hidden_size == 64
    for word in ("text:", "model:", "steps:", "expect:"):
        assert f"\n{word}" in f"\n{said}"
    origin = json.loads(pathlib.Path("w/origin.json").read_text())
    assert origin["experiment"] == "the command line"

    broken.said(command)
    assert len(asked) == 1
    for other in ("other", "ext"):
        broken.fails(f"auto {other} --hours 1 --workdir w", f"TEXT {other}")


def without_corpus(monkeypatch):
    """No corpus is made; returns the folders that would have one."""
    made, folders = {"splits": {"train": {"tokens": 5_000}}}, []
    monkeypatch.setattr(auto.corpus, "prepare", lambda *a: folders.append(f"{a[2]}") or made)
    monkeypatch.setattr(auto.corpus, "require_enough_text", lambda *_: None)
    return folders


def chosen(monkeypatch, *settings, text="text", workdir="w", base=None):
    """The experiment for three minutes of 4 s a step, and its lines; no corpus is made."""
    timed(monkeypatch, rate=0.25)
    said = without_corpus(monkeypatch)
    progress = types.SimpleNamespace(report=said.append)
    request = auto.Request(text, 0.05, base, settings)
    experiment, reasons = auto.choose_experiment(request, Workdir(workdir), progress)
    return experiment, said + reasons


def test_what_is_set_holds_so_that_the_same_command_changes_nothing(here, monkeypatch):
    given = {"optimizer.warmup_steps": 12, "optimizer.schedule": "wsd", "optimizer.decay_steps": 9}
    given |= {"run.log_every": 3, "run.eval_every": 7, "run.checkpoint_every": 11}
    settings = [f"{field}={value}" for field, value in given.items()]
    settings.append("run.corpus_dir=prepared")
    experiment, said = chosen(monkeypatch, *settings)
    assert said[0] == "prepared"  # and not in the workdir, where the run would not look
    assert 30 <= experiment.total_steps <= 42  # 45 without evaluations
    assert given.items() <= dict(config.flatten(experiment)).items()
    assert config.override(experiment, settings) == experiment


def test_text_is_looked_at_in_the_field_and_encoding_that_are_set(here, monkeypatch):
    (here / "d.jsonl").write_text(json.dumps({"body": SENTENCES["el"]}))
    experiment, _ = chosen(monkeypatch, "corpus.text_field =body", text="d.jsonl")
    assert (experiment.corpus.language, experiment.corpus.text_field) == ("el", "body")
    (here / "d.txt").write_text(SENTENCES["ru"], encoding="utf-16")
    experiment, _ = chosen(monkeypatch, "corpus.encoding=utf-16", text="d.txt")
    assert experiment.corpus.language == "ru"


def test_of_a_long_document_no_more_is_read_than_is_looked_at(here, monkeypatch):
    read = []

    def chunks():
        for _ in range(1_000):
            read.append(1_000 * "a ")
            yield read[-1]

    whole = types.SimpleNamespace(chunks=chunks())
    monkeypatch.setattr(auto.documents, "read_extent", lambda *_: iter([whole]))
    assert auto.examine_text("text").files == 1 and len(read) == 100  # of 2,000 characters


def test_the_sample_of_a_single_file_is_as_large_as_that_of_many(here):
    (here / "d.txt").write_text(1_000 * SENTENCES["en"] + 4_000 * SENTENCES["ru"])
    assert auto.examine_text("d.txt").language == "ru"


@pytest.mark.parametrize(("count", "read"), [(2, 2), (20, 20), (21, 11), (39, 20), (40, 20)])
def test_files_share_the_sample_equally(here, monkeypatch, count, read):
    (here / "many").mkdir()
    for number in range(count):
        (here / "many" / f"{number:02d}.txt").write_text(60_000 * "a ")
    samples = []
    monkeypatch.setattr(auto, "find_script", lambda sample: samples.append(sample) or "LATIN")
    assert auto.examine_text("many").files == count
    assert len(samples[0]) == 200_000 // read * read


def test_steps_are_timed_with_the_settings(here, monkeypatch):
    without_corpus(monkeypatch)
    asked = timed(monkeypatch, rate=0.25)
    request = auto.Request("text", 0.05, None, ["phases.0.batch_size=16"])
    auto.choose_experiment(request, Workdir("w"), types.SimpleNamespace(report=str))
    assert [experiment.phases[0].batch_size for experiment in asked] == [16]


def test_the_lines_say_what_is_trained(here, monkeypatch, copy_of_run):
    _, said = chosen(monkeypatch, "corpus.case=cased")
    assert any(", cased; 5,000 tokens" in line for line in said)
    broken.said("import run --workdir base")
    _, said = chosen(monkeypatch, base="base")
    assert any(line.startswith("expect: a loss that is not predicted") for line in said)


def test_hours_that_are_over_before_steps_are_timed_are_too_few(here, monkeypatch):
    monkeypatch.setattr(auto.time, "monotonic", iter([0.0, *20 * [1e6]]).__next__)
    with pytest.raises(errors.InputError, match=r"--hours 0\.05: only 0 steps"):
        chosen(monkeypatch)


def test_a_run_in_the_current_folder_has_a_name(here, monkeypatch):
    assert chosen(monkeypatch, workdir=".")[0].name == "text"


def test_several_processes_are_refused_before_the_text_is_looked_at(here, monkeypatch):
    place = {"COORDINATOR_ADDRESS": "here:1", "PROCESS_ID": "0", "NUM_PROCESSES": "2"}
    for name, value in place.items():
        monkeypatch.setenv(f"JAX_{name}", value)
    broken.fails("auto nowhere --hours 1 --workdir w", "auto")


def test_a_request_to_stop_while_steps_are_timed_stops_the_run(here, monkeypatch):
    for outcome in ("stopped", "stopped", "failed"):
        monkeypatch.setattr(budget.session, "run", lambda *_, end=outcome: end)
        code, out, _ = broken.asked("auto text --hours 1 --workdir w")
        assert code == (errors.STOPPED if outcome == "stopped" else errors.FAILED)
        assert ("run the same command again" in out) == (outcome == "stopped")
        assert not pathlib.Path("w/experiment.json").exists()


def test_more_operations_want_a_larger_encoder(here):
    text = auto.examine_text("text")
    small, larger = auto._fresh_experiment("w", text, 9e12), auto._fresh_experiment("w", text, 1e13)
    assert small.model.hidden_size == 64
    assert larger.model.num_hidden_layers == 2 and larger.model.num_attention_heads == 2
    assert larger.optimizer.peak_learning_rate == 4e-3
    assert "2.6 nat" in auto.describe_expected_loss(small, 6_300_000)
    assert "2.2 nat" in auto.describe_expected_loss(small, 2_700_000)
    assert "2.9" in auto.describe_expected_loss(small, 15_000_000)
    assert "3.0 nat" in auto.describe_expected_loss(larger, 22_000_000)
    for layers, nats in ((3, "2.7 nat"), (4, "2.8 nat"), (6, "2.8 nat")):
        deeper = dataclasses.replace(small.model, num_hidden_layers=layers)
        experiment = dataclasses.replace(small, model=deeper)
        assert nats in auto.describe_expected_loss(experiment, 6_300_000)
    # Of fewer tokens than were ever measured.
    assert auto.describe_expected_loss(small, 900_000) == auto.describe_expected_loss(small, 9_000)
    assert "about" not in auto.describe_expected_loss(small, 9_000)


def test_the_hours_that_are_missing_are_named():
    experiment = config.load("experiments/tiny.py")
    with pytest.raises(errors.InputError, match="only 0 steps of 36 s") as refused:
        auto._with_steps(experiment, 36.0, 0.0, "--hours 1")
    missing = float(re.search(r"at least (\S+) hours", str(refused.value))[1])
    enough = auto._with_steps(experiment, 36.0, 3600 * missing, "--hours 1")
    assert 20 <= enough.phases[0].steps < 60


@pytest.mark.parametrize("page", ["results/learning.md", "howto/choose-an-experiment.md"])
def test_the_pages_have_the_rule(page):
    text = (pathlib.Path(__file__).parents[2] / "docs" / page).read_text()
    table = text.split("| operations, from |")[1].split("\n\n")[0]
    rows = [re.sub(r"(\d),(\d{3})\b", r"\1\2", line) for line in table.splitlines()[2:]]
    numbers = [[float(word) for word in re.findall(r"[\d.e]+", row)] for row in rows]
    assert numbers == [list(map(float, size)) for size in auto.SIZES]


def test_a_base_goes_on_with_its_own_model_and_vocabulary(copy_of_run, monkeypatch):
    broken.said("import run --workdir base")
    experiment = auto._continued_experiment("w", auto.examine_text("text"), "base")
    assert experiment.init_from == "base" and experiment.corpus.tokenizer == "base/tokenizer"
    assert experiment.model.vocab_size == 45 and experiment.optimizer.schedule == "wsd"
    read = auto.base_lib.read

    def cased(folder):
        return dataclasses.replace(read(folder), tokenizer=types.SimpleNamespace(case="cased"))

    monkeypatch.setattr(auto.base_lib, "read", cased)
    monkeypatch.setattr(auto.hardware, "peak_flops", lambda _: None)
    monkeypatch.setattr(auto, "_EVAL_ROWS", 8)
    experiment, said = chosen(monkeypatch, base="base")
    assert experiment.corpus.case == "cased"
    assert not any("operations" in line for line in said)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["text"], "--hours"),
        (["--hours", "1"], "TEXT"),
        (["text", "--hours", "0"], "--hours"),
        (["text", "--hours", "inf"], "--hours"),
        (["text", "--hours", "nan"], "--hours"),
        (["nowhere", "--hours", "1"], "nowhere"),
        (["text", "--hours", "0.001"], "--hours 0.001"),
        (["text", "--hours", "0.001", "--set", "phases.0.steps=9"], "phases.0.steps"),
        (["text", "--hours", "1", "--base", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_chosen_is_named(here, monkeypatch, args, named):
    timed(monkeypatch, rate=0.25)
    broken.fails(["auto", *args, "--workdir", "w"], named)
    assert not pathlib.Path("w/experiment.json").exists()

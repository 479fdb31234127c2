"""Experiments as values: validation, --set, JSON, files."""

import json
import shutil
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_refusals import CLIP, MODERN, SPAN, TASK
from test_refusals import PRETRAINING as EXPERIMENT

from bert_jax import config
from bert_jax.config import Finetuning
from bert_jax.errors import InputError


def test_steps_fall_into_phases():
    assert [EXPERIMENT.phase_at(done) for done in (0, 89_999, 90_000, 99_999)] == [
        *((0, 0), (0, 0), (1, 90_000), (1, 90_000))
    ]
    moved = config.override(EXPERIMENT, ["phases.1.row_offset=7"])
    assert moved.rows_after(90_002) == [90_000 * 256, 7 + 2 * 256]
    rotary = ["model.kind=modern", "phases.1.global_rotary_base=9"]
    modern = config.override(EXPERIMENT, rotary)
    assert [modern.latest_model(n).global_rotary_base for n in (0, 90_000, 90_001)] == [
        *(160_000, 160_000, 9)
    ]


def test_set_changes_fields_of_every_type():
    changed = config.override(
        EXPERIMENT,
        [
            "model.hidden_size=1024",
            "model.num_attention_heads=16",
            "phases.1.steps=5e3",
            "optimizer.peak_learning_rate=3e-4",
            "corpus.sources=text:c,text:d",
            "corpus.case=cased",
            "corpus.mixture=3,0.5",
            "run.profile_steps=10,20",
            "seed=3",
        ],
    )
    assert changed.run.profile_steps == (10, 20)
    assert config.override(changed, ["run.profile_steps="]).run.profile_steps == ()
    assert changed.model.hidden_size == 1024
    assert [p.steps for p in changed.phases] == [90_000, 5_000]
    assert changed.optimizer.peak_learning_rate == 3e-4
    assert changed.corpus.sources == ("text:c", "text:d")
    assert changed.corpus.mixture == (3.0, 0.5)
    assert (changed.corpus.case, changed.seed) == ("cased", 3)


@pytest.mark.parametrize(
    "setting",
    [
        "model.local_window=64",
        "model.global_every=1",
        "phases.1.global_rotary_base=20000.0",
        "optimizer.decay_steps=5",
        "optimizer.reference_replicas=4",
        "optimizer.decay_shape=linear",
        "optimizer.matrix_learning_rate=0.5",
        "optimizer.momentum=0.5",
    ],
)
def test_a_setting_without_effect_is_noted_and_compared(setting):
    changed = config.override(EXPERIMENT, [setting])
    (note,) = config.notes_on_settings(changed)
    (difference,) = config.differences(EXPERIMENT, changed, "identity")
    assert setting in note and difference.startswith(setting.partition("=")[0])
    assert config.notes_on_settings(EXPERIMENT) == []
    of_use = f"{MODERN} {CLIP} optimizer.schedule=wsd optimizer.name=muon".split()
    assert config.notes_on_settings(config.override(EXPERIMENT, [*of_use, setting])) == []


@pytest.mark.parametrize(
    ("of_no_use", "settings", "of_use"),
    [
        ("optimizer.clip=none", "optimizer.clip_norm=2.0", "optimizer.clip=global"),
        (
            "adapt.how=frozen",
            "adapt.lora_rank=4 adapt.lora_alpha=4.0 adapt.lora_targets=key",
            "adapt.how=lora",
        ),
        (
            "task.kind=classify",
            "task.document_stride=64 task.max_query_length=32 task.max_answer_length=9 "
            "task.no_answer=possible",
            f"{SPAN} task.max_sequence_length=384",
        ),
        ("task.kind=classify", "task.max_target_length=64", "task.kind=generate"),
    ],
)
def test_a_setting_without_effect_is_noted_of_a_fine_tuning_too(of_no_use, settings, of_use):
    plain, given = Finetuning(name="x", task=TASK), settings.split()
    notes = config.notes_on_settings(config.override(plain, [of_no_use, *given]))
    assert {s.partition("=")[0] for s in given} == {
        note.split()[1].partition("=")[0] for note in notes
    }
    assert config.notes_on_settings(config.override(plain, [*of_use.split(), *given])) == []


def test_a_text_may_begin_with_a_mask():
    texts = ("[MASK] of the United States",)
    assert config.override(EXPERIMENT, [f"run.watch={texts[0]}"]).run.watch == texts
    listed = ["a, b", "[MASK]"]
    changed = config.override(EXPERIMENT, [f"run.watch={json.dumps(listed)}"])
    assert changed.run.watch == tuple(listed)


def test_runs_saved_with_packed_pairs_are_refused_and_others_do_not_miss_the_setting():
    tree = json.loads(config.to_json(EXPERIMENT))
    tree["data"]["packing"] = "none"
    tree["phases"][1] |= {"examples_per_row": 4, "predictions_per_row": 90}
    assert config.from_json(json.dumps(tree), "saved") == EXPERIMENT
    tree["data"]["packing"] = "pairs"
    with pytest.raises(InputError, match=r"^saved: data\.packing='pairs': was removed; [^\n]*$"):
        config.from_json(json.dumps(tree), "saved")


def test_micro_batches_may_be_one_number_or_one_a_phase():
    """Runs saved before there was one for each phase have a number."""
    tree = json.loads(config.to_json(EXPERIMENT))
    tree["parallelism"]["accumulation"] = 2
    assert config.from_json(json.dumps(tree), "saved").parallelism.accumulation == (2,)
    both = config.override(EXPERIMENT, ["parallelism.accumulation=2"])
    assert config.differences(both, config.from_json(json.dumps(tree), "saved"), "all") == []


def test_a_run_saved_without_a_seed_of_held_out_rows_goes_on_with_its_own():
    """The run's seed drew them, so that its losses stay of one kind."""
    changed = config.override(EXPERIMENT, ["seed=7"])
    tree = json.loads(config.to_json(changed))
    assert tree["data"].pop("eval_seed") == 0
    saved = config.from_json(json.dumps(tree), "saved")
    assert saved.data.eval_seed == saved.seed == 7
    (line,) = config.differences(saved, changed, "identity")
    assert line.startswith("data.eval_seed")
    assert config.from_json(config.to_json(saved), "saved") == saved


def test_differences_tell_identity_from_placement():
    changed = config.override(EXPERIMENT, ["seed=2", "run.log_every=7", "phases.0.steps=80000"])
    assert config.differences(EXPERIMENT, changed, "identity") == [
        "phases.0.steps: 90000 -> 80000",
        "seed: 0 -> 2",
    ]
    assert config.differences(EXPERIMENT, changed, "placement") == ["run.log_every: 100 -> 7"]


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("def experiment(): return 3", "returned int"),
        ("x = 1", "defines no experiment()"),
        ("def experiment():\n    return 1 / 0", ":2: ZeroDivisionError"),
        ("def experiment(:", "SyntaxError"),
        ("import none_such", ":1: ModuleNotFoundError"),
        ("import bert_jax.config as c\ndef experiment(): c.Model(hidden_size=5)", "_heads"),
        ("import sys\nsys.exit(3)", "SystemExit"),
    ],
)
def test_bad_experiment_files_are_named(code, word, tmp_path):
    file = tmp_path / "bad.py"
    file.write_text(code)
    with pytest.raises(InputError) as caught:
        config.load(str(file))
    assert str(file) in str(caught.value) and word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "not JSON"),
        ("[]", "object"),
        ("{}", "format_version"),
        ('{"format_version": 1}', "format_version 1"),
        ('{"format_version": 2}', "name: missing"),
        ('{"format_version": 2, "nam": "x"}', "did you mean name"),
    ],
)
def test_bad_json_is_named(text, word):
    with pytest.raises(InputError, match=r"some\.json") as caught:
        config.from_json(text, "some.json")
    assert word in str(caught.value)


PATHS = [path for path, _ in config.flatten(EXPERIMENT)]


@given(st.sampled_from(PATHS), st.one_of(st.text(max_size=20), st.integers(), st.floats()))
def test_any_value_of_any_field_is_taken_or_refused_by_name(path, value):
    try:
        changed = config.override(EXPERIMENT, [f"{path}={value}"])
    except InputError:
        return
    assert config.from_json(config.to_json(changed), "f") == changed


BASE = """
from bert_jax.config import Corpus, Experiment, Optimizer, Phase
def experiment():
    return Experiment(
        name="base", seed={seed}, corpus=Corpus(sources=("text:a",)),
        phases=(Phase(steps=9, sequence_length=16, max_predictions_per_seq=2),),
        optimizer=Optimizer(warmup_steps=2),
    )
"""
CHILD = """
import dataclasses
import base
def experiment():
    return dataclasses.replace(base.experiment(), name="child")
"""


def test_an_experiment_file_imports_what_lies_next_to_it_and_leaves_no_trace(tmp_path):
    """Two folders may have a file of the same name, and an edited one is read again."""
    path, modules = list(sys.path), set(sys.modules)
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / "base.py").write_text(BASE.format(seed=seed))
        (folder / "child.py").write_text(CHILD)
    for seed in (1, 2, 1):
        child = config.load(str(tmp_path / str(seed) / "child.py"))
        assert (child.name, child.seed) == ("child", seed)
    (tmp_path / "1" / "base.py").write_text(BASE.format(seed=3))
    assert config.load(str(tmp_path / "1" / "child.py")).seed == 3
    assert sys.path == path and not {"base", "child"} & set(sys.modules) - modules


@pytest.mark.parametrize("helper", ["experiment = 3", "def experiment(seed): return {}", "x = 1"])
def test_a_module_next_to_an_experiment_that_is_none_is_no_parent(helper, tmp_path):
    (tmp_path / "helper.py").write_text(helper)
    (tmp_path / "base.py").write_text(BASE.format(seed=1))
    (tmp_path / "child.py").write_text("import helper\n" + CHILD)
    _, origin = config.load_with_origin(str(tmp_path / "child.py"), ["seed=5"])
    assert origin["parent"] == "base.py"
    assert origin["differences"] == ["name: 'base' -> 'child'", "seed: 1 -> 5"]


SOURCE = """
from bert_jax.config import Corpus, Experiment, Phase

def experiment():
    return Experiment(
        name="x",
        corpus=Corpus(sources=("text:./shelf", "text:../more/*.txt", "text:here", "tfds:x")),
        phases=(Phase(steps=20_000, sequence_length=8, max_predictions_per_seq=1, batch_size=1),),
    )
"""


def test_sources_that_begin_with_a_dot_lie_where_the_experiment_s_file_does(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path / "a")
    loaded = config.load("b/x.py")
    folder = tmp_path.resolve() / "a" / "b"
    assert loaded.corpus.sources == (
        f"text:{folder}/./shelf",
        f"text:{folder}/./../more/*.txt",
        "text:here",
        "tfds:x",
    )
    monkeypatch.chdir(tmp_path)
    assert config.load("a/b/x.py") == loaded
    (tmp_path / "saved.json").write_text(config.to_json(loaded))
    assert config.load("saved.json") == loaded
    # Where it lies is no part of what it is.
    (tmp_path / "c").mkdir()
    shutil.copy("a/b/x.py", "c/y.py")
    elsewhere = config.load("c/y.py")
    assert elsewhere != loaded and config.differences(loaded, elsewhere, "all") == []
    named = dict(config.flatten(loaded))["corpus.sources"]
    assert named == ("text:./shelf", "text:./../more/*.txt", "text:here", "tfds:x")
    # What is typed is of the current folder, as ever.
    typed = config.override(loaded, ["corpus.sources=text:./shelf"])
    assert typed.corpus.sources == ("text:./shelf",)


@pytest.mark.parametrize(
    "source", ["text:gs://bucket/./x", "gs://bucket/./x", "text:./x", "text:a/./x", "tfds:a/1.0.0"]
)
def test_other_sources_are_called_as_they_are_written(source):
    assert config.source_name(source) == source

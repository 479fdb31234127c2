"""Texts that are written: rows, scores, steps over devices, and a run from end to end."""

import dataclasses
import pathlib
import subprocess
import sys

import broken
import jax
import kinds
import numpy as np
import pytest
import samples
import tuned
from compare import assert_identical
from test_steps import assert_same, train

from bert_jax.checkpoints import base as base_lib
from bert_jax.config import Finetuning, Parallelism, Task
from bert_jax.errors import InputError
from bert_jax.model import decoder
from bert_jax.model.encoder import Loop
from bert_jax.storage.workdir import Workdir, load_experiment
from bert_jax.tasks import adaptation, finetuning_job, scores
from bert_jax.tasks.generate import Generate, GenerateObjective
from bert_jax.tasks.rows import eval_batches
from bert_jax.training import feed, step
from bert_jax.training import mesh as mesh_lib

TASK = Task(
    kind="generate",
    train=("jsonl:x",),
    validation=("jsonl:x",),
    max_sequence_length=8,
    max_target_length=8,
)
KIND = Generate(TASK, (), kinds.TOKENIZER)


def pairs(*texts):
    return [kinds.sentence(source, label=target) for source, target in texts]


def some(count, seed=0):
    """The target is the source, turned around."""
    rng = np.random.default_rng(seed)
    drawn = [rng.choice(kinds.WORDS, rng.integers(1, 6)) for _ in range(count)]
    return pairs(*((" ".join(words), " ".join(words[::-1])) for words in drawn))


# --- rows ---


def test_a_target_begins_with_cls_and_ends_with_sep_and_what_is_too_long_is_counted():
    long = " ".join(kinds.WORDS[:9])
    rows = KIND.rows(pairs(("wa wb", "wc"), (long, "wd wa"), ("wa", long)))
    assert rows.ids[0].tolist() == kinds.ids("[CLS] wa wb [SEP]")
    assert rows.targets[0].tolist() == kinds.ids("[CLS] wc [SEP]")
    assert rows.ids[1].tolist() == kinds.ids("[CLS] wa wb wc wd we wf [SEP]")
    assert rows.targets[2].tolist() == kinds.ids("[CLS] wa wb wc wd we wf wg [SEP]")
    assert list(rows.truncated.values()) == [1, 1]


def test_each_piece_is_given_those_before_it():
    rows = KIND.rows(pairs(("wa wb", "wc"), ("wa", "wd we")))
    batch = rows.batch_like(np.array([0, 1]), np.array([0, 1]), 0)
    pad = ["[PAD]"] * 5
    shown = [" ".join(row) for row in (["[CLS] wc [PAD]", *pad], ["[CLS] wd we", *pad])]
    assert batch["decoder_ids"].tolist() == [kinds.ids(row) for row in shown]
    shown = [" ".join(row) for row in (["wc [SEP] [PAD]", *pad], ["wd we [SEP]", *pad])]
    assert batch["targets"].tolist() == [kinds.ids(row) for row in shown]
    assert batch["target_weights"].sum(axis=1).tolist() == [2, 3]
    # Rows of a step are padded as all of it, whoever makes them.
    longest = Generate(dataclasses.replace(TASK, max_target_length=99), (), kinds.TOKENIZER)
    rows = longest.rows(pairs(("wa", "wb"), ("wb", " ".join(kinds.WORDS * 2))))
    assert rows.batch_like(np.array([0]), np.arange(2), 0)["targets"].shape == (1, 64)


def test_texts_end_where_sep_stands_and_hold_no_other_special_piece():
    outputs = ["wa [CLS] ##s [SEP] wb", "[SEP] wa", "wa wb", "[PAD] wc [UNK] [MASK]"]
    found = KIND.answers([np.array(kinds.ids(text)) for text in outputs], None, None)
    assert [answer["generated"] for answer in found] == ["was", "", "wa wb", "wc [UNK]"]


# --- scores ---


def test_scores_are_those_of_sacrebleu_s_command(tmp_path):
    truth = ["Le chat est sur le tapis.", "Il pleut depuis hier soir à Paris.", "Oui."]
    written = ["Le chat est sous le tapis.", "Il pleut à Paris depuis hier.", ""]
    for name, texts in (("truth", truth), ("written", written)):
        (tmp_path / name).write_text("\n".join(texts) + "\n")
    command = [sys.executable, "-m", "sacrebleu", tmp_path / "truth", "-i", tmp_path / "written"]
    command += ["-m", "chrf", "bleu", "-b", "-w", "6"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    theirs = [float(number) for number in done.stdout.replace(",", " ").split() if "." in number]
    found = scores.text_scores(truth, written)
    assert [found["bleu"] * 100, found["chrf"] * 100] == pytest.approx(theirs, abs=1e-5)
    assert 0.2 < found["bleu"] < found["chrf"] < 0.9


# --- steps ---


def objective():
    made = kinds.objective("tag")
    return GenerateObjective(
        made.model,
        *("labels", "decoder", 0, 1),
        made.adapt,
        first=kinds.TOKENIZER.cls_id,
        last=kinds.TOKENIZER.sep_id,
        length=TASK.max_target_length,
    )


def forward(params, parallelism, mesh):
    rows = KIND.rows(some(11))
    of_eval = eval_batches(rows, kinds.TOKENIZER.pad_id, 4)
    return adaptation.compile_forward(objective(), parallelism, mesh)(params, None, of_eval, rows)


@pytest.mark.long
@pytest.mark.parametrize(
    "parallelism",
    [
        pytest.param(Parallelism(state="zero3", accumulation=2), id="zero3"),
        pytest.param(Parallelism(), id="replicated", marks=pytest.mark.nightly),
        pytest.param(Parallelism(state="zero1", tensor=2), id="zero1", marks=pytest.mark.nightly),
    ],
)
def test_it_is_learned_and_written_alike_on_four_devices(parallelism):
    task = objective(), KIND.rows(some(11))
    found, expected = train(*task, parallelism), train(*task, devices=1)
    assert_same(found, expected)
    mesh = samples.mesh_of(4, parallelism)
    abstract = step.abstract_state(task[0], kinds.OPTIMIZER, parallelism, mesh)
    places = jax.tree.map(lambda s: s.sharding, abstract["params"])
    outputs, loss = forward(feed.put(expected[0]["params"], places), parallelism, mesh)
    params = expected[0]["params"]
    theirs, other_loss = forward(params, Parallelism(), samples.mesh_of(1))
    assert_identical(outputs, theirs)
    assert loss == pytest.approx(other_loss, rel=1e-5)


@pytest.mark.long
def test_the_held_out_loss_is_the_mean_over_pieces_of_targets():
    task, rows, everything = objective(), KIND.rows(some(11)), np.arange(11)
    params = task.init_params(jax.random.key(0))
    _, loss = forward(params, Parallelism(), samples.mesh_of(1))
    batch = rows.batch_like(everything, everything, 0) | {"row_weights": np.ones(11, np.float32)}
    run = jax.jit(lambda params: task.logits(params, None, batch, None, Loop()))
    logits = np.asarray(run(params), np.float64)
    nll = np.log(np.exp(logits).sum(axis=-1))
    nll -= np.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    assert loss == pytest.approx(nll[batch["target_weights"] > 0].mean(), rel=1e-5)


# --- runs ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base, a task and its finished run."""
    here = tmp_path_factory.mktemp("generate")
    tuned.write_base(here / "base")
    tuned.write_task(here, "generate")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        tuned.finetune()
    return here


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)


@pytest.mark.long
def test_a_run_begins_with_the_base_in_both_halves_and_keeps_its_worst_texts(here):
    experiment = load_experiment(Workdir("run"), Finetuning)
    setup = finetuning_job.FinetuningJob(experiment, Workdir("run"), lambda line: None)
    setup.check_inputs(mesh_lib.one_device())
    fresh = step.init_state(setup.objective, setup.optimizer, 0)
    begun, _ = setup.initial_state(fresh)
    base = base_lib.read(pathlib.Path("base")).params
    params = jax.device_get(begun["params"])
    assert_identical(params["encoder"], base["encoder"])
    assert_identical(params["masked_lm"], base["masked_lm"])
    for name, tree in params["decoder"]["layers"].items():
        there = base["encoder"]["layers"].get(name, fresh["params"]["decoder"]["layers"][name])
        assert_identical(tree, jax.device_get(there))
    kept = {line["kind"]: line for line in tuned.lines("run/predictions.jsonl")}
    worst = kept["mistakes"]["worst"]
    assert len(worst) == 11 and all(one["truth"] != one["predicted"] for one in worst)


@pytest.mark.long
def test_texts_are_written_one_by_one_and_in_a_table_as_they_are_scored(here):
    asked = ["wa wb", "xa xb xc"]
    found = tuned.predict(*asked)
    assert [answer["text"] for answer in found] == asked
    assert all(set(answer) == {"text", "generated"} for answer in found)
    (line,) = tuned.predict("--score", "--out", "all.jsonl")
    (scored,) = [line for line in tuned.lines("run/metrics.jsonl") if line["kind"] == "scores"]
    assert line["chrf"] == pytest.approx(scored["chrf"], rel=1e-6)
    assert line["loss"] == pytest.approx(scored["loss"], rel=1e-5)
    broken.fails("predict --workdir run --input test --out t.csv", "--input test: ")
    broken.said("predict --workdir run --input jsonl:test --out table.jsonl")
    answers = [line["generated"] for line in tuned.lines("all.jsonl")]
    assert [line["predicted"] for line in tuned.lines("table.jsonl")] == answers


@pytest.mark.long
def test_texts_are_searched_for_as_widely_as_is_asked(here, monkeypatch):
    widths, search = [], decoder.search
    monkeypatch.setattr(decoder, "search", lambda *a: widths.append(a[3].beams) or search(*a))
    found = tuned.predict("--beam", "3", "wa wb", "xa xb xc")
    assert [answer["text"] for answer in found] == ["wa wb", "xa xb xc"] and set(widths) == {3}


@pytest.mark.long
def test_what_a_generating_run_cannot_do_is_refused_by_name(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    finetune = "finetune task.py --from base --workdir new --set"
    for command, words in (
        ("predict --workdir run --beam 0 wa", "--beam"),
        # As many as would take all memory.
        ("predict --workdir run --beam 65 wa", "--beam"),
        ("export --workdir run --as task --out new", "task.kind=generate"),
        (f"{finetune} adapt.how=lora", "adapt.how"),
        (f"{finetune} task.labels=a,b", "task.labels"),
        (f"{finetune} epochs=1", "pip install 'bert-jax[generate]'"),
    ):
        broken.fails(command, words)
    assert not pathlib.Path("new").exists()


def test_only_encoders_of_kind_bert_have_a_decoder():
    modern = dataclasses.replace(kinds.MODEL, kind="modern", num_hidden_layers=1, global_every=1)
    with pytest.raises(InputError, match=r"b: model\.kind=modern: task\.kind=generate"):
        adaptation.require_usable(modern, Finetuning(name="x", task=TASK), "b")
    long = dataclasses.replace(TASK, max_target_length=41)
    with pytest.raises(InputError, match=r"task\.max_target_length=41: longer than"):
        adaptation.require_usable(kinds.MODEL, Finetuning(name="x", task=long), "b")

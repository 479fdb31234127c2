"""Fine-tunings from end to end: what is learned, kept, gone on with and refused."""

import contextlib
import pathlib
import shutil

import broken
import jax
import numpy as np
import pytest
import tuned
from compare import assert_identical
from etils import epath
from small_run import on_two

from bert_jax.checkpoints.load import Checkpoints
from bert_jax.config import Finetuning
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.running.lines import should_stop_early
from bert_jax.storage.mirror import open_workdir
from bert_jax.storage.workdir import Workdir, load_experiment
from bert_jax.tasks.finetuning_job import FinetuningJob
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import step

LORA = ("adapt.how=lora", "epochs=3")


@pytest.fixture(scope="module")
def folder(finished_run, tmp_path_factory):
    """A finished pre-training `run`, and a task with its examples."""
    place = tmp_path_factory.mktemp("tasks") / "copy"
    shutil.copytree(finished_run, place)
    tuned.write_task(place, "classify", epochs=8)
    return place


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)


def finetune(workdir, *settings, base="--from run"):
    """The command."""
    words = " ".join(f"--set {setting}" for setting in settings)
    return f"finetune task.py {base} --workdir {workdir} {words}"


def finished(workdir, *settings, **options):
    broken.said(finetune(workdir, *settings, **options))
    return lines(workdir)


def lines(workdir, name="metrics"):
    return tuned.lines(f"{workdir}/{name}.jsonl")


def final_state(workdir):
    experiment = load_experiment(Workdir(workdir), Finetuning)
    setup = FinetuningJob(experiment, Workdir(workdir), lambda line: None)
    mesh = mesh_lib.make_mesh(experiment.parallelism)
    setup.check_inputs(mesh)
    abstract = step.abstract_state(setup.objective, setup.optimizer, experiment.parallelism, mesh)
    saved = Checkpoints(epath.Path(workdir, "checkpoints"))
    number = max(saved.steps)
    return setup, jax.device_get(saved.restore(number, abstract).state)


@pytest.fixture(scope="module")
def full(folder):
    """A run of 32 steps that nothing disturbed."""
    with contextlib.chdir(folder):
        finished("full")
    return "full"


@pytest.fixture(scope="module")
def lora(folder):
    with contextlib.chdir(folder):
        finished("lora", *LORA)
    return "lora"


@pytest.mark.long
def test_labels_are_learned_from_the_weights_of_the_run_and_a_fresh_head(full):
    found = lines(full)
    trained = [line for line in found if line["kind"] == "train"]
    assert trained[0]["loss"] > 2 * trained[-1]["loss"]
    assert min(line["filled"] for line in trained) > 0.5  # texts of 4 tokens share rows of 30
    scored = [line for line in found if line["kind"] == "scores"]
    assert [line["step"] for line in scored] == list(range(4, 33, 4))
    assert scored[-1]["score"] == scored[-1]["accuracy"] > 0.9 and scored[-1]["examples"] == 11
    setup, state = final_state(full)
    fresh = step.init_state(setup.objective, setup.optimizer, setup.experiment.seed)
    begun, _ = setup.initial_state(fresh)
    theirs = jax.device_get(LoadedModel.of(open_workdir("run")).params)
    for name in ("encoder", "pooler"):
        assert_identical(jax.device_get(begun["params"][name]), theirs[name])
    kernels = [t["encoder"]["layers"]["query"]["kernel"] for t in (state["params"], theirs)]
    assert np.abs(kernels[0] - kernels[1]).max() > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("how", [pytest.param("full", marks=pytest.mark.nightly), "lora"])
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(how, request):
    """In the middle of an epoch and of a line; the base need not be named again."""
    settings = LORA if how == "lora" else ()
    with tuned.signal_before(6):
        code, err = broken.call(finetune(f"{how}-stopped", *settings))
    assert code == 75, err
    again = finished(f"{how}-stopped", *settings, base="")
    undisturbed = request.getfixturevalue(how)
    assert again == lines(undisturbed)
    assert_identical(final_state(f"{how}-stopped")[1], final_state(undisturbed)[1])


@pytest.mark.nightly
def test_two_processes_are_one_run(lora):
    """Each reads the base's checkpoint and the examples, once they are connected."""
    settings = [word for setting in LORA for word in ("--set", setting)]
    on_two("bert-jax", "finetune", "task.py", "--from", "run", "--workdir", "pod", *settings)
    for ours, theirs in zip(lines("pod"), lines(lora), strict=True):
        assert ours.pop("kind") == theirs.pop("kind")
        for line in (ours, theirs):  # texts share rows only with those on the same device
            line.pop("filled", None)
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)


@pytest.mark.long
def test_a_checkpoint_holds_what_learns_alone(lora):
    setup, state = final_state(lora)
    begun = setup.objective.init_params(jax.random.key(setup.experiment.seed))
    assert np.abs(state["params"]["head"]["kernel"] - begun["head"]["kernel"]).max() > 1e-3
    assert set(state["params"]) == {"head", "lora"}
    saved = Checkpoints(epath.Path(lora, "checkpoints"))
    names = set(saved.metadata(max(saved.steps))["checksums"])
    assert names and not [name for name in names if "encoder" in name or "pooler" in name]


@pytest.mark.long
def test_a_run_whose_evaluations_are_in_vain_ends_and_so_does_one_that_goes_on():
    """With so small a learning rate no float32 moves: 5 is the best, 10 and 15 are in vain."""
    settings = ("patience=2", "run.eval_every=5", "run.checkpoint_every=5", "run.log_every=4")
    settings += ("run.keep_checkpoints=9", "class_weights=balanced")
    settings += ("optimizer.peak_learning_rate=1e-30",)
    out = broken.said(finetune("patient", *settings))
    assert "step 15: early stopping" in out
    assert "of step 5 (patience)" in out and "finished: step 15" in out
    assert "finetune: class weights bad 1, good 1" in out
    done = lines("patient")
    assert [x["step"] for x in done if x["kind"] == "scores"] == [5, 10, 15]
    # Those since the last line have one, too, though none is due.
    assert [x["step"] for x in done if x["kind"] == "train"] == [4, 8, 12, 15]
    assert "the run is finished" in broken.said("checkpoints patient")
    (end,) = (x for x in lines("patient", "predictions") if x["kind"] == "mistakes")
    assert end["step"] == 15
    # What was killed before its end comes to the same.
    for number in (10, 15):
        shutil.rmtree(f"patient/checkpoints/{number}")
    assert "resume: from step 5" in broken.said(finetune("patient", *settings))
    assert lines("patient") == done


def test_evaluations_are_in_vain_if_none_of_the_last_is_the_lowest():
    for losses, patience, expected in (
        ([3, 2, 1], 1, False),
        ([3, 2, 2], 1, True),
        ([1, 3, 2], 2, True),
        ([1, 3, 0.9], 2, False),
        ([1, 3], 2, False),
        ([1, 3, 3, 3], 0, False),
    ):
        assert should_stop_early(list(enumerate(losses)), patience) is expected


@pytest.mark.long
def test_flags_alone_are_a_task_file_and_a_run_goes_on_by_its_workdir():
    flags = "--kind classify --train jsonl:train --validation jsonl:test --from run"
    sets = "--set task.max_sequence_length=30 --set epochs=0.5 --set batch_size=4"
    broken.said(f"finetune {flags} --workdir flagged {sets}")
    experiment = load_experiment(Workdir("flagged"), Finetuning)
    assert experiment.name == "flagged" and experiment.task.text_column == "sentence"
    broken.said("finetune --workdir flagged")
    broken.fails(f"finetune task.py {flags} --workdir new", "--kind: task.py sets this")


# --- refused, in one line, with nothing left behind ---


def refuses(workdir, *words, settings=(), base="--from run"):
    broken.refuses(broken.Case("", finetune(workdir, *settings, base=base), words))


@pytest.mark.long
def test_a_run_goes_on_over_its_own_base_settings_and_examples_alone(lora):
    """Wherever the base lies."""
    shutil.copytree("run", "moved")
    finished(lora, *LORA, base="--from moved")
    newest = max(pathlib.Path("moved/checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    shutil.rmtree(newest)  # the run as it was some steps before
    refuses(lora, "--from moved: its weights are not", settings=LORA, base="--from moved")
    words = (f"{lora}: this run was started with other settings", "adapt.lora_rank: 8 -> 4")
    refuses(lora, *words, settings=(*LORA, "adapt.lora_rank=4"))
    train = pathlib.Path("train")
    before = train.read_text()
    for label, what in (
        ("bad", "the examples are not those"),
        ("maybe", "this run has the labels"),
    ):
        train.write_text(before.replace('"good"', f'"{label}"', 1))
        refuses(lora, f"{lora}: {what}", "--workdir", settings=LORA)
    train.write_text(before)


def test_each_command_takes_its_own_kind_of_file(lora):
    for command, word in (
        ("finetune small.py --from run --workdir new", "small.py: is a pre-training"),
        ("pretrain task.py --workdir new", "bert-jax finetune"),
        # And a workdir of the other kind is not gone on with.
        ("finetune task.py --from run --workdir run", "run"),
        (f"pretrain small.py --workdir {lora}", lora),
        (f"evaluate --workdir {lora}", "bert-jax finetune"),
        (f"import {lora} --workdir new", "bert-jax finetune"),
    ):
        broken.refuses(broken.Case("", command, (word,)))

"""Fine-tunings from end to end: what is learned, kept, gone on with and refused."""

import collections
import contextlib
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys

import broken
import jax
import numpy as np
import pytest
import small_run
import tuned
from compare import assert_identical
from etils import epath

from bert_jax import cli
from bert_jax.config import Finetuning
from bert_jax.running.checkpoint import Checkpoints
from bert_jax.running.lines import in_vain
from bert_jax.storage.workdir import Workdir, load_experiment
from bert_jax.tasks.job import FinetuningSetup
from bert_jax.tasks.rows import TrainBatches
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import step

TASKFILE = """
from bert_jax.config import Finetuning, Optimizer, Run, Task


def experiment():
    return Finetuning(
        name="toy", task=Task({task}, max_sequence_length=16), epochs=20, batch_size=16,
        optimizer=Optimizer(
            name="adamw", peak_learning_rate=1e-2, warmup_steps=0, schedule="linear"
        ),
        run=Run(log_every=5, eval_every=100, eval_batch_size=32, checkpoint_every=25),
    )
"""
TASKS = {
    "classify": 'kind="classify", train=("tsv:train.tsv",), validation=("tsv:test.tsv",)',
    "tag": 'kind="tag", text_column="0", label_column="1", train=("conll:train.conll",), '
    'validation=("conll:test.conll",)',
    "span": 'kind="span", document_stride=4, max_query_length=3, max_answer_length=4, '
    'train=("squad:train.json",), validation=("squad:test.json",)',
}
OTHERS = [f"w{c}" for c in "cdefghijklmnopqrst"]


def write_examples(name, count, seed):
    """The label is whether `wa` or `wb` is there; `xa` is a name, and `xb` goes on with it; the
    answer is what stands behind `xc`.
    """
    rng = random.Random(seed)
    lines, sentences, questions = ["sentence\tlabel"], [], []
    for number in range(count):
        words = [rng.choice(OTHERS) for _ in range(rng.randint(3, 6))]
        label = rng.choice(["no", "yes"])
        place = rng.randrange(len(words))
        seen = [*words[:place], "wa" if label == "yes" else "wb", *words[place:]]
        lines.append(f"{' '.join(seen)}\t{label}")
        named = [*words[:place], "xa", "xb", *words[place:]]
        tags = {"xa": "B-X", "xb": "I-X"}
        sentences.append("".join(f"{word} {tags.get(word, 'O')}\n" for word in named))
        long = [*words, *words[:place], "xc", "xd", *words]
        context = " ".join(long)
        answer = {"text": "xd", "answer_start": context.index("xd")}
        questions.append({"id": str(number), "question": "xe xf", "answers": [answer]})
        questions[-1] = {"context": context, "qas": [questions[-1]]}
    pathlib.Path(f"{name}.tsv").write_text("\n".join(lines) + "\n")
    pathlib.Path(f"{name}.conll").write_text("\n".join(sentences))
    tree = {"version": "1.1", "data": [{"paragraphs": questions}]}
    pathlib.Path(f"{name}.json").write_text(json.dumps(tree))


@pytest.fixture(scope="module")
def folder(finished_run, tmp_path_factory):
    """A finished pre-training `run`, and task files with their examples."""
    place = tmp_path_factory.mktemp("tasks") / "copy"
    shutil.copytree(finished_run, place)
    with contextlib.chdir(place):
        write_examples("train", 64, 0)
        write_examples("test", 32, 1)
        for kind, text in TASKS.items():
            pathlib.Path(f"{kind}.py").write_text(TASKFILE.replace("{task}", text))
    return place


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)


def finetune(workdir, *settings, kind="classify", base="--from run"):
    words = " ".join(f"--set {setting}" for setting in settings)
    return broken.call(f"finetune {kind}.py {base} --workdir {workdir} {words}")


def finished(workdir, *settings, **options):
    code, err = finetune(workdir, *settings, **options)
    assert code == 0, err
    return lines(workdir)


def lines(workdir, name="metrics"):
    return [json.loads(line) for line in pathlib.Path(workdir, f"{name}.jsonl").open()]


def setup_of(workdir):
    experiment = load_experiment(Workdir(workdir), Finetuning)
    setup = FinetuningSetup(experiment, Workdir(workdir), lambda line: None)
    setup.read()
    setup.require_runnable(mesh_lib.make_mesh(experiment.parallelism))
    return setup


def final_state(workdir):
    setup = setup_of(workdir)
    mesh = mesh_lib.make_mesh(setup.experiment.parallelism)
    abstract = step.abstract_state(
        setup.objective, setup.optimizer, setup.experiment.parallelism, mesh
    )
    with Checkpoints(epath.Path(workdir, "checkpoints"), setup.experiment.run, "read") as saved:
        number = max(saved.steps)
        return setup, jax.device_get(saved.restore(number, abstract).state)


@pytest.fixture(scope="module")
def full(folder):
    """A run of 80 steps that nothing disturbed."""
    with contextlib.chdir(folder):
        finished("full")
    return "full"


@pytest.mark.nightly
def test_a_profiled_fine_tuning_is_the_one_without_bit_for_bit(full):
    finished("profiled", "run.profile_steps=3,6")
    assert os.listdir("profiled/profile/plugins/profile") == ["steps_4_to_6"]
    profiled, plain = (
        pathlib.Path(name, "metrics.jsonl").read_bytes() for name in ("profiled", full)
    )
    assert profiled == plain
    assert_identical(final_state("profiled")[1], final_state(full)[1])


@pytest.fixture(scope="module")
def lora(folder):
    with contextlib.chdir(folder):
        finished("lora", "adapt.how=lora", "epochs=3")
    return "lora"


def test_a_sentence_s_label_is_learned(full):
    found = lines(full)
    losses = [line["loss"] for line in found if line["kind"] == "train"]
    assert losses[0] > 0.5 > 0.2 > losses[-1]
    scores = [line for line in found if line["kind"] == "scores"]
    assert [line["step"] for line in scores] == [80]
    assert scores[-1]["score"] == scores[-1]["accuracy"] > 0.9
    assert scores[-1]["examples"] == 32


@pytest.mark.parametrize("kind", ["tag", pytest.param("span", marks=pytest.mark.long)])
def test_tags_and_answers_are_learned(kind):
    scores = finished(kind, kind=kind)[-1]
    assert scores["kind"] == "scores" and scores["score"] > 0.9
    name = {"tag": "entity_f1", "span": "f1"}[kind]
    assert scores["score"] == scores[name]


def test_it_begins_with_the_weights_of_the_run_and_a_fresh_head(full, folder):
    """Before the first step; and they are not what it ends with."""
    setup, state = final_state(full)
    mesh = mesh_lib.make_mesh(setup.experiment.parallelism)
    fresh = step.init_state(setup.objective, setup.optimizer, setup.experiment.seed)
    places = jax.tree.map(
        lambda s: s.sharding,
        step.abstract_state(setup.objective, setup.optimizer, setup.experiment.parallelism, mesh),
    )
    begun, _ = setup.initial_state(jax.device_put(fresh, places))
    from bert_jax.loaded import Loaded

    theirs = Loaded.of(epath.Path("run")).params
    for name in ("encoder", "pooler"):
        assert_identical(jax.device_get(begun["params"][name]), jax.device_get(theirs[name]))
    kernels = [t["encoder"]["layers"]["query"]["kernel"] for t in (state["params"], theirs)]
    assert np.abs(kernels[0] - np.asarray(kernels[1])).max() > 1e-3


def stopped(monkeypatch, at, workdir, *settings):
    """As `finetune`, with SIGTERM before a step."""
    with tuned.signal_before(at, monkeypatch):
        code, err = finetune(workdir, *settings)
    assert code == 75, err


@pytest.mark.parametrize("how", [pytest.param("full", marks=pytest.mark.long), "lora"])
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(how, request, monkeypatch):
    """In the middle of an epoch and of a line; the base need not be named again."""
    settings = ("adapt.how=lora", "epochs=3") if how == "lora" else ()
    stopped(monkeypatch, 7, f"{how}-stopped", *settings)
    again = finished(f"{how}-stopped", *settings, base="")
    undisturbed = request.getfixturevalue(how)
    assert again == lines(undisturbed)
    assert_identical(final_state(f"{how}-stopped")[1], final_state(undisturbed)[1])


@pytest.mark.nightly
def test_two_processes_are_one_run(lora):
    """Each reads the base's checkpoint and the examples, once they are connected."""
    command = ["finetune", "classify.py", "--from", "run", "--workdir", "pod"]
    command += ["--set", "adapt.how=lora", "--set", "epochs=3"]
    root = str(pathlib.Path(__file__).parents[2])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "launch", "local", "--processes", "2", "--"),
            *(sys.executable, "-m", "bert_jax.cli", *command),
        ],
        env=os.environ | small_run.settings(1) | {"PYTHONPATH": root},
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    assert len(lines("pod")) == len(lines(lora))
    for ours, theirs in zip(lines("pod"), lines(lora), strict=True):
        assert ours.pop("kind") == theirs.pop("kind")
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)


@pytest.mark.long
def test_a_run_goes_back_over_steps_without_a_loss(monkeypatch):
    good = TrainBatches.batch

    def batch(self, number, rows):
        found = good(self, number, rows)
        return found | {"row_weights": found["row_weights"] * (np.nan if number in (4, 5) else 1)}

    few = ("epochs=3", "optimizer.bad_steps_in_a_row=2", "run.checkpoint_every=2")
    monkeypatch.setattr(TrainBatches, "batch", batch)
    finished("back", *few)
    _, state = final_state("back")
    assert state["skipped_steps"][:4].tolist() == [3, 4, 5, -1] and state["step"] == 12
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state["params"]))


@pytest.mark.parametrize("how", ["lora", "frozen"])
def test_a_checkpoint_holds_what_learns_alone(how, request):
    workdir = request.getfixturevalue("lora") if how == "lora" else "frozen"
    if how == "frozen":
        finished("frozen", "adapt.how=frozen", "epochs=1")
    setup, state = final_state(workdir)
    begun = setup.objective.init_params(jax.random.key(setup.experiment.seed))
    assert np.abs(state["params"]["head"]["kernel"] - begun["head"]["kernel"]).max() > 1e-3
    assert set(state["params"]) == {"head"} | ({"lora"} if how == "lora" else set())
    with Checkpoints(epath.Path(workdir, "checkpoints"), setup.experiment.run, "read") as saved:
        names = set(saved.metadata(max(saved.steps))["checksums"])
    assert names and not [name for name in names if "encoder" in name or "pooler" in name]


# --- refused, in one line, with nothing left behind ---


def refuses(workdir, *words, settings=(), kind="classify", base="--from run"):
    words_of = " ".join(f"--set {setting}" for setting in settings)
    command = f"finetune {kind}.py {base} --workdir {workdir} {words_of}"
    broken.refuses(broken.Case("", command, words))


@contextlib.contextmanager
def changed(name, old, new):
    """A file with other text, for a while."""
    path = pathlib.Path(name)
    before = path.read_text()
    assert old in before
    path.write_text(before.replace(old, new, 1))
    try:
        yield
    finally:
        path.write_text(before)


def test_flags_alone_are_a_task_file_and_a_run_goes_on_by_its_workdir():
    sets = (
        "--set task.max_sequence_length=16 --set epochs=0.5 --set batch_size=16 "
        "--set run.log_every=1 --set run.checkpoint_every=1"
    )
    flags = "--kind classify --train train.tsv --validation test.tsv --from run"
    code, err = broken.call(f"finetune {flags} --workdir flagged {sets}")
    assert code == 0, err
    experiment = load_experiment(Workdir("flagged"), Finetuning)
    assert experiment.name == "flagged" and experiment.task.text_column == "sentence"
    code, err = broken.call("finetune --workdir flagged")
    assert code == 0, err
    assert len([line for line in lines("flagged") if line["kind"] == "train"]) == 2
    code, err = broken.call(f"finetune classify.py {flags} --workdir new")
    assert code == 2 and "--kind: classify.py sets this" in err


def test_without_a_base_nothing_begins():
    refuses("new", "--from: name a base or a run", base="")
    refuses("new", "nowhere", base="--from nowhere")


def test_another_base_is_refused_where_a_run_goes_on(lora):
    settings = ("adapt.how=lora", "epochs=3")
    shutil.copytree("run", "other")
    newest = max(pathlib.Path("other/checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    shutil.rmtree(newest)  # the run as it was some steps before
    refuses(lora, "--from other: holds other weights", settings=settings, base="--from other")


def test_the_same_base_may_lie_elsewhere(lora):
    shutil.copytree("run", "moved")
    finished(lora, "adapt.how=lora", "epochs=3", base="--from moved")


def test_other_settings_are_refused_where_a_run_goes_on(lora):
    words = (f"{lora}: this run was started with other settings", "adapt.lora_rank: 8 -> 4")
    refuses(lora, *words, settings=("adapt.how=lora", "epochs=3", "adapt.lora_rank=4"))


@pytest.mark.parametrize(
    ("label", "what"),
    [
        ("no", "the examples are not those that this run learned from"),
        ("maybe", "this run learned the labels"),
    ],
)
def test_other_examples_are_refused_where_a_run_goes_on(lora, label, what):
    """Though they have the same settings; also where there is one more label."""
    with changed("train.tsv", "\tyes", f"\t{label}"):
        words = (f"{lora}: {what}", "--workdir")
        refuses(lora, *words, settings=("adapt.how=lora", "epochs=3"))


def test_a_label_that_was_never_taught_is_named_by_its_line():
    with changed("test.tsv", "\tyes", "\tmaybe"):
        number = pathlib.Path("test.tsv").read_text().split("\tmaybe")[0].count("\n") + 1
        refuses("new", f"test.tsv:{number}: label 'maybe'", "task.labels")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("task.text_column=text",), ("train.tsv:1", "'text'")),
        (("task.train=tsv:none.tsv",), ("none.tsv",)),
        (("task.max_sequence_length=33",), ("task.max_sequence_length=33", "position table", "32")),
        (("batch_size=6",), ("finetuning.batch_size=6",)),
        (("adapt.how=lora", "parallelism.state=zero1"), ("adapt.how=lora learns so little",)),
    ],
    ids=lambda value: value[0] if "=" in value[0] else "",
)
def test_settings_that_cannot_be_are_refused(settings, words):
    refuses("new", *words, settings=settings)


def test_each_command_takes_its_own_kind_of_file(full):
    refuses(
        "new", "small.py: is a pre-training, not a fine-tuning; `bert-jax pretrain`", kind="small"
    )
    case = broken.Case("", "pretrain classify.py --workdir new", ("`bert-jax finetune`",))
    broken.refuses(case)
    # And a workdir of the other kind is not gone on with.
    refuses("run", "run")
    broken.refuses(broken.Case("", f"pretrain small.py --workdir {full}", (full,)))


PATIENT = ("patience=2", "run.eval_every=5", "run.checkpoint_every=5", "run.keep_checkpoints=9")


@pytest.mark.long
def test_a_run_whose_evaluations_are_in_vain_ends_and_so_does_one_that_goes_on(capsys):
    """With so small a learning rate no float32 moves: 5 is the best, 10 and 15 are in vain."""

    def said(command):
        capsys.readouterr()
        assert cli.main(command.split()) == 0
        return capsys.readouterr().out

    settings = (*PATIENT, "optimizer.peak_learning_rate=1e-30", "class_weights=balanced")
    settings += ("run.log_every=4",)
    finetune_ = " ".join(
        [
            "finetune classify.py --from run --workdir patient",
            *(f"--set {setting}" for setting in settings),
        ]
    )
    out = said(finetune_)
    assert "step 15: ends here, since of 2 evaluations none is below the held-out loss" in out
    assert "of step 5 (patience)" in out and "finished: step 15" in out
    counts = collections.Counter(
        line.split("\t")[1] for line in pathlib.Path("train.tsv").read_text().splitlines()[1:]
    )
    shown = ", ".join(f"{name} {64 / 2 / counts[name]:.3g}" for name in ("no", "yes"))
    assert f"finetune: class weights {shown}" in out
    done = lines("patient")
    assert [x["step"] for x in done if x["kind"] == "scores"] == [5, 10, 15]
    # Those since the last line have one, too, though none is due.
    assert [x["step"] for x in done if x["kind"] == "train"] == [4, 8, 12, 15]
    assert "the run is finished" in said("checkpoints patient")
    assert cli.main(["doctor", "patient"]) == 2  # which has no corpus
    capsys.readouterr()
    (end,) = (x for x in lines("patient", "predictions") if x["kind"] == "mistakes")
    assert end["step"] == 15
    # What was killed before its end comes to the same.
    for number in (10, 15):
        shutil.rmtree(f"patient/checkpoints/{number}")
    assert "resume: from step 5" in said(finetune_) and lines("patient") == done


@pytest.mark.nightly
def test_a_run_that_has_ended_early_is_whole_and_its_loss_counts_labels_alike(capsys):
    done = finished("weighed", *PATIENT, "class_weights=balanced", "patience=1", "epochs=8")
    assert finished("weighed", *PATIENT, "class_weights=balanced", "patience=1", "epochs=8") == done
    capsys.readouterr()
    assert cli.main(["predict", "--workdir", "weighed", "--score"]) == 0
    scored = json.loads(capsys.readouterr().out)
    assert scored["loss"] == pytest.approx(done[-1]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("losses", "patience", "expected"),
    [
        ([3, 2, 1], 1, False),
        ([3, 2, 2], 1, True),
        ([1, 3, 2], 2, True),
        ([1, 3, 0.9], 2, False),
        ([1, 3], 2, False),
        ([1, 3, 3, 3], 0, False),
    ],
)
def test_evaluations_are_in_vain_if_none_of_the_last_is_the_lowest(losses, patience, expected):
    assert in_vain(list(enumerate(losses)), patience) is expected

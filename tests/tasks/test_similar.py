"""`similar`: one step however it is cut, whole runs, and what is refused."""

import dataclasses
import json
import pathlib
from types import SimpleNamespace

import broken
import kinds
import numpy as np
import pytest
import small_run
import tokenizers
import tuned
from compare import assert_close
from test_steps import train

from bert_jax import cli
from bert_jax.checkpoints.base import Base
from bert_jax.config import Adapt, Finetuning, Parallelism, Task, Vectors
from bert_jax.data import stream
from bert_jax.data.batches import Ids
from bert_jax.errors import InputError
from bert_jax.storage.mirror import open_workdir
from bert_jax.tasks import similar
from bert_jax.tasks.examples import Sentence, Tally
from bert_jax.tasks.finetuned_model import TaskModel
from bert_jax.tasks.similar import Similar, SimilarObjective
from bert_jax.text import library
from bert_jax.training import optimizer

# Of float32 gradients whose sums have another order: by the CPU up to 1.05e-6 of the largest entry.
ROUNDING = 2e-6
LOSSES = {
    "contrastive": Vectors(temperature_is="learned", dimensions=(4, 16)),
    "cosine": Vectors(loss="cosine"),
    "distil": Vectors(loss="distil", teacher="t", projection="linear", geometry=5.0),
}


def setting(loss):
    """An objective with dropout on, and its rows: of `contrastive` three texts an example."""
    texts = {"contrastive": 3, "cosine": 2, "distil": 1}[loss]
    columns = dict(zip(("second_column", "negative_column"), "bc"[: texts - 1], strict=False))
    source = ("jsonl:x",)
    task = Task(kind="similar", train=source, validation=source, max_sequence_length=20, **columns)
    kind = Similar(task, (), kinds.TOKENIZER)
    rng = np.random.default_rng(3)

    def text():
        return " ".join(rng.choice(kinds.WORDS, rng.integers(2, 9)))

    examples = [Sentence("", tuple(text() for _ in range(texts)), None) for _ in range(11)]
    examples[4] = dataclasses.replace(examples[2])  # a row that comes twice
    rows = kind.rows(examples)
    if loss == "cosine":
        rows.row_arrays["scores"] = np.repeat(rng.uniform(0, 1, 11).astype(np.float32), 2)
    if loss == "distil":
        wanted = rng.normal(size=(11, 6)).astype(np.float32)
        rows.row_arrays["teacher_vectors"] = wanted / np.linalg.norm(wanted, axis=1, keepdims=True)
        kind.output_count = 6
    shape = kind.learns, kind.reads, kind.output_count, kind.rows_per_example
    return SimilarObjective(kinds.MODEL, *shape, Adapt(), settings=LOSSES[loss]), rows


@pytest.mark.long
@pytest.mark.parametrize("loss", ["contrastive", "cosine", "distil"])
def test_cached_gradients_and_devices_change_nothing(loss):
    """Four devices, and on them and on one so many parts that each holds an example or two."""
    state, seen = train(*setting(loss), devices=1, steps=1)
    layouts = [(Parallelism(accumulation=(2,)), 4)]
    if loss == "contrastive":
        layouts += [(Parallelism(accumulation=(4,)), 1), (Parallelism(), 4)]
        layouts += [(Parallelism(slices=2), 4)]
        layouts += [(Parallelism(state=cut, accumulation=(2,)), 4) for cut in ("zero1", "zero3")]
    for parallelism, devices in layouts:
        other, other_seen = train(*setting(loss), parallelism, devices, steps=1)
        for ours, theirs in zip(seen, other_seen, strict=True):
            for name in ours:
                np.testing.assert_allclose(theirs[name], ours[name], ROUNDING, err_msg=name)
        assert_close(gradient(other), gradient(state), ROUNDING)


@pytest.mark.long
@pytest.mark.parametrize(
    ("loss", "parts", "devices"),
    [
        ("contrastive", 2, 2),
        pytest.param("distil", 1, 1, marks=pytest.mark.long),
        pytest.param("cosine", 4, 1, marks=pytest.mark.long),
    ],
)
def test_texts_that_share_rows_are_as_those_alone(loss, parts, devices):
    """With the same dropout."""
    (state, seen), (other, other_seen) = (
        train(*setting(loss), Parallelism(accumulation=(parts,)), devices, 1, sharing)
        for sharing in (False, True)
    )
    for ours, theirs in zip(seen, other_seen, strict=True):
        assert theirs.pop("filled")[1] < ours.pop("filled")[1]
        for name in ours:
            np.testing.assert_allclose(theirs[name], ours[name], 1e-6, err_msg=name)
    assert_close(gradient(other), gradient(state), ROUNDING)


def gradient(state):
    """A tenth of the first step's, as Adam keeps it."""
    return optimizer.moments(state["optimizer"]).mu


def test_what_stands_before_a_text_is_cut_with_it(monkeypatch):
    """As others cut a prompt and a text, and also before the ids of a corpus."""
    content = (pathlib.Path(__file__).parents[1] / "golden/tokenizers/roberta.json").read_bytes()
    named = {"pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
    ours = library.LibraryTokenizer(content, named, "roberta")
    theirs = tokenizers.Tokenizer.from_buffer(content)
    task = Task(kind="similar", train=("corpus:x:twice",), validation=("jsonl:x",),
                second_column="b", query_prefix="query: ", text_prefix="passage: ")  # fmt: skip
    kind = Similar(task, (), ours)
    rows = kind.rows([Sentence("", ("how are", "we"), None)] * 2)
    whole = ("query: how are", "passage: we") * 2
    assert [row.tolist() for row in rows.ids] == [theirs.encode(text).ids for text in whole]
    other = kind.rows([Sentence("", ("we", "how"), None)])
    keys = [*rows.row_arrays["keys"], *other.row_arrays["keys"]]
    assert keys[:2] == keys[2:4] and keys[1] == keys[4] and len(set(keys)) == 3
    ids = Ids(ours.pad_id, ours.cls_id, ours.sep_id, ours.mask_id, ours.size, ours.continues)
    prepared = SimpleNamespace(tokenizer=ours, folder="x", special_ids=ids, sha256="")
    documents = stream.make_stream([[ours.encode_after_space("how are")]])
    monkeypatch.setattr(similar.PreparedCorpus, "open", lambda folder: prepared)
    monkeypatch.setattr(similar.corpus, "open_stream", lambda folder, split: documents)
    experiment = Finetuning(name="x", task=task, batch_size=2)
    training = Similar.read_training(experiment, Base(kinds.MODEL, {}, ours), Tally())
    batch = training.batches.batch(0, np.arange(2))
    found = [
        row[mask > 0].tolist()
        for row, mask in zip(batch["input_ids"], batch["input_mask"], strict=True)
    ]
    assert found == [theirs.encode(f"{name}: how are").ids for name in ("query", "passage")]


TASKFILE = """
from bert_jax.checkpoints.base import Base
from bert_jax.config import Adapt, Finetuning, Optimizer, Parallelism, Run, Task, Vectors


def experiment():
    return Finetuning(
        name="small",
        task=Task(kind="similar", train=("{train}",), validation=("{test}",),
                  max_sequence_length=30, second_column="b", label_column="value"),
        vectors=Vectors({vectors}),
        epochs=2, batch_size=8,
        optimizer=Optimizer(name="adamw", peak_learning_rate=5e-2, warmup_steps=0),
        run=Run(log_every=4, eval_every=4, checkpoint_every=4, eval_batch_size=8),
    )
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A base, pairs with scores, and queries over texts."""
    monkeypatch.chdir(tmp_path)
    tuned.write_base("base")
    for name, count in (("train", 32), ("test", 12)):
        rows = [json.dumps(row) + "\n" for row in tuned.rows("regress", count)]
        pathlib.Path(name).write_text("".join(rows))
    beir = pathlib.Path("beir")
    (beir / "qrels").mkdir(parents=True)
    texts = [{"_id": f"t{i}", "text": f"{a} {b}"} for i, (a, b) in enumerate(words())]
    queries = [{"_id": f"q{i}", "text": a} for i, (a, _) in enumerate(words())]
    for name, records in (("corpus", texts), ("queries", queries)):
        (beir / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    lines = "".join(f"q{i}\tt{i}\t1\n" for i in range(len(texts)))
    (beir / "qrels" / "test.tsv").write_text("query\ttext\tscore\n" + lines)
    return tmp_path


def words():
    return [(a, b) for a in tuned.GOOD for b in tuned.GOOD if a != b]


def write_task(vectors="", train="jsonl:train", test="jsonl:test"):
    text = TASKFILE.format(vectors=vectors, train=train, test=test)
    pathlib.Path("task.py").write_text(text)


@pytest.mark.long
@pytest.mark.parametrize(
    ("vectors", "negative"),
    [("", "c"), pytest.param('loss="cosine"', "", marks=pytest.mark.long)],
)
def test_pairs_are_learned_kept_and_asked(vectors, negative, here):
    """Also those that were learned with a third text, which nobody has who asks."""
    write_task(vectors)
    tuned.finetune("--set", f"task.negative_column={negative}")
    lines = [line for line in tuned.lines("run/metrics.jsonl") if line["kind"] == "scores"]
    assert lines[-1]["loss"] == pytest.approx(1 - lines[-1]["spearman"])
    train = [line["loss"] for line in tuned.lines("run/metrics.jsonl") if line["kind"] == "train"]
    assert train[-1] < train[0]
    # All pairs to score on are learned, too.
    assert tuned.lines("run/predictions.jsonl")[0]["warnings"][0].startswith("12 of 12 ")
    answers = tuned.predict("wa wb", "wb wa", "wa wb", "xa xb")
    assert [set(answer) & {"cosine"} for answer in answers] == [{"cosine"}] * 2
    assert answers[0]["cosine"] > answers[1]["cosine"]
    asked = [("wa wb", "wb wa"), ("wa", ""), ("wa wb", "xa xb")]
    rows = [json.dumps(dict(zip(("sentence", "b"), pair, strict=True))) + "\n" for pair in asked]
    pathlib.Path("asked.jsonl").write_text("".join(rows))
    broken.said("predict --workdir run --input asked.jsonl --out found.jsonl")
    found = [row["predicted"] for row in tuned.lines("found.jsonl")]
    expected = answers[0]["cosine"], answers[1]["cosine"]
    assert found == [pytest.approx(expected[0]), None, pytest.approx(expected[1])]
    (scored,) = tuned.predict("--score")
    assert scored["loss"] == pytest.approx(1 - scored["spearman"])
    assert TaskModel(open_workdir("run")).experiment.task.negative_column == negative


def test_of_single_texts_there_is_no_cosine():
    task = Task(kind="similar", train=("jsonl:x",), validation=("beir:x:test",))
    kind, examples = Similar(task, (), kinds.TOKENIZER), [Sentence("", ("wa",), None)] * 2
    with pytest.raises(InputError, match="evaluate --task"):
        kind.answers([np.ones(4)] * 2, kind.rows(examples), examples)


@pytest.mark.long
def test_a_run_and_its_base_are_scored_as_they_are(here):
    """And what a run learned leaves it as an encoder whose vectors are the same."""
    settings = ("task.query_prefix=wa wb ", "task.text_prefix=xa ", "vectors.pooling=last")
    write_task()
    tuned.finetune(*(word for one in settings for word in ("--set", one)))
    broken.fails("export --workdir run --as task --out out", "--as ")
    broken.said("export --workdir run --out out")
    broken.said("import out --workdir again")
    pathlib.Path("texts").write_text("wa wb\nxa xb xc\n")
    vectors, answers = {}, {}
    for place in ("run", "again", "base"):
        for role in ("text", "query"):
            embed = f"embed texts --workdir {place} --role {role} --dimensions 8 --out v.npz"
            broken.said(embed)
            vectors[place, role] = np.load("v.npz")["vectors"]
        said = broken.said(f"evaluate --workdir {place} --task task.py")
        answers[place] = json.loads(said.splitlines()[-1])["scores"]["small"]
    said = broken.said("evaluate --workdir run --also again base --task task.py")
    found = [json.loads(line) for line in said.splitlines()[1::2]]
    assert {one["workdir"]: one["scores"]["small"] for one in found} == answers
    last = [x for x in tuned.lines("run/metrics.jsonl") if x["kind"] == "scores"][-1]
    assert answers["run"] == pytest.approx(last["spearman"])
    assert answers["again"] == pytest.approx(answers["run"]) != answers["base"]
    for role in ("text", "query"):
        np.testing.assert_allclose(vectors["again", role], vectors["run", role], atol=1e-6)
    # What learns over it puts the same before its texts, though its task names nothing.
    broken.said("finetune task.py --from again --workdir further --set epochs=0.25")
    kept = TaskModel(open_workdir("further")).vector_settings
    assert (kept.pooling, kept.query_prefix, kept.text_prefix) == ("last", "wa wb ", "xa ")
    assert np.abs(vectors["run", "text"] - vectors["run", "query"]).max() > 1e-3
    np.testing.assert_array_equal(vectors["base", "text"], vectors["base", "query"])
    np.testing.assert_allclose(np.linalg.norm(vectors["run", "text"], axis=1), 1, atol=1e-5)


@pytest.mark.long
def test_queries_find_their_texts(here):
    write_task("dimensions=(8, 16)", test="beir:beir:test")
    (printed,) = [x for x in tuned.finetune().splitlines() if x.startswith("finished:")]
    first, *_ = [x for x in tuned.lines("run/predictions.jsonl") if x["kind"] == "untrained"]
    name, before = first["guess"]
    assert name == "before training" and f"; before training: ndcg@10 {before:.4f}" in printed
    mean = json.loads(broken.said("evaluate --workdir base --task task.py").splitlines()[-1])
    assert mean["scores"]["small"] == pytest.approx(before, abs=1e-3)
    lines = [line for line in tuned.lines("run/metrics.jsonl") if line["kind"] == "scores"]
    assert {"recall@1", "recall@10", "mrr@10", "ndcg@10"} <= set(lines[0])
    assert lines[0]["score"] == lines[0]["ndcg@10"]
    scores = json.loads(broken.said("predict --workdir run --score"))
    np.testing.assert_allclose(scores["score"], lines[-1]["score"], atol=1e-3)
    broken.fails("predict --workdir run --score --out scores.jsonl", "needs two")
    # BM25 and an untrained encoder stand beside it.
    printed = broken.said("evaluate --workdir run --task task.py").splitlines()
    assert [line.split()[0] for line in printed[:3]] == ["small", "BM25", "untrained"]
    record = json.loads(printed[3])
    baselines = record["baselines"]["small"]
    assert baselines["BM25"].keys() == record["similar"]["small"].keys()
    assert baselines["untrained"] != record["similar"]["small"]


@pytest.mark.long
def test_a_stopped_run_of_vectors_ends_at_the_same_bits(here):
    write_task()
    tuned.finetune()
    whole = pathlib.Path("run").rename("whole")
    with tuned.signal_before(3):
        assert broken.call(tuned.FINETUNE)[0] == 75
    tuned.finetune()
    assert (whole / "metrics.jsonl").read_text() == pathlib.Path("run/metrics.jsonl").read_text()


@pytest.mark.nightly
def test_two_processes_compare_the_texts_of_both(here):
    """In two parts: each process has a half of every part, and the negatives of all."""
    file = small_run.write_text(here / "words")
    pieces = here / "words" / "vocab.txt"
    pieces.write_text("\n".join(tuned.PIECES) + "\n")
    settings = (f"model.vocab_size={len(tuned.PIECES)}", "run.corpus_dir=made")
    words = [word for one in settings for word in ("--set", one)]
    assert cli.main(["prepare", str(file), *words]) == 0
    write_task(train="corpus:made:neighbours")
    settings = "parallelism.accumulation=2", "epochs=1", "optimizer.peak_learning_rate=1e-3"
    command = ["finetune", "task.py", "--from", "base"]
    command += [word for one in settings for word in ("--set", one)]
    assert cli.main([*command, "--workdir", "run"]) == 0
    small_run.on_two("bert-jax", *command, "--workdir", "pod")
    both = zip(tuned.lines("pod/metrics.jsonl"), tuned.lines("run/metrics.jsonl"), strict=True)
    for ours, theirs in both:
        assert ours.pop("kind") == theirs.pop("kind")
        # How long rows are that texts share depends on how many share them.
        for line in (ours, theirs):
            line.pop("filled", None)
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.long
def test_a_teacher_s_vectors_are_learned(here):
    texts = [row["sentence"] for row in tuned.lines("train")]
    pathlib.Path("sentences").write_text("\n".join(texts) + "\n")
    broken.said("embed --workdir base sentences --out t.npz")
    write_task('loss="distil", teacher="t.npz", geometry=1.0')
    tuned.finetune()
    lines = [x for x in tuned.lines("run/metrics.jsonl") if x["kind"] == "train"]
    assert lines[-1]["loss"] < lines[0]["loss"]
    pathlib.Path("t.npz").unlink()  # what a step reads is shown without it
    shown = broken.said("show --workdir run --step 1")
    assert "step 1 of 8, epoch 0: 8 rows of 30" in shown
    pieces = [line.removeprefix("[CLS] ").removesuffix("[SEP] ") for line in shown.splitlines()]
    assert sum(line.strip() in texts for line in pieces) >= 3


def test_scores_of_a_range_become_cosines_from_0_to_1():
    examples = [Sentence(f"a:{score}", ("wa", "wb"), score) for score in (1.0, 2.0, 5.0)]
    how = Vectors(loss="cosine", score_range=(1.0, 5.0))
    assert similar._scale_scores(examples, how).tolist() == [0.0, 0.25, 1.0]


@pytest.mark.parametrize(
    ("vectors", "train", "settings", "named"),
    [
        ('loss="distil"', "jsonl:train", [], "vectors.teacher"),
        ('loss="distil", teacher="short.npz"', "jsonl:train", [], "short.npz"),
        ('loss="distil", teacher="nan.npz"', "jsonl:train", [], "nan.npz: row 5 "),
        ('loss="distil", teacher="cut.npz"', "jsonl:train", [], "cut.npz"),
        ('loss="distil", teacher="nowhere.npz"', "jsonl:train", [], "nowhere.npz"),
        ('loss="distil", teacher="wide.npz"', "jsonl:train", [], "vectors.projection"),
        ('loss="cosine", score_range=(0.5, 1)', "jsonl:train", [], "train:1"),
        ("dimensions=(8, 32)", "jsonl:train", [], "vectors.dimensions"),
        ("dimensions=(8, 8)", "jsonl:train", [], "vectors.dimensions"),
        ("", "jsonl:train", ["batch_size=1"], "batch_size"),
        ("", "jsonl:train", ["task.second_column="], "second_column"),
        ("", "jsonl:blank", [], "blank:2"),
        ("", "beir:beir:test", [], "task.train"),
        ("", "corpus:base:crops", [], "base"),
        ("temperature=0", "jsonl:train", [], "vectors.temperature"),
        ("score_range=(0, 5)", "jsonl:train", [], "vectors.score_range"),
    ],
)
def test_what_cannot_be_learned_is_named(here, vectors, train, settings, named):
    np.savez("short.npz", vectors=np.ones((3, 16), np.float32))
    np.savez("wide.npz", vectors=np.ones((32, 24), np.float32))
    unknown = np.where(np.arange(32)[:, None] == 5, np.nan, np.ones((32, 16), np.float32))
    np.savez("nan.npz", vectors=unknown.astype(np.float32))
    whole = pathlib.Path("wide.npz").read_bytes()
    pathlib.Path("cut.npz").write_bytes(whole[: len(whole) // 2])
    pathlib.Path("blank").write_text(
        '{"sentence": "wa", "b": "wb", "value": 1}\n{"sentence": "wa", "b": " ", "value": 1}\n'
    )
    write_task(vectors, train)
    sets = " ".join(f"--set {setting}" for setting in settings)
    broken.fails(f"{tuned.FINETUNE} {sets}", named)
    assert not pathlib.Path("run").exists()


@pytest.mark.long
def test_another_kind_has_no_vectors(here):
    write_task("temperature=0.1")
    text = pathlib.Path("task.py").read_text().replace('"similar"', '"regress"')
    pathlib.Path("task.py").write_text(text)
    broken.fails(tuned.FINETUNE, "vectors")

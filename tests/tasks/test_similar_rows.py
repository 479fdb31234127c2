"""Texts of `similar`: which texts count as equal, and that all commands encode a text alike."""

import functools
import json

import jax
import kinds
import numpy as np
import pytest
import tuned
from etils import epath

from bert_jax.checkpoints import base as base_lib
from bert_jax.checkpoints.base import TextVectors
from bert_jax.config import Adapt, Finetuning, Parallelism, Task, Vectors
from bert_jax.embeddings import retrieval
from bert_jax.embeddings.embed import Embedder, VectorOptions
from bert_jax.embeddings.retrieval import Passage
from bert_jax.model import heads
from bert_jax.model.encoder import Loop
from bert_jax.tasks import probes, similar
from bert_jax.tasks.adaptation import ModelRunner, read_base, run_rows
from bert_jax.tasks.examples import Sentence, Tally
from bert_jax.tasks.similar import Similar
from bert_jax.text.tokenizer import WordPiece
from bert_jax.training import mesh as mesh_lib


@pytest.mark.parametrize("prefixes", [("", ""), ("wa wb wc ", "wd ")])
def test_texts_that_differ_only_after_the_cut_have_equal_keys(prefixes):
    """Both roles, without prefixes, and with prefixes of three tokens and of one."""
    query, text = prefixes
    task = Task(kind="similar", train=("jsonl:x",), validation=("jsonl:x",), second_column="b",
                query_prefix=query, text_prefix=text, max_sequence_length=12)  # fmt: skip
    kind, room = Similar(task, (), kinds.TOKENIZER), 10 - len(query.split())
    words = kinds.WORDS[:room]
    texts = [" ".join([*words, *more]) for more in ([], ["we"] * 5, ["wf", "wg"])]
    last = " ".join([*words[:-1], "wt"])
    examples = [Sentence("", (one, other), None) for one in texts for other in texts]
    keys = kind.rows([*examples, Sentence("", (last, last), None)]).row_arrays["keys"]
    assert len(set(keys[:-2])) == 1 and keys[-2] == keys[-1] != keys[0]


@pytest.mark.parametrize(
    ("second", "roles"),
    [("", ["document"]), ("b", ["query", "document"]), ("bc", ["query", "document", "document"])],
)
def test_prefixes_follow_the_roles(second, roles):
    columns = dict(zip(("second_column", "negative_column"), second, strict=False))
    source = ("jsonl:x",)
    task = Task(kind="similar", train=source, validation=("beir:x:test",), query_prefix="wa ",
                text_prefix="wb ", **columns)  # fmt: skip
    kind, prefixes = Similar(task, (), kinds.TOKENIZER), {"query": "wa", "document": "wb"}
    rows = kind.rows([Sentence("", ("wc wd",) * len(roles), None)])
    assert [row.tolist() for row in rows.ids] == [
        kinds.ids(f"[CLS] {prefixes[role]} wc wd [SEP]") for role in roles
    ]
    rows = kind.rows([Passage("", "q", "wc", {"t": 1}), Passage("", "r", "wc", {}),
                      Passage("", "t", "wc")])  # fmt: skip
    assert [row[1] for row in rows.ids] == kinds.ids("wa wa wb")


PROMPTS = TextVectors("last", max_length=12, query_prefix="wa wb ", text_prefix="xa ")
LONG = " ".join(tuned.GOOD * 5)


@pytest.fixture
def prompted(tmp_path):
    """A base with prompts and pooling `last`, and a source of pairs."""
    params = jax.device_get(heads.init_params(tuned.MODEL, jax.random.key(0)))
    tokenizer = WordPiece(tuned.PIECES, "uncased")
    base_lib.write(
        base_lib.Base(tuned.MODEL, params, tokenizer, vectors=PROMPTS),
        epath.Path(tmp_path / "base"),
    )
    pairs = [("wc", "xb", 0), ("xb wd xc", LONG, 1), (LONG, "xc xb", 0.5)]
    rows = [dict(zip(("sentence", "b", "label"), pair, strict=True)) for pair in pairs]
    (tmp_path / "pairs").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return base_lib.read(epath.Path(tmp_path / "base")), f"jsonl:{tmp_path}/pairs"


def test_a_base_that_is_its_own_teacher_is_at_distance_zero(prompted, tmp_path):
    base, source = prompted
    task = Task(kind="similar", train=(source,), validation=(source,),
                second_column="b", max_sequence_length=12)  # fmt: skip
    no_dropout = Adapt(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    experiment = Finetuning(
        name="x",
        init_from=str(tmp_path / "base"),
        task=similar.inherit_prefixes(task, base.vectors),
        adapt=no_dropout,
        vectors=Vectors(loss="distil", teacher=str(tmp_path / "base"), geometry=1.0),
        batch_size=3,
    )
    training_set = Similar.read_training(experiment, base, Tally())
    kind = Similar(experiment.task, (), base.tokenizer)
    objective = kind.make_objective(experiment, read_base(experiment))
    batch = training_set.batches.batch(0, np.arange(3))
    forward = jax.jit(lambda *of: objective.forward(*of, None, Loop())["loss"])
    loss = forward(base.params, None, batch)
    assert loss[1] == 3 and loss[0] < 1e-10


def test_a_base_is_scored_by_the_vectors_that_embed_gives(prompted):
    """Roles, prefixes, pooling and limit are the same, although the task's own limit is higher."""
    base, source = prompted
    mesh = mesh_lib.one_device()
    task = Task(kind="similar", train=(source,), validation=(source,),
                second_column="b", max_sequence_length=30)  # fmt: skip
    reader = ModelRunner(base.model, base.tokenizer, Parallelism(), mesh, 6, base.vectors)
    probe = probes.SimilarityProbe("x", task, None)
    probe.prepare(reader)
    run = functools.partial(probes.jit_vectors(reader), base.params, None)
    scored = np.stack(run_rows(run, probe._batches, probe._rows, mesh))
    embedder = Embedder(base, VectorOptions(normalize=True), mesh)
    for column, role in enumerate(("query", "document")):
        texts = [example.texts[column] for example in probe.examples]
        (part,) = embedder.embed(texts, role)
        np.testing.assert_allclose(scored[column::2], part.vectors, atol=1e-6)


def test_mean_vectors_are_scored_as_embed_computes_them(prompted):
    """For a task of another kind, whatever the pooling of the base."""
    base, _ = prompted
    mesh, words = mesh_lib.one_device(), [*tuned.GOOD, *tuned.BAD]
    queries = [Passage("f:1", f"q{i}", word, {f"t{i}": 1}) for i, word in enumerate(words)]
    texts = [Passage("f:1", f"t{i}", f"{x} {words[i - 3]}") for i, x in enumerate(words)]
    task = Task(kind="sparse", train=("jsonl:x",), validation=("beir:x:test",),
                second_column="b", max_sequence_length=12)  # fmt: skip
    embedder = Embedder(base, VectorOptions(pooling="mean", normalize=True), mesh)
    roles = ((queries, "query"), (texts, "document"))
    parts = [next(embedder.embed([x.text for x in some], role)) for some, role in roles]
    expected = retrieval.scores([*parts[0].vectors, *parts[1].vectors], [*queries, *texts])
    found = similar.score_mean_vectors(base, task, [*queries, *texts], mesh, 4)
    assert 0 < expected["ndcg@10"] < 1
    assert found == pytest.approx(expected["ndcg@10"])

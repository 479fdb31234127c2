"""Minimal pairs: pseudo-log-likelihoods, accuracies and their errors, and where they are asked."""

import dataclasses
import json

import broken
import jax
import numpy as np
import pytest
import tuned
from etils import epath
from kinds import write_task_file

from bert_jax import config
from bert_jax.checkpoints import base as base_lib
from bert_jax.config import Finetuning, Parallelism
from bert_jax.errors import InputError
from bert_jax.model.encoder import Loop
from bert_jax.tasks import minimal_pairs, probes
from bert_jax.tasks.adaptation import ModelRunner
from bert_jax.tasks.examples import MinimalPair
from bert_jax.tasks.minimal_pairs import MinimalPairsProbe
from bert_jax.tasks.rows import pad_rows
from bert_jax.text.tokenizer import WordPiece
from bert_jax.tools.conformance import golden
from bert_jax.training import mesh as mesh_lib

# Piece 17 is w17.
NUMBERED = WordPiece(
    ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(5, 1000))], "uncased"
)
TOKENIZER = WordPiece(tuned.PIECES, "uncased")
# Pseudo-log-likelihoods by PyTorch's BertForMaskedLM of transformers 5.23, a text and a mask at a
# time, with the weights of conformance/files/hf_bert_tiny, added in float64.
BY_PYTORCH = {
    (17, 900, 33): -19.456859332480086,
    (17, 901, 33): -19.779569330668743,
    (500,): -7.160791868155577,
    (12, 13, 14, 15, 16, 17, 18, 19, 20, 21): -68.31644060718926,
    (999, 6, 6, 6, *range(250, 263)): -118.7997014041615,
}


def words(ids):
    return " ".join(f"w{i}" for i in ids)


def write_task(folder, records, name="small_pairs"):
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "pairs").write_text(text)
    columns = {"text_column": "good", "second_column": "bad", "label_column": "paradigm"}
    source = {"kind": "minimal_pairs", "validation": (f"jsonl:{folder}/pairs",)}
    return write_task_file(folder / f"{name}.py", **source, **columns, field_column="field")


def record(good, bad, paradigm="agreement", field="morphology"):
    return {"good": good, "bad": bad, "paradigm": paradigm, "field": field}


def opened(folder, records, model, tokenizer, size=8):
    """The pairs, opened on all devices."""
    file = write_task(folder, records)
    pairs = MinimalPairsProbe(file.stem, config.load(str(file), Finetuning).task, None)
    mesh = mesh_lib.make_mesh(Parallelism())
    assert pairs.prepare(ModelRunner(model, tokenizer, Parallelism(), mesh, size)) > 0
    return pairs, mesh


def token_ids(pairs):
    return [ids for ids, _ in pairs.texts._texts]


def test_log_likelihoods_equal_pytorchs(tmp_path):
    one, two, *others = map(words, BY_PYTORCH)
    records = [record(one, two), *(record(other, one) for other in others)]
    pairs, mesh = opened(tmp_path, records, golden.CONFIG, NUMBERED)
    params = jax.device_put(golden.params(), mesh_lib.replicated(mesh))
    found = dict(zip(token_ids(pairs), pairs.texts.log_likelihoods(params), strict=True))
    assert found.keys() == BY_PYTORCH.keys()
    for ids, wanted in BY_PYTORCH.items():
        assert found[ids] == pytest.approx(wanted, rel=2e-6)
    answer = pairs.evaluate(params)
    # The first is the likelier one, as is one piece; those of ten and seventeen are not.
    assert (answer["accuracy"], answer["pairs"]) == (0.5, 4)


def drawn_of(folder, size, counts, **model):
    """The pairs of random texts of so many pieces, what a model says of each, and the model."""
    model = dataclasses.replace(tuned.MODEL, **model)
    params = tuned.heads.init_params(model, jax.random.key(3))
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(tuned.PIECES[6:], n)) for n in counts]
    records = [record(a, b) for a, b in zip(texts[::2], texts[1::2], strict=True)]
    pairs, mesh = opened(folder, records, model, TOKENIZER, size)
    found = pairs.texts.log_likelihoods(jax.device_put(params, mesh_lib.replicated(mesh)))
    return token_ids(pairs), found, model, params


KINDS = pytest.mark.parametrize(
    "kind",
    [{"kind": "bert"}, pytest.param({"kind": "modern", "global_every": 1}, marks=pytest.mark.long)],
)


@pytest.mark.long
@KINDS
def test_a_model_that_reads_from_left_to_right_gives_likelihoods(tmp_path, kind):
    """Against the pieces one at a time, each after those before it, in a row of their own."""
    counts = (1, 5, 7, 11, 6, 2)
    texts, found, model, params = drawn_of(tmp_path, 4, counts, direction="left_to_right", **kind)
    begun = [([TOKENIZER.cls_id, *ids[:i]], ids[i]) for ids in texts for i in range(len(ids))]
    lengths = np.array([len(before) for before, _ in begun])
    rows = pad_rows([np.array(x) for x, _ in begun], 12, TOKENIZER.pad_id, np.int32)
    batch = {
        "input_ids": rows,
        "segment_ids": np.zeros_like(rows),
        "input_mask": (np.arange(12) < lengths[:, None]).astype(int),
        "masked_lm_positions": lengths[:, None] - 1,
    }
    logits, _ = tuned.heads.pretraining_logits(model, params, batch, None, Loop())
    every = np.asarray(jax.nn.log_softmax(logits[:, 0]))
    logs = every[np.arange(len(begun)), [x for _, x in begun]]
    of_text = np.repeat(np.arange(len(texts)), [len(ids) for ids in texts])
    assert found == pytest.approx(np.bincount(of_text, logs), rel=1e-5)


def test_ties_count_half_and_errors_are_of_means(tmp_path, monkeypatch):
    """By hand: three of four and a tie, of which the standard deviation is that of five numbers."""
    texts = [words([i]) for i in (5, 6, 7, 8)]
    by_id = {(5,): -1.0, (6,): -2.0, (7,): -3.0, (8,): -4.0}
    a, b, c, d = texts
    records = [
        *(record(a, b), record(a, c), record(d, c)),
        *(record(b, c, "islands", "syntax"), record(b, b.upper(), "islands", "syntax")),
    ]
    pairs, _ = opened(tmp_path, records, golden.CONFIG, NUMBERED)
    monkeypatch.setattr(
        pairs.texts,
        "log_likelihoods",
        lambda params: np.array([by_id[ids] for ids in token_ids(pairs)]),
    )
    answer = pairs.evaluate(None)
    right = np.array([1, 1, 0, 1, 0.5])

    def scored(values):
        mean = np.mean(values)
        error = pytest.approx(np.std(values) / len(values) ** 0.5)
        return {"accuracy": pytest.approx(mean), "error": error, "pairs": len(values)}

    assert {name: answer[name] for name in ("accuracy", "error", "pairs")} == scored(right)
    assert answer["fields"] == {"morphology": scored(right[:3]), "syntax": scored(right[3:])}
    assert answer["paradigms"]["islands"] == scored(right[3:])


def test_a_draw_has_as_many_of_each_paradigm():
    pairs = [
        MinimalPair("f", str(i), "", name, "") for name, n in zip("abc", (50, 9, 3), strict=True)
        for i in range(n)
    ]  # fmt: skip
    drawn = minimal_pairs._sample(pairs, 20)
    counts = [sum(pair.paradigm == name for pair in drawn) for name in "abc"]
    assert sorted(counts[:2]) == [8, 9] and counts[2] == 3
    assert drawn == minimal_pairs._sample(pairs, 20) == [pair for pair in pairs if pair in drawn]
    assert [pair.good for pair in drawn[:8]] != [str(i) for i in range(8)]
    assert minimal_pairs._sample(pairs, 100) == pairs


def test_a_base_is_asked_by_evaluate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tuned.write_base("base")
    write_task(tmp_path, [record("wa wb", "xa ?"), record("xd", "wb wb", "islands")])
    evaluate = "evaluate --workdir base --task small_pairs.py"
    *shown, line = broken.said(evaluate).splitlines()
    answer = json.loads(line)["minimal_pairs"]["small_pairs"]
    assert json.loads(line)["scores"] == {"small_pairs": answer["accuracy"]}
    assert [text.split()[0] for text in shown] == [
        *("small_pairs", "morphology", "agreement", "islands")
    ]
    # The same text on both sides, by a trained base or any other.
    write_task(tmp_path, [record("wa wb", "WA wb")])
    assert broken.said(evaluate).startswith("small_pairs  0.500 +- 0.000  (1 pairs)")


@pytest.mark.parametrize(
    ("good", "arguments", "words"),
    [
        ("wa " * 63, "--workdir base --task small_pairs.py", "pairs:1: 'wa wa wa"),
        ("\u200b", "--workdir base --task small_pairs.py", "pairs:1: "),
        ("wa", "--task small_pairs.py", "--task"),
        ("wa", "--workdir base --task nowhere.py", "nowhere.py: no such experiment file"),
        ("wa", "small.py --workdir base --task small_pairs.py", "EXPERIMENT"),
        ("wa", "--workdir headless --task small_pairs.py", "its masked LM head is untrained"),
    ],
)
def test_what_cannot_be_asked_is_named(tmp_path, monkeypatch, good, arguments, words):
    monkeypatch.chdir(tmp_path)
    tuned.write_base("base")
    base = base_lib.read(epath.Path("base"))
    base.fresh = ("masked_lm",)
    base_lib.write(base, epath.Path("headless"))
    write_task(tmp_path, [record(good, "wb")])
    broken.fails(f"evaluate {arguments}", words)
    for task in ("small_pairs.py", "--kind minimal_pairs --validation some"):
        broken.fails(f"finetune {task} --from base", "minimal_pairs: ")


def test_a_record_without_its_paradigm_is_named(tmp_path):
    write_task(tmp_path, [{"good": "wa", "bad": "wb", "paradigm": None, "field": "x"}])
    with pytest.raises(InputError, match=r"pairs:1: column 'paradigm' is missing"):
        probes.Probes([str(tmp_path / "small_pairs.py")])

"""Encoders of other families: hidden states and scores are transformers', and they leave again."""

import json

import broken
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from families import (
    ELECTRA_ENDINGS,
    FAMILIES,
    GOLDEN,
    PAIR,
    TEXTS,
    drawn,
    write_tokenizer,
)

from bert_jax.checkpoints import base
from bert_jax.interop import huggingface, importing
from bert_jax.model import encoder as encoder_lib
from bert_jax.model import heads
from bert_jax.model.encoder import Loop
from bert_jax.model.kinds import attention_probabilities, encode
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.storage.mirror import open_workdir
from bert_jax.text import library
from bert_jax.text.tokenizer import add_special_tokens


@pytest.fixture(scope="module", params=FAMILIES)
def imported(request, tmp_path_factory):
    """A family's name, its tensors, what transformers says, and the base that is made of them."""
    family, folder = request.param, tmp_path_factory.mktemp(request.param)
    says = json.loads((GOLDEN / "families" / f"{family}.json").read_text())
    theirs = folder / "theirs"
    theirs.mkdir()
    write_tokenizer(FAMILIES[family][2], theirs)
    (theirs / "config.json").write_text(json.dumps(says["config"]))
    tensors = {name: drawn(name, tuple(shape)) for name, shape in says["tensors"].items()}
    huggingface.write_tensors(epath.Path(theirs / "model.safetensors"), tensors, "float32")
    importing.import_weights(epath.Path(theirs), epath.Path(folder / "base"), None, print)
    golden = dict(np.load(GOLDEN / "families" / f"{family}.npz"))
    return family, tensors, golden, LoadedModel.of(open_workdir(folder / "base"))


def test_ids_hidden_states_and_scores_are_those_of_transformers(imported):
    _, _, golden, loaded = imported
    there = golden["mask"].astype(bool)
    for texts, row, mask in zip([*TEXTS, PAIR], golden["ids"], there, strict=True):
        first, *second = (texts,) if isinstance(texts, str) else texts
        tokenizer = loaded.tokenizer
        second = tokenizer.encode(second[0]) if second else None
        ids, _ = add_special_tokens(tokenizer, tokenizer.encode(first), second)
        assert ids.tolist() == row[mask].tolist()
    model = heads.merge(loaded.model, loaded.params)
    ids, mask = (jnp.asarray(golden[name], jnp.int32) for name in ("ids", "mask"))
    run = jax.jit(lambda *x: encode(model.encoder, loaded.model, *x, None, Loop(), "all"))
    every = run(ids, 0 * ids, mask)
    np.testing.assert_allclose(np.asarray(every)[:, there], golden["hidden"][:, there], atol=1e-5)
    scores = heads.token_logits(model, loaded.model, every[-1][:, :3])
    size = loaded.model.vocab_size
    np.testing.assert_allclose(scores[..., :size], golden["logits"][..., :size], atol=1e-5)


@pytest.mark.parametrize("imported", ["mpnet"], indirect=True)
def test_distances_have_the_buckets_of_mpnet_and_bias_long_rows(imported):
    _, _, golden, loaded = imported
    names = np.arange(32, dtype=np.float32)[:, None]  # a bias that names its bucket
    bias = np.asarray(encoder_lib.position_bias(jnp.asarray(names), 201))[0]
    np.testing.assert_array_equal(np.concatenate([bias[200, :200], bias[0]]), golden["buckets"])
    model = heads.merge(loaded.model, loaded.params)
    ids = jnp.arange(64)[None] % 500 + 3
    hidden = encode(model.encoder, loaded.model, ids, 0 * ids, 0 * ids + 1, None, Loop())
    np.testing.assert_allclose(hidden, golden["long"], atol=1e-5)
    short = ids[:, :20]
    inputs = encode(
        model.encoder, loaded.model, short, 0 * short, 0 * short + 1, None, Loop(), "all"
    )
    found = attention_probabilities(model.encoder, loaded.model, inputs[:-1, 0])
    np.testing.assert_allclose(found, golden["attentions"], atol=1e-6)


def as_bert(name: str) -> str:
    """Returns the name in BERT of a tensor of ELECTRA."""
    name = name.replace("electra.", "bert.").replace("generator_lm_head.", "cls.predictions.")
    return name.replace("generator_predictions.", "cls.predictions.transform.")


@pytest.mark.parametrize("ending", ELECTRA_ENDINGS)
def test_a_head_of_electra_is_kept_if_it_reads_what_ours_reads(ending, tmp_path):
    """A linear layer on tokens is kept, and named; others are left out, and named."""
    says = json.loads((GOLDEN / "families" / "electra.json").read_text())
    heads_ = json.loads((GOLDEN / "families" / "electra_classes.json").read_text())[ending]
    shapes = {name: shape for name, shape in says["tensors"].items() if "electra." in name}
    if ending == "Model":
        shapes = {name.removeprefix("electra."): shape for name, shape in shapes.items()}
    assert {name for name in shapes if ".layer." not in name} <= heads_.keys()
    tensors = {name: drawn(name, tuple(shape)) for name, shape in (heads_ | shapes).items()}
    folder, lines = epath.Path(tmp_path), []
    write_tokenizer("modernbert", tmp_path)
    config = says["config"] | {"architectures": [f"Electra{ending}"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    huggingface.write_tensors(folder / "model.safetensors", tensors, "float32")
    read = huggingface.read_folder(folder, lines.append)
    kept = {"ForTokenClassification": "classifier", "ForQuestionAnswering": "qa_outputs"}
    if name := kept.get(ending):
        np.testing.assert_array_equal(read.head.kernel, tensors[f"{name}.weight"].T)
    else:
        assert read.head is None
    said = " ".join(lines)
    assert ("is kept" in said) == (ending in kept)
    assert ("is not imported" in said) == (ending not in kept and ending != "Model")
    word = next(value for name, value in tensors.items() if "word_embeddings" in name)
    found = read.params["encoder"]["embeddings"]["word"]["embedding"]
    np.testing.assert_array_equal(found[: read.model.vocab_size], word[: read.model.vocab_size])
    config["embedding_size"] = 12
    (tmp_path / "config.json").write_text(json.dumps(config))
    broken.fails(f"import {tmp_path} --workdir {tmp_path}/base", "config.json", "embedding_size=12")


@pytest.mark.long
def test_what_is_exported_has_the_same_tensors_bit_for_bit(imported, tmp_path):
    family, tensors, _, loaded = imported
    huggingface.write_folder(loaded, "masked_lm", "float32", epath.Path(tmp_path / "out"))
    written = base.read_tensors(epath.Path(tmp_path / "out" / "model.safetensors"))
    if family == "electra":  # it leaves as BERT, which has the same encoder
        tensors = {as_bert(name): value for name, value in tensors.items()}
    assert written.keys() == tensors.keys()
    for name, value in tensors.items():  # rows of padding are left out
        np.testing.assert_array_equal(written[name], value[: len(written[name])], name)
    assert len(written) > 20
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    again = epath.Path(tmp_path / "again")
    importing.import_weights(epath.Path(tmp_path / "out"), again, None, print)
    assert (
        base.read(again).model == loaded.model and fields["vocab_size"] == loaded.model.vocab_size
    )
    assert base.read(again).tokenizer.encode(TEXTS[1]) == loaded.tokenizer.encode(TEXTS[1])


@pytest.mark.long
def test_a_cut_vocabulary_keeps_rows_and_scores_and_leaves_as_it_is(imported, tmp_path):
    family, _, _, loaded = imported
    if family.endswith(("odd", "stretched")):
        pytest.skip("a second size of a family")
    huggingface.write_folder(loaded, "masked_lm", "float32", epath.Path(tmp_path / "whole"))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text(json.dumps({"text": "\n".join(TEXTS[:2])}))
    (tmp_path / "words.txt").write_text("flabbergasting\n")
    command = f"import {tmp_path}/whole --workdir {tmp_path}/cut --vocabulary {tmp_path}/texts"
    broken.said(f"{command} --add {tmp_path}/words.txt")
    cut = base.read(epath.Path(tmp_path / "cut"))
    assert cut.model.vocab_size == cut.tokenizer.size < loaded.tokenizer.size
    old = {loaded.tokenizer.token(i): i for i in range(loaded.tokenizer.size)}
    kept = [i for i in range(cut.tokenizer.size) if cut.tokenizer.token(i) in old]
    rows = [old[cut.tokenizer.token(i)] for i in kept]
    (made,) = cut.tokenizer.encode_after_space("flabbergasting")
    stood = loaded.tokenizer.encode_after_space("flabbergasting")
    for path in (("encoder", "embeddings", "word", "embedding"), ("masked_lm", "output_bias")):
        before, after = loaded.params, cut.params
        for name in path:
            before, after = before[name], after[name]
        np.testing.assert_array_equal(after[kept], np.asarray(before)[rows])
        np.testing.assert_allclose(after[made], np.asarray(before)[stood].mean(0), atol=1e-6)
    scores = []
    for one, columns in ((loaded, rows), (cut, kept)):
        ids, _ = add_special_tokens(one.tokenizer, one.tokenizer.encode(TEXTS[1]), None)
        model, ids = heads.merge(one.model, one.params), jnp.asarray(ids, jnp.int32)[None]
        last = encode(model.encoder, one.model, ids, 0 * ids, 0 * ids + 1, None, Loop())
        scores.append(heads.token_logits(model, one.model, last)[..., np.array(columns)])
    np.testing.assert_allclose(*scores, atol=1e-6)
    broken.said(f"export --workdir {tmp_path}/cut --as masked_lm --out {tmp_path}/out")
    again = library.read(epath.Path(tmp_path / "out" / "tokenizer.json"))
    assert again.encode(f"{TEXTS[1]} flabbergasting") == [*cut.tokenizer.encode(TEXTS[1]), made]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["pad_token_id"] == cut.tokenizer.pad_id != loaded.tokenizer.size

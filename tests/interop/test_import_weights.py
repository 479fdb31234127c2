"""Hugging Face folders as users have them, and as they should not be."""

import json
import pathlib

import broken
import hf_folder
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from compare import assert_identical
from etils import epath
from hf_folder import PIECES, TENSORS, VOCAB
from safetensors.numpy import save_file

from bert_jax.checkpoints import base as base_lib
from bert_jax.config import Model
from bert_jax.errors import InputError
from bert_jax.interop import huggingface, importing, vocabularies, weights
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.storage.workdir import Workdir
from bert_jax.text import tokenizer as tokenizer_lib

WORD = "bert.embeddings.word_embeddings.weight"


def imported(folder: pathlib.Path) -> tuple[base_lib.Base, list[str]]:
    """The base of a folder, read back from the disk, and what was printed."""
    lines: list[str] = []
    importing.import_weights(
        epath.Path(folder), epath.Path(folder.parent / "base"), None, lines.append
    )
    return base_lib.read(epath.Path(folder.parent / "base")), lines


def renamed(rename) -> dict[str, np.ndarray]:
    return {rename(name): tensor for name, tensor in TENSORS.items()}


def padded(rows: int) -> dict[str, np.ndarray]:
    """Padding as others leave it: not zero."""
    more = rows - PIECES
    bias = TENSORS["cls.predictions.bias"]
    return TENSORS | {
        WORD: np.pad(TENSORS[WORD], ((0, more), (0, 0)), constant_values=0.3),
        "cls.predictions.bias": np.pad(bias, (0, more), constant_values=0.3),
    }


def old_norms(name: str) -> str:
    if "LayerNorm" in name:
        return name.replace(".weight", ".gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    return name


TIED = {
    "cls.predictions.decoder.weight": TENSORS[WORD],
    "cls.predictions.decoder.bias": TENSORS["cls.predictions.bias"],
    "bert.embeddings.position_ids": np.arange(128)[None],
}


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        (renamed(lambda name: name.removeprefix("bert.")), {"architectures": None}),
        (renamed(old_norms), {}),
        (TENSORS | TIED, {}),
        (padded(1024), {"vocab_size": 1024}),
    ],
    ids=["without the prefix", "gamma and beta", "tied copies and buffers", "padded"],
)
def test_other_spellings_give_the_same_weights(tensors, config, tmp_path):
    base, _ = imported(hf_folder.write(tmp_path / "hf", tensors, config))
    assert_identical(base.params, weights.import_tensors(TENSORS, base.model, "golden")[0])
    assert base.model.vocab_size == PIECES and not base.fresh
    # Nothing of the padding is kept: ours is zero, and masked out of the softmax.
    assert not base.params["encoder"]["embeddings"]["word"]["embedding"][PIECES:].any()
    assert not base.params["masked_lm"]["output_bias"][PIECES:].any()


def test_any_rows_beyond_the_vocabulary_are_left_out_and_named(tmp_path):
    folder = hf_folder.write(tmp_path / "hf", padded(1035), {"vocab_size": 1035})
    base, lines = imported(folder)
    assert_identical(base.params, weights.import_tensors(TENSORS, base.model, "golden")[0])
    assert "warning" in lines[0] and "1000 tokens: rows 1000 to 1034" in lines[0]


def test_theirs_to_ours_to_theirs_keeps_every_bit(tmp_path):
    base, _ = imported(hf_folder.write(tmp_path / "hf"))
    back = weights.export_tensors(base.params, base.model, "BertForPreTraining")
    assert back.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        np.testing.assert_array_equal(back[name], tensor, name)


def shards(listed: dict[str, str] | None = None) -> None:
    hf_folder.cut_in_shards(pathlib.Path("hf"), listed)


def test_weights_in_several_files_are_those_in_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hf_folder.write(tmp_path / "hf")
    broken.said("import hf --workdir one")
    shards()
    broken.said("import hf --workdir several")
    one, several = (base_lib.read(epath.Path(name)) for name in ("one", "several"))
    assert_identical(one.params, several.params)
    assert one.sha256 == several.sha256 and not several.fresh


def test_half_precision_is_read_exactly(tmp_path):
    halves = {name: t.astype(ml_dtypes.bfloat16) for name, t in TENSORS.items()}
    base, _ = imported(hf_folder.write(tmp_path / "hf", halves))
    whole = {name: t.astype(np.float32) for name, t in halves.items()}
    assert_identical(base.params, weights.import_tensors(whole, base.model, "golden")[0])


@pytest.mark.parametrize(
    ("architecture", "missing"),
    [
        ("BertModel", ("masked_lm", "next_sentence")),
        ("BertForMaskedLM", ("pooler", "next_sentence")),
    ],
)
def test_parts_that_are_missing_are_fresh_and_named(architecture, missing, tmp_path):
    whole, _ = imported(hf_folder.write(tmp_path / "hf"))
    (tmp_path / "part").mkdir()
    tensors = weights.export_tensors(whole.params, whole.model, architecture)
    config = {"architectures": [architecture]}
    base, lines = imported(hf_folder.write(tmp_path / "part" / "hf", tensors, config))
    assert base.fresh == missing
    for part in missing:
        assert any(f"{part}/" in line and "fresh" in line for line in lines)
        spread = base_lib.flatten(base.params[part])
        assert all(v.std() > 0.01 for name, v in spread.items() if name.endswith("kernel"))
    assert_identical(base.params["encoder"], whole.params["encoder"])
    place = tmp_path / "part" / "base"
    for part, asked in (("masked_lm", "w7[MASK]"), ("next_sentence", "w7 --next w8")):
        code, err = broken.call(f"predict --workdir {place} {asked}")
        assert code == (2 if part in missing else 0) and err.count("\n") == bool(code)
        assert f"base: its {part} head is untrained; " in err or not code


def test_parts_that_a_run_has_not_learned_are_fresh_in_its_base(monkeypatch):
    """As of an objective of its own, which has no use for some."""
    run = LoadedModel(
        Model(), {}, tokenizer_lib.WordPiece(VOCAB, "cased"), fresh=("pooler",), step=3
    )
    monkeypatch.setattr(LoadedModel, "of", lambda folder, what: run)
    base = importing._read_run(Workdir("runs/x"), "params")
    assert (base.source, base.fresh) == ("x, step 3", ("pooler",))


def test_a_vocabulary_in_tokenizer_json_alone_is_read(tmp_path):
    folder = hf_folder.write(tmp_path / "hf")
    (folder / "vocab.txt").unlink()
    parts = fast({"type": "BertNormalizer", "lowercase": False})
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    edit(folder / "tokenizer_config.json", do_lower_case=False)
    base, _ = imported(folder)
    assert base.tokenizer.vocab == VOCAB and base.tokenizer.case == "cased"


def test_a_wordpiece_that_cuts_otherwise_is_read_by_its_library(tmp_path):
    """With a token more than the vocabulary has, and words that end at blanks alone."""
    ours = tokenizer_lib.WordPiece(VOCAB, "cased")
    vocabularies.write(ours, 128, huggingface.INPUTS["bert"], epath.Path(tmp_path))
    assert vocabularies.read(epath.Path(tmp_path)).sha256 == ours.sha256
    file = tmp_path / "tokenizer.json"
    theirs = tokenizers.Tokenizer.from_file(str(file))
    theirs.add_tokens(["more"])
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    theirs.save(str(file))
    read = vocabularies.read(epath.Path(tmp_path))
    assert (read.kind, read.size) == ("library", len(VOCAB) + 1)
    text = f"{VOCAB[-1]} more {VOCAB[-2]}."
    ids = theirs.encode(text, add_special_tokens=False).ids
    assert read.encode(text) == ids != ours.encode(text)


ONE = tokenizers.processors.TemplateProcessing(
    single="[CLS] $A [SEP]",
    pair="[CLS] $A [SEP] $B [SEP]",
    special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
)


@pytest.mark.parametrize(
    ("part", "value"),
    [("normalizer", None), ("pre_tokenizer", None), ("post_processor", ONE), ("added", "w7")],
)
def test_a_wordpiece_is_cut_and_joined_as_its_file_says(part, value, tmp_path):
    ours = tokenizer_lib.WordPiece([*VOCAB, "W9", "."], "uncased")
    vocabularies.write(ours, 128, huggingface.INPUTS["bert"], epath.Path(tmp_path))
    edit(tmp_path / "tokenizer_config.json", do_lower_case=None)
    file = tmp_path / "tokenizer.json"
    theirs = tokenizers.Tokenizer.from_file(str(file))
    if part == "added":
        theirs.add_tokens([value])
    else:
        setattr(theirs, part, value)
    theirs.save(str(file))
    read, texts = vocabularies.read(epath.Path(tmp_path)), ("w8 W9.", "w7w8 w9")
    first, second = map(read.encode, texts)
    assert [first, second] == [theirs.encode(it, add_special_tokens=False).ids for it in texts]
    row, before = tokenizer_lib.add_special_tokens(read, first, second)
    segments = np.arange(len(row)) >= tokenizer_lib.first_segment_length(read, row, before)
    pair = theirs.encode(*texts)
    assert (row.tolist(), segments.tolist()) == (pair.ids, pair.type_ids)
    theirs.post_processor = None
    theirs.save(str(file))
    with pytest.raises(InputError, match="post_processor"):
        vocabularies.read(epath.Path(tmp_path))


def test_accents_that_stay_in_lower_case_are_left_to_the_library(tmp_path):
    ours = tokenizer_lib.WordPiece(VOCAB, "uncased")
    vocabularies.write(ours, 128, huggingface.INPUTS["bert"], epath.Path(tmp_path))
    file = tmp_path / "tokenizer.json"
    theirs = tokenizers.Tokenizer.from_file(str(file))
    theirs.normalizer = tokenizers.normalizers.BertNormalizer(strip_accents=False)
    theirs.save(str(file))
    edit(tmp_path / "tokenizer_config.json", strip_accents=False)
    assert vocabularies.read(epath.Path(tmp_path)).kind == "library"
    edit(tmp_path / "tokenizer_config.json", strip_accents=True, do_lower_case=False)
    theirs.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=False)
    theirs.save(str(file))
    with pytest.raises(InputError, match=r"tokenizer_config\.json: strip_accents"):
        vocabularies.read(epath.Path(tmp_path))


def test_another_vocabulary_keeps_the_rows_of_shared_pieces(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    old, _ = imported(hf_folder.write(tmp_path / "hf"))
    pieces = ["new1", *VOCAB[:5], *VOCAB[1100:0:-1][:-4], "new2", *(f"more{i}" for i in range(60))]
    pathlib.Path("vocab2.txt").write_text("\n".join(pieces) + "\n")
    broken.said("import hf --workdir new --tokenizer vocab2.txt")
    new = base_lib.read(epath.Path("new"))
    assert new.model.vocab_size == len(pieces) > 1024 and new.tokenizer.vocab == pieces
    leaves = base_lib.flatten(new.params)
    for name in ("encoder/embeddings/word/embedding", "masked_lm/output_bias"):
        table, before = leaves.pop(name), base_lib.flatten(old.params)[name]
        assert len(table) == 2048 and not table[len(pieces) :].any()
        mean = before[:PIECES].astype(np.float64).mean(0)
        for row, piece in enumerate(pieces):
            if piece in VOCAB:
                np.testing.assert_array_equal(table[row], before[VOCAB.index(piece)])
            else:
                np.testing.assert_allclose(table[row], mean, rtol=1e-6)
    for name, value in leaves.items():
        np.testing.assert_array_equal(value, base_lib.flatten(old.params)[name], name)


def fast(normalizer) -> dict:
    """A tokenizer.json."""
    model = {"type": "WordPiece", "vocab": {piece: i for i, piece in enumerate(VOCAB)}}
    return {"model": model, "normalizer": normalizer}


def without(name: str) -> dict[str, np.ndarray]:
    return {other: t for other, t in TENSORS.items() if other != name}


def config(**fields):
    return lambda: edit("hf/config.json", **fields)


def edit(file: str, **fields) -> None:
    path = pathlib.Path(file)
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | fields))


def tensors_are(tensors: dict[str, np.ndarray]):
    return lambda: save_file(tensors, "hf/model.safetensors")


def vocab(pieces: list[str]):
    return lambda: pathlib.Path("hf/vocab.txt").write_text("\n".join(pieces) + "\n")


def cut_off():
    path = pathlib.Path("hf/model.safetensors")
    path.write_bytes(path.read_bytes()[:-100])


def without_shard():
    shards()
    pathlib.Path("hf/model-00002-of-00003.safetensors").unlink()


def sentencepiece():
    pathlib.Path("hf/vocab.txt").rename("hf/spiece.model")


QUERY = "bert.encoder.layer.1.attention.self.query.weight"
ROUNDED = TENSORS | {"cls.predictions.decoder.weight": TENSORS[WORD] + 1e-3}
WIDER = TENSORS | {QUERY: np.zeros((64, 65), np.float32)}
TWICE = TENSORS | {"embeddings.LayerNorm.gamma": np.ones(64, np.float32)}


def as_it_is():
    edit("hf/tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


REFUSED = {
    "a missing tensor": (tensors_are(without(QUERY)), [QUERY, "[64, 64]", "missing"]),
    "an extra tensor": (
        tensors_are(TENSORS | {"classifier.bias": np.zeros(2)}),
        ["classifier.bias"],
    ),
    "another shape": (tensors_are(WIDER), [QUERY, "[64, 65]", "[64, 64]"]),
    "a tensor twice": (tensors_are(TWICE), ["embeddings.LayerNorm.gamma", "the same"]),
    "untied": (tensors_are(ROUNDED), ["decoder.weight", "[1000, 64]", "tied"]),
    "cut off": (cut_off, ["model.safetensors", "damaged"]),
    "a missing shard": (without_shard, ["model-00002-of-00003", "no such", "index.json"]),
    "a tensor listed elsewhere": (
        lambda: shards(listed={QUERY: "model-00003-of-00003.safetensors"}),
        [QUERY, "index.json", "model-00002-of-00003"],
    ),
    "a shard above": (
        lambda: shards(listed={QUERY: "../model.safetensors"}),
        ["index.json", QUERY, "../model.safetensors"],
    ),
    "another model": (config(model_type="deberta-v2"), ["config.json", "deberta-v2", "relative"]),
    "NomicBERT": (config(model_type="nomic_bert"), ["config.json", "nomic_bert", "rotary"]),
    "MPNet of other buckets": (
        config(model_type="mpnet", pad_token_id=1, relative_attention_num_buckets=16),
        ["config.json", "relative_attention_num_buckets=16"],
    ),
    "MPNet of another padding": (
        config(model_type="mpnet", pad_token_id=0, type_vocab_size=0),
        ["config.json", "pad_token_id=0"],
    ),
    "a small ELECTRA": (
        config(model_type="electra", embedding_size=8),
        ["config.json", "embedding_size=8"],
    ),
    "a class with another head": (
        config(architectures=["BertForNextSentencePrediction"]),
        ["BertForNextSentencePrediction"],
    ),
    "layers beyond count": (config(num_hidden_layers=4_000_000_000), ["encoder.layer.3."]),
    "relative positions": (
        config(position_embedding_type="relative_key"),
        ["position_embedding_type", "relative_key"],
    ),
    "another activation": (config(hidden_act="relu"), ["hidden_act", "relu"]),
    "a decoder of two texts": (config(add_cross_attention=True), ["add_cross_attention"]),
    "rows and config": (config(vocab_size=1001), ["[1000, 64]", "1001"]),
    "a long vocabulary": (vocab([*VOCAB, "more"]), [WORD, "1000 rows", "1001 tokens"]),
    "no vocabulary": (lambda: pathlib.Path("hf/vocab.txt").unlink(), ["vocab.txt"]),
    "sentencepiece": (sentencepiece, ["spiece.model", "tokenizer.json"]),
    "another tokenizer": (
        lambda: (as_it_is(), edit("hf/tokenizer.json", model={"type": "BPE", "vocab": {}})),
        ["tokenizer.json", "tokenizers library"],
    ),
    "another end of words": (
        lambda: (
            as_it_is(),
            edit("hf/tokenizer.json", **fast(None) | {"pre_tokenizer": {"type": "Split"}}),
        ),
        ["tokenizer.json", "tokenizers library"],
    ),
    "words of another program": (
        lambda: edit("hf/tokenizer_config.json", word_tokenizer_type="mecab"),
        ["tokenizer_config.json", "word_tokenizer_type='mecab'"],
    ),
    "weights that are no numbers": (
        tensors_are(TENSORS | {QUERY: np.full((64, 64), np.nan, np.float32)}),
        [QUERY, "not finite"],
    ),
    "two cases": (
        lambda: (
            edit("hf/tokenizer.json", **fast({"type": "BertNormalizer", "lowercase": True})),
            edit("hf/tokenizer_config.json", do_lower_case=False),
        ),
        ["lowercase True", "do_lower_case False"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_be_the_same_model_is_refused_in_one_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hf_folder.write(tmp_path / "hf")
    breaks, words = REFUSED[name]
    broken.refuses(broken.Case(name, "import hf --workdir made/base", tuple(words), breaks))


@pytest.mark.parametrize("source", ["nowhere", "nowhere/..", "nowhere/.index", ".index"])
def test_a_source_that_is_nowhere_is_refused_in_one_line(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = f"import {source} --workdir made/base"
    broken.refuses(broken.Case("nowhere", command, (source, "no such folder")))


def test_a_name_on_a_hub_is_looked_up_there_with_its_owner_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("some-org/bert_v1.5", "cannot be reached")
    broken.refuses(broken.Case("hub", "import some-org/bert_v1.5 --workdir b", words))
    for source in ("/some-org/bert", "../bert", "a/b/c", "bert-base-uncased"):
        assert "cannot be reached" not in broken.call(f"import {source} --workdir b")[1]


def test_a_folder_that_holds_something_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hf_folder.write(tmp_path / "hf")
    broken.refuses(broken.Case("there", "import hf --workdir hf", ("hf", "another folder")))

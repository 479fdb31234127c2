"""What is exported comes back as it was, and its files say what ours say."""

import dataclasses
import json
import pathlib

import broken
import jax
import ml_dtypes
import numpy as np
import pytest
import samples
import tokenizers
from etils import epath
from safetensors import safe_open
from safetensors.numpy import load_file

from bert_jax.checkpoints import base as base_lib
from bert_jax.config import Corpus, Finetuning, Model, Task, Vectors
from bert_jax.errors import InputError
from bert_jax.interop import card, huggingface, vocabularies
from bert_jax.model import heads
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.storage.mirror import open_workdir
from bert_jax.text import tokenizer as tokenizer_lib
from bert_jax.text import tokenizer_training, vocabulary

RUN = "--workdir run"
TEXTS = [
    "The quick brown Fox.",
    "Überraschung, naïve café: ÅNGSTRÖM İstanbul",
    "日本語 text 漢字",
    "a" * 150 + " " + "a" * 250,
    "don't stop-me_now (please)! 3.14% $5 #x",
    "tabs\tand\nlines\r\n and\u00a0spaces \u200b\u0007bell \ufffd",
    "",
    "Ελληνικά и кириллица 😀",
]


def wordpiece(case: tokenizer_lib.Case) -> tokenizer_lib.WordPiece:
    """Words of these texts whole and in letters."""
    words = sorted({word for text in TEXTS for word in tokenizer_lib.basic_tokens(text, case)})
    letters = sorted({letter for word in words for letter in word})
    some = [word for word in words[::2] if len(word) < 100]
    pieces = [*vocabulary.SPECIALS, *letters, *(f"##{x}" for x in letters), *some]
    return tokenizer_lib.WordPiece(list(dict.fromkeys(pieces)), case)


@pytest.mark.long
def test_bfloat16_is_the_nearest_and_is_labelled(copy_of_run):
    broken.said(f"export {RUN} --as encoder --out whole")
    broken.said(f"export {RUN} --as encoder --out half --dtype bfloat16")
    broken.said("import half --workdir base")
    whole = load_file("whole/model.safetensors")
    with safe_open("half/model.safetensors", "numpy") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
    name = "embeddings.position_embeddings.weight"
    rounded = whole[name].astype(ml_dtypes.bfloat16).astype(np.float32)
    found = base_lib.flatten(LoadedModel.of(open_workdir("base")).params)
    np.testing.assert_array_equal(found["encoder/embeddings/position/embedding"], rounded)
    assert json.loads(pathlib.Path("half/config.json").read_text())["dtype"] == "bfloat16"
    assert "bfloat16" in pathlib.Path("half/README.md").read_text()


@pytest.mark.parametrize("case", ["uncased", "cased"])
def test_the_exported_tokenizer_gives_our_ids_and_comes_back(case, tmp_path):
    ours = wordpiece(case)
    vocabularies.write(ours, 128, huggingface.INPUTS["bert"], epath.Path(tmp_path))
    fast = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        assert fast.encode(text, add_special_tokens=False).ids == ours.encode(text), text
    pair = fast.encode("fox", "stop")
    inner = [ours.encode("fox"), ours.encode("stop")]
    assert pair.ids == [ours.cls_id, *inner[0], ours.sep_id, *inner[1], ours.sep_id]
    assert pair.type_ids == [0] * (len(inner[0]) + 2) + [1] * (len(inner[1]) + 1)
    assert vocabularies.read(epath.Path(tmp_path)).sha256 == ours.sha256
    (tmp_path / "vocab.txt").unlink()
    assert vocabularies.read(epath.Path(tmp_path)).sha256 == ours.sha256


def test_a_sentencepiece_vocabulary_is_refused_and_leaves_nothing(tmp_path, copy_of_run):
    words = dict.fromkeys([*["some", "words", "of", "text", "number"], *map(str, range(50))], 9)
    model = tokenizer_training.train_sentencepiece(samples.word_counts(words), 40, "bpe")
    trained = LoadedModel.of(open_workdir("run"))
    trained = dataclasses.replace(trained, tokenizer=tokenizer_lib.SentencePiece(model, "cased"))
    with pytest.raises(InputError, match="sentencepiece vocabulary cannot be exported"):
        huggingface.write_folder(trained, "encoder", "float32", epath.Path("made/hf"))
    assert not pathlib.Path("made").exists()


@pytest.mark.parametrize("pad_id", [0, 1, 4])
def test_positions_of_an_exported_roberta_start_at_pad_token_id_plus_1(pad_id, tmp_path):
    """The exported table is shifted, so that transformers looks up the same embeddings."""
    pieces = ["[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abc"]
    pieces.insert(pad_id, "[PAD]")
    sizes = {"hidden_size": 8, "intermediate_size": 16, "max_position_embeddings": 12}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "type_vocab_size": 1}
    cfg = Model(vocab_size=len(pieces), position_offset=2, **sizes)
    params = jax.device_get(heads.init_params(cfg, jax.random.key(0)))
    ours, folder = params["encoder"]["embeddings"]["position"]["embedding"], tmp_path / "hf"
    loaded = LoadedModel(cfg, params, tokenizer_lib.WordPiece(pieces, "uncased"), name="x")
    huggingface.write_folder(loaded, "masked_lm", "float32", epath.Path(folder))
    says = json.loads((folder / "config.json").read_text())
    written = load_file(folder / "model.safetensors")
    theirs = written["roberta.embeddings.position_embeddings.weight"]
    first = says["pad_token_id"] + 1
    assert first == pad_id + 1 and len(theirs) == says["max_position_embeddings"] == first + 12
    np.testing.assert_array_equal(theirs[first:], ours[2:])
    if first == 2:
        np.testing.assert_array_equal(theirs, ours)
    again = huggingface.read_folder(epath.Path(folder), print).model
    assert (again.position_offset, again.max_position_embeddings) == (first, 12)


@pytest.mark.parametrize(("kind", "size"), [("byte_bpe", 300), ("unigram", 60)])
def test_a_vocabulary_trained_here_is_exported_unchanged(kind, size, tmp_path):
    words = dict.fromkeys([*["some", "words", "of", "text", "number"], *map(str, range(50))], 9)
    settings = Corpus(sources=("text:x",), tokenizer_kind=kind)
    ours = tokenizer_training.train(samples.word_counts(words), size, settings)
    vocabularies.write(ours, 64, huggingface.INPUTS["modern"], epath.Path(tmp_path))
    assert vocabularies.read(epath.Path(tmp_path)).sha256 == ours.sha256
    says = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert says["tokenizer_class"] == "PreTrainedTokenizerFast" and says["mask_token"] == "[MASK]"


def test_a_card_keeps_to_itself_where_files_lie(copy_of_run):
    places = {"train": ("jsonl:/home/me/a.jsonl",), "validation": ("beir:/home/me/b:test",)}
    task, teacher = Task(kind="similar", **places), Vectors(loss="distil", teacher="/home/me/t.npz")
    tuned = Finetuning(name="x", task=task, vectors=teacher)
    model = LoadedModel.of(open_workdir("run"))
    text = card.render(model, "BertModel", "float32", "x", finetuning=tuned)
    assert "t.npz" in text and "/home" not in text


def test_hostile_names_stand_in_code_spans_of_the_model_card(copy_of_run):
    trained = LoadedModel.of(open_workdir("run"))
    hostile = "x`</script>\n# hello ![](http://evil)\x1b[31m|`"
    trained.name, trained.manifest["sources"][0]["file"] = hostile, hostile
    text = card.render(trained, "BertModel", "float32", hostile)
    assert all(char.isprintable() or char == "\n" for char in text)
    headings = [line for line in text.split("\n") if line.startswith("#")]
    assert len(headings) == 5 and headings[0].startswith("# `x'")
    outside = text.split("```")[0] + text.split("```")[2]
    spans = outside.split("`")
    assert len(spans) % 2 == 1 and "hello" not in "".join(spans[::2])
    usage_lines = [line for line in text.split("\n") if "from_pretrained" in line]
    assert len(usage_lines) == 2 and len(text.split("```")) == 3

"""Folders of transformers' ModernBERT: written, and read back as they were; bad ones are named."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from etils import epath

from bert_jax.checkpoints import base as base_lib
from bert_jax.config import Model
from bert_jax.errors import InputError
from bert_jax.interop import configs, huggingface, importing
from bert_jax.model import heads
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.text.tokenizer import WordPiece

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(30))]
MODEL = Model(
    kind="modern",
    vocab_size=len(PIECES),
    hidden_size=16,
    num_hidden_layers=5,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=64,
    hidden_act="gelu_tanh",
    hidden_dropout_prob=0.0,
    global_every=2,
    local_window=16,
    global_rotary_base=1_000.0,
    local_rotary_base=500.0,
)


@functools.cache
def trained():
    rng = np.random.default_rng(0)
    params = jax.device_get(heads.init_params(MODEL, jax.random.key(0)))
    params = jax.tree.map(lambda x: x + rng.standard_normal(x.shape).astype(np.float32), params)
    # What nothing reads.
    params["encoder"]["embeddings"]["word"]["embedding"][MODEL.vocab_size :] = 0
    params["masked_lm"]["output_bias"][MODEL.vocab_size :] = 0
    params["encoder"]["layers"]["attention_layer_norm"]["scale"][0] = 1
    return LoadedModel(MODEL, params, WordPiece(PIECES, "uncased"), name="a test")


def write(folder, kind="masked_lm", **changes):
    """An exported folder, with fields of config.json changed."""
    huggingface.write_folder(trained(), kind, "float32", epath.Path(folder))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize("kind", ["masked_lm", "encoder"])
def test_what_is_exported_comes_back_as_it_was(kind, tmp_path):
    said = []
    base = huggingface.read_folder(epath.Path(write(tmp_path / "hf", kind)), said.append)
    says = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert says["model_input_names"] == ["input_ids", "attention_mask"]
    fresh = {"masked_lm": ("pooler", "next_sentence"), "encoder": ("pooler", "masked_lm")}[kind]
    assert set(fresh) <= set(base.fresh) and len(said) == len(base.fresh)
    assert base.model == dataclasses.replace(
        MODEL, attention_probs_dropout_prob=0.1, initialization="reference"
    )
    ours = base_lib.flatten(trained().params)
    for name, value in base_lib.flatten(base.params).items():
        if name.split("/")[0] not in base.fresh:
            np.testing.assert_array_equal(value, ours[name], err_msg=name)


def test_older_configurations_say_the_same_otherwise(tmp_path):
    """Before version 5: one base a field, and how many layers there are from one to the next."""
    folder = write(tmp_path / "hf")
    fields = json.loads((folder / "config.json").read_text())
    new = configs.read(epath.Path(folder / "config.json"))
    for name in ("layer_types", "rope_parameters"):
        del fields[name]
    (folder / "config.json").write_text(json.dumps(fields))
    assert configs.read(epath.Path(folder / "config.json")) == new
    for name in [n for n in fields if n not in ("model_type", "vocab_size")]:
        del fields[name]
    (folder / "config.json").write_text(json.dumps(fields))
    base = configs.read(epath.Path(folder / "config.json"))
    assert (base.num_hidden_layers, base.intermediate_size, base.local_window) == (22, 1_152, 128)
    assert (base.global_rotary_base, base.local_rotary_base) == (160_000.0, 10_000.0)


def test_a_scaling_of_both_and_layers_of_one_kind_are_read(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 2.0}
    alike = {"layer_types": ["full_attention"] + ["sliding_attention"] * 4}
    folder = write(tmp_path / "hf", rope_scaling=scaling, **alike)
    cfg = configs.read(epath.Path(folder / "config.json"))
    assert (cfg.global_rotary_scaling, cfg.local_rotary_scaling) == ("yarn:64:2",) * 2
    assert cfg.global_every == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_bias": True}, ["norm_bias=True", "False"]),
        ({"classifier_activation": "silu"}, ["classifier_activation", "silu"]),
        ({"layer_types": ["sliding_attention"] * 5}, ["layer_types", "first"]),
        ({"rope_scaling": {"type": "yarn"}}, ["rope_scaling", "yarn", "rope_type"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["global_rotary_scaling", "FACTOR"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 16}}, ["beta_fast=16"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "llama3"}}}, ["rope_type='llama3'"]),
        ({"global_rope_theta": "x", "rope_parameters": None}, ["global_rope_theta='x'"]),
        ({"tie_word_embeddings": False}, ["decoder.weight"]),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(changes, words, tmp_path):
    folder = write(tmp_path / "hf", **changes)
    with pytest.raises(InputError) as caught:
        importing.import_weights(
            epath.Path(folder), epath.Path(tmp_path / "base"), None, lambda line: None
        )
    for word in words:
        assert word in str(caught.value)
    assert not (tmp_path / "base").exists()


def test_they_have_no_class_with_a_next_sentence_head(tmp_path):
    with pytest.raises(InputError, match=r"--as pretraining.*masked_lm or encoder"):
        huggingface.write_folder(trained(), "pretraining", "float32", epath.Path(tmp_path / "x"))
    assert not (tmp_path / "x").exists()

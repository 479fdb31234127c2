"""Folders of transformers' decoders, for what reads from left to right: written and read back."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from etils import epath
from test_modern_folder import MODEL, PIECES

from bert_jax.checkpoints import base as base_lib
from bert_jax.config import Model
from bert_jax.errors import InputError
from bert_jax.interop import huggingface
from bert_jax.model import heads
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.text.tokenizer import WordPiece

CLASSES = {
    "bert": ("bert", "BertLMHeadModel"),
    "modern": ("modernbert-decoder", "ModernBertDecoderForCausalLM"),
}


def trained(kind, direction="left_to_right"):
    cfg = dataclasses.replace(MODEL, direction=direction)
    if kind == "bert":
        shared = ("vocab_size", "hidden_size", "num_attention_heads", "max_position_embeddings")
        cfg = Model(direction=direction, **{name: getattr(MODEL, name) for name in shared})
        cfg = dataclasses.replace(cfg, num_hidden_layers=2, intermediate_size=24)
    params = jax.device_get(heads.init_params(cfg, jax.random.key(0)))
    return LoadedModel(cfg, params, WordPiece(PIECES, "uncased"), name="a test")


@pytest.mark.long
@pytest.mark.parametrize("kind", CLASSES)
def test_what_is_exported_comes_back_as_it_was(kind, tmp_path):
    """Windows of a decoder count the token itself, so that they are two more."""
    before = trained(kind)
    huggingface.write_folder(before, "causal_lm", "float32", epath.Path(tmp_path / "hf"))
    fields = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (fields["model_type"], fields["architectures"][0]) == CLASSES[kind]
    assert fields["is_decoder"] if kind == "bert" else fields["local_attention"] == 18
    assert "text-generation" in (tmp_path / "hf" / "README.md").read_text()
    base = huggingface.read_folder(epath.Path(tmp_path / "hf"), lambda line: None)
    assert base.model == dataclasses.replace(before.model, initialization="reference")
    assert base.fresh == ("pooler", "next_sentence")
    ours = base_lib.flatten(before.params)
    for name, value in base_lib.flatten(base.params).items():
        if name.split("/")[0] not in base.fresh:
            np.testing.assert_array_equal(value, ours[name], err_msg=name)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    ("direction", "wanted", "instead"),
    [("left_to_right", "masked_lm", "choose causal_lm"), ("both", "causal_lm", "masked_lm")],
)
def test_a_class_that_would_read_otherwise_is_refused(kind, direction, wanted, instead, tmp_path):
    with pytest.raises(InputError, match=f"--as {wanted}: .*{instead}"):
        model, folder = trained(kind, direction), epath.Path(tmp_path / "hf")
        huggingface.write_folder(model, wanted, "float32", folder)
    assert not list(tmp_path.iterdir())


def test_of_a_family_without_a_decoder_that_is_the_line():
    cfg = Model(direction="left_to_right", type_vocab_size=1, position_offset=2)
    with pytest.raises(InputError, match=r"RoBERTa of model\.direction=left_to_right"):
        huggingface.architecture_of(cfg, "masked_lm")

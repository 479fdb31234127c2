"""`bert-jax export`: a run or a base to a folder that transformers reads."""

import json
from typing import Literal

import ml_dtypes
import numpy as np
from etils import epath

from bert_jax import weights
from bert_jax.interop import card, names, settings, vocabularies
from bert_jax.predict import Trained
from bert_jax.storage.workdir import new_folder

ARCHITECTURES = {
    "pretraining": "BertForPreTraining",
    "masked_lm": "BertForMaskedLM",
    "encoder": "BertModel",
}
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

Kind = Literal["pretraining", "masked_lm", "encoder"]


def export_weights(
    trained: Trained, kind: Kind, dtype: Literal["float32", "bfloat16"], target: epath.Path
) -> None:
    """Writes the folder, whole or not at all.

    Args:
      trained: what to write.
      kind: which of their classes reads it; `encoder` is for sentence-transformers, too.
      dtype: of the weights; bfloat16 rounds them.
      target: where it goes; nothing may be there.

    Raises:
      InputError: something is there, it cannot be written, or the vocabulary is no WordPiece.
    """
    architecture, cfg = ARCHITECTURES[kind], trained.model
    with new_folder(target) as folder:
        vocabularies.write(trained.tokenizer, cfg.max_position_embeddings, folder)
        config = settings.write(cfg, architecture, dtype, trained.tokenizer.pad_id)
        card_text = card.write(trained, architecture, dtype, target.name)
        for name, text in (("config.json", config), ("README.md", card_text)):
            (folder / name).write_text(text, encoding="utf-8")
        if kind == "encoder":
            _write_pooling(folder, cfg.hidden_size, cfg.max_position_embeddings)
        tensors = names.to_theirs(trained.params, cfg, architecture)
        rounded = {name: tensor.astype(DTYPES[dtype]) for name, tensor in tensors.items()}
        weights.write(folder / "model.safetensors", rounded, {"format": "pt"})


def _write_pooling(folder: epath.Path, width: int, longest: int) -> None:
    """What sentence-transformers wants beside a BertModel: the mean over a text's pieces."""
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.models.Pooling",
        },
    ]
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling").mkdir()
    for name, value in (
        ("modules.json", modules),
        ("sentence_bert_config.json", {"max_seq_length": longest, "do_lower_case": False}),
        ("1_Pooling/config.json", pooling),
    ):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

"""Folders of Hugging Face's transformers, read and written: config.json and weights."""

import dataclasses
import re
from typing import Literal

import ml_dtypes
import numpy as np
from etils import epath

from bert_jax.checkpoints import base as base_lib
from bert_jax.checkpoints.base import Base, TextVectors
from bert_jax.config import Finetuning, Model
from bert_jax.errors import InputError
from bert_jax.interop import card, configs, names, sentence_transformers, vocabularies, weights
from bert_jax.interop.names import Naming, Say
from bert_jax.interop.settings import Settings
from bert_jax.interop.vocabularies import read_object
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.storage.copies import new_folder

# By `names.family`, and by what is wanted.
ARCHITECTURES = {
    "bert": {
        "pretraining": "BertForPreTraining",
        "masked_lm": "BertForMaskedLM",
        "encoder": "BertModel",
        "causal_lm": "BertLMHeadModel",
    },
    "roberta": {"masked_lm": "RobertaForMaskedLM", "encoder": "RobertaModel"},
    "distilbert": {"masked_lm": "DistilBertForMaskedLM", "encoder": "DistilBertModel"},
    "modern": {
        "masked_lm": "ModernBertForMaskedLM",
        "encoder": "ModernBertModel",
        "causal_lm": "ModernBertDecoderForCausalLM",
    },
}
# What their models read of a text.
INPUTS = {
    "bert": ("input_ids", "token_type_ids", "attention_mask"),
    **dict.fromkeys(("roberta", "distilbert", "modern"), ("input_ids", "attention_mask")),
}
# What writes a pickle's tensors as safetensors, and runs nothing in it.
_CONVERT = (
    'python -c "import torch, safetensors.torch as s; s.save_file({k: v.clone() for k, v in '
    "torch.load('pytorch_model.bin', weights_only=True).items()}, 'model.safetensors')\""
)
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

Kind = Literal["pretraining", "masked_lm", "encoder", "causal_lm"]


# --- folders --------------------------------------------------------------------------------------


def read_folder(folder: epath.Path, say: Say) -> Base:
    """Reads what `save_pretrained` wrote of one of `ARCHITECTURES`."""
    stated = configs.read(folder / "config.json")
    naming = names.HUGGING_FACE[names.family(stated)]
    if stated.output_table == "own":
        naming = dataclasses.replace(naming, tied={})
    settings = Settings(folder)
    tokenizer = vocabularies.read(folder, settings)
    settings.require_model(stated, tokenizer.pad_id)
    if extra := settings.extra_special_tokens():
        shown = ", ".join(extra[:5]) + ", ..." * (len(extra) > 5)
        say(f"special tokens that are plain text where a text holds them: {shown}")
    file = _weights_file(folder)
    held = _read_shards(file) if file.suffix == ".json" else base_lib.read_tensors(file)
    tensors = _without_copies(held, naming, str(file))
    head, fresh = None, ()
    if (architecture := configs.task_class(folder / "config.json")) is not None:
        head = configs.head_of(folder / "config.json", architecture, tensors, stated.hidden_size)
        tensors = weights.without_head(tensors, stated, architecture)
        parts, name = names.HEADS[architecture]
        kept = "stays behind" if head is None else "is kept for a task of its kind and labels"
        say(f"{architecture}: its head ({name}) {kept}")
        if "masked_lm" in parts:  # without its output
            fresh = ("masked_lm/output_bias",)
            say(f"not in {file.name}, freshly initialised: {fresh[0]}")
    source = f"Hugging Face folder {folder.name}"
    base = weights.fitted(tensors, naming, stated, tokenizer, file, source, say)
    base.vectors = sentence_transformers.read(folder, stated, tokenizer, settings)
    base.head, base.fresh = head, (*base.fresh, *fresh)
    return base


def _weights_file(folder: epath.Path) -> epath.Path:
    """Returns the file of all weights, or the index of several."""
    for name in ("model.safetensors", "model.safetensors.index.json"):
        if (folder / name).exists():
            return folder / name
    saved = "load it in transformers and save it with save_pretrained"
    instead = {
        "pytorch_model.bin": f"a pickle, which may run code: not read; with torch: `{_CONVERT}`",
        "tf_model.h5": f"TensorFlow's weights: not read; {saved}",
        "flax_model.msgpack": f"Flax's weights: not read; {saved}",
    }
    for name, what in instead.items():
        if (folder / name).exists():
            raise InputError(f"{folder / name}: {what}")
    raise InputError(f"{folder / 'model.safetensors'}: no such file")


def _without_copies(
    held: dict[str, np.ndarray], naming: Naming, where: str
) -> dict[str, np.ndarray]:
    """Returns tensors by canonical names, without buffers and copies of tied weights."""
    tensors: dict[str, np.ndarray] = {}
    spelled: dict[str, str] = {}
    for name, value in held.items():
        ours = naming.canonical(name)
        if ours in naming.ignored:
            continue
        if ours in tensors:
            raise InputError(f"{where}: tensors {spelled[ours]!r} and {name!r} are the same one")
        if value.dtype != np.float32:
            raise InputError(
                f"{where}: tensor {name!r} is neither float32 nor float16 nor bfloat16"
            )
        tensors[ours], spelled[ours] = value, name
    for copy, original in naming.tied.items():
        if copy in tensors:
            value = tensors.pop(copy)
            if not np.array_equal(tensors.setdefault(original, value), value):
                raise InputError(
                    f"{where}: tensor {copy!r} of {list(value.shape)} differs from {original!r} of "
                    f"{list(tensors[original].shape)}; only tied weights are supported"
                )
    return tensors


def _read_shards(index: epath.Path) -> dict[str, np.ndarray]:
    """Reads tensors of files that an index lists: {"weight_map": {NAME OF TENSOR: FILE}}."""
    listed = read_object(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise InputError(f"{index}: damaged, its weight_map lists no tensors")
    for name, file in listed.items():
        # A plain name: anything else may lie elsewhere.
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\]+\.safetensors", file):
            raise InputError(
                f"{index}: tensor {name!r}: {file!r} is no .safetensors file next to the index"
            )
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(set(listed.values())):
        shard = index.parent / file
        if not shard.exists():
            raise InputError(f"{shard}: no such file, and {index.name} lists it; put it there")
        held = base_lib.read_tensors(shard)
        expected = {name for name, where in listed.items() if where == file}
        if other := expected ^ held.keys():
            raise InputError(
                f"{shard}: holds other tensors than {index.name} lists there ({min(other)!r}); put "
                "the files there that belong together"
            )
        tensors |= held
    return tensors


def forms_of(model: Model) -> list[str]:
    """Returns the kinds of export that a model which is not fine-tuned can have."""
    is_causal = model.direction == "left_to_right"
    kinds = ARCHITECTURES[names.family(model)]
    return [name for name in kinds if (name == "causal_lm") == is_causal]


def architecture_of(model: Model, kind: Kind) -> str:
    """Returns the class of theirs that holds what is wanted of such a model."""
    family, there = names.family(model), forms_of(model)
    if model.code or not there:
        it = f"a {names.FAMILIES[family].words} of model.direction={model.direction}"
        which = f"model.code={model.code}" if model.code else it
        raise InputError(
            f"--as {kind}: transformers has no class for {which}; `bert-jax embed` and "
            "`bert_jax.load` take it"
        )
    if kind not in there:
        raise InputError(
            f"--as {kind}: transformers has no such class for model.kind={model.kind} and "
            f"model.direction={model.direction}; choose {' or '.join(there)}"
        )
    return ARCHITECTURES[family][kind]


def export_weights(
    trained: LoadedModel,
    kind: Kind,
    dtype: Literal["float32", "bfloat16"],
    target: epath.Path,
    tuned: Finetuning | None = None,
) -> None:
    """Writes a folder that transformers reads, whole or not at all.

    `encoder` is for sentence-transformers, too; bfloat16 rounds the weights. Nothing may be at
    `target`. A fine-tuning, if one has made it, is for the card.
    """
    architecture, cfg = architecture_of(trained.model, kind), trained.model
    longest = cfg.max_position_embeddings
    with new_folder(target) as folder:
        vocabularies.write(trained.tokenizer, longest, INPUTS[names.family(cfg)], folder)
        card_text = card.write(trained, architecture, dtype, target.name, tuned=tuned)
        (folder / "README.md").write_text(card_text, encoding="utf-8")
        vocabularies.write_json(
            folder / "config.json", configs.fields_of(trained, architecture, dtype)
        )
        if kind == "encoder":
            sentence_transformers.write(trained.vectors or TextVectors(), cfg, folder)
        first = trained.tokenizer.pad_id + 1
        tensors = weights.to_theirs(trained.params, cfg, architecture, first)
        write_tensors(folder / "model.safetensors", tensors, dtype)


def write_tensors(path: epath.Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    """Writes float32 tensors as PyTorch's, rounded to `dtype`."""
    rounded = {name: tensor.astype(_DTYPES[dtype]) for name, tensor in tensors.items()}
    base_lib.write_tensors(path, rounded, {"format": "pt"})

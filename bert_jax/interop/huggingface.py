"""Folders of Hugging Face's transformers, read and written: config.json and weights."""

import re
from typing import Literal

import ml_dtypes
import numpy as np
from etils import epath

from bert_jax.checkpoints import base as base_lib
from bert_jax.checkpoints.base import Base
from bert_jax.config import Finetuning, Model
from bert_jax.errors import InputError
from bert_jax.interop import card, configs, names, sentence_transformers, vocabularies, weights
from bert_jax.interop.names import Naming, Report
from bert_jax.interop.settings import Settings
from bert_jax.interop.vocabularies import read_object, write_json
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.storage.copies import new_folder

# Classes of transformers by `names.family` and by form of export.
ARCHITECTURES = {
    "bert": {
        "pretraining": "BertForPreTraining",
        "masked_lm": "BertForMaskedLM",
        "encoder": "BertModel",
        "causal_lm": "BertLMHeadModel",
    },
    "roberta": {"masked_lm": "RobertaForMaskedLM", "encoder": "RobertaModel"},
    "mpnet": {"masked_lm": "MPNetForMaskedLM", "encoder": "MPNetModel"},
    "distilbert": {"masked_lm": "DistilBertForMaskedLM", "encoder": "DistilBertModel"},
    "modern": {
        "masked_lm": "ModernBertForMaskedLM",
        "encoder": "ModernBertModel",
        "causal_lm": "ModernBertDecoderForCausalLM",
    },
}
# The inputs of the models of a family.
INPUTS = {
    "bert": ("input_ids", "token_type_ids", "attention_mask"),
    **dict.fromkeys(("roberta", "distilbert", "mpnet", "modern"), ("input_ids", "attention_mask")),
}
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

Form = Literal["pretraining", "masked_lm", "encoder", "causal_lm"]


# --- folders --------------------------------------------------------------------------------------


def read_folder(folder: epath.Path, report: Report) -> Base:
    """Reads what `save_pretrained` wrote for a class in `ARCHITECTURES` or `names.HEADS`."""
    model = configs.read(folder / "config.json")
    naming = configs.naming_of(folder / "config.json", model)
    settings = Settings(folder)
    tokenizer = vocabularies.read(folder, settings)
    settings.require_model(model, tokenizer.pad_id)
    if extra := settings.extra_special_tokens():
        shown = ", ".join(extra[:5]) + ", ..." * (len(extra) > 5)
        report(f"special tokens that are read as plain text: {shown}")
    file = weights.find_file(folder)
    tensors = _read_shards(file) if file.suffix == ".json" else base_lib.read_tensors(file)
    tensors = _canonicalize(tensors, naming, str(file))
    head, fresh = None, ()
    if architecture := configs.match_class(folder / "config.json", names.DROPPED_HEADS):
        dropped = names.DROPPED_HEADS[architecture]
        tensors = {name: tensors[name] for name in tensors if not name.startswith(dropped)}
        report(f"{architecture}: its head ({dropped[0].rstrip('.')}) is not imported")
    if architecture := configs.match_class(folder / "config.json", names.HEADS):
        head = configs.head_of(folder / "config.json", architecture, tensors, model.hidden_size)
        tensors = weights.without_head(tensors, model, architecture)
        parts, name = names.HEADS[architecture]
        use = "is kept"
        if head is None:
            use = "is not imported: no task.kind has its outputs, such as several labels of a text"
        report(f"{architecture}: its head ({name}) {use}")
        if "masked_lm" in parts:  # files of this class lack the output bias
            fresh = ("masked_lm/output_bias",)
            report(f"not in {file.name}, freshly initialised: {fresh[0]}")
    source = f"Hugging Face folder {folder.name}"
    if folder.parent.name == "snapshots":  # of the cache of huggingface_hub
        name = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
        source = f"{name}, commit {folder.name}"
    base = weights.make_base(tensors, naming, model, tokenizer, file, source, report)
    base.vectors, layers = sentence_transformers.read(folder, model, tokenizer, settings)
    base.params |= layers
    base.head, base.fresh = head, (*base.fresh, *fresh)
    return base


def _canonicalize(
    stored: dict[str, np.ndarray], naming: Naming, file: str
) -> dict[str, np.ndarray]:
    """Returns tensors by canonical names, without buffers and copies of tied weights."""
    tensors: dict[str, np.ndarray] = {}
    stored_names: dict[str, str] = {}
    for stored_name, value in stored.items():
        name = naming.canonical(stored_name)
        if name in naming.ignored:
            continue
        if name in tensors:
            pair = f"{stored_names[name]!r} and {stored_name!r}"
            raise InputError(f"{file}: tensors {pair} are the same tensor")
        if value.dtype != np.float32:  # `read_tensors` converts 16 bits
            raise InputError(f"{file}: tensor {stored_name!r}: use float32, float16 or bfloat16")
        tensors[name], stored_names[name] = value, stored_name
    for copy, original in naming.tied.items():
        if copy in tensors:
            value = tensors.pop(copy)
            tensors.setdefault(original, value)  # a file may have the copy alone
            if not np.array_equal(tensors[original], value):
                raise InputError(
                    f"{file}: tensor {copy!r} of {list(value.shape)} differs from {original!r} of "
                    f"{list(tensors[original].shape)}; only tied weights are supported"
                )
    return tensors


def _read_shards(index: epath.Path) -> dict[str, np.ndarray]:
    """Reads the tensors of files that an index lists: {"weight_map": {NAME OF TENSOR: FILE}}."""
    files = read_object(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise InputError(f"{index}: damaged, its weight_map lists no tensors")
    for name, file in files.items():
        # Only a plain name: a path could lead out of the folder.
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\]+\.safetensors", file):
            raise InputError(
                f"{index}: tensor {name!r}: {file!r} is not a .safetensors file next to the index"
            )
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(set(files.values())):
        path = index.parent / file
        if not path.exists():
            raise InputError(f"{path}: no such file, but {index.name} lists it; add it")
        shard = base_lib.read_tensors(path)
        expected = {name for name in files if files[name] == file}
        if other := expected ^ shard.keys():
            raise InputError(
                f"{path}: its tensors differ from those in {index.name} ({min(other)!r}); use "
                "files of the same checkpoint"
            )
        tensors |= shard
    return tensors


def forms_of(model: Model) -> list[str]:
    """Returns the forms of export of a model that is not fine-tuned."""
    is_causal = model.direction == "left_to_right"
    forms = ARCHITECTURES[names.family(model)]
    return [name for name in forms if (name == "causal_lm") == is_causal]


def architecture_of(model: Model, form: Form) -> str:
    """Returns the class of transformers for a form of export."""
    family, forms = names.family(model), forms_of(model)
    if model.code or not forms:
        label = f"a {names.FAMILIES[family].label} of model.direction={model.direction}"
        label = f"model.code={model.code}" if model.code else label
        raise InputError(
            f"--as {form}: transformers has no class for {label}; use `bert-jax embed` or "
            "`bert_jax.load`"
        )
    if form not in forms:
        raise InputError(
            f"--as {form}: transformers has no such class for model.kind={model.kind} and "
            f"model.direction={model.direction}; choose {' or '.join(forms)}"
        )
    return ARCHITECTURES[family][form]


def write_folder(
    trained: LoadedModel,
    form: Form,
    dtype: Literal["float32", "bfloat16"],
    target: epath.Path,
    address: str = "",
    finetuning: Finetuning | None = None,
) -> str:
    """Writes a folder for transformers, which appears at `target` when it is complete.

    sentence-transformers can read an `encoder`, too; bfloat16 rounds the weights. `target` must not
    exist. The card loads the model from `address` (default: the name of the folder), and describes
    `finetuning`, the experiment that made the model. Returns the class that reads the folder.
    """
    architecture, cfg = architecture_of(trained.model, form), trained.model
    with new_folder(target) as folder:
        inputs = INPUTS[names.family(cfg)]
        vocabularies.write(trained.tokenizer, cfg.max_position_embeddings, inputs, folder)
        name = address or target.name
        card_text = card.render(trained, architecture, dtype, name, finetuning=finetuning)
        (folder / "README.md").write_text(card_text, encoding="utf-8")
        write_json(folder / "config.json", configs.fields_of(trained, architecture, dtype))
        makes_sparse = trained.vectors is not None and trained.vectors.form == "sparse"
        if form == ("masked_lm" if makes_sparse else "encoder"):
            sentence_transformers.write(trained, folder)
        first_row = trained.tokenizer.pad_id + 1
        tensors = weights.export_tensors(trained.params, cfg, architecture, first_row)
        write_tensors(folder / "model.safetensors", tensors, dtype)
    return architecture


def write_tensors(path: epath.Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    """Writes float32 tensors, rounded to `dtype`, with the metadata of PyTorch."""
    rounded = {name: tensor.astype(_DTYPES[dtype]) for name, tensor in tensors.items()}
    base_lib.write_tensors(path, rounded, {"format": "pt"})

"""Pooling, prompts and lengths of sentence-transformers folders, read and written."""

import json
from typing import Any

from etils import epath

from bert_jax.checkpoints.base import TextVectors
from bert_jax.config import Model
from bert_jax.errors import InputError, translate_parser_errors
from bert_jax.interop.settings import Settings
from bert_jax.interop.vocabularies import read_object, require, write_json
from bert_jax.text.tokenizer import Tokenizer

# Names and folders of modules, in this order; the last may be missing.
_MODULES = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
# Keys of a Pooling before version 6, each with a truth value.
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
# Values of `pooling_mode` since version 6 that differ from ours.
_WORDS = {"lasttoken": "last"}
# Names of prompts by role, the usual name first.
_PROMPTS = {"query_prefix": ("query",), "text_prefix": ("document", "passage", "corpus")}
_REMEDY = "its vectors cannot be imported; delete modules.json to import only the encoder"


def read(
    folder: epath.Path, model: Model, tokenizer: Tokenizer, settings: Settings
) -> TextVectors | None:
    """Reads how vectors of texts are computed; None if the folder has no such settings."""
    listed, pooling = folder / "modules.json", folder / "1_Pooling" / "config.json"
    longest = settings.max_length(model.max_position_embeddings)
    if not listed.exists():
        return TextVectors(max_length=longest) if longest else None
    with translate_parser_errors(listed, _REMEDY):
        entries = json.loads(listed.read_text())
        modules = [(entry["type"].split(".")[-1], entry["path"]) for entry in entries]
    if modules not in (_MODULES, _MODULES[:2]):
        raise InputError(f"{listed}: {modules}: only {_MODULES} are supported; {_REMEDY}")
    fields = read_object(pooling)
    old = [
        _MODES.get(key, key) for key in fields if key.startswith("pooling_mode_") and fields[key]
    ]
    mode = fields.get("pooling_mode", old or "mean")
    mode = mode[0] if isinstance(mode, list) and len(mode) == 1 else mode
    mode = _WORDS.get(mode, mode) if isinstance(mode, str) else mode
    mode = require(pooling, "pooling_mode", mode, _MODES.values())
    transformer = _read_optional(folder / "sentence_bert_config.json")
    path = folder / "config_sentence_transformers.json"
    settings_file = _read_optional(path)
    unsupported = {
        "do_lower_case": tokenizer.case == "cased" and transformer.get("do_lower_case"),
        "default_prompt_name": settings_file.get("default_prompt_name"),
    }
    for name, value in unsupported.items():
        if value:
            raise InputError(f"{listed}: with {name}={value!r}: not supported; {_REMEDY}")
    prompts = settings_file.get("prompts") or {}
    with translate_parser_errors(path, _REMEDY):  # join raises if a prompt is not a string
        prefixes = {
            role: "".join([prompts[name] for name in prompt_names if prompts.get(name)][:1])
            for role, prompt_names in _PROMPTS.items()
        }
    if any(prefixes.values()):
        require(pooling, "include_prompt", fields.get("include_prompt", True), [True])
    return TextVectors(mode, len(modules) == len(_MODULES), longest, **prefixes)


def _read_optional(path: epath.Path) -> dict[str, Any]:
    return read_object(path) if path.exists() else {}


def write(vectors: TextVectors, model: Model, folder: epath.Path) -> None:
    """Writes the settings of vectors next to an encoder, for sentence-transformers 2 and later."""
    modules = _MODULES if vectors.normalize else _MODULES[:2]
    package = "sentence_transformers.models"
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"{package}.{name}"}
        for i, (name, path) in enumerate(modules)
    ]
    write_json(folder / "modules.json", listed)
    longest = vectors.max_length or model.max_position_embeddings
    transformer = {"max_seq_length": longest, "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", transformer)
    prompts = {names[0]: getattr(vectors, role) for role, names in _PROMPTS.items()}
    if any(prompts.values()):
        settings = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
        write_json(folder / "config_sentence_transformers.json", settings)
    for _, path in modules[1:]:
        (folder / path).mkdir()
    modes = {name: mode == vectors.pooling for name, mode in _MODES.items()}
    write_json(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": model.hidden_size, **modes},
    )

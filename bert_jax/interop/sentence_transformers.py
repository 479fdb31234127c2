"""How a folder of sentence-transformers makes vectors of texts: modules.json and what it lists."""

import json
from typing import Any

from etils import epath

from bert_jax.checkpoints.base import TextVectors
from bert_jax.config import Model
from bert_jax.errors import InputError, reading
from bert_jax.interop.settings import Settings
from bert_jax.interop.vocabularies import read_object, require, write_json
from bert_jax.text.tokenizer import Tokenizer

# Names and folders, in this order; the last may be missing.
_MODULES = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
# Of a Pooling, as versions before 6 have it: a truth value for each.
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
# What a Pooling of version 6 on calls them, where that is another word.
_WORDS = {"lasttoken": "last"}
# Names of prompts that stand for what we have, the usual one first.
_PROMPTS = {"query_prefix": ("query",), "text_prefix": ("document", "passage", "corpus")}
_REMEDY = (
    "its vectors cannot be imported; without modules.json the encoder alone is, and gives other "
    "vectors"
)


def read(
    folder: epath.Path, model: Model, tokenizer: Tokenizer, settings: Settings
) -> TextVectors | None:
    """Reads how vectors of texts are made; None: the folder says nothing of it."""
    listed, pooling = folder / "modules.json", folder / "1_Pooling" / "config.json"
    most = settings.max_length(model.max_position_embeddings)
    if not listed.exists():
        return TextVectors(max_length=most) if most else None
    with reading(listed, _REMEDY):
        modules = [(it["type"].split(".")[-1], it["path"]) for it in json.loads(listed.read_text())]
    if modules not in (_MODULES, _MODULES[:2]):
        raise InputError(f"{listed}: {modules}: only {_MODULES} are supported; {_REMEDY}")
    fields = read_object(pooling)
    old = [_MODES.get(it, it) for it in fields if it.startswith("pooling_mode_") and fields[it]]
    mode = fields.get("pooling_mode", old or "mean")
    mode = mode[0] if isinstance(mode, list) and len(mode) == 1 else mode
    mode = _WORDS.get(mode, mode) if isinstance(mode, str) else mode
    mode = require(pooling, "pooling_mode", mode, _MODES.values())
    reads = _there(folder / "sentence_bert_config.json")
    asked = folder / "config_sentence_transformers.json"
    written = _there(asked)
    others = {
        "do_lower_case": tokenizer.case == "cased" and reads.get("do_lower_case"),
        "default_prompt_name": written.get("default_prompt_name"),
    }
    for name, value in others.items():
        if value:
            raise InputError(f"{listed}: with {name}={value!r}: not supported; {_REMEDY}")
    prompts = written.get("prompts") or {}
    with reading(asked, _REMEDY):  # join takes nothing except texts
        prefixes = {
            name: "".join([prompts[it] for it in words if prompts.get(it)][:1])
            for name, words in _PROMPTS.items()
        }
    if any(prefixes.values()):
        require(pooling, "include_prompt", fields.get("include_prompt", True), [True])
    return TextVectors(mode, len(modules) == len(_MODULES), most, **prefixes)


def _there(path: epath.Path) -> dict[str, Any]:
    return read_object(path) if path.exists() else {}


def write(vectors: TextVectors, model: Model, folder: epath.Path) -> None:
    """Writes next to an encoder what sentence-transformers reads, of any version from 2 on."""
    modules = _MODULES if vectors.normalize else _MODULES[:2]
    of = "sentence_transformers.models"
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"{of}.{name}"}
        for i, (name, path) in enumerate(modules)
    ]
    write_json(folder / "modules.json", listed)
    most = vectors.max_length or model.max_position_embeddings
    reads = {"max_seq_length": most, "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", reads)
    prompts = {words[0]: getattr(vectors, name) for name, words in _PROMPTS.items()}
    if any(prompts.values()):
        written = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
        write_json(folder / "config_sentence_transformers.json", written)
    for _, path in modules[1:]:
        (folder / path).mkdir()
    modes = {name: mode == vectors.pooling for name, mode in _MODES.items()}
    write_json(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": model.hidden_size, **modes},
    )

"""Pooling, prompts and lengths of sentence-transformers folders, read and written."""

import dataclasses
import json
import re
from typing import Any, Literal

import numpy as np
from etils import epath

from bert_jax.checkpoints import base as base_lib
from bert_jax.checkpoints.base import TextVectors
from bert_jax.config import Model
from bert_jax.embeddings.forms import TokenSelection
from bert_jax.errors import InputError, translate_parser_errors
from bert_jax.interop import weights
from bert_jax.interop.settings import Settings
from bert_jax.interop.vocabularies import read_object, require, write_json
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.text.tokenizer import Tokenizer

# Supported sequences of modules, by class, and of their folders.
_MODULES = re.compile("Transformer Pooling( Dense)?( Normalize)?")
_PATHS = re.compile(r" 1_Pooling( 2_Dense\w*)?( \d_Normalize)?")
# Classes of torch for the activation of Dense.
_TANH, _IDENTITY = "torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"
_DENSE_ACTIVATIONS: dict[str, Literal["identity", "tanh"]] = {_TANH: "tanh", _IDENTITY: "identity"}
# Keys of Dense that would make it another layer, and their only supported values.
_DENSE_FIXED = {
    "use_residual": False,
    "module_input_name": "sentence_embedding",
    "module_output_name": "sentence_embedding",
}
# Keys of a Pooling before version 6, each with a boolean.
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
# Values of `pooling_mode` since version 6 that differ from ours.
_MODE_ALIASES = {"lasttoken": "last"}
# Names of prompts by role, the usual name first.
_PROMPTS = {"query_prefix": ("query",), "text_prefix": ("document", "passage", "corpus")}
# The activation of a CrossEncoder with one output, by the `task.ranking_loss` that trained it; and
# the `task.ranking_loss` of an imported head, by its activation.
SIGMOID = "torch.nn.modules.activation.Sigmoid"
RANKING_ACTIVATIONS = {"binary_cross_entropy": SIGMOID, "mse": _IDENTITY, "list_net": _IDENTITY}
RANKING_LOSSES = {SIGMOID: "binary_cross_entropy", _IDENTITY: "mse"}
_CROSS_ENCODER = "CrossEncoder"
_SETTINGS = "config_sentence_transformers.json"
_REMEDY = "its vectors cannot be imported; delete modules.json to import only the encoder"


def read(
    folder: epath.Path, model: Model, tokenizer: Tokenizer, settings: Settings
) -> tuple[TextVectors | None, dict[str, Any]]:
    """Reads how vectors of texts are computed, and the weights of the module Dense, if any.

    The first result is None if the folder has no such settings.
    """
    modules_path, pooling = folder / "modules.json", folder / "1_Pooling" / "config.json"
    max_length = settings.max_length(model.max_position_embeddings)
    if not modules_path.exists():
        return (TextVectors(max_length=max_length) if max_length else None), {}
    with translate_parser_errors(modules_path, _REMEDY):
        entries = json.loads(modules_path.read_text())
        names = [entry["type"].split(".")[-1] for entry in entries]
        paths = [entry["path"] for entry in entries]
    prompts_path = folder / _SETTINGS
    prompt_settings = _read_optional(prompts_path)
    if names == ["Transformer"] and prompt_settings.get("model_type") == _CROSS_ENCODER:
        default = prompt_settings.get("default_prompt_name")
        require(prompts_path, "default_prompt_name", default, [None])
        return (TextVectors(max_length=max_length) if max_length else None), {}
    is_supported = _MODULES.fullmatch(" ".join(names)) and _PATHS.fullmatch(" ".join(paths))
    if not is_supported:
        raise InputError(
            f"{modules_path}: {names} in {paths}: only Transformer, Pooling, and then Dense, "
            f"Normalize or both, with their usual paths, are supported; {_REMEDY}"
        )
    fields = read_object(pooling)
    mode = _pooling_mode(pooling, fields)
    transformer = _read_optional(folder / "sentence_bert_config.json")
    unsupported = {
        "do_lower_case": tokenizer.case == "cased" and transformer.get("do_lower_case"),
        "default_prompt_name": prompt_settings.get("default_prompt_name"),
    }
    for name, value in unsupported.items():
        if value:
            raise InputError(f"{modules_path}: with {name}={value!r}: not supported; {_REMEDY}")
    prompts = prompt_settings.get("prompts") or {}
    with translate_parser_errors(prompts_path, _REMEDY):  # join raises if a prompt is not a string
        prefixes = {
            role: "".join([prompts[name] for name in prompt_names if prompts.get(name)][:1])
            for role, prompt_names in _PROMPTS.items()
        }
    if any(prefixes.values()):
        require(pooling, "include_prompt", fields.get("include_prompt", True), [True])
    vectors = TextVectors(mode, "Normalize" in names, max_length, **prefixes)
    if "Dense" not in names:
        return vectors, {}
    dense, activation = _read_dense(folder / paths[2], model.hidden_size)
    width = len(dense["bias"])
    vectors = dataclasses.replace(vectors, dense_width=width, dense_activation=activation)
    return vectors, {"dense": dense}


def _read_dense(
    folder: epath.Path, width: int
) -> tuple[dict[str, np.ndarray], Literal["identity", "tanh"]]:
    """Returns a kernel, float32 [D, W], and a bias [W], and the activation after them."""
    path = folder / "config.json"
    fields = read_object(path)
    for key, value in _DENSE_FIXED.items():
        require(path, key, fields.get(key) or value, [value])
    activation = fields.get("activation_function", _TANH)
    require(path, "activation_function", activation, _DENSE_ACTIVATIONS)
    file = weights.find_file(folder)
    tensors = base_lib.read_tensors(file)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    size = shapes.get("linear.weight", [0])[0]
    expected = {"linear.weight": [size, width], "linear.bias": [size]}
    if not fields.get("bias", True):
        del expected["linear.bias"]
    if shapes != expected or not size:
        raise InputError(f"{file}: tensors {shapes}: must be {expected}; restore the folder")
    weight, zeros = tensors["linear.weight"], np.zeros(size, np.float32)
    bias = tensors.get("linear.bias", zeros)
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        raise InputError(f"{file}: has values that are not finite; use another checkpoint")
    return {"kernel": weight.T, "bias": bias}, _DENSE_ACTIVATIONS[activation]


def read_activation(folder: epath.Path, hf_config: dict[str, Any]) -> str | None:
    """Returns the torch class that a CrossEncoder applies to its outputs.

    Returns None if neither the folder nor its config.json is that of a CrossEncoder.
    """
    settings = _read_optional(folder / _SETTINGS)
    is_cross_encoder = settings.get("model_type") == _CROSS_ENCODER  # since version 6
    stated = hf_config.get("sentence_transformers") or {}
    return (
        (is_cross_encoder and settings.get("activation_fn"))
        or (isinstance(stated, dict) and stated.get("activation_fn"))
        or hf_config.get("sbert_ce_default_activation_function")  # before version 4
        or (SIGMOID if is_cross_encoder else None)
    )


def _pooling_mode(path: epath.Path, fields: dict[str, Any]) -> Any:
    old_keys = (key for key in fields if key.startswith("pooling_mode_") and fields[key])
    mode = fields.get("pooling_mode", [_MODES.get(key, key) for key in old_keys] or "mean")
    if isinstance(mode, list) and len(mode) == 1:
        mode = mode[0]
    if isinstance(mode, str):
        mode = _MODE_ALIASES.get(mode, mode)
    return require(path, "pooling_mode", mode, _MODES.values())


def _read_optional(path: epath.Path) -> dict[str, Any]:
    return read_object(path) if path.exists() else {}


def write(trained: LoadedModel, folder: epath.Path) -> None:
    """Writes the settings of vectors next to an encoder, for sentence-transformers.

    Dense vectors need sentence-transformers 2 or later, sparse vectors 5, vectors of tokens 6.
    """
    vectors, model = trained.vectors or TextVectors(), trained.model
    if vectors.form != "dense":
        _write_retriever(trained, vectors, folder)
        return
    names = ["Transformer", "Pooling"] + ["Dense"] * bool(vectors.dense_width)
    names += ["Normalize"] * vectors.normalize
    modules = [(name, f"{i}_{name}" if i else "") for i, name in enumerate(names)]
    package = "sentence_transformers.models"
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"{package}.{name}"}
        for i, (name, path) in enumerate(modules)
    ]
    write_json(folder / "modules.json", listed)
    max_length = vectors.max_length or model.max_position_embeddings
    transformer = {"max_seq_length": max_length, "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", transformer)
    prompts = _prompts(vectors)
    if any(prompts.values()):
        settings = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
        write_json(folder / _SETTINGS, settings)
    for _, path in modules[1:]:
        (folder / path).mkdir()
    modes = {name: mode == vectors.pooling for name, mode in _MODES.items()}
    write_json(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": model.hidden_size, **modes},
    )
    if vectors.dense_width:
        _write_dense(trained.params["dense"], vectors.dense_activation, folder / "2_Dense")


def _write_dense(
    dense: dict[str, Any], activation: Literal["identity", "tanh"], folder: epath.Path
) -> None:
    (name,) = (name for name, other in _DENSE_ACTIVATIONS.items() if other == activation)
    weight, bias = np.asarray(dense["kernel"]).T, np.asarray(dense["bias"])
    fields = {"in_features": weight.shape[1], "out_features": len(bias), "bias": True}
    write_json(folder / "config.json", fields | {"activation_function": name})
    tensors = {"linear.weight": weight, "linear.bias": bias}
    base_lib.write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})


def _prompts(vectors: TextVectors) -> dict[str, str]:
    return {names[0]: getattr(vectors, role) for role, names in _PROMPTS.items()}


def _write_retriever(trained: LoadedModel, vectors: TextVectors, folder: epath.Path) -> None:
    """Writes the modules of sparse vectors or of vectors of tokens."""
    package, dense_tensors = "sentence_transformers.base.modules", dict[str, np.ndarray]()
    transformer: dict[str, Any] = {"max_seq_length": vectors.max_length, "do_lower_case": False}
    if vectors.form == "sparse":
        transformer["transformer_task"] = "fill-mask"
        pooling: dict[str, Any] = {"pooling_strategy": "max", "activation_function": "relu"}
        pooling["embedding_dimension"] = trained.model.vocab_size
        splade = "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling"
        modules: list[tuple[str, str, dict[str, Any]]] = [(splade, "1_SpladePooling", pooling)]
        kind, similarity = "SparseEncoder", "dot"
    else:
        if vectors.query_length:
            expansion = {"strategy": "fixed", "attend": True, "length": vectors.query_length}
            transformer["query_expansion"] = expansion
        kernel = np.asarray(trained.params["projection"]["kernel"]).T
        dense_tensors["linear.weight"] = kernel
        token_input = {"module_input_name": "token_embeddings"}
        dense: dict[str, Any] = {"in_features": kernel.shape[1], "bias": False}
        dense["out_features"] = kernel.shape[0]
        dense["activation_function"] = _IDENTITY
        skipped = TokenSelection(trained.tokenizer, vectors).skipped_tokens
        mask = "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask"
        modules = [
            (f"{package}.dense.Dense", "1_Dense", dense | token_input),
            (f"{mask}.MultiVectorMask", "2_MultiVectorMask", {"skiplist_words": skipped}),
            (f"{package}.normalize.Normalize", "3_Normalize", token_input),
        ]
        kind, similarity = "MultiVectorEncoder", "maxsim"
    types = [
        (f"{package}.transformer.Transformer", ""),
        *((type_, path) for type_, path, _ in modules),
    ]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": type_}
        for i, (type_, path) in enumerate(types)
    ]
    settings = {"model_type": kind, "prompts": _prompts(vectors), "default_prompt_name": None}
    write_json(folder / "modules.json", listed)
    write_json(folder / "sentence_bert_config.json", transformer)
    write_json(folder / _SETTINGS, settings | {"similarity_fn_name": similarity})
    for _, path, fields in modules:
        (folder / path).mkdir()
        write_json(folder / path / "config.json", fields)
    if dense_tensors:
        tensors_path = folder / "1_Dense" / "model.safetensors"
        base_lib.write_tensors(tensors_path, dense_tensors, {"format": "pt"})

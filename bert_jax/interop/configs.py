"""Conversion between transformers' config.json and the Model section."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from bert_jax import config
from bert_jax.checkpoints.base import Head
from bert_jax.config import Model
from bert_jax.errors import InputError
from bert_jax.interop.names import HEADS, PARTS, TASKS, family
from bert_jax.interop.vocabularies import read_object, require
from bert_jax.pretraining.loaded_model import LoadedModel

# Number of outputs by kind of task, where it is fixed.
_OUTPUTS = {"choice": 1, "span": 2}
# Keys of config.json that have the name of a field of Model.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "initializer_range",
)
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_BERT_NAMES = (*_SIZES, "type_vocab_size", "layer_norm_eps", *_DROPOUTS)
# DistilBERT's keys, and the fields of Model.
_DISTILBERT = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    **{name: name for name in ("vocab_size", "max_position_embeddings", "initializer_range")},
}
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_EXPORTED_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
# Keys of which only one value is supported.
_BERT_FIXED = {
    "position_embedding_type": "absolute",
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
_MODERN_FIXED = {
    "norm_eps": 1e-5,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "decoder_bias": True,
    "classifier_bias": False,
}
# Model types with RoBERTa's architecture, and the prefixes of their classes.
_ROBERTAS = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}
# local_attention - local_window: transformers' decoder counts the token itself in both halves.
_DECODER_WINDOW_EXTRA = 2
_DECODER = "modernbert-decoder"  # ModernBERT with a causal mask
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_ROTARY = {_GLOBAL: "global", _LOCAL: "local"}  # prefixes of Model's fields
_DEFAULT_GLOBAL_EVERY = 3


class _KeyRule(NamedTuple):
    key: str
    field: str = ""  # the field of Model; "": none, the value must be one of `allowed`
    # Supported values (and Model's values for them), or the type of a number; None: any.
    allowed: dict[Any, Any] | list[Any] | type | None = None
    default: Any = None  # the default of transformers' class; None: Model's default


def _allow_only(values: dict[str, Any]) -> list[_KeyRule]:
    return [_KeyRule(key, allowed=[value]) for key, value in values.items()]


_BERT_KEYS = [
    *(_KeyRule(name, name) for name in _BERT_NAMES),
    _KeyRule("hidden_act", "hidden_act", _ACTIVATIONS, "gelu"),
    _KeyRule("is_decoder", "direction", {False: "both", True: "left_to_right"}, False),
    _KeyRule("chunk_size_feed_forward", allowed=[0]),
    *_allow_only(_BERT_FIXED),
]
_ROBERTA_KEYS = [
    *(rule for rule in _BERT_KEYS if rule.key not in ("type_vocab_size", "is_decoder")),
    _KeyRule("max_position_embeddings", "max_position_embeddings", None, 512),  # overrides
    _KeyRule("type_vocab_size", "type_vocab_size", [1], 1),
    _KeyRule("is_decoder", allowed=[False]),
]
_DISTILBERT_KEYS = [
    *(_KeyRule(key, field) for key, field in _DISTILBERT.items()),
    _KeyRule("activation", "hidden_act", _ACTIVATIONS, "gelu"),
    _KeyRule("chunk_size_feed_forward", allowed=[0]),
]
# Parameters of each kind of rotary scaling, which transformers 5 has for each type of layer.
_SCALINGS = {"default": (), "linear": ("factor",), "yarn": ("positions", "factor")}
_SCALING_KEYS = [
    _KeyRule("factor", "factor", float),
    _KeyRule("original_max_position_embeddings", "positions"),
    *_allow_only({"beta_fast": 32, "beta_slow": 1, "truncate": True, "partial_rotary_factor": 1}),
    *(_KeyRule(name, allowed=[None]) for name in ("attention_factor", "mscale", "mscale_all_dim")),
]
# The defaults are ModernBERT-base's.
_MODERN_KEYS = [
    _KeyRule("vocab_size", "vocab_size", None, 50_368),
    _KeyRule("hidden_size", "hidden_size", None, 768),
    _KeyRule("num_hidden_layers", "num_hidden_layers", None, 22),
    _KeyRule("num_attention_heads", "num_attention_heads", None, 12),
    _KeyRule("intermediate_size", "intermediate_size", None, 1_152),
    _KeyRule("max_position_embeddings", "max_position_embeddings", None, 8_192),
    _KeyRule("initializer_range", "initializer_range"),
    _KeyRule("hidden_activation", "hidden_act", _ACTIVATIONS, "gelu"),
    _KeyRule("mlp_dropout", "hidden_dropout_prob", float, 0.0),
    _KeyRule("attention_dropout", "attention_probs_dropout_prob", float, 0.0),
    _KeyRule("global_rope_theta", "global_rotary_base", float, 160_000.0),
    _KeyRule("local_rope_theta", "local_rotary_base", float, 10_000.0),
    _KeyRule("local_attention", "local_window", None, 128),
    _KeyRule("tie_word_embeddings", "output_table", {True: "tied", False: "own"}, True),
    *_allow_only(_MODERN_FIXED),
]


def _convert(path: epath.Path, table: list[_KeyRule], hf_config: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of Model for keys of config.json; an InputError names the key."""
    converted = {}
    for key, name, allowed, default in table:
        value = default if hf_config.get(key) is None else hf_config[key]
        if value is None:
            continue
        if allowed is float and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise InputError(f"{path}: {key}={value!r}: not a number")
        if isinstance(allowed, dict | list):
            require(path, key, value, allowed)
        if name:
            converted[name] = allowed[value] if isinstance(allowed, dict) else value
    return converted


# Unsupported values of model_type, with reasons.
_TWO_WIDTHS = "its embeddings and its layers have different widths"
_RELATIVE = "its attention has a table of relative positions"
_UNSUPPORTED = {
    "albert": f"{_TWO_WIDTHS}, and all layers share their weights",
    "electra": f"{_TWO_WIDTHS} in small models, and its head detects replaced tokens",
    **dict.fromkeys(("deberta", "deberta-v2", "mpnet"), _RELATIVE),
}


def read(path: epath.Path) -> Model:
    """Reads a config.json as a Model section; missing keys have transformers' defaults."""
    hf_config = read_object(path)
    readers = {
        "bert": build_bert,
        **dict.fromkeys(_ROBERTAS, _build_roberta),
        "distilbert": _build_distilbert,
        "modernbert": _build_modern,
        _DECODER: _build_modern,
    }
    if reason := _UNSUPPORTED.get(str(hf_config.get("model_type"))):
        raise InputError(f"{path}: model_type={hf_config['model_type']!r}: not supported; {reason}")
    model_type = require(path, "model_type", hf_config.get("model_type"), readers)
    for name in _architectures(hf_config):
        require(path, "architectures", name, [*PARTS, *HEADS])
    return readers[model_type](path, hf_config)


def task_class(path: epath.Path) -> str | None:
    """Returns the class with a task's head that a config.json names; None if there is none."""
    architectures = _architectures(read_object(path))
    return next((name for name in architectures if name in HEADS), None)


def head_of(
    path: epath.Path, architecture: str, tensors: Mapping[str, np.ndarray], width: int
) -> Head | None:
    """Returns the head of a class with a task's head; None if the kind of task is not supported.

    The architecture is one of `names.HEADS`; tensors are float32, by canonical names.
    """
    hf_config, name = read_object(path), HEADS[architecture][1]
    weight, bias = (tensors.get(f"{name}.{part}", np.empty(0)) for part in ("weight", "bias"))
    if bias.ndim != 1 or not len(bias) or weight.shape != (len(bias), width):
        raise InputError(
            f"{path}: {architecture}, but {name}.weight and .bias have the shapes "
            f"{list(weight.shape)} and {list(bias.shape)} for width {width}; restore the folder"
        )
    (kinds,) = (TASKS[ending] for ending in TASKS if architecture.endswith(ending))
    if "regress" in kinds:
        kinds = ("regress", "rank") if len(bias) == 1 else ("classify", "pair")
    has_pooling = architecture.startswith("ModernBert") and kinds[0] not in ("tag", "span")
    pooling = hf_config.get("classifier_pooling", "cls") if has_pooling else "cls"
    is_unsupported = hf_config.get("problem_type") == "multi_label_classification"
    is_unsupported |= pooling not in ("cls", "mean")
    if is_unsupported or len(bias) != _OUTPUTS.get(kinds[0], len(bias)):
        return None
    if kinds[0] not in ("classify", "tag"):
        return Head(kinds, (), weight.T, bias, pooling)
    id2label = hf_config.get("id2label")
    id2label = id2label if isinstance(id2label, dict) else {}
    labels = tuple(str(id2label.get(str(i), f"LABEL_{i}")) for i in range(len(bias)))
    return Head(kinds, labels, weight.T, bias, pooling)


def _architectures(hf_config: dict[str, Any]) -> list[Any]:
    """Returns the named classes, with `Roberta` in place of the prefixes in `_ROBERTAS`."""
    named = hf_config.get("architectures") or []
    named = named if isinstance(named, list) else [named]
    prefixes = f"^({'|'.join(_ROBERTAS.values())})"
    return [re.sub(prefixes, "Roberta", x) if isinstance(x, str) else x for x in named]


def _build_roberta(path: epath.Path, hf_config: dict[str, Any]) -> Model:
    """Builds the section of a RoBERTa, whose positions begin after the id of the padding token."""
    values = _convert(path, _ROBERTA_KEYS, hf_config)
    pad_id, rows = hf_config.get("pad_token_id", 1), values["max_position_embeddings"]
    for name, value in (("pad_token_id", pad_id), ("max_position_embeddings", rows)):
        if type(value) is not int or value < 0:
            raise InputError(f"{path}: {name}={value!r}: must be a whole number")
    values |= {"position_offset": pad_id + 1, "max_position_embeddings": rows - pad_id - 1}
    return config.build_section(Model, values, str(path))


def _build_distilbert(path: epath.Path, hf_config: dict[str, Any]) -> Model:
    values = _convert(path, _DISTILBERT_KEYS, hf_config)
    return config.build_section(Model, values | {"type_vocab_size": 0}, str(path))


def build_bert(path: epath.Path, hf_config: dict[str, Any]) -> Model:
    """Builds the Model section from the fields of a BERT's configuration."""
    return config.build_section(Model, _convert(path, _BERT_KEYS, hf_config), str(path))


def _build_modern(path: epath.Path, hf_config: dict[str, Any]) -> Model:
    values = {"kind": "modern"} | _convert(path, _MODERN_KEYS, hf_config)
    # Model has one activation for layers and for the head.
    acts = [name for name, act in _ACTIVATIONS.items() if act == values["hidden_act"]]
    require(path, "classifier_activation", hf_config.get("classifier_activation", "gelu"), acts)
    every = values["global_every"] = _global_every(path, hf_config, values["num_hidden_layers"])
    values |= _read_rotary(path, hf_config, values["max_position_embeddings"])
    if hf_config["model_type"] == _DECODER:
        values["direction"] = "left_to_right"
        if isinstance(window := values["local_window"], int):
            values["local_window"] = window // 2 * 2 - _DECODER_WINDOW_EXTRA
    if every == 1:  # no layer has a window
        del values["local_window"], values["local_rotary_base"], values["local_rotary_scaling"]
    return config.build_section(Model, values, str(path))


def _global_every(path: epath.Path, hf_config: dict[str, Any], count: Any) -> Any:
    """Returns n, where the layers 0, n, 2n, ... are global; versions before 5 state n."""
    types = hf_config.get("layer_types")
    if types is None:
        return hf_config.get("global_attn_every_n_layers", _DEFAULT_GLOBAL_EVERY)
    if not isinstance(types, list) or len(types) != count or not types:
        raise InputError(f"{path}: layer_types: must be a list of num_hidden_layers={count!r}")
    # If only layer 0 is global, any n from the number of layers on fits; the default is preferred.
    default = max(len(types), _DEFAULT_GLOBAL_EVERY) if _LOCAL in types else 1
    every = next((i for i in range(1, len(types)) if types[i] == _GLOBAL), default)
    if types != _layer_types(len(types), every):
        raise InputError(
            f"{path}: layer_types: only {_GLOBAL} in the first and then in every n-th layer, and "
            f"{_LOCAL} in the others, is supported"
        )
    return every


def _layer_types(count: int, every: int) -> list[str]:
    return [_LOCAL if i % every else _GLOBAL for i in range(count)]


def _read_rotary(path: epath.Path, hf_config: dict[str, Any], max_positions: Any) -> dict[str, Any]:
    """Returns bases and scalings of rotary positions, stated for each type of layer or for both."""
    values: dict[str, Any] = {}
    by_type, for_both = hf_config.get("rope_parameters") or {}, hf_config.get("rope_scaling") or {}
    for layer_type, name in _ROTARY.items():
        rope = (by_type.get(layer_type) or {}) if isinstance(by_type, dict) else None
        if not isinstance(rope, dict) or not isinstance(for_both, dict):
            raise InputError(
                f"{path}: rope_parameters={by_type!r}, rope_scaling={for_both!r}: both must be "
                f"objects, and rope_parameters must contain objects {_GLOBAL} and {_LOCAL}"
            )
        if for_both and "rope_type" not in for_both:  # transformers would ignore the scaling
            raise InputError(f"{path}: rope_scaling={for_both!r}: has no rope_type; add it")
        rope = rope | for_both
        values |= _convert(path, [_KeyRule("rope_theta", f"{name}_rotary_base", float)], rope)
        kind = rope.get("rope_type", rope.get("type", "default"))
        require(path, "rope_type", kind, _SCALINGS)
        scaling = {"positions": max_positions} | _convert(path, _SCALING_KEYS, rope)
        numbers = [str(scaling.get(parameter)).removesuffix(".0") for parameter in _SCALINGS[kind]]
        values[f"{name}_rotary_scaling"] = ":".join([kind, *numbers]) if numbers else ""
    return values


def fields_of(trained: LoadedModel, architecture: str, dtype: str) -> dict[str, Any]:
    """Returns the config.json of the class `architecture`."""
    family_fields = _FIELDS_BY_FAMILY[family(trained.model)]
    return {
        "architectures": [architecture],
        **family_fields(trained),
        "pad_token_id": trained.tokenizer.pad_id,
        "dtype": dtype,
        "torch_dtype": dtype,  # the key of versions before 4.56
    }


def task_fields(
    kind: str, labels: Sequence[str], label_column: str, head_dropout_prob: float
) -> dict[str, Any]:
    """Returns the keys for a task's head; `label_column` labels the output of regress and rank."""
    fields: dict[str, Any] = {"classifier_dropout": head_dropout_prob}
    names = [label_column] if kind in ("regress", "rank") else labels
    if names:  # a span has none
        fields["id2label"] = {str(i): name for i, name in enumerate(names)}
        fields["label2id"] = {name: i for i, name in enumerate(names)}
    if kind in ("classify", "pair"):
        fields["problem_type"] = "single_label_classification"
    elif kind == "regress":
        fields["problem_type"] = "regression"
    return fields


def _bert_fields(trained: LoadedModel) -> dict[str, Any]:
    values = dataclasses.asdict(trained.model)
    return {
        "model_type": "bert",
        **{name: values[name] for name in _BERT_NAMES},
        "hidden_act": _EXPORTED_ACTIVATIONS[values["hidden_act"]],
        **_BERT_FIXED,
        "is_decoder": trained.model.direction == "left_to_right",
    }


def _roberta_fields(trained: LoadedModel) -> dict[str, Any]:
    cfg, tok = trained.model, trained.tokenizer
    return {
        **_bert_fields(trained),
        "model_type": "roberta",
        # transformers has the first position in the row after the id of the padding token.
        "max_position_embeddings": cfg.max_position_embeddings + tok.pad_id + 1,
        "bos_token_id": tok.cls_id,
        "eos_token_id": tok.sep_id,
    }


def _distilbert_fields(trained: LoadedModel) -> dict[str, Any]:
    values = dataclasses.asdict(trained.model)
    return {
        "model_type": "distilbert",
        **{key: values[name] for key, name in _DISTILBERT.items()},
        "activation": _EXPORTED_ACTIVATIONS[values["hidden_act"]],
        "sinusoidal_pos_embds": False,
        "tie_weights_": True,
    }


def _modern_fields(trained: LoadedModel) -> dict[str, Any]:
    cfg, tok = trained.model, trained.tokenizer
    values, act = dataclasses.asdict(cfg), _EXPORTED_ACTIVATIONS[cfg.hidden_act]
    is_decoder = cfg.direction == "left_to_right"
    return {
        "model_type": _DECODER if is_decoder else "modernbert",
        **{name: values[name] for name in _SIZES},
        "hidden_activation": act,
        "classifier_activation": act,
        "attention_dropout": cfg.attention_probs_dropout_prob,
        "embedding_dropout": cfg.hidden_dropout_prob,
        "mlp_dropout": cfg.hidden_dropout_prob,
        "layer_types": _layer_types(cfg.num_hidden_layers, cfg.global_every),
        "rope_parameters": {
            _GLOBAL: _rope_fields(cfg.global_rotary_base, cfg.global_rotary_scaling),
            _LOCAL: _rope_fields(cfg.local_rotary_base, cfg.local_rotary_scaling),
        },
        "local_attention": cfg.local_window + _DECODER_WINDOW_EXTRA * is_decoder,
        # Keys of versions before 5.
        "global_attn_every_n_layers": cfg.global_every,
        "global_rope_theta": cfg.global_rotary_base,
        "local_rope_theta": cfg.local_rotary_base,
        **_MODERN_FIXED,
        "initializer_cutoff_factor": 2.0,  # unused; Text Embeddings Inference requires the key
        "tie_word_embeddings": cfg.output_table == "tied",
        "bos_token_id": tok.cls_id,
        "eos_token_id": tok.sep_id,
        "cls_token_id": tok.cls_id,
        "sep_token_id": tok.sep_id,
    }


def _rope_fields(base: float, scaling: str) -> dict[str, Any]:
    """Returns the rope_parameters of one type of layer, the inverse of `_read_rotary`."""
    kind, *numbers = (scaling or "default").split(":")
    rope = {"rope_type": kind, "rope_theta": base}
    for name, number in zip(_SCALINGS[kind], numbers, strict=True):
        key = "original_max_position_embeddings" if name == "positions" else name
        rope[key] = int(number) if name == "positions" else float(number)
    return rope


_FIELDS_BY_FAMILY = {
    "bert": _bert_fields,
    "roberta": _roberta_fields,
    "distilbert": _distilbert_fields,
    "modern": _modern_fields,
}

"""config.json as transformers writes it, of either kind of model, and our Model section."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from etils import epath

from bert_jax import config
from bert_jax.config import Model
from bert_jax.errors import InputError
from bert_jax.interop import vocabularies
from bert_jax.interop.names import PARTS
from bert_jax.interop.vocabularies import require
from bert_jax.loaded import Loaded

# Under the same name in both.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "initializer_range",
)
_BERT = (*_SIZES, "type_vocab_size", "hidden_dropout_prob", "attention_probs_dropout_prob")
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_THEIR_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
# Fields that would change what is computed, and the only value of each that we compute.
_BERT_FIXED = {
    "layer_norm_eps": 1e-12,
    "position_embedding_type": "absolute",
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "chunk_size_feed_forward": 0,
}
_MODERN_FIXED = {
    "norm_eps": 1e-5,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "decoder_bias": True,
    "classifier_bias": False,
    "tie_word_embeddings": True,
}
# What ModernBertConfig takes for fields that are not there: ModernBERT-base's.
_MODERN_DEFAULTS = {
    "vocab_size": 50_368,
    "hidden_size": 768,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "intermediate_size": 1_152,
    "max_position_embeddings": 8_192,
}
# Half of a decoder's window counts the token itself, half of an encoder's does not.
_ITSELF = 2
# Of ModernBERT's that reads from left to right.
_DECODER = "modernbert-decoder"
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_EVERY = 3
_BASES = {_GLOBAL: 160_000.0, _LOCAL: 10_000.0}


def read(path: epath.Path) -> Model:
    """Reads a config.json as a Model section. Fields it lacks have their classes' defaults."""
    fields = vocabularies.read_object(path)
    readers = {
        "bert": (_bert, _BERT_FIXED),
        "modernbert": (_modern, _MODERN_FIXED),
        _DECODER: (_modern, _MODERN_FIXED),
    }
    model_type = require(path, "model_type", fields.get("model_type"), readers)
    named = fields.get("architectures") or []
    for name in named if isinstance(named, list) else [named]:
        require(path, "architectures", name, PARTS)
    reader, fixed = readers[model_type]
    for name, value in fixed.items():
        if fields.get(name) is not None:
            require(path, name, fields[name], [value])
    return reader(path, fields)


def _bert(path: epath.Path, fields: dict[str, Any]) -> Model:
    decodes = fields.get("is_decoder") or False
    if not isinstance(decodes, bool):
        raise InputError(f"{path}: is_decoder={decodes!r}: must be true or false")
    direction = "left_to_right" if decodes else "both"
    return dataclasses.replace(model_of(path, fields), direction=direction)


def model_of(path: epath.Path, fields: dict[str, Any]) -> Model:
    """Returns the Model section of fields that BERT's configurations share."""
    ours = {name: fields[name] for name in _BERT if name in fields}
    return config.section(
        Model, ours | {"hidden_act": _activation(path, "hidden_act", fields)}, str(path)
    )


def _modern(path: epath.Path, fields: dict[str, Any]) -> Model:
    act = _activation(path, "hidden_activation", fields)
    if _activation(path, "classifier_activation", fields) != act:
        given = fields.get("classifier_activation")
        raise InputError(
            f"{path}: classifier_activation={given!r}: only the hidden_activation is supported"
        )
    sizes = _MODERN_DEFAULTS | {name: fields[name] for name in _SIZES if name in fields}
    every = _global_every(path, fields, sizes["num_hidden_layers"])
    ours = sizes | {
        "kind": "modern",
        "hidden_act": act,
        "hidden_dropout_prob": _number(path, fields, "mlp_dropout", 0.0),
        "attention_probs_dropout_prob": _number(path, fields, "attention_dropout", 0.0),
        "global_every": every,
        "global_rotary_base": _base(path, fields, _GLOBAL, "global_rope_theta"),
    }
    if every > 1:
        ours |= {
            "local_window": fields.get("local_attention", 128),
            "local_rotary_base": _base(path, fields, _LOCAL, "local_rope_theta"),
        }
    if fields.get("model_type") == _DECODER:
        ours["direction"] = "left_to_right"
        if isinstance(window := ours.get("local_window"), int):
            ours["local_window"] = window // 2 * 2 - _ITSELF
    return config.section(Model, ours, str(path))


def _activation(path: epath.Path, name: str, fields: dict[str, Any]) -> str:
    return _ACTIVATIONS[require(path, name, fields.get(name, "gelu"), _ACTIVATIONS)]


def _number(path: epath.Path, fields: dict[str, Any], name: str, default: float) -> float:
    """Returns a number that they write without a point where there is nothing behind it."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{path}: {name}={value!r}: not a number")
    return float(value)


def _global_every(path: epath.Path, fields: dict[str, Any], count: Any) -> Any:
    """Returns of how many layers one attends to whole rows; older versions give the number."""
    types = fields.get("layer_types")
    if types is None:
        return fields.get("global_attn_every_n_layers", _EVERY)
    if not isinstance(types, list) or len(types) != count or not types:
        raise InputError(f"{path}: layer_types: not a list of num_hidden_layers={count!r} words")
    every = next((i for i in range(1, len(types)) if types[i] == _GLOBAL), _EVERY)
    if types != _layer_types(len(types), every):
        raise InputError(
            f"{path}: layer_types: only {_GLOBAL} in the first and then in every n-th layer, and "
            f"{_LOCAL} in the others, is supported"
        )
    return every


def _layer_types(count: int, every: int) -> list[str]:
    return [_LOCAL if i % every else _GLOBAL for i in range(count)]


def _base(path: epath.Path, fields: dict[str, Any], layer_type: str, older: str) -> float:
    """Returns the base of the rotary positions of such layers."""
    require(path, "rope_scaling", fields.get("rope_scaling"), [None])
    default = _number(path, fields, older, _BASES[layer_type])
    by_type = fields.get("rope_parameters") or {}
    says = by_type.get(layer_type) or {} if isinstance(by_type, dict) else None
    if not isinstance(says, dict) or says.get("rope_type", "default") != "default":
        raise InputError(
            f"{path}: rope_parameters={by_type!r}: only rope_type='default' for each of {_GLOBAL} "
            f"and {_LOCAL} is supported"
        )
    return _number(path, says, "rope_theta", default)


def fields_of(trained: Loaded, architecture: str, dtype: str) -> dict[str, Any]:
    """Returns the config.json that their class `architecture` reads."""
    write = {"bert": _bert_fields, "modern": _modern_fields}[trained.model.kind]
    return {
        "architectures": [architecture],
        **write(trained),
        "pad_token_id": trained.tokenizer.pad_id,
        "dtype": dtype,
        "torch_dtype": dtype,  # what versions before 4.56 call it
    }


def task_fields(
    kind: str, labels: Sequence[str], column: str, head_dropout_prob: float
) -> dict[str, Any]:
    """Returns what a config.json has next to `fields_of` for the head of a task."""
    fields: dict[str, Any] = {"classifier_dropout": head_dropout_prob}
    names = [column] if kind == "regress" else labels
    if names:  # a span has none
        fields["id2label"] = {str(i): name for i, name in enumerate(names)}
        fields["label2id"] = {name: i for i, name in enumerate(names)}
    if kind in ("classify", "pair"):
        fields["problem_type"] = "single_label_classification"
    elif kind == "regress":
        fields["problem_type"] = "regression"
    return fields


def _bert_fields(trained: Loaded) -> dict[str, Any]:
    ours = dataclasses.asdict(trained.model)
    return {
        "model_type": "bert",
        **{name: ours[name] for name in _BERT},
        "hidden_act": _THEIR_ACTIVATIONS[ours["hidden_act"]],
        **{name: value for name, value in _BERT_FIXED.items() if name != "chunk_size_feed_forward"},
        "is_decoder": trained.model.direction == "left_to_right",
    }


def _modern_fields(trained: Loaded) -> dict[str, Any]:
    cfg, tok = trained.model, trained.tokenizer
    ours, act = dataclasses.asdict(cfg), _THEIR_ACTIVATIONS[cfg.hidden_act]
    bases = {_GLOBAL: cfg.global_rotary_base, _LOCAL: cfg.local_rotary_base}
    is_decoder = cfg.direction == "left_to_right"
    return {
        "model_type": _DECODER if is_decoder else "modernbert",
        **{name: ours[name] for name in _SIZES},
        "hidden_activation": act,
        "classifier_activation": act,
        "attention_dropout": cfg.attention_probs_dropout_prob,
        "embedding_dropout": cfg.hidden_dropout_prob,
        "mlp_dropout": cfg.hidden_dropout_prob,
        "layer_types": _layer_types(cfg.num_hidden_layers, cfg.global_every),
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": base} for name, base in bases.items()
        },
        "local_attention": cfg.local_window + _ITSELF * is_decoder,
        # What versions before 5 read.
        "global_attn_every_n_layers": cfg.global_every,
        "global_rope_theta": cfg.global_rotary_base,
        "local_rope_theta": cfg.local_rotary_base,
        **_MODERN_FIXED,
        "bos_token_id": tok.cls_id,
        "eos_token_id": tok.sep_id,
        "cls_token_id": tok.cls_id,
        "sep_token_id": tok.sep_id,
    }

"""config.json as transformers writes it, of either kind of model, and our Model section."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from etils import epath

from bert_jax import config
from bert_jax.config import Model
from bert_jax.errors import InputError
from bert_jax.interop import vocabularies
from bert_jax.interop.names import PARTS, family
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
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_BERT = (*_SIZES, "type_vocab_size", "layer_norm_eps", *_DROPOUTS)
# DistilBERT's names of ours.
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
_THEIR_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
# Of what is written as it is, the only value that we compute with.
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
    "tie_word_embeddings": True,
}
# Types of model with RoBERTa's arithmetic, and what their classes begin with instead of `Roberta`.
_ROBERTAS = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}
# Half of a decoder's window counts the token itself, half of an encoder's does not.
_ITSELF = 2
# Of ModernBERT's that reads from left to right.
_DECODER = "modernbert-decoder"
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_EVERY = 3


class _Field(NamedTuple):
    """A field of theirs, read."""

    theirs: str
    ours: str = ""  # the field of Model that it gives; "": none, it must be as allowed
    # Values that we compute with (and ours for them), or the type of a number; None: any.
    allowed: dict[Any, Any] | list[Any] | type | None = None
    default: Any = None  # what their class takes where it is not there; None: as ours


def _fixed(values: dict[str, Any]) -> list[_Field]:
    return [_Field(name, allowed=[value]) for name, value in values.items()]


_OF_BERT = [
    *(_Field(name, name) for name in _BERT),
    _Field("hidden_act", "hidden_act", _ACTIVATIONS, "gelu"),
    _Field("is_decoder", "direction", {False: "both", True: "left_to_right"}, False),
    _Field("chunk_size_feed_forward", allowed=[0]),
    *_fixed(_BERT_FIXED),
]
_OF_ROBERTA = [
    *(field for field in _OF_BERT if field.theirs not in ("type_vocab_size", "is_decoder")),
    _Field("max_position_embeddings", "max_position_embeddings", None, 512),
    _Field("type_vocab_size", "type_vocab_size", [1], 1),
    _Field("is_decoder", allowed=[False]),
]
_OF_DISTILBERT = [
    *(_Field(theirs, ours) for theirs, ours in _DISTILBERT.items()),
    _Field("activation", "hidden_act", _ACTIVATIONS, "gelu"),
    _Field("chunk_size_feed_forward", allowed=[0]),
]
# Defaults are ModernBERT-base's.
_OF_MODERN = [
    _Field("vocab_size", "vocab_size", None, 50_368),
    _Field("hidden_size", "hidden_size", None, 768),
    _Field("num_hidden_layers", "num_hidden_layers", None, 22),
    _Field("num_attention_heads", "num_attention_heads", None, 12),
    _Field("intermediate_size", "intermediate_size", None, 1_152),
    _Field("max_position_embeddings", "max_position_embeddings", None, 8_192),
    _Field("initializer_range", "initializer_range"),
    _Field("hidden_activation", "hidden_act", _ACTIVATIONS, "gelu"),
    _Field("mlp_dropout", "hidden_dropout_prob", float, 0.0),
    _Field("attention_dropout", "attention_probs_dropout_prob", float, 0.0),
    _Field("global_rope_theta", "global_rotary_base", float, 160_000.0),
    _Field("local_rope_theta", "local_rotary_base", float, 10_000.0),
    _Field("local_attention", "local_window", None, 128),
    _Field("rope_scaling", allowed=[None]),
    *_fixed(_MODERN_FIXED),
]


def _ours(path: epath.Path, table: list[_Field], fields: dict[str, Any]) -> dict[str, Any]:
    """Returns what a table makes of their fields; raises InputError by the name of a field."""
    ours = {}
    for theirs, name, allowed, default in table:
        value = default if fields.get(theirs) is None else fields[theirs]
        if value is None:
            continue
        if allowed is float and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise InputError(f"{path}: {theirs}={value!r}: not a number")
        if isinstance(allowed, dict | list):
            require(path, theirs, value, allowed)
        if name:
            ours[name] = allowed[value] if isinstance(allowed, dict) else value
    return ours


def read(path: epath.Path) -> Model:
    """Reads a config.json as a Model section. Fields it lacks have their classes' defaults."""
    fields = vocabularies.read_object(path)
    readers = {
        "bert": model_of,
        **dict.fromkeys(_ROBERTAS, _roberta),
        "distilbert": _distilbert,
        "modernbert": _modern,
        _DECODER: _modern,
    }
    model_type = require(path, "model_type", fields.get("model_type"), readers)
    named = fields.get("architectures") or []
    for name in named if isinstance(named, list) else [named]:
        require(path, "architectures", _plain(name), PARTS)
    return readers[model_type](path, fields)


def _plain(name: Any) -> Any:
    """Returns RoBERTa's name of a class."""
    for beginning in _ROBERTAS.values():
        if isinstance(name, str) and name.startswith(beginning):
            return "Roberta" + name.removeprefix(beginning)
    return name


def _roberta(path: epath.Path, fields: dict[str, Any]) -> Model:
    """Reads a RoBERTa, whose positions begin behind the number of the padding's piece."""
    ours = _ours(path, _OF_ROBERTA, fields)
    first, rows = fields.get("pad_token_id", 1), ours["max_position_embeddings"]
    for name, value in (("pad_token_id", first), ("max_position_embeddings", rows)):
        if type(value) is not int or value < 0:
            raise InputError(f"{path}: {name}={value!r}: must be a whole number")
    ours |= {"position_offset": first + 1, "max_position_embeddings": rows - first - 1}
    return config.section(Model, ours, str(path))


def _distilbert(path: epath.Path, fields: dict[str, Any]) -> Model:
    ours = _ours(path, _OF_DISTILBERT, fields)
    return config.section(Model, ours | {"type_vocab_size": 0}, str(path))


def model_of(path: epath.Path, fields: dict[str, Any]) -> Model:
    """Returns the Model section of the fields of BERT's configurations."""
    return config.section(Model, _ours(path, _OF_BERT, fields), str(path))


def _modern(path: epath.Path, fields: dict[str, Any]) -> Model:
    ours = {"kind": "modern"} | _ours(path, _OF_MODERN, fields)
    # There is one activation for both.
    acts = [theirs for theirs, act in _ACTIVATIONS.items() if act == ours["hidden_act"]]
    require(path, "classifier_activation", fields.get("classifier_activation", "gelu"), acts)
    every = ours["global_every"] = _global_every(path, fields, ours["num_hidden_layers"])
    ours |= _bases(path, fields)
    if fields["model_type"] == _DECODER:
        ours["direction"] = "left_to_right"
        if isinstance(window := ours["local_window"], int):
            ours["local_window"] = window // 2 * 2 - _ITSELF
    if every == 1:  # no layer has a window
        del ours["local_window"], ours["local_rotary_base"]
    return config.section(Model, ours, str(path))


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


def _bases(path: epath.Path, fields: dict[str, Any]) -> dict[str, float]:
    """Returns the bases of rotary positions that versions from 5 on give by a layer's type."""
    bases, by_type = {}, fields.get("rope_parameters") or {}
    for layer_type, ours in ((_GLOBAL, "global_rotary_base"), (_LOCAL, "local_rotary_base")):
        says = (by_type.get(layer_type) or {}) if isinstance(by_type, dict) else None
        if not isinstance(says, dict) or says.get("rope_type", "default") != "default":
            raise InputError(
                f"{path}: rope_parameters={by_type!r}: only rope_type='default' for each of "
                f"{_GLOBAL} and {_LOCAL} is supported"
            )
        bases |= _ours(path, [_Field("rope_theta", ours, float)], says)
    return bases


def fields_of(trained: Loaded, architecture: str, dtype: str) -> dict[str, Any]:
    """Returns the config.json that their class `architecture` reads."""
    write = _WRITERS[family(trained.model)]
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
        **_BERT_FIXED,
        "is_decoder": trained.model.direction == "left_to_right",
    }


def _roberta_fields(trained: Loaded) -> dict[str, Any]:
    cfg, tok = trained.model, trained.tokenizer
    return {
        **_bert_fields(trained),
        "model_type": "roberta",
        "max_position_embeddings": cfg.max_position_embeddings + cfg.position_offset,
        "bos_token_id": tok.cls_id,
        "eos_token_id": tok.sep_id,
    }


def _distilbert_fields(trained: Loaded) -> dict[str, Any]:
    ours = dataclasses.asdict(trained.model)
    return {
        "model_type": "distilbert",
        **{theirs: ours[name] for theirs, name in _DISTILBERT.items()},
        "activation": _THEIR_ACTIVATIONS[ours["hidden_act"]],
        "sinusoidal_pos_embds": False,
        "tie_weights_": True,
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


_WRITERS = {
    "bert": _bert_fields,
    "roberta": _roberta_fields,
    "distilbert": _distilbert_fields,
    "modern": _modern_fields,
}

"""config.json as transformers writes it, of either kind of model, and our Model section."""

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
from bert_jax.interop import vocabularies
from bert_jax.interop.names import HEADS, PARTS, TASKS, family
from bert_jax.interop.vocabularies import require
from bert_jax.pretraining.loaded_model import LoadedModel

# Outputs of the kinds that always have as many.
_OUTPUTS = {"choice": 1, "span": 2}
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
}
# Types of model with RoBERTa's arithmetic, and what their classes begin with instead of `Roberta`.
_ROBERTAS = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}
# Half of a decoder's window counts the token itself, half of an encoder's does not.
_ITSELF = 2
# Of ModernBERT's that reads from left to right.
_DECODER = "modernbert-decoder"
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_ROTARY = {_GLOBAL: "global", _LOCAL: "local"}  # ours of both begin so
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
# Of rotary positions, which versions from 5 on give by a layer's type, next to their base.
_SCALINGS = {"default": (), "linear": ("factor",), "yarn": ("positions", "factor")}
_OF_SCALING = [
    _Field("factor", "factor", float),
    _Field("original_max_position_embeddings", "positions"),
    *_fixed({"beta_fast": 32, "beta_slow": 1, "truncate": True, "partial_rotary_factor": 1}),
    *(_Field(name, allowed=[None]) for name in ("attention_factor", "mscale", "mscale_all_dim")),
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
    _Field("tie_word_embeddings", "output_table", {True: "tied", False: "own"}, True),
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


# What others train and we do not compute, by model_type.
_TWO_WIDTHS = "its embeddings are of another width than its layers"
_RELATIVE = "its attention looks at distances between places by a table of its own"
_ELSE = {
    "albert": f"{_TWO_WIDTHS}, and all layers share their weights",
    "electra": f"{_TWO_WIDTHS} where it is small, and its head says which tokens were replaced",
    **dict.fromkeys(("deberta", "deberta-v2", "mpnet"), _RELATIVE),
}


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
    if why := _ELSE.get(str(fields.get("model_type"))):
        raise InputError(f"{path}: model_type={fields['model_type']!r}: not supported; {why}")
    model_type = require(path, "model_type", fields.get("model_type"), readers)
    for name in _architectures(fields):
        require(path, "architectures", name, [*PARTS, *HEADS])
    return readers[model_type](path, fields)


def task_class(path: epath.Path) -> str | None:
    """Returns which of their classes for tasks a config.json names; None: none of them."""
    named = _architectures(vocabularies.read_object(path))
    return next((name for name in named if name in HEADS), None)


def head_of(
    path: epath.Path, architecture: str, tensors: Mapping[str, np.ndarray], width: int
) -> Head | None:
    """Returns the head of one of their classes for tasks; None: we have no such kind of task.

    The architecture is one of `names.HEADS`; tensors are float32, by canonical names.
    """
    fields, name = vocabularies.read_object(path), HEADS[architecture][1]
    weight, bias = (tensors.get(f"{name}.{part}", np.empty(0)) for part in ("weight", "bias"))
    if bias.ndim != 1 or not len(bias) or weight.shape != (len(bias), width):
        raise InputError(
            f"{path}: {architecture}, but {name}.weight and .bias are of {list(weight.shape)} and "
            f"{list(bias.shape)}, for an encoder {width} wide; put the whole folder back"
        )
    (kinds,) = (TASKS[ending] for ending in TASKS if architecture.endswith(ending))
    if "regress" in kinds:
        kinds = ("regress",) if len(bias) == 1 else ("classify", "pair")
    asks = architecture.startswith("ModernBert") and kinds[0] not in ("tag", "span")
    pooling = fields.get("classifier_pooling", "cls") if asks else "cls"
    is_other = fields.get("problem_type") == "multi_label_classification"
    is_other |= pooling not in ("cls", "mean")
    if is_other or len(bias) != _OUTPUTS.get(kinds[0], len(bias)):
        return None
    if kinds[0] not in ("classify", "tag"):
        return Head(kinds, (), weight.T, bias, pooling)
    named = fields.get("id2label")
    named = named if isinstance(named, dict) else {}
    labels = tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(len(bias)))
    return Head(kinds, labels, weight.T, bias, pooling)


def _architectures(fields: dict[str, Any]) -> list[Any]:
    """Returns the names of classes, RoBERTa's for those of its arithmetic."""
    named = fields.get("architectures") or []
    named = named if isinstance(named, list) else [named]
    begins = f"^({'|'.join(_ROBERTAS.values())})"
    return [re.sub(begins, "Roberta", it) if isinstance(it, str) else it for it in named]


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
    ours |= _rotary(path, fields, ours["max_position_embeddings"])
    if fields["model_type"] == _DECODER:
        ours["direction"] = "left_to_right"
        if isinstance(window := ours["local_window"], int):
            ours["local_window"] = window // 2 * 2 - _ITSELF
    if every == 1:  # no layer has a window
        del ours["local_window"], ours["local_rotary_base"], ours["local_rotary_scaling"]
    return config.section(Model, ours, str(path))


def _global_every(path: epath.Path, fields: dict[str, Any], count: Any) -> Any:
    """Returns of how many layers one attends to whole rows; older versions give the number."""
    types = fields.get("layer_types")
    if types is None:
        return fields.get("global_attn_every_n_layers", _EVERY)
    if not isinstance(types, list) or len(types) != count or not types:
        raise InputError(f"{path}: layer_types: not a list of num_hidden_layers={count!r} words")
    last = max(len(types), _EVERY) if _LOCAL in types else 1
    every = next((i for i in range(1, len(types)) if types[i] == _GLOBAL), last)
    if types != _layer_types(len(types), every):
        raise InputError(
            f"{path}: layer_types: only {_GLOBAL} in the first and then in every n-th layer, and "
            f"{_LOCAL} in the others, is supported"
        )
    return every


def _layer_types(count: int, every: int) -> list[str]:
    return [_LOCAL if i % every else _GLOBAL for i in range(count)]


def _rotary(path: epath.Path, fields: dict[str, Any], longest: Any) -> dict[str, Any]:
    """Returns bases and scalings of rotary positions, given by a layer's type or for both."""
    ours: dict[str, Any] = {}
    by_type, for_both = fields.get("rope_parameters") or {}, fields.get("rope_scaling") or {}
    for layer_type, name in _ROTARY.items():
        says = (by_type.get(layer_type) or {}) if isinstance(by_type, dict) else None
        if not isinstance(says, dict) or not isinstance(for_both, dict):
            raise InputError(
                f"{path}: rope_parameters={by_type!r}, rope_scaling={for_both!r}: an object is "
                f"expected, of the first with one for {_GLOBAL} and one for {_LOCAL}"
            )
        if for_both and "rope_type" not in for_both:  # theirs would leave it out
            raise InputError(f"{path}: rope_scaling={for_both!r}: has no rope_type; write it there")
        says = says | for_both
        ours |= _ours(path, [_Field("rope_theta", f"{name}_rotary_base", float)], says)
        kind = says.get("rope_type", says.get("type", "default"))
        require(path, "rope_type", kind, _SCALINGS)
        scaling = {"positions": longest} | _ours(path, _OF_SCALING, says)
        words = [str(scaling.get(number)).removesuffix(".0") for number in _SCALINGS[kind]]
        ours[f"{name}_rotary_scaling"] = ":".join([kind, *words]) if words else ""
    return ours


def fields_of(trained: LoadedModel, architecture: str, dtype: str) -> dict[str, Any]:
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


def _bert_fields(trained: LoadedModel) -> dict[str, Any]:
    ours = dataclasses.asdict(trained.model)
    return {
        "model_type": "bert",
        **{name: ours[name] for name in _BERT},
        "hidden_act": _THEIR_ACTIVATIONS[ours["hidden_act"]],
        **_BERT_FIXED,
        "is_decoder": trained.model.direction == "left_to_right",
    }


def _roberta_fields(trained: LoadedModel) -> dict[str, Any]:
    cfg, tok = trained.model, trained.tokenizer
    return {
        **_bert_fields(trained),
        "model_type": "roberta",
        # The first place's row is that behind the padding's number, wherever ours is.
        "max_position_embeddings": cfg.max_position_embeddings + tok.pad_id + 1,
        "bos_token_id": tok.cls_id,
        "eos_token_id": tok.sep_id,
    }


def _distilbert_fields(trained: LoadedModel) -> dict[str, Any]:
    ours = dataclasses.asdict(trained.model)
    return {
        "model_type": "distilbert",
        **{theirs: ours[name] for theirs, name in _DISTILBERT.items()},
        "activation": _THEIR_ACTIVATIONS[ours["hidden_act"]],
        "sinusoidal_pos_embds": False,
        "tie_weights_": True,
    }


def _modern_fields(trained: LoadedModel) -> dict[str, Any]:
    cfg, tok = trained.model, trained.tokenizer
    ours, act = dataclasses.asdict(cfg), _THEIR_ACTIVATIONS[cfg.hidden_act]
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
            _GLOBAL: _rope(cfg.global_rotary_base, cfg.global_rotary_scaling),
            _LOCAL: _rope(cfg.local_rotary_base, cfg.local_rotary_scaling),
        },
        "local_attention": cfg.local_window + _ITSELF * is_decoder,
        # What versions before 5 read.
        "global_attn_every_n_layers": cfg.global_every,
        "global_rope_theta": cfg.global_rotary_base,
        "local_rope_theta": cfg.local_rotary_base,
        **_MODERN_FIXED,
        "tie_word_embeddings": cfg.output_table == "tied",
        "bos_token_id": tok.cls_id,
        "eos_token_id": tok.sep_id,
        "cls_token_id": tok.cls_id,
        "sep_token_id": tok.sep_id,
    }


def _rope(base: float, scaling: str) -> dict[str, Any]:
    """Returns what they say of rotary positions: the inverse of `_rotary`."""
    kind, *numbers = (scaling or "default").split(":")
    says = {"rope_type": kind, "rope_theta": base}
    for name, number in zip(_SCALINGS[kind], numbers, strict=True):
        theirs = "original_max_position_embeddings" if name == "positions" else name
        says[theirs] = int(number) if name == "positions" else float(number)
    return says


_WRITERS = {
    "bert": _bert_fields,
    "roberta": _roberta_fields,
    "distilbert": _distilbert_fields,
    "modern": _modern_fields,
}

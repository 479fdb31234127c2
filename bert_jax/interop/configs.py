"""Conversion between transformers' config.json and the Model section."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from bert_jax import config
from bert_jax.checkpoints.base import Head
from bert_jax.config import Model
from bert_jax.errors import InputError
from bert_jax.interop import config_keys as keys
from bert_jax.interop.names import HEADS, HUGGING_FACE, PARTS, TASKS, Naming, family
from bert_jax.interop.sentence_transformers import RANKING_LOSSES, SIGMOID, read_activation
from bert_jax.interop.vocabularies import read_object, require
from bert_jax.pretraining.loaded_model import LoadedModel

# Number of outputs by kind of task, where it is fixed.
_OUTPUTS = {"choice": 1, "span": 2}
# Model types with RoBERTa's architecture, and the prefixes of their classes.
_ROBERTAS = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}
# local_attention - local_window: in transformers' decoder, both halves include the token itself.
_DECODER_WINDOW_EXTRA = 2
_DECODER = "modernbert-decoder"  # ModernBERT with a causal mask
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_ROTARY = {_GLOBAL: "global", _LOCAL: "local"}  # prefixes of Model's fields
_DEFAULT_GLOBAL_EVERY = 3
_ELECTRA = "electra"
_MPNET = "mpnet"
_EXPORTED_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
# Unsupported values of model_type, with reasons.
_UNSUPPORTED = {
    "albert": "its embeddings and its layers have different widths, and all layers share weights",
    **dict.fromkeys(("deberta", "deberta-v2"), "its attention multiplies by relative positions"),
    "nomic_bert": "its layers are BERT's with rotary positions, SiLU gates and no biases",
}


def read(path: epath.Path) -> Model:
    """Reads a config.json as a Model section; missing keys have transformers' defaults."""
    hf_config = read_object(path)
    readers = {
        "bert": build_bert,
        **dict.fromkeys((*_ROBERTAS, _MPNET), _build_roberta),
        "distilbert": _build_distilbert,
        _ELECTRA: _build_electra,
        "modernbert": _build_modern,
        _DECODER: _build_modern,
    }
    if reason := _UNSUPPORTED.get(str(hf_config.get("model_type"))):
        raise InputError(f"{path}: model_type={hf_config['model_type']!r}: not supported; {reason}")
    model_type = require(path, "model_type", hf_config.get("model_type"), readers)
    for name in _architectures(hf_config):
        require(path, "architectures", name, [*PARTS, *HEADS])
    return readers[model_type](path, hf_config)


def naming_of(path: epath.Path, model: Model) -> Naming:
    """Returns the names of the tensors of a folder with a config.json."""
    is_electra = read_object(path)["model_type"] == _ELECTRA
    naming = HUGGING_FACE[_ELECTRA if is_electra else family(model)]
    # An output table of its own is no copy of the word embeddings.
    return naming if model.output_table == "tied" else dataclasses.replace(naming, tied={})


def match_class(path: epath.Path, classes: Iterable[str]) -> str | None:
    """Returns the class that a config.json names, if it is one of `classes`; else None."""
    return next((name for name in _architectures(read_object(path)) if name in {*classes}), None)


def head_of(
    path: epath.Path, architecture: str, tensors: Mapping[str, np.ndarray], width: int
) -> Head | None:
    """Returns the task's head of a folder; None if the kind of task is not supported.

    `architecture` is one of `names.HEADS`; `tensors` are float32, by canonical names.
    """
    hf_config, name = read_object(path), HEADS[architecture][1]
    weight, bias = (tensors.get(f"{name}.{part}", np.empty(0)) for part in ("weight", "bias"))
    if bias.ndim != 1 or not len(bias) or weight.shape != (len(bias), width):
        raise InputError(
            f"{path}: {architecture}, but {name}.weight and .bias have the shapes "
            f"{list(weight.shape)} and {list(bias.shape)} for width {width}; restore the folder"
        )
    (kinds,) = (TASKS[ending] for ending in TASKS if architecture.endswith(ending))
    id2label = hf_config.get("id2label")
    id2label = id2label if isinstance(id2label, dict) else {}
    is_unsupported, settings = False, ()
    if kinds == ("choice",) and len(id2label) > 1:
        settings = (f"task.choice_columns={','.join(f'ending{i}' for i in range(len(id2label)))}",)
    if "regress" in kinds:  # a class for sequence classification serves four kinds
        activation = read_activation(path.parent, hf_config)
        if len(bias) > 1:
            kinds = ("pair", "classify") if activation else ("classify", "pair")
        elif activation or hf_config.get("problem_type") != "regression":
            loss = RANKING_LOSSES.get(activation or SIGMOID)
            kinds, is_unsupported = ("rank", "regress"), loss is None
            settings = (f"task.ranking_loss={loss}",)
        else:
            kinds = ("regress", "rank")
    has_pooling = architecture.startswith("ModernBert") and kinds[0] not in ("tag", "span")
    pooling = hf_config.get("classifier_pooling", "cls") if has_pooling else "cls"
    is_unsupported |= hf_config.get("problem_type") == "multi_label_classification"
    is_unsupported |= pooling not in ("cls", "mean")
    if is_unsupported or len(bias) != _OUTPUTS.get(kinds[0], len(bias)):
        return None
    if kinds[0] in ("regress", "rank", "choice", "span"):
        return Head(kinds, (), weight.T, bias, pooling, settings)
    labels = tuple(str(id2label.get(str(i), f"LABEL_{i}")) for i in range(len(bias)))
    return Head(kinds, labels, weight.T, bias, pooling)


def _architectures(hf_config: dict[str, Any]) -> list[Any]:
    """Returns the named classes, with `Roberta` in place of the prefixes in `_ROBERTAS`."""
    named = hf_config.get("architectures") or []
    named = named if isinstance(named, list) else [named]
    prefixes = f"^({'|'.join(_ROBERTAS.values())})"
    return [re.sub(prefixes, "Roberta", x) if isinstance(x, str) else x for x in named]


def _build_roberta(path: epath.Path, hf_config: dict[str, Any]) -> Model:
    """Builds the section of a RoBERTa or MPNet: positions begin after the id of the padding token.

    MPNet has no segments.
    """
    is_mpnet = hf_config["model_type"] == _MPNET
    values = keys.convert(path, keys.MPNET if is_mpnet else keys.ROBERTA, hf_config)
    values |= {"type_vocab_size": 0} if is_mpnet else {}
    pad_id, rows = hf_config.get("pad_token_id", 1), values["max_position_embeddings"]
    for name, value in (("pad_token_id", pad_id), ("max_position_embeddings", rows)):
        if type(value) is not int or value < 0:
            raise InputError(f"{path}: {name}={value!r}: must be a whole number")
    values |= {"position_offset": pad_id + 1, "max_position_embeddings": rows - pad_id - 1}
    return config.build_section(Model, values, str(path))


def _build_distilbert(path: epath.Path, hf_config: dict[str, Any]) -> Model:
    values = keys.convert(path, keys.DISTILBERT, hf_config)
    return config.build_section(Model, values | {"type_vocab_size": 0}, str(path))


def _build_electra(path: epath.Path, hf_config: dict[str, Any]) -> Model:
    """Builds the section of an ELECTRA, whose encoder is BERT's if it has one width."""
    values = keys.convert(path, keys.ELECTRA, hf_config)
    width = hf_config.get("embedding_size", 128)  # the default of transformers' class
    if width != values["hidden_size"]:
        raise InputError(
            f"{path}: embedding_size={width!r}: not supported; only embeddings as wide as the "
            f"layers, hidden_size={values['hidden_size']!r}, as in electra-base"
        )
    return config.build_section(Model, values, str(path))


def build_bert(path: epath.Path, hf_config: dict[str, Any]) -> Model:
    """Builds the Model section from the fields of a BERT's configuration."""
    return config.build_section(Model, keys.convert(path, keys.BERT, hf_config), str(path))


def _build_modern(path: epath.Path, hf_config: dict[str, Any]) -> Model:
    values = {"kind": "modern"} | keys.convert(path, keys.MODERN, hf_config)
    # Model has one activation for layers and for the head.
    acts = [name for name, act in keys.ACTIVATIONS.items() if act == values["hidden_act"]]
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
        values |= keys.convert(
            path, [keys.KeyRule("rope_theta", f"{name}_rotary_base", float)], rope
        )
        kind = rope.get("rope_type", rope.get("type", "default"))
        require(path, "rope_type", kind, keys.SCALING_PARAMETERS)
        scaling = {"positions": max_positions} | keys.convert(path, keys.SCALING, rope)
        names = keys.SCALING_PARAMETERS[kind]
        numbers = [str(scaling.get(parameter)).removesuffix(".0") for parameter in names]
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
        **{name: values[name] for name in keys.BERT_NAMES},
        "hidden_act": _EXPORTED_ACTIVATIONS[values["hidden_act"]],
        **keys.BERT_FIXED,
        "is_decoder": trained.model.direction == "left_to_right",
    }


def _roberta_fields(trained: LoadedModel) -> dict[str, Any]:
    cfg, tok = trained.model, trained.tokenizer
    return {
        **_bert_fields(trained),
        "model_type": "roberta",
        # transformers' table also has a row for each id up to that of the padding token.
        "max_position_embeddings": cfg.max_position_embeddings + tok.pad_id + 1,
        "bos_token_id": tok.cls_id,
        "eos_token_id": tok.sep_id,
    }


def _mpnet_fields(trained: LoadedModel) -> dict[str, Any]:
    cfg, pad_id = trained.model, trained.tokenizer.pad_id
    settings = cfg.relative_position_buckets, cfg.type_vocab_size, pad_id, cfg.position_offset > 0
    if settings != (keys.MPNET_BUCKETS, 0, 1, True):
        raise InputError(
            f"model.relative_position_buckets={cfg.relative_position_buckets}: transformers' MPNet "
            f"has {keys.MPNET_BUCKETS} buckets, no segments (model.type_vocab_size=0), a "
            f"model.position_offset, and a padding token of id 1 (here {pad_id}); use "
            "`bert-jax embed` or `bert_jax.load`"
        )
    fields = _roberta_fields(trained)
    del fields["type_vocab_size"]
    buckets = {"relative_attention_num_buckets": keys.MPNET_BUCKETS}
    return {**fields, "model_type": _MPNET, **buckets}


def _distilbert_fields(trained: LoadedModel) -> dict[str, Any]:
    values = dataclasses.asdict(trained.model)
    return {
        "model_type": "distilbert",
        **{key: values[name] for key, name in keys.DISTILBERT_FIELDS.items()},
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
        **{name: values[name] for name in keys.SIZES},
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
        **keys.MODERN_FIXED,
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
    for name, number in zip(keys.SCALING_PARAMETERS[kind], numbers, strict=True):
        key = "original_max_position_embeddings" if name == "positions" else name
        rope[key] = int(number) if name == "positions" else float(number)
    return rope


_FIELDS_BY_FAMILY = {
    "bert": _bert_fields,
    "roberta": _roberta_fields,
    "distilbert": _distilbert_fields,
    "mpnet": _mpnet_fields,
    "modern": _modern_fields,
}

"""Hugging Face's config.json, google-research/bert's bert_config.json and our Model section."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from etils import epath

from bert_jax import config
from bert_jax.config import Model
from bert_jax.errors import InputError
from bert_jax.interop.names import PARTS

# Under the same name in both.
_SAME = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "initializer_range",
)
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_FORMS = {"erf": "gelu", "tanh": "gelu_tanh"}
_GELU_FORM = "gelu_form"
# Of a bert_config.json that says nothing of them.
_TF1_TYPES = 16
# Fields that would change what is computed, and the only value of each that we compute.
_FIXED = {
    "layer_norm_eps": 1e-12,
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "chunk_size_feed_forward": 0,
}


def read(path: epath.Path) -> Model:
    """The Model section that a config.json stands for. Fields it lacks have BERT-Base's values.

    Raises:
      InputError: another architecture, or a field whose value is not supported.
    """
    fields = read_object(path)
    if fields.get("model_type") != "bert":
        raise InputError(
            f"{path}: model_type={fields.get('model_type')!r}: only 'bert' is supported"
        )
    named = fields.get("architectures") or []
    if not isinstance(named, list) or not all(name in list(PARTS) for name in named):
        raise InputError(f"{path}: architectures={named!r}: only {', '.join(PARTS)} are supported")
    for name, value in _FIXED.items():
        if fields.get(name) not in (None, value):
            raise InputError(f"{path}: {name}={fields[name]!r}: only {value!r} is supported")
    return _model(path, fields)


def read_tf1(path: epath.Path, say: Callable[[str], None]) -> Model:
    """The Model section that a bert_config.json stands for.

    Their word `gelu` is erf in the code of the released models and tanh since February 2019; a
    field of ours, which their code passes over, says which. Without it: erf, as transformers does.

    Raises:
      InputError: a field whose value is not supported.
    """
    fields = {"type_vocab_size": _TF1_TYPES} | read_object(path)
    form = fields.get(_GELU_FORM)
    if form not in (None, *_FORMS):
        raise InputError(f"{path}: {_GELU_FORM}={form!r}: only {', '.join(_FORMS)} are supported")
    if form is None and fields.get("hidden_act", "gelu") == "gelu":
        say(
            f"{path.name}: gelu is taken for the released models' form, erf; if these weights were "
            f'trained by the code since February 2019, add "{_GELU_FORM}": "tanh" there'
        )
    cfg = _model(path, fields)
    return cfg if form is None else dataclasses.replace(cfg, hidden_act=_FORMS[form])


def _model(path: epath.Path, fields: dict[str, Any]) -> Model:
    act = fields.get("hidden_act", "gelu")
    if not isinstance(act, str) or act not in _ACTIVATIONS:
        raise InputError(
            f"{path}: hidden_act={act!r}: only {', '.join(_ACTIVATIONS)} are supported"
        )
    ours = {name: fields[name] for name in _SAME if name in fields}
    return config.section(Model, ours | {"hidden_act": _ACTIVATIONS[act]}, str(path))


def write(cfg: Model, architecture: str, dtype: str, pad_id: int) -> str:
    """The text of a config.json that their class `architecture` reads."""
    ours = dataclasses.asdict(cfg)
    fields = {
        "architectures": [architecture],
        "model_type": "bert",
        **{name: ours[name] for name in _SAME},
        "hidden_act": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[cfg.hidden_act],
        **{name: value for name, value in _FIXED.items() if name != "chunk_size_feed_forward"},
        "pad_token_id": pad_id,
        "dtype": dtype,
        "torch_dtype": dtype,  # what versions before 4.56 call it
    }
    return json.dumps(fields, indent=2) + "\n"


def write_tf1(cfg: Model) -> str:
    """The text of a bert_config.json."""
    ours = dataclasses.asdict(cfg)
    fields = {name: ours[name] for name in _SAME}
    form = {act: form for form, act in _FORMS.items()}[cfg.hidden_act]
    fields |= {"hidden_act": "gelu", _GELU_FORM: form}
    return json.dumps(fields, indent=2) + "\n"


def read_object(path: epath.Path) -> dict[str, Any]:
    """A JSON object of others, which carries no format version.

    Raises:
      InputError: no such file, or not a JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; such a checkpoint has one") from error
    except (ValueError, RecursionError, OSError) as error:
        raise InputError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: not a JSON object")
    return value

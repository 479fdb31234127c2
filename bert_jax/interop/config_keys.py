"""The keys of transformers' config.json for each family, and the fields of the Model section."""

from typing import Any, NamedTuple

from etils import epath

from bert_jax.errors import InputError
from bert_jax.interop.vocabularies import require

# Keys of config.json that have the name of a field of Model.
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "initializer_range",
)
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
BERT_NAMES = (*SIZES, "type_vocab_size", "layer_norm_eps", *_DROPOUTS)
# DistilBERT's keys, and the fields of Model.
DISTILBERT_FIELDS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    **{name: name for name in ("vocab_size", "max_position_embeddings", "initializer_range")},
}
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Keys of which only one value is supported.
BERT_FIXED = {
    "position_embedding_type": "absolute",
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
MODERN_FIXED = {
    "norm_eps": 1e-5,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "decoder_bias": True,
    "classifier_bias": False,
}


class KeyRule(NamedTuple):
    """A rule for one key of config.json."""

    key: str
    field: str = ""  # the field of Model; "": none, the value must be one of `allowed`
    # Supported values (and Model's values for them), or the type of a number; None: any.
    allowed: dict[Any, Any] | list[Any] | type | None = None
    default: Any = None  # the default of transformers' class; None: Model's default


def _allow_only(values: dict[str, Any]) -> list[KeyRule]:
    return [KeyRule(key, allowed=[value]) for key, value in values.items()]


BERT = [
    *(KeyRule(name, name) for name in BERT_NAMES),
    KeyRule("hidden_act", "hidden_act", ACTIVATIONS, "gelu"),
    KeyRule("is_decoder", "direction", {False: "both", True: "left_to_right"}, False),
    KeyRule("chunk_size_feed_forward", allowed=[0]),
    *_allow_only(BERT_FIXED),
]
ROBERTA = [
    *(rule for rule in BERT if rule.key not in ("type_vocab_size", "is_decoder")),
    KeyRule("max_position_embeddings", "max_position_embeddings", None, 512),  # replaces BERT's
    KeyRule("type_vocab_size", "type_vocab_size", [1], 1),
    KeyRule("is_decoder", allowed=[False]),
]
ELECTRA = [
    *(rule for rule in BERT if rule.key not in ("hidden_act", "is_decoder")),
    KeyRule("hidden_act", "hidden_act", {"gelu": "gelu"}, "gelu"),  # its masked LM head has gelu
    KeyRule("is_decoder", allowed=[False]),
    # Defaults of transformers' class, which are electra-small's.
    KeyRule("hidden_size", "hidden_size", None, 256),
    KeyRule("num_attention_heads", "num_attention_heads", None, 4),
    KeyRule("intermediate_size", "intermediate_size", None, 1_024),
]
DISTILBERT = [
    *(KeyRule(key, field) for key, field in DISTILBERT_FIELDS.items()),
    KeyRule("activation", "hidden_act", ACTIVATIONS, "gelu"),
    KeyRule("chunk_size_feed_forward", allowed=[0]),
]
MPNET_BUCKETS = 32  # transformers computes with no other number
MPNET = [
    *(rule for rule in ROBERTA if rule.key not in ("type_vocab_size", "vocab_size")),
    KeyRule("vocab_size", "vocab_size", None, 30_527),
    KeyRule(
        "relative_attention_num_buckets",
        "relative_position_buckets",
        [MPNET_BUCKETS],
        MPNET_BUCKETS,
    ),
    KeyRule("pad_token_id", allowed=[1]),  # transformers computes with no other id
]
# Parameters of each kind of rotary scaling; since transformers 5, each type of layer has its own.
SCALING_PARAMETERS = {"default": (), "linear": ("factor",), "yarn": ("positions", "factor")}
SCALING = [
    KeyRule("factor", "factor", float),
    KeyRule("original_max_position_embeddings", "positions"),
    *_allow_only({"beta_fast": 32, "beta_slow": 1, "truncate": True, "partial_rotary_factor": 1}),
    *(KeyRule(name, allowed=[None]) for name in ("attention_factor", "mscale", "mscale_all_dim")),
]
# The defaults are ModernBERT-base's.
MODERN = [
    KeyRule("vocab_size", "vocab_size", None, 50_368),
    KeyRule("hidden_size", "hidden_size", None, 768),
    KeyRule("num_hidden_layers", "num_hidden_layers", None, 22),
    KeyRule("num_attention_heads", "num_attention_heads", None, 12),
    KeyRule("intermediate_size", "intermediate_size", None, 1_152),
    KeyRule("max_position_embeddings", "max_position_embeddings", None, 8_192),
    KeyRule("initializer_range", "initializer_range"),
    KeyRule("hidden_activation", "hidden_act", ACTIVATIONS, "gelu"),
    KeyRule("mlp_dropout", "hidden_dropout_prob", float, 0.0),
    KeyRule("attention_dropout", "attention_probs_dropout_prob", float, 0.0),
    KeyRule("global_rope_theta", "global_rotary_base", float, 160_000.0),
    KeyRule("local_rope_theta", "local_rotary_base", float, 10_000.0),
    KeyRule("local_attention", "local_window", None, 128),
    KeyRule("tie_word_embeddings", "output_table", {True: "tied", False: "own"}, True),
    *_allow_only(MODERN_FIXED),
]


def convert(path: epath.Path, table: list[KeyRule], hf_config: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of Model for keys of config.json; an InputError names the key."""
    converted = {}
    for key, field, allowed, default in table:
        value = default if hf_config.get(key) is None else hf_config[key]
        if value is None:
            continue
        if allowed is float and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise InputError(f"{path}: {key}={value!r}: not a number")
        if isinstance(allowed, dict | list):
            require(path, key, value, allowed)
        if field:
            converted[field] = allowed[value] if isinstance(allowed, dict) else value
    return converted

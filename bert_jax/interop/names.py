"""Hugging Face's names and shapes of tensors, and ours; tensors of others as a base.

They keep each layer's tensors apart and kernels as [out, in], in ModernBERT some of them in one;
ours are stacked along a first dimension L and lie as [in, out]. Rows of our vocabulary are padded
(model.encoder).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import numpy as np
from etils import epath

from bert_jax import base as base_lib
from bert_jax.base import Base
from bert_jax.config import Model
from bert_jax.errors import InputError
from bert_jax.model import heads
from bert_jax.model.encoder import padded_vocab_size
from bert_jax.text.tokenizer import Tokenizer

# Others pad the vocabulary's tables to a multiple of one of these.
_MULTIPLES = (8, 64, 128, 256, 512, 1024)
_FRESH_SEED = 0

Say = Callable[[str], None]
Part = Literal["encoder", "pooler", "masked_lm", "next_sentence"]

# What each of their classes holds.
PARTS: dict[str, tuple[Part, ...]] = {
    "BertForPreTraining": ("encoder", "pooler", "masked_lm", "next_sentence"),
    "BertForMaskedLM": ("encoder", "masked_lm"),
    "BertModel": ("encoder", "pooler"),
    "BertLMHeadModel": ("encoder", "masked_lm"),
    "RobertaForMaskedLM": ("encoder", "masked_lm"),
    "RobertaModel": ("encoder", "pooler"),
    "DistilBertForMaskedLM": ("encoder", "masked_lm"),
    "DistilBertModel": ("encoder",),
    "ModernBertForMaskedLM": ("encoder", "masked_lm"),
    "ModernBertModel": ("encoder",),
    "ModernBertDecoderForCausalLM": ("encoder", "masked_lm"),
}
# Of classes for tasks, what stands under the head, and what that is called.
HEADS: dict[str, tuple[tuple[Part, ...], str]] = {
    "BertForSequenceClassification": (("encoder", "pooler"), "classifier"),
    "BertForMultipleChoice": (("encoder", "pooler"), "classifier"),
    "BertForTokenClassification": (("encoder",), "classifier"),
    "BertForQuestionAnswering": (("encoder",), "qa_outputs"),
    "RobertaForSequenceClassification": (("encoder", "pooler"), "classifier.out_proj"),
    "RobertaForMultipleChoice": (("encoder", "pooler"), "classifier"),
    "RobertaForTokenClassification": (("encoder",), "classifier"),
    "RobertaForQuestionAnswering": (("encoder",), "qa_outputs"),
    "DistilBertForSequenceClassification": (("encoder", "pooler"), "classifier"),
    "DistilBertForMultipleChoice": (("encoder", "pooler"), "classifier"),
    "DistilBertForTokenClassification": (("encoder",), "classifier"),
    "DistilBertForQuestionAnswering": (("encoder",), "qa_outputs"),
    "ModernBertForSequenceClassification": (("encoder", "masked_lm"), "classifier"),
    "ModernBertForMultipleChoice": (("encoder", "masked_lm"), "classifier"),
    "ModernBertForTokenClassification": (("encoder", "masked_lm"), "classifier"),
    "ModernBertForQuestionAnswering": (("encoder", "masked_lm"), "classifier"),
}
# RoBERTa's, and what its pooler is called there.
_ROBERTA_HEAD, _ROBERTA_POOLER = "classifier.out_proj", ("roberta.pooler.", "classifier.")
WORD_EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
OUTPUT_BIAS = "cls.predictions.bias"
_MODERN_WORD_EMBEDDINGS = "model.embeddings.tok_embeddings.weight"
_MODERN_OUTPUT_BIAS, _MODERN_OUTPUT = "decoder.bias", "decoder.weight"

_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_output": "attention.output.dense",
    "attention_layer_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_layer_norm": "output.LayerNorm",
}
# What other families call BERT's tensors: the beginning of a name, and what stands there for it.
_ROBERTA = {
    "bert.": "roberta.",
    "cls.predictions.transform.dense": "lm_head.dense",
    "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
    "cls.predictions.bias": "lm_head.bias",
}
_DISTILBERT = {
    "bert.encoder.layer": "distilbert.transformer.layer",
    "bert.embeddings": "distilbert.embeddings",
    "cls.predictions.transform.dense": "vocab_transform",
    "cls.predictions.transform.LayerNorm": "vocab_layer_norm",
    "cls.predictions.bias": "vocab_projector.bias",
    "bert.pooler.dense": "pre_classifier",
}
_DISTILBERT_LAYER = {
    "query": "attention.q_lin",
    "key": "attention.k_lin",
    "value": "attention.v_lin",
    "attention_output": "attention.out_lin",
    "attention_layer_norm": "sa_layer_norm",
    "intermediate": "ffn.lin1",
    "output": "ffn.lin2",
    "output_layer_norm": "output_layer_norm",
}
# Ours that lie in one tensor of theirs, in this order.
_MODERN_LAYER = {
    "attn.Wqkv": ("query", "key", "value"),
    "attn.Wo": ("attention_output",),
    "mlp.Wi": ("intermediate", "gate"),
    "mlp.Wo": ("output",),
}
_DECODER_LAYER = {
    "attn.q_proj": ("query",),
    "attn.k_proj": ("key",),
    "attn.v_proj": ("value",),
    **{name: ours for name, ours in _MODERN_LAYER.items() if name != "attn.Wqkv"},
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of theirs."""

    name: str  # theirs, with the prefix that it has under a head
    shape: tuple[int, ...]  # theirs
    path: tuple[str, ...]  # of the leaf of our tree that holds it
    part: Part  # what it belongs to
    # Its place along the leaf's first dimension; None if the leaf is not stacked.
    layer: int | None = None
    is_kernel: bool = False  # whether ours lies transposed
    is_vocabulary: bool = False  # whether ours has rows of padding
    # Number and count: ours is this one of so many equal parts of its first dimension.
    share: tuple[int, int] = (0, 1)


@dataclasses.dataclass(frozen=True)
class Naming:
    """The names that others give to the same tensors."""

    tensors: Callable[[Model], Iterator[Tensor]]  # all of a model, the embeddings first
    word_embeddings: str  # the name of the table that has a row a piece
    output_bias: str  # the name of the other one
    config: str  # the file that says the sizes
    model: str = "BERT's pre-training model"  # what they are of, in words
    prefix: str = ""  # of the encoder's, which files of an encoder alone lack
    encoder: tuple[str, ...] = ()  # how those begin without it
    # Copies that a file may hold of what stands elsewhere in it.
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # tensors that a file may hold and that mean nothing

    def canonical(self, name: str) -> str:
        """Returns a name as newer versions write it, with its prefix."""
        if name.startswith(self.encoder):
            name = self.prefix + name
        for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
            if name.endswith(f"LayerNorm{old}"):
                name = name.removesuffix(old) + new
        return name


def family(cfg: Model) -> str:
    """Returns whose tensors a model's are: bert, roberta, distilbert; or its kind."""
    if cfg.kind != "bert":
        return cfg.kind
    if cfg.position_offset:
        return "roberta"
    return "bert" if cfg.type_vocab_size else "distilbert"


def tensors(cfg: Model, of_layer: Mapping[str, str] = _LAYER) -> Iterator[Tensor]:
    """Yields all tensors of BertForPreTraining except copies."""
    width, inner = cfg.hidden_size, cfg.intermediate_size
    above = ("encoder", "embeddings")
    rows = {
        "position": cfg.position_offset + cfg.max_position_embeddings,
        "segment": cfg.type_vocab_size,
    }
    for ours, theirs in (("position", "position"), ("segment", "token_type")):
        if not rows[ours]:
            continue
        name = f"bert.embeddings.{theirs}_embeddings.weight"
        yield Tensor(name, (rows[ours], width), (*above, ours, "embedding"), "encoder")
    word = (*above, "word", "embedding")
    shape = (cfg.vocab_size, width)
    yield Tensor(WORD_EMBEDDINGS, shape, word, "encoder", is_vocabulary=True)
    yield from _norm("bert.embeddings.LayerNorm", (*above, "layer_norm"), "encoder", width)
    sizes = {"intermediate": (inner, width), "output": (width, inner)}
    for layer in range(cfg.num_hidden_layers):
        for ours, theirs in of_layer.items():
            name, path = f"bert.encoder.layer.{layer}.{theirs}", ("encoder", "layers", ours)
            if ours.endswith("norm"):
                yield from _norm(name, path, "encoder", width, layer)
            else:
                out, into = sizes.get(ours, (width, width))
                yield from _dense(name, path, "encoder", out, into, layer)
    yield from _dense("bert.pooler.dense", ("pooler",), "pooler", width, width)
    transform = "cls.predictions.transform"
    yield from _dense(f"{transform}.dense", ("masked_lm", "transform"), "masked_lm", width, width)
    yield from _norm(f"{transform}.LayerNorm", ("masked_lm", "layer_norm"), "masked_lm", width)
    bias = ("masked_lm", "output_bias")
    yield Tensor(OUTPUT_BIAS, (cfg.vocab_size,), bias, "masked_lm", is_vocabulary=True)
    yield from _dense("cls.seq_relationship", ("next_sentence",), "next_sentence", 2, width)


def _renamed(
    cfg: Model, names: Mapping[str, str], of_layer: Mapping[str, str], parts: tuple[Part, ...]
) -> Iterator[Tensor]:
    """Yields BERT's tensors of these parts as another family names them."""
    for tensor in tensors(cfg, of_layer):
        if tensor.part in parts:
            old, new = next(item for item in names.items() if tensor.name.startswith(item[0]))
            yield dataclasses.replace(tensor, name=new + tensor.name.removeprefix(old))


def _dense(
    name: str, path: tuple[str, ...], part: Part, out: int, into: int, layer: int | None = None
) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (out, into), (*path, "kernel"), part, layer, is_kernel=True)
    yield Tensor(f"{name}.bias", (out,), (*path, "bias"), part, layer)


def _norm(
    name: str, path: tuple[str, ...], part: Part, width: int, layer: int | None = None
) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (width,), (*path, "scale"), part, layer)
    yield Tensor(f"{name}.bias", (width,), (*path, "bias"), part, layer)


def modern_tensors(cfg: Model) -> Iterator[Tensor]:
    """Yields all tensors of ModernBertForMaskedLM, or its decoder, except copies."""
    width, inner = cfg.hidden_size, cfg.intermediate_size
    is_decoder = cfg.direction == "left_to_right"
    of_layer, head = (_DECODER_LAYER, "lm_head") if is_decoder else (_MODERN_LAYER, "head")

    def norm(
        name: str, path: tuple[str, ...], layer: int | None = None, part: Part = "encoder"
    ) -> Tensor:
        return Tensor(f"{name}.weight", (width,), (*path, "scale"), part, layer)

    embeddings = ("encoder", "embeddings")
    shape, word = (cfg.vocab_size, width), (*embeddings, "word", "embedding")
    yield Tensor(_MODERN_WORD_EMBEDDINGS, shape, word, "encoder", is_vocabulary=True)
    yield norm("model.embeddings.norm", (*embeddings, "layer_norm"))
    sizes = {"mlp.Wi": (inner, width), "mlp.Wo": (width, inner)}
    for layer in range(cfg.num_hidden_layers):
        above, path = f"model.layers.{layer}", ("encoder", "layers")
        if layer > 0:  # the first has none before its attention
            yield norm(f"{above}.attn_norm", (*path, "attention_layer_norm"), layer)
        yield norm(f"{above}.mlp_norm", (*path, "output_layer_norm"), layer)
        for theirs, ours in of_layer.items():
            out, into = sizes.get(theirs, (width, width))
            for number, name in enumerate(ours):
                yield Tensor(
                    f"{above}.{theirs}.weight",
                    (out * len(ours), into),
                    (*path, name, "kernel"),
                    "encoder",
                    layer,
                    is_kernel=True,
                    share=(number, len(ours)),
                )
    yield norm("model.final_norm", ("encoder", "final_layer_norm"))
    transform = ("masked_lm", "transform", "kernel")
    yield Tensor(f"{head}.dense.weight", (width, width), transform, "masked_lm", is_kernel=True)
    yield norm(f"{head}.norm", ("masked_lm", "layer_norm"), None, "masked_lm")
    bias = ("masked_lm", "output_bias")
    yield Tensor(_MODERN_OUTPUT_BIAS, (cfg.vocab_size,), bias, "masked_lm", is_vocabulary=True)
    if cfg.output_table == "own":
        table = ("masked_lm", "output", "embedding")
        yield Tensor(_MODERN_OUTPUT, shape, table, "masked_lm", is_vocabulary=True)


_NO_PAIRS: tuple[Part, ...] = ("encoder", "pooler", "masked_lm")

# By `family`.
HUGGING_FACE = {
    "roberta": Naming(
        lambda cfg: _renamed(cfg, _ROBERTA, _LAYER, _NO_PAIRS),
        "roberta.embeddings.word_embeddings.weight",
        "lm_head.bias",
        "config.json",
        "RoBERTa's masked LM",
        prefix="roberta.",
        encoder=("embeddings.", "encoder.", "pooler."),
        tied={
            "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        ignored=("roberta.embeddings.position_ids", "roberta.embeddings.token_type_ids"),
    ),
    "distilbert": Naming(
        lambda cfg: _renamed(cfg, _DISTILBERT, _DISTILBERT_LAYER, _NO_PAIRS),
        "distilbert.embeddings.word_embeddings.weight",
        "vocab_projector.bias",
        "config.json",
        "DistilBERT's masked LM",
        prefix="distilbert.",
        encoder=("embeddings.", "transformer."),
        tied={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
        ignored=("distilbert.embeddings.position_ids",),
    ),
    "bert": Naming(
        tensors,
        WORD_EMBEDDINGS,
        OUTPUT_BIAS,
        "config.json",
        prefix="bert.",
        encoder=("embeddings.", "encoder.", "pooler."),
        tied={
            "cls.predictions.decoder.weight": WORD_EMBEDDINGS,
            "cls.predictions.decoder.bias": OUTPUT_BIAS,
        },
        # Numbers 0, 1, 2, ... and zeros that older versions saved with the weights.
        ignored=("bert.embeddings.position_ids", "bert.embeddings.token_type_ids"),
    ),
    "modern": Naming(
        modern_tensors,
        _MODERN_WORD_EMBEDDINGS,
        _MODERN_OUTPUT_BIAS,
        "config.json",
        "ModernBERT's masked LM",
        prefix="model.",
        encoder=("embeddings.", "layers.", "final_norm."),
        tied={_MODERN_OUTPUT: _MODERN_WORD_EMBEDDINGS},
    ),
}


def to_ours(
    theirs: Mapping[str, np.ndarray], cfg: Model, where: str, naming: Naming | None = None
) -> tuple[dict[str, Any], tuple[Part, ...]]:
    """Returns our tree of the parts that are there, and the names of the parts that are not.

    Args:
      theirs: float32 by canonical names, without copies.
      cfg: the shape; its vocabulary has no padding, and rows of theirs beyond it are left out.
      where: the file, for errors.
      naming: whose names they are; None: Hugging Face's.
    """
    naming = naming or HUGGING_FACE[family(cfg)]
    wanted: dict[str, list[Tensor]] = {}
    for tensor in naming.tensors(cfg):
        if tensor.part == "encoder":  # at once: the configuration may name any number of layers
            _require_shape(tensor, theirs, where, naming.config)
        wanted.setdefault(tensor.name, []).append(tensor)
    for name in theirs:
        if name not in wanted:
            raise InputError(f"{where}: tensor {name!r} is none of {naming.model}")
    there = {"encoder", *(wanted[name][0].part for name in theirs)}
    held = [tensor for shares in wanted.values() for tensor in shares if tensor.part in there]
    for tensor in held:
        _require_shape(tensor, theirs, where, naming.config)
    params: dict[str, Any] = {}
    for tensor in held:
        value = theirs[tensor.name]
        if not np.isfinite(value).all():
            raise InputError(
                f"{where}: tensor {tensor.name!r} holds values that are no numbers; take another "
                "checkpoint"
            )
        if tensor.is_vocabulary:
            value = value[: cfg.vocab_size]
        number, count = tensor.share
        value = np.split(value, count)[number]
        _leaf(params, tensor, cfg)[...] = value.T if tensor.is_kernel else value
    if cfg.kind == "modern":  # of a single layer they have none
        unused = {"scale": np.ones((cfg.num_hidden_layers, cfg.hidden_size), np.float32)}
        params["encoder"]["layers"].setdefault("attention_layer_norm", unused)
    missing = tuple(part for part in PARTS["BertForPreTraining"] if part not in there)
    return params, missing


def _require_shape(
    tensor: Tensor, theirs: Mapping[str, np.ndarray], where: str, config: str
) -> None:
    if tensor.name not in theirs:
        raise InputError(f"{where}: tensor {tensor.name!r} of {list(tensor.shape)} is missing")
    shape = theirs[tensor.name].shape
    if tensor.is_vocabulary and len(shape) == len(tensor.shape):
        shape = (min(shape[0], tensor.shape[0]), *shape[1:])
    if shape != tensor.shape:
        raise InputError(
            f"{where}: tensor {tensor.name!r} has the shape {list(theirs[tensor.name].shape)}, "
            f"{config} and the vocabulary say {list(tensor.shape)}"
        )


def _leaf(params: dict[str, Any], tensor: Tensor, cfg: Model) -> np.ndarray:
    """Returns the place of a tensor in our tree, made at its first use."""
    *above, name = tensor.path
    node = params
    for key in above:
        node = node.setdefault(key, {})
    shape = (tensor.shape[0] // tensor.share[1], *tensor.shape[1:])
    shape = shape[::-1] if tensor.is_kernel else shape
    if tensor.is_vocabulary:
        shape = (padded_vocab_size(cfg), *shape[1:])
    if tensor.layer is not None:
        shape = (cfg.num_hidden_layers, *shape)
    if name not in node:
        # A norm that theirs do not have leaves what it is given as it is.
        node[name] = np.full(shape, name == "scale", np.float32)
    leaf = node[name] if tensor.layer is None else node[name][tensor.layer]
    return leaf[: cfg.vocab_size] if tensor.is_vocabulary else leaf


def to_theirs(params: Mapping[str, Any], cfg: Model, architecture: str) -> dict[str, np.ndarray]:
    """Returns their tensors, float32, as the class `architecture` names them, without padding."""
    if architecture not in HEADS:
        prefix = "as_under_a_head" if "masked_lm" in PARTS[architecture] else "left_out"
        return _held(params, cfg, PARTS[architecture], prefix)
    parts, name = HEADS[architecture]
    head = jax.device_get(params["head"])
    below = _held(params, cfg, parts, "as_under_a_head")
    if name == _ROBERTA_HEAD:
        below = {key.replace(*_ROBERTA_POOLER): below[key] for key in below}
    return below | {
        f"{name}.weight": head["kernel"].T,
        f"{name}.bias": head["bias"],
    }


def _held(
    params: Mapping[str, Any],
    cfg: Model,
    parts: tuple[Part, ...],
    prefix: Literal["as_under_a_head", "left_out"],
) -> dict[str, np.ndarray]:
    theirs: dict[str, np.ndarray] = {}
    naming = HUGGING_FACE[family(cfg)]
    for tensor in naming.tensors(cfg):
        # Below the head of a task masked LM has no output.
        is_output = tensor.is_vocabulary and tensor.part == "masked_lm"
        if tensor.part not in parts or ("head" in params and is_output):
            continue
        value: Any = params
        for key in tensor.path:
            value = value[key]
        value = np.asarray(value)
        if tensor.layer is not None:
            value = value[tensor.layer]
        if tensor.is_vocabulary:
            value = value[: cfg.vocab_size]
        name = tensor.name.removeprefix(naming.prefix) if prefix == "left_out" else tensor.name
        value = value.T if tensor.is_kernel else value
        theirs[name] = np.concatenate([theirs[name], value]) if tensor.share[0] else value
    return theirs


def without_head(
    tensors: Mapping[str, np.ndarray], cfg: Model, architecture: str
) -> dict[str, np.ndarray]:
    """Returns what one of their classes for tasks has below its head, under pre-training's names.

    ModernBERT's masked LM has no output there: a bias of zeros takes its place.
    """
    parts, name = HEADS[architecture]
    below = {key: tensors[key] for key in tensors if not key.startswith(f"{name}.")}
    if name == _ROBERTA_HEAD:
        theirs, ours = reversed(_ROBERTA_POOLER)
        below = {
            ours + key.removeprefix(theirs) if key.startswith(theirs) else key: below[key]
            for key in below
        }
    if "masked_lm" in parts:
        rows = len(below.get(_MODERN_WORD_EMBEDDINGS, ()))
        below[_MODERN_OUTPUT_BIAS] = np.zeros(rows, np.float32)
    return below


def thin_to_theirs(thin: Mapping[str, Any], cfg: Model) -> dict[str, np.ndarray]:
    """Returns thin matrices next to kernels as PEFT names them next to theirs, lora_A and lora_B.

    Args:
      thin: by the name of the kernel, `down` float32 [L, inputs, rank] and `up` [L, rank, outputs].
      cfg: the shape.

    Returns:
      float32 [n rank, inputs] and [outputs, n rank], n being how many of these kernels lie in the
      tensor: each has ranks of its own there, which add nothing to the rows of the others.
    """
    theirs: dict[str, np.ndarray] = {}
    for tensor in HUGGING_FACE[family(cfg)].tensors(cfg):
        if tensor.layer is None or not tensor.is_kernel or tensor.path[-2] not in thin:
            continue
        of = thin[tensor.path[-2]]
        down, up = (np.asarray(of[name][tensor.layer]).T for name in ("down", "up"))
        number, count = tensor.share
        rows = np.zeros((count, *up.shape), np.float32)
        rows[number] = up
        module = tensor.name.removesuffix(".weight")
        for name, value, axis in (
            ("lora_A", down, 0),
            ("lora_B", rows.reshape(tensor.shape[0], -1), 1),
        ):
            name = f"{module}.{name}.weight"
            held = [theirs[name]] if name in theirs else []
            theirs[name] = np.concatenate([*held, value], axis)
    return theirs


def fitted(
    tensors: Mapping[str, np.ndarray],
    naming: Naming,
    stated: Model,
    tokenizer: Tokenizer,
    file: epath.Path,
    source: str,
    say: Say,
) -> Base:
    """Fits tensors of others to a base: rows of padding go, and parts that are missing are fresh.

    Args:
      tensors: float32 by the names of `naming`, without copies.
      naming: whose names they are.
      stated: their shape as the configuration next to them has it, padding included.
      tokenizer: whose ids their rows are.
      file: where they were read.
      source: in words, where they come from.
      say: is given rows left out and parts freshly initialised.
    """
    cfg = _without_padding(stated, tokenizer.size, tensors, naming, file, say)
    params, missing = to_ours(tensors, cfg, str(file), naming)
    if missing:
        # The values of a seed, so that the same source makes the same base.
        key = jax.random.key(_FRESH_SEED, impl="threefry2x32")
        fresh = jax.device_get(heads.init_params(cfg, key))
        for part in missing:
            params[part] = fresh[part]
            held = ", ".join(f"{part}/{path}" for path in base_lib.flat(params[part]))
            say(f"not in {file.name}, freshly initialised: {held}")
    return Base(cfg, params, tokenizer, source, missing)


def _without_padding(
    stated: Model,
    size: int,
    tensors: Mapping[str, np.ndarray],
    naming: Naming,
    file: epath.Path,
    say: Say,
) -> Model:
    """Returns the model with as many pieces as the vocabulary has; the rows beyond are padding."""
    name = naming.word_embeddings
    word = tensors.get(name)
    if word is None:
        raise InputError(f"{file}: tensor {name!r} is missing")
    rows = stated.vocab_size
    if word.shape[:1] != (rows,):
        raise InputError(
            f"{file}: tensor {name!r} has the shape {list(word.shape)}, "
            f"{naming.config} says vocab_size={rows}"
        )
    padded = {-(-size // multiple) * multiple for multiple in _MULTIPLES}
    if rows != size and rows not in padded:
        raise InputError(
            f"{file}: tensor {name!r} has {rows} rows, the vocabulary next to it "
            f"has {size} pieces; put the vocabulary there that belongs to these weights"
        )
    bias = tensors.get(naming.output_bias)
    if bias is not None and bias.shape != (rows,):
        raise InputError(
            f"{file}: tensor {naming.output_bias!r} has the shape {list(bias.shape)}, "
            f"{naming.config} says vocab_size={rows}"
        )
    if rows != size:
        say(f"the vocabulary has {size} pieces: rows {size} to {rows - 1} of the table left out")
    return dataclasses.replace(stated, vocab_size=size)

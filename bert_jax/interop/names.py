"""Hugging Face's names and shapes of tensors, and where ours are: the one place that knows both."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

from bert_jax.config import Model

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


class Family(NamedTuple):
    """A family of theirs: whose names, and whose classes for tasks."""

    words: str  # what it is called
    classes: str  # how the names of its classes begin
    below: Part  # what of pre-training stands below the head of a task that reads [CLS]
    module: str  # what that is called there


FAMILIES = {  # by `family`
    "bert": Family("BERT", "Bert", "pooler", "pooler"),
    "roberta": Family("RoBERTa", "Roberta", "pooler", "pooler"),
    "distilbert": Family("DistilBERT", "DistilBert", "pooler", "pre_classifier"),
    "modern": Family("ModernBERT", "ModernBert", "masked_lm", "head"),
}
# How the names of their classes for tasks end, and our `task.kind` of the same outputs.
TASKS = {
    "ForSequenceClassification": ("classify", "pair", "regress"),
    "ForMultipleChoice": ("choice",),
    "ForTokenClassification": ("tag",),
    "ForQuestionAnswering": ("span",),
}


def _head(of: Family, ending: str) -> tuple[tuple[Part, ...], str]:
    """Returns the parts under the head of a class for a task, and what that head is called."""
    reads_cls = ending in ("ForSequenceClassification", "ForMultipleChoice")
    name = "classifier"
    if of.below == "pooler" and ending == "ForQuestionAnswering":
        name = "qa_outputs"
    elif of.classes == "Roberta" and ending == "ForSequenceClassification":
        name = ROBERTA_HEAD
    # ModernBERT's stands over the head of its masked LM, whatever it reads.
    return ("encoder", of.below) if reads_cls or of.below == "masked_lm" else ("encoder",), name


# RoBERTa's, and what its pooler is called there.
ROBERTA_HEAD, ROBERTA_POOLER = "classifier.out_proj", ("roberta.pooler.", "classifier.")
# Of classes for tasks, what stands under the head, and what that is called.
HEADS = {of.classes + ending: _head(of, ending) for of in FAMILIES.values() for ending in TASKS}
WORD_EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
OUTPUT_BIAS = "cls.predictions.bias"
MODERN_WORD_EMBEDDINGS = "model.embeddings.tok_embeddings.weight"
MODERN_OUTPUT_BIAS, _MODERN_OUTPUT = "decoder.bias", "decoder.weight"

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
    config: str = "config.json"  # the file that says the sizes
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
    yield Tensor(MODERN_WORD_EMBEDDINGS, shape, word, "encoder", is_vocabulary=True)
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
    yield Tensor(MODERN_OUTPUT_BIAS, (cfg.vocab_size,), bias, "masked_lm", is_vocabulary=True)
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
        model="RoBERTa's masked LM",
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
        model="DistilBERT's masked LM",
        prefix="distilbert.",
        encoder=("embeddings.", "transformer."),
        tied={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
        ignored=("distilbert.embeddings.position_ids",),
    ),
    "bert": Naming(
        tensors,
        WORD_EMBEDDINGS,
        OUTPUT_BIAS,
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
        MODERN_WORD_EMBEDDINGS,
        MODERN_OUTPUT_BIAS,
        model="ModernBERT's masked LM",
        prefix="model.",
        encoder=("embeddings.", "layers.", "final_norm."),
        tied={_MODERN_OUTPUT: MODERN_WORD_EMBEDDINGS},
    ),
}

"""Names and shapes of Hugging Face tensors, and their paths in a parameter tree."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

from bert_jax.config import Model

Report = Callable[[str], None]  # prints a line for the user
Part = Literal["encoder", "pooler", "masked_lm", "next_sentence"]

# The parts of the model in each class of transformers.
PARTS: dict[str, tuple[Part, ...]] = {
    "BertForPreTraining": ("encoder", "pooler", "masked_lm", "next_sentence"),
    "BertForMaskedLM": ("encoder", "masked_lm"),
    "BertModel": ("encoder", "pooler"),
    "BertLMHeadModel": ("encoder", "masked_lm"),
    "RobertaForMaskedLM": ("encoder", "masked_lm"),
    "RobertaModel": ("encoder", "pooler"),
    "DistilBertForMaskedLM": ("encoder", "masked_lm"),
    "DistilBertModel": ("encoder",),
    "MPNetForMaskedLM": ("encoder", "masked_lm"),
    "MPNetModel": ("encoder", "pooler"),
    "ModernBertForMaskedLM": ("encoder", "masked_lm"),
    "ModernBertModel": ("encoder",),
    "ModernBertDecoderForCausalLM": ("encoder", "masked_lm"),
    "ElectraForMaskedLM": ("encoder", "masked_lm"),
    "ElectraModel": ("encoder",),
    "ElectraForPreTraining": ("encoder",),
    "ElectraForSequenceClassification": ("encoder",),
    "ElectraForMultipleChoice": ("encoder",),
}
# How the names of heads begin that bert_jax has no counterpart for, by class. `ForPreTraining`
# detects replaced tokens; the others read [CLS] through a layer with GELU.
DROPPED_HEADS = {
    "ElectraForPreTraining": ("discriminator_predictions.",),
    "ElectraForSequenceClassification": ("classifier.",),
    "ElectraForMultipleChoice": ("sequence_summary.", "classifier."),
}


class Family(NamedTuple):
    """A family of models in transformers, with its own names and classes for tasks."""

    label: str  # for messages
    class_prefix: str  # with which the names of its classes begin
    part_below_head: Part  # the pre-trained part between the encoder and a head that reads [CLS]
    module: str  # the name of this part in a class for tasks


FAMILIES = {  # by `family`
    "bert": Family("BERT", "Bert", "pooler", "pooler"),
    "roberta": Family("RoBERTa", "Roberta", "pooler", "pooler"),
    "distilbert": Family("DistilBERT", "DistilBert", "pooler", "pre_classifier"),
    "mpnet": Family("MPNet", "MPNet", "pooler", "pooler"),
    "modern": Family("ModernBERT", "ModernBert", "masked_lm", "head"),
}
# Suffixes of classes for tasks (with a task's head), and the `task.kind`s that each serves.
TASKS = {
    "ForSequenceClassification": ("classify", "pair", "regress", "rank"),
    "ForMultipleChoice": ("choice",),
    "ForTokenClassification": ("tag",),
    "ForQuestionAnswering": ("span",),
}


def _head(group: Family, suffix: str) -> tuple[tuple[Part, ...], str]:
    """Returns the parts below the head of a class for a task, and the name of the head."""
    reads_cls = suffix in ("ForSequenceClassification", "ForMultipleChoice")
    name = "classifier"
    if group.part_below_head == "pooler" and suffix == "ForQuestionAnswering":
        name = "qa_outputs"
    elif group.class_prefix in ("Roberta", "MPNet") and suffix == "ForSequenceClassification":
        name = ROBERTA_HEAD
    if reads_cls or group.part_below_head == "masked_lm":  # all heads of ModernBERT read it
        return ("encoder", group.part_below_head), name
    return ("encoder",), name


ROBERTA_HEAD = "classifier.out_proj"  # RoBERTa's and MPNet's
ROBERTA_HEAD_PREFIX = "classifier."  # of the pooler of a class with this head
# The parts below the head, and the name of the head, for each class for tasks.
HEADS = {f.class_prefix + end: _head(f, end) for f in FAMILIES.values() for end in TASKS}
HEADS |= {
    "ElectraForTokenClassification": (("encoder",), "classifier"),
    "ElectraForQuestionAnswering": (("encoder",), "qa_outputs"),
}
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
# Prefixes of BERT's names, and the prefixes that other families have instead.
_ROBERTA = {
    "bert.": "roberta.",
    "cls.predictions.transform.dense": "lm_head.dense",
    "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
    "cls.predictions.bias": "lm_head.bias",
}
_ELECTRA = {
    "bert.": "electra.",
    "cls.predictions.transform": "generator_predictions",
    "cls.predictions.bias": "generator_lm_head.bias",
}
_DISTILBERT = {
    "bert.encoder.layer": "distilbert.transformer.layer",
    "bert.embeddings": "distilbert.embeddings",
    "cls.predictions.transform.dense": "vocab_transform",
    "cls.predictions.transform.LayerNorm": "vocab_layer_norm",
    "cls.predictions.bias": "vocab_projector.bias",
    "bert.pooler.dense": "pre_classifier",
}
_MPNET = _ROBERTA | {"bert.": "mpnet."}
_MPNET_LAYER = _LAYER | {
    "query": "attention.attn.q",
    "key": "attention.attn.k",
    "value": "attention.attn.v",
    "attention_output": "attention.attn.o",
    "attention_layer_norm": "attention.LayerNorm",
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
# The kernels that ModernBERT concatenates in one tensor, in this order.
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
    **{name: kernels for name, kernels in _MODERN_LAYER.items() if name != "attn.Wqkv"},
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file of weights, or a part of it that is one leaf of the parameter tree."""

    name: str  # in files of classes with heads, where the encoder's tensors have a prefix
    shape: tuple[int, ...]  # in the file
    path: tuple[str, ...]  # of the leaf in the parameter tree
    part: Part
    layer: int | None = None  # index along the leaf's first dimension; None: not stacked
    is_transposed: bool = False  # whether the leaf is the transposed tensor
    is_vocabulary: bool = False  # whether each row is a token; the leaf also has padding rows
    # (i, n): the leaf is the i-th of n equal parts along the tensor's first dimension.
    share: tuple[int, int] = (0, 1)


@dataclasses.dataclass(frozen=True)
class Naming:
    """The names of a model's tensors in files of one kind."""

    tensors: Callable[[Model], Iterator[Tensor]]  # all tensors of a model, the embeddings first
    word_embeddings: str  # name of the word embeddings
    output_bias: str  # name of the output bias, the other tensor with a row for each token
    config_file: str = "config.json"  # the file with the sizes
    model_label: str = "BERT's pre-training model"  # for messages
    prefix: str = ""  # prefix of the encoder's tensors, which files without heads omit
    encoder_prefixes: tuple[str, ...] = ()  # how the encoder's names begin without `prefix`
    # Names of tied copies that a file may hold, and of the original tensors.
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # tensors in files that have no effect

    def canonical(self, name: str) -> str:
        """Returns a name as newer versions write it, with its prefix."""
        if name.startswith(self.encoder_prefixes):
            name = self.prefix + name
        for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
            if name.endswith(f"LayerNorm{old}"):
                name = name.removesuffix(old) + new
        return name


def family(cfg: Model) -> str:
    """Returns the family of a model, one of `FAMILIES`."""
    if cfg.kind != "bert":
        return cfg.kind
    if cfg.relative_position_buckets:
        return "mpnet"
    if cfg.position_offset:
        return "roberta"
    return "bert" if cfg.type_vocab_size else "distilbert"


def bert_tensors(cfg: Model, layer_names: Mapping[str, str] = _LAYER) -> Iterator[Tensor]:
    """Yields all tensors of BertForPreTraining except tied copies."""
    width, inner = cfg.hidden_size, cfg.intermediate_size
    above = ("encoder", "embeddings")
    rows = {
        "position": cfg.position_offset + cfg.max_position_embeddings,
        "segment": cfg.type_vocab_size,
    }
    for table, hf_name in (("position", "position"), ("segment", "token_type")):
        if not rows[table]:
            continue
        name = f"bert.embeddings.{hf_name}_embeddings.weight"
        yield Tensor(name, (rows[table], width), (*above, table, "embedding"), "encoder")
    word = (*above, "word", "embedding")
    shape = (cfg.vocab_size, width)
    yield Tensor(WORD_EMBEDDINGS, shape, word, "encoder", is_vocabulary=True)
    yield from _norm("bert.embeddings.LayerNorm", (*above, "layer_norm"), "encoder", width)
    if buckets := cfg.relative_position_buckets:
        name, shape = "bert.encoder.relative_attention_bias", (buckets, cfg.num_attention_heads)
        path = ("encoder", "relative_positions", "embedding")
        yield Tensor(f"{name}.weight", shape, path, "encoder")
    sizes = {"intermediate": (inner, width), "output": (width, inner)}
    for layer in range(cfg.num_hidden_layers):
        for module, hf_name in layer_names.items():
            name, path = f"bert.encoder.layer.{layer}.{hf_name}", ("encoder", "layers", module)
            if module.endswith("norm"):
                yield from _norm(name, path, "encoder", width, layer)
            else:
                outputs, inputs = sizes.get(module, (width, width))
                yield from _dense(name, path, "encoder", outputs, inputs, layer)
    yield from _dense("bert.pooler.dense", ("pooler",), "pooler", width, width)
    transform = "cls.predictions.transform"
    yield from _dense(f"{transform}.dense", ("masked_lm", "transform"), "masked_lm", width, width)
    yield from _norm(f"{transform}.LayerNorm", ("masked_lm", "layer_norm"), "masked_lm", width)
    bias = ("masked_lm", "output_bias")
    yield Tensor(OUTPUT_BIAS, (cfg.vocab_size,), bias, "masked_lm", is_vocabulary=True)
    yield from _dense("cls.seq_relationship", ("next_sentence",), "next_sentence", 2, width)


def _rename(
    cfg: Model, names: Mapping[str, str], layer_names: Mapping[str, str], parts: tuple[Part, ...]
) -> Iterator[Tensor]:
    for tensor in bert_tensors(cfg, layer_names):
        if tensor.part in parts:
            old, new = next(item for item in names.items() if tensor.name.startswith(item[0]))
            yield dataclasses.replace(tensor, name=new + tensor.name.removeprefix(old))


def _dense(
    name: str,
    path: tuple[str, ...],
    part: Part,
    outputs: int,
    inputs: int,
    layer: int | None = None,
) -> Iterator[Tensor]:
    yield Tensor(
        f"{name}.weight", (outputs, inputs), (*path, "kernel"), part, layer, is_transposed=True
    )
    yield Tensor(f"{name}.bias", (outputs,), (*path, "bias"), part, layer)


def _norm(
    name: str, path: tuple[str, ...], part: Part, width: int, layer: int | None = None
) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (width,), (*path, "scale"), part, layer)
    yield Tensor(f"{name}.bias", (width,), (*path, "bias"), part, layer)


def modern_tensors(cfg: Model) -> Iterator[Tensor]:
    """Yields all tensors of ModernBertForMaskedLM, or its decoder, except tied copies."""
    width, inner = cfg.hidden_size, cfg.intermediate_size
    is_decoder = cfg.direction == "left_to_right"
    layer_names, head = (_DECODER_LAYER, "lm_head") if is_decoder else (_MODERN_LAYER, "head")

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
        if layer > 0:  # the first layer has no norm before its attention
            yield norm(f"{above}.attn_norm", (*path, "attention_layer_norm"), layer)
        yield norm(f"{above}.mlp_norm", (*path, "output_layer_norm"), layer)
        for hf_name, modules in layer_names.items():
            outputs, inputs = sizes.get(hf_name, (width, width))
            for number, module in enumerate(modules):
                yield Tensor(
                    f"{above}.{hf_name}.weight",
                    (outputs * len(modules), inputs),
                    (*path, module, "kernel"),
                    "encoder",
                    layer,
                    is_transposed=True,
                    share=(number, len(modules)),
                )
    yield norm("model.final_norm", ("encoder", "final_layer_norm"))
    transform = ("masked_lm", "transform", "kernel")
    yield Tensor(f"{head}.dense.weight", (width, width), transform, "masked_lm", is_transposed=True)
    yield norm(f"{head}.norm", ("masked_lm", "layer_norm"), None, "masked_lm")
    bias = ("masked_lm", "output_bias")
    yield Tensor(MODERN_OUTPUT_BIAS, (cfg.vocab_size,), bias, "masked_lm", is_vocabulary=True)
    if cfg.output_table == "own":
        table = ("masked_lm", "output", "embedding")
        yield Tensor(_MODERN_OUTPUT, shape, table, "masked_lm", is_vocabulary=True)


_NO_NEXT_SENTENCE: tuple[Part, ...] = ("encoder", "pooler", "masked_lm")

# By `family`, and for models that are imported as BERT by `model_type`.
HUGGING_FACE = {
    "mpnet": Naming(
        lambda cfg: _rename(cfg, _MPNET, _MPNET_LAYER, _NO_NEXT_SENTENCE),
        "mpnet.embeddings.word_embeddings.weight",
        "lm_head.bias",
        model_label="MPNet's masked LM",
        prefix="mpnet.",
        encoder_prefixes=("embeddings.", "encoder.", "pooler."),
        tied={
            "lm_head.decoder.weight": "mpnet.embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        ignored=("mpnet.embeddings.position_ids",),
    ),
    "electra": Naming(
        lambda cfg: _rename(cfg, _ELECTRA, _LAYER, ("encoder", "masked_lm")),
        "electra.embeddings.word_embeddings.weight",
        "generator_lm_head.bias",
        model_label="ELECTRA's masked LM",
        prefix="electra.",
        encoder_prefixes=("embeddings.", "encoder."),
        tied={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
        ignored=("electra.embeddings.position_ids", "electra.embeddings.token_type_ids"),
    ),
    "roberta": Naming(
        lambda cfg: _rename(cfg, _ROBERTA, _LAYER, _NO_NEXT_SENTENCE),
        "roberta.embeddings.word_embeddings.weight",
        "lm_head.bias",
        model_label="RoBERTa's masked LM",
        prefix="roberta.",
        encoder_prefixes=("embeddings.", "encoder.", "pooler."),
        tied={
            "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        ignored=("roberta.embeddings.position_ids", "roberta.embeddings.token_type_ids"),
    ),
    "distilbert": Naming(
        lambda cfg: _rename(cfg, _DISTILBERT, _DISTILBERT_LAYER, _NO_NEXT_SENTENCE),
        "distilbert.embeddings.word_embeddings.weight",
        "vocab_projector.bias",
        model_label="DistilBERT's masked LM",
        prefix="distilbert.",
        encoder_prefixes=("embeddings.", "transformer."),
        tied={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
        ignored=("distilbert.embeddings.position_ids",),
    ),
    "bert": Naming(
        bert_tensors,
        WORD_EMBEDDINGS,
        OUTPUT_BIAS,
        prefix="bert.",
        encoder_prefixes=("embeddings.", "encoder.", "pooler."),
        tied={
            "cls.predictions.decoder.weight": WORD_EMBEDDINGS,
            "cls.predictions.decoder.bias": OUTPUT_BIAS,
        },
        # Constants (0, 1, 2, ... and zeros) that older versions saved with the weights.
        ignored=("bert.embeddings.position_ids", "bert.embeddings.token_type_ids"),
    ),
    "modern": Naming(
        modern_tensors,
        MODERN_WORD_EMBEDDINGS,
        MODERN_OUTPUT_BIAS,
        model_label="ModernBERT's masked LM",
        prefix="model.",
        encoder_prefixes=("embeddings.", "layers.", "final_norm."),
        tied={_MODERN_OUTPUT: MODERN_WORD_EMBEDDINGS},
    ),
}

"""The section of a pre-training that says what is trained: the encoder and its heads."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from bert_jax.config.fields import (
    Code,
    Count,
    FieldRule,
    Positive,
    PositiveCount,
    RequiresValue,
    Section,
    Share,
    Side,
    Wrong,
    at_least,
)

_Base = Annotated[float, FieldRule(lambda base: base > 1, "must be over 1")]
_Scaling = Annotated[
    str,
    FieldRule(
        lambda text: re.fullmatch(r"((linear|yarn:[1-9]\d*):[1-9]\d*(\.\d+)?)?", text),
        "must be linear:FACTOR or yarn:POSITIONS:FACTOR, or empty",
    ),
]

_OF_BERT, _OF_MODERN = RequiresValue("kind", ("bert",)), RequiresValue("kind", ("modern",))
_NOTED = RequiresValue("model.kind", ("modern",))


@dataclass(frozen=True, kw_only=True)
class Model(Section, role="identity", label="model"):
    """The encoder and its two heads (Devlin et al. 2018, section 3 and appendix A.2).

    `modern` is ModernBERT's encoder (Warner et al. 2024): rotary positions, layer norms before
    each part and not after it, gated feed-forward parts, no biases, windows.
    """

    # bert: Devlin et al. 2018; modern: ModernBERT.
    kind: Literal["bert", "modern"] = "bert"

    # An encoder of the experiment file's own instead of the kind's, FILE:FUNCTION:SHA256, which
    # bert_jax.config.own(FUNCTION) gives; empty: the kind's.
    code: Code = ""
    # Pieces of the tokenizer, specials included; one that is trained on too little text has some
    # [unused]. The embedding table is padded to a multiple of 1,024 rows.
    vocab_size: Annotated[Side, at_least(6)] = 30_522
    # Width of the encoder, a multiple of the heads.
    hidden_size: Side = 768
    # Layers of the encoder.
    num_hidden_layers: PositiveCount = 12
    # Attention heads of each layer.
    num_attention_heads: PositiveCount = 12
    # Width of each layer's feed-forward part.
    intermediate_size: Side = 3_072
    # What a token attends to: the text on both sides, or up to itself (data.objective=causal).
    direction: Literal["both", "left_to_right"] = "both"
    # Tokens in the longest row; kind=bert has a position embedding for each of them.
    max_position_embeddings: Annotated[Side, at_least(8)] = 512
    # Number of segments, A and B; RoBERTa's is 1, DistilBERT's 0, which has no segment embeddings,
    # and so has none kind=modern.
    type_vocab_size: Annotated[Count, _OF_BERT] = 2
    # For kind=bert: rows of the position table before that of the first position; RoBERTa's is 2.
    position_offset: Annotated[Count, _OF_BERT] = 0
    # For kind=bert: what layer norms add to the variance; RoBERTa's is 1e-5.
    layer_norm_eps: Annotated[Positive, _OF_BERT] = 1e-12
    # For kind=modern: the first layer and then every so many attend to whole rows; the others to a
    # window around each token.
    global_every: Annotated[PositiveCount, _NOTED] = 3
    # For kind=modern: width of that window in tokens, half on each side of the token (of an odd
    # one the token itself is the rest).
    local_window: Annotated[int, _NOTED] = 128
    # Base of the rotary positions of layers that attend to whole rows.
    global_rotary_base: Annotated[_Base, _NOTED] = 160_000.0
    # Base of the rotary positions of layers with a window.
    local_rotary_base: Annotated[_Base, _NOTED] = 10_000.0
    # How the rotary positions of layers that attend to whole rows are stretched for rows longer
    # than those they were learned on: linear:FACTOR, or yarn:POSITIONS:FACTOR, the first being the
    # length of those (Peng et al. 2023); empty: not at all.
    global_rotary_scaling: Annotated[_Scaling, _NOTED] = ""
    # The same of layers with a window.
    local_rotary_scaling: Annotated[_Scaling, _NOTED] = ""
    # For kind=modern: whether the output's weights are the word embeddings, or a table of its own.
    output_table: Annotated[Literal["tied", "own"], _OF_MODERN] = "tied"
    # Activation of the feed-forward part; gelu_tanh is the approximation by tanh.
    hidden_act: Literal["gelu", "gelu_tanh"] = "gelu"
    # Dropout of embeddings and of what each layer adds.
    hidden_dropout_prob: Share = 0.1
    # Dropout of attention probabilities.
    attention_probs_dropout_prob: Share = 0.1
    # Standard deviation of fresh weights, a normal distribution cut off at twice it.
    initializer_range: Positive = 0.02
    # Fresh layers as the kind's reference draws them, or scaled: by 1/sqrt(hidden_size), and what a
    # layer adds begins as zero.
    initialization: Literal["reference", "scaled"] = "reference"
    # Type of activations and matrix products; parameters, sums and losses stay float32.
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    # threefry8: noise is a function of the row alone, the same on any mesh; rbg16: fast on TPU,
    # a function of the mesh; in_kernel: on TPUs within kernels, which is fastest there, a function
    # of the mesh and of the kind of TPU; elsewhere it is rbg16.
    dropout_rng: Literal["threefry8", "rbg16", "in_kernel"] = "threefry8"

    def _wrong(self) -> Iterator[Wrong]:
        if self.hidden_size % self.num_attention_heads:
            yield "num_attention_heads", f"must divide model.hidden_size={self.hidden_size}"
        steps = 256 if self.dropout_rng == "threefry8" else 65_536
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            share = getattr(self, name)
            if share > 0 and not 0 < round(share * steps) < steps:
                yield name, f"model.dropout_rng={self.dropout_rng} draws in steps of 1/{steps}"
        if self.kind == "modern":
            yield from self._wrong_of_modern()

    def _wrong_of_modern(self) -> Iterator[Wrong]:
        every, window, most = self.global_every, self.local_window, self.max_position_embeddings
        width = self.hidden_size // self.num_attention_heads
        if width % 2:
            yield "num_attention_heads", f"heads are {width} wide, and must be even"
        if every == 1:
            for name in ("local_window", "local_rotary_base", "local_rotary_scaling"):
                if not self.is_default(name):
                    yield name, "has no meaning with model.global_every=1"
        elif window < 2:
            yield "local_window", "must be at least 2, half of it on each side"
        elif window > most:
            yield "local_window", f"is over model.max_position_embeddings={most}"

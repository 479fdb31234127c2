"""The section `model` of a pre-training: the encoder and its heads."""

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
    Problem,
    RequiresValue,
    Section,
    Share,
    Side,
    minimum,
)

_RotaryBase = Annotated[float, FieldRule(lambda base: base > 1, "must be over 1")]
_Scaling = Annotated[
    str,
    FieldRule(
        lambda text: re.fullmatch(r"((linear|yarn:[1-9]\d*):[1-9]\d*(\.\d+)?)?", text),
        "must be linear:FACTOR or yarn:POSITIONS:FACTOR, or empty",
    ),
]

_BERT_ONLY, _MODERN_ONLY = RequiresValue("kind", ("bert",)), RequiresValue("kind", ("modern",))
_MODERN_NOTED = RequiresValue("model.kind", ("modern",))


@dataclass(frozen=True, kw_only=True)
class Model(Section, role="identity", label="model"):
    """The encoder and its two heads (Devlin et al. 2018, section 3 and appendix A.2).

    `modern` is ModernBERT's encoder (Warner et al. 2024): rotary positions, pre-layer-norm, gated
    feed-forward blocks, no biases, and windowed attention in most layers.
    """

    # bert: Devlin et al. 2018; modern: ModernBERT.
    kind: Literal["bert", "modern"] = "bert"

    # A custom encoder of the experiment file, which replaces that of model.kind:
    # FILE:FUNCTION:SHA256, as bert_jax.config.own(FUNCTION) returns it; empty: none.
    code: Code = ""
    # Number of tokens in the vocabulary, including special ones. If the text is too small for so
    # many, [unused] tokens fill the vocabulary. The embedding table is padded to a multiple of
    # 1,024 rows.
    vocab_size: Annotated[Side, minimum(6)] = 30_522
    # Width of the encoder, a multiple of model.num_attention_heads.
    hidden_size: Side = 768
    # Number of layers of the encoder.
    num_hidden_layers: PositiveCount = 12
    # Number of attention heads in each layer.
    num_attention_heads: PositiveCount = 12
    # Width of each layer's feed-forward block.
    intermediate_size: Side = 3_072
    # What a token attends to: the text on both sides, or up to itself (data.objective=causal).
    direction: Literal["both", "left_to_right"] = "both"
    # Length of the longest row; kind=bert has a position embedding for each of its positions.
    max_position_embeddings: Annotated[Side, minimum(8)] = 512
    # Number of segments (2: A and B; RoBERTa's is 1). With 0, as in DistilBERT, and in kind=modern,
    # there are no segment embeddings.
    type_vocab_size: Annotated[Count, _BERT_ONLY] = 2
    # For kind=bert: index of the first position in the position table; RoBERTa's is 2.
    position_offset: Annotated[Count, _BERT_ONLY] = 0
    # For kind=bert: number of buckets of distances between tokens, each with a learned bias of the
    # attention scores of each head, which all layers share; MPNet's is 32; 0: no such bias.
    relative_position_buckets: Annotated[Count, _BERT_ONLY] = 0
    # For kind=bert: epsilon of layer norms, added to the variance; RoBERTa's is 1e-5.
    layer_norm_eps: Annotated[Positive, _BERT_ONLY] = 1e-12
    # For kind=modern: the first layer and then every n-th are global layers, which attend to whole
    # rows; the others are local and attend to a window around each token.
    global_every: Annotated[PositiveCount, _MODERN_NOTED] = 3
    # For kind=modern: in local layers a token attends to itself and to local_window // 2 tokens on
    # each side.
    local_window: Annotated[int, _MODERN_NOTED] = 128
    # Base of the rotary positions of global layers.
    global_rotary_base: Annotated[_RotaryBase, _MODERN_NOTED] = 160_000.0
    # Base of the rotary positions of local layers.
    local_rotary_base: Annotated[_RotaryBase, _MODERN_NOTED] = 10_000.0
    # How the rotary positions of global layers are stretched for rows longer than those in
    # training: linear:FACTOR, or yarn:POSITIONS:FACTOR, where POSITIONS is the length in training
    # (Peng et al. 2023); empty: not at all.
    global_rotary_scaling: Annotated[_Scaling, _MODERN_NOTED] = ""
    # The same for local layers.
    local_rotary_scaling: Annotated[_Scaling, _MODERN_NOTED] = ""
    # For kind=modern: whether the output weights are the word embeddings or a separate table.
    output_table: Annotated[Literal["tied", "own"], _MODERN_ONLY] = "tied"
    # Activation of the feed-forward block; gelu_tanh is the tanh approximation.
    hidden_act: Literal["gelu", "gelu_tanh"] = "gelu"
    # Dropout of embeddings and of each block's output.
    hidden_dropout_prob: Share = 0.1
    # Dropout of attention probabilities.
    attention_probs_dropout_prob: Share = 0.1
    # Standard deviation of initial weights (normal, truncated at two standard deviations).
    initializer_range: Positive = 0.02
    # Initial weights of layers. reference: as in the original code of model.kind; scaled: standard
    # deviation 1/sqrt(hidden_size), and zeros for projections that write to the residual stream.
    initialization: Literal["reference", "scaled"] = "reference"
    # Type of activations and matrix products; parameters, sums and losses stay float32.
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    # Random bits of dropout, 8 or 16 for each element. threefry8: depend only on the row, the same
    # on any mesh; rbg16: fast on TPUs, depend on the mesh; in_kernel: generated in TPU kernels, the
    # fastest there, depend on the mesh and the kind of TPU; elsewhere the same as rbg16.
    dropout_rng: Literal["threefry8", "rbg16", "in_kernel"] = "threefry8"

    def _problems(self) -> Iterator[Problem]:
        if self.hidden_size % self.num_attention_heads:
            yield "num_attention_heads", f"must divide model.hidden_size={self.hidden_size}"
        levels = 256 if self.dropout_rng == "threefry8" else 65_536
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            share = getattr(self, name)
            if share > 0 and not 0 < round(share * levels) < levels:
                why = f"model.dropout_rng={self.dropout_rng} has a resolution of 1/{levels}"
                yield name, f"rounds to {round(share)}: {why}"
        if self.relative_position_buckets % 4:
            yield "relative_position_buckets", "must be a multiple of 4"
        if self.relative_position_buckets and self.direction != "both":
            yield "relative_position_buckets", f"needs model.direction=both, not {self.direction}"
        if self.kind == "modern":
            yield from self._modern_problems()

    def _modern_problems(self) -> Iterator[Problem]:
        window, longest = self.local_window, self.max_position_embeddings
        width = self.hidden_size // self.num_attention_heads
        if width % 2:
            yield "num_attention_heads", f"heads are {width} wide; the width must be even"
        if self.global_every == 1:
            for name in ("local_window", "local_rotary_base", "local_rotary_scaling"):
                if not self.is_default(name):
                    yield name, "has no meaning with model.global_every=1; remove it"
        elif window < 2:
            yield "local_window", "must be at least 2, half of it on each side"
        elif window > longest:
            yield "local_window", f"is over model.max_position_embeddings={longest}"

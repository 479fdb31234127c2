"""The sections of a fine-tuning that say how vectors of texts are learned."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from bert_jax.config.fields import (
    Count,
    FieldRule,
    Positive,
    PositiveCount,
    Problem,
    RequiresValue,
    Section,
    Share,
    minimum,
)

_Dimensions = Annotated[
    tuple[int, ...],
    FieldRule(lambda sizes: list(sizes) == sorted({*sizes}), "must grow, none twice"),
    FieldRule(lambda sizes: all(size > 0 for size in sizes), "each must be at least 1"),
]
_CONTRASTIVE_ONLY, _COSINE_ONLY, _DISTIL_ONLY = (
    RequiresValue("loss", (x,)) for x in ("contrastive", "cosine", "distil")
)


@dataclass(frozen=True, kw_only=True)
class Vectors(Section, role="identity", label="vectors"):
    """The vectors of texts that a `similar` task learns (Reimers and Gurevych 2019).

    `contrastive` learns to find the second text of a pair among all texts of the step, and the
    first one given the second. `cosine` learns the score of a pair, `distil` a teacher's vectors.
    """

    # The mean over all tokens, or the vector of the first (cls) or last token; empty: as the base
    # declares, else mean.
    pooling: Literal["", "mean", "cls", "last"] = ""
    # The loss on the vectors.
    loss: Literal["contrastive", "cosine", "distil"] = "contrastive"
    # For contrastive: temperature, the divisor of cosines.
    temperature: Annotated[Positive, _CONTRASTIVE_ONLY] = 0.05
    # For contrastive: whether the temperature is fixed or learned.
    temperature_is: Annotated[Literal["fixed", "learned"], _CONTRASTIVE_ONLY] = "fixed"
    # Matryoshka (Kusupati et al. 2022): the loss is the sum over vectors truncated to these
    # dimensions; empty: whole vectors only.
    dimensions: Annotated[_Dimensions, RequiresValue("loss", ("contrastive", "cosine"))] = ()
    # For cosine: the lowest and the highest score, which correspond to cosines of 0 and 1.
    score_range: Annotated[tuple[float, ...], _COSINE_ONLY] = (0.0, 1.0)
    # For distil: the base or run whose vectors the model learns to reproduce, or a .npz file with
    # one vector for each training example, as `embed` writes it.
    teacher: Annotated[str, _DISTIL_ONLY] = ""
    # For distil: a linear layer from the vectors to the teacher's width, which is discarded after
    # training; needed if the widths differ.
    projection: Annotated[Literal["none", "linear"], _DISTIL_ONLY] = "none"
    # For distil: weight of the loss that makes the cosines between all texts of a step equal the
    # teacher's.
    geometry: Annotated[float, minimum(0), _DISTIL_ONLY] = 0.0

    def _problems(self) -> Iterator[Problem]:
        low_high = self.score_range
        if len(low_high) != 2 or low_high[0] >= low_high[1]:
            yield "score_range", "give the lowest and the highest score, e.g. (0, 5)"
        if self.loss == "distil" and not self.teacher:
            yield "teacher", "vectors.loss=distil: name a base, a run or a .npz file of vectors"


_SCALED = RequiresValue("loss", ("contrastive", "kl_divergence"))
# Losses of the kinds that score texts for a query.
RetrieverLoss = Literal["contrastive", "margin_mse", "kl_divergence"]


@dataclass(frozen=True, kw_only=True)
class SparseVectors(Section, role="identity", label="sparse"):
    """The vectors that a `sparse` task learns, with a weight for each token of the vocabulary.

    Sources are Formal et al. 2021 (SPLADE v2), and Paria et al. 2020 for the penalty, which is
    called FLOPS. The defaults are those of sentence-transformers.
    """

    # contrastive: the first text of a query is to have the highest score among all texts of the
    # step. margin_mse, kl_divergence: the scores of task.label_column are learned, by their
    # differences to the first text's, or by their distribution over the texts of a query.
    loss: RetrieverLoss = "contrastive"
    # For contrastive and kl_divergence: temperature, the divisor of scores.
    temperature: Annotated[Positive, _SCALED] = 1.0
    # Weight of the penalty on the vectors of queries. A larger one gives vectors with fewer tokens.
    query_penalty: Annotated[float, minimum(0)] = 5e-5
    # Weight of the penalty on the vectors of documents.
    document_penalty: Annotated[float, minimum(0)] = 3e-5
    # Share of all steps in which these weights rise from 0, with the square of the steps.
    penalty_warmup: Share = 1 / 3
    # At the start, the share of the training texts in whose vectors a token has a weight above 0.
    # The biases of the masked LM head are shifted so that it is the same for each token of the
    # vocabulary, unless the vectors of the base are already as sparse. 0: they are not shifted.
    initial_share: Share = 0.02


@dataclass(frozen=True, kw_only=True)
class MultiVectors(Section, role="identity", label="multi_vector"):
    """The vectors of tokens that a `multi_vector` task learns (ColBERT, Khattab and Zaharia 2020).

    The score of a text is a sum over the tokens of the query: for each the largest cosine with a
    token of the text.
    """

    # As sparse.loss.
    loss: RetrieverLoss = "contrastive"
    # For contrastive and kl_divergence: temperature, the divisor of scores.
    temperature: Annotated[Positive, _SCALED] = 1.0
    # Numbers in the vector of a token.
    width: PositiveCount = 128
    # Number of tokens of each query: longer ones are truncated, shorter ones are padded with
    # [MASK]; 0: queries keep their length.
    query_length: Count = 32
    # Tokens of documents for which no vector is kept.
    skipped_tokens: Literal["punctuation", "none"] = "punctuation"

"""The section `data` of a pre-training: how token ids become rows, and what is predicted."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bert_jax.config.fields import (
    Code,
    Count,
    PositiveCount,
    Problem,
    RowLength,
    Section,
    Share,
    WholeShare,
)


class ObjectiveTraits(NamedTuple):
    """The form of the rows and the direction of the encoder that an objective needs."""

    row_kind: Literal["pairs", "swapped_pairs", "sentences"]  # what a row consists of
    # Positions of a row without a target, if all others have one; 0: masked tokens are the targets.
    unpredicted: int
    direction: Literal["both", "left_to_right"]  # what tokens attend to
    allows_document_attention: bool  # data.attention=per_document


OBJECTIVES = {
    "mlm_nsp": ObjectiveTraits("pairs", 0, "both", False),
    "mlm_sop": ObjectiveTraits("swapped_pairs", 0, "both", False),
    "mlm": ObjectiveTraits("sentences", 0, "both", True),
    "causal": ObjectiveTraits("sentences", 1, "left_to_right", True),
}


@dataclass(frozen=True, kw_only=True)
class Data(Section, role="identity", label="data"):
    """The way from token ids to rows (Devlin et al. 2018, section 3.1 and appendix A.1)."""

    # What is learned. mlm_nsp: masked tokens of pairs, and whether B follows A; mlm_sop: masked
    # tokens of adjacent segments, and whether they were swapped (ALBERT); mlm: masked tokens only,
    # in rows of full sentences that continue from one document to the next (RoBERTa); causal: the
    # next token at every position of such rows (GPT).
    objective: Literal["mlm_nsp", "mlm_sop", "mlm", "causal"] = "mlm_nsp"
    # A custom objective of the experiment file that replaces data.objective on the same rows:
    # FILE:FUNCTION:SHA256, as bert_jax.config.own(FUNCTION) returns it; empty: none.
    code: Code = ""
    # In rows of full sentences: whether a token attends to all documents of its row, or only to its
    # own, in which case positions start at 0 in each document.
    attention: Literal["whole_row", "per_document"] = "whole_row"
    # Share of rows that have a random shorter length; only for objectives with pairs.
    short_seq_prob: Share = 0.1
    # Share of a row's tokens that are to be predicted.
    masked_lm_prob: Share = 0.15
    # data.masked_lm_prob changes linearly to this share at the last step; 0: it is constant.
    # In held-out rows always 15 % of the tokens are predicted, and 80 % of these are [MASK].
    final_masked_lm_prob: Share = 0.0
    # Share of the tokens to be predicted that become [MASK].
    mask_share: WholeShare = 0.8
    # Share of the tokens to be predicted that become a random token; the rest is unchanged.
    random_share: WholeShare = 0.1
    # What is masked at once: single tokens, all tokens of a word, or up to ten words (SpanBERT's
    # spans: geometric with p 0.2, each replaced as a whole).
    masking: Literal["piece", "whole_word", "span"] = "piece"
    # 0: new pairs and masks in every epoch; n: the first n epochs are repeated.
    dupe_factor: Count = 0
    # Length of the held-out rows.
    eval_sequence_length: RowLength = 128
    # Maximum number of masked tokens in a held-out row.
    eval_max_predictions_per_seq: PositiveCount = 20
    # Number of held-out rows that every evaluation scores, always the same; at most all.
    eval_rows: PositiveCount = 10_000
    # Seed of the held-out rows and their masks. It is independent of the run's seed, so runs with
    # different seeds are scored on the same rows.
    eval_seed: Count = 0

    def _problems(self) -> Iterator[Problem]:
        if self.mask_share + self.random_share > 1.0:
            yield "random_share", f"is over 1 together with data.mask_share={self.mask_share}"
        if (
            self.attention != "whole_row"
            and not OBJECTIVES[self.objective].allows_document_attention
        ):
            yield "attention", f"data.objective={self.objective} needs whole rows; remove it"
        if self.dupe_factor and self.final_masked_lm_prob:
            yield "final_masked_lm_prob", "repeated masks cannot change; set data.dupe_factor=0"

    @property
    def row_kind(self) -> Literal["pairs", "swapped_pairs", "sentences"]:
        """Returns what a row consists of."""
        return OBJECTIVES[self.objective].row_kind

    @property
    def is_masked(self) -> bool:
        """Returns whether masked tokens are predicted, rather than the tokens of all positions."""
        return not self.unpredicted

    @property
    def unpredicted(self) -> int:
        """Returns how many positions of a row have no target, see `ObjectiveTraits`."""
        return OBJECTIVES[self.objective].unpredicted

    @property
    def largest_masked_share(self) -> float:
        """Returns the largest share of a row's tokens that any step predicts."""
        return max(self.masked_lm_prob, self.final_masked_lm_prob)

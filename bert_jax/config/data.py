"""The section of a pre-training that says how ids become examples, and what is learned of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bert_jax.config.fields import (
    Code,
    Count,
    PositiveCount,
    RowLength,
    Section,
    Share,
    WholeShare,
    Wrong,
)


class Objective(NamedTuple):
    """The rows and the encoder that go with a word of `data.objective`."""

    units: Literal["pairs", "swapped_pairs", "sentences"]  # what a row is made of
    unpredicted: int  # places of a row that are never predicted; 0: a share of them is masked
    direction: Literal["both", "left_to_right"]  # what they attend to
    cuts: bool  # whether tokens may attend to their own documents alone


OBJECTIVES = {
    "mlm_nsp": Objective("pairs", 0, "both", False),
    "mlm_sop": Objective("swapped_pairs", 0, "both", False),
    "mlm": Objective("sentences", 0, "both", True),
    "causal": Objective("sentences", 1, "left_to_right", True),
}


@dataclass(frozen=True, kw_only=True)
class Data(Section, role="identity", label="data"):
    """The way from ids to examples (Devlin et al. 2018, section 3.1 and appendix A.1)."""

    # What is learned. mlm_nsp: masked pieces of pairs, and whether B follows A; mlm_sop: masked
    # pieces of pairs that follow each other, and whether they were swapped (ALBERT); mlm: masked
    # pieces alone, of rows of full sentences that go on from one document to the next (RoBERTa);
    # causal: of such rows the next piece at every place, from what is left of it (GPT).
    objective: Literal["mlm_nsp", "mlm_sop", "mlm", "causal"] = "mlm_nsp"
    # Something else that is learned of the same rows: an objective of the experiment file's own,
    # FILE:FUNCTION:SHA256, which bert_jax.config.own(FUNCTION) gives; empty: nothing else.
    code: Code = ""
    # Of rows of full sentences: whether a token attends to all documents of its row, or to its own
    # alone, in which positions begin at 0 again, as they do for a text by itself.
    attention: Literal["whole_row", "per_document"] = "whole_row"
    # Share of examples that are made of a random, shorter length; only of objectives with pairs.
    short_seq_prob: Share = 0.1
    # Share of an example's tokens that are to be predicted.
    masked_lm_prob: Share = 0.15
    # data.masked_lm_prob moves in even steps to this share at the last step; 0: it stays. Held-out
    # rows are masked alike whatever is set here: 15 % of the pieces, of which 80 % become [MASK].
    final_masked_lm_prob: Share = 0.0
    # Of the tokens to be predicted, the share that becomes [MASK].
    mask_share: WholeShare = 0.8
    # Of the tokens to be predicted, the share that becomes a random piece; the rest stays as it is.
    random_share: WholeShare = 0.1
    # What is masked at once: single pieces, all pieces of a word, or up to ten words (SpanBERT's
    # spans: geometric with p 0.2, each replaced as a whole).
    masking: Literal["piece", "whole_word", "span"] = "piece"
    # 0: new pairs and masks in every epoch; n: those of the first n epochs again and again.
    dupe_factor: Count = 0
    # Length of the held-out rows.
    eval_sequence_length: RowLength = 128
    # The most masked tokens that a held-out row may have.
    eval_max_predictions_per_seq: PositiveCount = 20
    # Held-out rows that are scored, the same at every evaluation; fewer if there are fewer.
    eval_rows: PositiveCount = 10_000
    # Seed that draws held-out rows and their masks, whatever the run's own, so that runs of several
    # seeds are scored on the same.
    eval_seed: Count = 0

    def _wrong(self) -> Iterator[Wrong]:
        if self.mask_share + self.random_share > 1.0:
            yield "random_share", f"is over 1 together with data.mask_share={self.mask_share}"
        if self.attention != "whole_row" and not OBJECTIVES[self.objective].cuts:
            yield "attention", f"data.objective={self.objective} reads rows whole; remove it"
        if self.dupe_factor and self.final_masked_lm_prob:
            yield "final_masked_lm_prob", "repeated masks cannot change; set data.dupe_factor=0"

    @property
    def units(self) -> Literal["pairs", "swapped_pairs", "sentences"]:
        """Returns what a row is made of."""
        return OBJECTIVES[self.objective].units

    @property
    def unpredicted(self) -> int:
        """Returns how many places of a row are never predicted; 0: a share of them is masked."""
        return OBJECTIVES[self.objective].unpredicted

    @property
    def largest_masked_share(self) -> float:
        """Returns the largest share of a row's tokens that any step predicts."""
        return max(self.masked_lm_prob, self.final_masked_lm_prob)

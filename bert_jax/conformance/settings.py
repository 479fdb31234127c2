"""How google-research/bert is asked to make instances."""

import dataclasses
from typing import Annotated

from bert_jax.config import Data
from bert_jax.config.fields import PositiveCount, Section, Share, at_least

# [CLS] A [SEP] B [SEP] with a token in each.
_SHORTEST = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Section):
    """The reference's flags, under the names that its golden files carry."""

    role = "identity"
    label = "instances"

    max_seq_length: Annotated[int, at_least(_SHORTEST)] = 128
    max_predictions_per_seq: PositiveCount = 20
    dupe_factor: PositiveCount = 10
    whole_word_mask: bool = False
    short_seq_prob: Share = 0.1
    masked_lm_prob: Share = 0.15
    random_seed: int = 12345
    do_lower_case: bool = True

    @property
    def data(self) -> Data:
        """Returns these settings as a section of an experiment."""
        return Data(
            short_seq_prob=self.short_seq_prob,
            masked_lm_prob=self.masked_lm_prob,
            masking="whole_word" if self.whole_word_mask else "piece",
        )

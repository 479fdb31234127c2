"""How google-research/bert is asked to make instances."""

import dataclasses

from bert_jax.config import Data
from bert_jax.config.fields import Section

# [CLS] A [SEP] B [SEP] with a token in each.
_SHORTEST = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Section):
    """The reference's flags, under the names that its golden files carry."""

    kind = "identity"
    label = "instances"

    max_seq_length: int = 128
    max_predictions_per_seq: int = 20
    dupe_factor: int = 10
    whole_word_mask: bool = False
    short_seq_prob: float = 0.1
    masked_lm_prob: float = 0.15
    random_seed: int = 12345
    do_lower_case: bool = True

    def _validate(self) -> None:
        self._require_at_least(_SHORTEST, "max_seq_length")
        self._require_at_least(1, "max_predictions_per_seq", "dupe_factor")
        self._require_share("short_seq_prob", "masked_lm_prob")

    @property
    def data(self) -> Data:
        """Returns these settings as a section of an experiment."""
        return Data(
            short_seq_prob=self.short_seq_prob,
            masked_lm_prob=self.masked_lm_prob,
            masking="whole_word" if self.whole_word_mask else "piece",
        )

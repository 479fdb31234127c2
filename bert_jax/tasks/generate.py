"""One text to another: `generate` (Rothe et al. 2020).

A target begins with [CLS] and ends with [SEP]. It is learned by teacher forcing, a label for each
of its pieces, and written by `model.decoder.search`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from bert_jax.model import decoder, layers
from bert_jax.model.encoder import Loop
from bert_jax.tasks import scores
from bert_jax.tasks.examples import Sentence
from bert_jax.tasks.objective import Batch, TaskObjective, Tree
from bert_jax.tasks.rows import (
    LENGTH_STEP,
    Answer,
    Outputs,
    Rows,
    ScoredExample,
    Scores,
    TaskKind,
    padded,
)
from bert_jax.tasks.rows import Batch as HostBatch
from bert_jax.text.tokenizer import joined
from bert_jax.training import sharding

# What of a batch is read before anything is written.
SOURCE = ("input_ids", "segment_ids", "input_mask")


@dataclasses.dataclass
class TargetRows(Rows):
    """Rows of ids, and a text each."""

    # Of each row int32 [n], [CLS] and [SEP] around it; none if there are no labels.
    targets: list[np.ndarray] = dataclasses.field(default_factory=list)
    target_limit: int = 0  # no target is longer without [CLS], nor is padded further
    # How many sources, and how many targets, were longer than they may be.
    cut: tuple[int, int] = (0, 0)

    def batch_like(self, which: np.ndarray, like: np.ndarray, pad_id: int) -> HostBatch:
        """Returns some rows, padded as all of `like` need it.

        Returns:
          What `Rows.batch` does; with targets `decoder_ids`, `targets`, the piece behind each,
          int32 [B, T], and `target_weights` float32 [B, T], 0 behind the last.
        """
        batch = super().batch_like(which, like, pad_id)
        if self.targets:
            longest = max(len(self.targets[i]) for i in like) - 1
            length = min(-(-longest // LENGTH_STEP) * LENGTH_STEP, self.target_limit)
            there = [self.targets[i] for i in which]
            batch["decoder_ids"] = padded([t[:-1] for t in there], length, pad_id, np.int32)
            batch["targets"] = padded([t[1:] for t in there], length, pad_id, np.int32)
            lengths = np.array([len(target) - 1 for target in there])
            batch["target_weights"] = (np.arange(length) < lengths[:, None]).astype(np.float32)
        return batch


class Generate(TaskKind):
    """The kind of `generate`; there are no labels, and outputs are ids."""

    reads, column = "decoder", "generated"

    def rows(self, examples: Sequence[Sentence]) -> TargetRows:
        """Returns a row of each source, and its target; both lose what is too long at the end."""
        room, target_room = self._task.max_sequence_length - 2, self._task.max_target_length - 1
        sources = [self.encode(example.texts[0], example.place) for example in examples]
        ids = [joined(self._tokenizer, pieces[:room], None)[0] for pieces in sources]
        labelled = [example for example in examples if example.label is not None]
        targets = [self.encode(str(example.label), example.place) for example in labelled]
        return TargetRows(
            ids,
            np.array([len(row) for row in ids], np.int32),
            {},
            {},
            [],
            self._task.max_sequence_length,
            targets=[joined(self._tokenizer, t[:target_room], None)[0] for t in targets],
            target_limit=self._task.max_target_length,
            cut=(sum(len(s) > room for s in sources), sum(len(t) > target_room for t in targets)),
        )

    def answers(self, outputs: Outputs, rows: Rows, examples: Sequence[Sentence]) -> list[Answer]:
        """Returns for each example the text that is `generated`.

        Outputs of a row are its ids, int32 [T], [SEP] from the end on.
        """
        del rows, examples
        tok = self._tokenizer
        special = {tok.pad_id, tok.cls_id, tok.mask_id}
        answers = []
        for ids in outputs:
            ends = np.flatnonzero(ids == tok.sep_id)
            written = ids[: ends[0]] if len(ends) else ids
            kept = [int(piece) for piece in written if int(piece) not in special]
            answers.append({"generated": tok.decode(kept)})
        return answers

    def scores(self, outputs: Outputs, rows: Rows, examples: Sequence[Sentence]) -> Scores:
        """Returns chrF and BLEU of all texts together."""
        written = [answer["generated"] for answer in self.answers(outputs, rows, examples)]
        return scores.of_texts([str(example.label) for example in examples], written)

    def judged(self, answer: Answer, example: Sentence) -> ScoredExample:
        """Returns both texts, and how much of chrF is missing."""
        truth, written = str(example.label), answer["generated"]
        off = 1 - scores.of_texts([truth], [written])["chrf"]
        return ScoredExample([truth], [written], off)


@dataclasses.dataclass(frozen=True)
class GenerateObjective(TaskObjective):
    """The `Objective` of texts that are written: an encoder and a decoder, all of which learn."""

    first: int = 0  # the pieces that a text begins and ends with
    last: int = 0
    length: int = 0  # of a text at most, in pieces

    @property
    def rules(self) -> Sequence[sharding.Rule]:
        """Returns where the parameters are cut."""
        return sharding.generator_rules(self.model)

    def init_params(self, key: jax.Array) -> Tree:
        """Returns fresh parameters; all but the cross-attention is to be replaced."""
        return decoder.init_params(self.model, key)

    def logits(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> jax.Array:
        """Returns scores of each next piece of the targets: float32 [B, T, V]."""
        del fixed
        generator = decoder.merge_params(self.model, params)
        return decoder.target_logits(generator, self.model, batch, noise, loop)

    def texts(
        self, beams: int, params: Any, fixed: Any, batch: Batch, noise: None, loop: Loop
    ) -> jax.Array:
        """Returns what is written by a search with so many beams: int32 [B, length]."""
        del fixed, noise
        generator = decoder.merge_params(self.model, params)
        ends = self.length, self.first, self.last
        return decoder.search(generator, self.model, batch, loop, beams, *ends)[0]

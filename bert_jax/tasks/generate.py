"""Text generation with an encoder and a decoder: `generate` (Rothe et al. 2020).

A target begins with [CLS] and ends with [SEP]. Training uses teacher forcing with a label for each
token of the target; `model.decoder.search` generates texts.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from bert_jax.checkpoints.base import Base
from bert_jax.config import Finetuning
from bert_jax.errors import InputError
from bert_jax.model import decoder, layers
from bert_jax.model.encoder import Loop
from bert_jax.tasks import scores
from bert_jax.tasks.examples import Sentence
from bert_jax.tasks.rows import Batch as HostBatch
from bert_jax.tasks.rows import TaskRows, pad_rows, padded_length
from bert_jax.tasks.task_kind import Answer, Answers, ComparedAnswer, Outputs, Scores, TaskKind
from bert_jax.tasks.task_objective import Batch, TaskObjective, Tree
from bert_jax.text.tokenizer import add_special_tokens
from bert_jax.training import sharding


@dataclasses.dataclass
class TargetRows(TaskRows):
    """Rows of token ids, each with a target text."""

    # For each row int32 [n], with [CLS] and [SEP]; empty if the examples have no labels.
    targets: list[np.ndarray] = dataclasses.field(default_factory=list)
    target_limit: int = 0  # maximum padded length of `decoder_ids` and `targets`

    def batch_like(self, indices: np.ndarray, like: np.ndarray, pad_id: int) -> HostBatch:
        """Returns the batch of some rows, with the padded length of a batch of the rows `like`.

        Returns:
          The arrays of `TaskRows.batch`. With targets also `decoder_ids`, int32 [B, T]; `targets`,
          the next token of each; and `target_weights` float32 [B, T], 0 for padding.
        """
        batch = super().batch_like(indices, like, pad_id)
        if self.targets:
            longest = max(len(self.targets[i]) for i in like) - 1
            length = padded_length(longest, self.target_limit)
            targets = [self.targets[i] for i in indices]
            batch["decoder_ids"] = pad_rows([t[:-1] for t in targets], length, pad_id, np.int32)
            batch["targets"] = pad_rows([t[1:] for t in targets], length, pad_id, np.int32)
            lengths = np.array([len(target) - 1 for target in targets])
            batch["target_weights"] = (np.arange(length) < lengths[:, None]).astype(np.float32)
        return batch


@dataclasses.dataclass(frozen=True)
class GenerateObjective(TaskObjective):
    """The `Objective` of text generation: an encoder and a decoder, both trainable."""

    first: int = 0  # the token that starts a text
    last: int = 0  # the token that ends a text
    length: int = 0  # maximum number of tokens of a text
    beams: int = 1  # of beam search

    @property
    def rules(self) -> Sequence[sharding.Rule]:
        return sharding.generator_rules(self.model)

    def init_params(self, key: jax.Array) -> Tree:
        """Returns fresh parameters; the caller replaces all but the cross-attention."""
        return decoder.init_params(self.model, key)

    def logits(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> jax.Array:
        """Returns the logits of each next token of the targets: float32 [B, T, V]."""
        # `merge_params` builds the module of encoder and decoder from its parameters.
        generator = decoder.merge_params(self.model, params)
        return decoder.target_logits(generator, batch, noise, loop)

    def predict(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> jax.Array:
        """Returns the token ids of texts that beam search finds, int32 [B, length]."""
        generator = decoder.merge_params(self.model, params)
        settings = decoder.SearchSettings(self.beams, self.length, self.first, self.last)
        return decoder.search(generator, batch, loop, settings)[0]


class Generate(TaskKind):
    """The kind `generate`: the label of an example is a text, and outputs are token ids."""

    reads, answer_field = "decoder", "generated"
    objective_class = GenerateObjective

    @classmethod
    def require_libraries(cls) -> None:
        try:
            import sacrebleu  # noqa: F401
        except ImportError as error:
            raise InputError(
                "task.kind=generate: sacreBLEU, which scores texts, is not installed; pip install "
                "'bert-jax[generate]'"
            ) from error

    def objective_fields(self, experiment: Finetuning, base: Base) -> dict[str, Any]:
        ends = {"first": self.tokenizer.cls_id, "last": self.tokenizer.sep_id}
        return ends | {"length": self.task.max_target_length}

    def rows(self, examples: Sequence[Sentence]) -> TargetRows:
        """Returns a row for each input text, with its target; both are truncated at the end."""
        limit, target_limit = self.task.max_sequence_length, self.task.max_target_length
        # `decoder_ids` and `targets` have one token less than a target with [CLS] and [SEP].
        room, target_room = limit - 2, target_limit - 1
        inputs = [self.encode(example.texts[0], example.location) for example in examples]
        ids = [add_special_tokens(self.tokenizer, tokens[:room], None)[0] for tokens in inputs]
        labelled = [example for example in examples if example.label is not None]
        targets = [self.encode(str(example.label), example.location) for example in labelled]
        cut = {
            f"texts at task.max_sequence_length={limit}": sum(len(x) > room for x in inputs),
            f"targets at task.max_target_length={target_limit}": sum(
                len(t) > target_room for t in targets
            ),
        }
        targets = [add_special_tokens(self.tokenizer, t[:target_room], None)[0] for t in targets]
        return TargetRows(ids, limit, truncated=cut, targets=targets, target_limit=target_limit)

    def answers(self, outputs: Outputs, rows: TaskRows, examples: Sequence[Sentence]) -> Answers:
        """Returns the `generated` text for each example.

        The outputs of a row are token ids, int32 [T], [SEP] after the end of the text.
        """
        tok = self.tokenizer
        special = {tok.pad_id, tok.cls_id, tok.mask_id}
        answers = []
        for ids in outputs:
            ends = np.flatnonzero(ids == tok.sep_id)
            text_ids = ids[: ends[0]] if len(ends) else ids
            text = tok.decode([int(i) for i in text_ids if int(i) not in special])
            answers.append({"generated": text})
        return answers

    def scores(self, outputs: Outputs, rows: TaskRows, examples: Sequence[Sentence]) -> Scores:
        generated = [answer["generated"] for answer in self.answers(outputs, rows, examples)]
        return scores.text_scores([str(example.label) for example in examples], generated)

    def compare_answer(self, answer: Answer, example: Sentence) -> ComparedAnswer:
        truth, generated = str(example.label), answer["generated"]
        error = 1 - scores.text_scores([truth], [generated])["chrf"]
        return ComparedAnswer([truth], [generated], error)

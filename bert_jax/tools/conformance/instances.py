"""Training instances as google-research/bert writes them, draw for draw.

Reproduces `create_training_instances` of create_pretraining_data.py with `random.Random(seed)` in
Python 3. The code is that of training (data.pairs, data.batches); only the draws differ: they come
from one generator, in the reference's order.
"""

import dataclasses
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import numpy as np
from etils import epath
from etils.epath import PathLike

from bert_jax.config import Data
from bert_jax.config.fields import PositiveCount, Section, Share, minimum
from bert_jax.data import batches, draws, masking, pairs, stream
from bert_jax.errors import InputError
from bert_jax.storage.workdir import require_no_special_file, translate_os_errors, write_atomic
from bert_jax.text.tokenizer import Tokenizer, WordPiece
from bert_jax.text.vocabulary import read_vocab

Documents = list[list[list[int]]]

# Tokens of the shortest row: [CLS] A [SEP] B [SEP] with one token in A and B.
_SHORTEST = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstanceSettings(Section, role="identity", label="instances"):
    """The reference's flags, as the golden files name them. The base class checks the values."""

    max_seq_length: Annotated[int, minimum(_SHORTEST)] = 128
    max_predictions_per_seq: PositiveCount = 20
    dupe_factor: PositiveCount = 10
    whole_word_mask: bool = False
    short_seq_prob: Share = 0.1
    masked_lm_prob: Share = 0.15
    random_seed: int = 12345
    do_lower_case: bool = True

    @property
    def data(self) -> Data:
        """Returns these settings as the `data` section of an experiment."""
        return Data(
            short_seq_prob=self.short_seq_prob,
            masked_lm_prob=self.masked_lm_prob,
            masking="whole_word" if self.whole_word_mask else "piece",
        )


def read_documents(paths: Iterable[PathLike], tokenizer: Tokenizer) -> Documents:
    r"""Reads documents (lists of sentences of token ids) as the reference reads files.

    A line ends with \n. Bytes that are not UTF-8 are dropped. A line of white space starts a new
    document; lines without tokens and documents without lines are dropped. A file continues the
    last document of the previous file.
    """
    documents: Documents = [[]]
    for path in paths:
        with translate_os_errors(path), epath.Path(path).open("rb") as file:
            for raw in file:
                line = raw.decode("utf-8", "ignore").strip()
                if not line:
                    documents.append([])
                    continue
                ids = tokenizer.encode(line)
                if ids:
                    documents[-1].append(ids)
    return [document for document in documents if document]


def create(documents: Documents, ids: batches.Ids, settings: InstanceSettings) -> Iterator[str]:
    """Yields the instances as lines of JSON, in the reference's order."""
    draw = draws.SequentialDraws(random.Random(settings.random_seed))
    order = draw.shuffled_order(len(documents))
    flat = stream.make_stream([documents[i] for i in order], np.uint32)
    policy, length = masking.Policy.of(settings.data, step=0, steps=1), settings.max_seq_length
    # No row has more predictions than tokens.
    predictions = min(settings.max_predictions_per_seq, length)
    builder = batches.BatchBuilder(flat, ids, settings.data, length, predictions)
    lines = []
    for _ in range(settings.dupe_factor):
        # Each row is planned and made before the next is planned, since both share one generator.
        for row in pairs.reference_pairs(flat, length, settings.short_seq_prob, draw):
            batch = builder.make(row, draw, policy)
            lines.append(json.dumps(_unpadded_row(batch)))
    for number in draw.shuffled_order(len(lines)):
        yield lines[number]


def _unpadded_row(batch: batches.Batch) -> dict[str, Any]:
    length, predicted = int(batch["input_mask"].sum()), int(batch["masked_lm_weights"].sum())
    return {
        "input_ids": batch["input_ids"][0, :length].tolist(),
        "segment_ids": batch["segment_ids"][0, :length].tolist(),
        "masked_lm_positions": batch["masked_lm_positions"][0, :predicted].tolist(),
        "masked_lm_ids": batch["masked_lm_ids"][0, :predicted].tolist(),
        "next_sentence_label": int(batch["next_sentence_labels"][0]),
    }


def write(
    texts: Sequence[PathLike], vocab: PathLike, settings: InstanceSettings, out: PathLike
) -> int:
    """Writes the settings, then each instance, as a line; returns the number of instances."""
    target = epath.Path(out)
    for path in (*texts, vocab):
        if target.resolve() == epath.Path(path).resolve():
            raise InputError(f"--out {out}: is a file of the input; name another file")
    require_no_special_file(target)
    if target.is_dir() or not target.parent.is_dir():
        raise InputError(f"--out {out}: must be a file in a folder that exists")
    case = "uncased" if settings.do_lower_case else "cased"
    tokenizer = WordPiece(read_vocab(vocab), case)
    documents = read_documents(texts, tokenizer)
    lines = list(create(documents, batches.Ids.of(tokenizer), settings))
    head = json.dumps({**dataclasses.asdict(settings), "instances": len(lines)})
    write_atomic(target, (f"{line}\n" for line in (head, *lines)))
    return len(lines)

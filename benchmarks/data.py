"""Text to ids against Hugging Face's tokenizers, and ids to batches, in CPU seconds.

`python -m benchmarks.data`, on the sample text. The peer's is `encode_batch_fast`, one thread, same
vocabulary, sentences already split.
"""

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import tokenizers

from benchmarks import measure
from bert_jax.config import Corpus, Data
from bert_jax.data import batches, stream
from bert_jax.data.plans import Plans, PlanSpec
from bert_jax.text import documents, sentence_splitter
from bert_jax.text.tokenizer import WordPiece

BATCH = 256
WIDTHS = ((128, 20), (512, 76))  # sequence length and predictions


def main() -> None:
    """Measures both."""
    options = {"documents": (0, "of the sample text; default: all"), "rounds": 5}
    flags = measure.parser(__doc__, **options).parse_args()
    measure.restart_with(threads=1)
    texts = list(documents.read(Corpus(sources=(measure.SAMPLE,))))[: flags.documents or None]
    split = [list(sentence_splitter.split(document, "en")) for document in texts]
    vocab = measure.vocabulary().split("\n")[:-1]

    encoding = text_to_ids([line for lines in split for line in lines], vocab, flags.rounds)
    best, median = measure.times_faster(encoding["ours"], encoding["hugging_face"])
    figures = {"ids_per_second": encoding["ids"] / min(encoding["ours"])}
    figures |= {"tokenizers": best, "tokenizers_median": median}
    making = measure.in_turns(makers(split, vocab), flags.rounds)
    for name, seconds in making.items():
        figures[f"batch_tokens_per_second_{name}"] = 1 / min(seconds)
        figures[f"batch_tokens_per_second_{name}_median"] = 1 / statistics.median(seconds)
    details = {"text_to_ids": encoding, "ids_to_batches_seconds_a_token": making}
    details |= measure.versions("tokenizers")
    measure.report("data", figures, details, flags.out)


def text_to_ids(lines: list[str], vocab: list[str], rounds: int) -> dict[str, Any]:
    """Seconds of our WordPiece, its cache empty at first, and of Hugging Face's."""
    numbers = {piece: number for number, piece in enumerate(vocab)}
    peer = tokenizers.BertWordPieceTokenizer(numbers, lowercase=True)._tokenizer
    sides = {
        "ours": lambda: [*map(WordPiece(vocab, "uncased").encode, lines)],
        "hugging_face": lambda: peer.encode_batch_fast(lines, add_special_tokens=False),
    }
    turns = {name: lambda side=side: measure.clocked(side)[0] for name, side in sides.items()}
    found = measure.in_turns(turns, rounds)
    ids, theirs = (side() for side in sides.values())
    same = [a == b.ids for a, b in zip(ids, theirs, strict=True)]
    return found | {"ids": sum(map(len, ids)), "sentences": len(ids), "equal": float(np.mean(same))}


def makers(split: list[list[str]], vocab: list[str]) -> dict[str, Callable[[], float]]:
    """Seconds a token of a batch, by width and kind of mask; the plan is there already."""
    tokenizer = WordPiece(vocab, "uncased")
    # As `prepare` would store them.
    encoded = ([ids for ids in map(tokenizer.encode, lines) if ids] for lines in split)
    ids = stream.make_stream([document for document in encoded if document])
    turns = {}
    for length, predictions in WIDTHS:
        for masking in ("piece", "whole_word"):
            data, shape = Data(masking=masking), batches.BatchShape(length, predictions, BATCH)
            plans = Plans(ids, PlanSpec((0, "train", 0), length, data.short_seq_prob))
            made = batches.TrainBatches(plans, batches.Ids.of(tokenizer), data, shape)
            turns[f"{length}_{masking}"] = lambda made=made, length=length: turn(made, length)
            turns[f"{length}_{masking}"]()
    return turns


def turn(made: batches.TrainBatches, length: int) -> float:
    """Seconds a token of as many batches as there are in an epoch, at most 20."""
    steps, rows = max(1, min(20, made.rows_per_epoch // BATCH)), np.arange(BATCH)

    def make() -> None:
        for number in range(steps):
            made.batch(number, rows)

    return measure.clocked(make)[0] / (steps * BATCH * length)


if __name__ == "__main__":
    main()

"""Text to ids against Hugging Face's tokenizers, and ids to batches, in CPU seconds.

`python -m benchmarks.data [--text FOLDER]`. The peer's is `encode_batch_fast`, one thread, same
vocabulary, sentences already split.
"""

import argparse
import gzip
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers

from benchmarks import measure
from bert_jax.config import Corpus, Data
from bert_jax.data import batches, stream
from bert_jax.data.plans import Plans
from bert_jax.text import documents, sentences
from bert_jax.text.tokenizer import WordPiece

SAMPLE = f"jsonl:{measure.ROOT / 'experiments' / 'sample_text' / 'speeches.jsonl.gz'}"
VOCABULARY = measure.ROOT / "bert_jax" / "conformance" / "files" / "bert_base_uncased_vocab.txt.gz"
BATCH = 256
# Sequence length, predictions, kind of mask.
WIDTHS = (
    (128, 20, "piece"),
    (128, 20, "whole_word"),
    (512, 76, "piece"),
    (512, 76, "whole_word"),
)


def main() -> None:
    """Measures both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", default="", help="folder of .txt; default: the sample text")
    parser.add_argument("--megabytes", type=float, default=4.0, help="of text, at most")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default="", help="folder of the result; default: results/")
    flags = parser.parse_args()
    measure.restart_with(threads=1)
    vocab = gzip.decompress(VOCABULARY.read_bytes()).decode().split("\n")[:-1]
    corpus = Corpus(sources=(f"text:{flags.text}" if flags.text else SAMPLE,))
    texts = first(list(documents.read(corpus)), int(1e6 * flags.megabytes))

    encoding = text_to_ids(texts, vocab, flags.rounds)
    making = ids_to_batches(texts, vocab, flags.rounds)
    figures: dict[str, Any] = {
        "ids_per_second": encoding["ids"] / min(encoding["ours"]),
        **ratios("tokenizers", encoding["hugging_face"], encoding["ours"]),
    }
    for name, seconds in making.items():
        figures[f"batch_tokens_per_second_{name}"] = 1 / min(seconds)
        figures[f"batch_tokens_per_second_{name}_median"] = 1 / float(np.median(seconds))
    details = {
        "documents": len(texts),
        "characters": sum(len(d.text) for d in texts),
        "text_to_ids": encoding,
        "ids_to_batches_seconds_a_token": making,
    }
    measure.report("data", figures, details, flags.out)


def first(texts: Sequence[documents.Document], characters: int) -> list[documents.Document]:
    """The first documents, with that many characters together; at least two."""
    sizes = np.cumsum([len(document.text) for document in texts])
    return list(texts[: max(2, int(np.searchsorted(sizes, characters)))])


def ratios(name: str, peer: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """How many times faster we are: best over best, median over median."""
    return {
        name: min(peer) / min(ours),
        f"{name}_median": float(np.median(peer) / np.median(ours)),
    }


def text_to_ids(
    texts: Sequence[documents.Document], vocab: Sequence[str], rounds: int
) -> dict[str, Any]:
    """Seconds of our WordPiece, its cache empty at first, and of Hugging Face's."""
    lines = [line for document in texts for line in sentences.split(document, "en")]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "vocab.txt"
        path.write_text("\n".join(vocab) + "\n", "utf-8")
        peer = tokenizers.BertWordPieceTokenizer(str(path), lowercase=True)._tokenizer
    found: dict[str, Any] = {"ours": [], "hugging_face": []}

    def encode() -> list[list[int]]:
        ours = WordPiece(list(vocab), "uncased")
        return [ours.encode(line) for line in lines]

    def encode_theirs() -> list[Any]:
        return peer.encode_batch_fast(lines, add_special_tokens=False)

    for _ in range(rounds):
        found["ours"].append(measure.clocked(encode)[0])
        found["hugging_face"].append(measure.clocked(encode_theirs)[0])
    ids = encode()
    same = [a == b.ids for a, b in zip(ids, encode_theirs(), strict=True)]
    return found | {"ids": sum(map(len, ids)), "sentences": len(ids), "equal": float(np.mean(same))}


def in_memory(texts: Sequence[documents.Document], tokenizer: WordPiece) -> stream.Stream:
    """The documents as `prepare` would store them."""
    encoded = (
        [ids for ids in map(tokenizer.encode, sentences.split(document, "en")) if ids]
        for document in texts
    )
    return stream.from_documents([document for document in encoded if document])


def train_batches(
    split: stream.Stream, tokenizer: WordPiece, data: Data, shape: batches.Shape
) -> batches.TrainBatches:
    """Batches of a first phase, seed 0."""
    plans = Plans(split, (0, "train", 0), shape.sequence_length, data.short_seq_prob)
    return batches.TrainBatches(plans, batches.Ids.of(tokenizer), data, shape)


def ids_to_batches(
    texts: Sequence[documents.Document], vocab: Sequence[str], rounds: int
) -> dict[str, list[float]]:
    """Seconds a token of a batch, by width and kind of mask; the plan is there already."""
    tokenizer = WordPiece(list(vocab), "uncased")
    split = in_memory(texts, tokenizer)
    makers = {}
    for length, predictions, masking in WIDTHS:
        shape = batches.Shape(length, predictions, BATCH)
        maker = train_batches(split, tokenizer, Data(masking=masking), shape)
        maker.batch(0, np.arange(BATCH))
        makers[f"{length}_{masking}"] = maker, max(1, min(20, maker.rows_per_epoch // BATCH))
    found: dict[str, list[float]] = {name: [] for name in makers}

    def run(maker: batches.TrainBatches, steps: int) -> None:
        for number in range(steps):
            maker.batch(number, np.arange(BATCH))

    for name, (maker, steps) in makers.items():
        run(maker, steps)
        tokens = steps * BATCH * int(name.partition("_")[0])
        found[name] = [
            measure.clocked(lambda m=maker, n=steps: run(m, n))[0] / tokens for _ in range(rounds)
        ]
    return found


if __name__ == "__main__":
    main()

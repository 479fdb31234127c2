"""Vocabularies: read from a BERT `vocab.txt`, or trained on a corpus."""

import collections
import dataclasses
import io
import re
from collections.abc import Mapping

import numpy as np
import sentencepiece
from etils import epath

from bert_jax.errors import InputError
from bert_jax.text import merges

PAD, UNK, CLS, SEP, MASK = SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# As others name their roles.
NAMED = dict(
    zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIALS, strict=True)
)

# Characters kept as pieces of their own when a vocabulary is trained; rarer ones become [UNK].
_ALPHABET = 1_000
# Of scripts with thousands of them, as many as this share of the text is written with.
_WRITTEN = 0.9995
# Fixed: the trainer adds up what each thread counted, so the model depends on their number.
_SENTENCEPIECE_THREADS = 16


@dataclasses.dataclass
class WordCounts:
    """Words of a corpus."""

    # Those that train a vocabulary (see text.words), sorted.
    words: list[str] = dataclasses.field(default_factory=list)
    counts: list[int] = dataclasses.field(default_factory=list)  # how often each occurs
    different: int = 0  # how many there are in all
    # How often each character occurs in all of them, by its code point.
    characters: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    # Code points that stand behind the first place of a word.
    inner: set[int] = dataclasses.field(default_factory=set)

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> "WordCounts":
        """Returns counts of words that all train the vocabulary."""
        counted = cls(sorted(counts), [counts[word] for word in sorted(counts)])
        counted.add(counts)
        return counted

    def add(self, counts: Mapping[str, int]) -> None:
        """Adds words that were not there before to all but `words` and `counts`."""
        codes = np.frombuffer("".join(counts).encode("utf-32-le", "replace"), np.uint32)
        lengths = np.fromiter(map(len, counts), np.int64, len(counts))
        characters, inverse = np.unique(codes, return_inverse=True)
        weights = np.repeat(np.fromiter(counts.values(), np.int64, len(counts)), lengths)
        sums = np.bincount(inverse, weights).astype(np.int64)
        for code, count in zip(characters.tolist(), sums.tolist(), strict=True):
            self.characters[code] += count
        behind = np.ones(len(codes), bool)
        behind[np.cumsum(lengths) - lengths] = False
        self.inner.update(np.unique(codes[behind]).tolist())
        self.different += len(counts)


def read_vocab(path: epath.PathLike) -> list[str]:
    """Reads the pieces of a `vocab.txt`, one a line; a line's number is its id."""
    try:
        lines = epath.Path(path).read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    if lines and not lines[-1]:
        lines.pop()
    vocab = [line.strip() for line in lines]
    if missing := [name for name in SPECIALS if name not in vocab]:
        raise InputError(
            f"{path}: no {' '.join(missing)} among its {len(vocab)} lines; a BERT vocabulary has a "
            "piece a line, and these among them"
        )
    lines_of: dict[str, int] = {}
    for number, piece in enumerate(vocab, 1):
        first = lines_of.setdefault(piece, number)
        if first != number:
            # Its first id would stand for nothing, and yet be predicted.
            raise InputError(
                f"{path}:{number}: the piece {piece!r} stands on line {first} already; a line is "
                "an id, so put a piece of its own there, e.g. [unused1]"
            )
    return vocab


def train_wordpiece(counted: WordCounts, vocab_size: int, unused_pieces: int = 0) -> list[str]:
    """Trains a WordPiece vocabulary, the specials first, in ids 0 to 4.

    The words are as `basic_tokens` gives them when encoding. The last pieces are `unused`, so many
    or more, where the text is too small.
    """
    alphabet, continuing = _alphabet(counted)
    vocab = [*SPECIALS, *alphabet, *continuing]
    room = vocab_size - unused_pieces - len(vocab)
    made = merges.learn(counted.words, counted.counts, alphabet, continuing, room)
    vocab += dict.fromkeys(left + right.removeprefix("##") for left, right in made)
    if len(vocab) > vocab_size - unused_pieces:
        raise InputError(
            f"model.vocab_size={vocab_size}: the characters of this text alone are {len(vocab)} "
            f"pieces; set it to more"
        )
    return vocab + unused(vocab_size - len(vocab))


def unused(count: int) -> list[str]:
    """Returns names of pieces that no text yields, as in the vocabularies that BERT came with."""
    return [f"[unused{number}]" for number in range(count)]


def _alphabet(counted: WordCounts) -> tuple[list[str], list[str]]:
    """Returns the commonest characters, and those of them that ever go on a word.

    1,000 of them, or, of scripts with more, as many as most of the text is written with.

    Both in the order of their code points; the second as pieces, `##c`.
    """
    counts = counted.characters
    commonest = sorted(counts, key=lambda code: (-counts[code], code))
    written = np.cumsum([counts[code] for code in commonest])
    needed = int(np.searchsorted(written, _WRITTEN * written[-1])) + 1 if commonest else 0
    characters = sorted(commonest[: max(needed, _ALPHABET)])
    return [chr(c) for c in characters], [f"##{chr(c)}" for c in characters if c in counted.inner]


def train_sentencepiece(
    counted: WordCounts,
    vocab_size: int,
    kind: str,
    unused_pieces: int = 0,
    normalization: str = "nmt_nfkc",
) -> bytes:
    """Trains a SentencePiece model (`unigram` or `bpe`) and returns it serialised.

    The specials stand in ids 0 to 4 as control pieces, which text never yields. `unused` ones
    follow them, so many or more, where the text is too small.
    """

    lacking = 0
    while True:
        model, pairs = io.BytesIO(), zip(counted.words, counted.counts, strict=True)
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(f"{word}\t{count}" for word, count in pairs),
                input_format="tsv",
                model_writer=model,
                model_type=kind,
                vocab_size=vocab_size,
                normalization_rule_name=normalization,
                pad_id=0,
                unk_id=1,
                bos_id=-1,
                eos_id=-1,
                pad_piece=PAD,
                unk_piece=UNK,
                control_symbols=[CLS, SEP, MASK, *unused(unused_pieces + lacking)],
                num_threads=_SENTENCEPIECE_THREADS,
                minloglevel=2,
            )
            return model.getvalue()
        except RuntimeError as error:
            most = re.search(r"set it to a value <= (\d+)", str(error))
            if lacking or most is None or int(most[1]) >= vocab_size:
                reason = str(error).strip().split("] ")[-1]
                raise InputError(
                    f"model.vocab_size={vocab_size}: SentencePiece cannot train on this text: "
                    f"{reason}"
                ) from error
            lacking = vocab_size - int(most[1])


def scores(model: bytes) -> list[tuple[str, float]]:
    """Returns the pieces of a SentencePiece model that text yields, and the score of each."""
    read = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [
        (read.id_to_piece(i), read.get_score(i))
        for i in range(read.get_piece_size())
        if not read.is_control(i) and not read.is_unknown(i)
    ]

"""Counting the words of a corpus in bounded memory, for the training of a vocabulary.

Each part of the corpus leaves a file of its words with their counts, in sections by a hash of the
word; sections of all files are added up one after another. So the counts are exact, whatever the
size of the corpus. Of more than 250,000 different words those that occur most often train the
vocabulary; of equally frequent ones those whose CRC-32 is smallest, which favours no letter.
"""

import collections
import json
import pathlib
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import IO

from bert_jax.text.tokenizer import MAX_WORD, Case, basic_tokens, without_controls
from bert_jax.text.vocabulary import Counted

# Different words that train a vocabulary.
MOST_WORDS = 250_000

_SECTIONS = 64
# Different words held while counting, and characters read, until those held are written down.
_HELD, _CHARACTERS = 200_000, 1 << 25
# Characters of a text that are looked at in one go.
_BLOCK = 1 << 20
_BLANK = re.compile(r"\s")


def write(texts: Iterable[str], kind: str, case: Case, path: pathlib.Path) -> list[list[int]]:
    """Counts the words of texts in a file.

    Args:
      texts: of documents.
      kind: of the tokenizer: WordPiece counts basic tokens, SentencePiece what stands between
        blanks.
      case: of the tokenizer.
      path: of the file.

    Returns:
      Where the sections begin and the last one ends, for each time the counts were written.
    """
    split = _basic_words if kind == "wordpiece" else _spaced_words
    offsets: list[list[int]] = []
    chunks: dict[str, int] = {}
    words: dict[str, int] = {}
    with open(path, "wb") as file:

        def empty(held: int) -> None:
            for chunk, count in chunks.items():
                for word in split(chunk, case):
                    words[word] = words.get(word, 0) + count
            chunks.clear()
            if len(words) > held:
                offsets.append(_write_sections(words, file))
                words.clear()

        characters = 0
        for block in _blocks(texts):
            # Words do not reach beyond blanks, so equal stretches between them are cut once.
            # A table of its own for each block: it stays in the processor's cache.
            block = without_controls(block) if kind == "wordpiece" else block
            for chunk, count in collections.Counter(block.split()).items():
                chunks[chunk] = chunks.get(chunk, 0) + count
            characters += len(block)
            if len(chunks) > _HELD or characters > _CHARACTERS:
                empty(_HELD)
                characters = 0
        empty(0)
    return offsets


def read(files: Sequence[tuple[pathlib.Path, list[list[int]]]]) -> Counted:
    """Adds up what `write` counted, in any number of files."""
    kept: list[tuple[int, int, str]] = []
    found = Counted()
    for section in range(_SECTIONS):
        counts: dict[str, int] = {}
        for path, offsets in files:
            with open(path, "rb") as file:
                for bounds in offsets:
                    file.seek(bounds[section])
                    part = json.loads(file.read(bounds[section + 1] - bounds[section]))
                    for word, count in part.items():
                        counts[word] = counts.get(word, 0) + count
        found.add(counts)
        kept += [(-count, _hash(word), word) for word, count in counts.items()]
        if len(kept) > MOST_WORDS:
            kept.sort()
            del kept[MOST_WORDS:]
    pairs = sorted((word, -negative) for negative, _, word in kept)
    found.words = [word for word, _ in pairs]
    found.counts = [count for _, count in pairs]
    return found


def _write_sections(words: dict[str, int], file: IO[bytes]) -> list[int]:
    sections: list[dict[str, int]] = [{} for _ in range(_SECTIONS)]
    for word, count in words.items():
        sections[_hash(word) % _SECTIONS][word] = count
    offsets = [file.tell()]
    for section in sections:
        file.write(json.dumps(section).encode())
        offsets.append(file.tell())
    return offsets


def _hash(word: str) -> int:
    return zlib.crc32(word.encode("utf-8", "surrogatepass"))


def _blocks(texts: Iterable[str]) -> Iterator[str]:
    """The texts in stretches that end at blanks: short ones together, long ones in several."""
    short: list[str] = []
    size = 0
    for text in texts:
        if len(text) > _BLOCK:
            start = 0
            while start < len(text):
                blank = _BLANK.search(text, start + _BLOCK) if start + _BLOCK < len(text) else None
                stop = blank.start() if blank else len(text)
                yield text[start:stop]
                start = stop
            continue
        short.append(text)
        size += len(text)
        if size > _BLOCK:
            yield "\n".join(short)
            short, size = [], 0
    yield "\n".join(short)


def _basic_words(chunk: str, case: Case) -> list[str]:
    """Words that WordPiece cuts; longer ones are unknown to it as they are."""
    if chunk.isascii() and chunk.isalnum():
        chunk = chunk.lower() if case == "uncased" else chunk
        return [chunk] if len(chunk) <= MAX_WORD else []
    return [word for word in basic_tokens(chunk, case) if len(word) <= MAX_WORD]


def _spaced_words(chunk: str, case: Case) -> list[str]:
    """What SentencePiece is trained on; scripts without blanks come in stretches."""
    text = chunk.lower() if case == "uncased" else chunk
    return [text[start : start + MAX_WORD] for start in range(0, len(text), MAX_WORD)]

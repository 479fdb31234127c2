"""A search over one's own texts: the nearest to a question, by the cosine of all vectors.

Vectors are kept in a folder, so that of texts that grow or change the new ones alone are embedded,
and a search that was killed goes on:

made.json  by which encoder, and how
vectors    float32 [texts, W], of length 1, in the order in which they were embedded
keys       16 bytes a text, of its SHA-256; written after its vector
"""

import dataclasses
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import jax
import numpy as np
from etils import epath

from bert_jax.checkpoints.base import Base, flat
from bert_jax.embeddings import nearest as nearest_lib
from bert_jax.embeddings.embed import Embedded, Embedder
from bert_jax.errors import InputError, pluralize
from bert_jax.storage.workdir import (
    absolute,
    create_folder,
    lock,
    new_file,
    read_json,
    translate_os_errors,
    write_atomic,
)
from bert_jax.text import lines as lines_lib

_VERSION = 1
_KEY = 16  # bytes
_QUESTIONS = 256  # answered together
_SAVED = 1_024  # texts that are embedded at a time: what a kill costs
_SECONDS_BETWEEN_LINES = 30.0


@dataclasses.dataclass(frozen=True)
class Answer:
    """A text that is near to a question."""

    line: int  # where it stands, from 1
    score: float  # the cosine
    text: str  # of the line, or the passage of it


class Index:
    """The vectors of the texts of a file, made where they are missing.

    Args:
      path: a file with a text on each line; empty lines are no texts.
      folder: where the vectors are kept.
      model: whose encoder.
      embedder: makes its vectors, of length 1.
      say: takes a line of progress.
      cut: what is done with a text that is longer than the encoder reads: its beginning stands for
        it, or it falls into passages, each of which is a text.
    """

    def __init__(
        self,
        path: str,
        folder: epath.Path,
        model: Base,
        embedder: Embedder,
        say: Callable[[str], None],
        cut: Literal["beginning", "passages"] = "beginning",
    ):
        self._path, self._folder, self._embedder = path, folder, embedder
        self._parts = embedder.passages if cut == "passages" else lambda text: [text]
        self._cut = cut
        # Where each different text comes first, by the text's key.
        self._first: dict[bytes, int] = {}
        for place, (_, text) in enumerate(self._texts()):
            self._first.setdefault(_key(text), place)
        if not self._first:
            raise InputError(f"{path}: no text in it; put one on each line")
        with lock(folder, setting="--vectors"):
            self._require_same(_fingerprint(model, embedder))
            row_of = self._embedded(say)
        self._places = np.array(list(self._first.values()))
        self._rows = np.array([row_of[key] for key in self._first])

    def nearest(self, questions: Sequence[str], top: int) -> list[list[Answer]]:
        """Returns the `top` nearest texts to each question, best first; of equals the earlier."""
        queries = np.concatenate([p.vectors for p in self._embedder.embed(questions, "query")])
        vectors = np.memmap(self._folder / "vectors", np.float32, "r")
        vectors = vectors.reshape(-1, self._embedder.width)
        blocks = (vectors[rows] for rows in nearest_lib.parts(self._rows))
        neighbours, scores = nearest_lib.nearest(blocks, queries, top)
        numbers = self._places[neighbours]
        wanted = set(numbers.flat)
        there = {place: text for place, text in enumerate(self._texts()) if place in wanted}
        if any(self._first.get(_key(there.get(place, (0, ""))[1])) != place for place in wanted):
            raise InputError(f"{self._path}: it changed while it was searched; run again")
        return [
            [
                Answer(there[place][0], float(score), there[place][1])
                for place, score in zip(*of_one, strict=True)
            ]
            for of_one in zip(numbers, scores, strict=True)
        ]

    def answer_file(self, queries: str, out: epath.Path, top: int) -> None:
        """Writes the nearest texts to each line of a file, as JSON lines.

        Each is `{"query": "...", "nearest": [{"line": 3, "score": 0.71, "text": "..."}, ...]}`.
        """
        path = absolute(out)
        with create_folder(path.parent), new_file(path) as unfinished, unfinished.open("w") as file:
            asked = (text for _, text in lines_lib.read([queries]))
            while some := list(itertools.islice(asked, _QUESTIONS)):
                for query, answers in zip(some, self.nearest(some, top), strict=True):
                    near = [dataclasses.asdict(answer) for answer in answers]
                    file.write(json.dumps({"query": query, "nearest": near}) + "\n")

    def _texts(self) -> Iterator[tuple[int, str]]:
        for line, (_, text) in enumerate(lines_lib.read([self._path]), 1):
            if text.strip():
                yield from ((line, part) for part in self._parts(text))

    def _require_same(self, encoder: str) -> None:
        path = self._folder / "made.json"
        now = {"format_version": _VERSION, "encoder": encoder, "width": self._embedder.width}
        if not path.exists() and not (self._folder / "vectors").exists():
            write_atomic(path, json.dumps(now) + "\n")
        elif read_json(path, _VERSION) != now:
            raise InputError(
                f"{path}: these vectors were made by another encoder, or in another way; name "
                "another folder with --vectors, or remove this one"
            )

    def _embedded(self, say: Callable[[str], None]) -> dict[bytes, int]:
        """Returns in which row each text has its vector, after those without one have theirs."""
        row = 4 * self._embedder.width
        with (
            translate_os_errors(self._folder),
            open(os.fspath(self._folder / "vectors"), "a+b") as vectors,
            open(os.fspath(self._folder / "keys"), "a+b") as keys,
        ):
            # What was being written when a search was killed is cut off.
            known = min(vectors.tell() // row, keys.tell() // _KEY)
            vectors.truncate(known * row)
            keys.truncate(known * _KEY)
            keys.seek(0)
            held = keys.read()
            rows = {held[i * _KEY : (i + 1) * _KEY]: i for i in range(known)}
            missing = self._first.keys() - rows.keys()
            if missing:
                say(
                    f"{self._folder}: embedding {len(missing):,} of "
                    f"{pluralize(len(self._first), 'text')}, which have no vector yet"
                )
            shown = time.monotonic()
            texts = self._take_missing(missing)
            while batch := list(itertools.islice(texts, _SAVED)):
                lines = [(line, text) for _, line, text in batch]
                new = np.concatenate([part.vectors for part in self._embed_lines(lines)])
                for file, content in (
                    (vectors, new.tobytes()),
                    (keys, b"".join(key for key, *_ in batch)),
                ):
                    file.write(content)
                    file.flush()
                rows |= {key: len(rows) + i for i, (key, *_) in enumerate(batch)}
                if time.monotonic() - shown > _SECONDS_BETWEEN_LINES:
                    shown = time.monotonic()
                    say(f"{self._folder}: {len(rows) - known:,} are done")
        if self._embedder.cut and self._cut == "beginning":
            say(
                f"{self._folder}: {pluralize(self._embedder.cut, 'text')} of over "
                f"{self._embedder.max_length} tokens; the beginning alone is searched, without "
                "--long passages"
            )
        if missing:
            raise InputError(f"{self._path}: it changed while it was read; run again")
        return rows

    def _embed_lines(self, lines: Sequence[tuple[int, str]]) -> Iterator[Embedded]:
        """Yields vectors of (line number, text); an error names the line."""
        texts = [text for _, text in lines]
        return self._embedder.embed(
            texts, "text", lambda number: f"{self._path}:{lines[number - 1][0]}"
        )

    def _take_missing(self, missing: set[bytes]) -> Iterator[tuple[bytes, int, str]]:
        """Yields key, line number and text of each key in `missing`, and removes the key."""
        for line, text in self._texts():
            if (key := _key(text)) in missing:
                missing.remove(key)
                yield key, line, text


def _fingerprint(model: Base, embedder: Embedder) -> str:
    """Returns a hash of an encoder's weights and tokenizer, and of how it makes vectors."""
    how = f"{model.model}/{model.tokenizer.sha256}/{embedder.features}/{embedder.max_length}"
    how += model.vectors.text_prefix if model.vectors else ""
    digest = hashlib.sha256(how.encode())
    for name, values in sorted(flat(jax.device_get(model.params)).items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()


def _key(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:_KEY]

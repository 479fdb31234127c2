"""Semantic search: the texts of a file whose vectors have the highest scores for a query's.

The score is the cosine or, for other forms of vectors, that of `forms`.

A folder keeps the vectors. So only new or changed texts are embedded, and an interrupted search
resumes:

made.json  the encoder, and how it makes vectors
vectors    float32 [texts, W], of length 1, in the order in which they were embedded; for other
           forms the records of `forms`
ends       for other forms, int64 [texts]: the number of records of a text and of those before it
keys       the first 16 bytes of the SHA-256 of each text, written after its vector
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, Literal

import jax
import numpy as np
from etils import epath

from bert_jax.checkpoints.base import Base, flatten
from bert_jax.embeddings import nearest as nearest_lib
from bert_jax.embeddings.embed import Embedder
from bert_jax.embeddings.forms import ragged_indices
from bert_jax.errors import InputError, pluralize, prefix_errors
from bert_jax.storage.locks import lock
from bert_jax.storage.workdir import (
    absolute,
    create_folder,
    read_json,
    replace_atomically,
    translate_os_errors,
    write_atomic,
)
from bert_jax.text import line_reader

_VERSION = 1
_KEY = 16  # bytes
_QUERIES = 256  # answered in one pass over the vectors
_SAVED = 1_024  # texts embedded between two writes: the work that a kill loses
_SECONDS_BETWEEN_LINES = 30.0


@dataclasses.dataclass(frozen=True)
class SearchHit:
    """A text that is near to a query."""

    line: int  # line number, from 1
    score: float  # the score for the query, or that by which the text was sorted again
    text: str  # the whole line, or one passage of it


class Index:
    """The vectors of the texts of a file. Embeds the texts that have no vector yet.

    Args:
      path: a file with one text on each line; blank lines are skipped.
      folder: folder of the vectors.
      embedder: computes the vectors; dense ones have length 1.
      cut: how a text longer than `embedder.max_length` is searched: by its beginning only, or split
        into passages, each of which is a text.
    """

    def __init__(
        self,
        path: str,
        folder: epath.Path,
        model: Base,
        embedder: Embedder,
        report: Callable[[str], None],
        cut: Literal["beginning", "passages"] = "beginning",
    ):
        self._path, self._folder, self._embedder = path, folder, embedder
        self._split = embedder.passages if cut == "passages" else lambda text: [text]
        self._cut = cut
        self._is_ragged = embedder.form_name != "dense"
        self._first: dict[bytes, int] = {}  # number of the first of equal texts, by key
        for number, (_, text) in enumerate(self._texts()):
            self._first.setdefault(_key(text), number)
        if not self._first:
            raise InputError(f"{path}: contains no text; put one text on each line")
        with lock(folder, setting="--vectors"):
            self._require_same(_fingerprint(model, embedder))
            row_by_key = self._embed_missing(report)
        self._numbers = np.array(list(self._first.values()))
        self._rows = np.array([row_by_key[key] for key in self._first])

    def nearest(self, queries: Sequence[str], top: int) -> list[list[SearchHit]]:
        """Returns the `top` nearest texts to each query, best first; equal ones in file order."""
        form = self._embedder.form
        parts = [p.vectors for p in self._embedder.embed(queries, "query")]
        with prefix_errors(str(self._folder / "vectors")):
            neighbours, scores = nearest_lib.nearest(
                self._blocks(), form.concatenate(parts), top, form.score
            )
        numbers = self._numbers[neighbours]
        wanted = set(numbers.flat)
        texts = {number: text for number, text in enumerate(self._texts()) if number in wanted}
        if any(self._first.get(_key(texts.get(i, (0, ""))[1])) != i for i in wanted):
            raise InputError(f"{self._path}: changed during the search; run again")
        return [
            [
                SearchHit(texts[number][0], float(score), texts[number][1])
                for number, score in zip(*ranking, strict=True)
            ]
            for ranking in zip(numbers, scores, strict=True)
        ]

    def _blocks(self) -> Iterator[Any]:
        """Yields the vectors of the texts of the file, some at a time."""
        form, width = self._embedder.form, self._embedder.width
        record, folder = form.record(width), self._folder
        records = np.empty(0, record)  # of sparse vectors without weights
        if os.path.getsize(folder / "vectors"):
            records = np.memmap(folder / "vectors", record.base, "r").reshape(-1, *record.shape)
        ends = np.arange(1, len(records) + 1)
        if self._is_ragged:
            ends = np.fromfile(folder / "ends", np.int64)
        starts = np.concatenate([[0], ends[:-1]])
        for rows in nearest_lib.parts(self._rows, form.block):
            counts = (ends - starts)[rows]
            selected = records[ragged_indices(starts[rows], counts)]
            yield form.join_records(selected, counts, width)

    def _texts(self) -> Iterator[tuple[int, str]]:
        for line, (_, text) in enumerate(line_reader.read([self._path]), 1):
            if text.strip():
                yield from ((line, part) for part in self._split(text))

    def _require_same(self, encoder: str) -> None:
        path = self._folder / "made.json"
        current = {"format_version": _VERSION, "encoder": encoder, "width": self._embedder.width}
        if not path.exists() and not (self._folder / "vectors").exists():
            write_atomic(path, json.dumps(current) + "\n")
        elif read_json(path, _VERSION) != current:
            raise InputError(
                f"{path}: these vectors were made by another encoder or with other flags; name "
                "another folder with --vectors, or delete this one"
            )

    def _embed_missing(self, report: Callable[[str], None]) -> dict[bytes, int]:
        """Embeds the texts without a vector. Returns the row of each text's vector, by key."""
        form, record = self._embedder.form, self._embedder.form.record(self._embedder.width)
        names = ("vectors", "ends", "keys") if self._is_ragged else ("vectors", "keys")
        with translate_os_errors(self._folder), contextlib.ExitStack() as stack:
            files = {
                name: stack.enter_context(open(os.fspath(self._folder / name), "a+b"))
                for name in names
            }
            rows, count = self._complete_rows(files, record.itemsize)
            complete = len(rows)
            missing = self._first.keys() - rows.keys()
            if missing:
                report(
                    f"{self._folder}: embedding {len(missing):,} of "
                    f"{pluralize(len(self._first), 'text')}, which have no vector yet"
                )
            reported = time.monotonic()
            texts = self._take_missing(missing)
            while batch := list(itertools.islice(texts, _SAVED)):
                lines = [(f"{self._path}:{line}", text) for _, line, text in batch]
                parts = [p.vectors for p in self._embedder.embed_lines(lines)]
                records, counts = form.split_records(form.concatenate(parts))
                ends = count + np.cumsum(counts)
                count += len(records)
                contents = {"vectors": records.tobytes(), "ends": ends.tobytes()}
                contents["keys"] = b"".join(key for key, *_ in batch)
                for name, file in files.items():
                    file.write(contents[name])
                    file.flush()
                rows |= {key: len(rows) + i for i, (key, *_) in enumerate(batch)}
                if time.monotonic() - reported > _SECONDS_BETWEEN_LINES:
                    reported = time.monotonic()
                    report(f"{self._folder}: {len(rows) - complete:,} embedded")
        if self._embedder.cut and self._cut == "beginning":
            report(
                f"{self._folder}: only the first {self._embedder.max_length} tokens of "
                f"{pluralize(self._embedder.cut, 'text')} are searched; add --long-texts passages"
            )
        if missing:
            raise InputError(f"{self._path}: changed while it was read; run again")
        return rows

    def _complete_rows(
        self, files: Mapping[str, IO[bytes]], record: int
    ) -> tuple[dict[bytes, int], int]:
        """Returns the rows of the texts that have a vector, by key, and the number of records.

        A killed search may have left an incomplete write at the end of each file: it is removed.
        `record` is the size of a record in bytes.
        """
        records, complete = files["vectors"].tell() // record, files["keys"].tell() // _KEY
        ends = np.arange(1, records + 1)
        if self._is_ragged:
            files["ends"].seek(0)
            content = files["ends"].read()
            ends = np.frombuffer(content[: len(content) // 8 * 8], np.int64)
        complete = min(complete, int(np.searchsorted(ends, records, "right")))
        count = int(ends[complete - 1]) if complete else 0
        sizes = {"vectors": count * record, "ends": complete * 8, "keys": complete * _KEY}
        for name, file in files.items():
            file.truncate(sizes[name])
        files["keys"].seek(0)
        content = files["keys"].read()
        return {content[i * _KEY : (i + 1) * _KEY]: i for i in range(complete)}, count

    def _take_missing(self, missing: set[bytes]) -> Iterator[tuple[bytes, int, str]]:
        """Yields key, line number and text of each key in `missing`, and removes the key."""
        for line, text in self._texts():
            if (key := _key(text)) in missing:
                missing.remove(key)
                yield key, line, text


# Maps queries to the texts that were found for each of them, the best first.
Search = Callable[[Sequence[str]], list[list[SearchHit]]]


def answer_file(search: Search, queries: str, out: epath.Path) -> None:
    """Writes what is found for each line of a file, as JSON lines.

    Each is `{"query": "...", "nearest": [{"line": 3, "score": 0.71, "text": "..."}, ...]}`.
    """
    path = absolute(out)
    with (
        create_folder(path.parent),
        replace_atomically(path) as unfinished,
        unfinished.open("w") as file,
    ):
        texts = (text for _, text in line_reader.read([queries]))
        while batch := list(itertools.islice(texts, _QUERIES)):
            for query, hits in zip(batch, search(batch), strict=True):
                nearest = [dataclasses.asdict(hit) for hit in hits]
                file.write(json.dumps({"query": query, "nearest": nearest}) + "\n")


def _fingerprint(model: Base, embedder: Embedder) -> str:
    """Returns a hash of an encoder's weights, its tokenizer, and the embedder's settings."""
    chosen = embedder.features
    # Written with the names of former versions, so that folders of vectors stay usable.
    features = (
        f"Features(pooling={chosen.pooling!r}, layers={chosen.layers}, combine={chosen.combine!r}, "
        f"length={'unit' if chosen.normalize else 'as_is'!r}, dimensions={chosen.dimensions})"
    )
    settings = f"{model.model}/{model.tokenizer.sha256}/{features}/{embedder.max_length}"
    settings += model.vectors.text_prefix if model.vectors else ""
    if embedder.form_name != "dense":
        settings += str(model.vectors)
    digest = hashlib.sha256(settings.encode())
    for name, values in sorted(flatten(jax.device_get(model.params)).items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()


def _key(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:_KEY]

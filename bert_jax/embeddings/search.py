"""Semantic search: finds the texts of a file whose vectors score highest for a query's vector.

The score is the cosine or, for other forms of vectors, that of `forms`.

A folder keeps the vectors. So only new or changed texts are embedded, and an interrupted search
resumes:

made.json  the encoder, and how it makes vectors
vectors    float32 [texts, W], of length 1, in the order in which they were embedded; for other
           forms the records of `forms`
ends       for other forms, int64 [texts]: number of records of each text and all before it
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
from bert_jax.errors import InputError, pluralize
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
_KEY = 16  # bytes of a key
_BATCH_QUERIES = 256  # answered in one pass over the vectors
_BATCH_TEXTS = 1_024  # texts embedded between two writes: the work that a kill loses
_SECONDS_BETWEEN_REPORTS = 30.0


@dataclasses.dataclass(frozen=True)
class SearchHit:
    """A text that is near to a query."""

    line: int  # line number, from 1
    score: float  # for the query, by the vectors or by the reranker
    text: str  # the whole line, or one passage of it


class Index:
    """The vectors of the texts of a file. Embeds the texts that have no vector yet.

    Args:
      path: a file with one text on each line; blank lines are skipped.
      folder: folder of the vectors.
      embedder: computes the vectors; dense ones have length 1.
      long_texts: how a text longer than `embedder.max_length` is searched: by its beginning only,
        or split into passages, each indexed as a text.
    """

    def __init__(
        self,
        path: str,
        folder: epath.Path,
        base: Base,
        embedder: Embedder,
        report: Callable[[str], None],
        long_texts: Literal["beginning", "passages"] = "beginning",
    ):
        self._path, self._folder, self._embedder = path, folder, embedder
        self._split = embedder.split_text if long_texts == "passages" else lambda text: [text]
        self._long_texts = long_texts
        self._is_ragged = embedder.form_name != "dense"
        self._number_by_key: dict[bytes, int] = {}  # equal texts keep the first number
        for number, (_, text) in enumerate(self._texts()):
            self._number_by_key.setdefault(_key(text), number)
        if not self._number_by_key:
            raise InputError(f"{path}: contains no text; put one text on each line")
        with lock(folder, setting="--vectors"):
            self._require_same_encoder(_fingerprint(base, embedder))
            row_by_key = self._embed_missing(report)
        self._numbers = np.array(list(self._number_by_key.values()))
        self._rows = np.array([row_by_key[key] for key in self._number_by_key])

    def nearest(self, queries: Sequence[str], top: int) -> list[list[SearchHit]]:
        """Returns the `top` nearest texts to each query, best first; equal ones in file order."""
        form = self._embedder.form
        parts = [p.vectors for p in self._embedder.embed(queries, "query")]
        try:
            neighbours, scores = nearest_lib.nearest(
                self._blocks(), form.concatenate(parts), top, form.score
            )
        except nearest_lib.NotFiniteError as error:
            raise InputError(
                f"{self._folder / 'vectors'}: row {self._rows[error.index]} holds a number that "
                "is not finite; delete the folder, so that the vectors are computed again"
            ) from error
        # Texts are not kept in memory: they are read again, and must be the same.
        numbers = self._numbers[neighbours]
        wanted = set(numbers.flat)
        texts = {number: text for number, text in enumerate(self._texts()) if number in wanted}
        unchanged = {n for n, (_, x) in texts.items() if self._number_by_key.get(_key(x)) == n}
        if unchanged != wanted:
            raise InputError(f"{self._path}: changed during the search; run again")
        results = []
        for ranking in zip(numbers, scores, strict=True):
            pairs = zip(*ranking, strict=True)
            results.append([SearchHit(texts[n][0], float(x), texts[n][1]) for n, x in pairs])
        return results

    def _blocks(self) -> Iterator[Any]:
        """Yields the vectors of the texts of the file, some at a time."""
        form, width = self._embedder.form, self._embedder.width
        dtype, folder = form.record_dtype(width), self._folder
        records = np.empty(0, dtype)
        if os.path.getsize(folder / "vectors"):  # an empty file cannot be memory-mapped
            records = np.memmap(folder / "vectors", dtype.base, "r").reshape(-1, *dtype.shape)
        ends = np.arange(1, len(records) + 1)
        if self._is_ragged:
            ends = np.fromfile(folder / "ends", np.int64)
        starts = np.concatenate([[0], ends[:-1]])
        for rows in nearest_lib.split_indices(self._rows, form.block_texts):
            counts = (ends - starts)[rows]
            selected = records[ragged_indices(starts[rows], counts)]
            yield form.join_records(selected, counts, width)

    def _texts(self) -> Iterator[tuple[int, str]]:
        for line, (_, text) in enumerate(line_reader.read([self._path]), 1):
            if text.strip():
                yield from ((line, part) for part in self._split(text))

    def _require_same_encoder(self, encoder: str) -> None:
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
        form, width = self._embedder.form, self._embedder.width
        names = ("vectors", "ends", "keys") if self._is_ragged else ("vectors", "keys")
        with translate_os_errors(self._folder), contextlib.ExitStack() as stack:
            files = {
                name: stack.enter_context(open(os.fspath(self._folder / name), "a+b"))
                for name in names
            }
            row_by_key, record_count = self._recover_rows(files, form.record_dtype(width).itemsize)
            previous = len(row_by_key)
            missing = self._number_by_key.keys() - row_by_key.keys()
            if missing:
                report(
                    f"{self._folder}: embedding {len(missing):,} of "
                    f"{pluralize(len(self._number_by_key), 'text')}, which have no vector yet"
                )
            reported = time.monotonic()
            texts = self._take_missing(missing)
            while batch := list(itertools.islice(texts, _BATCH_TEXTS)):
                lines = [(f"{self._path}:{line}", text) for _, line, text in batch]
                parts = [p.vectors for p in self._embedder.embed_lines(lines)]
                records, counts = form.split_records(form.concatenate(parts))
                ends = record_count + np.cumsum(counts)
                record_count += len(records)
                contents = {"vectors": records.tobytes(), "ends": ends.tobytes()}
                contents["keys"] = b"".join(key for key, *_ in batch)
                for name, file in files.items():
                    file.write(contents[name])
                    file.flush()
                row_by_key |= {key: len(row_by_key) + i for i, (key, *_) in enumerate(batch)}
                if time.monotonic() - reported > _SECONDS_BETWEEN_REPORTS:
                    reported = time.monotonic()
                    report(f"{self._folder}: {len(row_by_key) - previous:,} embedded")
        if (count := self._embedder.truncated_texts) and self._long_texts == "beginning":
            report(
                f"{self._folder}: only the first {self._embedder.max_length} tokens of "
                f"{pluralize(count, 'text')} are searched; add --long-texts passages"
            )
        if missing:  # keys of texts that are no longer in the file
            raise InputError(f"{self._path}: changed while it was read; run again")
        return row_by_key

    def _recover_rows(
        self, files: Mapping[str, IO[bytes]], record_size: int
    ) -> tuple[dict[bytes, int], int]:
        """Returns the rows of the texts that have a vector, by key, and the number of records.

        A killed search may have left an incomplete write at the end of each file: it is removed.
        """
        records, complete = files["vectors"].tell() // record_size, files["keys"].tell() // _KEY
        ends = np.arange(1, records + 1)
        if self._is_ragged:
            files["ends"].seek(0)
            content = files["ends"].read()
            ends = np.frombuffer(content[: len(content) // 8 * 8], np.int64)
        complete = min(complete, int(np.searchsorted(ends, records, "right")))
        count = int(ends[complete - 1]) if complete else 0
        sizes = {"vectors": count * record_size, "ends": complete * 8, "keys": complete * _KEY}
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
        while batch := list(itertools.islice(texts, _BATCH_QUERIES)):
            for query, hits in zip(batch, search(batch), strict=True):
                nearest = [dataclasses.asdict(hit) for hit in hits]
                file.write(json.dumps({"query": query, "nearest": nearest}) + "\n")


def _fingerprint(base: Base, embedder: Embedder) -> str:
    """Returns a hash of an encoder's weights, its tokenizer, and the embedder's settings."""
    chosen = embedder.features
    # Written with the names of former versions, so that folders of vectors stay usable.
    features = (
        f"Features(pooling={chosen.pooling!r}, layers={chosen.layers}, combine={chosen.combine!r}, "
        f"length={'unit' if chosen.normalize else 'as_is'!r}, dimensions={chosen.dimensions})"
    )
    settings = f"{base.model}/{base.tokenizer.sha256}/{features}/{embedder.max_length}"
    settings += base.vectors.text_prefix if base.vectors else ""
    if embedder.form_name != "dense" or embedder.settings.dense_width:
        settings += str(base.vectors)
    digest = hashlib.sha256(settings.encode())
    for name, values in sorted(flatten(jax.device_get(base.params)).items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()


def _key(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:_KEY]

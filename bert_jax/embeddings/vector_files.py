"""Files of vectors: .npz, .parquet and .jsonl. A file appears only when all vectors are written.

.npz      vectors: float32 [rows, W], or a smaller type (`quantized`), a row for each text. With
          a row for each token also pieces, the tokens, [rows], and offsets, int64 [texts + 1]:
          text i has the rows offsets[i] to offsets[i+1]
.parquet  one row for each text: vector, or pieces and vectors
.jsonl    one object for each text: {"vector": [...]}, or {"pieces": [...], "vectors": [[...], ...]}

Sparse vectors are written as .npz, the format of `scipy.sparse.save_npz` (a matrix [texts, V]), or
as .jsonl: {"indices": [...], "values": [...]}, the tokens whose weights are not 0.
"""

import contextlib
import itertools
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import numpy as np
from etils import epath
from scipy.sparse import csr_array

from bert_jax.errors import InputError
from bert_jax.storage.workdir import absolute, create_folder, replace_atomically, require_local

# Writes vectors [rows, W], and the tokens of each text if each token has a vector.
Sink = Callable[[np.ndarray, list[list[str]] | None], None]

# Nine digits distinguish all float32 values. "#" forces a decimal point: -0 would lose its sign.
_FORMATS = {"f": "%#.9g", "i": "%d", "u": "%d"}

# Writes sparse vectors [texts, V].
SparseSink = Callable[[csr_array], None]
# The type and the shape of a row of each array of an archive.
Members = dict[str, tuple[np.dtype, tuple[int, ...]]]


@contextlib.contextmanager
def open_sparse_writer(path: epath.Path, width: int) -> Iterator[SparseSink]:
    """Yields a function that adds sparse vectors to a file, like `open_writer`."""
    with (
        _open_file(path, _SPARSE_WRITERS) as file,
        _SPARSE_WRITERS[path.suffix](file, width) as add,
    ):
        yield add


@contextlib.contextmanager
def _open_file(path: epath.Path, writers: Mapping[str, Any]) -> Iterator[IO[bytes]]:
    """Yields a file that appears when the context ends."""
    if path.suffix not in writers:
        raise InputError(f"{path}: the name must end in {', '.join(writers)}")
    require_local(path)
    path = absolute(path)
    with (
        create_folder(path.parent),
        replace_atomically(path) as unfinished,
        open(os.fspath(unfinished), "wb") as file,
    ):
        yield file


@contextlib.contextmanager
def open_writer(
    path: epath.Path,
    width: int,
    max_token_characters: int,
    dtype: np.dtype = np.dtype("<f4"),  # noqa: B008
) -> Iterator[Sink]:
    """Yields a function that adds texts to a file; the file appears when the context ends.

    Args:
      path: the file, whose suffix selects the format. An existing file is replaced.
      max_token_characters: maximum number of characters of a token; 0 if each text has one vector.
    """
    with (
        _open_file(path, _WRITERS) as file,
        _WRITERS[path.suffix](file, width, max_token_characters, dtype) as add,
    ):
        yield add


@contextlib.contextmanager
def _npz(file: IO[bytes], width: int, max_chars: int, dtype: np.dtype) -> Iterator[Sink]:
    """Collects the rows in temporary files, because a header needs the number of rows."""
    members: Members = {"vectors": (dtype, (width,))}
    if max_chars:
        members["pieces"] = np.dtype(f"<U{max_chars}"), ()
        members["offsets"] = np.dtype("<i8"), ()
    with _open_archive(file, members) as (spool, row_counts):

        def add(vectors: np.ndarray, pieces: list[list[str]] | None) -> None:
            first_row = row_counts["vectors"]
            spool("vectors", vectors)
            if pieces is not None:
                spool("pieces", [token for tokens in pieces for token in tokens])
                spool("offsets", first_row + np.cumsum([len(tokens) for tokens in pieces]))

        if max_chars:
            spool("offsets", [0])
        yield add


@contextlib.contextmanager
def _sparse_npz(file: IO[bytes], width: int) -> Iterator[SparseSink]:
    """Writes what `scipy.sparse.load_npz` reads."""
    members: Members = {"indices": (np.dtype("<i4"), ()), "indptr": (np.dtype("<i8"), ())}
    members |= {"data": (np.dtype("<f4"), ()), "shape": (np.dtype("<i8"), ())}
    with _open_archive(file, members | {"format": (np.dtype("S3"), ())}) as (spool, row_counts):
        spool("indptr", [0])

        def add(vectors: csr_array) -> None:
            spool("indptr", row_counts["data"] + vectors.indptr[1:].astype(np.int64))
            spool("indices", vectors.indices)
            spool("data", vectors.data)

        yield add
        spool("shape", [row_counts["indptr"] - 1, width])
        spool("format", [b"csr"])


@contextlib.contextmanager
def _sparse_json_lines(file: IO[bytes], width: int) -> Iterator[SparseSink]:
    def add(vectors: csr_array) -> None:
        for start, end in itertools.pairwise(vectors.indptr):
            indices, values = vectors.indices[start:end].tolist(), vectors.data[start:end]
            numbers = ", ".join(f"{value:#.9g}" for value in values.tolist())
            file.write(f'{{"indices": {indices}, "values": [{numbers}]}}\n'.encode())

    yield add


@contextlib.contextmanager
def _open_archive(
    file: IO[bytes], members: Members
) -> Iterator[tuple[Callable[[str, Any], None], dict[str, int]]]:
    """Yields a function that adds rows to a member, and the number of rows of each member.

    The archive is written when the context ends. `members` have the type and the shape of a row.
    """
    row_counts = dict.fromkeys(members, 0)
    with contextlib.ExitStack() as stack:
        folder = epath.Path(file.name).parent
        spools = {name: stack.enter_context(tempfile.TemporaryFile(dir=folder)) for name in members}

        def spool(name: str, values: Any) -> None:
            array = np.ascontiguousarray(values, members[name][0])
            spools[name].write(array.data)
            row_counts[name] += len(array)

        yield spool, row_counts
        with zipfile.ZipFile(file, "w") as archive:
            for name, (dtype, shape) in members.items():
                # Without a time stamp: the same texts give the same bytes.
                entry = zipfile.ZipInfo(f"{name}.npy")
                with archive.open(entry, "w", force_zip64=True) as member:
                    header = {
                        "descr": np.lib.format.dtype_to_descr(dtype),
                        "fortran_order": False,
                        "shape": (row_counts[name], *shape),
                    }
                    np.lib.format.write_array_header_1_0(member, header)
                    spools[name].seek(0)
                    shutil.copyfileobj(spools[name], member, 2**20)


@contextlib.contextmanager
def _json_lines(file: IO[bytes], width: int, max_chars: int, dtype: np.dtype) -> Iterator[Sink]:
    row_format = f"[{', '.join([_FORMATS[dtype.kind]] * width)}]"

    def add(vectors: np.ndarray, pieces: list[list[str]] | None) -> None:
        # "%#.9g" may end in a point, but JSON requires a digit after it.
        formatted = (row_format % tuple(row.tolist()) for row in vectors)
        rows = (text.replace(".,", ".0,").replace(".]", ".0]") for text in formatted)
        if pieces is None:
            lines = (f'{{"vector": {row}}}\n' for row in rows)
        else:
            lines = (
                f'{{"pieces": {json.dumps(tokens)}, '
                f'"vectors": [{", ".join(next(rows) for _ in tokens)}]}}\n'
                for tokens in pieces
            )
        file.writelines(line.encode() for line in lines)

    yield add


@contextlib.contextmanager
def _parquet(file: IO[bytes], width: int, max_chars: int, dtype: np.dtype) -> Iterator[Sink]:
    import pyarrow as pa
    from pyarrow import parquet

    vector = pa.list_(pa.from_numpy_dtype(dtype), width)
    if max_chars:
        schema = pa.schema([("pieces", pa.list_(pa.string())), ("vectors", pa.list_(vector))])
    else:
        schema = pa.schema([("vector", vector)])

    with parquet.ParquetWriter(file, schema) as writer:

        def add(vectors: np.ndarray, pieces: list[list[str]] | None) -> None:
            numbers = pa.array(vectors.reshape(-1))
            columns = [pa.FixedSizeListArray.from_arrays(numbers, width)]
            if pieces is not None:
                offsets = np.cumsum([0, *map(len, pieces)]).astype(np.int32)
                columns = [
                    pa.array(pieces, schema.field("pieces").type),
                    pa.ListArray.from_arrays(offsets, columns[0]),
                ]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))

        yield add


_WRITERS = {".npz": _npz, ".parquet": _parquet, ".jsonl": _json_lines}
_SPARSE_WRITERS = {".npz": _sparse_npz, ".jsonl": _sparse_json_lines}

"""Files of vectors: .npz, .parquet and .jsonl. A file appears only when all vectors are written.

.npz      vectors: float32 [rows, W], or a smaller type (`quantized`), a row for each text. Vectors
          of tokens: a row for each token, with pieces (text) [rows] and offsets int64 [texts + 1]:
          text i has the rows offsets[i] to offsets[i+1]
.parquet  one row for each text: vector, or pieces and vectors
.jsonl    one object for each text: {"vector": [...]}, or {"pieces": [...], "vectors": [[...], ...]}
"""

import contextlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np
from etils import epath

from bert_jax.errors import InputError
from bert_jax.storage.workdir import absolute, create_folder, replace_atomically, require_local

# Writes vectors [rows, W], and the tokens of each text if the vectors are of tokens.
Sink = Callable[[np.ndarray, list[list[str]] | None], None]

# Nine digits distinguish all float32 values. "#" always writes a point: "-0" would lose its sign.
_FORMATS = {"f": "%#.9g", "i": "%d", "u": "%d"}


@contextlib.contextmanager
def open_writer(
    path: epath.Path,
    width: int,
    longest_token: int,
    dtype: np.dtype = np.dtype("<f4"),  # noqa: B008
) -> Iterator[Sink]:
    """Yields a function that adds texts to a file; the file appears when the context ends.

    Args:
      path: the file, whose suffix selects the format. An existing file is replaced.
      longest_token: characters of the longest token; 0 if each text has one vector.
    """
    if path.suffix not in _WRITERS:
        raise InputError(f"{path}: the name must end in {', '.join(_WRITERS)}")
    require_local(path)
    path = absolute(path)
    with (
        create_folder(path.parent),
        replace_atomically(path) as unfinished,
        open(os.fspath(unfinished), "wb") as file,
        _WRITERS[path.suffix](file, width, longest_token, dtype) as add,
    ):
        yield add


@contextlib.contextmanager
def _npz(file: IO[bytes], width: int, longest_token: int, dtype: np.dtype) -> Iterator[Sink]:
    """Collects the rows in temporary files, because a header needs the number of rows."""
    members: dict[str, tuple[np.dtype, tuple[int, ...]]] = {"vectors": (dtype, (width,))}
    if longest_token:
        members["pieces"] = np.dtype(f"<U{longest_token}"), ()
        members["offsets"] = np.dtype("<i8"), ()
    rows = dict.fromkeys(members, 0)
    with contextlib.ExitStack() as stack:
        folder = epath.Path(file.name).parent
        spools = {name: stack.enter_context(tempfile.TemporaryFile(dir=folder)) for name in members}

        def spool(name: str, values: Any) -> None:
            array = np.ascontiguousarray(values, members[name][0])
            spools[name].write(array.data)
            rows[name] += len(array)

        def add(vectors: np.ndarray, pieces: list[list[str]] | None) -> None:
            first_row = rows["vectors"]
            spool("vectors", vectors)
            if pieces is not None:
                spool("pieces", [token for tokens in pieces for token in tokens])
                spool("offsets", first_row + np.cumsum([len(tokens) for tokens in pieces]))

        if longest_token:
            spool("offsets", [0])
        yield add
        with zipfile.ZipFile(file, "w") as archive:
            for name, (dtype, shape) in members.items():
                # Without a time stamp: the same texts give the same bytes.
                entry = zipfile.ZipInfo(f"{name}.npy")
                with archive.open(entry, "w", force_zip64=True) as member:
                    header = {
                        "descr": np.lib.format.dtype_to_descr(dtype),
                        "fortran_order": False,
                        "shape": (rows[name], *shape),
                    }
                    np.lib.format.write_array_header_1_0(member, header)
                    spools[name].seek(0)
                    shutil.copyfileobj(spools[name], member, 2**20)


@contextlib.contextmanager
def _json_lines(file: IO[bytes], width: int, longest_token: int, dtype: np.dtype) -> Iterator[Sink]:
    row_format = f"[{', '.join([_FORMATS[dtype.kind]] * width)}]"

    def add(vectors: np.ndarray, pieces: list[list[str]] | None) -> None:
        # A number with nine digits before the point has none after it, but JSON requires one.
        texts = (row_format % tuple(row.tolist()) for row in vectors)
        rows = (text.replace(".,", ".0,").replace(".]", ".0]") for text in texts)
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
def _parquet(file: IO[bytes], width: int, longest_token: int, dtype: np.dtype) -> Iterator[Sink]:
    import pyarrow as pa
    from pyarrow import parquet

    vector = pa.list_(pa.from_numpy_dtype(dtype), width)
    if longest_token:
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

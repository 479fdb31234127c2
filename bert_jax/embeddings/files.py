"""Files of vectors, written as they come, whole or not at all: .npz, .parquet and .jsonl.

.npz      vectors float32 [rows, W], or smaller ones (`quantized`). Of pieces: all texts' one
          behind the other, with pieces (text) [rows] and offsets int64 [texts + 1]: text i has rows
          offsets[i] to offsets[i+1]
.parquet  a row a text: vector, or pieces and vectors
.jsonl    an object a text: {"vector": [...]}, or {"pieces": [...], "vectors": [[...], ...]}
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
from bert_jax.storage.workdir import absolute, create_folder, new_file, require_local

# Takes vectors [rows, W], and if they are of pieces the pieces of each text.
Add = Callable[[np.ndarray, list[list[str]] | None], None]

# Nine digits tell any float32 from its neighbours; with a point always, as -0 would lose its sign.
_NUMBERS = {"f": "%#.9g", "i": "%d", "u": "%d"}


@contextlib.contextmanager
def writing(
    path: epath.Path,
    width: int,
    longest_piece: int,
    dtype: np.dtype = np.dtype("<f4"),  # noqa: B008
) -> Iterator[Add]:
    """Yields a function that adds texts to the file, which is there once all are added.

    Args:
      path: of the file; its suffix says which kind. What is there is replaced.
      width: numbers of a vector.
      longest_piece: characters; 0: vectors are of whole texts.
      dtype: of the numbers.
    """
    if path.suffix not in _WRITERS:
        raise InputError(f"{path}: the name must end in {', '.join(_WRITERS)}")
    require_local(path)
    path = absolute(path)
    with (
        create_folder(path.parent),
        new_file(path) as unfinished,
        open(os.fspath(unfinished), "wb") as file,
        _WRITERS[path.suffix](file, width, longest_piece, dtype) as add,
    ):
        yield add


@contextlib.contextmanager
def _npz(file: IO[bytes], width: int, longest_piece: int, dtype: np.dtype) -> Iterator[Add]:
    """Headers say how many rows there are: until that is known, they lie in files without names."""
    members: dict[str, tuple[np.dtype, tuple[int, ...]]] = {"vectors": (dtype, (width,))}
    if longest_piece:
        members["pieces"] = np.dtype(f"<U{longest_piece}"), ()
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
            first = rows["vectors"]
            spool("vectors", vectors)
            if pieces is not None:
                spool("pieces", [piece for of_text in pieces for piece in of_text])
                spool("offsets", first + np.cumsum([len(of_text) for of_text in pieces]))

        if longest_piece:
            spool("offsets", [0])
        yield add
        with zipfile.ZipFile(file, "w") as archive:
            for name, (dtype, shape) in members.items():
                # Without the hour: the same texts give the same bytes.
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
def _json_lines(file: IO[bytes], width: int, longest_piece: int, dtype: np.dtype) -> Iterator[Add]:
    form = f"[{', '.join([_NUMBERS[dtype.kind]] * width)}]"

    def add(vectors: np.ndarray, pieces: list[list[str]] | None) -> None:
        # Nine digits before the point leave none behind it, which JSON wants.
        texts = (form % tuple(row.tolist()) for row in vectors)
        rows = (text.replace(".,", ".0,").replace(".]", ".0]") for text in texts)
        if pieces is None:
            lines = (f'{{"vector": {row}}}\n' for row in rows)
        else:
            lines = (
                f'{{"pieces": {json.dumps(of_text)}, '
                f'"vectors": [{", ".join(next(rows) for _ in of_text)}]}}\n'
                for of_text in pieces
            )
        file.writelines(line.encode() for line in lines)

    yield add


@contextlib.contextmanager
def _parquet(file: IO[bytes], width: int, longest_piece: int, dtype: np.dtype) -> Iterator[Add]:
    import pyarrow as pa
    from pyarrow import parquet

    vector = pa.list_(pa.from_numpy_dtype(dtype), width)
    if longest_piece:
        schema = pa.schema([("pieces", pa.list_(pa.string())), ("vectors", pa.list_(vector))])
    else:
        schema = pa.schema([("vector", vector)])

    def of(vectors: np.ndarray) -> Any:
        return pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), width)

    with parquet.ParquetWriter(file, schema) as writer:

        def add(vectors: np.ndarray, pieces: list[list[str]] | None) -> None:
            columns = [of(vectors)]
            if pieces is not None:
                offsets = np.cumsum([0, *map(len, pieces)]).astype(np.int32)
                columns = [
                    pa.array(pieces, schema.field("pieces").type),
                    pa.ListArray.from_arrays(offsets, columns[0]),
                ]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))

        yield add


_WRITERS = {".npz": _npz, ".parquet": _parquet, ".jsonl": _json_lines}

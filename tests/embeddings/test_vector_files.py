"""Files of vectors: three forms of the same numbers, whole or not there."""

import itertools
import json

import numpy as np
import pytest
from etils import epath
from pyarrow import parquet

from bert_jax.embeddings import vector_files
from bert_jax.errors import InputError

WIDTH = 3
# Texts of one, no and two pieces, then of one.
PIECES = [[["wa"], [], ['"\\', "é"]], [["##\u2028x"]]]
rng = np.random.default_rng(0)
EXTREME = np.array([[1 / 3, -0.0, 3.4028235e38], [1e-45, 123456792.0, -987654336.0]], np.float32)
PARTS = [np.concatenate([EXTREME, rng.standard_normal((1, WIDTH), np.float32)]), EXTREME[:1]]


def write(path, pieces):
    with vector_files.open_writer(epath.Path(path), WIDTH, 4 if pieces else 0) as add:
        for number, part in enumerate(PARTS):
            add(part, PIECES[number] if pieces else None)
    return path


def read(path):
    """All vectors in order, and the pieces of each text."""
    if path.suffix == ".npz":
        found = np.load(path)
        if "pieces" not in found:
            return found["vectors"], None
        ends = found["offsets"]
        texts = [found["pieces"][a:b].tolist() for a, b in itertools.pairwise(ends)]
        return found["vectors"], texts
    rows = (
        [json.loads(line) for line in path.read_text().splitlines()]
        if path.suffix == ".jsonl"
        else parquet.read_table(path).to_pylist()
    )
    if "pieces" not in rows[0]:
        return np.array([row["vector"] for row in rows], np.float32), None
    for row in rows:
        assert len(row["pieces"]) == len(row["vectors"])
    every = [vector for row in rows for vector in row["vectors"]]
    return np.array(every, np.float32), [row["pieces"] for row in rows]


@pytest.mark.parametrize("suffix", vector_files._WRITERS)
@pytest.mark.parametrize("pieces", [False, True])
def test_every_form_holds_every_bit(suffix, pieces, tmp_path):
    found, texts = read(write(tmp_path / f"v{suffix}", pieces))
    assert found.dtype == np.float32
    assert found.tobytes() == np.concatenate(PARTS).tobytes()
    assert texts == ([*PIECES[0], *PIECES[1]] if pieces else None)
    assert [path.name for path in tmp_path.iterdir()] == [f"v{suffix}"]


@pytest.mark.parametrize("suffix", [".npz", ".jsonl"])
def test_the_same_vectors_give_the_same_bytes(suffix, tmp_path):
    first, second = (write(tmp_path / f"{name}{suffix}", True) for name in "ab")
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("suffix", vector_files._WRITERS)
def test_no_texts_are_a_file_of_none(suffix, tmp_path):
    path = epath.Path(tmp_path / f"v{suffix}")
    with vector_files.open_writer(path, WIDTH, 0):
        pass
    if suffix == ".npz":
        assert np.load(path)["vectors"].shape == (0, WIDTH)
    elif suffix == ".parquet":
        assert parquet.read_table(path).num_rows == 0
    else:
        assert path.read_bytes() == b""


@pytest.mark.parametrize("suffix", vector_files._WRITERS)
@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError])
def test_a_writing_that_ends_early_leaves_what_was_there(suffix, stop, tmp_path):
    path = tmp_path / f"v{suffix}"
    path.write_text("before")
    for target in (path, tmp_path / "new" / f"v{suffix}"):
        with pytest.raises(stop), vector_files.open_writer(epath.Path(target), WIDTH, 0) as add:
            add(PARTS[0], None)
            raise stop
    assert path.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["v.csv", "v", ".npz", "v.npz/"])
def test_other_forms_are_refused_by_name(name, tmp_path):
    path = f"{tmp_path}/{name}"
    if name.endswith("/"):
        (tmp_path / "v.npz").mkdir()
    with pytest.raises(InputError) as caught, vector_files.open_writer(epath.Path(path), WIDTH, 0):
        pass
    assert path.rstrip("/") in str(caught.value)
    if not name.endswith("/"):
        assert ".npz, .parquet, .jsonl" in str(caught.value)

"""Vectors of texts, against what the encoder makes of each by itself, pooled in NumPy."""

import dataclasses
import gzip
import json
import pathlib

import hf_folder
import numpy as np
import pytest
import samples
import tokenizers
from broken import Case, call, refuses, write
from etils import epath
from pyarrow import parquet

from bert_jax.checkpoints.base import TextVectors
from bert_jax.embeddings import embed, vector_files
from bert_jax.errors import InputError
from bert_jax.interop import importing
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.storage.mirror import open_workdir
from bert_jax.text import library

WIDTH = 64
# Pieces of texts of all lengths that share a program, and of one that is cut.
LENGTHS = [7, 0, 1, 126, 30, 31, 14, 2, 62, 15, 63, 127, 5, 5, 300, 0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embed")
    source = epath.Path(hf_folder.write(folder / "hf"))
    importing.import_weights(source, epath.Path(folder / "base"), None, lambda line: None)
    return LoadedModel.of(open_workdir(folder / "base"))


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(0)
    return [" ".join(f"w{i}" for i in rng.integers(5, hf_folder.PIECES, n)) for n in LENGTHS]


@pytest.fixture(scope="module")
def states(trained, texts):
    """Of each text by itself: its embeddings, and what each of three layers makes of them."""
    return trained.layer_outputs([" ".join(text.split()[:126]) for text in texts], layers=range(4))


def embedded(trained, texts, devices=4, batch_tokens=200, max_length=0, **features):
    """All vectors, all pieces, and the embedder."""
    mesh = samples.mesh_of(devices)
    features = embed.VectorOptions(**features)
    embedder = embed.Embedder(trained, features, mesh, max_length, batch_tokens)
    found = list(embedder.embed(iter(texts)))
    vectors = np.concatenate([part.vectors for part in found])
    assert vectors.dtype == np.float32 and vectors.shape[1] == embedder.width
    pieces = [of_text for part in found for of_text in part.pieces or []]
    return vectors, pieces, embedder


def close(found, expected, tolerance=2e-6):
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < tolerance * max(1, np.abs(expected).max())


@pytest.mark.parametrize(
    ("pooling", "layers", "combine"),
    [
        ("mean", (-1,), "concat"),
        ("cls", (3,), "concat"),
        ("tokens", (-1,), "concat"),
        ("tokens", (-4, -3, -2, -1), "concat"),
        ("mean", (1, 2), "mean"),
        ("cls", (2, 0), "concat"),
        ("tokens", (0,), "mean"),
    ],
)
def test_vectors_are_of_the_encoder_s_states(pooling, layers, combine, trained, texts, states):
    expected = []
    for of_text in states:
        chosen = [of_text[layer] for layer in layers]
        whole = np.concatenate(chosen, -1) if combine == "concat" else np.mean(chosen, 0)
        expected.append(
            {"mean": whole.mean(0)[None], "cls": whole[:1], "tokens": whole[1:-1]}[pooling]
        )
    found, pieces, embedder = embedded(
        trained, texts, pooling=pooling, layers=layers, combine=combine
    )
    close(found, np.concatenate(expected))
    assert (embedder.texts, embedder.truncated_texts, embedder.max_length) == (16, 2, 128)
    if pooling == "tokens":
        assert pieces == [text.split()[:126] for text in texts]


def test_what_stands_before_a_text_is_cut_with_it(trained):
    """As others cut a prompt and a text: the blank between them is not left alone."""
    content = (pathlib.Path(__file__).parents[1] / "golden/tokenizers/gemma.json").read_bytes()
    named = {"pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
    tokenizer, known = (
        library.LibraryTokenizer(content, named, "gemma"),
        TextVectors(text_prefix="query: "),
    )
    led = dataclasses.replace(trained, tokenizer=tokenizer, vectors=known)
    _, pieces, _ = embedded(led, ["how are", "we"], pooling="tokens")
    theirs = tokenizers.Tokenizer.from_buffer(content)
    whole = ("query: how are", "query: we")
    assert pieces == [theirs.encode(it, add_special_tokens=False).tokens for it in whole]


@pytest.mark.parametrize("pooling", ["mean", "tokens"])
def test_vectors_of_length_one(pooling, trained, texts):
    plain, *_ = embedded(trained, texts, pooling=pooling)
    unit, *_ = embedded(trained, texts, pooling=pooling, normalize=True)
    close(unit, plain / np.linalg.norm(plain, axis=1, keepdims=True))


@pytest.mark.long
@pytest.mark.parametrize(
    ("pooling", "devices", "batch_tokens"), [("mean", 1, 0), ("cls", 3, 300), ("tokens", 4, 1)]
)
def test_vectors_are_the_same_on_any_devices_in_any_batch(
    pooling, devices, batch_tokens, trained, texts
):
    expected, *_ = embedded(trained, texts, pooling=pooling)
    found, *_ = embedded(trained, texts, devices, batch_tokens, pooling=pooling)
    close(found, expected)


@pytest.mark.long
@pytest.mark.parametrize("pooling", [pytest.param("mean", marks=pytest.mark.long), "tokens"])
def test_order_is_kept_over_windows_and_their_parts(pooling, trained, texts, monkeypatch):
    expected, pieces, _ = embedded(trained, texts, pooling=pooling)
    monkeypatch.setattr(embed, "_WINDOW_TEXTS", 3)
    monkeypatch.setattr(embed, "_VECTOR_BYTES", 20 * WIDTH * 4)
    found, again, embedder = embedded(trained, texts, pooling=pooling)
    close(found, expected)
    assert again == pieces and embedder.texts == len(texts)
    monkeypatch.setattr(embed, "_WINDOW_CHARACTERS", 100)
    close(embedded(trained, texts, pooling=pooling)[0], expected)


def test_texts_are_cut_at_the_length_asked_for(trained, texts):
    found, pieces, embedder = embedded(trained, texts, max_length=16, pooling="tokens")
    assert embedder.truncated_texts == sum(length > 14 for length in LENGTHS)
    assert pieces == [text.split()[:14] for text in texts]
    short = [" ".join(text.split()[:14]) for text in texts]
    close(found, embedded(trained, short, pooling="tokens")[0])


def test_bfloat16_is_close(trained, texts):
    low = dataclasses.replace(
        trained, model=dataclasses.replace(trained.model, compute_dtype="bfloat16")
    )
    expected, *_ = embedded(trained, texts)
    found, *_ = embedded(low, texts)
    assert 1e-4 < np.abs(found - expected).max() < 0.1


def test_what_is_not_finite_is_not_written(trained, texts, tmp_path):
    import jax

    params = jax.tree.map(lambda leaf: leaf * np.nan, trained.params)
    broken = dataclasses.replace(trained, params=params)
    embedder = embed.Embedder(broken, embed.VectorOptions(), samples.mesh_of(1))
    with pytest.raises(InputError, match="texts 1 to 16: the model computes numbers that are not"):
        embed.write(embedder, enumerate(texts), epath.Path(tmp_path / "v.npz"), print)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"layers": (4,)}, "--layers 4: must be 0 (the embeddings), from 1 to 3"),
        ({"layers": (-1, -5)}, "--layers -5: must be 0 (the embeddings), from 1 to 3"),
        ({"max_length": 129}, "--max-length 129: must be from 3 to the model's 128"),
        ({"batch_tokens": 2**20 + 1}, "--batch-tokens 1048577: must be from 0 to 1048576"),
    ],
)
def test_numbers_out_of_range_are_named(arguments, shown, trained):
    with pytest.raises(InputError) as caught:
        embedded(trained, [], **arguments)
    assert shown in str(caught.value)


# --- the command --------------------------------------------------------------------------------


@pytest.mark.long
def test_files_and_standard_input_are_lines_in_order(copy_of_run, capsys):
    pathlib.Path("a.txt").write_text("wa wb\n\nxa")
    pathlib.Path("b.txt.gz").write_bytes(gzip.compress(b"wc wd wa .\n"))
    whole = b"wa wb\n\nxa\nwc wd wa .\n"
    for arguments, stdin in (("a.txt b.txt.gz --out v.npz", b""), ("--out w.jsonl", whole)):
        assert call(f"embed --workdir run {arguments} --layers -2,-1", stdin) == (0, "")
    found = np.load("v.npz")["vectors"]
    assert found.shape == (4, 32)
    assert len(np.unique(found, axis=0)) == 4
    rows = [json.loads(line)["vector"] for line in pathlib.Path("w.jsonl").read_text().splitlines()]
    np.testing.assert_allclose(np.array(rows, np.float32), found, atol=1e-6)


def test_the_number_of_texts_that_were_cut_is_shown(trained, tmp_path):
    shown = []
    embedder = embed.Embedder(trained, embed.VectorOptions(), samples.mesh_of(1), max_length=5)
    path = epath.Path(tmp_path / "v.npz")
    embed.write(embedder, enumerate(["w9 " * 3, "w9 " * 4, "", "w7 " * 99]), path, shown.append)
    assert shown[0].startswith(f"{path}: 4 texts, 64 numbers per vector; ")
    assert shown[1:] == ["truncated to 5 tokens: 2 of 4 texts"]


@pytest.mark.long
@pytest.mark.parametrize("quantize", ["int8", "binary"])
def test_smaller_vectors_are_those_of_the_whole_ones(quantize, trained, texts, tmp_path):
    shown, read = [], {}
    for how in ("none", quantize):
        embedder = embed.Embedder(trained, embed.VectorOptions(), samples.mesh_of(1))
        for suffix in vector_files._WRITERS:
            path = epath.Path(tmp_path / f"{how}{suffix}")
            embed.write(embedder, enumerate(texts), path, shown.append, quantize=how)
        read[how] = np.load(tmp_path / f"{how}.npz")["vectors"]
    whole, small = read["none"], read[quantize]
    if quantize == "int8":
        largest = np.abs(whole).max(axis=1, keepdims=True)
        assert small.dtype == np.int8 and (np.abs(small).max(axis=1) == 127).all()
        np.testing.assert_allclose(small / 127 * largest, whole, atol=largest.max() / 254 + 1e-6)
    else:
        assert small.dtype == np.uint8 and small.shape == (len(texts), whole.shape[1] / 8)
        assert (np.unpackbits(small, axis=1) == (whole > 0)).all()
    lines = (tmp_path / f"{quantize}.jsonl").read_text().splitlines()
    assert [json.loads(line)["vector"] for line in lines] == small.tolist()
    rows = parquet.read_table(tmp_path / f"{quantize}.parquet").to_pylist()
    assert [row["vector"] for row in rows] == small.tolist()
    assert sum(f"--quantize {quantize}: " in line for line in shown) == len(vector_files._WRITERS)


@pytest.mark.parametrize("most", [3, 5, 9, 64])
def test_passages_are_a_text_in_parts_that_are_read_whole(most, trained, texts):
    embedder = embed.Embedder(trained, embed.VectorOptions(), samples.mesh_of(1), max_length=most)
    encode = trained.tokenizer.encode
    for text in (*texts, "w7 w9 " * 40, "w9"):
        parts = embedder.split_text(text)
        assert [piece for part in parts for piece in encode(part)] == encode(text)
        words = [ids for _, _, ids in trained.tokenizer.words(text)]
        assert max(map(len, map(encode, parts))) <= max(most - 2, *map(len, words), 0)
        if len(words) == len(encode(text)):  # of one piece each: as few parts as can be, and alike
            sizes = [len(encode(part)) for part in parts]
            assert len(sizes) == max(-(-len(words) // (most - 2)), 1)
            assert max(sizes) - min(sizes) <= 1


def test_a_failure_halfway_leaves_the_file_of_before(copy_of_run, monkeypatch):
    monkeypatch.setattr(embed, "_WINDOW_TEXTS", 2)
    pathlib.Path("v.npz").write_text("mine")
    words = ("standard input:10: byte 0 of the line is not UTF-8",)
    text = b"wa\n" * 9 + b"\xff\n"
    refuses(Case("bytes that are no text", "embed --workdir run --out v.npz", words, stdin=text))


CASES = [
    Case("no file of text", "embed --workdir run a.txt --out v.npz", ("a.txt: no such file",)),
    Case("a folder as text", "embed --workdir run text --out v.npz",
         ("text", "directory")),
    Case("bytes that are no text", "embed --workdir run a.txt --out new/v.npz",
         ("a.txt:2: byte 1",), write("a.txt", b"wa\n.\xff")),
    Case("a folder in the place of the output", "embed --workdir run text/all.txt --out v.npz",
         ("v.npz", "folder"), lambda: pathlib.Path("v.npz").mkdir()),
    Case("output below a file", "embed --workdir run text/all.txt --out vocab.txt/v.npz",
         ("vocab.txt", "is a file where a folder is needed")),
    Case("output into a bucket", "embed --workdir run text/all.txt --out gs://bucket/v.npz",
         ("gs://bucket/v.npz", "must be on a disk of this machine")),
    Case("a checkpoint that is not there", "embed --workdir run --out v.npz --checkpoint 3",
         ("--checkpoint 3",)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_mistake_is_named_in_one_line_and_leaves_nothing_behind(case, copy_of_run):
    refuses(case)

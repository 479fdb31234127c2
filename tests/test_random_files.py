"""A damaged file gives what its text says, or is refused in a line that names it; nothing else."""

import collections
import json
import pathlib
import shutil

import hf_folder
import ml_dtypes
import numpy as np
import pytest
import samples
from compare import assert_identical
from damage import REFUSED, damage, result
from etils import epath
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.checkpoints import base as base_lib
from bert_jax.checkpoints.base import Base, Moments
from bert_jax.config import Corpus
from bert_jax.interop import huggingface
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.text import documents, tokenizer, tokenizer_training, vocabulary
from bert_jax.text import sources as text_sources


def silent(line: str) -> None:
    pass


# --- vocabularies ---


@given(data=st.data())
def test_a_tokenizer_folder_is_as_it_was_saved(vocab_txt, model_file, tmp_path_factory, data):
    source, name = data.draw(
        st.sampled_from([(vocab_txt, "vocab.txt"), (model_file, "sentencepiece.model")])
    )
    folder = tmp_path_factory.getbasetemp() / f"folder of {name}"
    saved = tokenizer.load(source)
    saved.save(epath.Path(folder))
    file = folder / data.draw(st.sampled_from([name, "tokenizer.json"]))
    with damage(file, data, f"tokenizer folder/{file.name}"):
        found = result(lambda: tokenizer.load(folder), folder)
    if found is not REFUSED:
        assert (found.kind, found.case, found.sha256) == (saved.kind, saved.case, saved.sha256)
        assert [found.token(i) for i in range(found.size)] == [
            saved.token(i) for i in range(saved.size)
        ]


@pytest.fixture(scope="module")
def vocab_txt(tmp_path_factory):
    file = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    pieces = [*vocabulary.SPECIALS, ".", "w", "a", "##a", "##b", "東", *(f"w{i}" for i in range(9))]
    file.write_text("\n".join(pieces) + "\n")
    return file


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("model") / "a.model"
    lines = [f"wa w{i} streets and tokens of {i * 7} words" for i in range(300)]
    counted = samples.word_counts(collections.Counter(" ".join(lines).split()))
    file.write_bytes(tokenizer_training.train_sentencepiece(counted, 60, "unigram"))
    return file


# --- what others wrote ---


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A folder with every file that save_pretrained writes, one with shards, and their base."""
    root = tmp_path_factory.mktemp("hf")
    plain = epath.Path(hf_folder.write(root / "plain"))
    base = huggingface.read_folder(plain, silent)
    trained = LoadedModel(base.model, base.params, base.tokenizer, name="x")
    huggingface.write_folder(trained, "pretraining", "float32", epath.Path(root / "whole"))
    shutil.copytree(root / "whole", root / "shards")
    hf_folder.cut_in_shards(root / "shards")
    return root, base


FOLDERS = [
    ("whole", "config.json"),
    ("whole", "vocab.txt"),
    ("whole", "tokenizer.json"),
    ("whole", "tokenizer_config.json"),
    ("whole", "model.safetensors"),
    ("shards", "model.safetensors.index.json"),
    ("shards", "model-00002-of-00003.safetensors"),
]


@given(data=st.data())
def test_a_folder_of_others_gives_what_its_files_say(imported, data):
    root, whole = imported
    folder, name = data.draw(st.sampled_from(FOLDERS))
    file = root / folder / name
    with damage(file, data, f"imported/{name}") as content:
        found = result(
            lambda: huggingface.read_folder(epath.Path(root / folder), silent), file.parent
        )
        read = (
            result(lambda: base_lib.read_tensors(epath.Path(file)), file)
            if "-of-" in name
            else None
        )
    if found is REFUSED:
        return
    ours, theirs = found.tokenizer, whole.tokenizer
    pieces = [[tok.token(i) for i in range(tok.size)] for tok in (ours, theirs)]
    assert pieces[0] == pieces[1]
    # A file that leaves out how texts are put together is read by its library, as it says.
    assert ours.case == theirs.case or ours.kind == "library"
    if name == "model.safetensors" or read is not None:
        # A file of others carries no checksum: what it says is what is in it.
        said = reference_tensors(content)
        assert found.fresh == ()
        for ours, value in hf_folder.names_of(found).items():
            if ours in said:
                np.testing.assert_array_equal(value, said[ours], ours)
        assert read is None or read.keys() == said.keys()
    else:
        assert_identical(found.params, whole.params)
    if name != "config.json":
        assert found.model == whole.model
    else:
        require_said(found.model, json.loads(content))


def require_said(model, fields: dict) -> None:
    """The model is the one that a config.json's fields describe."""
    acts = {"gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh"}
    acts["gelu_pytorch_tanh"] = "gelu_tanh"
    assert model.hidden_act == acts[fields.get("hidden_act", "gelu")]
    for name in ("num_attention_heads", "hidden_dropout_prob", "attention_probs_dropout_prob"):
        default = {"num_attention_heads": 12}.get(name, 0.1)
        assert getattr(model, name) == fields.get(name, default)


def reference_tensors(content: bytes) -> dict[str, np.ndarray]:
    """A file of safetensors, read from the description of its format."""
    length = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    header.pop("__metadata__", None)
    kinds = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
    found = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        values = np.frombuffer(body[start:end], kinds[entry["dtype"]])
        found[name] = values.reshape(entry["shape"]).astype(np.float32)
    return found


# --- what we wrote: it carries checksums, so damage is always seen ---

BASE = [
    "base.json",
    "params.safetensors",
    "moments.safetensors",
    "tokenizer/tokenizer.json",
    "tokenizer/vocab.txt",
]


@pytest.fixture(scope="module")
def base(imported, tmp_path_factory):
    old = imported[1]
    moments = Moments(7, old.params, old.params)
    made = Base(old.model, old.params, old.tokenizer, "a folder", ("pooler",), moments)
    folder = epath.Path(tmp_path_factory.mktemp("base") / "base")
    base_lib.write(made, folder)
    return folder, base_lib.read(folder)


@given(data=st.data())
def test_a_base_is_as_it_was_written(base, data):
    folder, whole = base
    name = data.draw(st.sampled_from(BASE))
    file = pathlib.Path(folder / name)
    with damage(file, data, f"base/{name}"):
        found = result(lambda: base_lib.read(folder), folder)
    if found is not REFUSED:
        assert (found.model, found.source, found.fresh) == (whole.model, whole.source, whole.fresh)
        assert found.tokenizer.sha256 == whole.tokenizer.sha256
        assert found.moments.step == whole.moments.step
        assert_identical(found.params, whole.params)
        assert_identical(found.moments.mean, whole.moments.mean)


@given(data=st.data())
def test_a_tfds_source_gives_its_documents_or_none(source, data):
    folder, whole = source
    settings = Corpus(sources=(f"tfds_dir:{folder}",))
    name = data.draw(st.sampled_from(["dataset_info.json", "features.json", "train"]))

    def read():
        return [d.text for d in documents.read(settings)], text_sources.fingerprint(settings)

    (file,) = folder.rglob(f"*{name}*")
    with damage(file, data, f"tfds_dir/{name}"):
        found = result(read, folder)
    if found is not REFUSED:
        assert found[0] == whole


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A dataset of TFDS, and the texts in it."""
    from samples import text_dataset

    texts = [f"Article {i} é.\nIt goes on." for i in range(20)]
    return text_dataset(tmp_path_factory.mktemp("tfds"), texts), texts

"""Ready TFDS datasets, in both formats, without TensorFlow and without running their code."""

import json
import pathlib
import shutil
import struct

import pytest
import samples
import tensorflow_datasets as tfds

from bert_jax.config import Corpus
from bert_jax.errors import InputError
from bert_jax.text import documents, tfds_files
from bert_jax.text import sources as text_sources

ARTICLES = [
    {"title": f"Title {i}", "text": f"Heading\n\nArticle {i} é.\nIt goes on."} for i in range(300)
]


@pytest.fixture(scope="module")
def array_record(tmp_path_factory):
    return samples.text_dataset(tmp_path_factory.mktemp("tfds"), ARTICLES)


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    return crc ^ 0xFFFFFFFF


def as_tfrecord(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """The same dataset in a TFRecord file, framed here: TFDS needs TensorFlow to write one."""
    assert crc32c(b"123456789") == 0xE3069283  # RFC 3720

    def masked_crc(data: bytes) -> bytes:
        crc = crc32c(data)
        return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)

    target.mkdir()
    features = tfds.builder_from_directory(source).info.features
    with (target / "texts-train.tfrecord-00000-of-00001").open("wb") as file:
        for article in ARTICLES:
            record = features.serialize_example(features.encode_example(article))
            length = struct.pack("<Q", len(record))
            file.write(length + masked_crc(length) + record + masked_crc(record))
    (target / "features.json").write_text((source / "features.json").read_text())
    info = json.loads((source / "dataset_info.json").read_text())
    info["fileFormat"] = "tfrecord"
    (target / "dataset_info.json").write_text(json.dumps(info).replace("array_record", "tfrecord"))
    return target


@pytest.fixture(scope="module")
def tfrecord(array_record, tmp_path_factory):
    return as_tfrecord(array_record, tmp_path_factory.mktemp("tfrecord") / "1.0.0")


@pytest.mark.parametrize("kind", ["array_record", "tfrecord"])
def test_articles_are_read_from_either_format(kind, request):
    folder = request.getfixturevalue(kind)
    found = list(documents.read(Corpus(sources=(f"tfds_dir:{folder}",), layout="wrapped")))
    assert [d.text for d in found] == [article["text"] for article in ARTICLES]
    assert found[7].name == f"{folder}:7"
    titles = documents.read(Corpus(sources=(f"tfds_dir:{folder}",), text_field="title"))
    assert [d.text for d in titles] == [article["title"] for article in ARTICLES]


def test_splits_that_are_not_read_are_left_out_by_name(array_record, tmp_path):
    """Only the names of the splits matter here, so the other shards need not exist."""
    settings = Corpus(sources=(f"tfds_dir:{tmp_path}",))
    for path in array_record.glob("*.json"):
        shutil.copy(path, tmp_path)
    assert text_sources.describe_unread(settings) == []
    info = json.loads((tmp_path / "dataset_info.json").read_text())
    info["splits"] += [info["splits"][0] | {"name": name} for name in ("validation", "test")]
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    (line,) = text_sources.describe_unread(settings)
    assert str(tmp_path) in line and "(test, validation)" in line


def test_a_dataset_is_found_by_name_at_its_latest_version(array_record, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(array_record.parents[1]))
    found = documents.read(Corpus(sources=("tfds:texts",)))
    assert [d.text for d in found] == [article["text"] for article in ARTICLES]
    assert tfds_files.find("texts:1.0.0") == tfds_files.find("texts")
    for name in ("texts:2.0.0", "other"):
        with pytest.raises(InputError, match=r"no prepared dataset in .*TFDS_DATA_DIR"):
            tfds_files.find(name)


def test_versions_are_compared_as_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    for version in ("9.0.0", "10.0.0", "10.0.0.incompleteABC"):
        (tmp_path / "x" / version).mkdir(parents=True)
        (tmp_path / "x" / version / "dataset_info.json").touch()
    assert tfds_files.find("x").name == "10.0.0"


PLANTED = [
    lambda name: {"pythonClassName": name, "text": {}},
    lambda name: {"type": name, "content": {}},  # how older versions of TFDS wrote it
    lambda name: {
        "pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict",
        "featuresDict": {"features": {"text": {"python_class_name": name, "text": {}}}},
    },
    lambda name: {
        "type": "tensorflow_datasets.core.features.text_feature.Text",
        "proto_cls": name,
        "content": {},
    },
]


@pytest.mark.parametrize("features", PLANTED)
def test_a_feature_class_of_another_module_is_refused(features, tmp_path):
    """Before TFDS sees the folder; that nothing is imported: test_security."""
    (tmp_path / "features.json").write_text(json.dumps(features("planted.Feature")))
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(InputError, match=r"features\.json: feature class 'planted\.Feature'"):
        tfds_files.open_folder(tmp_path)


def test_what_cannot_be_read_is_named(array_record, tmp_path):
    def refused(folder, named, split="train"):
        with pytest.raises(InputError, match=named):
            list(tfds_files.records(folder, split))

    refused(tmp_path, str(tmp_path))
    with pytest.raises(InputError, match=r"dataset_info\.json"):
        text_sources.fingerprint(Corpus(sources=(f"tfds_dir:{tmp_path}",)))
    refused(array_record, "'test'.*train", "test")
    corpus = Corpus(sources=(f"tfds_dir:{array_record}",), text_field="body")
    with pytest.raises(InputError, match=rf"{array_record}:0: .*'body'.*'title'"):
        list(documents.read(corpus))
    info = (array_record / "dataset_info.json").read_text()
    (tmp_path / "features.json").write_text((array_record / "features.json").read_text())
    for content in ("{", "{}", info.replace("array_record", "riegeli")):
        (tmp_path / "dataset_info.json").write_text(content)
        refused(tmp_path, str(tmp_path))


@pytest.mark.parametrize("kind", ["array_record", "tfrecord"])
def test_damaged_records_are_named_by_their_file(kind, request, tmp_path):
    """A file cut at ArrayRecord's 64 KiB gives records without fields, and no error of its own."""
    folder = tmp_path / "1.0.0"
    shutil.copytree(request.getfixturevalue(kind), folder)
    (file,) = (path for path in folder.iterdir() if "-train." in path.name)
    whole = file.read_bytes()
    block = 1 << 16 if kind == "array_record" else len(whole) // 3
    changed = bytes(byte ^ 0xA5 for byte in whole[900:940])
    changed = whole[:900] + changed + whole[940:]
    for content in (changed, whole[: len(whole) // 2 + 100], whole[:block], None):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(InputError, match=rf"{file}: missing or damaged"):
            list(tfds_files.records(folder))
        file.touch()

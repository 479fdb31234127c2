"""Models by their names on the hub, against a local server that speaks its protocol."""

import os
import pathlib
import subprocess
import sys
import unittest.mock

import hf_folder
import hub_server
import pyarrow
import pyarrow.parquet
import pytest
import tuned
from broken import fails, said
from etils import epath

from bert_jax.checkpoints import base as base_lib
from bert_jax.interop import hub as hub_lib
from bert_jax.interop import importing

NAME = "owner/small-bert"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server with a model, and an empty cache; huggingface_hub is imported afresh."""

    def forget():
        for name in [name for name in sys.modules if name.split(".")[0] == "huggingface_hub"]:
            del sys.modules[name]

    monkeypatch.chdir(tmp_path)
    with hub_server.serve() as (server, address):
        variables = {"HF_ENDPOINT": address, "HF_HOME": "hf", "HF_HUB_DISABLE_XET": "1"}
        variables |= {"BERT_JAX_CACHE_DIR": "cache", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        kept = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "huggingface_hub"}
        forget()
        folder = hf_folder.as_sentence_transformers(hf_folder.write(tmp_path / "folder"))
        server.add(NAME, files_of(folder) | {"pytorch_model.bin": b"x", "onnx/config.json": b"{}"})
        yield server
        forget()
        sys.modules.update(kept)


def files_of(folder):
    paths = (path for path in pathlib.Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def downloads(hub):
    return {line.split()[1].split("/")[-1] for line in hub.requests if "/lfs/" in line}


def test_a_model_is_imported_by_its_name_like_its_folder(hub):
    said(f"import {NAME} --workdir base")
    said("import folder --workdir of_folder")
    ours, wanted = (base_lib.read(epath.Path(name)) for name in ("base", "of_folder"))
    assert ours.sha256 == wanted.sha256 and ours.vectors == wanted.vectors
    commit = hub.repositories[NAME].refs["main"]
    assert ours.source == f"{NAME}, commit {commit}"
    asked = [line for line in hub.requests if "resolve" in line]
    assert not any("pytorch_model.bin" in line or "onnx" in line for line in asked)
    # Nothing is downloaded again.
    hub.requests.clear()
    said(f"import {NAME}@{commit} --workdir again")
    assert not downloads(hub)


def test_a_revision_and_shards(hub, tmp_path):
    other = hf_folder.write(tmp_path / "other", {n: t + 1 for n, t in hf_folder.TENSORS.items()})
    hf_folder.cut_in_shards(other)
    files = files_of(other)
    del files["vocab.txt"], files["config.json"]
    repository = hub.repositories[NAME]
    repository.refs["refs/pr/1"] = repository.refs["main"]
    repository.commit({"config.json": b"{}"}, "broken")
    del repository.commits[repository.refs["main"]]["model.safetensors"]
    repository.commit(files, "refs/pr/1")
    said(f"import {NAME}@refs/pr/1 --workdir base")
    said("import other --workdir of_folder")
    ours, wanted = (base_lib.read(epath.Path(name)) for name in ("base", "of_folder"))
    assert ours.sha256 == wanted.sha256
    fails(f"import {NAME}@nowhere --workdir x", NAME, "nowhere")
    fails(f"import {NAME} --workdir x", NAME, "model.safetensors", "refs/pr/")
    # The weights of an architecture that is not supported are not downloaded.
    hub.requests.clear()
    fails(f"import {NAME}@broken --workdir x", "config.json")
    assert not downloads(hub) and not pathlib.Path("x").exists()


def test_a_local_folder_wins(hub, tmp_path):
    (tmp_path / "owner").mkdir()
    hf_folder.write(tmp_path / NAME)
    hub.requests.clear()
    said(f"import {NAME} --workdir base")
    fails("import owner/other --workdir x", "owner/other", "no such folder")
    assert not hub.requests and hub_lib.find_model(f"hf://{NAME}@v1") == (NAME, "v1")


@pytest.mark.parametrize("name", ["model.safetensors", "vocab.txt"])
def test_a_file_with_another_hash_is_refused_and_forgotten(hub, name):
    def flip(path, content):
        return content[:-2] + bytes([content[-2] ^ 1]) + content[-1:] if path == name else content

    hub.change = flip
    fails(f"import {NAME} --workdir base", NAME, name, "hash")
    assert not pathlib.Path("base").exists()
    hub.change = lambda path, content: content
    said(f"import {NAME} --workdir base")


def test_a_download_that_is_cut_continues_where_it_ended(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 16)  # so a part is on disk
    hub.cuts = 2
    said(f"import {NAME} --workdir base")
    size = len(files_of("folder")["model.safetensors"])
    ranges = [line.partition("=")[2] for line in hub.requests if "/lfs/" in line and "GET" in line]
    assert ranges[:2] == ["", f"{size // 2}-"] and len(ranges) == 3
    base_lib.read(epath.Path("base"))


def test_what_the_hub_refuses_is_said_in_one_line(hub):
    for kind, word in (("gated", "access"), ("private", "private")):
        hub.add(f"owner/{kind}", {}, **{kind: True})
        fails(f"import owner/{kind} --workdir x", f"owner/{kind}", word, "HF_TOKEN")
    fails("import owner/unknown --workdir x", "owner/unknown", os.environ["HF_ENDPOINT"])
    fails("import unknown-name --workdir x", "unknown-name", "no such folder")
    hub.status = 503
    fails(f"import {NAME} --workdir x", NAME, "503", code=74)
    with unittest.mock.patch.dict(sys.modules, huggingface_hub=None):  # undone before `hub` ends
        fails(f"import {NAME} --workdir x", NAME, "[hub]")


@pytest.mark.long
def test_offline_what_is_in_the_cache_is_used(hub, monkeypatch):
    said(f"import {NAME} --workdir base")
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}

    def run(*words):
        command = [sys.executable, "-m", "bert_jax.cli", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    hub.requests.clear()
    assert run("import", NAME, "--workdir", "offline").returncode == 0
    result = run("import", "owner/other", "--workdir", "x")
    assert result.returncode == 2 and "owner/other" in result.stderr
    assert result.stderr.count("\n") == 1 and not hub.requests


@pytest.mark.long
def test_commands_accept_a_hub_name_as_a_base_and_import_it_once(hub):
    model = hub_lib.fetch_base(NAME)
    assert base_lib.is_base(epath.Path(model)) and hub_lib.fetch_base("a/b/c") == "a/b/c"
    hub.requests.clear()
    pathlib.Path("texts").write_text("w5 w6\n")
    said(f"embed --workdir {NAME} --out v.npz texts")
    assert pathlib.Path("v.npz").exists() and not downloads(hub)
    modified = os.stat(f"{model}/base.json").st_mtime_ns
    pathlib.Path("t.tsv").write_text("sentence\tlabel\n" + "w5 w6\ta\nw7 w8\tb\n" * 4)
    words = f"finetune --kind classify --train t.tsv --validation t.tsv --from {NAME} --workdir r"
    said(*words.split(), "--set=epochs=1", "--set=task.max_sequence_length=16")
    assert os.stat(f"{model}/base.json").st_mtime_ns == modified
    assert model in pathlib.Path("r/experiment.json").read_text()


# --- upload ---------------------------------------------------------------------------------------


def test_an_export_is_pushed_with_its_card(hub, monkeypatch):
    importing.import_weights(epath.Path("folder"), epath.Path("base"), None, lambda line: None)
    words = "export --workdir base --as encoder --push me/mine --out"
    fails(f"{words} out", "me/mine", "HF_TOKEN")
    assert not pathlib.Path("out").exists()
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    fails(words.replace("me/mine", "mine") + " out", "--push", "OWNER/NAME")
    assert "me/mine" in said(f"{words} out")
    repository = hub.repositories["me/mine"]
    files = repository.commits[repository.refs["main"]]
    assert files == files_of("out") | {".gitattributes": b""} and repository.private
    card = files["README.md"].decode()
    assert 'BertModel.from_pretrained("me/mine")' in card
    said("import me/mine --workdir back")
    back, base = (base_lib.read(epath.Path(name)) for name in ("back", "base"))
    assert base.params["encoder"].keys() == back.params["encoder"].keys()
    hub.status = 500
    fails(f"{words} second", "me/mine", code=74)
    assert not pathlib.Path("second").exists()


@pytest.mark.nightly
def test_all_checkpoints_become_branches(hub, monkeypatch, tmp_path):
    tuned.write_base(tmp_path / "base")
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    tuned.write_task(tmp_path, "classify", epochs=3)
    tuned.finetune("--set=run.checkpoint_every=2", "--set=run.keep_checkpoints=9")
    steps = sorted(int(path.name) for path in pathlib.Path("run/checkpoints").iterdir())
    assert len(steps) > 1
    said("export --workdir run --all-checkpoints --push me/mine --out out")
    repository = hub.repositories["me/mine"]
    assert repository.refs.keys() == {"main", *(f"step-{step}" for step in steps)}
    contents = {ref: repository.commits[commit] for ref, commit in repository.refs.items()}
    for step in steps:
        assert contents[f"step-{step}"] == files_of(f"out/step-{step}") | {".gitattributes": b""}
    assert contents["main"] == contents[f"step-{steps[-1]}"]
    weights = {contents[f"step-{step}"]["model.safetensors"] for step in steps}
    assert len(weights) == len(steps)
    fails("export --workdir base --as encoder --all-checkpoints --out x", "--all-checkpoints")
    fails("export --workdir run --all-checkpoints --checkpoint best --out x", "--checkpoint")


# --- text -----------------------------------------------------------------------------------------


def test_a_corpus_is_read_from_a_data_set_of_the_hub(hub, tmp_path):
    pyarrow.parquet.write_table(
        pyarrow.table({"text": [f"Text {number}." for number in range(50)]}), "a.parquet"
    )
    content = pathlib.Path("a.parquet").read_bytes()
    hub.add("datasets/owner/texts", {"data/a.parquet": content, "README.md": b"no text"})
    code = (
        "from bert_jax.config import Corpus; from bert_jax.text import documents, sources; "
        "source = Corpus(sources=('parquet:hf://datasets/owner/texts/**/*.parquet',)); "
        "print([d.text for d in documents.read(source)]); print(sources.fingerprint(source))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    texts, files = result.stdout.splitlines()
    assert texts == str([f"Text {number}." for number in range(50)]), result.stderr
    assert f"'bytes': {len(content)}" in files

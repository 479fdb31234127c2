"""Data is data: nothing that lies in a folder of others runs, or makes us write elsewhere."""

import ast
import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys

import hf_folder
import numpy as np
import pytest
import small_run
from broken import call, fails, tree
from etils import epath

from bert_jax.data import build
from bert_jax.errors import InputError
from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.locks import lock
from bert_jax.storage.workdir import (
    with_checksum,
)

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = sorted((ROOT / "bert_jax").rglob("*.py"))
CODE = "import pathlib\npathlib.Path({ran!r}).touch()\nclass Feature: pass\n"
# As a hostile folder would call them: modules that we import.
MODULES = ("planted", "json", "numpy", "jax", "sentencepiece", "sitecustomize", "modeling_evil")


# --- what runs code ---

_RUNS = {
    "pickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "runpy",
    "importlib",
    "imp",
    "multiprocessing",  # whose connections send pickles
}
_CALLS = {"eval", "exec", "compile", "__import__"}
_ATTRIBUTES = {"import_module", "spec_from_file_location", "exec_module", "run_path", "find_class"}


def code_runners(path: pathlib.Path) -> set[str]:
    """What of a module can turn a file into code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] in _RUNS}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} if node.module.split(".")[0] in _RUNS else set()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= {node.func.id} & _CALLS
        elif isinstance(node, ast.Attribute):
            found |= {node.attr} & _ATTRIBUTES
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code"):
            found.add(node.arg)
    return found - {"importlib.metadata", "importlib.util"}


def test_experiment_files_are_the_one_thing_that_runs_as_code():
    found = {path.relative_to(ROOT).as_posix(): code_runners(path) for path in SOURCES}
    assert {path: names for path, names in found.items() if names} == {
        "bert_jax/config/code.py": {"runpy", "run_path", "importlib", "compile", "exec"},
        # Of what a process and its workers send each other through pipes.
        "bert_jax/data/workers.py": {"multiprocessing", "pickle"},
        # Bytes alone, read as JSON.
        "bert_jax/distributed/rendezvous.py": {"multiprocessing.connection"},
        # Modules of ours: where one of its names is asked for, and the kinds of tasks.
        "bert_jax/__init__.py": {"importlib", "import_module"},
        "bert_jax/config/task_kinds.py": {"importlib", "import_module"},
    }
    assert "treat one like a script" in (ROOT / "README.md").read_text()


# --- a folder of others ---


class Bomb:
    """Its pickle makes a file."""

    def __init__(self, ran: pathlib.Path):
        self._ran = ran

    def __reduce__(self):
        return os.mkdir, (str(self._ran),)


def plant(folder: pathlib.Path, ran: pathlib.Path) -> None:
    """Modules and pickles in a folder and those below, each of which would make `ran`."""
    for place in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        for name in MODULES:
            (place / f"{name}.py").write_text(CODE.format(ran=str(ran)))
        bomb = pickle.dumps(Bomb(ran))
        for name in ("state.pkl", "pytorch_model.bin", "training_args.bin", "cache.pickle"):
            (place / name).write_bytes(bomb)
        np.save(place / "objects.npy", np.array([Bomb(ran)], object), allow_pickle=True)


def names_a_module(folder: pathlib.Path) -> None:
    """Everything in a corpus that can name a class names ours, under a checksum that is right."""
    (path,) = folder.rglob("features.json")
    path.write_text(json.dumps({"pythonClassName": "planted.Feature", "text": {}}))
    manifest = json.loads((folder / "manifest.json").read_text())
    name = path.relative_to(folder).as_posix()
    manifest["files"] = build.hash_files(epath.Path(folder))
    assert name in manifest["files"]
    (folder / "manifest.json").write_text(json.dumps(with_checksum(manifest)))


def test_a_corpus_whose_features_name_a_module_is_refused_and_imports_nothing(
    copy_of_run, tmp_path, monkeypatch
):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "planted.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    names_a_module(pathlib.Path("corpus"))
    shutil.rmtree("corpus/stream")
    fails("show --workdir run", "features.json: feature class 'planted.Feature'")
    assert "planted" not in sys.modules and not (tmp_path / "ran").exists()
    assert not pathlib.Path("corpus/stream").exists()


def test_pickled_weights_are_named_and_not_read(tmp_path):
    folder = hf_folder.write(tmp_path / "hf")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    assert call(["import", str(folder), "--workdir", str(tmp_path / "base")]) == (0, "")
    (folder / "model.safetensors").unlink()
    why = "pytorch_model.bin: a pickle, which may run code"
    remedy = ("weights_only=True", "model.safetensors")
    fails(["import", str(folder), "--workdir", str(tmp_path / "other")], why, *remedy)
    assert not (tmp_path / "ran").exists()


COMMANDS = [
    "prepare small.py --workdir run --verify",
    "extend small.py --workdir run --set phases.1.steps=9",
    "evaluate --workdir run",
    "show --workdir run --rows 1",
    "config --workdir run",
    "predict --workdir run wa",
    "embed --workdir run text/all.txt --pooling tokens --out run/vectors.npz",
    "report run",
    "doctor run",
    "doctor corpus",
    "import run --workdir run/base",
    "export --workdir run --as pretraining --out run/exported",
    "import hf --workdir run/imported",
    "predict --workdir run/imported w7",
    "export --workdir run/imported --as masked_lm --out run/again",
]


@pytest.mark.nightly
def test_no_command_runs_what_lies_in_its_folders_or_writes_elsewhere(copy_of_run, tmp_path):
    ran, outside = tmp_path / "ran", tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    hf_folder.write(copy_of_run / "hf", config={"auto_map": {"AutoModel": "planted.Feature"}})
    hostile_run(copy_of_run / "run", outside)
    for folder in ("run", "corpus", "hf"):
        plant(copy_of_run / folder, ran)
    place = {"XDG_CACHE_HOME": "cache", "TMPDIR": "tmp", "MPLCONFIGDIR": "cache/matplotlib"}
    environment = {name: str(tmp_path / folder) for name, folder in place.items()}
    for folder in environment.values():
        os.makedirs(folder, exist_ok=True)
    settings = small_run.settings(devices=1)
    writable = ["run", "corpus", *environment.values(), settings["JAX_COMPILATION_CACHE_DIR"]]
    shutil.move("small.py", tmp_path / "small.py")  # a script of the user's own, which runs
    words = [command.replace("small.py", f"{tmp_path}/small.py").split() for command in COMMANDS]
    asked = writable, words
    here = tree(outside)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "audited.py"), ".", *map(json.dumps, asked)],
        env={**os.environ, **settings, **environment, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    said = json.loads(done.stdout)
    assert not said["found"], "\n".join(sorted(set(said["found"])))
    for command, (code, err) in zip(COMMANDS, said["codes"], strict=True):
        assert code == 0 or (command.startswith("doctor") and code == 1), (command, err)
    assert not ran.exists() and tree(outside) == here


def hostile_run(run: pathlib.Path, outside: pathlib.Path) -> None:
    """Names and links that lead out of a run, where nothing legitimate can be."""
    checkpoints = run / "checkpoints"
    (checkpoints / "40.orbax-checkpoint-tmp").symlink_to(outside)
    newest = checkpoints / "30"
    shutil.copytree(checkpoints / "22", newest)
    found = json.loads((newest / "_CHECKPOINT_METADATA").read_text())
    found["item_handlers"] = {"state": "planted.Feature"}
    found["custom_metadata"] |= {"step": "../../../outside", "experiment": {"name": "../../x"}}
    (newest / "_CHECKPOINT_METADATA").write_text(json.dumps(found))
    (run / "report.html").symlink_to(outside / "file")
    origin = json.loads((run / "origin.json").read_text())
    origin |= {"experiment": "../../outside/file", "parent": "<script>alert(1)</script>"}
    (run / "origin.json").write_text(json.dumps(with_checksum(origin)))


# --- links ---


@pytest.mark.parametrize("target", ["file", "none"])
def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_stays(target, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(tmp_path / target)
    before = tree(tmp_path)
    with (
        pytest.raises(InputError, match=r"run/lock: is a link; remove it"),
        lock(epath.Path(tmp_path / "run")),
    ):
        pass
    assert tree(tmp_path) == before


def test_lines_are_not_written_through_a_link(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"metrics\.jsonl: is a link; remove it"):
        JsonLines(epath.Path(tmp_path / "metrics.jsonl")).append({"step": 1})
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["stream", "stream/train"])
def test_a_stream_is_not_made_through_a_link(name, copy_of_run, tmp_path):
    """What lies there would be removed first."""
    (tmp_path / "outside" / "train").mkdir(parents=True)
    (tmp_path / "outside" / "train" / "file").write_text("mine")
    target = tmp_path / "outside" / name.removeprefix("stream").removeprefix("/")
    shutil.rmtree(f"corpus/{name}")
    pathlib.Path(f"corpus/{name}").symlink_to(target)
    before = tree(tmp_path / "outside")
    fails("show --workdir run", f"corpus/{name}: is a link; remove it")
    assert tree(tmp_path / "outside") == before

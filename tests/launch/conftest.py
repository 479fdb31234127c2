"""A bucket, a gcloud and a kubectl, for launches that reach none of them."""

import dataclasses
import importlib.util
import json
import pathlib
import signal
import sys

import fake_gcs
import fsspec
import pytest

from launch import checks, gke, shipping, tpu_vm

FAKE = pathlib.Path(__file__).with_name("fake_gcloud.py")
KUBECTL = FAKE.with_name("fake_kubectl.py")
GKE_IMAGE = "registry.example/bert/bert-jax:1"
sys.path.insert(0, str(FAKE.parent))

import fake_gcloud  # noqa: E402


@pytest.fixture(scope="module")
def bucket():
    """Objects of a server in memory, by name."""
    if importlib.util.find_spec("gcsfs") is None:  # its import reads the environment
        pytest.skip("needs the [gcs] extra")
    with fake_gcs.serve() as (objects, environment), pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setitem(fsspec.config.conf["gs"], "token", "anon")
        yield objects


@dataclasses.dataclass
class Gcloud:
    """What tests see of the fake."""

    folder: pathlib.Path

    def play(self, hosts: int = 4, **answers: list[dict]) -> None:
        """Answers to come, by kind; `.` is written `_` in a kind."""
        play = {kind.replace("_sh", ".sh"): list(said) for kind, said in answers.items()}
        (self.folder / "play.json").write_text(json.dumps(play))
        (self.folder / "hosts.json").write_text(json.dumps(hosts))

    def rent(self, name: str, state: str, hosts: list[str]) -> None:
        """Puts something there before anything is launched."""
        there = {name: {"state": state, "hosts": hosts}}
        (self.folder / "rented.json").write_text(json.dumps(there))

    @property
    def rented(self) -> dict:
        return json.loads((self.folder / "rented.json").read_text())

    @property
    def calls(self) -> list[list[str]]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def kinds(self) -> list[str]:
        """Kinds of the calls, in order, a kind that repeats itself once."""
        kinds = [fake_gcloud.kind_of(call)[0] for call in self.calls]
        return [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]


@pytest.fixture
def gcloud(tmp_path, monkeypatch):
    """A gcloud on the path, that rents nothing and goes well unless told otherwise."""
    folder, programs = tmp_path / "gcloud", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    program = programs / "gcloud"
    program.write_text(f"#!{sys.executable} -SEs\n{FAKE.read_text()}")
    program.chmod(0o755)
    (folder / "rented.json").write_text("{}")
    monkeypatch.setenv("FAKE_GCLOUD", str(folder))
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setenv("BERT_JAX_CACHE_DIR", str(tmp_path / "cache"))
    fake = Gcloud(folder)
    fake.play()
    return fake


@pytest.fixture
def ctrl_c():
    """A worker of pytest's may leave Ctrl-C to its parent; here it is ours."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def shipped(monkeypatch, ctrl_c):
    """The wheel is built by a test of its own."""

    def put_together(spec, commit, say):
        shipping.staging(spec.name).mkdir(parents=True, exist_ok=True)
        return ["/staging/a.whl", "/staging/run.sh"]

    monkeypatch.setattr(shipping, "put_together", put_together)


@pytest.fixture
def workdir(request):
    return f"gs://b/{request.node.name.partition('[')[0]}"


@pytest.fixture
def launch(bucket, shipped, workdir, capfd):
    """Launches; returns the exit code and what was said."""

    def run(*flags: str) -> tuple[int, str]:
        argv = ["experiments/mini.py", "--workdir", workdir, "--topology", "v3:4x4"]
        argv += ["--zone", "z-a", "--name", "mini", "--force", ",".join(checks.NAMES)]
        code = tpu_vm.main([*argv, *(flags or ("--delete-when-done",))], lambda seconds: None)
        said = capfd.readouterr()
        return code, said.out + said.err

    return run


class Kubectl:
    """What tests see of the fake."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def play(self, **answers: list[dict]) -> None:
        """Answers to come, by verb."""
        (self.folder / "play.json").write_text(json.dumps(answers))

    @property
    def calls(self) -> list[list[str]]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def verbs(self) -> list[str]:
        """Of the calls, in order."""
        words = [[word for word in call if not word.startswith("-")] for call in self.calls]
        return ["pods" if word[:2] == ["get", "pods"] else word[0] for word in words]

    @property
    def holds(self) -> dict:
        """What the cluster holds, by kind."""
        return json.loads((self.folder / "cluster.json").read_text())


@pytest.fixture
def kube(tmp_path, monkeypatch, ctrl_c):
    """A kubectl on the path, of a cluster that holds nothing, where all goes well."""
    folder, programs = tmp_path / "kubectl", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    program = programs / "kubectl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {KUBECTL} "$@"\n')
    program.chmod(0o755)
    (folder / "cluster.json").write_text("{}")
    (folder / "play.json").write_text("{}")
    monkeypatch.setenv("FAKE_KUBECTL", str(folder))
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setenv("BERT_JAX_CACHE_DIR", str(tmp_path / "cache"))
    return Kubectl(folder)


@pytest.fixture
def launch_gke(bucket, workdir, capfd):
    """The same on GKE; returns the exit code and what was said."""

    def run(*flags: str) -> tuple[int, str]:
        argv = ["experiments/mini.py", "--workdir", workdir, "--topology", "v5e:4x4"]
        argv += ["--image", GKE_IMAGE, "--name", "mini", "--force", ",".join(checks.NAMES)]
        code = gke.main([*argv, *flags])
        said = capfd.readouterr()
        return code, said.out + said.err

    return run

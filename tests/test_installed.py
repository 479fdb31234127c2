"""What is installed holds launchers and experiments, under the package's own name alone."""

import configparser
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from bert_jax import cli, config
from bert_jax.errors import InputError

ROOT = pathlib.Path(__file__).parents[1]
# Data of the package that a run needs.
NEEDED = {
    *("py.typed", "experiments/tiny.py", "experiments/tasks/sst2.py"),
    "experiments/sample_text/README.md",
}


def test_the_package_s_data_are_the_shipped_experiments_and_their_text():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    package = ROOT / "bert_jax"
    patterns = setup["options.package_data"]["bert_jax"].split(", ")
    found = {p.relative_to(package).as_posix() for glob in patterns for p in package.glob(glob)}
    below = {p.relative_to(ROOT).as_posix() for p in (ROOT / "experiments").rglob("*")}
    assert found - {"py.typed"} == {
        name for name in below if (ROOT / name).is_file() and "__py" not in name
    }
    assert found >= NEEDED
    assert setup["options.packages.find"]["include"] == "bert_jax*"


def test_a_bare_name_is_that_of_a_shipped_experiment_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config.load("tiny").name == "tiny"
    assert config.load("sst2", config.Finetuning).name == "sst2"
    with pytest.raises(InputError, match=r"^tinny: no such experiment file; did you mean tiny"):
        config.load("tinny")
    with pytest.raises(InputError, match=r"by name there are .*bert_base, .* tiny"):
        config.load("mine.py")


def test_launchers_are_a_command_of_the_package(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        cli.main(["launch", "local"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        "launch: name an EXPERIMENT, or a COMMAND after --; see bert-jax launch --help\n"
    )
    assert cli.main(["launch", "local", "--dry-run", "tiny"]) == 0
    assert f"{sys.executable} -m bert_jax.launch local" in capsys.readouterr().out


@pytest.mark.nightly
def test_the_wheel_works_where_there_is_no_checkout(tmp_path):
    source = tmp_path / "source"
    for name in ("bert_jax", "launch", "experiments"):
        dull = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=dull)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        file.extractall(tmp_path / "installed")
    tops = {name.partition("/")[0] for name in names}
    assert tops - {top for top in tops if top.endswith(".dist-info")} == {"bert_jax"}
    assert names >= {f"bert_jax/{name}" for name in NEEDED} | {"bert_jax/launch/tpu_vm.sh"}
    shutil.rmtree(source)

    def run(*words):
        environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
        command = [sys.executable, "-P", "-m", "bert_jax.cli", *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        ).stdout

    short = ("--set", "phases.0.steps=2", "--set", "optimizer.warmup_steps=1")
    assert "finished: step 2" in run("pretrain", "tiny", *short)
    saved = config.load(str(tmp_path / "runs" / "tiny" / "experiment.json"))
    assert str(tmp_path / "installed") in saved.corpus.sources[0]
    assert "-m bert_jax.launch local" in run("launch", "local", "--dry-run", "tiny")
